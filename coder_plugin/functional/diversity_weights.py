"""Diversity of an anchor: how much its similarities to its negatives vary (CODER eq. 3, 15, 16).

Shapes: n anchors, q candidates. Equations and choices: docs/equations.md#diversity.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from coder_plugin.functional.similarity import Gather, check_range, check_rows, raise_precision

Diversity = Literal["std", "entropy", "none"]
#: A batch of at most this many similarities is small.
SMALL_BATCH = 1 << 22


def diversity(similarity: Tensor, negatives: Tensor, *, kind: Diversity = "std", epsilon: float = 0.1) -> Tensor:
    """Diversity weight of each anchor, divided by the largest one (CODER eq. 3, 15, 16).

    ``div = 1 / sigmoid(epsilon / SD)``, with SD the population standard deviation of the anchor's similarities to its
    negatives (``"std"``) or their softmax entropy in bits (``"entropy"``); ``"none"``: ``div = 1``.

    Args:
        similarity: cosines [n, q], any float type.
        negatives: bool [n, q], True where the candidate is a negative of the anchor.
        kind: which measure of variation.
        epsilon: > 0; larger values weight the anchors more evenly.

    Returns:
        [n] in (0.5, 1], float32 or float64; 1 for the most diverse anchor. An anchor without variation or without
        negatives has ``div = 1`` before the division, and a zero gradient.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, an unknown kind, ``epsilon <= 0``.

    Example:
        >>> similarity = torch.tensor([[0.1, 0.3], [0.2, 0.2]])
        >>> diversity(similarity, torch.ones(2, 2, dtype=torch.bool))
        tensor([1.0000, 0.7311])
    """
    check_range(similarity=similarity)
    weights = raw_diversity(similarity, negatives, kind=kind, epsilon=epsilon)
    return normalize_diversity(weights) if len(weights) else weights


def raw_diversity(similarity: Tensor, negatives: Tensor, *, kind: Diversity = "std", epsilon: float = 0.1) -> Tensor:
    """The diversity weight before the division by the largest: [n] in [1, 2). See :func:`diversity`."""
    check_rows(similarity, negatives)
    check_diversity_options(kind, epsilon)
    similarity = raise_precision(similarity)
    if kind == "none" or not similarity.shape[1]:
        return similarity.new_ones(len(similarity))
    if kind == "std":
        return raw_diversity_from_variance(_variance(similarity, negatives), epsilon=epsilon)
    return _weight(*_entropy(similarity, negatives), epsilon)


def raw_diversity_from_variance(variance: Tensor, *, epsilon: float = 0.1) -> Tensor:
    """``1 / sigmoid(epsilon / SD)`` from population variances [n], for a caller that has no similarities."""
    check_diversity_options("std", epsilon)
    if not (torch.is_grad_enabled() and variance.requires_grad):
        return 1 + (-epsilon / variance.sqrt()).exp_()  # without variation the exponential is zero
    positive = variance > torch.finfo(variance.dtype).tiny
    return _weight(torch.where(positive, variance, 1).sqrt(), positive, epsilon)


def normalize_diversity(weights: Tensor, gather: Gather | None = None) -> Tensor:
    """Weights [n], or [k, n] for the anchors of k directions, divided by the largest one of their direction.

    Args:
        gather: collects the rows of all processes, if each has its own anchors: the largest of all divides. It is called once,
            with the k largest of this process, [1, k].
    """
    largest = weights.amax(-1, keepdim=True)
    if gather is not None:
        largest = gather(largest.reshape(1, -1)).amax(0).view_as(largest)
    return weights / largest


def weighs_all_anchors(n: int) -> bool:
    """Whether each of several processes, with anchors of its own, weighs all ``n`` anchors of the batch itself.

    In a small batch that costs less than a collective for the largest weights. In a large one each weighs its own.
    """
    return n * n <= SMALL_BATCH


def check_diversity_options(kind: str, epsilon: float) -> None:
    """:class:`ValueError` for an unknown kind and ``epsilon <= 0``."""
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    if kind not in ("std", "entropy", "none"):
        raise ValueError(f"diversity must be 'std', 'entropy' or 'none', got {kind!r}")


def _weight(value: Tensor, positive: Tensor, epsilon: float) -> Tensor:
    # 1 / sigmoid(x) = 1 + exp(-x). Without variation x is infinite, and above 80 exp(-x) adds nothing to 1 while the factors
    # of its gradient leave the type's range: that branch must not be differentiated.
    positive = positive & (value > epsilon / 80)
    return torch.where(positive, 1 + torch.exp(-epsilon / torch.where(positive, value, 1)), 1)


def _variance(similarity: Tensor, negatives: Tensor) -> Tensor:
    """Population variance over the negatives [n]; centred first, because SD may be 1e-3 at a mean of 0.9."""
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
