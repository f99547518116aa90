"""Sums and variances over the negatives of a batch of pairs, both directions from one product (:mod:`tiled`).

Every image is compared with every text. Shapes: n pairs, d dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coder_plugin.functional import tiled
from coder_plugin.functional.host import at_hand
from coder_plugin.functional.similarity import cosine_of_rows, raise_precision
from coder_plugin.functional.tiled import (
    Candidates,
    finite,
    full_precision,
    group_sizes,
    matmul,
    operands,
    same_image,
    slope_unit,
)
from coder_plugin.functional.tiled_blocks import add_exponentials, add_moments, add_slopes
from coder_plugin.functional.tiled_candidates import negative_sums

#: The Gram form of the variance takes out same-image pairs one by one, if an image has at most this many texts in a batch.
MAX_SAME_IMAGE = 16


#: From sums and positives to a loss, 0-d, and its derivatives with respect to them.
LossOfSums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class OneTile(NamedTuple):
    """The similarities of a small batch, computed once for variances and sums."""

    similarity: Tensor  # [n, n], without a gradient
    same_image: Tensor  # bool [n, n]; a pair shows the image of itself


def one_tile(images: Tensor, texts: Tensor, ids: Tensor | None) -> OneTile | None:
    """The similarities of a batch of pairs, if they are few enough to be one tile; else None."""
    n = len(images)
    if n * n > tiled.ONE_TILE:
        return None
    with torch.no_grad(), full_precision(images):
        v, w = operands(images, texts)
        return OneTile(matmul(v, w.T), same_image(ids, slice(0, n), slice(0, n), v.device))


@torch.no_grad()
def pair_variances(
    images: Tensor, texts: Tensor, ids: Tensor | None, counts: Tensor | int, tile: OneTile | None = None
) -> Tensor:
    """Population variance of each anchor's similarities to its negatives: [2, n], images as anchors, then texts.

    Args:
        images: [n, d]; row i and row i of ``texts`` [n, d] are a pair.
        ids: image ids [n]; pairs of one image are not each other's negatives. None: all distinct.
        counts: of :func:`pair_counts`. tile: of :func:`one_tile`.

    Returns:
        [2, n] in float32 or float64. An anchor without negatives has 0.
    """
    count = counts.clamp(min=1) if isinstance(counts, Tensor) else max(counts, 1)
    with full_precision(images):
        if tile is not None:  # about the mean of all similarities
            centred = (tile.similarity - tile.similarity.mean()).masked_fill_(tile.same_image, 0)
            mean = torch.stack([centred.sum(1), centred.sum(0)]).div_(count)
            centred.square_()
            return torch.stack([centred.sum(1), centred.sum(0)]).div_(count).sub_(mean.square_()).clamp_(min=0)
        v, w = operands(images, texts)
        if len(v) >= 2 * v.shape[1]:
            repeats = _repeats(ids, images)
            if repeats is not None:
                v, w = raise_precision(v), raise_precision(w)
                return torch.stack([_gram_variance(v, w, count, repeats), _gram_variance(w, v, count, repeats)])
        # about a pivot for each row and each column that is near its mean, so that nothing cancels
        pivots = [raise_precision(x) @ raise_precision(y).mean(0) for x, y in ((v, w), (w, v))]
        first, second = torch.zeros_like(pivots[0]).repeat(2, 2, 1)
        ids = torch.arange(len(v), device=v.device) if ids is None else ids
        add_moments((first[0], first[1]), (second[0], second[1]), (v, w), (ids, ids), (pivots[0], pivots[1]))
        return (second / count - (first / count).square()).clamp_(min=0)


def pair_sums(
    images: Tensor,
    texts: Tensor,
    ids: Tensor | None,
    scale: Tensor,
    offset: float = 0.0,
    tile: OneTile | None = None,
    *,
    triton: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each anchor's sum over its negatives, and its positive; differentiable with respect to both features.

    Args:
        images: [n, d]. texts: [n, d]. ids: as of :func:`pair_variances`.
        scale: > 0: [2, n], of the image and the text anchors, without a gradient; or one for all, 0-d, with a gradient.
        offset: subtracted from the negatives' similarities.
        tile: of :func:`one_tile`; its similarities are overwritten. None: computed in tiles.
        triton: whether Triton's kernels compute the passes over a tile.

    Returns:
        ``log sum_neg exp(scale * (S - offset))``, [2, n], -inf for an anchor without negatives; and the
        similarity of each pair [n]. Both are float32 or float64.
    """
    if tile is not None:
        return _OneTileSums.apply(images, texts, scale, offset, *tile)
    return _PairSums.apply(images, texts, ids, scale, offset, triton)


def one_tile_loss(images: Tensor, texts: Tensor, scale: Tensor, offset: float, tile: OneTile, loss: LossOfSums) -> Tensor:
    """A loss of the sums and positives of :func:`pair_sums` for one tile; differentiable with respect to both features.

    Args:
        images, texts, offset, tile: as of :func:`pair_sums`. scale: [2, n], without a gradient.
        loss: from the sums [2, n] and the positives [n], neither with a gradient, to the loss and its derivatives with respect
            to both.
    """
    return _OneTileLoss.apply(images, texts, scale, offset, tile, loss)


def batch_sums(
    images: Tensor, texts: Tensor, ids: Tensor | None, anchors: slice | None, scale: Tensor, *, triton: bool = False
) -> tuple[Tensor, Tensor]:
    """``log sum_neg exp(scale * S)`` of the anchors of a batch of pairs and their positives, as :func:`pair_sums`.

    Args:
        images: [n, d]. texts: [n, d]. ids: as of :func:`pair_variances`.
        anchors: the rows that are anchors; None: all n.
        scale: one for all, 0-d, with a gradient. triton: as of :func:`pair_sums`, where all rows are anchors.

    Returns:
        [2, a] of the image and the text anchors; and [a].
    """
    if anchors is None:
        tile = None if triton else one_tile(images, texts, ids)
        return pair_sums(images, texts, ids, scale, tile=tile, triton=triton)
    ids = torch.arange(len(images), device=images.device) if ids is None else ids
    both = (images, texts), (texts, images)
    sums = [negative_sums(live[anchors], ids[anchors], [Candidates(others, ids)], scale)[0] for live, others in both]
    return torch.stack(sums), cosine_of_rows(images[anchors], texts[anchors])


def pair_counts(ids: Tensor | None, n: int, tile: OneTile | None = None) -> Tensor | int:
    """The number of negatives of each anchor of a batch of pairs: int64 [n], or one number for all."""
    if ids is None:
        return n - 1
    return n - (group_sizes(ids) if tile is None else tile.same_image.sum(1))


class _OneTileSums(torch.autograd.Function):
    """The exponentials of both directions are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, offset: float, similarity: Tensor, same: Tensor
    ) -> tuple[Tensor, Tensor]:
        positive = similarity.diagonal().clone()
        rows, columns, totals, sums = _exponentials(similarity, same, scale.expand(2, len(images)), offset)
        ctx.save_for_backward(images, texts, scale, rows, columns, totals)
        ctx.offset = offset
        return sums, positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, positive_gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, rows, columns, totals = ctx.saved_tensors
        slope = gradient * scale
        factors = slope / totals.clamp(min=torch.finfo(totals.dtype).tiny)
        with full_precision(images):
            v, w = operands(images, texts)
            unit = slope_unit(slope, w)
            if unit is not None:
                factors /= unit
            slopes = (rows * factors[0, :, None]).addcmul_(columns, factors[1])
            if w.dtype.itemsize > 2 and not ctx.needs_input_grad[2]:  # in the same product
                slopes.diagonal().add_(positive_gradient)
                image_gradient, text_gradient = slopes @ w, slopes.T @ v
                return image_gradient.to(images.dtype), text_gradient.to(texts.dtype), None, None, None, None
            results = matmul(slopes, w), matmul(slopes.T, v)
            return _finish(ctx, (images, texts), scale, gradient, positive_gradient, results, unit, 2)


class _OneTileLoss(torch.autograd.Function):
    """The gradient to the similarities is computed with the loss, and is all that is kept besides the features."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, offset: float, tile: OneTile, loss: LossOfSums
    ) -> Tensor:
        positive = tile.similarity.diagonal().clone()
        rows, columns, totals, sums = _exponentials(*tile, scale, offset)
        value, slope, positive_slope = loss(sums, positive)
        if any(ctx.needs_input_grad):
            factors = slope.mul_(scale).div_(totals.clamp_(min=torch.finfo(totals.dtype).tiny))
            slopes = rows.mul_(factors[0, :, None]).addcmul_(columns, factors[1])
            ctx.save_for_backward(images, texts, slopes, positive_slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, slopes, positive_slope = ctx.saved_tensors
        slopes, positive_slope = slopes * gradient, positive_slope * gradient
        with full_precision(images):
            v, w = operands(images, texts)
            if w.dtype.itemsize > 2:
                slopes.diagonal().add_(positive_slope)
                return (slopes @ w).to(images.dtype), (slopes.t() @ v).to(texts.dtype), None, None, None, None
            unit = slope_unit(slopes, w)
            if unit is not None:
                slopes /= unit
            results = matmul(slopes, w), matmul(slopes.T, v)
            return *_feature_gradients((images, texts), positive_slope, results, unit), None, None, None, None


class _PairSums(torch.autograd.Function):
    """Rows and columns keep a running maximum and sum over the tiles. The backward pass makes each tile again."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, ids: Tensor | None, scale: Tensor, offset: float, triton: bool
    ) -> tuple[Tensor, Tensor]:
        ids = torch.arange(len(images), device=images.device) if ids is None else ids
        with full_precision(images):
            v, w = operands(images, texts)
            n, both = len(v), scale.expand(2, len(v))
            number = torch.promote_types(v.dtype, torch.float32)
            positive = v.new_empty(n, dtype=number)
            largest, total = v.new_full((2, n), -torch.inf, dtype=number), v.new_zeros(2, n, dtype=number)
            running = [(largest[k], total[k]) for k in (0, 1)]
            add_exponentials(running, (v, w), (ids, ids), (both[0], both[1]), triton=triton, positive=positive)
            sums = total.log().addcmul_(both, finite(largest) - offset)
        ctx.save_for_backward(images, texts, ids, scale, sums)
        ctx.offset, ctx.triton = offset, triton
        return sums, positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, positive_gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, ids, scale, sums = ctx.saved_tensors
        with full_precision(images):
            v, w = operands(images, texts)
            slope, both = gradient * scale, scale.expand_as(sums)
            unit = slope_unit(slope, w)
            if unit is not None:
                slope = slope / unit
            results = torch.zeros_like(v, dtype=sums.dtype), torch.zeros_like(w, dtype=sums.dtype)
            shift = finite(sums) + scale * ctx.offset
            numbers = [(each[0], each[1]) for each in (both, shift, slope)]
            add_slopes(results, (v, w), (ids, ids), *numbers, triton=ctx.triton)
            return _finish(ctx, (images, texts), scale, gradient, positive_gradient, results, unit, 3)


def _finish(
    ctx: Any,
    features: tuple[Tensor, Tensor],
    scale: Tensor,
    gradient: Tensor,
    positive_gradient: Tensor,
    results: tuple[Tensor, Tensor],
    unit: Tensor | None,
    scale_at: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of :func:`pair_sums` from those of the sums over negatives, which are divided by ``unit``.

    ``scale_at``: the place of the scale among the function's arguments."""
    scale_gradient = None
    if ctx.needs_input_grad[scale_at]:
        # sum_neg p S of all anchors, as S = v w: no further pass over the tiles
        similarities = torch.linalg.vecdot(results[0], raise_precision(features[0])).sum() / scale
        if unit is not None:
            similarities = similarities * unit
        scale_gradient = (similarities - ctx.offset * gradient.sum()).to(scale.dtype)
    gradients = _feature_gradients(features, positive_gradient, results, unit)
    if scale_at == 2:
        return *gradients, scale_gradient, None, None, None
    return *gradients, None, scale_gradient, None, None


def _feature_gradients(
    features: tuple[Tensor, Tensor], positive_gradient: Tensor, results: tuple[Tensor, Tensor], unit: Tensor | None
) -> list[Tensor]:
    """The gradients to both features: ``results``, from the sums over negatives and divided by ``unit``, and the positives'."""
    if unit is not None:
        for result in results:
            result *= unit
    factor = positive_gradient[:, None]
    return [
        result.addcmul_(other.to(result.dtype), factor).to(live.dtype)
        for result, live, other in zip(results, features, reversed(features), strict=True)
    ]


def _exponentials(similarity: Tensor, same: Tensor, scale: Tensor, offset: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The exponentials of a tile's negatives about the largest of each anchor; overwrites the similarities.

    Args:
        similarity: [n, n]. same: bool [n, n], True where a pair is no negative.
        scale: [2, n], of the image and the text anchors. offset: subtracted from the similarities.

    Returns:
        Those of the image anchors (rows) and of the text anchors (columns), [n, n] each; their sums [2, n]; and
        ``log sum_neg exp(scale * (S - offset))`` [2, n].
    """
    shift = _shift(similarity, scale)
    logits = similarity.masked_fill_(same, -torch.inf)
    if shift is not None:
        logits -= shift
        rows, columns = (logits * scale[0, :, None]).exp_(), logits.mul_(scale[1]).exp_()
        largest = scale * (shift - offset)
    else:
        largest = finite(torch.stack([logits.amax(1), logits.amax(0)]))
        rows = (logits - largest[0, :, None]).mul_(scale[0, :, None]).exp_()
        columns = logits.sub_(largest[1]).mul_(scale[1]).exp_()
        largest.sub_(offset).mul_(scale)
    totals = torch.stack([rows.sum(1), columns.sum(0)])
    return rows, columns, totals, totals.log().add_(largest)


def _shift(similarity: Tensor, scale: Tensor) -> float | None:
    """The largest similarity, if no exponential about it can vanish; else None. Known on CPUs only: elsewhere it would have to
    be waited for."""
    if type(similarity) is not Tensor or not at_hand(similarity):
        return None
    least, largest = (float(bound) for bound in similarity.aminmax())
    return largest if (largest - least) * float(scale.amax()) < 80 else None


def _gram_variance(anchors: Tensor, candidates: Tensor, count: Tensor | int, repeats: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Variance from the second moment of the centred candidates [d, d]; same-image pairs are taken out one by one."""
    mean = candidates.mean(0)
    moment, chunk = anchors.new_zeros(mean.numel(), mean.numel()), max(1, tiled.TILE_ON_CPU // mean.numel())
    for part in candidates.split(chunk):
        centred = part - mean
        moment.addmm_(centred.T, centred)
    order, start, size = repeats
    first, second = anchors.new_zeros(len(anchors)), torch.empty_like(anchors[:, 0])
    for part, rows in zip(second.split(chunk), anchors.split(chunk), strict=True):
        part.copy_(torch.linalg.vecdot(rows @ moment, rows))
    for rank in range(int(size.max())):
        one = candidates[order[(start + rank).clamp(max=len(order) - 1)]].sub_(mean)
        similarity = torch.where(rank < size, torch.linalg.vecdot(anchors, one), 0)
        first -= similarity
        second -= similarity.square()
    return (second / count - (first / count).square()).clamp_(min=0)


def _repeats(ids: Tensor | None, features: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where each anchor's image is in the batch: an order by image, the first position there and the number, [n] each.

    None if that is not known without waiting for the device, or if an image is repeated often.
    """
    n = len(features)
    if type(features) is not Tensor or not at_hand(features):
        return None
    if ids is None:
        position = torch.arange(n)
        return position, position, torch.ones_like(position)
    ordered, order = ids.sort()
    start = torch.searchsorted(ordered, ids)
    size = torch.searchsorted(ordered, ids, right=True) - start
    return (order, start, size) if int(size.max()) <= MAX_SAME_IMAGE else None
