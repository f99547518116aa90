"""The papers' mathematics as pure functions of tensors.

Shapes: n anchors, q candidates, d dimensions. Masks are True where valid. Everything is computed in float32 or better:
half-precision inputs are raised first, float64 in gives float64 out. Features are expected L2-normalised, so that a
product is a cosine; nothing here normalises them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

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
    _check_rows(similarity, negatives)
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    if kind not in ("std", "entropy", "none"):
        raise ValueError(f"diversity must be 'std', 'entropy' or 'none', got {kind!r}")
    similarity = _raise_precision(similarity)
    if kind == "none" or not similarity.shape[1]:
        return similarity.new_ones(len(similarity))
    value, positive = (_standard_deviation if kind == "std" else _entropy)(similarity, negatives)
    # 1 / sigmoid(x) = 1 + exp(-x): at zero spread x is infinite, so its branch must not be differentiated.
    return torch.where(positive, 1 + torch.exp(-epsilon / value), 1)


def _standard_deviation(similarity: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Population SD over the negatives [n], and where it is above zero; centred, because SD may be 1e-3 at mean 0.9."""
    count = negatives.sum(1).clamp(min=1)
    mean = torch.where(negatives, similarity, 0).sum(1) / count
    variance = torch.where(negatives, similarity - mean[:, None], 0).square().sum(1) / count
    positive = variance > torch.finfo(variance.dtype).tiny
    return torch.where(positive, variance, 1).sqrt(), positive


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


def directed_dcl(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    weights: Tensor,
    *,
    mu: float = 0.1,
    gamma: float = 0.3,
    positive_weight: float | Literal["mu"] = 1.0,
) -> Tensor:
    """One direction of the diversity-sensitive contrastive loss, per anchor (CODER eq. 4, 5; METHODS 2).

    ``mu * log(1 + sum_neg exp((S - gamma) / (mu * div))) - w * log(1 + S_pos)``.

    Args:
        similarity: cosines of anchors and candidates [n, q].
        positive: cosine of each anchor and its positive [n].
        negatives: bool [n, q].
        weights: normalised diversity of each anchor [n], in (0.5, 1].
        mu: temperature, > 0. gamma: margin subtracted from the negatives.
        positive_weight: w; ``"mu"`` is the formula as printed.

    Returns:
        [n]; an anchor without negatives keeps its positive's term alone.
    """
    check_dcl_options(mu=mu, positive_weight=positive_weight)
    _check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1] or weights.shape != similarity.shape[:1]:
        raise ValueError(
            f"positive and weights must have shape ({len(similarity)},), got {tuple(positive.shape)} "
            f"and {tuple(weights.shape)}"
        )
    similarity, positive = _raise_precision(similarity), _raise_precision(positive)
    logits = (similarity - gamma) / (mu * weights[:, None])
    negative_sum = logits.masked_fill(~negatives, -torch.inf).logsumexp(1)
    repulsion = mu * torch.logaddexp(negative_sum, negative_sum.new_zeros(()))
    attraction = (1 + positive).clamp(min=1e-6).log()
    return repulsion - (mu if positive_weight == "mu" else positive_weight) * attraction


def dcl(
    image_features: Tensor,
    text_features: Tensor,
    *,
    image_ids: Tensor | None = None,
    mu: float = 0.1,
    gamma: float = 0.3,
    epsilon: float = 0.1,
    diversity: Diversity = "std",
    positive_weight: float | Literal["mu"] = 1.0,
    bank_diversity: tuple[Tensor, Tensor] | None = None,
    diversity_gradient: bool = False,
) -> Tensor:
    """Diversity-sensitive contrastive loss of a batch of pairs, both directions (CODER eq. 4, 5; METHODS 2).

    Args:
        image_features: [n, d], L2-normalised; row i belongs to row i of ``text_features`` [n, d].
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        mu: temperature, > 0. gamma: margin. epsilon: of the diversity, > 0.
        diversity: ``"std"``, ``"entropy"`` or ``"none"`` (see :func:`diversity`).
        positive_weight: weight of the positive's term; ``"mu"`` is the formula as printed.
        bank_diversity: normalised bank-level diversity of image and text anchors, ([n], [n]); averaged with the
            batch's (CODER, below eq. 6).
        diversity_gradient: let the gradient through the diversity weights (default: stopped).

    Returns:
        Scalar: the mean over image anchors plus the mean over text anchors.

    Raises:
        ValueError: shapes that differ, an empty batch, options out of range.
    """
    similarity, negatives = _pairs(image_features, text_features, image_ids)
    if bank_diversity is not None and any(bank.shape != similarity.shape[:1] for bank in bank_diversity):
        raise ValueError(
            f"bank_diversity must have shape ({len(similarity)},) for images and for texts, got "
            + " and ".join(str(tuple(bank.shape)) for bank in bank_diversity)
        )
    positive = similarity.diagonal()
    loss = similarity.new_zeros(())
    for direction, rows in enumerate((similarity, similarity.T)):
        with torch.set_grad_enabled(diversity_gradient and torch.is_grad_enabled()):
            weights = spread(rows, negatives, kind=diversity, epsilon=epsilon)
            weights = weights / weights.amax()
            if bank_diversity is not None:
                weights = (weights + bank_diversity[direction]) / 2
        loss = loss + directed_dcl(
            rows, positive, negatives, weights, mu=mu, gamma=gamma, positive_weight=positive_weight
        ).mean()
    return loss


def triplet(
    similarity: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    image_ids: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Hinge loss of a batch's similarities, both directions (VSE++; the base of METHODS 6 and 9).

    Args:
        similarity: images x texts [n, n], matching pairs on the diagonal.
        margin: by how much the positive must win.
        hardest: each anchor's hardest negative alone, or all of them.
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        reduction: over the hinges of a direction, one an anchor with ``hardest``, else one a negative
            (``"mean"`` averages within an anchor first). The two directions are added.

    Returns:
        Scalar. An anchor without negatives counts as zero.
    """
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1]:
        raise ValueError(f"similarity must be square [n, n], got {tuple(similarity.shape)}")
    if not len(similarity):
        raise ValueError("similarity holds no pair")
    similarity = _raise_precision(similarity)
    negatives = different_images(image_ids, len(similarity), similarity.device)
    positive = similarity.diagonal()
    images = directed_triplet(similarity, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    texts = directed_triplet(similarity.T, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    return images + texts


def directed_triplet(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """One direction of :func:`triplet`: anchors x candidates [n, q], positives [n], negatives bool [n, q] -> scalar."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    _check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1]:
        raise ValueError(f"positive must have shape ({len(similarity)},), got {tuple(positive.shape)}")
    hinge = (margin + _raise_precision(similarity) - _raise_precision(positive)[:, None]).clamp(min=0)
    hinge = torch.where(negatives, hinge, 0)
    if hardest:
        per_anchor = hinge.amax(1)
    elif reduction == "mean":
        per_anchor = hinge.sum(1) / negatives.sum(1).clamp(min=1)
    else:
        per_anchor = hinge.sum(1)
    return per_anchor.mean() if reduction == "mean" else per_anchor.sum()


def different_images(image_ids: Tensor | None, n: int, device: torch.device) -> Tensor:
    """Bool [n, n], True where two pairs of a batch show different images: who may be whose negative (METHODS 2)."""
    if image_ids is None:
        return ~torch.eye(n, dtype=torch.bool, device=device)
    if image_ids.shape != (n,):
        raise ValueError(f"image_ids must have shape ({n},), got {tuple(image_ids.shape)}")
    return image_ids[:, None] != image_ids[None, :]


def cosine(anchors: Tensor, candidates: Tensor) -> Tensor:
    """Products [n, q] of [n, d] and [q, d] in float32 or better, also under autocast (METHODS, first paragraph)."""
    with torch.autocast(anchors.device.type, enabled=False):
        return _raise_precision(anchors) @ _raise_precision(candidates).T


def _pairs(image_features: Tensor, text_features: Tensor, image_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Checked similarity [n, n] and negatives [n, n] of a batch of pairs."""
    if image_features.ndim != 2 or image_features.shape != text_features.shape:
        raise ValueError(
            "image_features and text_features must have one shape [n, d], got "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if not len(image_features):
        raise ValueError("image_features and text_features hold no pair")
    negatives = different_images(image_ids, len(image_features), image_features.device)
    return cosine(image_features, text_features), negatives


def check_dcl_options(*, mu: float, epsilon: float = 0.1, positive_weight: float | Literal["mu"]) -> None:
    """:class:`ValueError` for options of DCL that are out of range: terms call it before the first batch."""
    for name, value in (("mu", mu), ("epsilon", epsilon)):
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
    if positive_weight != "mu" and (isinstance(positive_weight, str) or not positive_weight >= 0):
        raise ValueError(f"positive_weight must be a number >= 0 or 'mu', got {positive_weight!r}")


def _check_rows(similarity: Tensor, negatives: Tensor) -> None:
    if similarity.ndim != 2 or similarity.shape != negatives.shape:
        raise ValueError(
            f"similarity and negatives must have one shape [n, q], got {tuple(similarity.shape)} "
            f"and {tuple(negatives.shape)}"
        )
    if negatives.dtype != torch.bool:
        raise ValueError(f"negatives must be bool, got {negatives.dtype}")


def _raise_precision(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
