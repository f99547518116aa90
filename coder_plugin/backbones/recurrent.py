"""GRUs for training under autocast on a CPU, where most processors take many times as long in bfloat16 as in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class _Float32OnCPU:
    """Mixin of recurrent layers that ignore autocast on a CPU. On other devices autocast applies as everywhere."""

    def forward(self, input: Any, hx: Tensor | None = None) -> Any:
        rows = input.data if isinstance(input, PackedSequence) else input
        if rows.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(input, hx)  # type: ignore[misc]
        dtype = next(self.parameters()).dtype  # type: ignore[attr-defined]
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.to(dtype), None if hx is None else hx.to(dtype))  # type: ignore[misc]


class GRU(_Float32OnCPU, nn.GRU):  # type: ignore[misc]
    """:class:`torch.nn.GRU`, computed in the type of its weights under autocast on a CPU.

    Example:
        >>> layer = GRU(4, 3, batch_first=True)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     states, last = layer(torch.randn(2, 5, 4))
        >>> states.dtype, last.dtype
        (torch.float32, torch.float32)
    """


class GRUCell(_Float32OnCPU, nn.GRUCell):  # type: ignore[misc]
    """:class:`torch.nn.GRUCell`, computed as :class:`GRU` is."""
