"""Differences of recall between rows, with intervals over images and seeds.

Shapes: N images, S seeds, M figures (the six recalls and their sum), R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

#: Resamples for an interval.
RESAMPLES = 4000
#: Those of one block, so that memory does not grow with their number.
_BLOCK = 200
_DEPTHS = (1, 5, 10)
#: The figures in their order; R@sum is the sum of the others.
FIGURES = ("rsum", *(f"{way}_r{depth}" for way in ("i2t", "t2i") for depth in _DEPTHS))

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Hits:
    """What each image adds to the recalls of one model.

    Args:
        image: [N, 3], 1 where an image finds one of its captions among the first 1, 5 and 10.
        captions: [N, 3], how many of an image's captions find it.
        number: [N], how many captions an image has.
    """

    image: Array
    captions: Array
    number: Array

    @classmethod
    def from_ranks(cls, image_ranks: Sequence[int], caption_ranks: Sequence[int], image_of_text: Sequence[int]) -> Hits:
        """From 0-based ranks of N images and T captions, and the image of each caption.

        Example:
            >>> Hits.from_ranks([0, 7], [0, 3, 12], [0, 0, 1]).recalls([1, 1])[0].round(1).tolist()
            [366.7, 50.0, 50.0, 100.0, 33.3, 66.7, 66.7]
        """
        images, texts, owner = (np.asarray(each) for each in (image_ranks, caption_ranks, image_of_text))
        found = np.stack([np.bincount(owner, texts < depth, len(images)) for depth in _DEPTHS], 1)
        own = np.stack([images < depth for depth in _DEPTHS], 1).astype(float)
        return cls(own, found, np.bincount(owner, minlength=len(images)))

    def recalls(self, weights: Any) -> Array:
        """The figures [R, M] in percent where each image counts as often as ``weights`` [R, N] say."""
        weights = np.atleast_2d(np.asarray(weights, np.float64))
        images = weights @ self.image / weights.sum(1, keepdims=True)
        captions = weights @ self.captions / (weights @ self.number)[:, None]
        figures = 100 * np.concatenate([images, captions], 1)
        return np.concatenate([figures.sum(1, keepdims=True), figures], 1)


@dataclass(frozen=True)
class Difference:
    """A difference of one figure between two rows, in points.

    Args:
        mean: over the seeds that both rows have. low, high: its 95 % interval. seeds: how many they are.
        images_variance, seeds_variance: the variance of the mean that images and seeds cause.
    """

    mean: float
    low: float
    high: float
    seeds: int
    images_variance: float = 0.0
    seeds_variance: float = 0.0

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero, over two seeds or more."""
        return self.seeds > 1 and not self.low <= 0 <= self.high

    def images_needed(self, images: int, points: float = 3.0) -> int | None:
        """About how many images would show a difference of so many points; None: more seeds are needed, not images.

        Args:
            images: those of this difference.

        Example:
            >>> Difference(0.0, -4.0, 4.0, 3, images_variance=4.0).images_needed(100)
            170
        """
        rest = (points / 1.96) ** 2 - self.seeds_variance
        if rest <= 0:
            return None
        needed = images * self.images_variance / rest
        return max(1, int(float(f"{needed:.2g}")))

    def __str__(self) -> str:
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]"


def differences(runs: Mapping[int, Hits], others: Mapping[int, Hits], *, resamples: int = RESAMPLES) -> dict[str, Difference]:
    """The differences of all figures over the seeds that two rows share, with intervals for other images and other seeds.

    The images are resampled, the same ones for both rows and all seeds: this gives the variance B of the mean difference that
    images cause, and C, the part of it that differs between seeds. The variance A between the seeds' differences contains C
    too, so that of the mean is A + B - C, at least B. A few seeds tell A badly: the interval is that of Student's t, whose
    degrees of freedom (Welch and Satterthwaite) are S - 1 where seeds cause all of the variance, and many where images do. A
    seed decides the order of the data and the first weights of all rows alike. With one seed the interval is for other images
    alone.

    Resampling the seeds too would cover less: of three seeds two of nine resamples repeat the same one, and where seeds cause
    most of the variance, an interval from the least to the greatest of three contains the truth 3 times in 4.

    Args:
        runs, others: by seed. A model without a seed, such as one before training, is ``{s: hits for s in seeds}``.
        resamples: how many.

    Returns:
        By name of the figure.

    Raises:
        ValueError: no seed in common.
    """
    seeds = sorted(runs.keys() & others.keys())
    if not seeds:
        raise ValueError("the rows have no seed in common")
    count, images = len(seeds), len(runs[seeds[0]].number)
    generator, blocks = np.random.default_rng(0), []
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        rows = generator.integers(images, size=(size, images)) + images * np.arange(size)[:, None]
        weights = np.bincount(rows.ravel(), minlength=size * images).reshape(size, images)
        blocks.append(np.stack([runs[seed].recalls(weights) - others[seed].recalls(weights) for seed in seeds]))
    drawn = np.concatenate(blocks, 1)  # [S, R, M]
    each = np.concatenate([runs[seed].recalls(np.ones(images)) - others[seed].recalls(np.ones(images)) for seed in seeds])
    over_images = drawn.mean(0).var(0)  # B
    between = each.var(0, ddof=1) / count if count > 1 else np.zeros(len(FIGURES))  # A
    own = (drawn - drawn.mean(0)).var(1).sum(0) / (count - 1) / count if count > 1 else between  # C
    over_seeds = np.maximum(between - own, 0)
    result = {}
    for number, name in enumerate(FIGURES):
        mean, variances = float(each[:, number].mean()), (float(over_images[number]), float(over_seeds[number]))
        reach = _quantile(sum(variances), float(between[number]), count) * math.sqrt(sum(variances))
        result[name] = Difference(mean, mean - reach, mean + reach, count, *variances)
    return result


def _quantile(variance: float, between: float, seeds: int) -> float:
    """Student's 97.5 % quantile, for a variance of which a few seeds tell the part ``between``."""
    freedom = (seeds - 1) * (variance / between) ** 2 if between else math.inf
    return 1.96 if freedom > 500 else _student(float(f"{max(freedom, 1.0):.2g}"))


@cache
def _student(freedom: float) -> float:
    return float(np.quantile(np.abs(np.random.default_rng(0).standard_t(freedom, 200_000)), 0.95))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; of one value NaN."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
