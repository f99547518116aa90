"""Log-sum-exp over the negatives of anchors, tile by tile, with its derivatives (docs/equations.md#tiles).

Shapes: a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

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


@any_arguments
class LogSumExp(torch.autograd.Function):
    """``log sum_neg exp(scale * (S - offset))`` of anchors [a] over the negatives of one or several blocks.

    Each anchor keeps a running maximum and the sum of exponentials about it; the backward pass makes each tile again. If no
    candidate needs a gradient, the anchors' gradient is a softmax average of the candidates, as in attention: it is made in
    the forward pass (``average``), and no tile is made twice.

    Mirrored, the rows of the only block are anchors too, with the anchors as their candidates: one product serves both, and
    the result is [2, a]. Without a ring the similarity of each pair [a] is returned too, whose gradient is added in place.
    ``kept``: the similarities [a, a] of a mirrored batch, -inf where a row is not a negative; no tile is made then.
    """

    @staticmethod
    def forward(
        anchors: Tensor,
        scale: Tensor,
        ceiling: Tensor | None,
        kept: Tensor | None,
        offset: float,
        mirrored: bool,
        ring: bool,
        average: bool,
        *fields: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        blocks, a = unflatten(fields), len(anchors)
        dtype = result_dtype(anchors, blocks)
        each_scale = scale.expand(2, a) if mirrored else scale.expand(1, a)
        top, total = anchors.new_full((a,), -torch.inf, dtype=dtype), anchors.new_zeros(a, dtype=dtype)
        averages = torch.zeros_like(anchors, dtype=dtype) if average else None

        def run(visitor: Visitor, anchor_ids: Tensor | None) -> list[Tensor]:
            rows, column = visitor["rows"], None
            if mirrored:
                column = torch.full_like(visitor["scale"], -torch.inf), torch.zeros_like(visitor["scale"])
            for part, tile in tiles(anchors, rows, whole_rows=mirrored):
                if kept is None:
                    live, candidates = matmul_inputs(anchors[part], rows[tile], dtype=dtype)
                    logits = exclude(matmul(live, candidates.T), visitor, anchor_ids, part, tile, ceiling)
                else:
                    logits = kept[part, tile]
                exponentials, fade = _absorb((top, total), part, each_scale[0], logits, 1, overwrite=not mirrored)
                if averages is not None:
                    averages[part] *= fade[:, None]
                    add_product(averages[part], exponentials, candidates)
                if column is not None:
                    _absorb(column, tile, visitor["scale"], logits, 0, overwrite=kept is None)
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
        return torch.stack([sums, *columns]) if mirrored else sums, positive, averages

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        anchors, scale, ceiling, kept, ctx.offset, ctx.mirrored, ctx.ring, _, *fields = inputs
        sums, _, averages = output
        ctx.set_materialize_grads(False)
        if averages is not None:
            ctx.mark_non_differentiable(averages)
        save(ctx, unflatten(fields), anchors, scale, ceiling, sums, averages, kept)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, positive_gradient: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        (anchors, scale, ceiling, sums, averages, kept), blocks = saved(ctx, 6)
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if gradient is None and positive_gradient is None:
            return tuple(results)
        if gradient is None:
            gradient = torch.zeros_like(sums)
        gradient = gradient.masked_fill(sums == -torch.inf, 0)  # of an empty sum it may be NaN
        places = [0, 1, *range(8, len(results), FIELDS)]  # anchors, scale, rows
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
