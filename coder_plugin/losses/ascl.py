"""Asymmetry-sensitive contrast over the global batch (AsCL eq. 5-7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional.ascl_loss import ascl, ascl_of_features
from coder_plugin.functional.similarity import anchor_rows, check_temperature
from coder_plugin.heads.capabilities import AddsTexts, heads_with
from coder_plugin.losses.base import Term
from coder_plugin.losses.gathered import Batch, BatchScores, global_batch, global_scores

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


class AsCL(Term):
    """:func:`coder_plugin.functional.ascl` of the pairs of all ranks, ``(L_I + L_II&III) / 2``.

    ``L_I`` compares images and their captions, with noised captions as further negatives of the images. ``L_II&III``
    does the same with generated positive captions, and noised versions of these. Options of the head ``asymmetry``
    say which are generated, and how. Without generated positives ``L_I`` is the whole loss; without noise both are
    InfoNCE. A text that its noise has not changed (one word shuffled) is no negative.

    Args:
        temperature: > 0, or ``logit_scale``: 1 over the model's own scale, which is then trained.
        similarity: ``cosine`` of the features of both towers, or ``fusion``, the score of the head of that name.
        mask_same_image: pairs of one image are not each other's negatives.

    Example:
        >>> import torch
        >>> AsCL(temperature=0.5)(torch.eye(2), torch.eye(2))  # no generated texts: InfoNCE, 2 * log(1 + exp(-2))
        tensor(0.2539)
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
        self.has_kernels = similarity == "cosine"
        self.temperature, self.similarity, self.mask_same_image = temperature, similarity, mask_same_image
        self.requires = ("image_features", "text_features") if similarity == "cosine" else ("coder_fusion",)
        if isinstance(temperature, str):
            self.requires = (*self.requires, "logit_scale")
        else:
            check_temperature(temperature)
        # reading any of them builds the head that generates texts; the fusion's rows of them need that head
        self.uses = (
            "coder_ids",
            "coder_noised_features",
            "coder_positive_features",
            "coder_noised_positive_features",
            "coder_noise_changed",
        )
        if similarity == "fusion":
            self.uses += ("coder_fusion_noised", "coder_fusion_positive", "coder_fusion_noised_positive")
        self.gathers = ("image_features", "text_features", "coder_fusion", *self.uses)

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        noises_output = any(head.noise_at == "output" for head in heads_with(heads, AddsTexts).values())
        if self.similarity == "cosine" and noises_output:
            raise CoderError(
                "noise_at=output noises the words that the fusion reads, which the cosine of pooled features does not see: "
                "use ascl(similarity=fusion) alone, with another term for the towers, such as clip"
            )
        return super().bind(heads, local_loss=local_loss)

    def compute(
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
        """The features [N, D] of all ranks, L2-normalised, or scores [N, N], and image ids [N] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        # captions, generated positives; each with noised texts, as features or as their scores with the anchors
        compared: list[tuple[Batch | BatchScores, Tensor | None]] = []
        if self.similarity == "fusion":
            for rows, noised in (
                (coder_fusion, coder_fusion_noised),
                (coder_fusion_positive, coder_fusion_noised_positive),
            ):
                if rows is not None:
                    scores = global_scores(rows, ids, local_loss=self.local_loss)
                    compared.append((scores, None if noised is None else anchor_rows(noised, scores.anchors)))
        else:
            assert image_features is not None and text_features is not None
            batch = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
            compared.append((batch, coder_noised_features))
            if coder_positive_features is not None:
                compared.append((batch._replace(texts=coder_positive_features), coder_noised_positive_features))
        changed: list[Tensor | None] = [None] * len(compared)
        if coder_noise_changed is not None:
            changed = list(coder_noise_changed.T)
        temperature: Any = self.temperature if logit_scale is None else 1 / logit_scale
        losses = []
        for (each, noised), valid in zip(compared, changed, strict=True):
            passed: dict[str, Any] = {
                "temperature": temperature,
                "image_ids": each.ids,
                "noise_valid": valid,
                "anchors": each.anchors,
            }
            if isinstance(each, BatchScores):
                losses.append(ascl(each.similarity, noised, text_to_image=each.text_to_image, **passed))
            else:
                passed["implementation"] = self.implementation
                losses.append(ascl_of_features(each.images, each.texts, noised, **passed))
        return sum(losses[1:], losses[0]) / len(losses)
