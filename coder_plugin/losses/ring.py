"""Losses of the pairs of all ranks without a gather: each rank's texts visit all ranks, one after the other.

A rank holds its own pairs and one visiting block of texts. A product of its images with the block serves both directions: the
sums of its images stay, those of the visiting texts travel on with their rank's other results and come home after one turn. The
backward pass takes one more turn, in which the texts' gradient travels so. The losses and gradients are those of the
gathered batch where each rank has its own anchors, up to rounding (docs/equations.md#tiles).

Shapes: B pairs of this rank, N pairs of all ranks, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional.dcl_loss import sum_of_losses
from coder_plugin.functional.diversity_weights import normalize_diversity, raw_diversity_from_variance
from coder_plugin.functional.similarity import check_ids, check_pairs, check_range, cosine_of_rows, raise_precision
from coder_plugin.functional.tiled import finite, full_precision, operands, slope_unit
from coder_plugin.functional.tiled_blocks import add_exponentials, add_moments, add_slopes


def dcl_of_ranks(
    image_features: Tensor,
    text_features: Tensor,
    image_ids: Tensor | None,
    *,
    mu: float,
    gamma: float,
    epsilon: float | None,
    triton: bool = False,
    **options: Any,
) -> Tensor:
    """:func:`coder_plugin.functional.dcl` of this rank's anchors, with the pairs of all ranks as candidates.

    Args:
        image_features: those of this rank [B, D], L2-normalised. text_features: [B, D].
        image_ids: [B]; None: all images are distinct.
        epsilon: of the diversity; None: no diversity weights.
        options: ``positive_weight`` and ``effective_negatives``. The other arguments are those of ``dcl``.
    """
    _check(image_features, text_features)
    check_ids(image_ids, len(image_features))
    with torch.no_grad():
        ids = _distinct_ids(image_features) if image_ids is None else image_ids
        counts: Tensor | int = len(ids) * distributed.world_size() - 1
        weights = image_features.new_ones(2, len(ids), dtype=torch.promote_types(image_features.dtype, torch.float32))
        if epsilon is not None:
            variance, counts = _variances(image_features, text_features, ids)
            raw = raw_diversity_from_variance(variance, epsilon=epsilon)
            # the largest of all ranks' anchors divides
            weights = normalize_diversity(raw, distributed.all_max)
        elif image_ids is not None and options["effective_negatives"] is not None:
            counts = _counts(image_ids)
    sums = _RingSums.apply(image_features, text_features, ids, 1 / (mu * weights), gamma, triton)
    positive = cosine_of_rows(image_features, text_features)
    return sum_of_losses(sums, positive, counts, mu=mu, **options) / len(ids)


def clip_of_ranks(image_features: Tensor, text_features: Tensor, logit_scale: Tensor, *, triton: bool = False) -> Tensor:
    """``open_clip.ClipLoss`` of this rank's anchors, with the pairs of all ranks as candidates.

    Args:
        image_features: those of this rank [B, D], L2-normalised. text_features: [B, D].
        logit_scale: 0-d or of one element, equal on all ranks. Each rank gets the part of its gradient that comes of its own
            images; the sum over ranks is that of all anchors.
    """
    _check(image_features, text_features)
    ids = _distinct_ids(image_features)
    scale = logit_scale.to(torch.promote_types(image_features.dtype, torch.float32)).reshape(())
    sums = _RingSums.apply(image_features, text_features, ids, scale, 0.0, triton)
    positive = cosine_of_rows(image_features, text_features) * scale
    return (torch.logaddexp(positive, sums) - positive).mean()


def turn(
    block: Sequence[Tensor],
    visit: Callable[[Sequence[Tensor]], list[Tensor]],
    merge: Callable[[Tensor, Tensor], Tensor] = Tensor.add_,
) -> list[Tensor]:
    """Let every rank's block visit all ranks, and bring home what they computed about it.

    The next block and the results travel while this rank computes.

    Args:
        block: this rank's tensors, which no visit changes; the same shapes and types on all ranks.
        visit: called with each rank's block, this rank's first; returns results about it, the same shapes on all ranks.
        merge: joins what was received with what a visit has returned; it may write into the first.

    Returns:
        The results about this rank's block, merged over all ranks.

    Example:
        >>> turn([torch.tensor([1.0, 2.0])], lambda block: [3 * block[0]])  # one process
        [tensor([3., 6.])]
    """
    arriving: Callable[[], list[Tensor]] | None = None
    for step in range(distributed.world_size()):
        last = step == distributed.world_size() - 1
        next_block = None if last else distributed.pass_on(block, channel=0)
        results = visit(block)
        if arriving is not None:
            results = [merge(one, other) for one, other in zip(arriving(), results, strict=True)]
        arriving = distributed.pass_on(results, channel=1)
        if next_block is not None:
            block = next_block()
    assert arriving is not None
    return arriving()


def _check(images: Tensor, texts: Tensor) -> None:
    if images.ndim != 2 or texts.ndim != 2:
        raise CoderError("gather='ring' compares one feature of an image: take gather='all'")
    check_pairs(images, texts)
    check_range(image_features=images, text_features=texts)


def _distinct_ids(features: Tensor) -> Tensor:
    own = len(features)
    return torch.arange(own, device=features.device) + distributed.rank() * own


def _counts(ids: Tensor) -> Tensor:
    """The number of each anchor's negatives among the pairs of all ranks: int64 [B], of images and of texts alike."""
    counts = torch.zeros_like(ids)

    def visit(block: Sequence[Tensor]) -> list[Tensor]:
        counts.add_(_different(ids, block[0]))
        return []

    turn([ids], visit)
    return counts


def _different(ids: Tensor, others: Tensor) -> Tensor:
    """How many of the others are another image than each pair's: int64 [B]."""
    ordered = others.sort().values
    return len(ordered) - torch.searchsorted(ordered, ids, right=True) + torch.searchsorted(ordered, ids)


def _variances(images: Tensor, texts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Population variance of each anchor's similarities to its negatives on all ranks: [2, B], images, then texts; and the
    number of these negatives [B]."""
    counts = torch.zeros_like(ids)
    with full_precision(images):
        v = raise_precision(images)
        means = distributed.all_mean(torch.stack([v.mean(0), raise_precision(texts).mean(0)]))
        pivots = torch.stack([v @ means[1], raise_precision(texts) @ means[0]])
        first, second = torch.zeros_like(pivots[0]).repeat(2, 1)

        def visit(block: Sequence[Tensor]) -> list[Tensor]:
            others, other_ids, other_pivots = block
            counts.add_(_different(ids, other_ids))
            of_block = torch.zeros_like(other_pivots).repeat(2, 1)
            features, both_ids = operands(images, others), (ids, other_ids)
            add_moments((first, of_block[0]), (second, of_block[1]), features, both_ids, (pivots[0], other_pivots))
            return [of_block]

        (of_texts,) = turn([texts, ids, pivots[1]], visit)
        count = counts.clamp(min=1)
        firsts, seconds = torch.stack([first, of_texts[0]]), torch.stack([second, of_texts[1]])
        return (seconds / count - (firsts / count).square()).clamp_(min=0), counts


class _RingSums(torch.autograd.Function):
    """``log sum_neg exp(scale * (S - offset))`` of this rank's images and texts over the negatives of all ranks, [2, B].

    The arguments are those of :func:`coder_plugin.functional.tiled_pairs.pair_sums`, this rank's. ``scale`` is [2, B] without a
    gradient, or 0-d.
    """

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, ids: Tensor, scale: Tensor, offset: float, triton: bool
    ) -> Tensor:
        both = scale.expand(2, len(images))
        with full_precision(images):
            largest = torch.full_like(both[0], -torch.inf)
            total = torch.zeros_like(both[0])

            def visit(block: Sequence[Tensor]) -> list[Tensor]:
                others, other_ids, other_scale = block
                of_block = torch.full_like(other_scale, -torch.inf), torch.zeros_like(other_scale)
                running, features, scales = [(largest, total), of_block], operands(images, others), (both[0], other_scale)
                add_exponentials(running, features, (ids, other_ids), scales, triton=triton)
                return [_logarithm(*of_block, other_scale, offset)]

            (of_texts,) = turn([texts, ids, both[1]], visit, torch.logaddexp)
            sums = torch.stack([_logarithm(largest, total, both[0], offset), of_texts])
        ctx.save_for_backward(images, texts, ids, scale, sums)
        ctx.offset, ctx.triton = offset, triton
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, ids, scale, sums = ctx.saved_tensors
        with full_precision(images):
            both, slope = scale.expand_as(sums), gradient * scale
            unit = slope_unit(slope, operands(images, texts)[0])
            if unit is not None:  # slopes of several ranks are added
                unit = distributed.all_max(unit)
                slope = slope / unit
            # of each anchor its scale, the logarithm of its sum, and its slope
            numbers = torch.stack([both, finite(sums) + scale * ctx.offset, slope])
            of_images = torch.zeros_like(images, dtype=sums.dtype)

            def visit(block: Sequence[Tensor]) -> list[Tensor]:
                others, other_ids, other_numbers = block
                of_block = torch.zeros_like(others, dtype=sums.dtype)
                features, both_ids = operands(images, others), (ids, other_ids)
                pairs = zip(numbers[:, 0], other_numbers, strict=True)
                add_slopes((of_images, of_block), features, both_ids, *pairs, triton=ctx.triton)
                return [of_block]

            (of_texts,) = turn([texts, ids, numbers[:, 1]], visit)
            if unit is not None:
                of_images *= unit
                of_texts *= unit
            of_scale = None
            if ctx.needs_input_grad[3]:
                # S is linear in an image, so this is sum p S over all pairs of this rank's images
                similarities = torch.linalg.vecdot(of_images, raise_precision(images)).sum() / scale
                of_scale = (similarities - ctx.offset * gradient.sum()).to(scale.dtype)
        return of_images.to(images.dtype), of_texts.to(texts.dtype), None, of_scale, None, None


def _logarithm(largest: Tensor, total: Tensor, scale: Tensor, offset: float) -> Tensor:
    """``log sum exp(scale * (S - offset))``, -inf without a negative."""
    return total.log() + scale * (finite(largest) - offset)
