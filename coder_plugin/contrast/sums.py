"""Log-sum-exp over the negatives of anchors, tile by tile, with its derivatives (docs/equations.md#tiles).

Shapes: a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast.autograd import (
    FIELDS,
    Visitor,
    any_arguments,
    dense_gradients,
    directions_of,
    exclude,
    result_dtype,
    save,
    saved,
    unflatten,
    visit,
    wants_graph,
)
from coder_plugin.contrast.negatives import Block, Dense
from coder_plugin.contrast.products import (
    add_product,
    chunks,
    finite,
    fp16_scale,
    full_precision,
    matmul,
    matmul_inputs,
    tiles,
)
from coder_plugin.tensors import is_on_cpu

#: Of a mirrored batch with at most this many similarities they are kept for the backward pass: 256 MB of float32.
MAX_KEPT = 1 << 26


@any_arguments
class LogSumExp(torch.autograd.Function):
    """``log sum_neg exp(scale * (S - offset))`` of anchors [a] over the negatives of one or several blocks.

    Each anchor keeps a running maximum and the sum of exponentials about it; the backward pass makes each tile again. If no
    candidate needs a gradient, the anchors' gradient is a softmax average of the candidates, as in attention: it is made in
    the forward pass (``average``), and no tile is made twice.

    Mirrored, the rows of the only block are anchors too, with the anchors as their candidates: one product serves both, and
    the result is [2, a]. Without a ring the similarity of each pair [a] is returned too, whose gradient is added in place, and
    up to ``MAX_KEPT`` similarities are kept, so that the backward pass makes no tile again.
    """

    @staticmethod
    def forward(
        anchors: Tensor,
        scale: Tensor,
        ceiling: Tensor | None,
        offset: float,
        mirrored: bool,
        ring: bool,
        average: bool,
        *fields: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        blocks, a = unflatten(fields), len(anchors)
        dtype = result_dtype(anchors, blocks)
        each_scale = scale.expand(2, a) if mirrored else scale.expand(1, a)
        top, total = anchors.new_full((a,), -torch.inf, dtype=dtype), anchors.new_zeros(a, dtype=dtype)
        averages = torch.zeros_like(anchors, dtype=dtype) if average else None
        kept = anchors.new_empty(a, a, dtype=dtype) if mirrored and not ring and a**2 <= MAX_KEPT else None

        def run(visitor: Visitor, anchor_ids: Tensor | None) -> list[Tensor]:
            rows, column = visitor["rows"], None
            if mirrored:
                column = torch.full_like(visitor["scale"], -torch.inf), torch.zeros_like(visitor["scale"])
            for part, tile in tiles(anchors, rows, whole_rows=mirrored):
                live, candidates = matmul_inputs(anchors[part], rows[tile], dtype=dtype)
                logits = exclude(matmul(live, candidates.T), visitor, anchor_ids, part, tile, ceiling)
                if kept is not None:
                    kept[part, tile] = logits
                exponentials, fade = _absorb((top, total), part, each_scale[0], logits, 1, overwrite=not mirrored)
                if averages is not None:
                    averages[part] *= fade[:, None]
                    add_product(averages[part], exponentials, candidates)
                if column is not None:
                    _absorb(column, tile, visitor["scale"], logits, 0, overwrite=True)
            return [] if column is None else [_logarithm(*column, visitor["scale"], offset)]

        columns: list[Tensor] = []
        with full_precision(anchors):
            for block in blocks:
                more = {"scale": each_scale[1]} if mirrored else None
                this = functools.partial(run, anchor_ids=block.anchor_ids)
                columns += visit(block, this, ring=ring, merge=torch.logaddexp, more=more)
            sums = _logarithm(top, total, each_scale[0], offset)
            if averages is not None:
                averages.div_(total.clamp(min=torch.finfo(dtype).tiny)[:, None]).mul_(each_scale[0, :, None])
            positive = None
            if mirrored and not ring:
                sides, positive = (anchors, blocks[0].rows), torch.empty_like(sums)
                for part in chunks(anchors):
                    positive[part] = torch.linalg.vecdot(*(each[part].to(dtype) for each in sides))
        return torch.stack([sums, *columns]) if mirrored else sums, positive, averages, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        anchors, scale, ceiling, ctx.offset, ctx.mirrored, ctx.ring, _, *fields = inputs
        sums, _, averages, kept = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each in (averages, kept) if each is not None))
        save(ctx, unflatten(fields), anchors, scale, ceiling, sums, averages, kept)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, positive_gradient: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        (anchors, scale, ceiling, sums, averages, kept), blocks = saved(ctx, 6)
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if gradient is None and positive_gradient is None:
            return tuple(results)
        if gradient is None:
            gradient = torch.zeros_like(sums)
        gradient = gradient.masked_fill(sums == -torch.inf, 0)  # of an empty sum it may be NaN
        places = [0, 1, *range(7, len(results), FIELDS)]  # anchors, scale, rows
        needed = [bool(ctx.needs_input_grad[place]) for place in places]
        if wants_graph():
            inputs = [anchors, scale, *(block.rows for block in blocks)]
            both = gradient, torch.zeros_like(sums[0]) if positive_gradient is None else positive_gradient
            gradients = dense_gradients(
                _dense(ctx, blocks, ceiling), inputs, needed, both if ctx.mirrored else gradient, ring=ctx.ring
            )
        else:
            gradients = _gradients(
                ctx, anchors, scale, ceiling, sums, averages, kept, blocks, needed, gradient, positive_gradient
            )
        for place, each in zip(places, gradients, strict=True):
            results[place] = each
        return tuple(results)


def _dense(ctx: Any, blocks: Sequence[Block], ceiling: Tensor | None) -> Callable[..., Any]:
    def statistic(anchors: Tensor, scale: Tensor, *rows: Tensor) -> Any:
        filled = [block._replace(rows=each) for block, each in zip(blocks, rows, strict=True)]
        dense = Dense(directions_of(anchors, filled, mirrored=ctx.mirrored), mirrored=ctx.mirrored)
        if ctx.mirrored:
            return dense.logsumexp(scale, ctx.offset), dense.positive
        each_scale = scale[None] if scale.ndim else scale
        return dense.logsumexp(each_scale, ctx.offset, None if ceiling is None else ceiling[None])[0]

    return statistic


def _gradients(
    ctx: Any,
    anchors: Tensor,
    scale: Tensor,
    ceiling: Tensor | None,
    sums: Tensor,
    averages: Tensor | None,
    kept: Tensor | None,
    blocks: Sequence[Block],
    needed: Sequence[bool],
    gradient: Tensor,
    positive_gradient: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of anchors, scale and the blocks' rows."""
    dtype = sums.dtype
    of_rows: list[Tensor | None] = [None] * len(blocks)
    if averages is not None:
        of_anchors = averages * gradient[:, None]
    else:
        with full_precision(anchors):
            slope = gradient * scale
            unit = fp16_scale(slope, anchors)
            if unit is not None:
                if ctx.ring:  # slopes of several ranks are added
                    unit = distributed.all_max(unit)
                slope = slope / unit
            # of each anchor its scale, the logarithm of its sum, and its slope
            numbers = torch.stack([scale.expand_as(sums), finite(sums) + scale * ctx.offset, slope])
            numbers = numbers if ctx.mirrored else numbers[:, None]
            of_anchors = torch.zeros_like(anchors, dtype=dtype)
            for k, block in enumerate(blocks):
                more = {"numbers": numbers[:, 1]} if ctx.mirrored else None
                wanted = needed[2 + k]
                run = _slopes_of(anchors, block, numbers[:, 0], of_anchors, ceiling, kept, dtype=dtype, wanted=wanted)
                if returned := visit(block, run, ring=ctx.ring, more=more):
                    of_rows[k] = returned[0]
            if unit is not None:
                for each in (of_anchors, *of_rows):
                    if each is not None:
                        each *= unit
    of_scale = None
    if needed[1]:
        # sum_neg p (S - offset) over all anchors: S is linear in an anchor, so no further pass over the tiles is needed
        similarities = torch.linalg.vecdot(of_anchors, anchors.to(of_anchors.dtype)).sum() / scale
        of_scale = (similarities - ctx.offset * gradient.sum()).to(scale.dtype)
    if positive_gradient is not None:
        for each, other in ((of_anchors, blocks[0].rows), (of_rows[0], anchors)):
            if each is not None:
                for part in chunks(other):
                    each[part].addcmul_(other[part].to(dtype), positive_gradient[part, None])
    rows = [None if each is None else each.to(block.rows.dtype) for each, block in zip(of_rows, blocks, strict=True)]
    return [of_anchors.to(anchors.dtype) if needed[0] else None, of_scale, *rows]


def _slopes_of(
    anchors: Tensor,
    block: Block,
    numbers: Tensor,
    of_anchors: Tensor,
    ceiling: Tensor | None,
    kept: Tensor | None,
    *,
    dtype: torch.dtype,
    wanted: bool,
) -> Callable[[Visitor], list[Tensor]]:
    """What adds ``slope * exp(scale * S - shift)`` times the candidates to the anchors' gradient, and returns that of the rows
    where it is ``wanted``. ``numbers`` [3, a]: scale, shift and slope of each anchor."""

    def run(visitor: Visitor) -> list[Tensor]:
        rows, columns = visitor["rows"], visitor.get("numbers")
        of_rows = torch.zeros_like(rows, dtype=dtype) if wanted else None
        for part, tile in tiles(anchors, rows, whole_rows=columns is not None):
            live, candidates = matmul_inputs(anchors[part], rows[tile], dtype=dtype)
            if kept is None:
                slopes = exclude(matmul(live, candidates.T), visitor, block.anchor_ids, part, tile, ceiling)
            else:
                slopes = kept[part, tile]
            scale, shift, slope = numbers[:, part, None]
            if columns is None:
                slopes.mul_(scale).sub_(shift).exp_().mul_(slope)
            else:
                logits, slopes = slopes, (slopes * scale).sub_(shift).exp_().mul_(slope)
                scale, shift, slope = columns[:, tile]
                logits = logits.mul_(scale) if kept is None else logits * scale
                slopes.addcmul_(logits.sub_(shift).exp_(), slope.expand_as(logits))
            add_product(of_anchors[part], slopes, candidates)
            if of_rows is not None:
                add_product(of_rows[tile], slopes.T, live)
        return [] if of_rows is None else [of_rows]

    return run


def _absorb(
    running: tuple[Tensor, Tensor], where: slice, scale: Tensor, logits: Tensor, dim: int, *, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """Update the running maximum and sum of exponentials of a tile's rows (``dim=1``) or columns (``dim=0``).

    Returns:
        The tile's exponentials about the new maximum, and the factor by which what was summed before has faded.
    """
    top, total = running
    each_scale = scale[where]
    new = torch.maximum(top[where], logits.amax(dim))
    about = finite(new)
    fade = (top[where] - about).mul_(each_scale).exp_()
    centred = logits.sub_(about.unsqueeze(dim)) if overwrite else logits - about.unsqueeze(dim)
    exponentials = centred.mul_(each_scale.unsqueeze(dim)).exp_()
    total[where] = total[where] * fade + exponentials.sum(dim)
    top[where] = new
    return exponentials, fade


def _logarithm(top: Tensor, total: Tensor, scale: Tensor, offset: float) -> Tensor:
    """``log sum exp(scale * (S - offset))`` from the maximum and the sum about it."""
    return total.log().addcmul_(scale, finite(top) - offset)


class Tile(NamedTuple):
    """All similarities of a mirrored batch, about their mean.

    Args:
        similarity: [n, n], less ``mean``; 0 where a pair is not a negative.
        mean: 0-d. positive: the similarity of each pair [n].
        same: which pairs are not negatives, bool [n, n]. None: the diagonal alone.
        number: of the negatives of each pair, at least 1: int64 [n], or one for all.
    """

    similarity: Tensor
    mean: Tensor
    positive: Tensor
    same: Tensor | None
    number: Tensor | int

    @classmethod
    def of(cls, similarity: Tensor, ids: Tensor) -> Tile:
        """The tile of similarities, which are overwritten, of pairs of these images [n]."""
        positive, mean = similarity.diagonal().clone(), similarity.mean()
        similarity -= mean
        if _are_distinct(ids):
            tile = cls(similarity, mean, positive, None, max(1, len(ids) - 1))
        else:
            same = ids[:, None] == ids
            tile = cls(similarity, mean, positive, same, (len(ids) - same.sum(1)).clamp(min=1))
        tile.fill(0)
        return tile

    def fill(self, value: float) -> None:
        """Write a value in place of the pairs that are not negatives."""
        if self.same is None:
            self.similarity.fill_diagonal_(value)
        else:
            self.similarity.masked_fill_(self.same, value)


def _are_distinct(ids: Tensor) -> bool:
    """Whether it is known that no image repeats: only on a CPU, elsewhere reading it would synchronise."""
    if type(ids) is not Tensor or not is_on_cpu(ids):
        return False
    ordered = ids.sort().values
    return not (ordered[1:] == ordered[:-1]).any()


@any_arguments
class OneTile(torch.autograd.Function):
    """The mirrored log-sum-exp and the positives of a batch whose similarities are one tile.

    The exponentials of both directions are kept for the backward pass, which adds the positives' gradient to the diagonal of
    the same product.
    """

    @staticmethod
    def forward(images: Tensor, texts: Tensor, scale: Tensor, offset: float, tile: Tile, ids: Tensor) -> tuple[Tensor, ...]:
        """The ``tile`` is overwritten."""
        logits, mean = tile.similarity, tile.mean
        each_scale = scale.expand(2, len(images))
        stable = _has_small_exponents(logits, each_scale)
        tile.fill(-torch.inf)
        if stable:
            rows, columns = (logits * each_scale[0, :, None]).exp_(), logits.mul_(each_scale[1]).exp_()
            shift = each_scale * (mean - offset)
        else:
            largest = finite(torch.stack([logits.amax(1), logits.amax(0)]))
            rows = (logits - largest[0, :, None]).mul_(each_scale[0, :, None]).exp_()
            columns = logits.sub_(largest[1]).mul_(each_scale[1]).exp_()
            shift = largest.add_(mean - offset).mul_(each_scale)
        totals = torch.stack([rows.sum(1), columns.sum(0)])
        return totals.log().add_(shift), tile.positive, rows, columns, totals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        images, texts, scale, ctx.offset, tile, ids = inputs
        ctx.has_negatives = tile.same is None and len(ids) > 1
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(images, texts, scale, ids, *output[2:])

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, positive_gradient: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        images, texts, scale, ids, rows, columns, totals = ctx.saved_tensors
        rest = (None, None, None)
        if gradient is None and positive_gradient is None:
            return None, None, None, *rest
        if gradient is None:
            gradient = torch.zeros_like(totals)
        if positive_gradient is None:
            positive_gradient = torch.zeros_like(totals[0])
        needed = ctx.needs_input_grad[:3]
        if not ctx.has_negatives:
            gradient = gradient.masked_fill(totals == 0, 0)  # of an empty sum it may be NaN
        if wants_graph():

            def statistic(images: Tensor, texts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
                dense = Dense(directions_of(images, [Block(texts, ids, ids)], mirrored=True), mirrored=True)
                return dense.logsumexp(scale, ctx.offset), dense.positive

            both = gradient, positive_gradient
            return *dense_gradients(statistic, [images, texts, scale], needed, both), *rest
        slope = gradient * scale
        factors = slope / (totals if ctx.has_negatives else totals.clamp(min=torch.finfo(totals.dtype).tiny))
        with full_precision(images):
            v, w = matmul_inputs(images, texts, dtype=slope.dtype)
            unit = fp16_scale(slope, w)
            if unit is not None:
                factors /= unit
            slopes = (rows * factors[0, :, None]).addcmul_(columns, factors[1])
            if w.dtype.itemsize > 2 and not needed[2]:  # the positives in the same product
                slopes.diagonal().add_(positive_gradient)
                return (slopes @ w).to(images.dtype), (slopes.T @ v).to(texts.dtype), None, *rest
            results = [matmul(slopes, w), matmul(slopes.T, v)]
            if unit is not None:
                results = [each * unit for each in results]
            of_scale = None
            if needed[2]:  # as in LogSumExp
                similarities = torch.linalg.vecdot(results[0], images.to(results[0].dtype)).sum() / scale
                of_scale = (similarities - ctx.offset * gradient.sum()).to(scale.dtype)
            pairs = zip(results, (images, texts), (texts, images), strict=True)
            of_images, of_texts = (
                result.addcmul_(other.to(result.dtype), positive_gradient[:, None]).to(live.dtype)
                for result, live, other in pairs
            )
        return of_images, of_texts, of_scale, *rest


def _has_small_exponents(similarity: Tensor, scale: Tensor) -> bool:
    """Whether it is known that no exponential can vanish or overflow. Only on a CPU: elsewhere reading it would synchronise."""
    if type(similarity) is not Tensor or not is_on_cpu(similarity):
        return False
    return max(abs(float(bound)) for bound in similarity.aminmax()) * float(scale.amax()) < 40
