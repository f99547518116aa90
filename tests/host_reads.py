"""Counts where a program waits for the values of a tensor: what would make the host wait for a GPU, seen on a CPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside the context, the list receives the name and the place of each read.

    The code runs as on a GPU, where values are not at hand (``functional.similarity.at_hand``).
    """
    reads: list[str] = []
    with monkeypatch.context() as patch, _Operations(reads), _Methods(reads):
        yield reads


def _at(name: str) -> str:
    frames = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename]
    return f"{name} at " + " < ".join(f"{frame.filename.rsplit('/', 2)[-1]}:{frame.lineno}" for frame in frames[:-6:-1])
