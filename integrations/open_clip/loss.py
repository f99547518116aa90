"""An objective's loss as upstream's trainers call it, beside what upstream's own flags ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.coder import CoderLoss
from coder_plugin.training.step import SHARED


class ScaledGradient(torch.autograd.Function):
    """The value as it is, its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class UpstreamLoss(nn.Module):
    """The objective's terms, and CoCa's captioning or the distillation term where upstream's flags switch these on.

    ``--loss`` stands in for the contrastive part alone. Under accumulation upstream takes the loss once for each of
    its micro-batches, so what the loss reads directly (the temperature) would get its gradient that many times: it is divided
    by their number, and the accumulated gradient is the big batch's.

    Args:
        terms: the objective's. own: upstream's loss for these flags, asked for its captioning or distillation part alone.
        accum_freq: micro-batches of a step.
    """

    def __init__(self, terms: CoderLoss, *, own: Any = None, accum_freq: int = 1) -> None:
        super().__init__()
        self.terms, self.own, self.accum_freq = terms, own, accum_freq

    def forward(self, *, output_dict: bool = True, **outputs: Tensor) -> dict[str, Tensor] | Tensor:
        if self.accum_freq > 1:
            factor = 1 / self.accum_freq
            shared = {key: ScaledGradient.apply(outputs[key], factor) for key in SHARED if key in outputs}
            outputs = {**outputs, **shared}
        losses: Any = self.terms(output_dict=True, **outputs)
        if "dist_image_features" in outputs:
            keys = [f"{prefix}{key}" for prefix in ("", "dist_") for key in ("image_features", "text_features", "logit_scale")]
            losses["distill_loss"] = self.own(**{key: outputs[key] for key in keys}, output_dict=True)["distill_loss"]
        elif "logits" in outputs and getattr(self.own, "caption_loss_weight", None):
            value = self.own.caption_loss(outputs["logits"].permute(0, 2, 1), outputs["labels"])
            losses["caption_loss"] = self.own.caption_loss_weight * value
        return losses if output_dict else sum(losses.values())
