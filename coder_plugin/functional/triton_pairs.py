"""A tile's passes over its similarities as one Triton kernel each (:mod:`tiled_blocks`): each element is read once.

Imported where ``--loss-impl triton`` asks for it. Shapes: r rows and c columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 64, 128  # elements of a program


@triton.jit
def _sums_kernel(
    similarity,
    row_ids,
    column_ids,
    row_scale,
    column_scale,
    row_largest,
    row_total,
    column_largest,
    column_total,
    r,
    c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The largest similarity to a negative and the sum of exponentials about it, of the part of each row and column."""
    i, j = tl.program_id(0), tl.program_id(1)
    rows, columns = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < r, columns < c
    inside = has_row[:, None] & has_column[None, :]
    place = rows.to(tl.int64)[:, None] * c + columns[None, :]
    s = tl.load(similarity + place, mask=inside, other=float("-inf"))
    of_rows = tl.load(row_ids + rows, mask=has_row, other=0)
    of_columns = tl.load(column_ids + columns, mask=has_column, other=0)
    s = tl.where(of_rows[:, None] == of_columns[None, :], float("-inf"), s)
    scale = tl.load(row_scale + rows, mask=has_row, other=1.0)
    largest = tl.max(s, 1)
    about = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp((s - about[:, None]) * scale[:, None]), 1)
    tl.store(row_largest + j * r + rows, largest, mask=has_row)
    tl.store(row_total + j * r + rows, total, mask=has_row)
    scale = tl.load(column_scale + columns, mask=has_column, other=1.0)
    largest = tl.max(s, 0)
    about = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp((s - about[None, :]) * scale[None, :]), 0)
    tl.store(column_largest + i * c + columns, largest, mask=has_column)
    tl.store(column_total + i * c + columns, total, mask=has_column)


@triton.jit
def _slopes_kernel(
    similarity,
    row_ids,
    column_ids,
    row_scale,
    column_scale,
    row_shift,
    column_shift,
    row_slope,
    column_slope,
    slopes,
    r,
    c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``slope * exp(scale * S - shift)`` of both directions, added; 0 where there is no negative."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < r, columns < c
    inside = has_row[:, None] & has_column[None, :]
    place = rows.to(tl.int64)[:, None] * c + columns[None, :]
    s = tl.load(similarity + place, mask=inside, other=float("-inf"))
    of_rows = tl.load(row_ids + rows, mask=has_row, other=0)
    of_columns = tl.load(column_ids + columns, mask=has_column, other=0)
    s = tl.where(of_rows[:, None] == of_columns[None, :], float("-inf"), s)
    scale = tl.load(row_scale + rows, mask=has_row, other=1.0)
    shift = tl.load(row_shift + rows, mask=has_row, other=0.0)
    slope = tl.load(row_slope + rows, mask=has_row, other=0.0)
    result = tl.exp(s * scale[:, None] - shift[:, None]) * slope[:, None]
    scale = tl.load(column_scale + columns, mask=has_column, other=1.0)
    shift = tl.load(column_shift + columns, mask=has_column, other=0.0)
    slope = tl.load(column_slope + columns, mask=has_column, other=0.0)
    result += tl.exp(s * scale[None, :] - shift[None, :]) * slope[None, :]
    tl.store(slopes + place, result.to(slopes.dtype.element_ty), mask=inside)


def tile_sums(
    similarity: Tensor, row_ids: Tensor, column_ids: Tensor, row_scale: Tensor, column_scale: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """As :func:`coder_plugin.functional.tiled_blocks.tile_sums`, without writing to the similarities."""
    r, c = similarity.shape
    grid = triton.cdiv(r, _ROWS), triton.cdiv(c, _COLUMNS)
    rows, columns = similarity.new_empty(2, grid[1], r), similarity.new_empty(2, grid[0], c)
    inputs = [each.contiguous() for each in (similarity, row_ids, column_ids, row_scale, column_scale)]
    with torch.cuda.device_of(similarity):  # Triton launches on the current device
        _sums_kernel[grid](*inputs, *rows, *columns, r, c, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return _join(rows, row_scale), _join(columns, column_scale)


def tile_slopes(
    similarity: Tensor,
    row_ids: Tensor,
    column_ids: Tensor,
    scale: tuple[Tensor, Tensor],
    shift: tuple[Tensor, Tensor],
    slope: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """As :func:`coder_plugin.functional.tiled_blocks.tile_slopes`, rounded to ``dtype`` as they are written."""
    r, c = similarity.shape
    slopes = torch.empty_like(similarity, dtype=dtype, memory_format=torch.contiguous_format)
    grid = triton.cdiv(r, _ROWS), triton.cdiv(c, _COLUMNS)
    inputs = [each.contiguous() for each in (similarity, row_ids, column_ids, *scale, *shift, *slope)]
    with torch.cuda.device_of(similarity):
        _slopes_kernel[grid](*inputs, slopes, r, c, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return slopes


def _join(parts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The largest similarity and the sum about it, from those of the parts [2, parts, n]."""
    largest = parts[0].amax(0)
    about = largest.masked_fill(largest == -torch.inf, 0)
    return largest, ((parts[0] - about).mul_(scale).exp_() * parts[1]).sum(0)
