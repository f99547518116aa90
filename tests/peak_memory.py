"""Peak memory of a computation, counted storage by storage: on meta tensors, which have no values, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that are made inside the context and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in inputs:
                storage = each.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def peak(function: Callable[[], Any]) -> float:
    """Bytes that a computation on meta tensors, which have no values, needs at once beyond its inputs."""
    with PeakMemory() as memory:
        function()
    return memory.peak


class LargestTensor(TorchDispatchMode):
    """A context whose ``bytes`` are those of the largest storage that an operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.layout == torch.strided]
        storages = [each.untyped_storage().nbytes() for each in tensors]
        self.bytes = max([self.bytes, *storages])
        return result
