"""One training step: loss and gradients of one or several micro-batches whose pairs are each other's negatives.

The features of all micro-batches are computed first, the loss is evaluated once over all of them, and its gradient with
respect to the features is propagated through each micro-batch's forward pass. With one micro-batch this is plain
backpropagation. With several it is open_clip's cached-feature accumulation, but with one evaluation of the loss instead
of n, so that a parameter that the loss reads directly (``logit_scale``) gets its gradient once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.coder import CoderLoss
from coder_plugin.errors import CoderError
from coder_plugin.training.collapse import spread

#: Outputs that a model returns once, not per sample.
SHARED = ("logit_scale", "logit_bias")


class NonFiniteError(CoderError):
    """A loss or gradient is NaN or infinite; raised before anything is written."""


@dataclass(frozen=True)
class StepResult:
    """Result of a forward and backward pass.

    Args:
        losses: each term's weighted loss, mean over ranks.
        shares: each term's share of the gradient with respect to the features, in [0, 1]; empty unless it was measured.
        leaves: the features, to explain a non-finite gradient with.
        spread: figures of :func:`coder_plugin.training.collapse.spread`; empty unless they were measured.
    """

    losses: dict[str, float]
    shares: dict[str, float]
    leaves: Mapping[str, Tensor]
    spread: dict[str, float] = field(default_factory=dict)

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
) -> StepResult:
    """Accumulate into ``.grad`` the gradient of the loss over all micro-batches (and, gathered, over all ranks).

    Args:
        batches: keyword arguments of the model's forward, one dict a micro-batch.
        accelerator: for autocast, loss scaling and DDP's ``no_sync``.
        measure: also measure each term's gradient with respect to the features, and the spread of the embeddings.

    Raises:
        NonFiniteError: a loss, or what a head will write into its state, is NaN or infinite on any rank; names the term and
            where the value comes from. No gradient has been touched.
    """
    reads = {key for binding in loss.bindings for key in binding.values()}
    single = len(batches) == 1
    passes = [_rng_state()]
    outputs = []
    with contextlib.nullcontext() if single else restored_buffers(model):
        for batch in batches:
            with torch.set_grad_enabled(single):
                outputs.append({key: value for key, value in model(**batch).items() if key in reads})
            passes.append(_rng_state())
    leaves = _join(outputs)
    losses = loss(**leaves)
    values = _check_losses(losses, leaves, model)
    share = gradient_shares(losses, leaves) if measure else {}
    names = [key for key, leaf in leaves.items() if leaf.requires_grad]
    gradients = torch.autograd.grad(sum(losses.values()), [leaves[key] for key in names], allow_unused=True)
    received = {key: grad for key, grad in zip(names, gradients, strict=True) if grad is not None}
    start = 0
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            if not single:
                _set_rng_state(passes[index])
                output = {key: value for key, value in model(**batch).items() if key in reads}
            else:
                output = outputs[0]
            rows = slice(start, start + _rows(output))
            start = rows.stop
            accelerator.backward(_surrogate(output, received, rows, with_shared=last))
    if not single:
        _set_rng_state(passes[-1])
    return StepResult(values, share, leaves, spread(leaves) if measure else {})


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


def _surrogate(
    output: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rows: slice, *, with_shared: bool
) -> Tensor:
    """A scalar whose gradient is the loss's: sum of output times received gradient, over these rows."""
    total: Any = 0
    for key, gradient in gradients.items():
        if output[key].requires_grad and (with_shared or key not in SHARED):
            total = total + (output[key] * (gradient if key in SHARED else gradient[rows])).sum()
    return total


def _check_losses(losses: Mapping[str, Tensor], leaves: Mapping[str, Tensor], model: nn.Module) -> dict[str, float]:
    """Each term's value, mean over ranks. What the heads will write after the step is checked in the same transfer.

    Raises:
        NonFiniteError: on all ranks, if a value or a stash is not finite on one.
    """
    stashed = _stashed(model)
    flags = [value.detach().isfinite().logical_not().any().float() for value in stashed.values()]
    stacked = torch.stack([*(value.detach().float() for value in losses.values()), *flags])
    numbers = distributed.all_mean(stacked).tolist()
    values = dict(zip(losses, numbers, strict=False))
    bad = [f"loss {name} = {value}" for name, value in values.items() if not math.isfinite(value)]
    bad += [f"{name} is not finite" for name, flag in zip(stashed, numbers[len(losses) :], strict=True) if flag]
    if bad:
        causes = _causes(leaves, model)
        raise NonFiniteError(f"{causes}{': ' if causes else ''}{', '.join(bad)}")
    return values


def _stashed(model: nn.Module) -> dict[str, Tensor]:
    """What the heads write into their state after this step, by name."""
    coder = getattr(getattr(model, "module", model), "coder", None)
    return {} if coder is None else coder.stashed()


def _causes(leaves: Mapping[str, Tensor], model: nn.Module) -> str:
    """Where a value that is not finite comes from: a head's state, or outputs of the model on some ranks. Empty if neither.

    Call it on all ranks.
    """
    inner: Any = getattr(model, "module", model)
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
    norms = term_gradient_norms(loss(**leaves), leaves)
    bad = [name for name, norm in norms.items() if not norm < torch.inf]
    if bad:
        return f"gradient of {', '.join(bad)}"
    parameters = [
        name for name, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()
    ]
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    return f"gradient of {', '.join(parameters[:3])}{more} (finite at the features: {', '.join(norms)})"


@contextlib.contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore BatchNorm's statistics on leaving: the first of two passes must not count. Heads write no state in forward."""
    inner: Any = getattr(model, "module", model)  # DDP's
    state = set(inner.coder.state_names()) if hasattr(inner, "coder") else set()
    before = [(buffer, buffer.detach().clone()) for name, buffer in inner.named_buffers() if name not in state]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


def _rng_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_rng_state(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
