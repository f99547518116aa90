"""Products of feature rows tile by tile, in the precision that the device multiplies well.

Shapes: a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from coder_plugin.tensors import upcast

#: Elements of a tile on a CPU: 8 MB of float32, so that the passes over a tile stay in its cache.
TILE_ON_CPU = 1 << 21
#: Elements of a tile on other devices, where larger products run nearer to the peak.
TILE = 1 << 24
#: The most anchors of a tile.
MAX_ANCHORS = 4096
#: Devices with autocast. ``torch.amp.is_autocast_available`` breaks a compiled graph in PyTorch 2.10.
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


def tiles(anchors: Tensor, candidates: Tensor, *, whole_rows: bool = False) -> Iterator[tuple[slice, slice]]:
    """Parts of the anchors [a, d] with parts of the candidates [q, d], of at most a tile's elements (and at least one row).

    Args:
        whole_rows: on a CPU a tile holds all candidates of a few anchors.
    """
    (a, d), q = anchors.shape, len(candidates)
    on_cpu = anchors.device.type == "cpu"
    elements = TILE_ON_CPU if on_cpu else TILE
    if whole_rows and on_cpu:
        width = max(1, q)
        height = max(1, elements // width)
    else:
        height = max(1, min(a, MAX_ANCHORS))
        width = max(1, elements // max(height, d))
    for top in range(0, a, height):
        for left in range(0, q, width):
            yield slice(top, min(top + height, a)), slice(left, min(left + width, q))


def chunks(features: Tensor) -> Iterator[slice]:
    """Parts of the rows [n, d], of at most a tile's elements: a half type is converted a part at a time."""
    elements = TILE_ON_CPU if features.device.type == "cpu" else TILE
    height = max(1, elements // max(1, features.shape[1]))
    for top in range(0, len(features), height):
        yield slice(top, min(top + height, len(features)))


def multiplies_halves(device: torch.device) -> bool:
    """Whether half types are multiplied as they are, with sums in float32: on CUDA devices, at twice the rate of TF32.

    ROCm's devices are named so too, and do not have ``mm(..., out_dtype=)``.
    """
    return device.type == "cuda" and torch.version.cuda is not None


def matmul_inputs(*features: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Features as they are multiplied: of one half type as they are, where the device can (:func:`multiplies_halves`); else
    in float32 or float64 (``dtype``, if it is given)."""
    first = features[0]
    if first.dtype.itemsize == 2 and multiplies_halves(first.device) and all(x.dtype == first.dtype for x in features):
        return features
    return tuple(upcast(x) if dtype is None else x.to(dtype) for x in features)


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


def fp16_scale(slopes: Tensor, like: Tensor) -> Tensor | None:
    """For float16, whose range is small: a number, 0-d, that slopes are divided by before they are rounded to it, so that twice
    the largest of ``slopes`` becomes 2^15. None for other types, and without slopes."""
    if like.dtype != torch.float16 or not slopes.numel():
        return None
    return (slopes.abs().amax() / 2**14).clamp(min=torch.finfo(slopes.dtype).tiny)


def full_precision(features: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without autocast: similarities are computed in float32 or float64."""
    kind = features.device.type
    enabled = kind in _AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext()


def finite(values: Tensor) -> Tensor:
    """The values with 0 in place of -inf, which anchors without negatives have."""
    return values.masked_fill(values == -torch.inf, 0)
