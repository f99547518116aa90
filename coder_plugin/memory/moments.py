"""Running moments of a bank: the spread of similarities to all its entries without forming one of them (METHODS 1).

Shapes: n anchors, m rows, D dimensions.

For rows b_q and an anchor v, sum_q (v b_q - v p)^2 = v^T M v with M = sum_q (b_q - p)(b_q - p)^T about any pivot p: n D^2
multiplications instead of n Q D. About a pivot near the mean no large numbers cancel, and M is kept in float64, because a
spread of 1e-3 along one direction may have to be told from 0.3 along the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CHUNK = 4096


class Sums(NamedTuple):
    """For each anchor [n]: sum and sum of squares of all rows' similarities to it, relative to the pivot's."""

    first: Tensor
    second: Tensor


class Moments(nn.Module):
    """Sum and second moment of a changing set of rows about a pivot, as float64 buffers."""

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
        """Count rows [m, D] in, or with weight -1 out; ``weight`` may also be one number a row [m]."""
        centred = rows.to(self.pivot.dtype) - self.pivot
        weighted = centred * (weight[:, None] if isinstance(weight, Tensor) else weight)
        self.first += weighted.sum(0)
        self.second.addmm_(weighted.T, centred)

    @torch.no_grad()
    def rebuild(self, rows: Tensor) -> None:
        """Start again from all rows [m, D], about their mean: ends the drift of pivot and rounding."""
        self.pivot.copy_(rows.to(self.pivot.dtype).mean(0) if len(rows) else torch.zeros_like(self.pivot))
        self.first.zero_()
        self.second.zero_()
        for start in range(0, len(rows), _CHUNK):
            self.add(rows[start : start + _CHUNK])

    def sums(self, anchors: Tensor) -> Sums:
        """Over all rows counted in, for anchors [n, D]."""
        anchors = anchors.to(self.pivot.dtype)  # autocast leaves float64 alone
        return Sums(anchors @ self.first, ((anchors @ self.second) * anchors).sum(1))

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Moments:
        """Keep float64 where a model is moved to a narrower dtype; Apple's GPUs have none, so float32 there."""
        kept = {name: buffer for name, buffer in self.named_buffers()}
        number = torch.float32 if fn(torch.zeros(1)).device.type == "mps" else torch.float64
        for name, buffer in kept.items():
            self._buffers[name] = buffer.to(number)
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != number:
                self._buffers[name] = buffer.to(moved.device, number)
        return self
