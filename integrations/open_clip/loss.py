"""The loss as upstream's trainers call it: our terms, and the terms that upstream's own flags add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.coder import CoderLoss
from coder_plugin.training.step import SHARED


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class UpstreamLoss(nn.Module):
    """The objective's terms, and CoCa's captioning loss or the distillation loss where upstream's flags ask for them.

    ``--loss`` replaces only the contrastive part. Under accumulation upstream computes the loss once per micro-batch, so
    parameters that the loss reads directly (the temperature) would get their gradient that many times. It is divided by their
    number, so that the accumulated gradient is that of the whole batch.

    Args:
        terms: the objective's loss.
        own: upstream's loss for these flags, used only for its captioning or distillation part.
        accum_freq: micro-batches per step.
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
