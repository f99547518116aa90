"""Cross-modal fusion: a score of each pair of image and text from their regions and words (AsCL eq. 1-4).

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

#: The sets of texts that images are scored against: key of the output, prefix of the inputs.
_TEXTS = {
    "coder_fusion": "text",
    "coder_fusion_positive": "positive",
    "coder_fusion_noised": "noised",
    "coder_fusion_noised_positive": "noised_positive",
}
#: Images of a tile in training.
_IMAGES = 32


class Direction(nn.Module):
    """The matrices of one direction of the attention: Z^X, Z^Y, Z^O and the map into the common space, [D, D] each."""

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
    """``coder_fusion`` [B, N]: S of this rank's images with the texts of all ranks, in rank order (AsCL eq. 1-4, METHODS 8).

    ``S = u S_local + (1 - u) S_global``, in [-1, 1], float32 or better. Likewise against generated positives
    (``coder_fusion_positive``) and the noised texts of both, where the model has their tokens.

    The two directions of the attention have matrices of their own: the paper prints "two single symmetrical versions" and
    does not say that they share them. Tokens of other channels than D are projected first. With a feature of the whole
    image (``backbone.image_global``), V_g is the sum of both parts.

    Pairs are scored in tiles that the backward pass computes again, so that memory grows with the tokens and not with the
    pairs.

    Args:
        heads: H of the attention; it divides D.
        local_weight: u, of the local score; the paper has 0.6 for Flickr30K and 0.8 for COCO.
        pairs_per_tile: how many pairs are scored at once, by default 256 on a CPU and 4,096 elsewhere. In training a pair of
            36 regions and 32 words takes 0.2 MB while its tile is at work, or 0.3 MB with D 1,024.
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
        known = {"text_tokens": text_tokens, "text_mask": text_mask, **others}
        weights = self._weights()
        images = self._image_side(self.image_item({"image_tokens": image_tokens, "image_mask": image_mask, **others}), weights)
        present = {key: name for key, name in _TEXTS.items() if key in self.requested_keys and f"{name}_tokens" in known}
        widths = [known[f"{name}_mask"].shape[1] for name in present.values()]
        if distributed.world_size() > 1:
            widths = distributed.all_max(torch.tensor(widths, device=image_mask.device)).tolist()
        scores = {}
        for (key, name), length in zip(present.items(), widths, strict=True):
            tokens, mask = self._gathered(known[f"{name}_tokens"], known[f"{name}_mask"], length)
            scores[key] = self._against(images, tokens, mask, weights)
        return scores

    def image_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What scoring images needs: ``tokens`` [B, L, D], ``mask`` [B, L] and, of a whole-image feature, ``whole`` [B, D]."""
        item = {"tokens": self.project_image(features["image_tokens"]), "mask": features["image_mask"]}
        if self.project_whole is not None:
            if "image_global" not in features:
                raise ValueError("fusion was made with a feature of the whole image (image_global), and this batch has none")
            item["whole"] = self.project_whole(features["image_global"])
        return item

    def text_item(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What scoring texts needs: ``tokens`` [B, T, D] and ``mask`` [B, T], as long as the tower gave them. To join the
        items of several batches, pad both with zeros."""
        return {"tokens": self.project_text(features["text_tokens"]), "mask": features["text_mask"]}

    @torch.no_grad()
    def scorer(
        self, images: Mapping[str, Tensor], texts: Mapping[str, Tensor], *, memory: int = 4 << 30
    ) -> FusionScorer:
        """Scores of a data set's pairs from its items, kept anywhere and in any float type: ``scorer(image_index,
        text_index)`` of [G, a] and [G, b] is [G, a, b], ``scorer.all_pairs()`` is [N, M].

        Args:
            memory: bytes on the head's device for what items bring to all their pairs; beyond, re-ranking is slower.
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
        """Projected tokens [N, T, D] and mask [N, T] of all ranks, T the longest of any."""
        more = length - mask.shape[1]
        tokens = distributed.gather(F.pad(raise_precision(self.project_text(tokens)), (0, 0, 0, more)))
        return tokens, distributed.gather(F.pad(mask, (0, more)).to(torch.uint8)).bool()

    def _against(self, images: Side, tokens: Tensor, mask: Tensor, weights: tuple[Attention, Attention]) -> Tensor:
        """Scores of images with texts [B, N], tile after tile. Texts of like length go together, and padding that none of a
        tile needs is cut: with joined captions among them the longest is twice the mean."""

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
