"""Rank, world size and collective operations. With one process the operations return their input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from coder_plugin.errors import CoderError

_T = TypeVar("_T")


def world_size() -> int:
    """Number of processes; 1 without ``torch.distributed``."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number in [0, world size); 0 without ``torch.distributed``."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


_collectives = 0


def collectives() -> int:
    """Number of this module's collective operations that this process has begun."""
    return _collectives


def _begin() -> None:
    global _collectives
    _collectives += 1


def barrier() -> None:
    """Wait until all ranks have arrived here."""
    if world_size() > 1:
        _begin()
        dist.barrier()


#: Bytes; the start of every tensor in a packed buffer is a multiple.
_ALIGNMENT = 16


class SumWithGradient:
    """Numbers that are summed over ranks in the collective that carries the gradient of :func:`gather_together`.

    Between the loss and its backward pass :meth:`put` them; after it :meth:`take` the sums. If the backward pass had no
    collective, :meth:`take` makes one.

    Example:
        >>> sums = SumWithGradient()
        >>> sums.put(torch.tensor([1.0, 2.0]))
        >>> sums.take()  # one process
        tensor([1., 2.])
    """

    def __init__(self) -> None:
        self.waiting: Tensor | None = None
        self._total: Tensor | None = None

    def put(self, values: Tensor) -> None:
        """Keep this rank's numbers, float32 or float64 [k]. Call it on all ranks with the same k."""
        self.waiting, self._total = values.detach(), None

    def carried(self, total: Tensor) -> None:
        """Called by the backward pass with the sums [k]."""
        assert self.waiting is not None
        self._total, self.waiting = total.to(self.waiting.dtype), None

    def take(self) -> Tensor:
        """The sums over ranks [k], of the dtype that was put."""
        if self.waiting is not None:
            self.carried(all_sum(self.waiting))
        assert self._total is not None
        return self._total


class _Gather(torch.autograd.Function):
    """One all-gather of the bytes of several tensors. One reduce-scatter returns the gradients of this rank's rows, each the
    sum over the losses of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype | None, sums: SumWithGradient | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.sums, ctx.dtypes = dtype, sums, [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        gathered = _gather(tensors, dtype)
        constant = [each for each, needed in zip(gathered, ctx.needs_input_grad[2:], strict=True) if not needed]
        ctx.mark_non_differentiable(*constant)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        received = {
            number: gradient
            for number, (gradient, needed) in enumerate(zip(gradients, ctx.needs_input_grad[2:], strict=True))
            if needed and gradient is not None
        }
        results: list[Tensor | None] = [None] * len(gradients)
        if not received:
            return None, None, *results
        # in float32 or float64; summed in a shorter type only if that was asked for
        number_type = ctx.dtype or _common_type([torch.float32, *(each.dtype for each in received.values())])
        parts = [each.to(number_type).reshape(world_size(), -1) for each in received.values()]
        sums = ctx.sums if ctx.dtype is None and ctx.sums is not None and ctx.sums.waiting is not None else None
        if sums is not None:
            parts.append(sums.waiting.to(number_type).expand(world_size(), -1))
        own = _sum_for_owner(torch.cat(parts, 1)).split([part.shape[1] for part in parts])
        for (number, gradient), part in zip(received.items(), own, strict=False):
            shape = (len(gradient) // world_size(), *gradient.shape[1:])
            results[number] = part.view(shape).to(ctx.dtypes[number])
        if sums is not None:
            sums.carried(own[-1])
        return None, None, *results


def _common_type(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def _sum_for_owner(rows: Tensor) -> Tensor:
    """Row r of every rank's ``rows`` [world, k], summed, to rank r: [k]."""
    _begin()
    if dist.get_backend() == "gloo":  # older releases of torch have no reduce-scatter for it
        dist.all_reduce(rows)
        return rows[rank()]
    own = torch.empty_like(rows[0])
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, rows.view(-1))  # the new name: torch >= 2.14
    return own


def _gather(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """One all-gather of the tensors' bytes, each at an offset that its type may have."""
    sent = [each.detach() for each in tensors]
    if dtype is not None:
        sent = [each.to(dtype) if each.is_floating_point() else each for each in sent]
    flat = [each.contiguous().view(-1).view(torch.uint8) for each in sent]
    flat = [torch.nn.functional.pad(each, (0, -len(each) % _ALIGNMENT)) for each in flat]
    own = torch.cat(flat)
    rows = own.new_empty(world_size(), len(own))
    _begin()
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(rows.view(-1), own)  # the new name: torch >= 2.14
    gathered = []
    for each, part, given in zip(sent, rows.split([len(each) for each in flat], 1), tensors, strict=True):
        values = part[:, : each.numel() * each.element_size()].view(each.dtype)
        values = values.reshape(world_size() * len(each), *each.shape[1:])
        gathered.append(values.to(given.dtype))
    return gathered


def gather_together(
    tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None, sums: SumWithGradient | None = None
) -> list[Tensor]:
    """All-gather several tensors along the batch in one collective, and all their gradients in one more.

    Values and integers arrive bit for bit. Gradients are those of :func:`gather`.

    Args:
        tensors: this rank's rows [B, ...], of any types. B may differ between tensors, but not between ranks.
        dtype: a shorter floating point type, such as ``torch.bfloat16``, in which floating point values and their gradients
            travel and are summed. The result has the tensors' own types. None: values travel in their own type, and gradients
            in float32 or float64.
        sums: numbers that travel with the gradient. They never travel in a shorter ``dtype``: it rounds.

    Returns:
        [world * B, ...] each, in rank order.

    Example:
        >>> gather_together([torch.tensor([1.0]), torch.tensor([7])])  # one process
        [tensor([1.]), tensor([7])]
    """
    if world_size() == 1 or not tensors:
        return list(tensors)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return list(_Gather.apply(dtype, sums, *tensors))
    return _gather(tensors, dtype)


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
    return gather_together([local])[0]


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


def ring_send_recv(tensors: Sequence[Tensor], *, channel: int = 0) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the next rank, and to receive those of the rank before; the last rank sends to the first.

    Call it on all ranks. The tensors travel while the caller computes; they must not be written to meanwhile.

    Args:
        tensors: of any types; the same shapes and types on all ranks.
        channel: >= 0; passes that overlap need different ones.

    Returns:
        A function that waits, and returns what was received.

    Example:
        >>> ring_send_recv([torch.tensor([1.0])])()  # one process
        [tensor([1.])]
    """
    if world_size() == 1 or not tensors:
        return lambda: list(tensors)
    sent = [each.detach().contiguous() for each in tensors]
    received = [torch.empty_like(each) for each in sent]
    after, before = (rank() + 1) % world_size(), (rank() - 1) % world_size()
    operations = []
    for number, (out, into) in enumerate(zip(sent, received, strict=True)):
        tag = 16 * channel + number
        operations += [dist.P2POp(dist.isend, out, after, tag=tag), dist.P2POp(dist.irecv, into, before, tag=tag)]
    _begin()
    under_way = dist.batch_isend_irecv(operations)

    def wait() -> list[Tensor]:
        for each in under_way:
            each.wait()
        sent.clear()
        return received

    return wait


def all_max(value: Tensor) -> Tensor:
    """Element-wise maximum over ranks, without a gradient."""
    return _all_reduce(value, "MAX")


def all_sum(value: Tensor) -> Tensor:
    """Element-wise sum over ranks, without a gradient."""
    return _all_reduce(value, "SUM")


def _all_reduce(value: Tensor, operation: str) -> Tensor:
    value = value.detach()
    if world_size() > 1:
        value = value.clone()
        _begin()
        dist.all_reduce(value, op=getattr(dist.ReduceOp, operation))
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


def on_every_rank(work: Callable[[], _T]) -> list[_T]:
    """Run ``work`` on every rank and gather its small results, in rank order. If it fails on one rank, all raise: the others
    would wait for ever for it.

    Raises:
        CoderError: another rank's error; the rank that failed raises its own.

    Example:
        >>> on_every_rank(lambda: 3)  # one process
        [3]
    """
    result: Any = None
    error = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    outcomes = gather_objects((result, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise CoderError(f"rank {rank}: {message}")
    return [each for each, _ in outcomes]


def on_first_rank(work: Callable[[], _T]) -> _T | None:
    """Run ``work`` on rank 0 while the others wait, and return its small result on all; as :func:`on_every_rank`."""
    return on_every_rank(lambda: work() if rank() == 0 else None)[0]
