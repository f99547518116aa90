"""A momentum copy of a model's towers and aggregators (He et al. 2020; CODER section 3.2.3; METHODS 3)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coder_plugin import distributed

Mode = Literal["eval", "train"]


class MomentumCopy(nn.Module):
    """The model without its heads, following it: trained parameters are averaged, all else is copied.

    ``theta_copy <- m theta_copy + (1 - m) theta`` for parameters that require a gradient, once per performed step; frozen
    parameters and buffers (BatchNorm's statistics, attention masks with their -inf) are taken over as they are. The copy
    has no gradient, and its mode never changes: :meth:`train` does nothing.

    Args:
        momentum: m, in [0, 1). mode: the copy's own mode, ``"eval"`` (no dropout, running statistics) or ``"train"``.
    """

    def __init__(self, *, momentum: float = 0.995, mode: Mode = "eval") -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.momentum, self.mode = momentum, mode
        self.model: Any = None

    def copy_from(self, model: Any) -> None:
        """Copy the model as it now is, in place of an earlier copy; ``model.coder``'s heads are left out."""
        coder = model.coder
        model.coder = coder.without_heads()
        try:
            self.model = copy.deepcopy(model)
        finally:
            model.coder = coder
        if (capture := getattr(self.model, "_coder_capture", None)) is not None:
            capture.restrict(aggregated=len(coder.aggregators) > 0)
        self.model.requires_grad_(False).train(self.mode == "train")
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                module.track_running_stats = False  # batch statistics, and nothing written in forward

    def train(self, mode: bool = True) -> MomentumCopy:
        return self

    @torch.no_grad()
    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """The copy's embeddings of images and texts, each [B, D], L2-normalised, float32."""
        return self.model.embed_image(image).float(), self.model.embed_text(text).float()

    @torch.no_grad()
    def update(self, model: Any) -> None:
        """Follow the model by one step. Parameters are matched by name; names that one side lacks are skipped."""
        online = _named(model)
        trained: list[tuple[Tensor, Tensor]] = []
        followed: list[tuple[Tensor, Tensor]] = []
        for name, average in _named(self.model).items():
            if name in online:
                pair = (distributed.local(average), distributed.local(online[name]))
                (trained if online[name].requires_grad else followed).append(pair)
        if trained:
            averages = [average for average, _ in trained]
            torch._foreach_lerp_(averages, [now.detach().to(average.dtype) for average, now in trained], 1 - self.momentum)
        for average, now in followed:
            average.copy_(now)
        self._copy_buffers(model)

    @torch.no_grad()
    def drift(self, model: Any) -> float:
        """How far the copy is behind: ``|theta_copy - theta| / |theta|`` over the trained parameters. Where these are sharded,
        ask on every rank."""
        online = _named(model)
        named = [
            (average, online[name])
            for name, average in _named(self.model).items()
            if name in online and online[name].requires_grad
        ]
        if not named:
            return 0.0
        pairs = [(distributed.local(average), distributed.local(now).to(average.dtype)) for average, now in named]
        apart = torch._foreach_norm([average - now for average, now in pairs])
        norms = torch._foreach_norm([now for _, now in pairs])
        squares = torch.stack([torch.stack(apart).norm(), torch.stack(norms).norm()]).square()
        if distributed.is_sharded(named[0][1]):
            device = next((buffer.device for buffer in model.buffers()), squares.device)  # parts may be kept on the CPU
            squares = distributed.all_sum(squares.to(device))
        return float((squares[0] / squares[1].clamp(min=1e-24)).sqrt())

    def _copy_buffers(self, model: Any) -> None:
        """Each rank's BatchNorm has seen its own samples: rank 0's statistics hold for all."""
        online: Mapping[str, Tensor] = dict(model.named_buffers())
        for name, buffer in self.model.named_buffers():
            if name in online:
                buffer.copy_(online[name])
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        statistics = [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        if statistics and distributed.world_size() > 1:
            flat = torch.cat([statistic.flatten() for statistic in statistics])
            distributed.broadcast(flat)
            for statistic, value in zip(statistics, flat.split([s.numel() for s in statistics]), strict=True):
                statistic.copy_(value.view_as(statistic))


def _named(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by the names that they have before any of its blocks is compiled."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
