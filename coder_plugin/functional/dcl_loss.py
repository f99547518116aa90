"""Diversity-sensitive contrastive loss of a batch of pairs (CODER eq. 4, 5).

Shapes: n pairs, a anchors (n, or the rows of one process), q candidates, d dimensions.
Equations and choices: docs/equations.md#dcl.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coder_plugin.functional.diversity_weights import (
    Diversity,
    check_diversity_options,
    normalize_diversity,
    raw_diversity,
    raw_diversity_from_variance,
    weighs_all_anchors,
)
from coder_plugin.functional.similarity import (
    Gather,
    anchor_rows,
    batch_similarity,
    candidate_negatives,
    check_hard_negatives,
    check_ids,
    check_pairs,
    check_range,
    check_rows,
    cosine,
    cosine_of_rows,
    raise_precision,
)
from coder_plugin.functional.tiled import Candidates, Implementation, hard_candidates, use_tiles
from coder_plugin.functional.tiled_candidates import candidate_variance, negative_sums
from coder_plugin.functional.tiled_pairs import one_tile, one_tile_loss, pair_counts, pair_sums, pair_variances

#: The least 1 + S of a positive: the logarithm of an opposite positive stays finite.
_LEAST = 1e-6


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
    effective_negatives: int | None = None,
    anchors: slice | None = None,
    gather: Gather | None = None,
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Diversity-sensitive contrastive loss of a batch of pairs, both directions (CODER eq. 4, 5).

    For an anchor n with its positive p and its diversity div (see :func:`diversity`):
    ``mu * log(1 + sum_neg exp((S - gamma) / (mu * div))) - positive_weight * log(1 + S_np)``.

    Args:
        image_features: L2-normalised [n, d], or [n, v, d] if an image has several features; row i belongs to row i of
            ``text_features`` [n, d].
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        mu: temperature, > 0.
        gamma: margin that is subtracted from the negatives' similarities.
        epsilon: of the diversity, > 0.
        diversity: ``"std"``, ``"entropy"`` or ``"none"``.
        positive_weight: weight of the positive's term, >= 0; ``"mu"`` is the formula as printed.
        bank_diversity: normalised diversity of image and text anchors over a memory bank, ([a], [a]); averaged with
            that over the batch (CODER, below eq. 6).
        diversity_gradient: let the gradient flow through the diversity weights.
        effective_negatives: >= 1: scale the sum over the negatives as if it had this many terms, so that the loss
            keeps its size at any batch size. None: the paper's plain sum.
        anchors: the rows of the batch that are anchors; the candidates stay all n. None: all rows.
        gather: collects the diversity weights of all processes' anchors, if ``anchors`` are one process's share.
        negatives: hard negatives, texts that are further negatives of the images [m, d], L2-normalised; of each image all of
            them, except as the next two say. Those of the texts stay the same.
        negative_ids: the ids of the images that ``negatives`` are captions of, integers [m]: of these images they are no
            negatives. An id that no image has stands for an image that is not known. None: all are negatives.
        negative_valid: bool [m], False where there is no text. None: there is one everywhere.
        implementation: ``"reference"``: all similarities at once; ``"tiled"``: equal up to rounding, in memory that grows
            with n alone; ``"triton"``: tiles with Triton's kernels; ``"auto"``: tiles if they support the options
            (docs/equations.md#tiles).

    Returns:
        Scalar, float32 or float64: the mean over image anchors plus the mean over text anchors.

    Raises:
        ValueError: shapes that differ, an empty batch, options out of range.

    Example:
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> dcl(eye, eye)  # 2 * (0.1 * log(1 + exp(-3)) - log(2))
        tensor(-1.3766, dtype=torch.float64)
    """
    check_dcl_options(
        mu=mu,
        epsilon=epsilon,
        diversity=diversity,
        positive_weight=positive_weight,
        effective_negatives=effective_negatives,
    )
    check_pairs(image_features, text_features)
    check_hard_negatives(negatives, negative_ids, negative_valid, dim=text_features.shape[-1])
    check_range(image_features=image_features, text_features=text_features, negatives=negatives)
    n = len(image_features)
    check_ids(image_ids, n)
    a = len(anchor_rows(image_features, anchors))
    if bank_diversity is not None and any(weights.shape != (a,) for weights in bank_diversity):
        raise ValueError(
            f"bank_diversity must have shape ({a},) for images and for texts, got "
            + " and ".join(str(tuple(weights.shape)) for weights in bank_diversity)
        )
    if use_tiles(
        implementation,
        (image_features, text_features),
        pairs=a * (n if negatives is None else n + len(negatives)),
        diversity=diversity,
        diversity_gradient=diversity_gradient,
        small=negatives is None,  # else each direction has products of its own, and a small matrix takes half the time
    ):
        return _tiled_dcl(
            image_features,
            text_features,
            image_ids,
            mu=mu,
            gamma=gamma,
            epsilon=None if diversity == "none" else epsilon,
            positive_weight=positive_weight,
            bank_diversity=bank_diversity,
            effective_negatives=effective_negatives,
            anchors=anchors,
            gather=gather,
            hard=[] if negatives is None else [hard_candidates(negatives, negative_ids, negative_valid, image_ids)],
            triton=implementation == "triton",
        )
    similarity = cosine(anchor_rows(image_features, anchors), text_features)
    transposed = None if anchors is None else cosine(anchor_rows(text_features, anchors), image_features)
    image_to_text, text_to_image, positive, others = batch_similarity(similarity, transposed, image_ids, anchors)
    directions = [(image_to_text, others), (text_to_image, others)]
    if negatives is not None:
        added = candidate_negatives(image_ids, negative_ids, negative_valid, n, negatives)
        further = cosine(anchor_rows(image_features, anchors), negatives)
        directions[0] = torch.cat([image_to_text, further], 1), torch.cat([others, anchor_rows(added, anchors)], 1)
    with torch.set_grad_enabled(diversity_gradient and torch.is_grad_enabled()):
        raw = [raw_diversity(rows, mask, kind=diversity, epsilon=epsilon) for rows, mask in directions]
        weights = normalize_diversity(torch.stack(raw), gather)
        if bank_diversity is not None:
            weights = (weights + torch.stack(bank_diversity)) / 2
    loss = positive.new_zeros(())
    for direction, (rows, mask) in enumerate(directions):
        per_anchor = directed_dcl(
            rows,
            positive,
            mask,
            weights[direction],
            mu=mu,
            gamma=gamma,
            positive_weight=positive_weight,
            effective_negatives=effective_negatives,
        )
        loss = loss + per_anchor.mean()
    return loss


def _tiled_dcl(
    image_features: Tensor,
    text_features: Tensor,
    image_ids: Tensor | None,
    *,
    mu: float,
    gamma: float,
    epsilon: float | None,
    bank_diversity: tuple[Tensor, Tensor] | None,
    anchors: slice | None,
    gather: Gather | None,
    hard: list[Candidates],
    triton: bool,
    **options: Any,
) -> Tensor:
    """:func:`dcl` by tiles. ``epsilon`` None: no diversity weights. ``hard``: hard negatives of the images."""
    n = len(image_features)
    if anchors is None and not hard:  # one product serves both directions
        tile = None if triton else one_tile(image_features, text_features, image_ids)
        with torch.no_grad():
            counts = pair_counts(image_ids, n, tile)
            if epsilon is None:
                weights = image_features.new_ones(2, n, dtype=torch.promote_types(image_features.dtype, torch.float32))
            else:
                variance = pair_variances(image_features, text_features, image_ids, counts, tile)
                weights = normalize_diversity(raw_diversity_from_variance(variance, epsilon=epsilon))
            if bank_diversity is not None:
                weights = (weights + torch.stack(bank_diversity)) / 2
        scale = 1 / (mu * weights)
        if tile is not None:

            def loss_of_sums(sums: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                value = anchor_losses(sums, positive, counts, mu=mu, **options).sum() / n
                return value, *_slopes(sums, positive, counts, 1 / n, mu=mu, **options)

            return one_tile_loss(image_features, text_features, scale, gamma, tile, loss_of_sums)
        sums, positive = pair_sums(image_features, text_features, image_ids, scale, gamma, triton=triton)
        return sum_of_losses(sums, positive, counts, mu=mu, **options) / n
    ids = torch.arange(n, device=image_features.device) if image_ids is None else image_ids
    loss = image_features.new_zeros((), dtype=torch.promote_types(image_features.dtype, torch.float32))
    own = slice(None) if anchors is None else anchors
    row_ids = ids[own]
    of_images, of_texts = [Candidates(text_features, ids), *hard], [Candidates(image_features, ids)]
    directions = (image_features, text_features, of_images), (text_features, image_features, of_texts)
    with torch.no_grad():
        if epsilon is None:
            weights = loss.new_ones(2, len(row_ids))
        elif gather is not None and weighs_all_anchors(n):  # of all processes
            if hard:
                variance = torch.stack([candidate_variance(live, ids, to) for live, _, to in directions])
            else:
                variance = pair_variances(image_features, text_features, image_ids, pair_counts(image_ids, n))
            weights = normalize_diversity(raw_diversity_from_variance(variance, epsilon=epsilon))[:, own]
        else:
            variances = [candidate_variance(live[own], row_ids, to) for live, _, to in directions]
            weights = normalize_diversity(raw_diversity_from_variance(torch.stack(variances), epsilon=epsilon), gather)
        if bank_diversity is not None:
            weights = (weights + torch.stack(bank_diversity)) / 2
    for direction, (live, others, candidates) in enumerate(directions):
        rows = live[own]
        positive = cosine_of_rows(rows, others[own])
        sums, counts = negative_sums(rows, row_ids, candidates, 1 / (mu * weights[direction]), gamma)
        loss = loss + sum_of_losses(sums, positive, counts, mu=mu, **options) / len(rows)
    return loss


def directed_dcl(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    weights: Tensor,
    *,
    mu: float,
    gamma: float,
    positive_weight: float | Literal["mu"],
    effective_negatives: int | None = None,
) -> Tensor:
    """One direction of :func:`dcl` for each anchor (CODER eq. 4): the core of ``dcl`` and ``m_dcl``.

    Args:
        similarity: cosines of anchors and candidates [a, q].
        positive: cosine of each anchor with its positive [a].
        negatives: bool [a, q].
        weights: normalised diversity of each anchor [a], in (0.5, 1].

    Returns:
        [a]; an anchor without negatives keeps the term of its positive.
    """
    check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1] or weights.shape != similarity.shape[:1]:
        raise ValueError(
            f"positive and weights must have shape ({len(similarity)},), got {tuple(positive.shape)} "
            f"and {tuple(weights.shape)}"
        )
    similarity, positive = raise_precision(similarity), raise_precision(positive)
    logits = (similarity - gamma) / (mu * weights[:, None])
    negative_sum = logits.masked_fill(~negatives, -torch.inf).logsumexp(1)
    return anchor_losses(
        negative_sum,
        positive,
        negatives.sum(1),
        mu=mu,
        positive_weight=positive_weight,
        effective_negatives=effective_negatives,
    )


def anchor_losses(
    negative_sum: Tensor,
    positive: Tensor,
    counts: Tensor | int,
    *,
    mu: float,
    positive_weight: float | Literal["mu"],
    effective_negatives: int | None = None,
) -> Tensor:
    """The loss of each anchor (CODER eq. 4) from the logarithm of its sum over negatives.

    Args:
        negative_sum: ``log sum_neg exp((S - gamma) / (mu * div))`` [..., a], -inf without negatives.
        positive: cosine of each anchor with its positive [a].
        counts: number of negatives of each anchor [a], or one number for all.

    Returns:
        [..., a], as ``negative_sum``.
    """
    negative_sum = _effective_sum(negative_sum, counts, effective_negatives)
    repulsion = mu * torch.logaddexp(negative_sum, negative_sum.new_zeros(()))
    attraction = (1 + positive).clamp(min=_LEAST).log()
    return repulsion - (mu if positive_weight == "mu" else positive_weight) * attraction


def _effective_sum(negative_sum: Tensor, counts: Tensor | int, effective_negatives: int | None) -> Tensor:
    """The logarithms of the sums as if they had so many terms."""
    if effective_negatives is None:
        return negative_sum
    number = torch.as_tensor(counts, device=negative_sum.device).clamp(min=1).to(negative_sum.dtype)
    return negative_sum + (effective_negatives / number).log()


def sum_of_losses(sums: Tensor, positive: Tensor, counts: Tensor | int, **options: Any) -> Tensor:
    """The sum of :func:`anchor_losses`, a scalar, in fewer operations: its derivatives are stated, not traced."""
    return _SumOfLosses.apply(sums, positive, counts, options)


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, positive: Tensor, counts: Tensor | int, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(sums, positive, counts if isinstance(counts, Tensor) else None)
        ctx.counts, ctx.options = None if isinstance(counts, Tensor) else counts, options
        return anchor_losses(sums, positive, counts, **options).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums, positive, counts = ctx.saved_tensors
        return *_slopes(sums, positive, counts if ctx.counts is None else ctx.counts, gradient, **ctx.options), None, None


def _slopes(
    sums: Tensor,
    positive: Tensor,
    counts: Tensor | int,
    gradient: Tensor | float,
    *,
    mu: float,
    positive_weight: float | Literal["mu"],
    effective_negatives: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The derivatives of the sum of :func:`anchor_losses` with respect to ``sums`` and ``positive``, times ``gradient``."""
    sums = _effective_sum(sums, counts, effective_negatives)
    repulsion = sums.sigmoid().mul_(gradient * mu)  # of mu * log(1 + exp(sum))
    distance = 1 + positive
    directions = len(sums) if sums.ndim == 2 else 1
    slope = gradient * (-directions * (mu if positive_weight == "mu" else positive_weight)) / distance
    return repulsion, slope.masked_fill_(distance < _LEAST, 0)


def check_dcl_options(
    *,
    mu: float,
    epsilon: float,
    diversity: str,
    positive_weight: float | str,
    effective_negatives: int | None,
    **_: Any,
) -> None:
    """:class:`ValueError` for options of :func:`dcl` that are out of range. Options that may have any value pass."""
    if not mu > 0:
        raise ValueError(f"mu must be > 0, got {mu}")
    check_diversity_options(diversity, epsilon)
    if positive_weight != "mu" and (isinstance(positive_weight, str) or not positive_weight >= 0):
        raise ValueError(f"positive_weight must be a number >= 0 or 'mu', got {positive_weight!r}")
    if effective_negatives is not None and not effective_negatives >= 1:
        raise ValueError(f"effective_negatives must be >= 1 or none, got {effective_negatives}")
