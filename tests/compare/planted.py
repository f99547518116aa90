"""Hits of images for two rows whose difference is known: what trained models would give, without training them."""

from __future__ import annotations

import numpy as np

from coder_plugin.compare.statistics import Hits

CAPTIONS = 3


def rows(number: int, *, images: int, seeds: int, gain: float, spread: float) -> tuple[dict[int, Hits], dict[int, Hits]]:
    """The hits by seed of a row and of its peer on the same images.

    Args:
        number: of the repetition: other images, other seeds.
        gain: of the row above its peer, where the images' difficulties have a standard deviation of 1.
        spread: standard deviation of both rows' gains over seeds.
    """
    difficulty = np.random.default_rng([number, 0]).normal(size=(images, 1))
    owner, both = np.repeat(np.arange(images), CAPTIONS), []
    for row, own in enumerate((gain, 0.0)):
        generator = np.random.default_rng([number, 1 + row])
        runs = {}
        for seed in range(seeds):
            skill = difficulty + own + spread * generator.normal() + generator.normal(scale=0.5, size=(images, CAPTIONS + 1))
            ranks = np.exp(np.clip(2.5 - 2 * skill, -9, 9)).astype(int)
            runs[seed] = Hits.from_ranks(ranks[:, 0], ranks[:, 1:].ravel(), owner)
        both.append(runs)
    return both[0], both[1]


def margin(gain: float, spread: float) -> float:
    """The true difference in R@sum, of many images and seeds."""
    whole, found = np.ones(200), []
    for number in range(100):
        row, peer = rows((1 << 20) + number, images=200, seeds=5, gain=gain, spread=spread)
        found += [(row[seed].recalls(whole) - peer[seed].recalls(whole))[0, 0] for seed in row]
    return float(np.mean(found))
