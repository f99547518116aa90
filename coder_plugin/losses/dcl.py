"""Diversity-sensitive contrastive loss over the global batch (CODER eq. 3-5; METHODS 1, 2)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import Diversity, check_dcl_options, directed_dcl, spread
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import global_pairs


class DCL(Term):
    """:func:`coder_plugin.functional.dcl` with the pairs of all ranks as candidates.

    Args:
        mu: temperature. gamma: margin of the negatives. epsilon: of the diversity.
        diversity: ``std``, ``entropy`` or ``none``.
        positive_weight: weight of the positive's term; ``mu`` is the formula as printed.
        mask_same_image: pairs of one image are not each other's negatives.
        diversity_gradient: let the gradient through the diversity weights.
    """

    uses = ("coder_ids",)

    def __init__(
        self,
        *,
        mu: float = 0.1,
        gamma: float = 0.3,
        epsilon: float = 0.1,
        diversity: Diversity = "std",
        positive_weight: float | Literal["mu"] = 1.0,
        mask_same_image: bool = True,
        diversity_gradient: bool = False,
    ) -> None:
        super().__init__()
        check_dcl_options(mu=mu, epsilon=epsilon, positive_weight=positive_weight)
        self.mu, self.gamma, self.epsilon, self.diversity = mu, gamma, epsilon, diversity
        self.positive_weight, self.mask_same_image = positive_weight, mask_same_image
        self.diversity_gradient = diversity_gradient

    def forward(self, image_features: Tensor, text_features: Tensor, coder_ids: Tensor | None = None) -> Tensor:
        """This rank's image and text features [B, D], L2-normalised, and image ids [B] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        pairs = global_pairs(image_features, text_features, ids, local_loss=self.local_loss)
        loss = pairs.positive.new_zeros(())
        for similarity in (pairs.image_to_text, pairs.text_to_image):
            per_anchor = directed_dcl(
                similarity,
                pairs.positive,
                pairs.negatives,
                self._weights(similarity, pairs.negatives),
                mu=self.mu,
                gamma=self.gamma,
                positive_weight=self.positive_weight,
            )
            loss = loss + per_anchor.mean()
        return loss

    def _weights(self, similarity: Tensor, negatives: Tensor) -> Tensor:
        """Diversity of each anchor over the largest among the anchors of all ranks [n]."""
        with torch.set_grad_enabled(self.diversity_gradient and torch.is_grad_enabled()):
            weights = spread(similarity, negatives, kind=self.diversity, epsilon=self.epsilon)
            all_weights = distributed.gather(weights) if self.local_loss else weights
            return weights / all_weights.amax()
