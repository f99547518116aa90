"""Mining hard negatives: every filter against a slow reference in float64, in blocks, repeated, and as a table."""

from __future__ import annotations

import csv
import doctest
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin.data import scenes
from coder_plugin.errors import CoderError
from coder_plugin.search import mine, mining_options
from coder_plugin.search.index import Index
from coder_plugin.search.mine import Miner, mine_negatives
from coder_plugin.search.mining_options import MiningOptions
from coder_plugin.search.vectors import Vectors
from tests.search.made import plant

#: Lets everything pass.
LOOSE: dict[str, Any] = {"absolute_margin": -1e9, "max_similarity": 1.0}


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text).lower().split())


def reference(index: Index, options: MiningOptions) -> tuple[list[tuple[Any, ...]], Counter[str]]:
    """The table's rows, and what was dropped, by loops over all pairs."""
    count, total = index.note["images"], index.note["captions"]
    images = index.vectors["images"].gather(range(count)).astype(np.float64)
    captions = index.vectors["captions"].gather(range(total))[:, 0].astype(np.float64)
    listed, image_rows = index.records.captions(range(total)), index.records.images(range(count))
    owner_ids = [image_rows[each.image].image_id for each in listed]
    rows, dropped = [], Counter({name: 0 for name in mine.FILTERS})
    for image in image_rows:
        own = [row for row in range(total) if owner_ids[row] == image.image_id]
        if not own:
            continue
        score = {row: max(float(view @ captions[row]) for view in images[image.row]) for row in range(total)}
        pick = min if options.margin_from == "min" else max
        positive = pick(own, key=lambda row: score[row])
        others = sorted((row for row in range(total) if row not in own), key=lambda row: (-score[row], row))
        taken: list[str] = []
        for rank, row in enumerate(others[: options.range_max], 1):
            if rank <= options.range_min:
                continue
            text = plain(listed[row].text)
            cosine = max(
                round(float(captions[row] @ captions[each] / np.linalg.norm(captions[row]) / np.linalg.norm(captions[each])), 6)
                for each in own
            )
            too_high = False
            if options.absolute_margin is not None:
                too_high |= score[row] > score[positive] - options.absolute_margin
            if options.relative_margin is not None:
                too_high |= score[row] > score[positive] - options.relative_margin * abs(score[positive])
            if text in {plain(listed[each].text) for each in own}:
                dropped["same text"] += 1
            elif too_high:
                dropped["margin"] += 1
            elif cosine >= options.max_similarity:
                dropped["similar caption"] += 1
            elif text in taken:
                dropped["repeated text"] += 1
            else:
                taken.append(text)
                if len(taken) <= options.num_negatives:
                    of = listed[row].text, image_rows[listed[row].image].key, score[row]
                    rows.append((image.key, listed[positive].text, score[positive], *of, rank, cosine))
    return rows, dropped


def assert_rows(table: list[dict[str, str]], expected: list[tuple[Any, ...]]) -> None:
    assert [(row["key"], row["caption"], row["negative"], row["negative_key"], int(row["rank"])) for row in table] == [
        (key, caption, negative, of, rank) for key, caption, _, negative, of, _, rank, _ in expected
    ]
    for name, place in (("score", 2), ("negative_score", 5), ("similarity", 7)):
        values = [float(row[name]) for row in table]
        np.testing.assert_allclose(values, [row[place] for row in expected], atol=2e-6)


@given(data=st.data(), seed=st.integers(0, 2**31))
def test_the_table_is_the_reference(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, views, size = rng.integers(2, 14), rng.integers(1, 4), rng.integers(2, 9)
    owners = np.sort(rng.integers(0, count, rng.integers(count, 5 * count))).tolist()
    shared = rng.standard_normal(size)  # so that captions resemble each other
    captions = rng.standard_normal((len(owners), size)) + shared
    words = ["a dog", "A dog.", "a cat", "two cats", "snow"]
    texts = [words[rng.integers(5)] if rng.random() < 0.4 else f"text {row}" for row in range(len(owners))]
    keys = [f"{0 if row == 1 and rng.random() < 0.3 else row}.jpg" for row in range(count)]  # at times one image twice
    index = plant(
        tmp_path_factory.mktemp("one") / "index", rng.standard_normal((count, views, size)) + shared, captions, owners,
        texts=texts, keys=keys,
    )  # fmt: skip
    range_min = data.draw(st.integers(0, 3))
    options = {
        "num_negatives": (wanted := data.draw(st.integers(1, 4))),
        "range_min": range_min,
        "range_max": range_min + wanted + data.draw(st.integers(0, 60)),
        "absolute_margin": data.draw(st.sampled_from([None, 0.0, 0.5, -1.0])),
        "relative_margin": data.draw(st.sampled_from([None, 0.0, 0.3, -0.5])),
        "margin_from": data.draw(st.sampled_from(["min", "max"])),
        "max_similarity": data.draw(st.sampled_from([0.3, 0.8, 1.0])),
    }
    path = tmp_path_factory.mktemp("table") / "negatives.tsv"
    summary = mine_negatives(index, path, **options)
    expected, dropped = reference(index, MiningOptions(**options))
    assert_rows(rows_of(path), expected)
    assert summary.dropped == dropped and summary.negatives == len(expected)
    captioned = {keys[owner] for owner in owners}
    assert summary.without_captions == sum(key not in captioned for key in keys)
    assert sum(summary.by_count.values()) + summary.without_captions == count == summary.images


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Four images; the scores of the first are the first coordinates of the captions."""
    images = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    captions = [
        [0.9, 0.1, 0], [0.6, 0, 0.8], [0.58, -0.8, 0.1], [0.55, 0.8, 0], [0.5, 0.8, 0], [0.4, 0, -0.9], [0.95, 0.3, 0],
    ]  # fmt: skip
    texts = ["a red dog", "a dog", "Two cats!", "a red  DOG.", "snow", "two cats", "a bird"]
    return plant(tmp_path / "index", images, captions, [0, 0, 1, 1, 2, 3, 3], texts=texts)


def first(index: Index, **options: Any) -> list[tuple[str, int]]:
    [mined] = Miner(index, MiningOptions(**{**LOOSE, **options})).mine([0])
    return [(each.caption.text, each.rank) for each in mined.negatives]


def test_captions_of_the_image_its_texts_and_repeated_texts_are_no_negatives(index: Index) -> None:
    assert first(index) == [("a bird", 1), ("Two cats!", 2), ("snow", 4)]
    [mined] = Miner(index, MiningOptions(**LOOSE)).mine([0])
    assert mined.dropped == {"same text": 1, "margin": 0, "similar caption": 0, "repeated text": 1}
    assert mined.candidates == 5 and mined.image.key == "0.jpg" and [each.key for each in mined.negatives][2] == "2.jpg"
    assert first(index, num_negatives=2) == [("a bird", 1), ("Two cats!", 2)]


def test_margins_count_from_the_highest_or_the_lowest_positive(index: Index) -> None:
    lowest: dict[str, Any] = {"margin_from": "min"}  # 0.6
    assert first(index, **lowest, absolute_margin=0.0) == [("Two cats!", 2), ("snow", 4)]
    assert first(index, **lowest, absolute_margin=0.05) == [("snow", 4), ("two cats", 5)]
    assert first(index, **lowest, absolute_margin=-0.4) == [("a bird", 1), ("Two cats!", 2), ("snow", 4)]  # 0.95 < 1.0
    assert first(index, **lowest, absolute_margin=None, relative_margin=0.2) == [("two cats", 5)]  # up to 0.48
    assert first(index, **lowest, absolute_margin=0.05, relative_margin=0.2) == [("two cats", 5)]  # both
    assert first(index, **lowest, absolute_margin=0.11, relative_margin=0.1) == [("two cats", 5)]
    assert first(index, absolute_margin=0.0) == [("Two cats!", 2), ("snow", 4)]  # below 0.9
    assert first(index, absolute_margin=-0.06)[0] == ("a bird", 1)
    [mined] = Miner(index, MiningOptions()).mine([0])
    assert (mined.positive.text, round(mined.score, 6)) == ("a red dog", 0.9)
    [mined] = Miner(index, MiningOptions(margin_from="min")).mine([0])
    assert (mined.positive.text, round(mined.score, 6)) == ("a dog", 0.6)


def test_a_relative_margin_is_below_a_negative_positive_too(tmp_path: Path) -> None:
    index = plant(tmp_path / "index", [[1.0, 0], [0, 1]], [[-0.5, 0], [-0.52, 1], [-0.56, 1]], [0, 1, 1])
    [mined] = Miner(index, MiningOptions(relative_margin=0.1, max_similarity=1.0)).mine([0])
    assert [each.caption.row for each in mined.negatives] == [2]  # up to -0.55


def test_captions_similar_to_one_of_the_image_are_no_negatives(index: Index) -> None:
    [mined] = Miner(index, MiningOptions(**{**LOOSE, "max_similarity": 0.9})).mine([0])
    assert [each.caption.text for each in mined.negatives] == ["Two cats!", "snow", "two cats"][:2]
    assert mined.dropped["similar caption"] == 1
    own, other = np.array([0.9, 0.1, 0]), np.array([0.58, -0.8, 0.1])
    expected = own @ other / np.linalg.norm(own) / np.linalg.norm(other)
    assert mined.negatives[0].similarity == pytest.approx(expected, abs=2e-6)
    assert mined.own_similarity == pytest.approx(0.54 / np.sqrt(0.82), abs=2e-6)
    assert first(index, max_similarity=0.5) == [("Two cats!", 2)]  # snow is 0.57 from "a red dog"


def random_index(folder: Path, count: int = 70, factory: str = "Flat", views: int = 1) -> Index:
    rng = np.random.default_rng(7)
    owners = np.sort(np.concatenate([np.arange(count), rng.integers(0, count, 2 * count), [3] * 40])).tolist()
    shared = rng.standard_normal(16)
    images = rng.standard_normal((count, views, 16)) + shared
    captions = images[owners, 0] + rng.standard_normal((len(owners), 16))
    return plant(folder, images, captions, owners, factory=factory)


def test_blocks_are_the_whole_and_two_runs_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = random_index(tmp_path / "index", views=2)
    options: dict[str, Any] = {"range_max": 60, "num_negatives": 4, "relative_margin": 0.3, "margin_from": "max"}
    whole = mine_negatives(index, tmp_path / "whole.tsv", **options)
    assert mine_negatives(index, tmp_path / "again.tsv", **options) == whole
    asked: list[int] = []
    real = Vectors.search

    def search(self: Any, queries: np.ndarray, k: int) -> Any:
        asked.append(len(queries) * min(k, self.items))
        return real(self, queries, k)

    monkeypatch.setattr(Vectors, "search", search)
    monkeypatch.setattr(mine, "BLOCK", 16)
    monkeypatch.setattr(mine, "RESULTS", 400)
    monkeypatch.setattr(mine, "_CHUNK", 11)
    assert mine_negatives(index, tmp_path / "blocks.tsv", **options) == whole
    assert len(asked) > 10 and max(asked) <= 400
    first, *others = [(tmp_path / f"{name}.tsv").read_bytes() for name in ("whole", "again", "blocks")]
    assert others == [first, first] and first.count(b"\n") == whole.negatives + 1 > 150
    assert_rows(rows_of(tmp_path / "whole.tsv"), reference(index, MiningOptions(**options))[0])


def test_random_sampling_draws_from_what_passes_by_seed_and_key(tmp_path: Path) -> None:
    index = random_index(tmp_path / "index")
    options: dict[str, Any] = {"range_max": 40, "relative_margin": 0.2, "num_negatives": 3}
    passing = {each.image.key: each for each in Miner(index, MiningOptions(**{**options, "num_negatives": 40})).mine(range(70))}
    tables = {}
    for seed in (0, 1):
        path = tmp_path / f"{seed}.tsv"
        drawn = mine_negatives(index, path, **options, sampling_strategy="random", seed=seed)
        tables[seed] = rows_of(path)
        by_key = Counter(row["key"] for row in tables[seed])
        assert by_key == {key: count for key, each in passing.items() if (count := min(3, len(each.negatives)))}
        assert drawn.negatives == len(tables[seed])
    for row in tables[0]:
        ranks = {each.rank: each.caption.text for each in passing[row["key"]].negatives}
        assert ranks[int(row["rank"])] == row["negative"]
    assert tables[0] != tables[1]
    again = Miner(index, MiningOptions(**options, sampling_strategy="random")).mine([12])  # alone: the same
    assert [each.caption.text for each in again[0].negatives] == [
        row["negative"] for row in tables[0] if row["key"] == "12.jpg"
    ]
    highest = {(key, each.negatives[0].rank) for key, each in passing.items() if each.negatives}
    assert len(highest & {(row["key"], int(row["rank"])) for row in tables[0]}) < len(highest) - 10  # not the top
    ordered = [int(row["rank"]) for row in tables[0] if row["key"] == "12.jpg"]
    assert ordered == sorted(ordered)


def test_a_failure_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, path = random_index(tmp_path / "index"), tmp_path / "negatives.tsv"
    mine_negatives(index, path)
    before = path.read_bytes()
    monkeypatch.setattr(mine, "BLOCK", 32)
    real = Miner.mine
    monkeypatch.setattr(Miner, "mine", lambda self, rows: real(self, rows) if 0 in rows else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mine_negatives(index, path, num_negatives=1)
    assert path.read_bytes() == before and not list(tmp_path.glob(".*.writing"))


def test_an_index_without_captions_is_refused(index: Index) -> None:
    del index.vectors["captions"]
    with pytest.raises(CoderError, match="has no vectors of captions: make it from captioned images, with --what both"):
        Miner(index, MiningOptions())


@pytest.mark.parametrize("module", [mine, mining_options], ids=lambda module: module.__name__)
def test_the_examples_run(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenes.DEFAULT_COUNTS, "val", 20)  # the data of one of them
    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_negatives": 0}, "--num-negatives must be at least 1, got 0"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"margin_from": "mean"}, "--margin-from is 'mean'; allowed: max, min"),
        ({"relative_margin": "a"}, "--relative-margin is 'a'; it must be a number"),
    ],
)
def test_values_that_are_not_allowed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CoderError, match=re.escape(said)):
        MiningOptions(**options)
    assert MiningOptions(relative_margin=np.float64(0.1)).relative_margin == 0.1
