"""Diversity of an anchor: how far its similarities to its negatives spread (CODER eq. 3, 15, 16; METHODS 1)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from coder_plugin.functional.similarity import check_rows, raise_precision

Diversity = Literal["std", "entropy", "none"]


def diversity(similarity: Tensor, negatives: Tensor, *, kind: Diversity = "std", epsilon: float = 0.1) -> Tensor:
    """Diversity weight of each anchor, divided by the largest one (CODER eq. 3, 15, 16; METHODS 1).

    ``div = 1 / sigmoid(epsilon / SD)`` with SD the population standard deviation of the anchor's similarities to its
    negatives (``"std"``), their softmax entropy in bits (``"entropy"``), or no weighting at all (``"none"``).

    Args:
        similarity: cosines [n, q].
        negatives: bool [n, q], True where the candidate is a negative of the anchor.
        kind: which spread is measured.
        epsilon: > 0; larger values weight the anchors more evenly.

    Returns:
        [n], in (0.5, 1], 1 for the most diverse anchor. An anchor without spread, or without negatives, has ``div = 1``
        before the division, and a zero gradient.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, an unknown kind, ``epsilon <= 0``.
    """
    weights = spread(similarity, negatives, kind=kind, epsilon=epsilon)
    return weights / weights.amax() if len(weights) else weights


def spread(similarity: Tensor, negatives: Tensor, *, kind: Diversity = "std", epsilon: float = 0.1) -> Tensor:
    """The diversity weight before its division by the largest: [n], in [1, 2). See :func:`diversity`.

    Apart because the maximum runs over the anchors of all ranks, the rest over one anchor's row.
    """
    check_rows(similarity, negatives)
    _check_options(kind, epsilon)
    similarity = raise_precision(similarity)
    if kind == "none" or not similarity.shape[1]:
        return similarity.new_ones(len(similarity))
    if kind == "std":
        return spread_of_variance(_variance(similarity, negatives), epsilon=epsilon)
    return _weight(*_entropy(similarity, negatives), epsilon)


def spread_of_variance(variance: Tensor, *, epsilon: float = 0.1) -> Tensor:
    """``1 / sigmoid(epsilon / SD)`` of population variances [n]: for those known without the similarities."""
    _check_options("std", epsilon)
    positive = variance > torch.finfo(variance.dtype).tiny
    return _weight(torch.where(positive, variance, 1).sqrt(), positive, epsilon)


def _weight(value: Tensor, positive: Tensor, epsilon: float) -> Tensor:
    # 1 / sigmoid(x) = 1 + exp(-x): at zero spread x is infinite, so its branch must not be differentiated.
    return torch.where(positive, 1 + torch.exp(-epsilon / value), 1)


def _check_options(kind: str, epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    if kind not in ("std", "entropy", "none"):
        raise ValueError(f"diversity must be 'std', 'entropy' or 'none', got {kind!r}")


def _variance(similarity: Tensor, negatives: Tensor) -> Tensor:
    """Population variance over the negatives [n]; centred, because SD may be 1e-3 at mean 0.9."""
    count = negatives.sum(1).clamp(min=1)
    mean = torch.where(negatives, similarity, 0).sum(1) / count
    return torch.where(negatives, similarity - mean[:, None], 0).square().sum(1) / count


def _entropy(similarity: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy in bits of the softmax over the negatives [n], and where it is above zero."""
    largest = torch.where(negatives, similarity, -torch.inf).amax(1, keepdim=True).detach()
    shifted = torch.where(negatives, similarity - largest, 0)
    weight = torch.where(negatives, shifted.exp(), 0)
    total = weight.sum(1).clamp(min=torch.finfo(weight.dtype).tiny)
    # H = log Z - E[s], both relative to the largest similarity
    entropy = (total.log() - (weight * shifted).sum(1) / total) / math.log(2)
    positive = (negatives.sum(1) > 1) & (entropy > torch.finfo(entropy.dtype).tiny)
    return torch.where(positive, entropy, 1), positive
