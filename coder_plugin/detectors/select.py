"""Select which of a Faster-RCNN's proposals become regions, by bottom-up-attention's rule.

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

_FIRST, _MORE = 32, 8  # (proposal, class) pairs examined first per requested region, and their factor in each retry


@dataclass(frozen=True)
class Choice:
    """Which and how many regions are selected.

    Args:
        regions: maximum number, >= 1.
        nms: overlap (intersection over union, 0 to 1) above which the lower-scored of two boxes of a class is dropped.
        min_score: score in [0, 1] below which regions are left out.
        min_regions: the best ``min_regions`` stay whatever their score; >= 1. Bottom-up-attention's "10 to 100" is
            ``regions=100, min_score=0.2``.

    Raises:
        CoderError: a value out of range.
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
    """The selected proposals, their classes and their scores, by descending score (ties: lower index first).

    A proposal's score is the highest among the classes whose suppression it survives, as in bottom-up-attention. A proposal
    that survives in no class is not a region, so there may be fewer than ``choice.regions``.

    Survival depends on higher scores only. So the highest-scored pairs of proposal and class are examined first, and more
    pairs only while too few proposals survive.

    Args:
        scores: [P, C] probabilities, P at least 1.
        boxes: [P, 4], or [P, C, 4] where each class has its own.

    Raises:
        ValueError: a score is NaN or infinite.
    """
    if not scores.isfinite().all():
        raise ValueError("class scores contain NaN or infinite numbers")
    pairs = _FIRST * choice.regions
    while True:
        pairs = min(pairs, scores.numel())
        floor = scores.flatten().topk(pairs).values[-1]
        conf, classes = _best(scores, boxes, floor, choice.nms)
        certain = (conf >= floor).sum()  # all others score below the floor
        enough = (certain >= choice.regions) | ((certain >= choice.min_regions) & (floor <= choice.min_score))
        if pairs == scores.numel() or enough:
            break
        pairs *= _MORE
    conf, order = conf.sort(descending=True, stable=True)
    selected = conf >= choice.min_score
    selected[: choice.min_regions] = True
    selected &= conf >= 0
    selected[choice.regions :] = False
    proposals = order[selected]
    return proposals, classes[proposals], conf[selected]


def _best(scores: Tensor, boxes: Tensor, floor: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Each proposal's highest score among the classes in which it survives, and that class: [P] each.

    Exact for scores of at least ``floor``. Other proposals have a lower score, or -1.
    """
    proposals, classes = (scores >= floor).nonzero(as_tuple=True)
    pairs = boxes[proposals].double() if boxes.ndim == 2 else boxes[proposals, classes].double()
    # Boxes of different classes are moved apart. In float32 their overlaps would then be rounded.
    apart = pairs + (classes * (pairs.max() - pairs.min() + 1))[:, None]
    kept = nms(apart, scores[proposals, classes].double(), threshold)
    best = torch.full_like(scores, -1.0)
    best[proposals[kept], classes[kept]] = scores[proposals[kept], classes[kept]]
    conf, index = best.max(1)
    return conf, index


def to_regions(
    features: Tensor,
    boxes: Tensor,
    *,
    classes: Tensor,
    conf: Tensor,
    resized: tuple[int, int],
    size: tuple[int, int],
    extras: Mapping[str, Tensor] | None = None,
) -> Regions:
    """Selected proposals as :class:`Regions`.

    Args:
        features: [L, R].
        boxes: [L, 4] in pixels of the resized picture, whose (height, width) is ``resized``.
        classes, conf: [L]; they become ``objects_id`` (counted without the background) and ``objects_conf``.
        size: (width, height) of the original picture, to whose pixels the boxes are scaled.
    """
    scale = torch.tensor([size[0] / resized[1], size[1] / resized[0]] * 2, device=boxes.device)
    arrays = {"objects_id": classes.long(), "objects_conf": conf.float(), **(extras or {})}
    return Regions(
        features.float().cpu().numpy(),
        (boxes.float() * scale).cpu().numpy(),
        size,
        extras={name: each.cpu().numpy() for name, each in arrays.items()},
    )


def at_least_one(proposals: list[Tensor], sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Give a picture without proposals one box, the whole picture."""
    return [
        each if len(each) else each.new_tensor([[0, 0, width, height]])
        for each, (height, width) in zip(proposals, sizes, strict=True)
    ]
