"""Cross-modal fusion: a score of each image-text pair from its regions and words (AsCL eq. 1-4, docs/equations.md#ascl).

Shapes: B batch of this rank, N batch of all ranks, L regions, T words, D joint dimension, G groups of a images x b texts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coder_plugin import distributed
from coder_plugin.functional.fusion import Attention, Side, make_side, pair_scores
from coder_plugin.functional.masked_sets import lengths
from coder_plugin.functional.similarity import raise_precision
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.fusion_scorer import FusionScorer

#: The sets of texts that images are scored with: key of the output -> prefix of the inputs.
_TEXTS = {
    "coder_fusion": "text",
    "coder_fusion_positive": "positive",
    "coder_fusion_noised": "noised",
    "coder_fusion_noised_positive": "noised_positive",
}
#: Images of a tile in training.
_IMAGES = 32


class Direction(nn.Module):
    """The matrices of one direction of the attention, [D, D] each: query Z^X, key and value Z^Y, output Z^O, and the map into
    the common space."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.output, self.common = (nn.Parameter(torch.empty(dim, dim)) for _ in range(4))
        for matrix in self.parameters():
            nn.init.xavier_uniform_(matrix)

    def matrices(self) -> Attention:
        output = raise_precision(self.output)
        with torch.autocast(output.device.type, enabled=False):
            return Attention(self.query, self.key, self.output, output @ raise_precision(self.common))


class Fusion(Reranks):
    """Scores of this rank's images with the texts of all ranks: ``S = u S_local + (1 - u) S_global`` (eq. 1-4).

    Requires ``image_tokens`` [B, L, C] and ``text_tokens`` [B, T, C'] with their bool masks ``image_mask`` [B, L] and
    ``text_mask`` [B, T]. Uses ``image_global`` [B, G], and tokens and masks of generated texts (``positive_tokens`` …).

    Provides ``coder_fusion`` [B, N], in rank order, in [-1, 1], float32 or better; and, if the model has their tokens,
    ``coder_fusion_positive`` with the generated positives, ``coder_fusion_noised`` and ``coder_fusion_noised_positive`` with
    the noised texts of both.

    Each direction of the attention has its own matrices: the paper prints "two single symmetrical versions" and does not
    say that they share them. Tokens with other channels than D are projected first. With a feature of the whole image,
    V_g is the sum of both parts.

    Pairs are scored in tiles that the backward pass recomputes, so memory grows with the tokens and not with the pairs.

    Args:
        heads: number of attention heads, a divisor of D.
        local_weight: u, in [0, 1]; the paper has 0.6 for Flickr30K and 0.8 for COCO.
        pairs_per_tile: number of pairs that are scored at once, by default 256 on a CPU and 4,096 elsewhere. In training a
            pair of 36 regions and 32 words takes 0.2 MB while its tile is computed, or 0.3 MB with D 1,024.

    Raises:
        ValueError: options out of range, or a backbone without tokens.

    Example:
        >>> head = Fusion(BackboneInfo(embed_dim=8, image_tokens=8, text_tokens=8))
        >>> tokens, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
        >>> head(tokens, mask, tokens, mask)["coder_fusion"].shape
        torch.Size([3, 3])
    """

    requires = ("image_tokens", "image_mask", "text_tokens", "text_mask")
    uses = (
        "image_global",
        "positive_tokens",
        "positive_mask",
        "noised_tokens",
        "noised_mask",
        "noised_positive_tokens",
        "noised_positive_mask",
    )
    provides = tuple(_TEXTS)
    whole_batch = True

    def __init__(
        self, backbone: BackboneInfo, *, heads: int = 4, local_weight: float = 0.6, pairs_per_tile: int | None = None
    ) -> None:
        super().__init__()
        dim = backbone.embed_dim
        if not backbone.image_tokens or not backbone.text_tokens:
            raise ValueError("fusion needs the tokens of both towers, and this model gives none of one: take similarity=cosine")
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide the joint dimension {dim}, got {heads}")
        if not 0 <= local_weight <= 1:
            raise ValueError(f"local_weight must be in [0, 1], got {local_weight}")
        if pairs_per_tile is not None and pairs_per_tile < 1:
            raise ValueError(f"pairs_per_tile must be >= 1, got {pairs_per_tile}")
        self.heads, self.local_weight, self.pairs_per_tile = heads, local_weight, pairs_per_tile
        self.project_image = _projection(backbone.image_tokens, dim)
        self.project_text = _projection(backbone.text_tokens, dim)
        self.image_to_text = Direction(dim)
        self.text_to_image = Direction(dim)
        self.project_whole = _matrix(backbone.image_global, dim) if backbone.image_global else None  # X_g

    def forward(
        self, image_tokens: Tensor, image_mask: Tensor, text_tokens: Tensor, text_mask: Tensor, **others: Tensor
    ) -> dict[str, Tensor]:
        texts = {"text_tokens": text_tokens, "text_mask": text_mask, **others}
        weights = self._weights()
        images = self._image_side(self.image_item({"image_tokens": image_tokens, "image_mask": image_mask, **others}), weights)
        present = {key: name for key, name in _TEXTS.items() if key in self.requested_keys and f"{name}_tokens" in texts}
        longest = [texts[f"{name}_mask"].shape[1] for name in present.values()]
        if distributed.world_size() > 1:
            longest = distributed.all_max(torch.tensor(longest, device=image_mask.device)).tolist()
        scores = {}
        for (key, name), length in zip(present.items(), longest, strict=True):
            tokens, mask = self._gathered(texts[f"{name}_tokens"], texts[f"{name}_mask"], length)
            scores[key] = self._against(images, tokens, mask, weights)
        return scores

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, L, D], ``mask`` [B, L] and, with a whole-image feature, ``whole`` [B, D].

        Raises:
            ValueError: the head reads a whole-image feature, and ``features`` have none.
        """
        item = {"tokens": self.project_image(features["image_tokens"]), "mask": features["image_mask"]}
        if self.project_whole is not None:
            if "image_global" not in features:
                raise ValueError("fusion reads a feature of the whole image (image_global), and this batch has none")
            item["whole"] = self.project_whole(features["image_global"])
        return item

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tokens`` [B, T, D] and ``mask`` [B, T], with the tower's own T. Pad both with zeros to join several batches."""
        return {"tokens": self.project_text(features["text_tokens"]), "mask": features["text_mask"]}

    @torch.no_grad()
    def scorer(
        self, images: Mapping[str, Tensor], texts: Mapping[str, Tensor], *, memory: int = 4 << 30
    ) -> FusionScorer:
        """Items of a data set's images and texts, on any device and in any float type -> what scores their pairs.

        Args:
            memory: bytes on the head's device for what is computed once per item; with less, re-ranking is slower.
        """
        weights = self._weights()
        return FusionScorer(
            images,
            texts,
            image_side=lambda item: self._image_side(item, weights),
            text_side=lambda item: self._text_side(item, weights),
            pairs=lambda images, texts: self._pairs(images, texts, weights),
            device=self.image_to_text.query.device,
            pairs_per_tile=self._tile_size(),
            memory=memory,
        )

    def _weights(self) -> tuple[Attention, Attention]:
        return self.image_to_text.matrices(), self.text_to_image.matrices()

    def _image_side(self, item: Mapping[str, Tensor], weights: tuple[Attention, Attention]) -> Side:
        as_query, as_key = weights
        return make_side(
            item["tokens"],
            item["mask"],
            as_query=as_query,
            as_key=as_key,
            heads=self.heads,
            global_feature=item.get("whole"),
        )

    def _text_side(self, item: Mapping[str, Tensor], weights: tuple[Attention, Attention]) -> Side:
        as_key, as_query = weights
        return make_side(item["tokens"], item["mask"], as_query=as_query, as_key=as_key, heads=self.heads)

    def _pairs(self, images: Side, texts: Side, weights: tuple[Attention, Attention]) -> Tensor:
        image_to_text, text_to_image = weights
        return pair_scores(
            images,
            texts,
            image_to_text=image_to_text,
            text_to_image=text_to_image,
            heads=self.heads,
            local_weight=self.local_weight,
        )

    def _tile_size(self) -> int:
        if self.pairs_per_tile is not None:
            return self.pairs_per_tile
        return 256 if self.image_to_text.query.device.type == "cpu" else 4096

    def _gathered(self, tokens: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Projected tokens [N, T, D] and mask [N, T] of all ranks; T is the longest of any rank."""
        more = length - mask.shape[1]
        tokens = distributed.gather(F.pad(raise_precision(self.project_text(tokens)), (0, 0, 0, more)))
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
            texts = self._text_side(item, weights).map(lambda field: field[None])
            scores = [
                checkpoint(tile, each, texts, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else tile(each, texts)
                for each in tiles
            ]
            columns.append(torch.cat(scores))
        return torch.cat(columns, 1)[:, by_length.argsort()]


def _projection(channels: int, dim: int) -> nn.Module:
    return nn.Identity() if channels == dim else _matrix(channels, dim)


def _matrix(channels: int, dim: int) -> nn.Linear:
    layer = nn.Linear(channels, dim, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer
