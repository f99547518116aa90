"""GRUs that stay in float32 under autocast on a CPU.

PyTorch's backward pass of a GRU in bfloat16 on a CPU is many times slower than in float32: a training step of ``region-bigru``
takes several times as long. On other devices autocast applies as everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class GRU(nn.GRU):
    """:class:`torch.nn.GRU`, whose outputs are float32 under autocast on a CPU, computed without autocast.

    Example:
        >>> layer = GRU(4, 3, batch_first=True)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     states, last = layer(torch.randn(2, 5, 4))
        >>> states.dtype, last.dtype
        (torch.float32, torch.float32)
    """

    def forward(self, input: Any, hx: Tensor | None = None) -> Any:  # type: ignore[override]
        data = input.data if isinstance(input, PackedSequence) else input
        if not autocasts_on_cpu(data):
            return super().forward(input, hx)
        with without_autocast():
            dtype = self.weight_ih_l0.dtype
            return super().forward(input.to(dtype), None if hx is None else hx.to(dtype))


class GRUCell(nn.GRUCell):
    """:class:`torch.nn.GRUCell`, float32 under autocast on a CPU as :class:`GRU` is.

    Example:
        >>> cell = GRUCell(4, 3)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     state = cell(torch.randn(2, 4), torch.zeros(2, 3))
        >>> state.dtype
        torch.float32
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if not autocasts_on_cpu(input):
            return super().forward(input, hx)
        with without_autocast():
            dtype = self.weight_ih.dtype
            return super().forward(input.to(dtype), None if hx is None else hx.to(dtype))


def autocasts_on_cpu(tensor: Tensor) -> bool:
    """Whether the tensor is on a CPU and autocast would choose the dtype of its products."""
    return tensor.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def without_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False)
