"""Diversity of an anchor: how much its similarities to its negatives vary (CODER eq. 3, 15, 16; docs/equations.md#diversity).

Shapes: n anchors, q candidates, m comparisons of k directions with w anchors that are weighed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from coder_plugin.contrast import Dense, Negatives, Pairs
from coder_plugin.tensors import check_range

Diversity = Literal["std", "entropy", "none"]


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
        ValueError: shapes that differ, a mask that is not bool, an unknown kind, ``epsilon`` that is not > 0 and finite.

    Example:
        >>> similarity = torch.tensor([[0.1, 0.3], [0.2, 0.2]])
        >>> diversity(similarity, torch.ones(2, 2, dtype=torch.bool))
        tensor([1.0000, 0.7311])
    """
    check_range(similarity=similarity)
    if similarity.ndim != 2 or similarity.shape != negatives.shape:
        raise ValueError(
            f"similarity and negatives must have one shape [n, q], got {tuple(similarity.shape)} "
            f"and {tuple(negatives.shape)}"
        )
    if negatives.dtype != torch.bool:
        raise ValueError(f"negatives must be bool, got {negatives.dtype}")
    check_diversity_options(kind, epsilon)
    (weights,) = raw_diversity(Dense.of_scores([similarity], [negatives]), kind=kind, epsilon=epsilon)
    return weights / weights.amax() if len(weights) else weights


def raw_diversity(negatives: Negatives, *, kind: Diversity = "std", epsilon: float = 0.1) -> Tensor:
    """The diversity weight before the division by the largest: [k, a] in [1, 2). Only :class:`Dense` has ``entropy``."""
    if kind == "std":
        return raw_diversity_of_variance(negatives.variance(), epsilon)
    assert isinstance(negatives, Dense)
    entropy = negatives.entropy()
    if kind == "none":
        return torch.ones_like(entropy)
    return _weight(entropy, entropy > torch.finfo(entropy.dtype).tiny, epsilon)


def raw_diversity_of_variance(variance: Tensor, epsilon: float = 0.1) -> Tensor:
    """``1 / sigmoid(epsilon / SD)`` from population variances, of their shape."""
    if not (torch.is_grad_enabled() and variance.requires_grad):
        return 1 + (-epsilon / variance.sqrt()).exp_()  # without variation the exponential is zero
    positive = variance > torch.finfo(variance.dtype).tiny
    return _weight(torch.where(positive, variance, 1).sqrt(), positive, epsilon)


def diversity_weights(
    pairs: Pairs,
    compare: Callable[[slice | None], Sequence[Negatives]],
    *,
    kind: Diversity,
    epsilon: float,
    gradient: bool = False,
) -> Tensor:
    """Normalised diversity of this process's anchors in several comparisons, [m, k, a].

    Each is divided by the largest of its direction over the anchors of all processes, which takes one collective for all
    comparisons, or none in a small batch.

    Args:
        compare: from the anchors that are weighed, as a slice of the pairs, to their negatives in each comparison.
        gradient: whether the gradient flows through the weights.
    """
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        weights = [raw_diversity(each, kind=kind, epsilon=epsilon) for each in compare(pairs.weighed)]
        raw = weights[0][None] if len(weights) == 1 else torch.stack(weights)
        return pairs.own(raw / pairs.largest(raw.amax(-1, keepdim=True)))


def needs_dense(kind: Diversity, gradient: bool) -> str | None:
    """The option of these two that only :class:`Dense` supports; None: neither."""
    if kind == "entropy":
        return "diversity='entropy'"
    return "diversity_gradient=True" if gradient else None


def check_diversity_options(kind: str, epsilon: float) -> None:
    """:class:`ValueError` for an unknown kind, and for ``epsilon`` that is not > 0 and finite."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")
    if kind not in get_args(Diversity):
        raise ValueError(f"diversity must be 'std', 'entropy' or 'none', got {kind!r}")


def _weight(value: Tensor, positive: Tensor, epsilon: float) -> Tensor:
    # 1 / sigmoid(x) = 1 + exp(-x). Without variation x is infinite, and above 80 exp(-x) adds nothing to 1 while the factors
    # of its gradient leave the type's range: that branch must not be differentiated.
    positive = positive & (value > epsilon / 80)
    return torch.where(positive, 1 + torch.exp(-epsilon / torch.where(positive, value, 1)), 1)
