"""Rank, world size and collective operations. With one process the operations return their input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coder_plugin.errors import CoderError


def world_size() -> int:
    """Number of processes; 1 without ``torch.distributed``."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number in [0, world size); 0 without ``torch.distributed``."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


_collectives = 0


def collectives() -> int:
    """Number of this module's collective operations that this process has begun, the same on ranks that are equally far.

    A rank that has begun fewer than another keeps it waiting.
    """
    return _collectives


def _begin() -> None:
    global _collectives
    _collectives += 1


def barrier() -> None:
    """Wait until all ranks have arrived here."""
    if world_size() > 1:
        _begin()
        dist.barrier()


class _Gather(torch.autograd.Function):
    """All-gather along the batch. The gradient of this rank's rows is the sum over the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        ctx.rows = len(local)
        return _gather(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # a copy, because autograd may hand the same tensor to other branches
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        _begin()
        dist.all_reduce(gradient)
        start = rank() * ctx.rows
        return gradient[start : start + ctx.rows]


def _gather(local: Tensor) -> Tensor:
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(world_size())]
    _begin()
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def gather(local: Tensor) -> Tensor:
    """All-gather along the batch, differentiable: [B, ...] -> [world * B, ...] in rank order.

    The gradient of a row is the *sum* over the ranks' losses. With the same global loss on every rank, or with each
    rank's mean over its own anchors, DistributedDataParallel's average over ranks then gives the gradient of one
    process with the joint batch.

    Args:
        local: this rank's rows; B must be equal on all ranks.

    Example:
        >>> gather(torch.tensor([1.0, 2.0]))  # one process
        tensor([1., 2.])
    """
    if world_size() == 1:
        return local
    return _Gather.apply(local) if local.requires_grad and torch.is_grad_enabled() else _gather(local.detach())


class _Sum(torch.autograd.Function):
    """Sum over ranks. Its gradient is the sum over the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.clone()
        _begin()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        _begin()
        dist.all_reduce(gradient)
        return gradient


def summed(local: Tensor) -> Tensor:
    """Element-wise sum over ranks, differentiable; its gradient is summed over ranks as in :func:`gather`."""
    if world_size() == 1:
        return local
    return _Sum.apply(local) if local.requires_grad and torch.is_grad_enabled() else all_sum(local)


class _Exchange(torch.autograd.Function):
    """All-to-all along the batch. Each gradient returns to the rank that its value came from."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return _exchange(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _exchange(gradient)


def _exchange(local: Tensor) -> Tensor:
    received = torch.empty_like(local, memory_format=torch.contiguous_format)
    _begin()
    dist.all_to_all_single(received, local.contiguous())
    return received


def exchange(local: Tensor) -> Tensor:
    """All-to-all along the batch, differentiable: send rows to every rank and receive this rank's rows from every rank.

    Args:
        local: [world * B, ...], the rows for rank 0, then those for rank 1, and so on; B must be equal on all ranks.

    Returns:
        [world * B, ...], the rows from rank 0, then those from rank 1, and so on.
    """
    return local if world_size() == 1 else _Exchange.apply(local)


def all_max(value: Tensor) -> Tensor:
    """Element-wise maximum over ranks, without a gradient."""
    value = value.detach()
    if world_size() > 1:
        value = value.clone()
        _begin()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


def all_sum(value: Tensor) -> Tensor:
    """Element-wise sum over ranks, without a gradient."""
    value = value.detach()
    if world_size() > 1:
        value = value.clone()
        _begin()
        dist.all_reduce(value)
    return value


def all_mean(value: Tensor) -> Tensor:
    """Element-wise mean over ranks, without a gradient."""
    return all_sum(value) / world_size()


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is true on at least one rank. With it all ranks leave a loop in the same iteration."""
    if world_size() == 1:
        return flag
    return bool(all_max(torch.tensor(float(flag), device=device)))


def broadcast(tensor: Tensor) -> None:
    """Copy rank 0's values into the ``tensor`` of every rank, in place."""
    if world_size() > 1:
        _begin()
        dist.broadcast(tensor, 0)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of the tensor, as of FSDP2's parameters outside of forward."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which in-place operations may change; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gather_objects(value: Any) -> list[Any]:
    """Gather a small picklable object from every rank, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    _begin()
    dist.all_gather_object(values, value)
    return values


def raise_on_all_ranks(error: Exception | None, *, prefix: str = "") -> None:
    """Raise on every rank if one has an error: there that error, elsewhere a :class:`CoderError`. Call it on every rank.

    Without it the other ranks would wait for ever for one that has failed.

    Args:
        error: this rank's error, or None.
        prefix: what the other ranks' message has before the error's text.

    Raises:
        CoderError: another rank has an error.

    Example:
        >>> raise_on_all_ranks(None)
    """
    messages = gather_objects(None if error is None else str(error))
    if error is not None:
        raise error
    for message in messages:
        if message is not None:
            raise CoderError(prefix + message)
