"""InfoNCE, as open_clip's own loss computes it: the baseline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.functional.similarity import anchor_rows
from coder_plugin.functional.tiled import use_tiles
from coder_plugin.losses.base import Term
from coder_plugin.losses.gathered import anchors_of_rank
from coder_plugin.losses.ring import clip_of_ranks


class Clip(Term):
    """``open_clip.ClipLoss`` (Radford et al., 2021), gathered with gradient. Every other pair of the global batch is a
    negative, other captions of the same image included. Above 4 million similarities it is computed by tiles, which is equal up
    to rounding (docs/equations.md#tiles).

    Example:
        >>> import torch
        >>> Clip()(torch.eye(2), torch.eye(2), torch.tensor(2.0))  # log(1 + exp(-2))
        tensor(0.1269)
    """

    requires = ("image_features", "text_features", "logit_scale")
    uses = ("logit_bias",)
    gathers = ("image_features", "text_features")
    masks_same_image = False
    has_kernels = True

    def ring_obstacle(self) -> str | None:
        return None if type(self) is Clip else super().ring_obstacle()

    def compute_in_ring(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None = None
    ) -> Tensor:
        """This rank's features [B, D], L2-normalised, and the model's scale and bias -> scalar."""
        loss = clip_of_ranks(image_features, text_features, logit_scale, triton=self.implementation == "triton")
        return loss if logit_bias is None else loss + 0 * logit_bias.sum()

    def compute(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None = None
    ) -> Tensor:
        """The features [N, D] of all ranks, L2-normalised, and the model's scale and bias -> scalar."""
        anchors = anchors_of_rank(len(image_features), local_loss=self.local_loss)
        rows = anchor_rows(image_features, anchors)
        if use_tiles(self.implementation, (image_features, text_features), pairs=len(rows) * len(text_features), small=False):
            triton = self.implementation == "triton"
            loss = tiled_clip(image_features, text_features, logit_scale, anchors=anchors, triton=triton)
            # a bias that all logits share changes nothing; its gradient is zero
            return loss if logit_bias is None else loss + 0 * logit_bias.sum()
        # the order of upstream's products, on which the last bits depend
        images = logit_scale * rows @ text_features.T
        if anchors is None and distributed.world_size() > 1:
            texts = images.T
        else:
            texts = logit_scale * anchor_rows(text_features, anchors) @ image_features.T
        if logit_bias is not None:
            images, texts = images + logit_bias, texts + logit_bias
        labels = torch.arange(len(text_features), device=images.device)[slice(None) if anchors is None else anchors]
        return (F.cross_entropy(images, labels) + F.cross_entropy(texts, labels)) / 2
