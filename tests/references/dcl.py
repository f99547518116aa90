"""Diversity and DCL the slow way, one anchor and one pair of floats at a time (CODER eq. 3-5; docs/equations.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Rows = Sequence[Sequence[float]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def standard_deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def entropy(values: Sequence[float]) -> float:
    total = math.fsum(math.exp(value) for value in values)
    shares = [math.exp(value) / total for value in values]
    return -math.fsum(share * math.log2(share) for share in shares)


def spread(values: Sequence[float], kind: str = "std", epsilon: float = 0.1) -> float:
    """div of an anchor, in [1, 2), from its similarities to its negatives; before the division by the largest."""
    if kind == "none" or not values:
        return 1.0
    amount = {"std": standard_deviation, "entropy": entropy}[kind](values)
    return 1 / sigmoid(epsilon / amount) if amount > 1e-15 else 1.0


def diversity(similarity: Rows, negatives: Sequence[Sequence[bool]], kind: str, epsilon: float) -> list[float]:
    """div of every anchor over the largest one; ``negatives[n][q]`` says whether q is a negative of n."""
    found = []
    for row, allowed in zip(similarity, negatives, strict=True):
        found.append(spread([s for s, negative in zip(row, allowed, strict=True) if negative], kind, epsilon))
    return [value / max(found) for value in found]


def negatives(ids: Sequence[Any]) -> list[list[bool]]:
    """Nobody's own pair, and no pair of the same image."""
    n = len(ids)
    return [[q != anchor and ids[q] != ids[anchor] for q in range(n)] for anchor in range(n)]


def products(left: Rows, right: Rows) -> list[list[float]]:
    return [[math.fsum(a * b for a, b in zip(x, y, strict=True)) for y in right] for x in left]


def directed(
    similarity: Rows,
    allowed: Sequence[Sequence[bool]],
    weights: Sequence[float],
    mu: float,
    gamma: float,
    positive_weight: float | str,
) -> float:
    """One direction: mean over the anchors of eq. 4's bracket."""
    losses = []
    for anchor, row in enumerate(similarity):
        total = 1.0
        for candidate, score in enumerate(row):
            if allowed[anchor][candidate]:
                total += math.exp((score - gamma) / (mu * weights[anchor]))
        pull = math.log(max(1 + row[anchor], 1e-6))
        losses.append(mu * math.log(total) - (mu if positive_weight == "mu" else positive_weight) * pull)
    return math.fsum(losses) / len(losses)


def dcl(
    images: Rows,
    texts: Rows,
    ids: Sequence[Any] | None = None,
    *,
    mu: float = 0.1,
    gamma: float = 0.3,
    epsilon: float = 0.1,
    diversity: str = "std",
    positive_weight: float | str = 1.0,
    bank_diversity: tuple[Sequence[float], Sequence[float]] | None = None,
    weights: tuple[Sequence[float], Sequence[float]] | None = None,
) -> float:
    """Both directions. ``weights`` replaces the diversities: what a stopped gradient sees."""
    allowed = negatives(range(len(images)) if ids is None else ids)
    loss = 0.0
    for way, similarity in enumerate((products(images, texts), products(texts, images))):
        own = (
            batch_weights(similarity, allowed, diversity, epsilon, bank_diversity and bank_diversity[way])
            if weights is None
            else weights[way]
        )
        loss += directed(similarity, allowed, own, mu, gamma, positive_weight)
    return loss


def batch_weights(
    similarity: Rows,
    allowed: Sequence[Sequence[bool]],
    kind: str,
    epsilon: float,
    bank: Sequence[float] | None = None,
) -> list[float]:
    """Diversity over the batch, or its mean with the bank's if there is a bank (CODER, below eq. 6)."""
    batch = diversity(similarity, allowed, kind, epsilon)
    return batch if bank is None else [(a + b) / 2 for a, b in zip(batch, bank, strict=True)]
