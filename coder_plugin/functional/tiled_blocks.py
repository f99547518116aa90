"""A block of rows compared with a block of columns, one tile at a time, for sums of both (:mod:`tiled`).

Rows are images and columns texts, or the other way round. Pairs of one image are not each other's negatives.
Shapes: r rows, c columns, d dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coder_plugin.functional.tiled import add_product, finite, matmul, square_tiles

#: What belongs to the rows, and what to the columns.
Both = tuple[Tensor, Tensor]


def add_moments(first: Both, second: Both, features: Sequence[Tensor], ids: Both, pivots: Both) -> None:
    """Add the sums over the negatives of ``S - pivot`` and of its square.

    Args:
        first: [r] and [c], float32 or float64, to which the sums are added. second: the sums of squares.
        features: as :func:`coder_plugin.functional.tiled.operands` gives them, [r, d] and [c, d].
        ids: image ids, integers [r] and [c].
        pivots: [r] and [c], near the mean of each row and column, so that nothing cancels.
    """
    (v, w), (row_ids, column_ids) = features, ids
    for part, columns in square_tiles(len(v), len(w), v.device):
        rows = matmul(v[part], w[columns].T)
        same = row_ids[part, None] == column_ids[columns]
        centred = (rows - pivots[0][part, None]).masked_fill_(same, 0)
        first[0][part] += centred.sum(1)
        second[0][part] += torch.linalg.vecdot(centred, centred)
        torch.sub(rows, pivots[1][columns], out=centred).masked_fill_(same, 0)
        first[1][columns] += centred.sum(0)
        second[1][columns] += centred.square_().sum(0)


def add_exponentials(
    running: Sequence[Both],
    features: Sequence[Tensor],
    ids: Both,
    scale: Both,
    *,
    triton: bool = False,
    positive: Tensor | None = None,
) -> None:
    """Update the largest similarity to a negative, and ``sum_neg exp(scale * (S - largest))``, of all rows and columns.

    Args:
        running: these two of the rows [r], and of the columns [c], float32 or float64; at first -inf and 0.
        features, ids: as of :func:`add_moments`.
        scale: > 0, [r] and [c].
        triton: whether Triton's kernels compute the passes over a tile.
        positive: takes the similarity of each row with the column of its number [r]. None: is not needed.
    """
    kernels, (v, w), (row_ids, column_ids) = _kernels(triton), features, ids
    for part, columns in square_tiles(len(v), len(w), v.device):
        logits = matmul(v[part], w[columns].T)
        if positive is not None:
            inside = slice(max(part.start, columns.start), min(part.stop, columns.stop))
            if inside.start < inside.stop:
                positive[inside] = logits.diagonal(part.start - columns.start)
        sums = kernels.tile_sums(logits, row_ids[part], column_ids[columns], scale[0][part], scale[1][columns])
        for (largest, total), each_scale, where, (new, of_tile) in zip(running, scale, (part, columns), sums, strict=True):
            old, top = largest[where], torch.maximum(largest[where], new)
            of_old, of_new = ((each - finite(top)).mul_(each_scale[where]).exp_() for each in (old, new))
            total[where] = total[where] * of_old + of_tile * of_new
            largest[where] = top


def add_slopes(
    results: Both, features: Sequence[Tensor], ids: Both, scale: Both, shift: Both, slope: Both, *, triton: bool = False
) -> None:
    """Add the gradients of sums over exponentials: of the slopes ``slope * exp(scale * S - shift)`` of rows and columns.

    Args:
        results: gradients of the rows [r, d] and of the columns [c, d], float32 or float64, to which is added.
        features, ids: as of :func:`add_moments`.
        scale, shift, slope: [r] and [c] each.
        triton: as of :func:`add_exponentials`.
    """
    kernels, (v, w), (row_ids, column_ids) = _kernels(triton), features, ids
    for part, columns in square_tiles(len(v), len(w), v.device):
        logits = matmul(v[part], w[columns].T)
        of_tile = [(each[0][part], each[1][columns]) for each in (scale, shift, slope)]
        slopes = kernels.tile_slopes(logits, row_ids[part], column_ids[columns], *of_tile, w.dtype)
        add_product(results[0][part], slopes, w[columns])
        add_product(results[1][columns], slopes.T, v[part])


class _Torch:
    """A tile's passes in torch's operations; :mod:`triton_pairs` has the same as kernels."""

    @staticmethod
    def tile_sums(
        similarity: Tensor, row_ids: Tensor, column_ids: Tensor, row_scale: Tensor, column_scale: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Of each row and of each column of a tile the largest similarity to a negative, -inf without one, and
        ``sum_neg exp(scale * (S - largest))``.

        Args:
            similarity: [r, c], overwritten. row_ids: image ids [r]. column_ids: [c]. row_scale: [r]. column_scale: [c].
        """
        similarity.masked_fill_(row_ids[:, None] == column_ids, -torch.inf)
        of_rows, of_columns = similarity.amax(1), similarity.amax(0)
        rows = (similarity - finite(of_rows)[:, None]).mul_(row_scale[:, None]).exp_().sum(1)
        columns = similarity.sub_(finite(of_columns)).mul_(column_scale).exp_().sum(0)
        return (of_rows, rows), (of_columns, columns)

    @staticmethod
    def tile_slopes(
        similarity: Tensor,
        row_ids: Tensor,
        column_ids: Tensor,
        scale: tuple[Tensor, Tensor],
        shift: tuple[Tensor, Tensor],
        slope: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """``slope * exp(scale * S - shift)`` of the rows and of the columns, added, [r, c]; 0 where there is no negative.

        Args:
            similarity: [r, c], overwritten. scale, shift, slope: those of the rows [r] and of the columns [c].
            dtype: of the features, to which the slopes may be rounded.
        """
        similarity.masked_fill_(row_ids[:, None] == column_ids, -torch.inf)
        slopes = (similarity * scale[0][:, None]).sub_(shift[0][:, None]).exp_().mul_(slope[0][:, None])
        similarity.mul_(scale[1]).sub_(shift[1]).exp_()
        return slopes.addcmul_(similarity, slope[1].expand_as(similarity))


def _kernels(triton: bool) -> Any:
    """What computes a tile's passes."""
    if not triton:
        return _Torch
    from coder_plugin.functional import triton_pairs

    return triton_pairs
