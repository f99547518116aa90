"""Momentum copy of a model's towers and aggregators (He et al., CVPR 2020; CODER section 3.2.3, docs/equations.md#m-dcl)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coder_plugin import distributed

Mode = Literal["eval", "train"]


class MomentumCopy(nn.Module):
    """A copy of the model without its heads that follows the model by an exponential moving average.

    ``theta_copy <- m theta_copy + (1 - m) theta`` for parameters that require a gradient, once per performed step. Buffers
    (BatchNorm's statistics, attention masks with their -inf) are copied unchanged. Frozen parameters are shared with the
    model, so a locked tower or the base weights under LoRA are in memory once; the next update shares what was frozen since
    and copies what was unfrozen. The copy has no gradient, and its mode never changes: :meth:`train` does
    nothing.

    Args:
        momentum: m, in [0, 1).
        mode: the copy's mode, ``"eval"`` (no dropout, running statistics) or ``"train"``.

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
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.momentum, self.mode = momentum, mode
        self.model: Any = None
        self._shared: set[str] = set()  # names of the copy's parameters that are the model's own
        self.register_load_state_dict_pre_hook(MomentumCopy._own_shared)

    def copy_from(self, model: Any) -> None:
        """Replace the copy by the current model without the heads of ``model.coder``."""
        coder = model.coder
        model.coder = coder.without_heads()
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.coder = coder
        if (capture := getattr(self.model, "_coder_capture", None)) is not None:
            capture.restrict(aggregated=len(coder.aggregators) > 0)
        self.model.requires_grad_(False).train(self.mode == "train")
        self._shared.clear()
        self._share_frozen(model)
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                module.track_running_stats = False  # use batch statistics, and write none in forward

    def train(self, mode: bool = True) -> MomentumCopy:
        return self

    @torch.no_grad()
    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Images and ids [B, T] -> the copy's embeddings, [B, D] each, L2-normalised, float32."""
        return self.model.embed_image(image).float(), self.model.embed_text(text).float()

    @torch.no_grad()
    def update(self, model: Any) -> None:
        """Average in the model after one step. Parameters are matched by name; names without a match are skipped."""
        online = _named(model)
        own = _named(self.model)
        # seldom: only where a parameter was frozen or unfrozen since, or stays the copy's own though it is frozen
        if any((average is online[name]) == online[name].requires_grad for name, average in own.items() if name in online):
            self._share_frozen(model)
            own = _named(self.model)
        trained: list[tuple[Tensor, Tensor]] = []
        frozen: list[tuple[Tensor, Tensor]] = []
        for name, average in own.items():
            if name in online and average is not online[name]:
                pair = (distributed.local(average), distributed.local(online[name]))
                (trained if online[name].requires_grad else frozen).append(pair)
        if trained:
            averages = [average for average, _ in trained]
            currents = [current.detach().to(average.dtype) for average, current in trained]
            torch._foreach_lerp_(averages, currents, 1 - self.momentum)
        _copy(frozen)
        self._copy_buffers(model)

    @torch.no_grad()
    def drift(self, model: Any) -> float:
        """Distance from the model, ``|theta_copy - theta| / |theta|`` over the trained parameters.

        With sharded parameters call it on every rank.
        """
        online = _named(model)
        named = [
            (average, online[name])
            for name, average in _named(self.model).items()
            if name in online and online[name].requires_grad
        ]
        if not named:
            return 0.0
        pairs = [(distributed.local(average), distributed.local(current).to(average.dtype)) for average, current in named]
        distances = torch._foreach_norm([average - current for average, current in pairs])
        norms = torch._foreach_norm([current for _, current in pairs])
        squares = torch.stack([torch.stack(distances).norm(), torch.stack(norms).norm()]).square()
        if distributed.is_sharded(named[0][1]):
            device = next((buffer.device for buffer in model.buffers()), squares.device)  # shards may be on the CPU
            squares = distributed.all_sum(squares.to(device))
        return float((squares[0] / squares[1].clamp(min=1e-24)).sqrt())

    def _share_frozen(self, model: Any) -> None:
        """Use the model's own frozen parameters, and copies of those that are trained by now.

        A parameter sharded by FSDP belongs to its module's group, and one of another dtype is the copy's own: both stay.
        """
        online = _named(model, tied=True)
        owned: dict[int, nn.Parameter] = {}
        for prefix, module in self.model.named_modules():
            for name, average in module._parameters.items():
                path = f"{prefix}.{name}" if prefix else name
                current = online.get(_plain(path))
                if average is None or current is None or distributed.is_sharded(current):
                    continue
                if average is current and current.requires_grad:
                    module._parameters[name] = _own(current, owned)
                    self._shared.discard(path)
                elif (
                    not current.requires_grad
                    and isinstance(current, nn.Parameter)
                    and (average.dtype, average.device) == (current.dtype, current.device)
                ):
                    module._parameters[name] = current
                    self._shared.add(path)

    def _own_shared(self, *_: Any) -> None:
        """Before weights are loaded: what is loaded as the copy's must not become the model's, which may be frozen since it
        was saved. The next update shares again."""
        owned: dict[int, nn.Parameter] = {}
        for path in self._shared:
            prefix, name = path.rpartition(".")[::2]
            parameters = self.model.get_submodule(prefix)._parameters
            parameters[name] = _own(parameters[name], owned)
        self._shared.clear()

    def _copy_buffers(self, model: Any) -> None:
        """BatchNorm's statistics differ between ranks; all get those of rank 0."""
        online: Mapping[str, Tensor] = dict(model.named_buffers())
        _copy([(buffer, online[name]) for name, buffer in self.model.named_buffers() if name in online])
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        statistics = [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        if statistics and distributed.world_size() > 1:
            flat = torch.cat([statistic.flatten() for statistic in statistics])
            distributed.broadcast(flat)
            for statistic, value in zip(statistics, flat.split([s.numel() for s in statistics]), strict=True):
                statistic.copy_(value.view_as(statistic))


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [value for _, value in pairs])


def _named(model: nn.Module, *, tied: bool = False) -> dict[str, Tensor]:
    """A model's parameters by name, without the prefix that torch.compile adds to blocks; ``tied``: tied ones by each name."""
    return {_plain(name): parameter for name, parameter in model.named_parameters(remove_duplicate=not tied)}


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _own(parameter: Tensor, owned: dict[int, nn.Parameter]) -> nn.Parameter:
    """A copy of a parameter without gradient; of a tied one the same for each of its names."""
    if id(parameter) not in owned:
        owned[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
    return owned[id(parameter)]
