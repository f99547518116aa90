"""A first-in first-out bank as a Python list, and M-DCL over it, one float at a time (CODER eq. 6; docs/equations.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.references.dcl import Rows, directed, diversity, negatives, products


class Bank:
    """The last ``size`` entries, oldest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: list[Any] = []

    def enqueue(self, entries: Sequence[Any]) -> None:
        self.entries = [*self.entries, *entries][-self.size :]


def m_dcl(
    images: Rows,
    texts: Rows,
    image_keys: Rows,
    text_keys: Rows,
    image_bank: Rows,
    text_bank: Rows,
    ids: Sequence[int],
    bank_ids: Sequence[int],
    *,
    mu: float = 0.1,
    gamma: float = 0.3,
    epsilon: float = 0.1,
    kind: str = "std",
    positive_weight: float | str = 1.0,
    reverse: str = "paired",
    over: str = "batch+bank",
) -> float:
    """Both banks; ``image_bank`` and ``text_bank`` hold filled entries only."""
    in_batch = negatives(ids)
    loss = 0.0
    for live, others, keys, bank in ((images, texts, text_keys, text_bank), (texts, images, image_keys, image_bank)):
        similarity = products(live, [*keys, *bank])
        allowed = [row + [b != anchor for b in bank_ids] for row, anchor in zip(in_batch, ids, strict=True)]
        weights = {
            "batch": diversity(products(live, others), in_batch, kind, epsilon),
            "bank": diversity(similarity, allowed, kind, epsilon),
        }
        mean = [sum(pair) / 2 for pair in zip(*weights.values(), strict=True)]
        chosen = {**weights, "batch+bank": mean}[over]
        loss += directed(similarity, allowed, chosen, mu, gamma, positive_weight)
        if reverse == "paired":
            back = products(keys, live)
            loss += directed(back, in_batch, diversity(back, in_batch, kind, epsilon), mu, gamma, positive_weight)
        elif reverse == "all":
            back = products([*keys, *bank], live)
            allowed = [*in_batch, *[[entry != anchor for anchor in ids] for entry in bank_ids]]
            weights_back = diversity(back, allowed, kind, epsilon)
            total = directed(back[: len(ids)], in_batch, weights_back, mu, gamma, positive_weight) * len(ids)
            for row, own, weight in zip(back[len(ids) :], allowed[len(ids) :], weights_back[len(ids) :], strict=True):
                terms = (math.exp((s - gamma) / (mu * weight)) for s, ok in zip(row, own, strict=True) if ok)
                total += mu * math.log(1 + math.fsum(terms))
            loss += total / len(back)
    return loss
