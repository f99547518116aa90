"""MaxSim, the late interaction of an image's and a text's tokens (ColBERT, FILIP): the score, and re-ranking by it.

Shapes: n images of L tokens, m texts of T words, D channels, V features of one image; B batch. Masks are bool, True
where valid. Equations and choices: docs/equations.md#maxsim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.token_scorer import TokenScorer, default_tile
from coder_plugin.masked import lengths, unit_tokens
from coder_plugin.tensors import upcast

#: Whose tokens look for their best match.
Direction = Literal["text", "image", "both"]
#: How the best matches of one side become one number.
Reduction = Literal["mean", "sum"]


def maxsim(
    image_tokens: Tensor,
    image_mask: Tensor,
    text_tokens: Tensor,
    text_mask: Tensor,
    *,
    direction: Direction = "text",
    reduction: Reduction = "mean",
    tile: int = 1 << 22,
) -> Tensor:
    """Scores of images with texts by the best match of each token: v_i are an image's tokens, w_j a text's.

    ``text``: ``S = mean_j max_i cos(w_j, v_i)``, each word's best token of the image. With ``sum`` in place of the mean
    this is ColBERT's equation 3 with the text as the query (Khattab and Zaharia, SIGIR 2020). ``image``:
    ``S = mean_i max_j cos(v_i, w_j)``, FILIP's image-to-text similarity, whose text-to-image similarity is ``text``
    (Yao et al., ICLR 2022, section 3.1). ``both``: the mean of the two.

    Sums and means are over valid tokens. A token without a valid token on the other side, and a zero vector, has the
    cosine 0; the score of a side without valid tokens is 0. Computed in float32 or float64, also under autocast;
    differentiable.

    Args:
        image_tokens: float [..., n, L, D], of any length: the function normalises them. image_mask: bool [..., n, L].
        text_tokens: float [..., m, T, D], with the same leading dimensions. text_mask: bool [..., m, T].
        direction: ``text``, ``image`` or ``both``.
        reduction: ``mean`` or ``sum``. The sum grows with the number of tokens, so it ranks images for a text as the
            mean does, but not texts for an image.
        tile: similarities of tokens that are computed at once, over n and m, by default 16 MiB in float32; at least
            those of one image with one text. Without a gradient the working memory does not grow with n and m.

    Returns:
        [..., n, m]; with ``mean`` in [-1, 1].

    Raises:
        ValueError: shapes that do not fit, masks that are not bool, an unknown direction or reduction, a tile below 1.

    Example:
        >>> patches, mask = torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool)
        >>> words = torch.tensor([[[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [1.0, 0.0]]])
        >>> maxsim(patches, mask, words, mask.expand(2, -1))
        tensor([[0.9000, 1.0000]])
        >>> maxsim(patches, mask, words, mask.expand(2, -1), direction="both")
        tensor([[0.9000, 0.7500]])
    """
    for name, tokens, mask in (("image", image_tokens, image_mask), ("text", text_tokens, text_mask)):
        if tokens.ndim < 3 or mask.dtype != torch.bool or mask.shape != tokens.shape[:-1] or not mask.shape[-1]:
            raise ValueError(
                f"{name}_tokens must be [..., rows, 1 or more, D] and {name}_mask bool of its shape without D, got "
                f"{tuple(tokens.shape)} and {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
            )
    one, other = tuple(image_tokens.shape), tuple(text_tokens.shape)
    if one[-1] != other[-1] or one[:-3] != other[:-3]:
        raise ValueError(f"images and texts must have the same channels and leading dimensions, got {one} and {other}")
    _check_options(direction, reduction)
    if tile < 1:
        raise ValueError(f"tile must be 1 or more, got {tile}")
    with torch.autocast(image_tokens.device.type, enabled=False):
        images, texts = unit_tokens(image_tokens, image_mask), unit_tokens(text_tokens, text_mask)
        pairs = tile // max(1, math.prod(images.shape[:-3]) * images.shape[-2] * texts.shape[-2])
        rows = min(images.shape[-3], math.isqrt(pairs)) or 1
        columns = pairs // rows or 1
        scores = [
            torch.cat(
                [
                    unit_maxsim(*some, *others, direction=direction, reduction=reduction)
                    for others in zip(texts.split(columns, -3), text_mask.split(columns, -2), strict=True)
                ],
                -1,
            )
            for some in zip(images.split(rows, -3), image_mask.split(rows, -2), strict=True)
        ]
    return torch.cat(scores, -2)


def unit_maxsim(
    images: Tensor, image_mask: Tensor, texts: Tensor, text_mask: Tensor, *, direction: Direction, reduction: Reduction
) -> Tensor:
    """:func:`maxsim` of tokens [..., n, L, D] and [..., m, T, D] that have unit length, in one tile: [..., n, m]."""
    products = images.flatten(-3, -2) @ texts.flatten(-3, -2).mT
    products = products.unflatten(-1, texts.shape[-3:-1]).unflatten(-3, images.shape[-3:-1])  # [..., n, L, m, T]
    images_valid, texts_valid = image_mask[..., None, :], text_mask[..., None, :, :]  # [..., n, 1, L], [..., 1, m, T]
    scores = []
    if direction != "image":
        best = products.masked_fill(~image_mask[..., None, None], -torch.inf).amax(-3)  # [..., n, m, T]
        scores.append(_reduce(best, texts_valid, images_valid, reduction))
    if direction != "text":
        best = products.masked_fill(~text_mask[..., None, None, :, :], -torch.inf).amax(-1).mT  # [..., n, m, L]
        scores.append(_reduce(best, images_valid, texts_valid, reduction))
    return torch.stack(scores).mean(0)


class UnitTokens(NamedTuple):
    """Tokens [..., S, D] of unit length, their mask [..., S], and features of the whole [..., V, D]; of a text V is
    1."""

    tokens: Tensor
    mask: Tensor
    whole: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> UnitTokens:
        return UnitTokens._make(function(field) for field in self)

    def truncate(self, length: int) -> UnitTokens:
        return UnitTokens(self.tokens[..., :length, :], self.mask[..., :length], self.whole)


class MaxSim(Reranks):
    """Re-ranks by :func:`maxsim` of an image's patches or regions with a text's words, without trained parameters.

    Requires ``image_contexts`` [B, L, D] and ``text_contexts`` [B, T, D] with their masks, which leave out padding and,
    under causal attention, the start of a text: for CLIP towers the last block's tokens, each projected into the joint
    space by the tower's own norm and projection (:mod:`coder_plugin.backbones.token_projection`). How well it ranks
    depends on how well the tokens are aligned. ``local_weight`` below 1 adds the cosine of the towers' own features:
    ``S = u S_maxsim + (1 - u) cos``.

    An item is its tokens of unit length and its feature: D numbers each, in half precision 50 KiB for a ViT-B/32's
    image and 197 KiB for a ViT-B/16's.

    Args:
        direction, reduction: as in :func:`maxsim`.
        local_weight: u, in [0, 1].

    Raises:
        ValueError: unknown options, or one out of range; a model whose towers give no tokens, or tokens of different
            numbers of channels.

    Example:
        >>> head = MaxSim(BackboneInfo(embed_dim=2, image_contexts=2, text_contexts=2))
        >>> mask, patches = torch.ones(2, 2, dtype=torch.bool), torch.eye(2).repeat(2, 1, 1)
        >>> words = torch.tensor([[[1.0, 0.0], [3.0, 4.0]], [[1.0, 0.0], [2.0, 0.0]]])
        >>> features = {"image_features": torch.eye(2), "text_features": torch.eye(2)}
        >>> features |= {"image_contexts": patches, "image_context_mask": mask}
        >>> features |= {"text_contexts": words, "text_context_mask": mask}
        >>> head.scorer(head.image_item(features), head.text_item(features)).all_pairs()
        tensor([[0.9000, 1.0000],
                [0.9000, 1.0000]])
    """

    device: Tensor

    requires = ("image_contexts", "image_context_mask", "text_contexts", "text_context_mask")
    optional = ("image_features", "text_features")  # which every model gives

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        direction: Direction = "text",
        reduction: Reduction = "mean",
        local_weight: float = 1.0,
    ) -> None:
        super().__init__()
        _check_options(direction, reduction)
        if not 0 <= local_weight <= 1:
            raise ValueError(f"local_weight must be in [0, 1], got {local_weight}")
        images, texts = backbone.image_contexts, backbone.text_contexts
        if not images or not texts:
            raise ValueError("the model gives no tokens of one of its towers")
        if images != texts:
            raise ValueError(
                f"the tokens of this model's images have {images} channels and those of its texts {texts}: they cannot "
                "be compared"
            )
        self.direction, self.reduction, self.local_weight = direction, reduction, local_weight
        self.register_buffer("device", torch.empty(0), persistent=False)  # where the module was moved

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, L, D] of unit length, ``mask`` [B, L], and the features ``whole`` [B, V, D]."""
        return _item("image", features, features["image_context_mask"].shape[1])

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, T', D] of unit length, ``mask`` [B, T'], T' that of the longest text, and ``whole`` [B, 1, D]
        as for images. Pad tokens and mask with zeros to join several batches."""
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
            pairs_per_tile=default_tile(device),
            memory=memory,
        )

    def _pairs(self, images: UnitTokens, texts: UnitTokens) -> Tensor:
        scores = unit_maxsim(*images[:2], *texts[:2], direction=self.direction, reduction=self.reduction)
        if self.local_weight == 1:
            return scores
        cosines = torch.einsum("gavd,gbwd->gabvw", images.whole, texts.whole).amax((3, 4))
        return self.local_weight * scores + (1 - self.local_weight) * cosines


def _check_options(direction: str, reduction: str) -> None:
    for name, value, choices in (("direction", direction, Direction), ("reduction", reduction, Reduction)):
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _reduce(best: Tensor, valid: Tensor, candidates: Tensor, reduction: Reduction) -> Tensor:
    """Best matches [..., n, m, S] of one side's ``valid`` positions among the other's ``candidates`` -> [..., n, m]."""
    total = torch.where(valid & candidates.any(-1, keepdim=True), best, 0).sum(-1)
    return total if reduction == "sum" else total / valid.sum(-1).clamp(min=1)


def _item(side: str, features: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    mask, whole = features[f"{side}_context_mask"][:, :length], features[f"{side}_features"]
    tokens = unit_tokens(features[f"{side}_contexts"][:, :length], mask)
    return {"tokens": tokens, "mask": mask, "whole": whole if whole.ndim == 3 else whole[:, None]}


def _side(item: Mapping[str, Tensor]) -> UnitTokens:
    tokens = torch.where(item["mask"][..., None], upcast(item["tokens"]), 0)
    return UnitTokens(tokens, item["mask"], upcast(item["whole"]))
