"""One training step: loss and gradients of one or several micro-batches whose pairs are each other's negatives.

The features of all micro-batches are computed first, the loss is evaluated once over all of them, and its gradient with
respect to the features is propagated through each micro-batch's forward pass. With one micro-batch this is plain
backpropagation. With several it is open_clip's cached-feature accumulation, but with one evaluation of the loss instead
of n, so that a parameter that the loss reads directly (``logit_scale``) gets its gradient once.

All this is queued on the device without waiting for it, and so is a fused optimizer's step, which leaves everything as it is
where a loss or the gradient is not finite. Then the host reads one vector: the losses, the gradient's norm, whether what the
heads will write is finite, and what the heads want to know.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.heads.capabilities import KeepsState, heads_with
from coder_plugin.training.collapse import spread

#: Outputs that a model returns once, not per sample.
SHARED = ("logit_scale", "logit_bias")


class NonFiniteError(CoderError):
    """A loss or gradient is NaN or infinite; raised before anything is written."""


class _Figures:
    """What the host reads of a step besides the gradient's norm, as one vector, float32 [k]."""

    def __init__(self, losses: Mapping[str, Tensor], model: nn.Module, *, leaving: bool) -> None:
        coder = _coder(model)
        self.heads = {} if coder is None else heads_with(coder.heads, KeepsState)
        stashed = {} if coder is None else {name: value for name, value in coder.stashed().items() if value.numel()}
        largest = torch._foreach_norm([value.detach() for value in stashed.values()], torch.inf) if stashed else []
        flags = dict(zip(stashed, largest, strict=True))  # of each, not finite where one of its values is not
        heads = self.heads.items()
        scalars = {(name, key): value for name, head in heads for key, value in head.device_scalars().items()}
        self.names: tuple[tuple[Any, ...], ...] = (tuple(losses), tuple(flags), tuple(scalars), ("leaving",))
        values = [value.detach().float() for value in (*losses.values(), *flags.values(), *scalars.values())]
        self.vector = torch.stack([*values, torch.full_like(values[0], leaving)])

    @property
    def checked(self) -> Tensor:
        """The losses and flags, which must be finite [n]."""
        return self.vector[: len(self.names[0]) + len(self.names[1])]

    def split(self, numbers: Sequence[float]) -> tuple[dict[Any, float], ...]:
        """The losses, the largest values of what the heads will write, their scalars, and which part of the ranks leaves."""
        values = iter(numbers)
        return tuple({name: next(values) for name in names} for names in self.names)


class StepResult:
    """Result of a forward and backward pass. The host reads its figures once, in :meth:`check`.

    Args:
        model: the model, as wrapped for several processes. loss: its loss.
        figures: losses and flags; their ``vector`` is already the mean over ranks.
        leaves: the features, to explain a value that is not finite with.
        shares: each term's share of the gradient with respect to the features, in [0, 1]; empty unless it was measured.
        spread: figures of :func:`coder_plugin.training.collapse.spread`; empty unless they were measured.
        undo: called if a value is not finite: takes back what the passes have changed besides the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: CoderLoss,
        figures: _Figures,
        leaves: Mapping[str, Tensor],
        *,
        shares: Mapping[str, float],
        spread: Mapping[str, float],
        undo: Callable[[], None],
    ) -> None:
        self.leaves, self.shares, self.spread = leaves, shares, spread
        #: The norm of all gradients, 0-d on the device, once they are complete; :meth:`check` reads and checks it too.
        self.norm: Tensor | None = None
        #: Whether a rank takes no step after this one, once :meth:`check` has read it.
        self.leaving = False
        self._model, self._loss, self._figures, self._undo = model, loss, figures, undo
        self._losses: dict[str, float] | None = None
        self._gradient_norm: float | None = None

    def found_inf(self) -> Tensor:
        """1 if :meth:`check` would raise, else 0: float32, 0-d, on the device. A fused optimizer's ``found_inf``."""
        norms = [] if self.norm is None else [self.norm.float().reshape(1)]
        return torch.cat([self._figures.checked, *norms]).isfinite().all().logical_not().float()

    def check(self, *, overflow: bool = False) -> None:
        """Read the losses, the norm, and what the heads want to know, in one transfer. Call it on all ranks.

        What has been read is not read again: where the norm was not known at an earlier call, this one reads it alone.

        Args:
            overflow: the norm may be infinite, because a loss scaler skips such steps.

        Raises:
            NonFiniteError: on all ranks, if a loss, the norm, or what a head will write after the step is NaN or infinite on
                one; names the term and where the value comes from. All gradients have been dropped.
        """
        norms = [] if self.norm is None or self._gradient_norm is not None else [self.norm.detach().float().reshape(1)]
        figures = [] if self._losses is not None else [self._figures.vector]
        if not norms and not figures:
            return
        numbers = torch.cat([*norms, *figures]).tolist()
        if norms:
            self._gradient_norm = numbers.pop(0)
        scalars: dict[tuple[str, str], float] = {}
        if figures:
            self._losses, flags, scalars, leaving = self._figures.split(numbers)
            self.leaving = leaving["leaving"] > 0
            bad = [f"loss {name} = {value}" for name, value in self._losses.items() if not math.isfinite(value)]
            bad += [f"{name} is not finite" for name, largest in flags.items() if not math.isfinite(largest)]
            if bad:
                causes = _causes(self.leaves, self._model)
                self._refuse(f"{causes}{': ' if causes else ''}{', '.join(bad)}")
        if self._gradient_norm is not None and not math.isfinite(self._gradient_norm) and not overflow:
            self._refuse(self.explain_gradient())
        for (name, key), value in scalars.items():
            self._figures.heads[name].stash(**{key: value})

    def explain_gradient(self) -> str:
        """Which term, or failing that which parameters, a non-finite gradient comes from. Call it on all ranks."""
        return explain_gradient(_inner(self._model), self._loss, self.leaves)

    def _refuse(self, reason: str) -> None:
        self._undo()
        for parameter in self._model.parameters():
            parameter.grad = None
        raise NonFiniteError(reason)

    @property
    def losses(self) -> dict[str, float]:
        """Each term's weighted loss, mean over ranks. :meth:`check` has read them, or is called."""
        self.check()
        assert self._losses is not None
        return self._losses

    @property
    def gradient_norm(self) -> float | None:
        """:attr:`norm` on the host; None before it is known. :meth:`check` has read it, or is called."""
        if self.norm is not None and self._gradient_norm is None:
            self.check()
        return self._gradient_norm

    @property
    def metrics(self) -> dict[str, float]:
        """The total loss, each term's, its share of the gradient, and the spread, by the names they are logged with."""
        shares = {f"share/{name}": value for name, value in self.shares.items()}
        return {"loss": sum(self.losses.values()), **self.losses, **shares, **self.spread}


def forward_backward(
    model: nn.Module,
    loss: CoderLoss,
    batches: Sequence[Mapping[str, Tensor]],
    accelerator: Any,
    *,
    measure: bool = False,
    leaving: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Accumulate into ``.grad`` the gradient of the loss over all micro-batches (and, gathered, over all ranks).

    The result's figures are not read yet: :meth:`StepResult.check` finds a loss, or what a head will write into its state, that
    is NaN or infinite on any rank.

    Args:
        batches: keyword arguments of the model's forward, one dict a micro-batch.
        accelerator: for autocast, loss scaling and DDP's ``no_sync``.
        leaving: says whether this rank takes no step after this one; asked after the forward passes.
        measure: also measure each term's gradient with respect to the features, and the spread of the embeddings.
    """
    reads = {key for binding in loss.bindings for key in binding.values()}
    single = len(batches) == 1
    passes, outputs = [] if single else [_rng_state()], []
    kept: list[dict[str, Any]] = [{} for _ in batches]
    restore = keep_buffers(model)
    for batch, results in zip(batches, kept, strict=True):
        with torch.set_grad_enabled(single), contextlib.nullcontext() if single else _keeping(model, results):
            outputs.append({key: value for key, value in model(**batch).items() if key in reads})
        if not single:
            passes.append(_rng_state())
    if not single:
        restore()  # of two passes the first does not count
    leaves = _join(outputs)
    sums = distributed.SumWithGradient()
    evaluate: Any = loss.forward if measure else loss  # a compiled graph's backward pass runs once only
    losses = evaluate(sums=sums, **leaves)
    figures = _Figures(losses, model, leaving=leaving())
    share = gradient_shares(losses, leaves) if measure else {}
    names = [key for key, leaf in leaves.items() if leaf.requires_grad]
    # in the first of two passes BatchNorm's statistics are not yet those of the step
    first = first_rank_values(figures.heads) if single and distributed.world_size() > 1 else {}
    sums.put(torch.cat([figures.vector, *first.values()]))
    gradients = torch.autograd.grad(sum(losses.values()), [leaves[key] for key in names], allow_unused=True)
    received = {key: grad for key, grad in zip(names, gradients, strict=True) if grad is not None}
    start = 0
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            if single:
                output = outputs[0]
            else:
                _set_rng_state(passes[index])
                with _keeping(model, kept[index]):
                    output = {key: value for key, value in model(**batch).items() if key in reads}
            rows = slice(start, start + _rows(output))
            start = rows.stop
            _backward(output, received, rows, accelerator, with_shared=last)
    if not single:
        _set_rng_state(passes[-1])
    figure_sums, *arrived = sums.take().split([len(figures.vector), *map(len, first.values())])
    figures.vector = figure_sums / distributed.world_size()
    for name, values in zip(first, arrived, strict=True):
        figures.heads[name].stash(first_rank=values)
    measured = spread(leaves) if measure else {}
    return StepResult(model, loss, figures, leaves, shares=share, spread=measured, undo=restore)


def first_rank_values(heads: Mapping[str, KeepsState]) -> dict[str, Tensor]:
    """By head, what all ranks take from the first rank; zeros on the others, so that the sum over ranks is the first's."""
    values = {name: head.first_rank_values() for name, head in heads.items()}
    own = distributed.rank() == 0
    return {name: each.float() if own else torch.zeros_like(each).float() for name, each in values.items() if each is not None}


def _inner(model: nn.Module) -> Any:
    """The model inside of DDP's wrapper."""
    return getattr(model, "module", model)


def _coder(model: nn.Module) -> Any:
    return getattr(_inner(model), "coder", None)


def _keeping(model: nn.Module, results: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    coder = _coder(model)
    return contextlib.nullcontext() if coder is None else coder.keeping(results)


def _rows(output: Mapping[str, Tensor]) -> int:
    return next(len(value) for key, value in output.items() if key not in SHARED)


def _join(outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The micro-batches' outputs as one batch, detached from their graphs; floating-point outputs become leaves."""
    joined = {}
    for key in outputs[0]:
        parts = [output[key].detach() for output in outputs]
        value = parts[0] if key in SHARED or len(parts) == 1 else torch.cat(parts)
        joined[key] = value.requires_grad_() if value.is_floating_point() else value
    return joined


def _backward(
    output: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rows: slice, accelerator: Any, *, with_shared: bool
) -> None:
    """Propagate the loss's gradient with respect to these rows of the outputs, scaled by the loss scaler if there is one."""
    keys = [key for key in gradients if output[key].requires_grad and (with_shared or key not in SHARED)]
    parts = [gradients[key] if key in SHARED else gradients[key][rows] for key in keys]
    if accelerator.scaler is not None:
        parts = accelerator.scaler.scale(parts)
    torch.autograd.backward([output[key] for key in keys], parts)


def _causes(leaves: Mapping[str, Tensor], model: nn.Module) -> str:
    """Where a value that is not finite comes from: a head's state, or outputs of the model on some ranks. Empty if neither.

    Call it on all ranks.
    """
    inner = _inner(model)
    own = [name for name, value in inner.state_dict().items() if value.is_floating_point() and value.isnan().any()]
    outputs = [key for key, leaf in leaves.items() if leaf.is_floating_point() and not leaf.isfinite().all()]
    everywhere = distributed.gather_objects((own, outputs))
    causes = []
    for which, verb in ((0, "holds NaN"), (1, "is not finite")):
        ranks: dict[str, list[int]] = {}
        for rank, names in enumerate(everywhere):
            for name in names[which]:
                ranks.setdefault(name, []).append(rank)
        for name, bad in list(ranks.items())[:3]:
            where = "" if len(bad) == len(everywhere) else f" on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad[:8]))}"
            causes.append(f"{name} {verb}{where}")
    return ", ".join(causes)


def gradient_shares(losses: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of each term's gradient with respect to the features over the sum of these norms, in [0, 1]."""
    norms = term_gradient_norms(losses, leaves)
    total = sum(norms.values())
    return {name: norm / total if total > 0 else 0.0 for name, norm in norms.items()}


def term_gradient_norms(losses: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of each term's gradient with respect to all per-sample outputs of all ranks."""
    features = [leaf for key, leaf in leaves.items() if leaf.requires_grad and key not in SHARED]
    squares = []
    for value in losses.values():
        if not value.requires_grad:  # a term without a gradient in this step
            squares.append(value.new_zeros(()))
            continue
        gradients = torch.autograd.grad(value, features, retain_graph=True, allow_unused=True)
        parts = [gradient.float().square().sum() for gradient in gradients if gradient is not None]
        squares.append(torch.stack(parts).sum() if parts else value.new_zeros(()))
    return dict(zip(losses, distributed.all_mean(torch.stack(squares)).sqrt().tolist(), strict=True))


def explain_gradient(model: nn.Module, loss: CoderLoss, leaves: Mapping[str, Tensor]) -> str:
    """Which term, or failing that which parameters, a non-finite gradient comes from."""
    evaluate: Any = loss.forward
    norms = term_gradient_norms(evaluate(**leaves), leaves)
    bad = [name for name, norm in norms.items() if not norm < torch.inf]
    if bad:
        return f"gradient of {', '.join(bad)}"
    parameters = [
        name for name, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()
    ]
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    reason = f"finite at the features: {', '.join(norms)}"
    if not parameters:  # each is finite, and the sum of their squares is not
        sizes = {name: float(p.grad.abs().max()) for name, p in model.named_parameters() if p.grad is not None}
        parameters = sorted(sizes, key=sizes.__getitem__, reverse=True)[:1]
        reason = f"up to {sizes[parameters[0]]:.3g}: the norm overflows; {reason}"
    return f"gradient of {', '.join(parameters[:3])}{more} ({reason})"


def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Copy BatchNorm's statistics; the function that is returned restores them. Heads write no state in forward."""
    inner = _inner(model)
    heads = inner.coder.heads.values() if hasattr(inner, "coder") else ()
    state = {id(buffer) for head in heads for buffer in head.state_buffers().values()}
    buffers = [buffer for buffer in inner.buffers() if id(buffer) not in state]
    copies = [torch.empty_like(buffer) for buffer in buffers]

    @torch.no_grad()
    def copy(into: list[Tensor], values: list[Tensor]) -> None:
        if buffers:
            torch._foreach_copy_(into, values)

    copy(copies, buffers)
    return lambda: copy(buffers, copies)


@contextlib.contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Inside the context BatchNorm's statistics may change; they are restored on leaving."""
    restore = keep_buffers(model)
    yield
    restore()


def _rng_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_rng_state(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
