"""Precision, length, cosines and range of feature tensors.

Shapes: n anchors, q candidates, d dimensions, v features of one item.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from coder_plugin.errors import CoderError

#: A vector of at most this length has no direction.
MIN_LENGTH = 1e-12
#: The largest value of an input: its fourth power, such as the square of an inner product, stays within the type's range.
_MAX_VALUE = {dtype: 1e-2 * torch.finfo(dtype).max ** 0.25 for dtype in (torch.float32, torch.float64)}
#: Collects the rows of all processes, in rank order, from this process's rows.
Gather = Callable[[Tensor], Tensor]


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read without synchronising with a device or breaking a compiled graph.

    Example:
        >>> is_on_cpu(torch.zeros(1)), is_on_cpu(torch.zeros(1, device="meta"))
        (True, False)
    """
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu"


def unit(features: Tensor) -> Tensor:
    """L2-normalised over the last dimension, in float32 or float64, also under autocast.

    A vector without a direction, not longer than 1e-12, becomes zero and gets no gradient.

    Example:
        >>> unit(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    features = upcast(features)
    length = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return features / length.masked_fill(length <= MIN_LENGTH, torch.inf)


def cosine(anchors: Tensor, candidates: Tensor) -> Tensor:
    """Inner products of two sets of features: cosines, if the features are L2-normalised.

    Args:
        anchors: float [n, d], or [n, v, d] if an item has several features (the views of CAMERA).
        candidates: float [q, d] or [q, v, d].

    Returns:
        [n, q] in float32, or float64 for float64 features, also under autocast. Of items with several features the
        greatest product counts.

    Example:
        >>> cosine(torch.eye(2), torch.tensor([[0.6, 0.8]]))
        tensor([[0.6000],
                [0.8000]])
    """
    with torch.autocast(anchors.device.type, enabled=False):
        dtype = torch.promote_types(upcast(anchors).dtype, upcast(candidates).dtype)
        products = anchors.to(dtype).flatten(0, -2) @ candidates.to(dtype).flatten(0, -2).T
        if anchors.ndim == candidates.ndim == 2:
            return products
        views = [x.shape[1] if x.ndim == 3 else 1 for x in (anchors, candidates)]
        return products.unflatten(1, (-1, views[1])).unflatten(0, (-1, views[0])).amax((1, 3))


def cosine_of_rows(one: Tensor, other: Tensor) -> Tensor:
    """Inner product of each row with the row of the same number: [n, d], [n, d] -> [n], in float32 or float64."""
    return (upcast(one) * upcast(other)).sum(-1)


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``total[index] += rows``, duplicates included, in a fixed order: every rank gets the same bits.

    On a CPU ``index_add_`` goes from row to row; on a GPU it adds in any order, and ``index_put_`` sorts first.
    """
    if total.device.type == "cpu":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)


def check_temperature(temperature: float | Tensor) -> None:
    """:class:`ValueError` unless a number is > 0 and finite; the value of a tensor is not checked."""
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}")


def check_range(**inputs: Tensor | None) -> None:
    """:class:`CoderError` that names a tensor whose finite values are so large that a loss of them could overflow.

    Only tensors on the CPU are checked, and none while compiling: on a GPU the check would synchronise. There, as for NaN
    and infinities, the trainer checks the loss.
    """
    for name, value in inputs.items():
        if value is None or not is_on_cpu(value) or not value.numel() or not value.is_floating_point():
            continue
        if range_checked(value):
            continue
        limit = _MAX_VALUE[torch.float64 if value.dtype == torch.float64 else torch.float32]
        largest = max(abs(float(bound)) for bound in value.detach().aminmax())
        if limit < largest < math.inf:
            raise CoderError(f"{name} holds values of {largest:.1e}, which overflow: normalise it, to at most {limit:.0e}")
        mark_range_checked(value)


def mark_range_checked(value: Tensor) -> None:
    """Note that the values, until the tensor is written again, need no :func:`check_range`."""
    if not value.is_inference():
        value._range_checked = value._version  # type: ignore[attr-defined]


def range_checked(value: Tensor) -> bool:
    """Whether :func:`check_range` has seen the values that the tensor has now."""
    return not value.is_inference() and getattr(value, "_range_checked", None) == value._version
