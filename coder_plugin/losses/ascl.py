"""Asymmetry-sensitive contrast: noised texts as further negatives of images (AsCL eq. 5-7; docs/equations.md#ascl).

Shapes: n pairs, a anchors (n, or the share of one process), m noised texts, d dimensions, N pairs of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from coder_plugin.contrast import Block, Dense, Direction, Pairs
from coder_plugin.contrast.pairs import scored_pairs
from coder_plugin.errors import CoderError
from coder_plugin.losses.base import Term, anchors_of_rank
from coder_plugin.losses.clip import infonce
from coder_plugin.tensors import check_range, check_temperature, upcast

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


def ascl(
    similarity: Tensor,
    noise_similarity: Tensor | None = None,
    *,
    temperature: float | Tensor,
    image_ids: Tensor | None = None,
    noise_valid: Tensor | None = None,
    text_to_image: Tensor | None = None,
    anchors: slice | None = None,
) -> Tensor:
    """One pair of ratios of AsCL, ``L_I`` or ``L_II&III`` (eq. 5, 6), over any similarity.

    The ratio of each text over the images plus that of each image over the texts. Every noised text of the batch is a
    negative of every image, unless it scores above the image's positive. For ``L_II&III`` the texts are the generated
    positives, and the noised texts are made from these positives. The objective is ``(L_I + L_II&III) / 2``.

    Use it where captions can be noised or generated: it teaches the score to tell a caption from a corrupted one.

    Args:
        similarity: images x texts [n, n], row i and column i a pair. With ``anchors`` the rows of these images alone,
            [a, n].
        noise_similarity: the same images x noised texts [n, m] or [a, m]; None: there are none.
        temperature: > 0 (0.01 and 0.05 in the paper); a tensor gets a gradient.
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        noise_valid: bool [m], False for noised texts that are not negatives. Default: all are.
        text_to_image: with ``anchors``, these texts x images [a, n].
        anchors: the rows of the batch that are anchors; None: all rows.

    Returns:
        Scalar >= 0, float32 or float64: mean over the pairs of both negative logarithms, added.

    Raises:
        ValueError: shapes that differ, an empty batch, a temperature that is not positive.

    Example:
        >>> ascl(torch.tensor([[0.5]]), torch.tensor([[0.5]]), temperature=0.1)  # a noised text as similar as the caption
        tensor(0.6931)
    """
    check_temperature(temperature)
    check_range(noise_similarity=noise_similarity)
    negatives = scored_pairs(similarity, text_to_image, image_ids, anchors)
    noised = None
    if noise_similarity is not None:
        if noise_similarity.ndim != 2 or len(noise_similarity) != len(similarity):
            raise ValueError(
                f"noise_similarity must have shape ({len(similarity)}, m), got {tuple(noise_similarity.shape)}"
            )
        mask = torch.ones_like(noise_similarity, dtype=torch.bool)
        noised = Dense.of_scores([noise_similarity], [mask if noise_valid is None else mask & noise_valid])
    return infonce(negatives, _scale(temperature, negatives.similarity[0]), noised).sum(0).mean()


def ascl_of_pairs(
    pairs: Pairs, noised: Tensor | None = None, *, temperature: float | Tensor, noise_valid: Tensor | None = None
) -> Tensor:
    """:func:`ascl` of the cosines of the pairs of a step and their noised texts [m, d]."""
    negatives, further = pairs.negatives(pairs.anchors, small=False), None
    if noised is not None:
        check_range(noised_features=noised)
        direction = Direction(
            pairs.rows(pairs.images, pairs.anchors), (Block(noised, valid=noise_valid, visits=pairs.ring),)
        )
        further = pairs.choose([direction], small=False)
    return infonce(negatives, _scale(temperature, pairs.images), further).sum(0).mean()


def _scale(temperature: float | Tensor, like: Tensor) -> Tensor:
    """1 / temperature, 0-d, in float32 or float64."""
    return 1 / torch.as_tensor(temperature, dtype=upcast(like).dtype, device=like.device).reshape(())


class AsCL(Term):
    """:func:`coder_plugin.functional.ascl` of the pairs of all ranks, ``(L_I + L_II&III) / 2``.

    ``L_I`` compares images and their captions, with noised captions as further negatives of the images. ``L_II&III``
    does the same with generated positive captions, and noised versions of these. Options of the head ``asymmetry``
    say which are generated, and how. Without generated positives ``L_I`` is the whole loss; without noise both are
    InfoNCE. A text that its noise has not changed (one word shuffled) is not a negative.

    Args:
        temperature: > 0, or ``logit_scale``: 1 over the model's own scale, which is then trained.
        similarity: ``cosine`` of the features of both towers, or ``fusion``, the score of the head of that name.
        mask_same_image: pairs of one image are not each other's negatives.

    Example:
        >>> AsCL(temperature=0.5)(torch.eye(2), torch.eye(2))  # no generated texts: InfoNCE, 2 * log(1 + exp(-2))
        tensor(0.2539)
    """

    supports = frozenset({"same_image", "views", "ring"})

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
        # reading any of them builds the head that generates texts; the fusion's rows of them need that head
        self.optional = (
            *(("coder_ids",) if mask_same_image else ()),
            "coder_noised_features",
            "coder_positive_features",
            "coder_noised_positive_features",
            "coder_noise_changed",
        )
        if similarity == "fusion":
            self.optional += ("coder_fusion_noised", "coder_fusion_positive", "coder_fusion_noised_positive")
            self.supports -= {"ring"}
        self.gathers = (*self.requires, *self.optional)
        if isinstance(temperature, str):
            self.requires += ("logit_scale",)
        else:
            check_temperature(temperature)

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        if self.similarity == "cosine" and any(getattr(head, "noise_at", None) == "output" for head in heads.values()):
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
        """Features [N, d] of all ranks, L2-normalised, or scores [N, N], and image ids [N] -> scalar."""
        temperature: Any = self.temperature if logit_scale is None else 1 / logit_scale
        changed = [None, None] if coder_noise_changed is None else [*coder_noise_changed.T, None]
        losses = []
        if self.similarity == "fusion":
            sets = (coder_fusion, coder_fusion_noised), (coder_fusion_positive, coder_fusion_noised_positive)
            for (scores, noised), valid in zip(sets, changed, strict=False):
                if scores is not None:
                    similarity, further = fusion_scores(scores, local_loss=self.local_loss)
                    if noised is not None:
                        noised = noised if further["anchors"] is None else noised[further["anchors"]]
                    further |= {"temperature": temperature, "image_ids": coder_ids, "noise_valid": valid}
                    losses.append(ascl(similarity, noised, **further))
            return sum(losses[1:], losses[0]) / len(losses)
        assert image_features is not None and text_features is not None
        texts = (text_features, coder_noised_features), (coder_positive_features, coder_noised_positive_features)
        for (captions, noised), valid in zip(texts, changed, strict=False):
            if captions is not None:
                pairs = self.pairs(image_features, captions, coder_ids)
                losses.append(ascl_of_pairs(pairs, noised, temperature=temperature, noise_valid=valid))
        return sum(losses[1:], losses[0]) / len(losses)


def fusion_scores(scores: Tensor, *, local_loss: bool) -> tuple[Tensor, dict[str, Any]]:
    """Gathered scores of images with the texts of all ranks [N, N] -> the rows of this rank's anchors, and the arguments
    ``anchors`` and ``text_to_image`` of :func:`ascl` and :func:`triplet`."""
    anchors = anchors_of_rank(len(scores), local_loss=local_loss)
    if anchors is None:
        return scores, {"anchors": None}
    return scores[anchors], {"anchors": anchors, "text_to_image": scores.T[anchors]}
