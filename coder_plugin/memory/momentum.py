"""Momentum copy of towers and aggregators (He et al., CVPR 2020; CODER section 3.2.3, docs/equations.md#m-dcl)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.memory.model_copy import Counterparts, Mode, ModelCopy, copy_values

_HALF = (torch.float16, torch.bfloat16)


class MomentumCopy(ModelCopy):
    """A copy of the model without its heads that follows the model by an exponential moving average.

    ``theta_copy <- m theta_copy + (1 - m) theta`` for parameters that require a gradient, once per performed step.
    Buffers (BatchNorm's statistics, attention masks with their -inf) are copied unchanged. Frozen parameters are shared
    with the model; the next update shares what was frozen since and copies what was unfrozen. Of weights in bfloat16 or
    float16 the copy is float32, also after the model is converted: half precision rounds the average's small steps to nothing.

    Args:
        momentum: m, in [0, 1).
        mode: as in :class:`ModelCopy`.

    Raises:
        ValueError: m out of range.

    Example:
        >>> import coder_plugin
        >>> sizes = {"region_dim": 4, "embed_dim": 4, "word_dim": 4}
        >>> vocabulary = ["<pad>", "<start>", "<end>", "<unk>", "dog"]
        >>> model = coder_plugin.create_model("region-bigru", loss="clip", vocabulary=vocabulary, **sizes)
        >>> average = MomentumCopy(momentum=0.75)
        >>> average.copy_from(model)
        >>> with torch.no_grad():
        ...     _ = model.logit_scale.fill_(1.0), average.model.logit_scale.fill_(3.0)
        >>> average.update(model)
        >>> average.model.logit_scale.item()
        2.5
    """

    def __init__(self, *, momentum: float = 0.995, mode: Mode = "eval") -> None:
        super().__init__(mode=mode)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.momentum = momentum
        self._parameter_pairs, self._buffer_pairs = Counterparts("_parameters"), Counterparts("_buffers")
        self.register_load_state_dict_pre_hook(MomentumCopy._own_shared)

    def copy_from(self, model: Any) -> None:
        super().copy_from(model)
        self._widen()

    def _widen(self) -> None:
        """Turn half precision into float32; the model keeps what it shares."""
        shared = dict(self.model.named_parameters(remove_duplicate=False))
        self.own([name for name in self._shared if shared[name].dtype in _HALF])
        self.model._apply(lambda value: value.float() if value.dtype in _HALF else value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MomentumCopy:
        """A conversion to half precision only moves the copy."""
        if self.model is not None:
            probe = fn(torch.zeros(1, device=next(self.model.parameters()).device))
            if probe.dtype in _HALF:
                self.own(list(self._shared))
                self.model._apply(lambda value: value.to(probe.device))
                self._widen()
                return self
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def update(self, model: Any, statistics: Tensor | None = None) -> None:
        """Average in the model after one step. Parameters are matched by name; names without a match are skipped.

        Args:
            statistics: the first rank's :meth:`statistics`. None: with several ranks they are broadcast.
        """
        self.fresh = False
        pairs = self._pairs(model)
        # rarely: where a parameter was frozen or unfrozen since, or cannot be shared though it is frozen
        if any((average is current) == current.requires_grad for average, current in pairs):
            self._share_frozen(model)
            pairs = self._pairs(model)
        trained: list[tuple[Tensor, Tensor]] = []
        frozen: list[tuple[Tensor, Tensor]] = []
        for average, current in pairs:
            if average is not current:
                local = (distributed.local(average), distributed.local(current))
                (trained if current.requires_grad else frozen).append(local)
        if trained:
            currents = [current.to(average.dtype) for average, current in trained]
            torch._foreach_lerp_([average for average, _ in trained], currents, 1 - self.momentum)
        copy_values(frozen)
        self._copy_buffers(model, statistics)

    @torch.no_grad()
    def drift(self, model: Any) -> float:
        """Distance from the model, ``|theta_copy - theta| / |theta|`` over the trained parameters.

        With sharded parameters call it on every rank.
        """
        named = [pair for pair in self._pairs(model) if pair[1].requires_grad]
        if not named:
            return 0.0
        pairs = [(distributed.local(one), distributed.local(other).to(one.dtype)) for one, other in named]
        distances = torch._foreach_norm([average - current for average, current in pairs])
        norms = torch._foreach_norm([current for _, current in pairs])
        squares = torch.stack([torch.stack(distances).norm(), torch.stack(norms).norm()]).square()
        if distributed.is_sharded(named[0][1]):
            device = next((buffer.device for buffer in model.buffers()), squares.device)  # shards may be on the CPU
            squares = distributed.all_sum(squares.to(device))
        return float((squares[0] / squares[1].clamp(min=1e-24)).sqrt())

    def _pairs(self, model: Any) -> list[tuple[Tensor, Tensor]]:
        """The copy's parameters with the model's parameters of the same names."""
        return self._parameter_pairs.of(self.model, model)

    def _own_shared(self, *_: Any) -> None:
        """Before weights are loaded: values for the copy must not be written into the model, which may have been frozen
        since they were saved. The next update shares again."""
        self.own(list(self._shared))

    def statistics(self, model: Any) -> Tensor | None:
        """The model's BatchNorm statistics that the copy has too, as one vector. None: there are none."""
        values = self._statistics(model)
        return torch.cat([each.detach().flatten() for each in values]) if values else None

    def _statistics(self, model: Any) -> list[Tensor]:
        norms = {name for name, each in self.model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}
        buffers = model.named_buffers() if norms else ()
        return [each for name, each in buffers if name.rpartition(".")[0] in norms and each.is_floating_point()]

    def _copy_buffers(self, model: Any, statistics: Tensor | None) -> None:
        """BatchNorm's statistics differ between ranks; all get those of rank 0."""
        copy_values(self._buffer_pairs.of(self.model, model))
        if distributed.world_size() > 1 and (own := self._statistics(self.model)):
            if statistics is None:
                statistics = torch.cat([each.flatten() for each in own])
                distributed.broadcast(statistics)
            parts = statistics.split([each.numel() for each in own])
            copy_values([(each, part.view_as(each)) for each, part in zip(own, parts, strict=True)])
