"""Which of a detector's proposals become regions: bottom-up-attention's rule, for Faster-RCNNs.

Shapes: P proposals, C classes without the background, R channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import nms

from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError


@dataclass(frozen=True)
class Choice:
    """How many regions, and which.

    Args:
        regions: at most so many, the best.
        nms: overlap (intersection over union) above which the lower of two boxes of one class is dropped.
        min_score: regions below it are left out,
        min_regions: but not the best so many. Bottom-up-attention's "10 to 100" is ``regions=100, min_score=0.2``.
    """

    regions: int = 36
    nms: float = 0.3
    min_score: float = 0.0
    min_regions: int = 10

    def __post_init__(self) -> None:
        for name in ("regions", "min_regions"):
            if getattr(self, name) < 1:
                raise CoderError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 1 or more")
        for name in ("nms", "min_score"):
            if not 0 <= getattr(self, name) <= 1:
                raise CoderError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be from 0 to 1")


def select(scores: Tensor, boxes: Tensor, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen proposals, their classes and their scores, by falling score (ties: the lower number first).

    A proposal scores as the best of the classes in which it outlives that class's suppression, as in
    bottom-up-attention; one that outlives none is no region, so there may be fewer than ``choice.regions``.

    Args:
        scores: [P, C] probabilities, P at least 1.
        boxes: [P, 4], or [P, C, 4] where each class has its own.
    """
    best = torch.full_like(scores, -1.0)
    for number in range(scores.shape[1]):
        kept = nms(boxes if boxes.ndim == 2 else boxes[:, number], scores[:, number], choice.nms)
        best[kept, number] = scores[kept, number]
    conf, classes = best.max(1)
    conf, order = conf.sort(descending=True, stable=True)
    wanted = conf >= choice.min_score
    wanted[: choice.min_regions] = True
    wanted &= conf >= 0
    wanted[choice.regions :] = False
    chosen = order[wanted]
    return chosen, classes[chosen], conf[wanted]


def to_regions(
    features: Tensor,
    boxes: Tensor,
    *,
    classes: Tensor,
    conf: Tensor,
    inside: tuple[int, int],
    size: tuple[int, int],
    extras: Mapping[str, Tensor] | None = None,
) -> Regions:
    """Chosen proposals as :class:`Regions`.

    Args:
        features: [L, R].
        boxes: [L, 4] in pixels of the resized picture, whose (height, width) ``inside`` is.
        classes, conf: [L]; they become ``objects_id``, counted without the background, and ``objects_conf``.
        size: (width, height) of the picture itself, to whose pixels the boxes are scaled.
    """
    scale = torch.tensor([size[0] / inside[1], size[1] / inside[0]] * 2, device=boxes.device)
    given = {"objects_id": classes.long(), "objects_conf": conf.float(), **(extras or {})}
    return Regions(
        features.float().cpu().numpy(),
        (boxes.float() * scale).cpu().numpy(),
        size,
        extras={name: each.cpu().numpy() for name, each in given.items()},
    )


def or_whole(proposals: list[Tensor], sizes: list[tuple[int, int]]) -> list[Tensor]:
    """A picture without any proposal is one region."""
    return [
        each if len(each) else each.new_tensor([[0, 0, width, height]])
        for each, (height, width) in zip(proposals, sizes, strict=True)
    ]
