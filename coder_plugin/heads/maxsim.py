"""Re-ranking by MaxSim: each word's best patch or region, without trained parameters (docs/equations.md#maxsim).

Shapes: B batch, L image tokens, T text positions, D joint dimension, V features of one image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin.functional.late_interaction import Direction, Reduction, check_options, unit_maxsim
from coder_plugin.functional.masked_sets import lengths, unit_tokens
from coder_plugin.functional.similarity import raise_precision
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.token_scorer import TokenScorer


class UnitTokens(NamedTuple):
    """Tokens [..., S, D] of unit length, their mask [..., S], and features of the whole [..., V, D]; of a text V is 1."""

    tokens: Tensor
    mask: Tensor
    whole: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> UnitTokens:
        return UnitTokens._make(function(field) for field in self)

    def truncate(self, length: int) -> UnitTokens:
        return UnitTokens(self.tokens[..., :length, :], self.mask[..., :length], self.whole)


class MaxSim(Reranks):
    """Re-ranks by :func:`~coder_plugin.functional.maxsim` of an image's patches or regions with a text's words.

    Requires ``image_contexts`` [B, L, D] and ``text_contexts`` [B, T, D] with their masks, which leave out padding and, under
    causal attention, the start of a text: for CLIP towers the last block's tokens, each projected into the joint space by the
    tower's own norm and projection (:mod:`coder_plugin.backbones.token_projection`). It has no parameters, so it needs no
    training; how well it ranks depends on how well the tokens are aligned. ``local_weight`` below 1 adds the cosine of the
    towers' own features: ``S = u S_maxsim + (1 - u) cos``.

    An item is its tokens of unit length and its feature: D numbers each, in half precision 50 KiB for a ViT-B/32's image and
    197 KiB for a ViT-B/16's.

    Args:
        direction, reduction: as in :func:`~coder_plugin.functional.maxsim`.
        local_weight: u, in [0, 1].

    Raises:
        ValueError: unknown options, or one out of range; a model whose towers give no tokens, or tokens of different numbers of
            channels.

    Example:
        >>> head = MaxSim(BackboneInfo(embed_dim=2, image_contexts=2, text_contexts=2))
        >>> mask = torch.ones(2, 2, dtype=torch.bool)
        >>> patches, words = torch.eye(2).repeat(2, 1, 1), torch.tensor([[[1.0, 0.0], [3.0, 4.0]], [[1.0, 0.0], [2.0, 0.0]]])
        >>> features = {"image_features": torch.eye(2), "text_features": torch.eye(2)}
        >>> features |= {"image_contexts": patches, "image_context_mask": mask}
        >>> features |= {"text_contexts": words, "text_context_mask": mask}
        >>> head.scorer(head.image_item(features), head.text_item(features)).all_pairs()
        tensor([[0.9000, 1.0000],
                [0.9000, 1.0000]])
    """

    device: Tensor

    requires = ("image_contexts", "image_context_mask", "text_contexts", "text_context_mask")
    uses = ("image_features", "text_features")  # which every model gives

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        direction: Direction = "text",
        reduction: Reduction = "mean",
        local_weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_options(direction, reduction)
        if not 0 <= local_weight <= 1:
            raise ValueError(f"local_weight must be in [0, 1], got {local_weight}")
        channels = backbone.image_contexts, backbone.text_contexts
        if not all(channels):
            raise ValueError("the model gives no tokens of one of its towers")
        if channels[0] != channels[1]:
            raise ValueError(
                f"the tokens of this model's images have {channels[0]} channels and those of its texts {channels[1]}: they "
                "cannot be compared"
            )
        self.direction, self.reduction, self.local_weight = direction, reduction, local_weight
        self.register_buffer("device", torch.empty(0), persistent=False)  # where the module was moved

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, L, D] of unit length, ``mask`` [B, L], and the features ``whole`` [B, V, D]."""
        return _item("image", features, features["image_context_mask"].shape[1])

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, T', D] of unit length, ``mask`` [B, T'], T' that of the longest text, and ``whole`` [B, 1, D] as for
        images. Pad tokens and mask with zeros to join several batches."""
        return _item("text", features, int(lengths(features["text_context_mask"]).max()))

    def scorer(
        self, images: Mapping[str, Tensor], texts: Mapping[str, Tensor], *, memory: int = 4 << 30
    ) -> TokenScorer[UnitTokens]:
        """Items of a data set's images and texts, on any device and in any float type -> what scores their pairs.

        Args:
            memory: bytes on the module's device for items in float32; with less, re-ranking is slower.
        """
        device = self.device.device
        return TokenScorer(
            images,
            texts,
            image_side=_side,
            text_side=_side,
            pairs=self._pairs,
            device=device,
            pairs_per_tile=256 if device.type == "cpu" else 4096,
            memory=memory,
        )

    def _pairs(self, images: UnitTokens, texts: UnitTokens) -> Tensor:
        scores = unit_maxsim(*images[:2], *texts[:2], direction=self.direction, reduction=self.reduction)
        if self.local_weight == 1:
            return scores
        cosines = torch.einsum("gavd,gbwd->gabvw", images.whole, texts.whole).amax((3, 4))
        return self.local_weight * scores + (1 - self.local_weight) * cosines


def _item(side: str, features: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    mask, whole = features[f"{side}_context_mask"][:, :length], features[f"{side}_features"]
    tokens = unit_tokens(features[f"{side}_contexts"][:, :length], mask)
    return {"tokens": tokens, "mask": mask, "whole": whole if whole.ndim == 3 else whole[:, None]}


def _side(item: Mapping[str, Tensor]) -> UnitTokens:
    tokens = torch.where(item["mask"][..., None], raise_precision(item["tokens"]), 0)
    return UnitTokens(tokens, item["mask"], raise_precision(item["whole"]))
