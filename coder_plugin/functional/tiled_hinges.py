"""Hinge losses of a batch of pairs over the tiles of its similarities (:mod:`tiled`).

Shapes: a anchors of each direction, n pairs, d dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coder_plugin.functional.similarity import raise_precision
from coder_plugin.functional.tiled import (
    add_product,
    add_rows,
    full_precision,
    matmul,
    operands,
    slope_unit,
    square_tiles,
)


def hardest_negatives(
    rows: Tensor, candidates: Tensor, row_ids: Tensor, ids: Tensor | None, *, both: bool, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Each anchor's greatest similarity to a negative, differentiable with respect to both features.

    Args:
        rows: [a, d], anchors. candidates: [n, d].
        row_ids: image ids [a]. ids: [n]; candidates of an anchor's image are not its negatives. None: no candidate is of one.
        both: whether the candidates are anchors too, with the rows as their candidates.
        valid: bool [n], False for rows that are no candidates. None: all are.

    Returns:
        [a] and, with ``both``, [n], float32 or float64; -inf for an anchor without negatives. Of equal negatives one gets the
        gradient.
    """
    values = _Hardest.apply(rows, candidates, row_ids, ids, both, valid)
    return values if both else (values, None)


def hinge_sums(
    rows: Tensor,
    candidates: Tensor,
    row_ids: Tensor,
    ids: Tensor | None,
    row_positive: Tensor,
    positive: Tensor | None,
    *,
    margin: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``sum_neg [margin + S - S_positive]_+`` of each anchor, differentiable with respect to features and positives.

    Args:
        rows, candidates, row_ids, ids, valid: as of :func:`hardest_negatives`.
        row_positive: the similarity of each row to its positive [a]. positive: that of each candidate [n], if the candidates
            are anchors too; else None.

    Returns:
        [a] and, with ``positive``, [n], float32 or float64.
    """
    sums = _HingeSums.apply(rows, candidates, row_ids, ids, valid, row_positive, positive, margin)
    return sums if positive is not None else (sums, None)


class _Hardest(torch.autograd.Function):
    """The place of each maximum is kept; its gradient needs no product."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        candidates: Tensor,
        row_ids: Tensor,
        ids: Tensor | None,
        both: bool,
        valid: Tensor | None,
    ) -> Any:
        with full_precision(rows):
            v, w = operands(rows, candidates)
            number = torch.promote_types(v.dtype, torch.float32)
            values = [v.new_full((len(x),), -torch.inf, dtype=number) for x in (v, w)[: 1 + both]]
            places = [torch.zeros_like(each, dtype=torch.int64) for each in values]
            for part, columns in square_tiles(len(v), len(w), v.device):
                similarity = _masked(matmul(v[part], w[columns].T), row_ids, ids, valid, part, columns)
                for k, where, start in ((0, part, columns.start), (1, columns, part.start))[: 1 + both]:
                    largest, place = similarity.max(1 - k)
                    greater = largest > values[k][where]
                    places[k][where] = torch.where(greater, place + start, places[k][where])
                    values[k][where] = torch.maximum(values[k][where], largest)
        ctx.save_for_backward(rows, candidates, *places)
        return tuple(values) if both else values[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, candidates, *places = ctx.saved_tensors
        v, w = raise_precision(rows), raise_precision(candidates)
        results = torch.zeros_like(v), torch.zeros_like(w)
        for k, (gradient, place) in enumerate(zip(gradients, places, strict=True)):
            anchors, others = ((v, w), (w, v))[k]
            results[k].addcmul_(others[place], gradient[:, None])
            add_rows(results[1 - k], place, anchors * gradient[:, None])
        return results[0].to(rows.dtype), results[1].to(candidates.dtype), None, None, None, None


class _HingeSums(torch.autograd.Function):
    """The backward pass makes each tile again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        candidates: Tensor,
        row_ids: Tensor,
        ids: Tensor | None,
        valid: Tensor | None,
        row_positive: Tensor,
        positive: Tensor | None,
        margin: float,
    ) -> Any:
        ctx.margin, ctx.both = margin, positive is not None
        saved = rows, candidates, row_ids, ids, valid, row_positive, positive
        ctx.save_for_backward(*saved)
        sums = [torch.zeros_like(row_positive)] + ([torch.zeros_like(positive)] if positive is not None else [])
        for part, columns, hinges in _hinges(*saved, margin=margin):
            for k, where in ((0, part), (1, columns))[: len(sums)]:
                sums[k][where] += hinges[k].clamp_(min=0).sum(1 - k)
        return tuple(sums) if ctx.both else sums[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, candidates, *_ = ctx.saved_tensors
        counts = [torch.zeros_like(each) for each in gradients]
        results = [torch.zeros_like(x, dtype=counts[0].dtype) for x in (rows, candidates)]
        with full_precision(rows):
            v, w = operands(rows, candidates)
            unit = slope_unit(torch.cat(gradients), v)
            scaled = gradients if unit is None else [each / unit for each in gradients]
            for part, columns, hinges in _hinges(*ctx.saved_tensors, margin=ctx.margin):
                slopes = None
                for k, where in ((0, part), (1, columns))[: len(counts)]:
                    active = (hinges[k] >= 0).to(counts[k].dtype)
                    counts[k][where] += active.sum(1 - k)
                    active.mul_(scaled[k][where].unsqueeze(1 - k))
                    slopes = active if slopes is None else slopes.add_(active)
                assert slopes is not None
                add_product(results[0][part], slopes, w[columns])
                add_product(results[1][columns], slopes.T, v[part])
        if unit is not None:
            results = [each * unit for each in results]
        positives = [-count * gradient for count, gradient in zip(counts, gradients, strict=True)]
        of_rows, of_candidates = results[0].to(rows.dtype), results[1].to(candidates.dtype)
        return of_rows, of_candidates, None, None, None, positives[0], positives[1] if ctx.both else None, None


def _hinges(
    rows: Tensor,
    candidates: Tensor,
    row_ids: Tensor,
    ids: Tensor | None,
    valid: Tensor | None,
    row_positive: Tensor,
    positive: Tensor | None,
    *,
    margin: float,
) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """For each tile its place, and ``margin + S - S_positive`` about the rows' and the candidates' positives, -inf where
    there is no negative."""
    with full_precision(rows):
        v, w = operands(rows, candidates)
    for part, columns in square_tiles(len(v), len(w), v.device):
        with full_precision(rows):
            similarity = matmul(v[part], w[columns].T).add_(margin)
        _masked(similarity, row_ids, ids, valid, part, columns)
        hinges = [similarity - row_positive[part, None]]
        if positive is not None:
            hinges.append(similarity.sub_(positive[columns]))
        yield part, columns, hinges


def _masked(
    similarity: Tensor, row_ids: Tensor, ids: Tensor | None, valid: Tensor | None, part: slice, columns: slice
) -> Tensor:
    """A tile with -inf where there is no negative, in place."""
    if ids is not None:
        similarity.masked_fill_(row_ids[part, None] == ids[columns], -torch.inf)
    if valid is not None:
        similarity.masked_fill_(~valid[columns], -torch.inf)
    return similarity
