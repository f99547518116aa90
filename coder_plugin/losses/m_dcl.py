"""DCL against the coupled momentum banks (CODER eq. 6; METHODS 3)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coder_plugin.functional import Diversity, DiversityOver, Reverse, check_m_dcl_options, cosine, spread
from coder_plugin.losses.banks import Banks
from coder_plugin.losses.dcl import DCL
from coder_plugin.losses.pairs import global_batch, normalised


class MDCL(DCL):
    """:func:`coder_plugin.functional.m_dcl` with the keys of all ranks and the banks as candidates.

    Args:
        mu: temperature. gamma: margin of the negatives. epsilon: of the diversity.
        diversity: ``std``, ``entropy`` or ``none``.
        diversity_over: ``batch``, ``bank`` or ``batch+bank``, the mean of both normalised values.
        reverse: bank anchors against the live batch: ``paired`` the current keys, ``all`` the entries too, ``none``.
        positive_weight: weight of the positive's term; ``mu`` is the formula as printed.
        mask_same_image: keys and entries of an anchor's own image are not its negatives.
        diversity_gradient: let the gradient through the diversity weights.
        effective_negatives: weigh each sum, over the bank and over the batch, as if its negatives were so many; none: the
            plain sums.
        warmup: stay silent until the bank holds so many entries, or is full.
    """

    requires = ("image_features", "text_features", *Banks.requires)
    uses = ()

    def __init__(
        self,
        *,
        mu: float = 0.1,
        gamma: float = 0.3,
        epsilon: float = 0.1,
        diversity: Diversity = "std",
        diversity_over: DiversityOver = "batch+bank",
        reverse: Reverse = "paired",
        positive_weight: float | Literal["mu"] = 1.0,
        mask_same_image: bool = True,
        diversity_gradient: bool = False,
        effective_negatives: int | None = None,
        warmup: int = 0,
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
        check_m_dcl_options(reverse=reverse, diversity_over=diversity_over)
        if warmup < 0:
            raise ValueError(f"warmup must be >= 0, got {warmup}")
        self.over, self.reverse, self.warmup = diversity_over, reverse, warmup

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_ids: Tensor,
        coder_image_keys: Tensor,
        coder_text_keys: Tensor,
    ) -> Tensor:
        """This rank's live features [B, D], L2-normalised, image ids [B] and momentum keys [B, D] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        batch = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
        banks = Banks(self, batch, coder_image_keys, coder_text_keys, coder_ids)
        loss = image_features.new_zeros((), dtype=torch.promote_types(image_features.dtype, torch.float32))
        for modality in ("image", "text"):
            similarity, negatives = banks.similarity(modality)
            weights = self._weights(banks, modality)
            loss = loss + self._mean(similarity, batch.positive(similarity), negatives, weights)
            if self.reverse != "none":
                loss = loss + self._reverse(banks, modality)
        return loss * (banks.bank.count >= min(self.warmup, banks.bank.size)) if self.warmup else loss

    def _weights(self, banks: Banks, modality: str) -> Tensor:
        """Diversity of the live anchors [n]."""
        batch, spreads = banks.batch, []
        with torch.set_grad_enabled(self.diversity_gradient and torch.is_grad_enabled()):
            if "batch" in self.over:
                others = batch.texts if modality == "image" else batch.images
                live = cosine(banks.anchors(modality), others)
                spreads.append(spread(live, batch.negatives, kind=self.diversity, epsilon=self.epsilon))
            if "bank" in self.over:
                spreads.append(banks.spread(modality, kind=self.diversity, epsilon=self.epsilon))
            return normalised(spreads, local_loss=self.local_loss)

    def _reverse(self, banks: Banks, modality: str) -> Tensor:
        """The other modality's keys, and with ``all`` its entries, as anchors over this modality's live batch."""
        batch, other = banks.batch, "text" if modality == "image" else "image"
        live = batch.images if modality == "image" else batch.texts
        keys = banks.keys[other].to(live.dtype)
        if self.reverse == "paired":
            similarity, negatives = cosine(keys[batch.own], live), batch.negatives
            weights = self._spread(similarity, negatives, local_loss=self.local_loss)
            return self._mean(similarity, batch.positive(similarity), negatives, weights)
        # the entries are every rank's, so all ranks take all anchors, whatever local_loss says
        similarity = torch.cat([cosine(keys, live), cosine(getattr(banks.bank, other).to(live.dtype), live)])
        negatives = torch.cat([batch.ids[:, None] != batch.ids[None, :], banks.entries_are_negatives(slice(None)).T])
        weights = self._spread(similarity, negatives, local_loss=False)
        # log(1 + S) of a similarity of zero: an entry has no positive and adds nothing to the second term
        entries = len(similarity) - len(keys)
        positive = torch.cat([similarity[: len(keys)].diagonal(), similarity.new_zeros(entries)])
        counted = torch.cat([negatives.new_ones(len(keys)), banks.bank.valid])
        per_anchor = self._per_anchor(similarity, positive, negatives, weights)
        return torch.where(counted, per_anchor, 0).sum() / counted.sum()

    def _spread(self, similarity: Tensor, negatives: Tensor, *, local_loss: bool) -> Tensor:
        with torch.set_grad_enabled(self.diversity_gradient and torch.is_grad_enabled()):
            spreads = [spread(similarity, negatives, kind=self.diversity, epsilon=self.epsilon)]
            return normalised(spreads, local_loss=local_loss)
