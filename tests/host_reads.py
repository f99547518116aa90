"""Counts where a program waits for the values of a tensor: what would make the host wait for a GPU, seen on a CPU."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coder_plugin import tensors

#: Operations whose result, or its shape, the host must wait for.
WAITING = (
    "aten::_local_scalar_dense",  # item, int, float, bool
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique",
    "aten::equal",
    "aten::is_nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
)
#: Methods that read a tensor on a CPU without an operation that the dispatcher sees.
READING = ("tolist", "numpy", "cpu", "__array__")


class _Operations(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        masks = []
        if name.startswith(("aten::index.", "aten::index_put", "aten::_index_put_impl_")):
            masks = [each for each in args[1] if isinstance(each, torch.Tensor) and each.dtype == torch.bool]
        if name.startswith(WAITING) or masks:
            self.reads.append(_at(name))
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING or (name == "to" and args[1:] and str(args[1]) == "cpu" and args[0].device.type != "cpu"):
            self.reads.append(_at(name))
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Inside the context ``tensors.is_on_cpu`` is False, so that the code runs as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:  # modules have imported the function by its name, so patch its code
        patch.setattr(tensors.is_on_cpu, "__code__", (lambda tensor: False).__code__)
        yield


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Inside the context, the list receives the name and the place of each read, by code that runs as on a GPU.

    Reads of a torch optimizer's step numbers, which are on the CPU on every device, are left out.
    """
    reads: list[str] = []
    with as_on_a_device(), _Operations(reads), _Methods(reads):
        yield reads
    reads[:] = [read for read in reads if "optimizer_step" not in read.split(" < ")[0]]


def _at(name: str) -> str:
    codes = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(2))]  # extract_stack reads files
    if any("/torch/optim/" in code.co_filename and code.co_name == "_get_value" for code, _ in codes):
        return f"{name} at optimizer_step"
    places = [f"{code.co_filename.rsplit('/', 2)[-1]}:{line}" for code, line in codes if "/torch/" not in code.co_filename]
    return f"{name} at " + " < ".join(places[:5])
