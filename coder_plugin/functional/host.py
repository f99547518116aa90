"""Which tensors the host can read at once. Reading one of a GPU makes the host wait until all that was queued is computed."""

from __future__ import annotations

import torch
from torch import Tensor

#: Types of devices whose values the host reads without waiting.
HOST_DEVICES = frozenset({"cpu"})


def at_hand(tensor: Tensor) -> bool:
    """Whether values of the tensor can be read without waiting for a device or, while compiling, leaving the graph.

    Example:
        >>> at_hand(torch.zeros(1)), at_hand(torch.zeros(1, device="meta"))
        (True, False)
    """
    return not torch.compiler.is_compiling() and tensor.device.type in HOST_DEVICES
