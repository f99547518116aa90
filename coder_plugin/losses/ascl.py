"""Asymmetry-sensitive contrast over the global batch (AsCL eq. 5-7; METHODS 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional import check_temperature, cosine, directed_ascl
from coder_plugin.heads.capabilities import AddsTexts, heads_with
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import Batch, Pairs, compare, compare_rows, global_batch

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head

#: What the head ``asymmetry`` makes of a batch's texts; the fusion head's rows of these are named alike.
_MADE = ("coder_noised_features", "coder_positive_features", "coder_noised_positive_features", "coder_noise_changed")
_ROWS = ("coder_fusion_noised", "coder_fusion_positive", "coder_fusion_noised_positive")


class AsCL(Term):
    """:func:`coder_plugin.functional.ascl` of the pairs of all ranks, ``(L_I + L_II&III) / 2``.

    ``L_I`` compares images and their captions, with noised captions as further negatives of the images; ``L_II&III`` does
    so for the positive captions that were generated, with noised ones made of these. Which are generated, and how, are
    options of the head ``asymmetry``; without generated positives ``L_I`` is the whole loss, without noise both are InfoNCE.
    A text that its noise has not changed (one word shuffled) is no negative.

    Args:
        temperature: > 0, or ``logit_scale``: the model's own, which then learns.
        similarity: ``cosine`` of the two towers' features, or ``fusion``, the score of the head of that name.
        mask_same_image: pairs of one image are not each other's negatives.
    """

    takes_views = True

    def __init__(
        self,
        *,
        temperature: float | Literal["logit_scale"] = 0.05,
        similarity: Literal["cosine", "fusion"] = "cosine",
        mask_same_image: bool = True,
    ) -> None:
        super().__init__()
        if similarity not in ("cosine", "fusion"):
            raise ValueError(f"similarity must be 'cosine' or 'fusion', got {similarity!r}")
        if isinstance(temperature, str) and temperature != "logit_scale":
            raise ValueError(f"temperature must be a number > 0 or 'logit_scale', got {temperature!r}")
        self.temperature, self.similarity, self.mask_same_image = temperature, similarity, mask_same_image
        self.requires = ("image_features", "text_features") if similarity == "cosine" else ("coder_fusion",)
        if temperature == "logit_scale":
            self.requires = (*self.requires, "logit_scale")
        else:
            check_temperature(temperature)  # type: ignore[arg-type]
        # the fusion's rows of made texts come only of a model that has the head which makes them
        self.uses = ("coder_ids", *_MADE, *(() if similarity == "cosine" else _ROWS))

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        noises_output = any(head.noise_at == "output" for head in heads_with(heads, AddsTexts).values())
        if self.similarity == "cosine" and noises_output:
            raise CoderError(
                "asymmetry.noise_at=output noises the words that the fusion reads, of which the cosine of pooled features "
                "knows nothing: take ascl(similarity=fusion) alone, with another term for the towers, such as clip"
            )
        return super().bind(heads, local_loss=local_loss)

    def forward(
        self,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        coder_fusion: Tensor | None = None,
        logit_scale: Tensor | None = None,
        coder_ids: Tensor | None = None,
        coder_noised_features: Tensor | None = None,
        coder_positive_features: Tensor | None = None,
        coder_noised_positive_features: Tensor | None = None,
        coder_fusion_noised: Tensor | None = None,
        coder_fusion_positive: Tensor | None = None,
        coder_fusion_noised_positive: Tensor | None = None,
        coder_noise_changed: Tensor | None = None,
    ) -> Tensor:
        """This rank's features [B, D], L2-normalised, or rows of scores [B, N], and image ids [B] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        compared: list[tuple[Pairs, Tensor | None]] = []
        if self.similarity == "fusion":
            for rows, noised in (
                (coder_fusion, coder_fusion_noised),
                (coder_fusion_positive, coder_fusion_noised_positive),
            ):
                if rows is not None:
                    compared.append((compare_rows(rows, ids, local_loss=self.local_loss), self._rows(noised)))
        else:
            assert image_features is not None and text_features is not None
            batch = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
            compared.append((compare(batch), self._cosine(batch, coder_noised_features)))
            if coder_positive_features is not None:
                batch = batch._replace(texts=distributed.gather(coder_positive_features))
                compared.append((compare(batch), self._cosine(batch, coder_noised_positive_features)))
        changed: Sequence[Tensor | None] = [None] * len(compared)
        if coder_noise_changed is not None:
            changed = list(distributed.gather(coder_noise_changed.to(torch.uint8)).bool().T)
        temperature: Any = self.temperature if logit_scale is None else 1 / logit_scale
        losses = [
            self._ratios(pairs, noise, counts, temperature)
            for (pairs, noise), counts in zip(compared, changed, strict=True)
        ]
        return sum(losses[1:], losses[0]) / len(losses)

    @staticmethod
    def _cosine(batch: Batch, noised: Tensor | None) -> Tensor | None:
        """Of the anchors and all ranks' noised texts [n, N]."""
        return None if noised is None else cosine(batch.images[batch.own], distributed.gather(noised))

    def _rows(self, noised: Tensor | None) -> Tensor | None:
        """Scores of the anchors [n, N] out of this rank's rows."""
        return noised if noised is None or self.local_loss else distributed.gather(noised)

    @staticmethod
    def _ratios(
        pairs: Pairs, noise: Tensor | None, noise_valid: Tensor | None, temperature: float | Tensor
    ) -> Tensor:
        of_images = directed_ascl(
            pairs.image_to_text, pairs.positive, pairs.negatives, noise, noise_valid=noise_valid, temperature=temperature
        )
        of_texts = directed_ascl(pairs.text_to_image, pairs.positive, pairs.negatives, temperature=temperature)
        return (of_images + of_texts).mean()
