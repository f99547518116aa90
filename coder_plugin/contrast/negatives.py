"""The statistics of an anchor's negatives, and their dense form.

Shapes: k directions (images as anchors, texts as anchors), a anchors of a direction, q candidates, d dimensions, v features of
one item. Everything is computed in float32, or in float64 for float64 features, also under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin.tensors import cosine, upcast


class Block(NamedTuple):
    """Rows that anchors are compared with: the other side of the batch, a bank, hard negatives, noised texts.

    Args:
        rows: [q, d], of any float type; or [q, v, d], of which the greatest similarity counts.
        ids: the image of each row, integers [q].
        anchor_ids: the image of each anchor, integers [a]. A row of an anchor's own image is not its negative. Without ``ids``
            or ``anchor_ids`` every row is one.
        valid: bool [q], False for rows that are no candidates. None: all are.
        visits: in a ring, whether every rank holds rows of its own, which visit all ranks. False: all ranks hold the same rows.
    """

    rows: Tensor
    ids: Tensor | None = None
    anchor_ids: Tensor | None = None
    valid: Tensor | None = None
    visits: bool = False


class Direction(NamedTuple):
    """Anchors and the blocks of their candidates.

    Args:
        anchors: [a, d], or [a, v, d].
        blocks: at least one.
        first: where the positives are: anchor i's is row ``first + i`` of the first block.
    """

    anchors: Tensor
    blocks: tuple[Block, ...]
    first: int = 0


class Negatives:
    """What a loss needs to know about the negatives of each anchor. Results are [k, a], a row for each direction.

    Args:
        directions: one or two, with equally many anchors.
        mirrored: of two directions, whether each one's anchors are all candidates of the other, pair i on the diagonal, so that
            the similarities of one are those of the other, transposed.
    """

    def __init__(self, directions: Sequence[Direction], *, mirrored: bool = False) -> None:
        self.directions, self.mirrored = directions, mirrored

    @property
    def positive(self) -> Tensor:
        """The similarity of each anchor to its positive [k, a]; [a] where both directions have the same.

        Where ``logsumexp`` is needed too, call it first: some forms then have the positives and their gradients for free.
        """
        raise NotImplementedError

    def count(self) -> Tensor:
        """The number of negatives, int64 [k, a]."""
        raise NotImplementedError

    def variance(self) -> Tensor:
        """Population variance of the similarities to the negatives, >= 0; 0 without negatives. Only :class:`Dense` has its
        gradient."""
        raise NotImplementedError

    def logsumexp(self, scale: Tensor | float, offset: float = 0.0, ceiling: Tensor | None = None) -> Tensor:
        """``log sum_neg exp(scale * (S - offset))``, differentiable; -inf without negatives.

        Args:
            scale: > 0: [k, a], without a gradient; or one number for all, which may be 0-d with a gradient.
            offset: subtracted from every similarity.
            ceiling: [k, a]; a candidate of a greater similarity is not a negative.
        """
        raise NotImplementedError

    def hardest(self) -> Tensor:
        """The greatest similarity to a negative, differentiable; -inf without negatives."""
        raise NotImplementedError

    def hinge(self, margin: float) -> Tensor:
        """``sum_neg max(0, margin + S - S_positive)``, differentiable; 0 without negatives."""
        raise NotImplementedError


class Dense(Negatives):
    """All similarities at once: the reference of the other forms, differentiable to any order.

    Example:
        >>> eye, ids = torch.eye(3), torch.arange(3)
        >>> images = Direction(eye, (Block(eye, ids, ids),))
        >>> Dense([images]).logsumexp(torch.tensor(1.0))  # two negatives of similarity 0
        tensor([[0.6931, 0.6931, 0.6931]])
    """

    def __init__(self, directions: Sequence[Direction], *, mirrored: bool = False) -> None:
        super().__init__(directions, mirrored=mirrored)
        self._first = [direction.first for direction in directions]
        self.similarity, self.masks = [], []
        for anchors, blocks, _ in directions[: 1 if mirrored else None]:
            parts = [cosine(anchors, block.rows) for block in blocks]
            masks = [_mask(block, len(anchors)) for block in blocks]
            self.similarity.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
            self.masks.append(masks[0] if len(masks) == 1 else torch.cat(masks, 1))
        if mirrored:
            self.similarity.append(self.similarity[0].T)
            self.masks.append(self.masks[0].T)

    @classmethod
    def of_scores(cls, scores: Sequence[Tensor], masks: Sequence[Tensor], first: int = 0) -> Dense:
        """The negatives of similarities that are computed already.

        Args:
            scores: of each direction, float [a, q]. masks: bool [a, q], True where the candidate is a negative.
            first: anchor i's positive is candidate ``first + i``.
        """
        negatives = cls([])
        negatives.similarity, negatives.masks = [upcast(each) for each in scores], list(masks)
        negatives._first = [first] * len(scores)
        return negatives

    @property
    def positive(self) -> Tensor:
        rows = [each.diagonal(first)[: len(each)] for each, first in zip(self.similarity, self._first, strict=True)]
        return rows[0] if self.mirrored else torch.stack(rows)

    def count(self) -> Tensor:
        return torch.stack([mask.sum(1) for mask in self.masks])

    def variance(self) -> Tensor:
        # centred first, because the standard deviation may be 1e-3 at a mean of 0.9
        variances = []
        for similarity, mask in zip(self.similarity, self.masks, strict=True):
            number = mask.sum(1).clamp(min=1)
            mean = torch.where(mask, similarity, 0).sum(1) / number
            variances.append(torch.where(mask, similarity - mean[:, None], 0).square().sum(1) / number)
        return torch.stack(variances)

    def entropy(self) -> Tensor:
        """Entropy, in bits, of the softmax over the similarities to the negatives, >= 0; 0 with fewer than two negatives."""
        entropies = []
        for similarity, mask in zip(self.similarity, self.masks, strict=True):
            if not similarity.shape[1]:
                entropies.append(similarity.new_zeros(len(similarity)))
                continue
            largest = torch.where(mask, similarity, -torch.inf).amax(1, keepdim=True).detach()
            shifted = torch.where(mask, similarity - largest, 0)
            weight = torch.where(mask, shifted.exp(), 0)
            total = weight.sum(1).clamp(min=torch.finfo(weight.dtype).tiny)
            # H = log Z - E[s], both relative to the largest similarity
            entropy = (total.log() - (weight * shifted).sum(1) / total) / math.log(2)
            entropies.append(torch.where(mask.sum(1) > 1, entropy, 0))
        return torch.stack(entropies)

    def logsumexp(self, scale: Tensor | float, offset: float = 0.0, ceiling: Tensor | None = None) -> Tensor:
        scale, sums = torch.as_tensor(scale, device=self.similarity[0].device), []
        for k, (similarity, mask) in enumerate(zip(self.similarity, self.masks, strict=True)):
            if ceiling is not None:
                mask = mask & (similarity <= ceiling[k, :, None])
            logits = (similarity - offset) * (scale[k, :, None] if scale.ndim else scale)
            empty = ~mask.any(1, keepdim=True)  # of such a row torch's logsumexp has no second derivative
            filled = torch.where(mask, logits, torch.where(empty, 0.0, -torch.inf).to(logits.dtype))
            sums.append(filled.logsumexp(1).masked_fill(empty[:, 0], -torch.inf))
        return torch.stack(sums)

    def hardest(self) -> Tensor:
        # a column of -inf: without candidates there is nothing to take the maximum of
        padded = [
            torch.cat([similarity.masked_fill(~mask, -torch.inf), similarity.new_full((len(similarity), 1), -torch.inf)], 1)
            for similarity, mask in zip(self.similarity, self.masks, strict=True)
        ]
        return torch.stack([each.amax(1) for each in padded])

    def hinge(self, margin: float) -> Tensor:
        positive, hinges = self.positive.expand(len(self.similarity), -1), []
        for k, (similarity, mask) in enumerate(zip(self.similarity, self.masks, strict=True)):
            hinge = (margin + similarity - positive[k, :, None]).clamp(min=0)
            hinges.append(torch.where(mask, hinge, 0).sum(1))
        return torch.stack(hinges)


def _mask(block: Block, anchors: int) -> Tensor:
    """Which rows of a block are negatives of which anchors: bool [a, q]."""
    mask = excluded(block.ids, block.anchor_ids, block.valid)
    if mask is None:
        return torch.ones(anchors, len(block.rows), dtype=torch.bool, device=block.rows.device)
    return ~mask.expand(anchors, -1)


def excluded(ids: Tensor | None, anchor_ids: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """Bool [a, q] (or [1, q], where it is the same for all anchors), True where a row is not a negative of an anchor. None if
    all are negatives."""
    same = None if ids is None or anchor_ids is None else anchor_ids[:, None] == ids
    invalid = None if valid is None else ~valid[None]
    if same is None or invalid is None:
        return invalid if same is None else same
    return same | invalid
