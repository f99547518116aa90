"""Hinge loss over the global batch: VSE++'s and VSE-infinity's objective, the papers' baseline (METHODS 6, 9, 11)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import directed_triplet
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import Pairs, compare, compare_rows, global_batch


class Triplet(Term):
    """:func:`coder_plugin.functional.triplet` with the pairs of all ranks as candidates.

    Args:
        margin: by how much the positive must win.
        hardest: each anchor's hardest negative alone, or all.
        reduction: ``mean`` or ``sum`` over anchors.
        similarity: ``cosine`` of the two towers' features, or ``fusion``, the score of the head of that name.
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
        similarity: Literal["cosine", "fusion"] = "cosine",
        mask_same_image: bool = True,
    ) -> None:
        super().__init__()
        self.margin, self.hardest, self.reduction = margin, hardest, reduction
        self.mask_same_image = mask_same_image
        if similarity not in ("cosine", "fusion"):
            raise ValueError(f"similarity must be 'cosine' or 'fusion', got {similarity!r}")
        if similarity == "fusion":
            self.requires = ("coder_fusion",)

    def forward(
        self,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        coder_fusion: Tensor | None = None,
        coder_ids: Tensor | None = None,
    ) -> Tensor:
        """This rank's features [B, D], L2-normalised, or rows of scores [B, N], and image ids [B] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        if coder_fusion is not None:
            pairs = compare_rows(coder_fusion, ids, local_loss=self.local_loss)
        else:
            assert image_features is not None and text_features is not None
            pairs = compare(global_batch(image_features, text_features, ids, local_loss=self.local_loss))
        return hinge(
            pairs, margin=self.margin, hardest=self.hardest, reduction=self.reduction, local_loss=self.local_loss
        )


def hinge(
    pairs: Pairs, *, margin: float, hardest: bool, reduction: Literal["mean", "sum"], local_loss: bool
) -> Tensor:
    """The hinge loss of a global batch's similarities, both directions added."""
    loss = pairs.positive.new_zeros(())
    for similarity in (pairs.image_to_text, pairs.text_to_image):
        loss = loss + directed_triplet(
            similarity, pairs.positive, pairs.negatives, margin=margin, hardest=hardest, reduction=reduction
        )
    if reduction == "sum" and local_loss:
        # of this rank's anchors alone, while losses and gradients are averaged over ranks
        loss = loss * distributed.world_size()
    return loss
