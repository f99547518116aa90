"""Kinds of captions, recall of each against a loop, Wilson's intervals against known ones, and the table."""

from __future__ import annotations

import pytest
import torch

from coder_plugin.errors import CoderError
from coder_plugin.evaluation import recall
from coder_plugin.evaluation.breakdowns import OTHER, WORDS, breakdown, format_breakdowns, groups_of, kinds_of, wilson
from coder_plugin.evaluation.multi_positive import Scores


@pytest.mark.parametrize(
    ("caption", "kinds"),
    [
        ("A black dog runs beside two small children .", {"colour", "action", "relation", "number", "size", "people"}),
        ("Dogs", set()),
        ("The man's brownies", {"people"}),  # brown is part of another word
        ("a hiking trail", {"action"}),
        ("THREE GREEN things", {"number", "colour"}),
        ("she is carrying, sitting and swimming", {"action"}),
        ("an orange heart left of a big cross", {"colour", "relation", "size"}),
        ("riders row their boats", {"people"}),
    ],
)
def test_what_a_caption_speaks_of(caption: str, kinds: set[str]) -> None:
    assert kinds_of(caption) == kinds


def test_groups() -> None:
    captions = ["a red dog", "two dogs", "dogs", "a dog with a red ball and one with two sticks"]
    owner = torch.tensor([0, 0, 1, 0])
    words = groups_of("words", captions, owner)
    assert list(words) == [*WORDS, OTHER]
    assert words["colour"].tolist() == [True, False, False, True] and words[OTHER].tolist() == [False, False, True, False]
    lengths = groups_of("length", captions, owner)
    assert lengths["<6 words"].tolist() == [True, True, True, False] and lengths["10-11 words"].tolist()[3]
    assert torch.stack(list(lengths.values())).sum(0).tolist() == [1, 1, 1, 1]
    places = groups_of("place", captions, owner)
    assert {label: mask.nonzero().flatten().tolist() for label, mask in places.items()} == {
        "caption 1": [0, 2], "caption 2": [1], "caption 3": [3],
    }  # fmt: skip
    named = groups_of("place", captions, owner, caption_names=["rich", "poor", "poorest"])
    assert list(named) == ["rich", "poor", "poorest"] and torch.equal(named["poor"], places["caption 2"])
    with pytest.raises(CoderError, match="up to 3 captions, but only 2 caption names"):
        groups_of("place", captions, owner, caption_names=["rich", "poor"])
    with pytest.raises(CoderError, match="by must be one of words, length, place, got 'colour'"):
        groups_of("colour", captions, owner)


def test_recall_of_kinds_against_a_loop() -> None:
    rng = torch.Generator().manual_seed(0)
    owner = torch.randint(8, (40,), generator=rng)
    owner[:8] = torch.arange(8)
    matrix = torch.randint(6, (8, 40), generator=rng).float()
    matrix[2, 5], matrix[owner[9], 9] = float("nan"), float("nan")
    ranks = recall(matrix, owner)["t2i_ranks"]
    groups = {"some": torch.rand(40, generator=rng) < 0.4, "all": torch.ones(40).bool(), "none": torch.zeros(40).bool()}
    groups["some"][owner == 3] = False
    got = breakdown(groups, ranks, owner, Scores(torch.zeros(8, 1), torch.zeros(40, 1), matrix).rows("i2t", chunk=3))
    for label, mask in groups.items():
        places = []
        for image in range(8):
            right = [text for text in range(40) if owner[text] == image and mask[text]]
            wrong = [text for text in range(40) if owner[text] != image]
            scores = [s if (s := float(matrix[image, text])) == s else -float("inf") for text in right]
            if right:
                places.append(sum(not float(matrix[image, text]) < max(scores) for text in wrong))
        own = got[label]
        assert own["i2t"]["count"] == len(places) and own["t2i"]["count"] == int(mask.sum())
        for k in (1, 5, 10):
            assert own["i2t"][f"r{k}"] == (pytest.approx(100 * sum(p < k for p in places) / len(places)) if places else None)
            mine = ranks[mask]
            assert own["t2i"][f"r{k}"] == (pytest.approx(100 * float((mine < k).float().mean())) if len(mine) else None)
    whole = recall(matrix, owner)
    assert [got["all"][way][f"r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)] == pytest.approx(
        [whole[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)]
    )
    assert got["some"]["i2t"]["count"] == 7 and got["none"]["t2i"] == {
        "count": 0, **{f"r{k}{end}": None for k in (1, 5, 10) for end in ("", "_interval")},
    }  # fmt: skip
    assert "i2t" not in breakdown(groups, ranks, owner)["all"]
    low, high = got["all"]["t2i"]["r5_interval"]
    assert 0 <= low < got["all"]["t2i"]["r5"] < high <= 100


@pytest.mark.parametrize(
    ("hits", "count", "interval"),
    # computed with statsmodels.stats.proportion.proportion_confint(method="wilson")
    [(81, 263, (0.25528, 0.36621)), (15, 148, (0.06235, 0.16055)), (0, 20, (0.0, 0.16113)), (29, 29, (0.88302, 1.0))],
)
def test_wilson(hits: int, count: int, interval: tuple[float, float]) -> None:
    assert wilson(hits, count) == pytest.approx(interval, abs=2e-4)


def test_the_table() -> None:
    row = {"count": 4, "r1": 50.0, "r1_interval": [15.0, 85.0], "r5": 75.0, "r10": 100.0}
    empty = {"count": 0, "r1": None}
    both, one = {"t2i": row, "i2t": row}, {"t2i": row}
    rows = {"a": {"words": {"colour": both, "size": {"t2i": empty}}}, "b": {"words": {"colour": one}}}
    lines = format_breakdowns(rows).splitlines()
    assert len(lines) == 3 and lines[1].split() == ["a", "colour", *(2 * ["4", "50.0", "15.0-85.0", "75.0", "100.0"])]
    assert lines[2].split()[-5:] == ["-"] * 5
