"""Collapse while training: all embeddings of a modality in one direction, or all similarities equal.

Shapes: B pairs of all ranks, at most ``ROWS``; D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin import distributed

#: Rows of all ranks that are looked at.
ROWS = 1024
#: Effective rank below which a modality's embeddings have collapsed: a mean squared cosine above 0.98.
RANK = 1.02
#: Standard deviation of a batch's similarities below which they are all equal.
DEVIATION = 0.002
#: Logging steps in a row, after the warm-up of the learning rate, after which a collapse is reported.
PATIENCE = 3

#: What :func:`spread` measures.
FIGURES = ("image_rank", "text_rank", "similarity_deviation")

_FEATURES = {"image": "image_features", "text": "text_features"}


@torch.no_grad()
def spread(outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """How far a batch's embeddings are spread. Call it on all ranks; it waits for the device once.

    ``image_rank`` and ``text_rank`` are the effective rank of the embeddings, ``(sum_i l_i)^2 / sum_i l_i^2`` over the
    eigenvalues l of their Gram matrix, from 1 (all in one direction) to min(B, D): of unit vectors, one over the mean
    squared cosine of two of them. ``similarity_deviation`` is the standard deviation of the cosines of all images and texts.

    Args:
        outputs: the model's, with ``image_features`` and ``text_features`` [b, D], or [b, V, D] for several of an image.
            Without one of them its figures are left out.

    Example:
        >>> pairs = spread({"image_features": torch.eye(4), "text_features": torch.ones(4, 4)})
        >>> {name: round(value, 3) for name, value in pairs.items()}
        {'image_rank': 4.0, 'text_rank': 1.0, 'similarity_deviation': 0.0}
    """
    limit = max(1, ROWS // distributed.world_size())
    unit = {
        side: distributed.gather(F.normalize(outputs[key].detach().float().flatten(0, -2), dim=-1)[:limit])
        for side, key in _FEATURES.items()
        if key in outputs
    }
    figures = {f"{side}_rank": 1 / (rows @ rows.T).square().mean() for side, rows in unit.items()}
    if len(unit) == 2:
        figures["similarity_deviation"] = (unit["image"] @ unit["text"].T).std(correction=0)
    values = torch.stack(list(figures.values())).tolist() if figures else []
    return dict(zip(figures, values, strict=True))


class CollapseWatch:
    """Warns once when embeddings have collapsed, and again only after they had recovered.

    The embeddings of a new model are often nearly alike, so a collapse is one that lasts for ``PATIENCE`` logging steps in a
    row after the warm-up.

    Args:
        warmup: steps that are not looked at.

    Example:
        >>> watch = CollapseWatch(warmup=10)
        >>> [watch.update(step, {"image_rank": 1.0, "text_rank": 5.0}) for step in (0, 20, 40)]
        [None, None, None]
        >>> watch.update(60, {"image_rank": 1.0, "text_rank": 5.0})[:56]
        'all image embeddings of the batch point in one direction'
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.lasted = 0

    def update(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A warning, where the figures of :func:`spread` among a logging step's metrics give rise to one."""
        if step < self.warmup:
            return None
        rank, deviation = (lambda side: metrics.get(f"{side}_rank", math.inf)), metrics.get("similarity_deviation", math.inf)
        what = [f"all {side} embeddings of the batch point in one direction" for side in _FEATURES if rank(side) < RANK]
        what += ["all similarities of the batch are equal"] * (deviation < DEVIATION)
        self.lasted = self.lasted + 1 if what else 0
        if self.lasted != PATIENCE:
            return None
        figures = ", ".join(f"{name} {metrics[name]:.4g}" for name in FIGURES if name in metrics)
        return (
            f"{', '.join(what)} at step {step} and at the {PATIENCE - 1} logging steps before ({figures}): the model has "
            "collapsed, and its retrieval is chance. It seldom recovers: start again with a lower --lr or a longer --warmup; "
            "the hardest negatives often need an easier start: triplet with reduction=mean, mean_epochs=1 or hardest=false"
        )
