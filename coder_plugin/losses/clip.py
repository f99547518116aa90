"""InfoNCE, as open_clip's own loss computes it: the baseline."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.functional.similarity import anchor_rows, candidate_negatives
from coder_plugin.functional.tiled import use_tiles
from coder_plugin.losses.base import Term
from coder_plugin.losses.gathered import NEGATIVES, anchors_of_rank, hard_negatives
from coder_plugin.losses.ring import clip_of_ranks


class Clip(Term):
    """``open_clip.ClipLoss`` (Radford et al., 2021), gathered with gradient. Every other pair of the global batch is a
    negative, other captions of the same image included. Above 4 million similarities it is computed by tiles, which is equal up
    to rounding (docs/equations.md#tiles).

    Args:
        hard_negatives: the hard negatives of all ranks' images are further negatives of every image that they are not captions
            of.

    Example:
        >>> import torch
        >>> Clip()(torch.eye(2), torch.eye(2), torch.tensor(2.0))  # log(1 + exp(-2))
        tensor(0.1269)
    """

    requires: tuple[str, ...] = ("image_features", "text_features", "logit_scale")
    uses: tuple[str, ...] = ("logit_bias",)
    gathers = ("image_features", "text_features", "coder_ids", *NEGATIVES)
    masks_same_image = False
    takes_negatives = True
    has_kernels = True

    def __init__(self, *, hard_negatives: bool = False) -> None:
        super().__init__()
        if hard_negatives:
            self.requires, self.uses, self.has_kernels = (*self.requires, *NEGATIVES), (*self.uses, "coder_ids"), False

    def ring_obstacle(self) -> str | None:
        if NEGATIVES[0] in self.requires:
            return "not with hard_negatives=true"
        return None if type(self) is Clip else super().ring_obstacle()

    def compute_in_ring(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None = None
    ) -> Tensor:
        """This rank's features [B, D], L2-normalised, and the model's scale and bias -> scalar."""
        loss = clip_of_ranks(image_features, text_features, logit_scale, triton=self.implementation == "triton")
        return loss if logit_bias is None else loss + 0 * logit_bias.sum()

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        coder_ids: Tensor | None = None,
        coder_negative_features: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """The features [N, D] of all ranks, L2-normalised, the model's scale and bias, image ids [N] and hard negatives
        [N, n, D] with their images' ids [N, n] -> scalar."""
        anchors = anchors_of_rank(len(image_features), local_loss=self.local_loss)
        rows = anchor_rows(image_features, anchors)
        further: dict[str, Any] = hard_negatives(coder_negative_features, coder_negative_ids)
        candidates = len(text_features) + (len(further["negatives"]) if further else 0)
        if use_tiles(self.implementation, (image_features, text_features), pairs=len(rows) * candidates, small=False):
            triton = self.implementation == "triton"
            passed = {"anchors": anchors, "triton": triton, "image_ids": coder_ids, **further}
            loss = tiled_clip(image_features, text_features, logit_scale, **passed)
            # a bias that all logits share changes nothing; its gradient is zero
            return loss if logit_bias is None else loss + 0 * logit_bias.sum()
        # the order of upstream's products, on which the last bits depend
        images = logit_scale * rows @ text_features.T
        if anchors is None and distributed.world_size() > 1:
            texts = images.T
        else:
            texts = logit_scale * anchor_rows(text_features, anchors) @ image_features.T
        if further:
            negatives = further["negatives"]
            ids, valid = further["negative_ids"], further["negative_valid"]
            mask = anchor_rows(candidate_negatives(coder_ids, ids, valid, len(image_features), negatives), anchors)
            images = torch.cat([images, (logit_scale * rows @ negatives.T).masked_fill(~mask, -torch.inf)], 1)
        if logit_bias is not None:
            images, texts = images + logit_bias, texts + logit_bias
        labels = torch.arange(len(text_features), device=images.device)[slice(None) if anchors is None else anchors]
        return (F.cross_entropy(images, labels) + F.cross_entropy(texts, labels)) / 2
