"""The global batch as anchors and candidates: what every term that compares pairs starts from.

B pairs of this rank, N = world size * B pairs of all ranks, n anchors (N, or B with a local loss), D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import cosine


class Batch(NamedTuple):
    """The pairs of all ranks, and which of them are this rank's anchors."""

    images: Tensor  # [N, D]
    texts: Tensor  # [N, D]
    ids: Tensor  # [N]
    own: slice  # of length n

    @property
    def negatives(self) -> Tensor:
        """Bool [n, N], True where a pair is a negative of an anchor: for live features and keys alike."""
        return self.ids[self.own, None] != self.ids[None, :]

    def positive(self, similarity: Tensor) -> Tensor:
        """Each anchor's own entry [n] of its row [n, N or more]."""
        return similarity.diagonal(self.own.start or 0)


class Pairs(NamedTuple):
    """Similarities of both directions with their positives and negatives."""

    image_to_text: Tensor  # [n, N]
    text_to_image: Tensor  # [n, N]
    positive: Tensor  # [n]
    negatives: Tensor  # bool [n, N]

    def plus(self, other: Pairs, weight: float) -> Pairs:
        """This similarity plus another one of the same pairs, weighed."""
        return Pairs(
            self.image_to_text + weight * other.image_to_text,
            self.text_to_image + weight * other.text_to_image,
            self.positive + weight * other.positive,
            self.negatives,
        )


def global_batch(
    image_features: Tensor, text_features: Tensor, image_ids: Tensor | None, *, local_loss: bool = False
) -> Batch:
    """Gather the pairs of all ranks, with gradient.

    Args:
        image_features: this rank's [B, D], L2-normalised. text_features: [B, D].
        image_ids: [B]; pairs of one image are not each other's negatives. None: all distinct.
        local_loss: only this rank's pairs are anchors. Every rank then holds B x N instead of N x N numbers.
    """
    images, texts = distributed.gather(image_features), distributed.gather(text_features)
    ids = all_ids(image_ids, images)
    return Batch(images, texts, ids, own_rows(len(image_features), local_loss=local_loss))


def compare(batch: Batch) -> Pairs:
    """The similarities of a batch's anchors and all its pairs."""
    image_to_text = cosine(batch.images[batch.own], batch.texts)
    whole = batch.own == slice(None)
    text_to_image = image_to_text.T if whole else cosine(batch.texts[batch.own], batch.images)
    return Pairs(image_to_text, text_to_image, batch.positive(image_to_text), batch.negatives)


def compare_rows(rows: Tensor, image_ids: Tensor | None, *, local_loss: bool = False) -> Pairs:
    """The similarities that a head has computed inside forward, this rank's images against the texts of all ranks.

    Args:
        rows: [B, N]. image_ids, local_loss: as in :func:`global_batch`.
    """
    whole, own = distributed.gather(rows), own_rows(len(rows), local_loss=local_loss)
    ids = all_ids(image_ids, whole)
    negatives = ids[own, None] != ids[None, :]
    return Pairs(whole[own], whole.T[own], whole.diagonal()[own], negatives)


def all_ids(image_ids: Tensor | None, rows: Tensor) -> Tensor:
    """The image ids [N] of all ranks' rows; all distinct where none are given."""
    return torch.arange(len(rows), device=rows.device) if image_ids is None else distributed.gather(image_ids)


def own_rows(count: int, *, local_loss: bool) -> slice:
    """Which of all ranks' pairs are anchors: with a local loss this rank's, so many on each."""
    if not local_loss or distributed.world_size() == 1:
        return slice(None)
    return slice(distributed.rank() * count, (distributed.rank() + 1) * count)


def normalised(spreads: Sequence[Tensor], *, local_loss: bool) -> Tensor:
    """Diversity weights [n]: each kind of spread over the largest of the anchors of all ranks, then their mean."""
    weights = []
    for spread in spreads:
        of_all = distributed.gather(spread) if local_loss else spread
        weights.append(spread / of_all.amax())
    return torch.stack(weights).mean(0)
