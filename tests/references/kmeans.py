"""Online spherical k-means the slow way, one sample at a time: as the module's docstring says."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = list[float]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(vector: Sequence[float]) -> Vector:
    norm = math.sqrt(dot(vector, vector))
    return [x / norm for x in vector]


class KMeans:
    """``margin`` is how clearly all choices so far were made, and how long the sums were that got normalised."""

    def __init__(self, clusters: int, patience: float) -> None:
        self.clusters, self.patience = clusters, patience
        self.centres: list[Vector] = []
        self.counts: list[int] = []
        self.last_seen: list[int] = []
        self.seen = self.reseeded = 0
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
        left = [unit(sample) for sample in samples if any(sample)]
        self.seen += len(left)
        while left and len(self.centres) < self.clusters:
            self.centres.append(left.pop(0))
            self.counts.append(1)
            self.last_seen.append(self.seen)
        labels = [self.assign(sample) for sample in left]
        fit = [dot(sample, self.centres[label]) for sample, label in zip(left, labels, strict=True)]
        for k in sorted(set(labels)):
            own = [sample for sample, label in zip(left, labels, strict=True) if label == k]
            total = [self.counts[k] * c + math.fsum(s[d] for s in own) for d, c in enumerate(self.centres[k])]
            self.margin = min(self.margin, math.sqrt(dot(total, total)) / (self.counts[k] + len(own)))
            self.centres[k] = unit(total)
            self.counts[k] += len(own)
            self.last_seen[k] = self.seen
        self.reseed(left, fit)

    def reseed(self, samples: list[Vector], fit: list[float]) -> None:
        stale = [k for k in range(len(self.centres)) if self.seen - self.last_seen[k] >= self.patience * self.clusters]
        stale.sort(key=lambda k: self.last_seen[k])
        worst = sorted(range(len(samples)), key=lambda i: fit[i])
        pairs = list(zip(stale, worst, strict=False))  # until one of them runs out
        if pairs:
            for one, other in zip(worst[:-1], worst[1:], strict=True):
                self.margin = min(self.margin, fit[other] - fit[one])
        for k, i in pairs:
            self.centres[k] = samples[i]
            self.counts[k], self.last_seen[k] = 1, self.seen
            self.reseeded += 1
