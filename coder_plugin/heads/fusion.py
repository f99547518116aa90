"""Cross-modal fusion: a score of each image-text pair from its regions and words (AsCL eq. 1-4,
docs/equations.md#ascl).

Shapes: B batch of this rank, N batch of all ranks, L regions, T words, D joint dimension, G groups of a images x b
texts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coder_plugin import distributed
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.fusion_scores import Attention, Side, make_side, pair_scores
from coder_plugin.heads.token_scorer import TokenScorer, default_tile
from coder_plugin.masked import lengths
from coder_plugin.tensors import upcast

#: The sets of texts that images are scored with: key of the output -> prefix of the inputs.
_TEXTS = {
    "coder_fusion": "text",
    "coder_fusion_positive": "positive",
    "coder_fusion_noised": "noised",
    "coder_fusion_noised_positive": "noised_positive",
}
#: Images of a tile in training.
_IMAGES = 32

#: How the matrices start.
Initial = Literal["identity", "xavier"]


class Direction(nn.Module):
    """The matrices of one direction of the attention, [D, D] each: query Z^X, key and value Z^Y, output Z^O, and the
    map into the common space."""

    def __init__(self, dim: int, init: Initial = "identity") -> None:
        super().__init__()
        self.query, self.key, self.output, self.common = (nn.Parameter(torch.empty(dim, dim)) for _ in range(4))
        for matrix in self.parameters():
            nn.init.eye_(matrix) if init == "identity" else nn.init.xavier_uniform_(matrix)

    def matrices(self) -> Attention:
        output = upcast(self.output)
        with torch.autocast(output.device.type, enabled=False):
            return Attention(self.query, self.key, self.output, output @ upcast(self.common))


class Fusion(Reranks):
    """Scores of this rank's images with the texts of all ranks: ``S = u S_local + (1 - u) S_global`` (eq. 1-4).

    Requires the tokens ``image_contexts`` [B, L, C] and ``text_contexts`` [B, T, C'] with their bool masks
    ``image_context_mask`` [B, L] and ``text_context_mask`` [B, T]: those of CLIP towers are in the joint space, and the
    mask leaves out a causal text tower's start, which is the same in every text. Optional: ``image_global`` [B, G], and
    tokens and masks of generated texts (``positive_contexts`` …).

    Provides ``coder_fusion`` [B, N], in rank order, in [-1, 1], float32 or float64; and, if the model has their tokens,
    ``coder_fusion_positive`` with the generated positives, ``coder_fusion_noised`` and ``coder_fusion_noised_positive``
    with the noised texts of both.

    Each direction of the attention has its own matrices: the paper prints "two single symmetrical versions" and does
    not say that they share them. With a feature of the whole image, V_g is the sum of both parts (our choice: the paper
    does not print how it fuses them); without one it is V_g1, see :meth:`notes`. Tokens with other channels than D are
    projected first. Pairs are scored in tiles that the backward pass recomputes, so memory grows with the tokens and
    not with the pairs.

    Args:
        heads: number of attention heads, a divisor of D.
        local_weight: u, in [0, 1]; the paper has 0.6 for Flickr30K and 0.8 for COCO.
        pairs_per_tile: number of pairs that are scored at once, by default 256 on a CPU and 4,096 elsewhere. In
            training a pair of 36 regions and 32 words takes 0.2 MB while its tile is computed, or 0.3 MB with D 1,024.
        init: ``identity`` (our choice: the paper prints none): Z^X, Z^Y, Z^O and the maps X_v, X_w, all [D, D], are the
            identity, so the first score is attention and cosines in the tokens' own space; projections of tokens with
            other channels are semi-orthogonal, and X_g [G, D], which reads another network's feature, is zero, so V_g
            starts as V_g1. ``xavier``: every matrix is random, which compares rows of randomly rotated spaces.
        recompute: False keeps what the backward pass needs instead of computing it again: about a third less time, and
            memory that grows with the pairs, 0.1 to 0.3 MB each.

    Raises:
        ValueError: options out of range, or a backbone without tokens.

    Example:
        >>> head = Fusion(BackboneInfo(embed_dim=8, image_contexts=8, text_contexts=8))
        >>> tokens, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
        >>> head(tokens, mask, tokens, mask)["coder_fusion"].shape
        torch.Size([3, 3])
    """

    requires = ("image_contexts", "image_context_mask", "text_contexts", "text_context_mask")
    optional = (
        "image_global",
        *(f"{name}_{of}" for name in [*_TEXTS.values()][1:] for of in ("contexts", "context_mask")),
    )
    provides = tuple(_TEXTS)
    whole_batch = True

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        heads: int = 4,
        local_weight: float = 0.6,
        pairs_per_tile: int | None = None,
        init: Initial = "identity",
        recompute: bool = True,
    ) -> None:
        super().__init__()
        dim = backbone.embed_dim
        if not backbone.image_contexts or not backbone.text_contexts:
            raise ValueError("fusion needs the tokens of both towers, and one tower gives none: use similarity=cosine")
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide the joint dimension {dim}, got {heads}")
        if not 0 <= local_weight <= 1:
            raise ValueError(f"local_weight must be in [0, 1], got {local_weight}")
        if pairs_per_tile is not None and pairs_per_tile < 1:
            raise ValueError(f"pairs_per_tile must be >= 1, got {pairs_per_tile}")
        if init not in get_args(Initial):
            raise ValueError(f"init must be one of {', '.join(get_args(Initial))}, got {init!r}")
        self.heads, self.local_weight, self.pairs_per_tile = heads, local_weight, pairs_per_tile
        self.recompute = recompute
        self.project_image = _projection(backbone.image_contexts, dim, init)
        self.project_text = _projection(backbone.text_contexts, dim, init)
        self.image_to_text = Direction(dim, init)
        self.text_to_image = Direction(dim, init)
        self.project_whole = None
        if backbone.image_global:  # X_g
            self.project_whole = nn.Linear(backbone.image_global, dim, bias=False)
            weight = self.project_whole.weight
            nn.init.zeros_(weight) if init == "identity" else nn.init.xavier_uniform_(weight)

    def notes(self) -> list[str]:
        whole = self.project_whole is not None
        return [] if whole else ["no feature of the whole image: V_g = V_g1 alone (AsCL eq. 3)"]

    def forward(
        self,
        image_contexts: Tensor,
        image_context_mask: Tensor,
        text_contexts: Tensor,
        text_context_mask: Tensor,
        **others: Tensor,
    ) -> dict[str, Tensor]:
        inputs = {"image_contexts": image_contexts, "image_context_mask": image_context_mask, **others}
        inputs |= {"text_contexts": text_contexts, "text_context_mask": text_context_mask}
        weights = self._weights()
        images = self._side(self.image_item(inputs), *weights)
        present = {key: name for key, name in _TEXTS.items() if key in self.requested_keys}
        present = {key: name for key, name in present.items() if f"{name}_contexts" in inputs}
        longest = [inputs[f"{name}_context_mask"].shape[1] for name in present.values()]
        if distributed.world_size() > 1:
            longest = distributed.all_max(torch.tensor(longest, device=images.mask.device)).tolist()
        scores = {}
        for (key, name), length in zip(present.items(), longest, strict=True):
            tokens, mask = self._gathered(inputs[f"{name}_contexts"], inputs[f"{name}_context_mask"], length)
            scores[key] = self._against(images, tokens, mask, weights)
        return scores

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, L, D], ``mask`` [B, L] and, with a whole-image feature, ``whole`` [B, D].

        Raises:
            ValueError: the head reads a whole-image feature, and ``features`` have none.
        """
        item = {"tokens": self.project_image(features["image_contexts"]), "mask": features["image_context_mask"]}
        if self.project_whole is not None:
            if "image_global" not in features:
                raise ValueError("fusion reads a feature of the whole image (image_global), and this batch has none")
            item["whole"] = self.project_whole(features["image_global"])
        return item

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, T, D] and ``mask`` [B, T], with the tower's own T; pad both with zeros to join batches."""
        return {"tokens": self.project_text(features["text_contexts"]), "mask": features["text_context_mask"]}

    @torch.no_grad()
    def scorer(
        self, images: Mapping[str, Tensor], texts: Mapping[str, Tensor], *, memory: int = 4 << 30
    ) -> TokenScorer[Side]:
        """Items of a data set's images and texts, on any device and in any float type -> what scores their pairs.

        Args:
            memory: bytes on the head's device for what is computed once per item; with less, re-ranking is slower.
        """
        weights = self._weights()
        return TokenScorer(
            images,
            texts,
            image_side=lambda item: self._side(item, *weights),
            text_side=lambda item: self._side(item, *weights[::-1]),
            pairs=lambda images, texts: self._pairs(images, texts, weights),
            device=self.image_to_text.query.device,
            pairs_per_tile=self._tile_size(),
            memory=memory,
        )

    def _weights(self) -> tuple[Attention, Attention]:
        return self.image_to_text.matrices(), self.text_to_image.matrices()

    def _side(self, item: Mapping[str, Tensor], as_query: Attention, as_key: Attention) -> Side:
        tokens, mask, whole = item["tokens"], item["mask"], item.get("whole")  # a text has no ``whole``
        return make_side(tokens, mask, as_query=as_query, as_key=as_key, heads=self.heads, global_feature=whole)

    def _pairs(self, images: Side, texts: Side, weights: tuple[Attention, Attention]) -> Tensor:
        return pair_scores(
            images,
            texts,
            image_to_text=weights[0],
            text_to_image=weights[1],
            heads=self.heads,
            local_weight=self.local_weight,
        )

    def _tile_size(self) -> int:
        return self.pairs_per_tile or default_tile(self.image_to_text.query.device)

    def _gathered(self, tokens: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Projected tokens [N, T, D] and mask [N, T] of all ranks; T is the longest of any rank."""
        more = length - mask.shape[1]
        tokens = distributed.gather(F.pad(upcast(self.project_text(tokens)), (0, 0, 0, more)))
        return tokens, distributed.gather(F.pad(mask, (0, more)).to(torch.uint8)).bool()

    def _against(self, images: Side, tokens: Tensor, mask: Tensor, weights: tuple[Attention, Attention]) -> Tensor:
        """Scores of images with texts [B, N], tile by tile.

        Texts of similar length share a tile, and common padding is cut: with joined captions the longest text is
        twice as long as the mean.
        """

        def tile(images: Side, texts: Side) -> Tensor:
            return self._pairs(images, texts, weights)[0]

        length = lengths(mask).cpu()
        by_length = length.argsort(descending=True)
        size = self._tile_size()
        images_at_once = min(len(images.mask), size, _IMAGES)
        tiles = [
            images.map(operator.itemgetter((None, slice(start, start + images_at_once))))
            for start in range(0, len(images.mask), images_at_once)
        ]
        columns = []
        for some in by_length.split(max(1, size // images_at_once)):
            longest = int(length[some].max())
            item = {"tokens": tokens[some, :longest], "mask": mask[some, :longest]}
            texts = self._side(item, *weights[::-1]).map(lambda field: field[None])
            scores = [
                checkpoint(tile, each, texts, use_reentrant=False, preserve_rng_state=False)
                if self.recompute and torch.is_grad_enabled()
                else tile(each, texts)
                for each in tiles
            ]
            columns.append(torch.cat(scores))
        return torch.cat(columns, 1)[:, by_length.argsort()]


def _projection(channels: int, dim: int, init: Initial) -> nn.Module:
    if channels == dim:
        return nn.Identity()
    layer = nn.Linear(channels, dim, bias=False)
    nn.init.orthogonal_(layer.weight) if init == "identity" else nn.init.xavier_uniform_(layer.weight)
    return layer
