"""Out of memory: one line in place of a traceback, which names what takes less."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from coder_plugin.errors import CoderError

Method = TypeVar("Method", bound=Callable[..., Any])

_ALLOCATOR = ("out of memory", "DefaultCPUAllocator", "ALLOC_FAILED")
_SHARED = ("out of shared memory", "Bus error", "unable to mmap", "unable to open shared memory object")


class OutOfMemory(CoderError):
    """Memory is exhausted; the message names the options that take less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is exhausted: the device's, the processor's, or what processes share.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("out of range"))
        (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_ALLOCATOR, *_SHARED))


def with_memory_advice(method: Method) -> Method:
    """In a trainer's method, raise :class:`OutOfMemory` for an error that says so."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(_message(error)) from error

    return run  # type: ignore[return-value]


def _message(error: BaseException) -> str:
    reason = " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
    if any(words in str(error) for words in _SHARED):
        return (
            f"out of shared memory ({reason}): the loading processes hand batches over in /dev/shm: give it more room (docker "
            "run --shm-size, or --ipc=host), or use fewer --workers (0 needs none)"
        )
    return (
        f"out of memory ({reason}). Without changing the loss: half the --batch-size and twice the --accum-freq, "
        "--grad-checkpointing, on a GPU --precision amp_bf16; what else helps: docs/faq.md#out-of-memory"
    )
