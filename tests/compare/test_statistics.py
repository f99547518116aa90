"""Intervals contain what is planted, and claim nothing where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest

from coder_plugin.compare.statistics import FIGURES, Difference, Hits, differences
from coder_plugin.evaluation import recall
from tests.compare.planted import margin, rows


def test_figures_are_those_of_recall() -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    owner = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11])  # unequal numbers of captions
    similarity = torch.randn(12, len(owner), generator=generator)
    found = recall(similarity, owner)
    hits = Hits.from_ranks(found["i2t_ranks"], found["t2i_ranks"], owner)
    figures = dict(zip(FIGURES, hits.recalls(np.ones(12))[0], strict=True))
    assert figures == pytest.approx({name: found[name] for name in FIGURES})
    twice = hits.recalls([2] * 6 + [0] * 6)[0]
    half = Hits(hits.image[:6], hits.captions[:6], hits.number[:6]).recalls(np.ones(6))[0]
    assert twice == pytest.approx(half), "a weight is how often an image counts"


@pytest.mark.parametrize(
    ("images", "seeds", "spread", "repetitions"),
    [
        (100, 3, 0.0, 60),
        pytest.param(300, 5, 0.05, 100, marks=pytest.mark.slow),
        pytest.param(100, 3, 0.1, 400, marks=pytest.mark.slow),
    ],
)
def test_intervals_contain_a_planted_margin_and_claim_nothing_of_equal_rows(
    images: int, seeds: int, spread: float, repetitions: int
) -> None:
    truth, covered, claimed = margin(0.2, spread), 0, 0
    for number in range(repetitions):
        setting = {"images": images, "seeds": seeds, "spread": spread}
        better = differences(*rows(number, gain=0.2, **setting), resamples=200)["rsum"]
        covered += better.low <= truth <= better.high
        claimed += differences(*rows(number, gain=0.0, **setting), resamples=200)["rsum"].is_clear
    assert truth > 10 and covered >= 0.9 * repetitions and claimed <= 0.07 * repetitions


def test_more_images_and_seeds_narrow_an_interval() -> None:
    def width(images: int, seeds: int) -> float:
        found = differences(*rows(3, images=images, seeds=seeds, gain=0.2, spread=0.05))["rsum"]
        return found.high - found.low

    assert width(1600, 5) < width(100, 5) / 2 and width(100, 12) < width(100, 2)


def test_a_seed_that_differs_widens_an_interval() -> None:
    row, peer = rows(0, images=200, seeds=3, gain=0.3, spread=0.0)
    alone = differences(row, peer)["rsum"]
    row[2] = rows(0, images=200, seeds=3, gain=-0.6, spread=0.0)[0][2]
    mixed = differences(row, peer)["rsum"]
    assert alone.is_clear and not mixed.is_clear and mixed.seeds_variance > alone.seeds_variance


def test_rows_are_compared_over_the_seeds_they_share() -> None:
    row, peer = rows(0, images=50, seeds=4, gain=0.3, spread=0.0)
    some = differences({seed: row[seed] for seed in (1, 3)}, peer)["rsum"]
    whole = np.ones(50)
    expected = np.mean([(row[seed].recalls(whole) - peer[seed].recalls(whole))[0, 0] for seed in (1, 3)])
    assert some.seeds == 2 and some.mean == pytest.approx(expected)
    one = differences({1: row[1]}, peer)["rsum"]
    assert one.seeds == 1 and one.low < one.mean < one.high and not one.is_clear, "one seed claims nothing"
    with pytest.raises(ValueError, match="no seed in common"):
        differences({9: row[1]}, peer)


def test_images_needed_is_what_gives_the_width() -> None:
    found = differences(*rows(0, images=100, seeds=3, gain=0.0, spread=0.0))["rsum"]
    needed = found.images_needed(100, 3.0)
    assert needed is not None
    assert 1.96 * (found.images_variance * 100 / needed + found.seeds_variance) ** 0.5 == pytest.approx(3.0, rel=0.05)
    assert Difference(0.0, -5.0, 5.0, 3, images_variance=1.0, seeds_variance=4.0).images_needed(100) is None
