"""Out of memory: which options of this run take less, and what they change.

Shapes: n pairs of a forward pass on one rank, N pairs of a step over all ranks, Q bank entries, D dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from coder_plugin import distributed
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
    """In a trainer's method, raise :class:`OutOfMemory` with this run's options for an error that says so."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not hasattr(self, "config"):
                raise
            raise OutOfMemory(advise(self, error)) from error

    return run  # type: ignore[return-value]


def advise(trainer: Any, error: BaseException) -> str:
    """One line: what happened, what takes less memory in this run, and what changes the training."""
    said = " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
    if any(words in str(error) for words in _SHARED):
        workers = trainer.config.data.workers
        return (
            f"out of shared memory ({said}): the loading processes hand batches over in /dev/shm: give it more room (docker "
            f"run --shm-size, or --ipc=host), or use fewer --workers ({workers} now; 0 needs none)"
        )
    where = "" if not hasattr(trainer, "device") else f" on {trainer.device}"
    where += f" of rank {distributed.rank()}" if distributed.world_size() > 1 else ""
    exact, other = _exact(trainer), _other(trainer)
    text = f"out of memory{where} ({said})"
    if exact:
        text += f"; without changing the loss: {'; '.join(exact)}"
    if other:
        text += f"; changing it: {'; '.join(other)}"
    return text


def _exact(trainer: Any) -> list[str]:
    """Options that take less memory and leave the loss as it is, but for rounding."""
    config, heads = trainer.config, _heads(trainer)
    batch, freq = config.optim.batch_size, config.optim.accum_freq
    advice = []
    if batch > 1 and not any(getattr(head, "whole_batch", False) for head in heads.values()):
        half = -(-batch // 2)
        text = (
            f"--batch-size {half} --accum-freq {2 * freq} instead of {batch} and {freq} (the pairs of all {2 * freq} forward "
            "passes are still each other's negatives; each runs twice, and BatchNorm averages over fewer pairs)"
        )
        advice.append(text)
    if not config.model.grad_checkpointing:
        advice.append("--grad-checkpointing (slower)")
    on_gpu = getattr(getattr(trainer, "device", None), "type", "cpu") == "cuda"
    if on_gpu and getattr(getattr(trainer, "accelerator", None), "mixed_precision", "") == "no":
        advice.append("--precision amp_bf16")
    for name, head in heads.items():
        if hasattr(head, "pairs_per_tile"):
            now = f"{head.pairs_per_tile} now" if head.pairs_per_tile else "by default 4096 on a GPU, 256 elsewhere"
            advice.append(f"--set {name}.pairs_per_tile={max(1, (head.pairs_per_tile or 512) // 2)} ({now})")
            if not head.recompute:
                advice.append(f"--set {name}.recompute=true")
    if distributed.world_size() > 1 and config.loss.local_loss is False:
        advice.append("no --no-local-loss (each rank then compares its own pairs with all, instead of all with all)")
    if not on_gpu and config.data.workers > 0:
        advice.append(f"fewer --workers ({config.data.workers} now), each of which holds batches")
    return advice


def _other(trainer: Any) -> list[str]:
    """Options that take less memory and change what is trained."""
    config = trainer.config
    pairs = config.optim.batch_size * config.optim.accum_freq * distributed.world_size()
    advice = []
    for name, head in _heads(trainer).items():
        bank = getattr(head, "bank", None)
        if bank is not None:
            size, dim = bank.image.shape
            mebibytes = 2 * bank.image.numel() * bank.image.element_size() / 2**20
            advice.append(
                f"--set {name}.bank_size={max(pairs, size // 2)} (now {size}: two banks of {size} x {dim} take "
                f"{mebibytes:.3g} MiB, and a step compares {pairs} x {size} pairs); --set {name}.bank_dtype=float16"
            )
    advice.append(
        f"a smaller --batch-size alone: a pair's negatives are the other {pairs - 1} pairs of the step, and with fewer of "
        "them the loss, and often the best --lr, are others"
    )
    return advice


def _heads(trainer: Any) -> dict[str, Any]:
    coder = getattr(getattr(trainer, "model", None), "coder", None)
    return {} if coder is None else dict(coder.heads.items())
