"""Losses of pairs without the matrix of all similarities: what their tiles have in common.

The reference form of a loss keeps several matrices of anchors x candidates for its backward pass. Here the matrix is computed
one tile at a time, in the forward pass and again in the backward pass, so that memory grows with the number of rows only. The
results equal the reference's up to rounding. docs/equations.md#tiles says how they are computed:
:mod:`~coder_plugin.functional.tiled_pairs` for batches of pairs (:mod:`~coder_plugin.functional.tiled_blocks`: their blocks),
:mod:`~coder_plugin.functional.tiled_candidates` for anchors with other candidates, such as banks,
:mod:`~coder_plugin.functional.tiled_hinges` for hinge losses.

Shapes: n pairs, a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional.similarity import raise_precision

#: Elements of a tile: 8 MB of float32, so that a tile's passes stay in a CPU's cache.
TILE_ON_CPU = 1 << 21
#: Elements of a tile on other devices, where larger products run nearer to the peak.
TILE = 1 << 24
#: Devices whose tiles are whole rows. On others they are squares: gradients are then added to memory fewer times.
WHOLE_ROWS = ("cpu",)
#: A batch of pairs with at most this many similarities is one tile, which is kept for the backward pass instead of computed
#: again: 64 MB of float32, and twice that for the exponentials of both directions.
ONE_TILE = 1 << 24
#: A matrix of at most this many similarities is small: losses that tiles do not speed up form it.
SMALL_MATRIX = 1 << 22
#: Devices with autocast. ``torch.amp.is_autocast_available`` breaks a compiled graph in PyTorch 2.10.
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")

Implementation = Literal["auto", "reference", "tiled", "triton"]


def use_tiles(
    implementation: Implementation,
    features: Sequence[Tensor],
    *,
    pairs: int,
    diversity: str = "none",
    diversity_gradient: bool = False,
    small: bool = True,
) -> bool:
    """Whether a loss is computed by tiles.

    Args:
        implementation: ``"auto"``: if tiles support the options, except for a small matrix under ``torch.compile``, which
            fuses the reference's operations.
        features: what is compared. Tiles need one vector an item: [n, d].
        pairs: elements of the largest matrix of similarities.
        small: whether tiles save time or memory for a small matrix too; else ``"auto"`` takes the reference for it.

    Raises:
        ValueError: an unknown implementation; ``"tiled"`` or ``"triton"`` with options that tiles do not support; ``"triton"``
            where its kernels cannot run.
    """
    if implementation not in ("auto", "reference", "tiled", "triton"):
        raise ValueError(f"implementation must be 'auto', 'reference', 'tiled' or 'triton', got {implementation!r}")
    supported = diversity != "entropy" and not diversity_gradient and all(each.ndim == 2 for each in features)
    if implementation in ("tiled", "triton") and not supported:
        raise ValueError(
            f"implementation={implementation!r} needs features [n, d], diversity 'std' or 'none', and no diversity_gradient: "
            "use 'auto'"
        )
    if implementation == "triton" and not torch.compiler.is_compiling():
        check_triton(features[0].device)
    if implementation != "auto":
        return implementation != "reference"
    return supported and (pairs > SMALL_MATRIX or (small and not torch.compiler.is_compiling()))


def check_triton(device: torch.device | None = None) -> None:
    """Refuse ``implementation="triton"`` where its kernels cannot run.

    Args:
        device: of the features; None: not known yet.

    Raises:
        CoderError: Triton is not installed, or there is no GPU and ``TRITON_INTERPRET=1`` is not set either.
    """
    if importlib.util.find_spec("triton") is None:
        reason = "the package triton, which is not installed"
    elif os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on"):
        return
    elif not torch.cuda.is_available():
        reason = "a GPU, and torch finds none"
    elif device is not None and device.type != "cuda":
        reason = f"features on a GPU, and these are on {device}"
    else:
        return
    raise CoderError(f"implementation='triton' (--loss-impl triton) needs {reason}: use 'auto'")


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


def hard_candidates(
    negatives: Tensor, negative_ids: Tensor | None, negative_valid: Tensor | None, image_ids: Tensor | None
) -> Candidates:
    """Hard negatives as candidates of images, whose ids may not be known."""
    return Candidates(negatives, None if image_ids is None else negative_ids, negative_valid)


# -- tiles and masks -------------------------------------------------------------------------------------------------


def square_tiles(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Parts of the rows with parts of the columns of a matrix, of at most a tile's elements (and at least one row)."""
    elements = TILE_ON_CPU if device.type == "cpu" else TILE
    width = max(1, columns if device.type in WHOLE_ROWS else min(columns, math.isqrt(elements)))
    height = max(1, elements // width)
    for start in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(start, min(start + height, rows)), slice(left, min(left + width, columns))


def candidate_tiles(
    rows: int, candidates: Sequence[Candidates], device: torch.device
) -> Iterator[tuple[slice, Candidates, slice]]:
    """Parts of the anchors, with parts of each block of candidates."""
    elements = TILE_ON_CPU if device.type == "cpu" else TILE
    most = max(1, min(rows, 4096))  # anchors of a tile
    for first in range(0, rows, most):
        part = slice(first, min(first + most, rows))
        for block in candidates:
            size = max(1, elements // max(most, block.rows.shape[1]))
            for start in range(0, len(block.rows), size):
                yield part, block, slice(start, min(start + size, len(block.rows)))


def same_image(ids: Tensor | None, part: slice, columns: slice, device: torch.device) -> Tensor:
    """Bool [rows, columns], True where a row's and a column's pair show one image. Without ids each pair has its own."""
    if ids is None:
        rows = torch.arange(part.start, part.stop, device=device)
        return rows[:, None] == torch.arange(columns.start, columns.stop, device=device)
    return ids[part, None] == ids[columns]


def excluded(ids: Tensor | None, part: slice, block: Candidates, tile: slice, logits: Tensor) -> Tensor | None:
    """Bool like ``logits``, True where a candidate is no negative of an anchor. None if all are."""
    invalid = None if block.valid is None else ~block.valid[tile]
    if ids is None or block.ids is None:
        return None if invalid is None else invalid.expand_as(logits)
    same = ids[part, None] == block.ids[tile]
    return same if invalid is None else same | invalid


def group_sizes(ids: Tensor) -> Tensor:
    """The number of pairs of each pair's image, itself included: int64 [n]."""
    ordered = ids.sort().values
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


def candidate_counts(ids: Tensor, candidates: Candidates) -> Tensor:
    """The number of valid candidates that do not show an anchor's image, of anchors with these ids: int64 [a]."""
    rows = candidates.rows
    valid = torch.ones(len(rows), dtype=torch.int64, device=rows.device)
    if candidates.valid is not None:
        valid = candidates.valid.long()
    if candidates.ids is None:
        return valid.sum().expand(len(ids))
    ordered, order = candidates.ids.sort()
    before = torch.nn.functional.pad(valid[order].cumsum(0), (1, 0))  # valid ones before each place
    own = before[torch.searchsorted(ordered, ids, right=True)] - before[torch.searchsorted(ordered, ids)]
    return before[-1] - own


def finite(values: Tensor) -> Tensor:
    """The values with 0 in place of -inf, which are those of anchors without negatives."""
    return values.masked_fill(values == -torch.inf, 0)


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``total[index] += rows``, duplicates included, in an order that does not change: on every rank the same bits.

    On a CPU ``index_add_`` goes from row to row; on a GPU it adds in any order, and ``index_put_`` sorts first.
    """
    if total.device.type == "cpu":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)


# -- products --------------------------------------------------------------------------------------------------------


def multiplies_halves(device: torch.device) -> bool:
    """Whether half types are multiplied as they are, with sums in float32: on CUDA devices, at twice the rate of TF32.

    ROCm's devices are named so too, and do not have ``mm(..., out_dtype=)``.
    """
    return device.type == "cuda" and torch.version.cuda is not None


def operands(*features: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Features as they are multiplied: of one half type as they are, where the device can (:func:`multiplies_halves`); else
    raised to float32 or float64 (``dtype``, if it is given)."""
    first = features[0]
    if first.dtype.itemsize == 2 and multiplies_halves(first.device) and all(x.dtype == first.dtype for x in features):
        return features
    return tuple(raise_precision(x) if dtype is None else x.to(dtype) for x in features)


def matmul(one: Tensor, other: Tensor) -> Tensor:
    """``one @ other`` in float32 or float64. Products of a half type are exact and added in float32."""
    if other.dtype.itemsize > 2:
        return one @ other
    if one.device.type == "cpu":  # has no such product: the same numbers
        return one.to(other.dtype).float() @ other.float()
    return torch.mm(one.to(other.dtype), other, out_dtype=torch.float32)


def add_product(result: Tensor, one: Tensor, other: Tensor) -> None:
    """Add ``one @ other`` to the result."""
    if other.dtype == result.dtype:
        result.addmm_(one, other)
    else:
        result += matmul(one, other)


def slope_unit(slopes: Tensor, like: Tensor) -> Tensor | None:
    """For float16, whose range is small: a number that slopes are divided by before they are rounded to it, 0-d, so that twice
    the largest of ``slopes`` becomes 2^15. None for other types, and without slopes."""
    if like.dtype != torch.float16 or not slopes.numel():
        return None
    return (slopes.abs().amax() / 2**14).clamp(min=torch.finfo(slopes.dtype).tiny)


def full_precision(features: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without autocast: similarities are computed in float32 or float64."""
    kind = features.device.type
    enabled = kind in _AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext()
