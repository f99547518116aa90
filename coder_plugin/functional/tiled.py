"""Sums and variances over an anchor's negatives without the matrix of all similarities.

The reference form of a loss keeps several matrices of anchors x candidates for its backward pass. Here the matrix is computed
one tile at a time, in the forward pass and again in the backward pass, so that memory grows with the number of rows only. The
results equal the reference's up to rounding. docs/equations.md#tiles says how they are computed.

Shapes: n pairs, a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coder_plugin.functional.host import at_hand
from coder_plugin.functional.similarity import raise_precision

#: Elements of a tile: 8 MB of float32, so that a tile's passes stay in a CPU's cache.
TILE_ON_CPU = 1 << 21
#: Elements of a tile on other devices, where larger products run nearer to the peak.
TILE = 1 << 24
#: A batch of at most this many similarities is one tile, which is kept for the backward pass instead of computed again.
ONE_TILE = 1 << 22
#: The Gram form of the variance takes out same-image pairs one by one, if an image has at most this many texts in a batch.
MAX_SAME_IMAGE = 16


Implementation = Literal["auto", "reference", "tiled"]


def use_tiles(
    implementation: Implementation, features: Sequence[Tensor], *, pairs: int, diversity: str, diversity_gradient: bool
) -> bool:
    """Whether a loss is computed by tiles.

    Args:
        implementation: ``"auto"``: if tiles support the options, except for a small matrix under ``torch.compile``, which
            fuses the reference's operations.
        features: what is compared. Tiles need one vector an item: [n, d].
        pairs: elements of the largest matrix of similarities.

    Raises:
        ValueError: an unknown implementation; ``"tiled"`` with options that tiles do not support.
    """
    if implementation not in ("auto", "reference", "tiled"):
        raise ValueError(f"implementation must be 'auto', 'reference' or 'tiled', got {implementation!r}")
    supported = diversity != "entropy" and not diversity_gradient and all(each.ndim == 2 for each in features)
    if implementation == "tiled" and not supported:
        raise ValueError(
            "implementation='tiled' needs features [n, d], diversity 'std' or 'none', and no diversity_gradient: use 'auto'"
        )
    if implementation != "auto":
        return implementation == "tiled"
    return supported and not (pairs <= ONE_TILE and torch.compiler.is_compiling())


class Candidates(NamedTuple):
    """Rows that anchors are compared with.

    Args:
        rows: [q, d], of any float type; they are raised to the anchors' precision one tile at a time.
        ids: image ids [q]. None: no row shows an anchor's image.
        valid: bool [q], False for rows that are no candidates. None: all are.
    """

    rows: Tensor
    ids: Tensor | None = None
    valid: Tensor | None = None


# -- pairs: every image with every text, both directions from one product --------------------------------------------


class OneTile(NamedTuple):
    """The similarities of a small batch, computed once for variances and sums."""

    similarity: Tensor  # [n, n], without a gradient
    same_image: Tensor  # bool [n, n]; a pair shows the image of itself


def one_tile(images: Tensor, texts: Tensor, ids: Tensor | None) -> OneTile | None:
    """The similarities of a batch of pairs, if they are few enough to be one tile; else None."""
    n = len(images)
    if n * n > ONE_TILE:
        return None
    with torch.no_grad(), full_precision(images):
        similarity = raise_precision(images) @ raise_precision(texts).T
        return OneTile(similarity, _same_image(ids, slice(0, n), similarity))


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
        v, w = raise_precision(images), raise_precision(texts)
        if len(v) >= 2 * v.shape[1]:
            repeats = _repeats(ids, v)
            if repeats is not None:
                return torch.stack([_gram_variance(v, w, count, repeats), _gram_variance(w, v, count, repeats)])
        # about a pivot for each row and each column that is near its mean, so that nothing cancels
        row_pivot, column_pivot = v @ w.mean(0), w @ v.mean(0)
        first, second = v.new_zeros(2, len(v)), v.new_zeros(2, len(v))
        for part in _row_tiles(len(v), len(v), v.device):
            rows = v[part] @ w.T
            same = _same_image(ids, part, rows)
            centred = (rows - row_pivot[part, None]).masked_fill_(same, 0)
            first[0, part], second[0, part] = centred.sum(1), torch.linalg.vecdot(centred, centred)
            torch.sub(rows, column_pivot, out=centred).masked_fill_(same, 0)
            first[1] += centred.sum(0)
            second[1] += centred.square_().sum(0)
        return (second / count - (first / count).square()).clamp_(min=0)


def pair_sums(
    images: Tensor, texts: Tensor, ids: Tensor | None, scale: Tensor, offset: float, tile: OneTile | None = None
) -> tuple[Tensor, Tensor]:
    """Each anchor's sum over its negatives, and its positive; differentiable with respect to both features.

    Args:
        images: [n, d]. texts: [n, d]. ids: as of :func:`pair_variances`.
        scale: > 0, [2, n], of the image and the text anchors, without a gradient.
        offset: subtracted from the negatives' similarities.
        tile: of :func:`one_tile`; its similarities are overwritten.

    Returns:
        ``log sum_neg exp(scale * (S - offset))``, [2, n], -inf for an anchor without negatives; and the
        similarity of each pair [n]. Both are float32 or float64.
    """
    if tile is not None:
        return _OneTileSums.apply(images, texts, scale, offset, *tile)
    return _PairSums.apply(images, texts, ids, scale, offset)


def pair_counts(ids: Tensor | None, n: int, tile: OneTile | None = None) -> Tensor | int:
    """The number of negatives of each anchor of a batch of pairs: int64 [n], or one number for all."""
    if ids is None:
        return n - 1
    return n - (_group_sizes(ids) if tile is None else tile.same_image.sum(1))


class _OneTileSums(torch.autograd.Function):
    """The exponentials of both directions are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, offset: float, similarity: Tensor, same_image: Tensor
    ) -> tuple[Tensor, Tensor]:
        positive = similarity.diagonal().clone()
        logits = similarity.masked_fill_(same_image, -torch.inf)
        largest = _finite(torch.stack([logits.amax(1), logits.amax(0)]))
        rows = (logits - largest[0, :, None]).mul_(scale[0, :, None]).exp_()
        columns = logits.sub_(largest[1]).mul_(scale[1]).exp_()
        totals = torch.stack([rows.sum(1), columns.sum(0)])
        ctx.save_for_backward(images, texts, scale, rows, columns, totals)
        return totals.log().add_(largest.sub_(offset).mul_(scale)), positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, positive_gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, rows, columns, totals = ctx.saved_tensors
        factors = (gradient * scale).div_(totals.clamp(min=torch.finfo(totals.dtype).tiny))
        slopes = (rows * factors[0, :, None]).addcmul_(columns, factors[1])
        slopes.diagonal().add_(positive_gradient)
        with full_precision(images):
            image_gradient, text_gradient = slopes @ raise_precision(texts), slopes.T @ raise_precision(images)
        return image_gradient.to(images.dtype), text_gradient.to(texts.dtype), *[None] * 4


class _PairSums(torch.autograd.Function):
    """Rows are complete in a tile of rows; columns keep a running maximum and sum. The backward pass makes each tile again."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, ids: Tensor | None, scale: Tensor, offset: float
    ) -> tuple[Tensor, Tensor]:
        with full_precision(images):
            v, w = raise_precision(images), raise_precision(texts)
            n, (row_scale, column_scale) = len(v), scale
            sums, positive = v.new_empty(2, n), v.new_empty(n)
            largest, total = v.new_full((n,), -torch.inf), v.new_zeros(n)  # of the columns
            for part in _row_tiles(n, n, v.device):
                logits = v[part] @ w.T
                positive[part] = logits.diagonal(part.start)
                logits.masked_fill_(_same_image(ids, part, logits), -torch.inf)
                row_largest = _finite(logits.amax(1))
                rows = (logits - row_largest[:, None]).mul_(row_scale[part, None]).exp_()
                sums[0, part] = rows.sum(1).log().addcmul_(row_scale[part], row_largest - offset)
                new = torch.maximum(largest, logits.amax(0))
                finite = _finite(new)
                columns = logits.sub_(finite).mul_(column_scale).exp_()
                total = total * ((largest - finite) * column_scale).exp() + columns.sum(0)
                largest = new
            sums[1] = total.log().addcmul_(column_scale, _finite(largest) - offset)
        ctx.save_for_backward(images, texts, ids, scale, sums)
        ctx.offset = offset
        return sums, positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, positive_gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, ids, scale, sums = ctx.saved_tensors
        with full_precision(images):
            v, w = raise_precision(images), raise_precision(texts)
            row_gradient, column_gradient = gradient * scale
            image_gradient, text_gradient = torch.empty_like(images), torch.zeros_like(w)
            shift = _finite(sums) + scale * ctx.offset
            for part in _row_tiles(len(v), len(v), v.device):
                logits = v[part] @ w.T
                logits.masked_fill_(_same_image(ids, part, logits), -torch.inf)
                slopes = (logits * scale[0, part, None]).sub_(shift[0, part, None]).exp_().mul_(row_gradient[part, None])
                logits.mul_(scale[1]).sub_(shift[1]).exp_()
                slopes.addcmul_(logits, column_gradient.expand_as(logits))
                slopes.diagonal(part.start).add_(positive_gradient[part])
                image_gradient[part] = slopes @ w
                text_gradient.addmm_(slopes.T, v[part])
        return image_gradient, text_gradient.to(texts.dtype), *[None] * 3


def _gram_variance(anchors: Tensor, candidates: Tensor, count: Tensor | int, repeats: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Variance from the second moment of the centred candidates [d, d]; same-image pairs are taken out one by one."""
    mean = candidates.mean(0)
    moment, chunk = anchors.new_zeros(mean.numel(), mean.numel()), max(1, TILE_ON_CPU // mean.numel())
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


# -- anchors with candidates that need not be pairs ------------------------------------------------------------------


@torch.no_grad()
def candidate_variance(anchors: Tensor, ids: Tensor | None, candidates: Sequence[Candidates]) -> Tensor:
    """Population variance of each anchor's similarities to its negatives.

    Args:
        anchors: [a, d].
        ids: image ids of the anchors [a]; candidates of an anchor's image are not its negatives. None: all are.
        candidates: their rows, in one or several blocks.

    Returns:
        [a] in float32 or float64. An anchor without negatives has 0.
    """
    dtype = _dtype(anchors, candidates)
    with full_precision(anchors):
        pivot = _mean(candidates, dtype)
        first, second, count = anchors.new_zeros(3, len(anchors), dtype=dtype)
        for part, block, tile in _tiles(len(anchors), candidates, anchors.device):
            centred = anchors[part].to(dtype) @ (block.rows[tile].to(dtype) - pivot).T
            excluded = _excluded(ids, part, block, tile, centred)
            if excluded is not None:
                centred.masked_fill_(excluded, 0)
                count[part] -= excluded.sum(1)
            count[part] += centred.shape[1]
            first[part] += centred.sum(1)
            second[part] += torch.linalg.vecdot(centred, centred)
        count = count.clamp_(min=1)
        return (second / count - (first / count).square()).clamp_(min=0)


def negative_sums(
    anchors: Tensor, ids: Tensor | None, candidates: Sequence[Candidates], scale: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """``log sum_neg exp(scale * (S - offset))`` of each anchor, differentiable with respect to anchors and candidates.

    Args:
        anchors: [a, d]. ids, candidates: as of :func:`candidate_variance`.
        scale: > 0, [a], without a gradient.
        offset: subtracted from every similarity.

    Returns:
        The logarithms [a] in float32 or float64, -inf for an anchor without negatives; the numbers of negatives, int64 [a].
    """
    flat = [tensor for block in candidates for tensor in block]
    return _CandidateSums.apply(anchors, ids, scale, offset, *flat)


class _CandidateSums(torch.autograd.Function):
    """If no candidate needs a gradient, the anchors' gradient is a softmax average of the candidates, as in attention: it is
    made in the forward pass, which then needs no second one."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, ids: Tensor | None, scale: Tensor, offset: float, *flat: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        candidates = _blocks(flat)
        ctx.recompute = any(ctx.needs_input_grad[4:])
        dtype, a = _dtype(anchors, candidates), len(anchors)
        with full_precision(anchors):
            averages = None
            if ctx.needs_input_grad[0] and not ctx.recompute:
                averages = torch.zeros_like(anchors, dtype=dtype)
            top, total = anchors.new_full((a,), -torch.inf, dtype=dtype), anchors.new_zeros(a, dtype=dtype)
            count = torch.zeros(a, dtype=torch.int64, device=anchors.device)
            for part, block, tile in _tiles(a, candidates, anchors.device):
                rows = block.rows[tile].to(dtype)
                logits = anchors[part].to(dtype) @ rows.T
                excluded = _excluded(ids, part, block, tile, logits)
                count[part] += logits.shape[1]
                if excluded is not None:
                    logits.masked_fill_(excluded, -torch.inf)
                    count[part] -= excluded.sum(1)
                new = torch.maximum(top[part], logits.amax(1))
                fade = ((top[part] - _finite(new)) * scale[part]).exp()
                logits.sub_(_finite(new)[:, None]).mul_(scale[part, None]).exp_()
                total[part] = total[part] * fade + logits.sum(1)
                top[part] = new
                if averages is not None:
                    averages[part] = torch.addmm(averages[part] * fade[:, None], logits, rows)
            sums = total.log() + scale * (_finite(top) - offset)
            if averages is not None:
                averages.div_(total.clamp(min=torch.finfo(total.dtype).tiny)[:, None]).mul_(scale[:, None])
        ctx.offset = offset
        ctx.mark_non_differentiable(count)
        if ctx.recompute:
            ctx.save_for_backward(anchors, ids, scale, sums, *flat)
        else:
            ctx.save_for_backward(averages)
        ctx.anchor_dtype = anchors.dtype
        return sums, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.recompute:
            (averages,) = ctx.saved_tensors
            result = None if averages is None else (averages * gradient[:, None]).to(ctx.anchor_dtype)
            return result, *[None] * (len(ctx.needs_input_grad) - 1)
        anchors, ids, scale, sums, *flat = ctx.saved_tensors
        candidates = _blocks(flat)
        dtype = _dtype(anchors, candidates)
        with full_precision(anchors):
            slope, shift = gradient * scale, _finite(sums) + scale * ctx.offset
            anchor_gradient = torch.zeros_like(anchors, dtype=dtype) if ctx.needs_input_grad[0] else None
            gradients: list[Tensor | None] = [
                torch.zeros_like(block.rows, dtype=dtype) if needed else None
                for block, needed in zip(candidates, ctx.needs_input_grad[4::3], strict=True)
            ]
            of_block = {id(block): each for block, each in zip(candidates, gradients, strict=True)}
            for part, block, tile in _tiles(len(anchors), candidates, anchors.device):
                live, rows = anchors[part].to(dtype), block.rows[tile].to(dtype)
                logits = live @ rows.T
                excluded = _excluded(ids, part, block, tile, logits)
                if excluded is not None:
                    logits.masked_fill_(excluded, -torch.inf)
                logits.mul_(scale[part, None]).sub_(shift[part, None]).exp_().mul_(slope[part, None])
                if anchor_gradient is not None:
                    anchor_gradient[part].addmm_(logits, rows)
                row_gradient = of_block[id(block)]
                if row_gradient is not None:
                    row_gradient[tile].addmm_(logits.T, live)
        result = [None if anchor_gradient is None else anchor_gradient.to(ctx.anchor_dtype), None, None, None]
        for block, each in zip(candidates, gradients, strict=True):
            result += [None if each is None else each.to(block.rows.dtype), None, None]
        return tuple(result)


# -- tiles and masks -------------------------------------------------------------------------------------------------


def _row_tiles(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the rows of a matrix so that each has at most a tile's elements (and at least one row)."""
    size = max(1, (TILE_ON_CPU if device.type == "cpu" else TILE) // columns)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _tiles(rows: int, candidates: Sequence[Candidates], device: torch.device) -> Iterator[tuple[slice, Candidates, slice]]:
    """Parts of the anchors, with parts of each block of candidates."""
    elements = TILE_ON_CPU if device.type == "cpu" else TILE
    most = max(1, min(rows, 4096))  # anchors of a tile
    for first in range(0, rows, most):
        part = slice(first, min(first + most, rows))
        for block in candidates:
            size = max(1, elements // max(most, block.rows.shape[1]))
            for start in range(0, len(block.rows), size):
                yield part, block, slice(start, min(start + size, len(block.rows)))


def _same_image(ids: Tensor | None, tile: slice, rows: Tensor) -> Tensor:
    """Bool like ``rows``, True where a row's and a column's pair show one image."""
    columns = torch.arange(rows.shape[1], device=rows.device) if ids is None else ids
    return columns[tile, None] == columns


def _excluded(ids: Tensor | None, part: slice, block: Candidates, tile: slice, logits: Tensor) -> Tensor | None:
    """Bool like ``logits``, True where a candidate is no negative of an anchor. None if all are."""
    invalid = None if block.valid is None else ~block.valid[tile]
    if ids is None or block.ids is None:
        return None if invalid is None else invalid.expand_as(logits)
    same = ids[part, None] == block.ids[tile]
    return same if invalid is None else same | invalid


def _dtype(anchors: Tensor, candidates: Sequence[Candidates]) -> torch.dtype:
    """The type of similarities and sums: float32, or float64 if any row is."""
    dtype = torch.promote_types(anchors.dtype, torch.float32)
    for block in candidates:
        dtype = torch.promote_types(dtype, block.rows.dtype)
    return dtype


def _mean(candidates: Sequence[Candidates], dtype: torch.dtype) -> Tensor:
    """The mean of the valid candidates [d], raised to ``dtype`` one tile at a time."""
    first = candidates[0].rows
    total, count = first.new_zeros(first.shape[1], dtype=dtype), first.new_zeros((), dtype=dtype)
    for _, block, tile in _tiles(1, candidates, first.device):
        rows = block.rows[tile].to(dtype)
        valid = rows.new_ones(len(rows)) if block.valid is None else block.valid[tile].to(dtype)
        total += valid @ rows
        count += valid.sum()
    return total / count.clamp(min=1)


def _group_sizes(ids: Tensor) -> Tensor:
    """The number of pairs of each pair's image, itself included: int64 [n]."""
    ordered = ids.sort().values
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


def _finite(values: Tensor) -> Tensor:
    """The values with 0 in place of -inf, which are those of anchors without negatives."""
    return values.masked_fill(values == -torch.inf, 0)


def _blocks(flat: Sequence[Tensor | None]) -> list[Candidates]:
    return [Candidates(*flat[k : k + 3]) for k in range(0, len(flat), 3)]  # type: ignore[arg-type]


def full_precision(features: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without autocast: similarities are computed in float32 or float64."""
    kind = features.device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext()
