"""GRUs for training under autocast on a CPU.

In bfloat16 a GRU takes half the time of float32 on a processor with AVX512-BF16, somewhat more on one with AVX-512 alone, and
about eleven times as long on one without AVX-512 (as limited by oneDNN's ``ONEDNN_MAX_CPU_ISA``). So it follows autocast on
the first, and stays in float32 on the others and under float16. On other devices autocast applies as everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class _MayStayFloat32:
    """Mixin of recurrent layers that ignore autocast where :func:`stays_float32` says so."""

    def forward(self, input: Any, hx: Tensor | None = None) -> Any:
        if not stays_float32(input.data if isinstance(input, PackedSequence) else input):
            return super().forward(input, hx)  # type: ignore[misc]
        dtype = next(self.parameters()).dtype  # type: ignore[attr-defined]
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.to(dtype), None if hx is None else hx.to(dtype))  # type: ignore[misc]


class GRU(_MayStayFloat32, nn.GRU):  # type: ignore[misc]
    """:class:`torch.nn.GRU`, computed in float32 under autocast on a CPU without AVX512-BF16 (:func:`stays_float32`).

    Example:
        >>> layer = GRU(4, 3, batch_first=True)
        >>> with torch.autocast("cpu", torch.float16):
        ...     states, last = layer(torch.randn(2, 5, 4))
        >>> states.dtype, last.dtype
        (torch.float32, torch.float32)
    """


class GRUCell(_MayStayFloat32, nn.GRUCell):  # type: ignore[misc]
    """:class:`torch.nn.GRUCell`, computed in float32 where :class:`GRU` is."""


def stays_float32(tensor: Tensor) -> bool:
    """Whether a GRU over the tensor ignores autocast: on a CPU, unless autocast is to bfloat16 and the CPU has AVX512-BF16.

    PyTorch must use AVX-512 as well: the variable ``ATEN_CPU_CAPABILITY`` may forbid it.
    """
    if tensor.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    return torch.get_autocast_dtype("cpu") != torch.bfloat16 or not _multiplies_bfloat16()


def _multiplies_bfloat16() -> bool:
    """Whether PyTorch says that the CPU has AVX512-BF16. A version that cannot say so counts as a CPU without it."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and torch.backends.cpu.get_cpu_capability() == "AVX512" and bool(supported())
