"""Spherical k-means in plain Python: updates by batches, and Lloyd's algorithm. Slow, for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = list[float]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(vector: Sequence[float]) -> Vector:
    length = math.sqrt(dot(vector, vector))
    return [value / length for value in vector]


class KMeans:
    """``margin`` is how clearly all choices so far were made, and how long the sums were that got normalised."""

    def __init__(self, centres: Sequence[Vector], counts: Sequence[int]) -> None:
        self.centres, self.counts = [unit(centre) for centre in centres], list(counts)
        self.margin = math.inf

    def assign(self, sample: Vector) -> int:
        cosines = [dot(sample, centre) for centre in self.centres]
        best = max(cosines)
        label = cosines.index(best)
        for other, cosine in enumerate(cosines):
            if other != label:
                self.margin = min(self.margin, best - cosine)
        return label

    def update(self, samples: Sequence[Vector]) -> None:
        """Move each centre to the weighted mean of itself and its samples."""
        rows = [unit(sample) for sample in samples if any(sample)]
        labels = [self.assign(sample) for sample in rows]
        for k in sorted(set(labels)):
            members = [sample for sample, label in zip(rows, labels, strict=True) if label == k]
            self._move(k, members, weight=self.counts[k])
            self.counts[k] += len(members)

    def lloyd(self, samples: Sequence[Vector], iterations: int) -> bool:
        """Lloyd's algorithm from the present centres. Returns False if a cluster becomes empty, which it does not handle."""
        rows = [unit(sample) for sample in samples]
        for _ in range(iterations):
            labels = [self.assign(sample) for sample in rows]
            for k in range(len(self.centres)):
                members = [sample for sample, label in zip(rows, labels, strict=True) if label == k]
                if not members:
                    return False
                self._move(k, members, weight=0)
        labels = [self.assign(sample) for sample in rows]
        self.counts = [labels.count(k) for k in range(len(self.centres))]
        return True

    def _move(self, k: int, members: list[Vector], *, weight: int) -> None:
        total = [weight * c + math.fsum(s[d] for s in members) for d, c in enumerate(self.centres[k])]
        self.margin = min(self.margin, math.sqrt(dot(total, total)) / (weight + len(members)))
        self.centres[k] = unit(total)
