"""Hinge loss over the global batch: VSE++'s and VSE-infinity's objective, the papers' baseline (METHODS 6, 9, 11)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import directed_triplet
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import compare, global_batch


class Triplet(Term):
    """:func:`coder_plugin.functional.triplet` with the pairs of all ranks as candidates.

    Args:
        margin: by how much the positive must win.
        hardest: each anchor's hardest negative alone, or all.
        reduction: ``mean`` or ``sum`` over anchors.
        mask_same_image: pairs of one image are not each other's negatives.
    """

    uses = ("coder_ids",)
    takes_views = True

    def __init__(
        self,
        *,
        margin: float = 0.2,
        hardest: bool = True,
        reduction: Literal["mean", "sum"] = "mean",
        mask_same_image: bool = True,
    ) -> None:
        super().__init__()
        self.margin, self.hardest, self.reduction = margin, hardest, reduction
        self.mask_same_image = mask_same_image

    def forward(self, image_features: Tensor, text_features: Tensor, coder_ids: Tensor | None = None) -> Tensor:
        """This rank's image and text features [B, D], L2-normalised, and image ids [B] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        pairs = compare(global_batch(image_features, text_features, ids, local_loss=self.local_loss))
        loss = pairs.positive.new_zeros(())
        for similarity in (pairs.image_to_text, pairs.text_to_image):
            loss = loss + directed_triplet(
                similarity,
                pairs.positive,
                pairs.negatives,
                margin=self.margin,
                hardest=self.hardest,
                reduction=self.reduction,
            )
        if self.reduction == "sum" and self.local_loss:
            # of this rank's anchors alone, while losses and gradients are averaged over ranks
            loss = loss * distributed.world_size()
        return loss
