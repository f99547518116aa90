"""Diversity-sensitive contrastive loss of the concept embeddings (CODER, below eq. 6; docs/equations.md#concepts)."""

from __future__ import annotations

from torch import Tensor

from coder_plugin.losses.dcl import DCL, DCLTerm, dcl_of_pairs


class ConceptDCL(DCLTerm):
    """``L_DCL^C``: twice :func:`coder_plugin.functional.dcl` of the concept embeddings, with the pairs of all ranks.

    Twice, because the paper adds the loss of both orders of the pair, which are equal. The options are those of ``dcl``. Use it
    beside ``dcl``, with the head ``concepts``.

    Args:
        mask_same_image: pairs of one image are not each other's negatives.

    Example:
        >>> import torch
        >>> ConceptDCL()(torch.eye(2), torch.eye(2))
        tensor(-2.7532)
    """

    requires = ("coder_image_concepts", "coder_text_concepts")
    supports = DCL.supports - {"hard_negatives"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optional = ("coder_ids",) if self.mask_same_image else ()
        self.gathers = (*self.requires, *self.optional)

    def compute(
        self, coder_image_concepts: Tensor, coder_text_concepts: Tensor, coder_ids: Tensor | None = None
    ) -> Tensor:
        """Concept embeddings [N, F], L2-normalised, and image ids [N] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        return 2 * dcl_of_pairs(self.pairs(coder_image_concepts, coder_text_concepts, ids), self)
