"""Diversity-sensitive contrastive loss over the global batch (CODER eq. 3-5; METHODS 1, 2)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coder_plugin.functional import Diversity, check_dcl_options, directed_dcl, spread
from coder_plugin.losses.banks import Banks
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import compare, global_batch, normalised


class DCL(Term):
    """:func:`coder_plugin.functional.dcl` with the pairs of all ranks as candidates.

    Args:
        mu: temperature. gamma: margin of the negatives. epsilon: of the diversity.
        diversity: ``std``, ``entropy`` or ``none``.
        diversity_over: ``batch``, or ``batch+bank``: the mean of the diversity over the batch and that over the keys and
            entries of the momentum banks, which are then kept, with or without ``m_dcl``.
        positive_weight: weight of the positive's term; ``mu`` is the formula as printed.
        mask_same_image: pairs of one image are not each other's negatives.
        diversity_gradient: let the gradient through the diversity weights.
        effective_negatives: weigh the sum over the negatives as if they were so many; none: the plain sum.
    """

    uses: tuple[str, ...] = ("coder_ids",)
    takes_views = True

    def __init__(
        self,
        *,
        mu: float = 0.1,
        gamma: float = 0.3,
        epsilon: float = 0.1,
        diversity: Diversity = "std",
        diversity_over: Literal["batch", "batch+bank"] = "batch",
        positive_weight: float | Literal["mu"] = 1.0,
        mask_same_image: bool = True,
        diversity_gradient: bool = False,
        effective_negatives: int | None = None,
    ) -> None:
        super().__init__()
        check_dcl_options(
            mu=mu, epsilon=epsilon, positive_weight=positive_weight, effective_negatives=effective_negatives
        )
        if diversity_over not in ("batch", "batch+bank"):
            raise ValueError(f"diversity_over must be 'batch' or 'batch+bank', got {diversity_over!r}")
        self.mu, self.gamma, self.epsilon, self.diversity = mu, gamma, epsilon, diversity
        self.positive_weight, self.mask_same_image = positive_weight, mask_same_image
        self.diversity_gradient, self.effective_negatives = diversity_gradient, effective_negatives
        self.diversity_over = diversity_over
        if diversity_over == "batch+bank":
            self.requires = (*self.requires, *Banks.requires)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_ids: Tensor | None = None,
        coder_image_keys: Tensor | None = None,
        coder_text_keys: Tensor | None = None,
    ) -> Tensor:
        """This rank's image and text features [B, D], L2-normalised, image ids [B] and momentum keys [B, D] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        batch = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
        pairs = compare(batch)
        banks = None
        if coder_image_keys is not None and coder_text_keys is not None and coder_ids is not None:
            banks = Banks(self, batch, coder_image_keys, coder_text_keys, coder_ids)
        loss = pairs.positive.new_zeros(())
        for modality, similarity in (("image", pairs.image_to_text), ("text", pairs.text_to_image)):
            with torch.set_grad_enabled(self.diversity_gradient and torch.is_grad_enabled()):
                spreads = [spread(similarity, pairs.negatives, kind=self.diversity, epsilon=self.epsilon)]
                if banks is not None:
                    spreads.append(banks.spread(modality, kind=self.diversity, epsilon=self.epsilon))
                weights = normalised(spreads, local_loss=self.local_loss)
            loss = loss + self._mean(similarity, pairs.positive, pairs.negatives, weights)
        return loss

    def _mean(self, similarity: Tensor, positive: Tensor, negatives: Tensor, weights: Tensor) -> Tensor:
        return self._per_anchor(similarity, positive, negatives, weights).mean()

    def _per_anchor(self, similarity: Tensor, positive: Tensor, negatives: Tensor, weights: Tensor) -> Tensor:
        return directed_dcl(
            similarity,
            positive,
            negatives,
            weights,
            mu=self.mu,
            gamma=self.gamma,
            positive_weight=self.positive_weight,
            effective_negatives=self.effective_negatives,
        )


class ConceptDCL(DCL):
    """``L_DCL^C``: DCL of the concept embeddings, twice, as the paper's sum over both orders of the pair is (METHODS 4).

    In-batch only. Options are DCL's.
    """

    requires = ("coder_image_concepts", "coder_text_concepts")

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
        effective_negatives: int | None = None,
    ) -> None:
        super().__init__(
            mu=mu,
            gamma=gamma,
            epsilon=epsilon,
            diversity=diversity,
            positive_weight=positive_weight,
            mask_same_image=mask_same_image,
            diversity_gradient=diversity_gradient,
            effective_negatives=effective_negatives,
        )

    def forward(  # type: ignore[override]
        self, coder_image_concepts: Tensor, coder_text_concepts: Tensor, coder_ids: Tensor | None = None
    ) -> Tensor:
        """This rank's concept embeddings [B, F], L2-normalised, and image ids [B] -> scalar."""
        return 2 * super().forward(coder_image_concepts, coder_text_concepts, coder_ids)
