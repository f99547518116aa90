"""Which of a detector's proposals become regions: bottom-up-attention's rule, for Faster-RCNNs.

Shapes: P proposals, C classes without the background, R channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coder_plugin.data.regions.base import Regions
from coder_plugin.errors import CoderError

_FIRST, _MORE = 32, 8  # pairs for each region wanted, looked at first, and how many times as many next


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

    What outlives suppression depends on higher scores alone. So the highest pairs of a proposal and a class are looked
    at first, and more of them only while too few proposals outlive these.

    Args:
        scores: [P, C] probabilities, P at least 1.
        boxes: [P, 4], or [P, C, 4] where each class has its own.

    Raises:
        ValueError: a score is NaN or infinite.
    """
    if not scores.isfinite().all():
        raise ValueError("class scores hold NaN or infinite numbers")
    pairs = _FIRST * choice.regions
    while True:
        pairs = min(pairs, scores.numel())
        floor = scores.flatten().topk(pairs).values[-1]
        conf, classes = _best(scores, boxes, floor, choice.nms)
        known = (conf >= floor).sum()  # what else survives has less than the floor
        enough = (known >= choice.regions) | ((known >= choice.min_regions) & (floor <= choice.min_score))
        if pairs == scores.numel() or enough:
            break
        pairs *= _MORE
    conf, order = conf.sort(descending=True, stable=True)
    wanted = conf >= choice.min_score
    wanted[: choice.min_regions] = True
    wanted &= conf >= 0
    wanted[choice.regions :] = False
    chosen = order[wanted]
    return chosen, classes[chosen], conf[wanted]


def _best(scores: Tensor, boxes: Tensor, floor: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """[P] and [P]: the score and class in which a proposal survives best, right where that is ``floor`` or more.

    Other proposals have a lower score, or -1.
    """
    counts = (scores >= floor).sum(0)
    classes = counts.nonzero()[:, 0]
    values, ranked = scores[:, classes].sort(dim=0, descending=True, stable=True)
    depth = int(counts.max())
    values, ranked = values[:depth].T, ranked[:depth].T
    kept = _outlive(boxes[ranked] if boxes.ndim == 2 else boxes[ranked, classes[:, None]], threshold)
    best = scores.new_full((len(scores), len(classes)), -1.0)
    best.scatter_(0, ranked.T, values.where(kept, -1.0).T)
    conf, place = best.max(1)
    return conf, classes[place]


def _outlive(boxes: Tensor, threshold: float) -> Tensor:
    """Bool [K, D]: suppression in K classes at once, of D boxes [K, D, 4] by falling score."""
    left, top, right, bottom = boxes.unbind(-1)
    area = (right - left) * (bottom - top)
    kept = torch.zeros_like(area, dtype=torch.bool)
    alive = torch.ones_like(kept)
    while alive.any():
        first = alive.byte().argmax(1, keepdim=True)  # where none is alive, number 0, which changes nothing any more
        x0, y0, x1, y1, own = (each.gather(1, first) for each in (left, top, right, bottom, area))
        across = (torch.minimum(x1, right) - torch.maximum(x0, left)).clamp_(min=0)
        down = (torch.minimum(y1, bottom) - torch.maximum(y0, top)).clamp_(min=0)
        shared = across.mul_(down)
        alive.masked_fill_(shared / (own + area - shared) > threshold, False)
        alive.scatter_(1, first, False)
        kept.scatter_(1, first, True)
    return kept


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
