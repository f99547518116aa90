"""An exponential moving average of the weights, to evaluate and export."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """Average of a model's trainable parameters, without those in ``leave_out`` (accumulating state).

    BatchNorm's statistics are averages already, so the model's current ones are used.
    """

    def __init__(self, model: nn.Module, decay: float, leave_out: Collection[str] = ()) -> None:
        self.decay = decay
        self.weights = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in leave_out
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average; call once after every performed optimizer step."""
        parameters = dict(model.named_parameters())
        averages = list(self.weights.values())
        if averages:
            currents = [parameters[name].detach().to(average.dtype) for name, average in self.weights.items()]
            torch._foreach_lerp_(averages, currents, 1 - self.decay)

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model has the averaged weights; its own are restored on leaving."""
        current = {name: p.detach().clone() for name, p in model.named_parameters() if name in self.weights}
        try:
            self._copy(model, self.weights)
            yield
        finally:
            self._copy(model, current)

    @staticmethod
    @torch.no_grad()
    def _copy(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        parameters = dict(model.named_parameters())
        for name, value in weights.items():
            parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            if value.shape != self.weights[name].shape:
                raise ValueError(f"the average of {name} has the shape {list(value.shape)}")
            self.weights[name].copy_(value)
