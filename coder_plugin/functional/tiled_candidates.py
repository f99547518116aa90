"""Sums and variances over an anchor's negatives among candidates that need not be pairs, such as banks (:mod:`tiled`).

Shapes: a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coder_plugin.functional.tiled import (
    Candidates,
    add_product,
    candidate_tiles,
    excluded,
    finite,
    full_precision,
    matmul,
    operands,
    slope_unit,
)


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
        for part, block, tile in candidate_tiles(len(anchors), candidates, anchors.device):
            centred = anchors[part].to(dtype) @ (block.rows[tile].to(dtype) - pivot).T
            masked = excluded(ids, part, block, tile, centred)
            if masked is not None:
                centred.masked_fill_(masked, 0)
                count[part] -= masked.sum(1)
            count[part] += centred.shape[1]
            first[part] += centred.sum(1)
            second[part] += torch.linalg.vecdot(centred, centred)
        count = count.clamp_(min=1)
        return (second / count - (first / count).square()).clamp_(min=0)


def negative_sums(
    anchors: Tensor,
    ids: Tensor | None,
    candidates: Sequence[Candidates],
    scale: Tensor,
    offset: float = 0.0,
    ceiling: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``log sum_neg exp(scale * (S - offset))`` of each anchor, differentiable with respect to anchors and candidates.

    Args:
        anchors: [a, d]. ids, candidates: as of :func:`candidate_variance`.
        scale: > 0: [a], without a gradient; or one for all, 0-d, with a gradient.
        offset: subtracted from every similarity.
        ceiling: [a]; candidates of a greater similarity are no negatives. None: all may be.

    Returns:
        The logarithms [a] in float32 or float64, -inf for an anchor without negatives; the numbers of negatives, int64 [a].
    """
    flat = [tensor for block in candidates for tensor in block]
    return _CandidateSums.apply(anchors, ids, scale, offset, ceiling, *flat)


class _CandidateSums(torch.autograd.Function):
    """If no candidate needs a gradient, the anchors' gradient is a softmax average of the candidates, as in attention: it is
    made in the forward pass, which then needs no second one."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        ids: Tensor | None,
        scale: Tensor,
        offset: float,
        ceiling: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        candidates = _blocks(flat)
        ctx.recompute = any(ctx.needs_input_grad[5:])
        dtype, a = _dtype(anchors, candidates), len(anchors)
        with full_precision(anchors):
            averages, each_scale = None, scale.expand(a)
            if (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]) and not ctx.recompute:
                averages = torch.zeros_like(anchors, dtype=dtype)
            top, total = anchors.new_full((a,), -torch.inf, dtype=dtype), anchors.new_zeros(a, dtype=dtype)
            count = torch.zeros(a, dtype=torch.int64, device=anchors.device)
            for part, block, tile in candidate_tiles(a, candidates, anchors.device):
                live, rows = operands(anchors[part], block.rows[tile], dtype=dtype)
                logits = matmul(live, rows.T)
                count[part] += logits.shape[1]
                masked = _masked(ids, part, block, tile, logits, ceiling)
                if masked is not None:
                    logits.masked_fill_(masked, -torch.inf)
                    count[part] -= masked.sum(1)
                new = torch.maximum(top[part], logits.amax(1))
                fade = (top[part] - finite(new)).mul_(each_scale[part]).exp_()
                logits.sub_(finite(new)[:, None]).mul_(each_scale[part, None]).exp_()
                total[part] = total[part] * fade + logits.sum(1)
                top[part] = new
                if averages is not None:
                    averages[part] *= fade[:, None]
                    add_product(averages[part], logits, rows)
            sums = total.log() + each_scale * (finite(top) - offset)
            if averages is not None:
                averages.div_(total.clamp(min=torch.finfo(total.dtype).tiny)[:, None]).mul_(each_scale[:, None])
        ctx.offset = offset
        ctx.mark_non_differentiable(count)
        if ctx.recompute:
            ctx.save_for_backward(anchors, ids, scale, sums, ceiling, *flat)
        elif ctx.needs_input_grad[2]:
            ctx.save_for_backward(averages, anchors, scale)
        else:
            ctx.save_for_backward(averages)
        ctx.anchor_dtype = anchors.dtype
        return sums, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.recompute:
            averages, *rest = ctx.saved_tensors
            result, of_scale = None, None
            if averages is not None:
                result = averages * gradient[:, None]
                if rest:
                    anchors, scale = rest
                    of_scale = _scale_gradient(ctx, result, anchors, scale, gradient)
                result = result.to(ctx.anchor_dtype)
            return result, None, of_scale, *[None] * (len(ctx.needs_input_grad) - 3)
        anchors, ids, scale, sums, ceiling, *flat = ctx.saved_tensors
        candidates = _blocks(flat)
        dtype = _dtype(anchors, candidates)
        with full_precision(anchors):
            slope, shift = gradient * scale, finite(sums) + scale * ctx.offset
            each_scale = scale.expand_as(sums)
            unit = slope_unit(slope, anchors)
            if unit is not None:
                slope = slope / unit
            anchor_gradient = None
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
                anchor_gradient = torch.zeros_like(anchors, dtype=dtype)
            gradients: list[Tensor | None] = [
                torch.zeros_like(block.rows, dtype=dtype) if needed else None
                for block, needed in zip(candidates, ctx.needs_input_grad[5::3], strict=True)
            ]
            of_block = {id(block): each for block, each in zip(candidates, gradients, strict=True)}
            for part, block, tile in candidate_tiles(len(anchors), candidates, anchors.device):
                live, rows = operands(anchors[part], block.rows[tile], dtype=dtype)
                logits = matmul(live, rows.T)
                masked = _masked(ids, part, block, tile, logits, ceiling)
                if masked is not None:
                    logits.masked_fill_(masked, -torch.inf)
                logits.mul_(each_scale[part, None]).sub_(shift[part, None]).exp_().mul_(slope[part, None])
                if anchor_gradient is not None:
                    add_product(anchor_gradient[part], logits, rows)
                row_gradient = of_block[id(block)]
                if row_gradient is not None:
                    add_product(row_gradient[tile], logits.T, live)
        if unit is not None:
            for each in (anchor_gradient, *gradients):
                if each is not None:
                    each *= unit
        of_scale = None
        if anchor_gradient is not None and ctx.needs_input_grad[2]:
            of_scale = _scale_gradient(ctx, anchor_gradient, anchors, scale, gradient)
        result = None if anchor_gradient is None else anchor_gradient.to(ctx.anchor_dtype)
        results = [result, None, of_scale, None, None]
        for block, each in zip(candidates, gradients, strict=True):
            results += [None if each is None else each.to(block.rows.dtype), None, None]
        return tuple(results)


def _scale_gradient(ctx: Any, anchor_gradient: Tensor, anchors: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """sum_neg p (S - offset) of all anchors, from the anchors' gradient: S is linear in an anchor."""
    similarities = torch.linalg.vecdot(anchor_gradient, anchors.to(anchor_gradient.dtype)).sum() / scale
    return (similarities - ctx.offset * gradient.sum()).to(scale.dtype)


def _masked(
    ids: Tensor | None, part: slice, block: Candidates, tile: slice, logits: Tensor, ceiling: Tensor | None
) -> Tensor | None:
    """:func:`excluded`, and candidates above the anchors' ceiling."""
    masked = excluded(ids, part, block, tile, logits)
    if ceiling is None:
        return masked
    above = logits > ceiling[part, None]
    return above if masked is None else above | masked


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
    for _, block, tile in candidate_tiles(1, candidates, first.device):
        rows = block.rows[tile].to(dtype)
        valid = rows.new_ones(len(rows)) if block.valid is None else block.valid[tile].to(dtype)
        total += valid @ rows
        count += valid.sum()
    return total / count.clamp(min=1)


def _blocks(flat: Sequence[Tensor | None]) -> list[Candidates]:
    return [Candidates(*flat[k : k + 3]) for k in range(0, len(flat), 3)]  # type: ignore[arg-type]
