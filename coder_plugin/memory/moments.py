"""Running moments of a bank: the variance of similarities to all entries, without forming the similarities.

CODER eq. 3-5, docs/equations.md#diversity.

Shapes: n anchors, m rows, D dimensions.

For rows b_q and an anchor v, sum_q (v b_q - v p)^2 = v^T M v with M = sum_q (b_q - p)(b_q - p)^T about any pivot p:
n D^2 multiplications instead of n Q D. With a pivot near the mean no large numbers cancel. M is kept in float64,
because a standard deviation of 1e-3 along one direction must be accurate next to 0.3 along others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Rows that are raised to float64 at once: reading a bank of any size costs the memory of so many rows.
CHUNK = 2048


class Sums(NamedTuple):
    """For each anchor [n], over all rows: sum and sum of squares of ``anchor . row - anchor . pivot``."""

    first: Tensor
    second: Tensor


class Moments(nn.Module):
    """Sum [D] and second moment [D, D] of a changing set of rows about a pivot [D], as float64 buffers.

    Args:
        dim: D.

    Example:
        >>> moments = Moments(2)
        >>> moments.add(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> moments.sums(torch.tensor([[2.0, 1.0]]))
        Sums(first=tensor([3.], dtype=torch.float64), second=tensor([5.], dtype=torch.float64))
    """

    pivot: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("pivot", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("first", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("second", torch.zeros(dim, dim, dtype=torch.float64))

    @torch.no_grad()
    def add(self, rows: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add rows [m, D]; with weight -1 remove them. ``weight`` may be a number or one number per row [m]."""
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            centred = rows[part].to(self.pivot.dtype) - self.pivot
            weighted = centred * (weight[part, None] if isinstance(weight, Tensor) else weight)
            self.first += weighted.sum(0)
            self.second.addmm_(weighted.T, centred)

    @torch.no_grad()
    def rebuild(self, rows: Tensor) -> None:
        """Recompute from all rows [m, D] about their mean, which removes accumulated rounding errors."""
        self.pivot.zero_()
        for start in range(0, len(rows), CHUNK):
            self.pivot += rows[start : start + CHUNK].sum(0, dtype=self.pivot.dtype)
        self.pivot /= max(1, len(rows))
        self.first.zero_()
        self.second.zero_()
        self.add(rows)

    def sums(self, anchors: Tensor) -> Sums:
        """Sums over all added rows, for anchors [n, D]."""
        anchors = anchors.to(self.pivot.dtype)  # autocast leaves float64 alone
        return Sums(anchors @ self.first, torch.linalg.vecdot(anchors @ self.second, anchors))

    def spread(self, count: Tensor) -> Tensor:
        """Variance of the ``count`` added rows about their mean, summed over dimensions: 0-d, >= 0; 0 without rows.

        Example:
            >>> moments = Moments(2)
            >>> moments.add(torch.eye(2))
            >>> moments.spread(torch.tensor(2))
            tensor(0.5000, dtype=torch.float64)
        """
        count = count.clamp(min=1)
        return (self.second.trace() / count - (self.first / count).square().sum()).clamp(min=0)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Moments:
        """Keep float64 when a model is cast to a smaller dtype; float32 on Apple's GPUs, which have no float64."""
        saved = {name: buffer for name, buffer in self.named_buffers()}
        dtype = torch.float32 if fn(torch.zeros(1)).device.type == "mps" else torch.float64
        for name, buffer in saved.items():
            self._buffers[name] = buffer.to(dtype)
        super()._apply(fn, recurse)
        for name, buffer in saved.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != dtype:
                self._buffers[name] = buffer.to(moved.device, dtype)
        return self
