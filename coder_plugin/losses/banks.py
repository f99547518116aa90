"""The anchors of a batch against the current keys and the momentum banks (METHODS 1, 3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import Diversity, cosine, spread, spread_of_variance
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import Batch


class Banks:
    """One step's view of the banks. Making it stashes the keys of all ranks, to be written after the step.

    An anchor's candidates are the keys of the global batch followed by the bank's Q entries of the other modality.

    Args:
        term: which reads them; its head that provides the keys holds ``bank``.
        batch: the live pairs; its ids say who masks whom.
        image_keys: this rank's [B, D]. text_keys: [B, D]. ids: image ids [B], as the bank keeps them.
    """

    requires: ClassVar[tuple[str, ...]] = ("coder_ids", "coder_image_keys", "coder_text_keys")

    def __init__(self, term: Term, batch: Batch, image_keys: Tensor, text_keys: Tensor, ids: Tensor) -> None:
        head = term.provider("coder_image_keys", "bank")
        self.bank = head.bank
        self.batch = batch
        self.keys = {
            "image": distributed.gather(image_keys.detach()),
            "text": distributed.gather(text_keys.detach()),
        }
        ids = distributed.gather(ids)
        self.ids = ids if getattr(term, "mask_same_image", True) else None
        head.stash(image_keys=self.keys["image"], text_keys=self.keys["text"], ids=ids)

    def similarity(self, modality: str) -> tuple[Tensor, Tensor]:
        """Of this modality's anchors: cosines with keys and entries of the other [n, N + Q], and which are negatives."""
        other = _OTHER[modality]
        anchors = self.anchors(modality)
        entries = getattr(self.bank, other).to(anchors.dtype)
        similarity = cosine(anchors, torch.cat([self.keys[other].to(anchors.dtype), entries]))
        return similarity, torch.cat([self.batch.negatives, self.entries_are_negatives(self.batch.own)], 1)

    def entries_are_negatives(self, rows: slice) -> Tensor:
        """Bool [n, Q]: the filled entries of other images than these rows of the global batch."""
        valid = self.bank.valid
        if self.ids is None:
            return valid.expand(len(self.batch.ids[rows]), -1)
        return (self.ids[rows, None] != self.bank.ids[None, :]) & valid

    def spread(self, modality: str, *, kind: Diversity, epsilon: float) -> Tensor:
        """Diversity of this modality's anchors over keys and entries, not yet normalised [n].

        The standard deviation comes from the bank's running moments: no n x Q matrix is formed, but for a gradient.
        """
        if kind == "std" and not torch.is_grad_enabled():
            other = _OTHER[modality]
            anchors = self.anchors(modality)
            ids = None if self.ids is None else self.ids[self.batch.own]
            variance = self.bank.variance(other, anchors, self.keys[other], self.batch.negatives, ids)
            return spread_of_variance(variance, epsilon=epsilon).to(torch.promote_types(anchors.dtype, torch.float32))
        if kind == "none":
            anchors = self.anchors(modality)
            return anchors.new_ones(len(anchors), dtype=torch.promote_types(anchors.dtype, torch.float32))
        similarity, negatives = self.similarity(modality)
        return spread(similarity, negatives, kind=kind, epsilon=epsilon)

    def anchors(self, modality: str) -> Tensor:
        """The live features [n, D] of this modality's anchors."""
        return (self.batch.images if modality == "image" else self.batch.texts)[self.batch.own]


_OTHER = {"image": "text", "text": "image"}
