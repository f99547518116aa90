"""Diversity-sensitive contrastive loss of the concept embeddings (CODER eq. 2, 14)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coder_plugin.functional.dcl_loss import check_dcl_options, dcl
from coder_plugin.losses.base import Term, options_of
from coder_plugin.losses.gathered import global_batch


class ConceptDCL(Term):
    """``L_DCL^C``: twice :func:`coder_plugin.functional.dcl` of the concept embeddings, with the pairs of all ranks.

    Twice, because the paper adds the loss of both orders of the pair, which are equal. It takes that function's options.

    Args:
        mask_same_image: pairs of one image are not each other's negatives.

    Example:
        >>> import torch
        >>> ConceptDCL()(torch.eye(2), torch.eye(2))
        tensor(-2.7532)
    """

    requires = ("coder_image_concepts", "coder_text_concepts")
    uses = ("coder_ids",)
    gathers = (*requires, *uses)
    takes_views = True
    has_kernels = True

    @options_of(dcl)
    def __init__(self, *, mask_same_image: bool = True, **options: Any) -> None:
        super().__init__()
        check_dcl_options(**options)
        self.options, self.mask_same_image = options, mask_same_image

    def compute(
        self, coder_image_concepts: Tensor, coder_text_concepts: Tensor, coder_ids: Tensor | None = None
    ) -> Tensor:
        """The concept embeddings [N, F] of all ranks, L2-normalised, and image ids [N] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        batch = global_batch(coder_image_concepts, coder_text_concepts, ids, local_loss=self.local_loss)
        return 2 * dcl(
            batch.images,
            batch.texts,
            image_ids=batch.ids,
            anchors=batch.anchors,
            gather=batch.anchor_gather(),
            implementation=self.implementation,
            **self.options,
        )
