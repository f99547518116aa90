"""Losses with hard negatives of the images, the slow way, one float at a time (docs/equations.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.references.dcl import Rows, directed, diversity, negatives, products


class Hard(NamedTuple):
    """Texts [m, d], the ids of the images that they are captions of, and which places hold a text."""

    texts: Rows
    ids: Sequence[int]
    valid: Sequence[bool]

    def allowed(self, ids: Sequence[Any]) -> list[list[bool]]:
        """For each image which of the texts are its negatives."""
        return [[ok and of != own for of, ok in zip(self.ids, self.valid, strict=True)] for own in ids]


def widened(similarity: Rows, allowed: Sequence[Sequence[bool]], images: Rows, ids: Sequence[Any], hard: Hard) -> Any:
    """Similarities of the images and their negatives, with the hard negatives as further columns."""
    further = zip(products(images, hard.texts), hard.allowed(ids), strict=True)
    both = [
        ([*row, *scores], [*mask, *ok])
        for row, mask, (scores, ok) in zip(similarity, allowed, further, strict=True)
    ]
    return [row for row, _ in both], [mask for _, mask in both]


def directions(images: Rows, texts: Rows, ids: Sequence[Any], hard: Hard) -> list[tuple[Any, Any]]:
    """Similarity and negatives of the image anchors, which see the hard negatives, and of the text anchors, which do not."""
    allowed = negatives(ids)
    return [
        widened(products(images, texts), allowed, images, ids, hard),
        (products(texts, images), allowed),
    ]


def dcl(images: Rows, texts: Rows, ids: Sequence[Any], hard: Hard, *, kind: str = "std", effective: int | None = None) -> float:
    loss = 0.0
    for similarity, allowed in directions(images, texts, ids, hard):
        weights = diversity(similarity, allowed, kind, 0.1)
        if effective is None:
            loss += directed(similarity, allowed, weights, 0.1, 0.3, 1.0)
            continue
        for anchor, (row, mask) in enumerate(zip(similarity, allowed, strict=True)):
            terms = [math.exp((s - 0.3) / (0.1 * weights[anchor])) for s, ok in zip(row, mask, strict=True) if ok]
            total = math.fsum(terms) * effective / max(1, len(terms))
            loss += (0.1 * math.log(1 + total) - math.log(1 + row[anchor])) / len(similarity)
    return loss


def m_dcl(
    images: Rows, texts: Rows, keys: tuple[Rows, Rows], banks: tuple[Rows, Rows], ids: Any, bank_ids: Any, hard: Hard
) -> float:
    """The paired form, with the diversity over the batch and the bank. ``hard`` holds momentum keys."""
    in_batch = negatives(ids)
    loss = 0.0
    for way, live, others in ((0, images, texts), (1, texts, images)):
        key, bank = keys[1 - way], banks[1 - way]
        similarity = products(live, [*key, *bank])
        allowed = [row + [b != anchor for b in bank_ids] for row, anchor in zip(in_batch, ids, strict=True)]
        if way == 0:
            similarity, allowed = widened(similarity, allowed, images, ids, hard)
        over_batch = diversity(products(live, others), in_batch, "std", 0.1)
        over_bank = diversity(similarity, allowed, "std", 0.1)
        mean = [(a + b) / 2 for a, b in zip(over_batch, over_bank, strict=True)]
        loss += directed(similarity, allowed, mean, 0.1, 0.3, 1.0)
        back = products(key, live)
        loss += directed(back, in_batch, diversity(back, in_batch, "std", 0.1), 0.1, 0.3, 1.0)
    return loss


def triplet(
    images: Rows, texts: Rows, ids: Sequence[Any], hard: Hard, *, hardest: bool = True, reduction: str = "mean"
) -> float:
    loss = 0.0
    for similarity, allowed in directions(images, texts, ids, hard):
        for anchor, (row, mask) in enumerate(zip(similarity, allowed, strict=True)):
            hinges = [max(0.0, 0.2 - row[anchor] + s) for s, ok in zip(row, mask, strict=True) if ok] or [0.0]
            each = max(hinges) if hardest else math.fsum(hinges) / (len(hinges) if reduction == "mean" else 1)
            loss += each / (len(similarity) if reduction == "mean" else 1)
    return loss


def clip(images: Rows, texts: Rows, ids: Sequence[Any], hard: Hard, scale: float) -> float:
    """Captions of one image in the batch are negatives, hard negatives of an anchor's own image are not."""
    n = len(images)
    every = [[q != anchor for q in range(n)] for anchor in range(n)]
    wide = widened(products(images, texts), every, images, ids, hard)
    loss = 0.0
    for similarity, allowed in (wide, (products(texts, images), every)):
        for anchor, (row, mask) in enumerate(zip(similarity, allowed, strict=True)):
            total = math.fsum(math.exp(scale * s) for q, (s, ok) in enumerate(zip(row, mask, strict=True)) if ok or q == anchor)
            loss += (math.log(total) - scale * row[anchor]) / (2 * n)
    return loss
