"""Diversity-sensitive contrastive loss of the concept embeddings (CODER eq. 2, 14; docs/equations.md#concepts)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin.losses.dcl import DCL
from coder_plugin.losses.diversity import Diversity


class ConceptDCL(DCL):
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

    def __init__(
        self,
        *,
        mu: float = 0.1,
        gamma: float = 0.3,
        epsilon: float = 0.1,
        diversity: Diversity = "std",
        positive_weight: float | Literal["mu"] = 1.0,
        diversity_gradient: bool = False,
        effective_negatives: int | None = None,
        mask_same_image: bool = True,
    ) -> None:
        super().__init__(
            mu=mu, gamma=gamma, epsilon=epsilon, diversity=diversity, positive_weight=positive_weight,
            diversity_gradient=diversity_gradient, effective_negatives=effective_negatives, mask_same_image=mask_same_image,
        )  # fmt: skip

    def compute(  # type: ignore[override]
        self, coder_image_concepts: Tensor, coder_text_concepts: Tensor, coder_ids: Tensor | None = None
    ) -> Tensor:
        """Concept embeddings [N, F], L2-normalised, and image ids [N] -> scalar."""
        return 2 * super().compute(coder_image_concepts, coder_text_concepts, coder_ids)
