"""Re-ranking by MaxSim: each word's best patch or region, without trained parameters (docs/equations.md#maxsim).

Shapes: B batch, L image tokens, T text positions, D joint dimension.
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
    """Tokens [..., S, D] of unit length, and their mask [..., S]."""

    tokens: Tensor
    mask: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> UnitTokens:
        return UnitTokens(function(self.tokens), function(self.mask))

    def truncate(self, length: int) -> UnitTokens:
        return UnitTokens(self.tokens[..., :length, :], self.mask[..., :length])


class MaxSim(Reranks):
    """Re-ranks by :func:`~coder_plugin.functional.maxsim` of an image's patches or regions with a text's words.

    Requires ``image_contexts`` [B, L, D] and ``text_contexts`` [B, T, D] with their masks, which leave out padding and, under
    causal attention, the start of a text: for CLIP towers the last block's tokens, each projected into the joint space by the
    tower's own norm and projection (:mod:`coder_plugin.backbones.token_projection`). It has no parameters, so it needs no
    training; how well it ranks depends on how well the tokens are aligned.

    An item is its tokens of unit length: D numbers a token, in half precision 49 KiB for a ViT-B/32's image and 196 KiB for a
    ViT-B/16's.

    Args:
        direction, reduction: as in :func:`~coder_plugin.functional.maxsim`.

    Raises:
        ValueError: unknown options; a model whose towers give no tokens, or tokens of different numbers of channels.

    Example:
        >>> head = MaxSim(BackboneInfo(embed_dim=2, image_contexts=2, text_contexts=2))
        >>> mask = torch.ones(2, 2, dtype=torch.bool)
        >>> images = head.image_item({"image_contexts": torch.eye(2).repeat(2, 1, 1), "image_context_mask": mask})
        >>> words = torch.tensor([[[1.0, 0.0], [3.0, 4.0]], [[1.0, 0.0], [2.0, 0.0]]])
        >>> texts = head.text_item({"text_contexts": words, "text_context_mask": mask})
        >>> head.scorer(images, texts).all_pairs()
        tensor([[0.9000, 1.0000],
                [0.9000, 1.0000]])
    """

    requires = ("image_contexts", "image_context_mask", "text_contexts", "text_context_mask")

    def __init__(self, backbone: BackboneInfo, *, direction: Direction = "text", reduction: Reduction = "mean") -> None:
        super().__init__()
        check_options(direction, reduction)
        channels = backbone.image_contexts, backbone.text_contexts
        if not all(channels):
            raise ValueError("the model gives no tokens of one of its towers")
        if channels[0] != channels[1]:
            raise ValueError(
                f"the tokens of this model's images have {channels[0]} channels and those of its texts {channels[1]}: they "
                "cannot be compared"
            )
        self.direction, self.reduction = direction, reduction
        self.register_buffer("device", torch.empty(0), persistent=False)  # where the module was moved

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, L, D] of unit length and ``mask`` [B, L]."""
        return _item(features["image_contexts"], features["image_context_mask"])

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, T', D] of unit length and ``mask`` [B, T'], T' that of the longest text. Pad both with zeros to join
        several batches."""
        longest = int(lengths(features["text_context_mask"]).max())
        return _item(features["text_contexts"][:, :longest], features["text_context_mask"][:, :longest])

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
        return unit_maxsim(*images, *texts, direction=self.direction, reduction=self.reduction)


def _item(tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"tokens": unit_tokens(tokens, mask), "mask": mask}


def _side(item: Mapping[str, Tensor]) -> UnitTokens:
    return UnitTokens(torch.where(item["mask"][..., None], raise_precision(item["tokens"]), 0), item["mask"])
