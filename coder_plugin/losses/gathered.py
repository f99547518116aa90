"""The global batch: the pairs of all ranks, and the momentum banks, as the loss functions take them.

Shapes: B pairs of this rank, N pairs of all ranks, n anchors (N, or B with a local loss), Q bank entries, D dimensions.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.data.item import NO_TEXT
from coder_plugin.functional.diversity_weights import (
    Diversity,
    normalize_diversity,
    raw_diversity,
    raw_diversity_from_variance,
    weighs_all_anchors,
)
from coder_plugin.functional.m_dcl_loss import compare_with_bank
from coder_plugin.functional.similarity import Gather, anchor_rows, batch_cosines, candidate_negatives, different_images
from coder_plugin.losses.base import Term


class Batch(NamedTuple):
    """The features of all ranks. ``anchors`` are this rank's rows with a local loss; None: all rows are anchors."""

    images: Tensor  # [N, D]
    texts: Tensor  # [N, D]
    ids: Tensor | None  # [N]
    anchors: slice | None

    def anchor_gather(self) -> Gather | None:
        """Collects a value of each anchor over all ranks; None if every rank has all anchors."""
        return None if self.anchors is None else distributed.gather

    def scores(self) -> BatchScores:
        """The cosines of the batch."""
        return BatchScores(*batch_cosines(self.images, self.texts, self.anchors), self.ids, self.anchors)


class BatchScores(NamedTuple):
    """The scores of a global batch, in the form that ``triplet`` and ``ascl`` take."""

    similarity: Tensor  # images x texts [n, N]
    text_to_image: Tensor | None  # texts x images [n, N] with a local loss
    ids: Tensor | None  # [N]
    anchors: slice | None

    def plus(self, other: BatchScores, weight: float) -> BatchScores:
        """``self + weight * other``, scores of the same pairs."""
        transposed = None
        if self.text_to_image is not None and other.text_to_image is not None:
            transposed = self.text_to_image + weight * other.text_to_image
        return self._replace(similarity=self.similarity + weight * other.similarity, text_to_image=transposed)


def global_batch(
    image_features: Tensor, text_features: Tensor, image_ids: Tensor | None, *, local_loss: bool = False
) -> Batch:
    """The gathered pairs of all ranks.

    Args:
        image_features: [N, D], L2-normalised. text_features: [N, D].
        image_ids: [N]; pairs of one image are not each other's negatives. None: all distinct.
        local_loss: only this rank's pairs are anchors. Every rank then computes B x N instead of N x N similarities.
    """
    return Batch(image_features, text_features, image_ids, anchors_of_rank(len(image_features), local_loss=local_loss))


def global_scores(scores: Tensor, image_ids: Tensor | None, *, local_loss: bool = False) -> BatchScores:
    """BatchScores that a head computed inside forward: gathered rows of images with the texts of all ranks, [N, N]."""
    anchors = anchors_of_rank(len(scores), local_loss=local_loss)
    transposed = None if anchors is None else scores.T[anchors]
    return BatchScores(anchor_rows(scores, anchors), transposed, image_ids, anchors)


#: The keys of hard negatives that ``hard_negatives=true`` requires.
NEGATIVES = ("coder_negative_features", "coder_negative_ids")


def hard_negatives(features: Tensor | None, ids: Tensor | None) -> dict[str, Any]:
    """The hard negatives of all ranks, as loss functions take them; nothing without them.

    Args:
        features: [N, n, D], L2-normalised, or keys.
        ids: of the images that they are captions of [N, n]; -2 where there is no text.
    """
    if features is None or ids is None:
        return {}
    ids = ids.flatten()
    return {"negatives": features.flatten(0, 1), "negative_ids": ids, "negative_valid": ids != NO_TEXT}


def anchors_of_rank(count: int, *, local_loss: bool) -> slice | None:
    """The anchors among the ``count`` rows of the global batch: with a local loss those of this rank; None: all."""
    return rows_of_rank(count) if local_loss and distributed.world_size() > 1 else None


def rows_of_rank(count: int) -> slice:
    """The rows of this rank among the ``count`` rows of all ranks."""
    own = count // distributed.world_size()
    return slice(distributed.rank() * own, (distributed.rank() + 1) * own)


class Banks:
    """The current keys of all ranks and the momentum banks. Creating it stashes the keys for the write after the step.

    Args:
        term: the term that reads them; the head that provides the keys holds the ``bank``.
        batch: the live pairs.
        image_keys: those of all ranks, [N, D]. text_keys: [N, D]. ids: image ids [N], which the bank stores.
        mask_same_image: whether keys and entries of an anchor's own image are excluded from its negatives.
    """

    requires: ClassVar[tuple[str, ...]] = ("coder_ids", "coder_image_keys", "coder_text_keys")

    def __init__(
        self, term: Term, batch: Batch, image_keys: Tensor, text_keys: Tensor, ids: Tensor, *, mask_same_image: bool
    ) -> None:
        head = term.provider("coder_image_keys", "bank")
        stashed = {"image_keys": image_keys.detach(), "text_keys": text_keys.detach(), "ids": ids}
        head.stash(**stashed)
        dtype = batch.images.dtype
        self.bank = head.bank
        self.batch = batch
        self.image_keys, self.text_keys = stashed["image_keys"].to(dtype), stashed["text_keys"].to(dtype)
        self.image_bank, self.text_bank = self.bank.image, self.bank.text  # in the bank's own dtype
        self.ids: Tensor | None = self.bank.ids if mask_same_image else None
        self.stashed = stashed

    def diversity(self, *, kind: Diversity, epsilon: float, gradient: bool) -> tuple[Tensor, Tensor]:
        """The normalised diversity of the image and the text anchors [n] over keys and entries of the other modality."""
        batch, anchors = self.batch, None
        if weighs_all_anchors(len(batch.images)):
            batch, anchors = batch._replace(anchors=None), batch.anchors
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            raw = [
                self._raw_diversity(batch, modality, live, kind, epsilon)
                for modality, live in (("text", batch.images), ("image", batch.texts))
            ]
            images, texts = normalize_diversity(torch.stack(raw), batch.anchor_gather())
            return anchor_rows(images, anchors), anchor_rows(texts, anchors)

    def _raw_diversity(self, batch: Batch, modality: str, live: Tensor, kind: Diversity, epsilon: float) -> Tensor:
        """Over the keys and entries of ``modality``. Without a gradient the standard deviation comes from the bank's
        running moments, so that no n x Q matrix is needed."""
        anchors = anchor_rows(live, batch.anchors)
        number = torch.promote_types(anchors.dtype, torch.float32)
        if kind == "none":
            return anchors.new_ones(len(anchors), dtype=number)
        if kind == "std" and not torch.is_grad_enabled():
            ids = torch.arange(len(batch.images), device=anchors.device) if batch.ids is None else batch.ids
            variance = self.bank.variance(
                modality,
                anchors,
                self.stashed[f"{modality}_keys"],
                anchor_rows(ids, batch.anchors),
                ids,
                mask_entries=self.ids is not None and batch.ids is not None,
            )
            return raw_diversity_from_variance(variance, epsilon=epsilon).to(number)
        negatives = different_images(batch.ids, len(batch.images), anchors.device)
        keys, bank = getattr(self, f"{modality}_keys"), getattr(self, f"{modality}_bank")
        entries = candidate_negatives(batch.ids, self.ids, self.bank.valid, len(batch.images), bank)
        rows = (anchor_rows(mask, batch.anchors) for mask in (negatives, entries))
        return raw_diversity(*compare_with_bank(anchors, keys, bank, *rows), kind=kind, epsilon=epsilon)
