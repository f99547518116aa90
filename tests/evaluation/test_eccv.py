"""ECCV Caption through its package: planted and random rankings against our own figures, and data that are not its."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from coder_plugin.data import open_source
from coder_plugin.data.item import Item
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import coco, eccv
from coder_plugin.evaluation.multi_positive import Scores
from tests.evaluation import coco_made


@pytest.fixture(scope="module")
def metrics() -> Any:
    pytest.importorskip("eccv_caption", reason="the extra eccv is not installed")
    return eccv.load()


@pytest.fixture(scope="module")
def benchmark(metrics: Any) -> coco.Benchmark:
    return eccv.benchmark(metrics)


class Case(NamedTuple):
    """Vectors of the images and captions that a package lists, and our figures of them."""

    metrics: Any
    numbers: coco.Numbers
    images: torch.Tensor
    texts: torch.Tensor
    found: dict[str, Any]


def case_of(metrics: Any) -> Case:
    listed = eccv.benchmark(metrics)
    captions = list(listed.order or ())
    place = {image: number for number, image in enumerate(dict.fromkeys(listed.image_of[each] for each in captions))}
    numbers = coco.Numbers(list(place), captions, torch.arange(len(captions)))
    owner = torch.tensor([place[listed.image_of[caption]] for caption in captions])
    images, texts = coco_made.vectors(owner, len(place), noise=0.3)
    return Case(metrics, numbers, images, texts, eccv.eccv_caption(Scores(images, texts), numbers, metrics))


@pytest.fixture(scope="module")
def whole(metrics: Any) -> Case:
    return case_of(metrics)


@pytest.fixture(scope="module")
def part(metrics: Any) -> Case:
    """Every tenth image with its captions; positives that are not among these are missed."""
    less = copy.copy(metrics)
    image_of = {caption: images[0] for caption, images in metrics.coco_gts["t2i"].items()}
    images = {*[*dict.fromkeys(image_of[caption] for caption in metrics.coco_ids.tolist())][::10]}
    less.coco_ids = np.array([caption for caption in metrics.coco_ids if image_of[int(caption)] in images])
    captions = {*less.coco_ids.tolist()}
    for name in ("coco_gts", "cxc_gts", "eccv_gts"):
        truths = getattr(metrics, name)
        kept = {
            way: {query: right for query, right in truths[way].items() if query in queries and candidates & {*right}}
            for way, queries, candidates in (("i2t", images, captions), ("t2i", captions, images))
        }
        setattr(less, name, kept)
    return case_of(less)


def ranked_lists(matrix: torch.Tensor, queries: list[int], candidates: list[int], k: int) -> dict[int, list[int]]:
    """The first k candidates of each query, by id, as the package takes them."""
    rows = matrix.topk(k, dim=1).indices.tolist()
    return {query: [candidates[place] for place in row] for query, row in zip(queries, rows, strict=True)}


@pytest.mark.parametrize("kind", ["part", pytest.param("whole", marks=pytest.mark.slow)])
def test_the_figures_are_the_packages(kind: str, request: pytest.FixtureRequest) -> None:
    """Also of ECCV Caption's two positives beyond the 25,000 captions, which count as missed."""
    metrics, numbers, images, texts, measured = request.getfixturevalue(kind)
    matrix = images @ texts.T
    ids = numbers.images, numbers.captions
    expected: dict[str, Any] = {}
    first = ranked_lists(matrix, *ids, 10), ranked_lists(matrix.T, *ids[::-1], 10)
    deep = []  # of ECCV Caption's queries
    for scores, queries, candidates, truth in zip((matrix, matrix.T), ids, ids[::-1], ("i2t", "t2i"), strict=True):
        rows = [row for row, query in enumerate(queries) if query in metrics.eccv_gts[truth]]
        deep.append(ranked_lists(scores[rows], [queries[row] for row in rows], candidates, 200))
    in_folds: tuple[dict[int, list[int]], dict[int, list[int]]] = {}, {}
    size = len(images) // 5
    for fold in range(5):
        rows, columns = slice(size * fold, size * fold + size), slice(5 * size * fold, 5 * size * (fold + 1))
        part, sides = matrix[rows, columns], (ids[0][rows], ids[1][columns])
        in_folds[0].update(ranked_lists(part, *sides, 10)), in_folds[1].update(ranked_lists(part.T, *sides[::-1], 10))
    for targets, lists in (
        (["eccv_map_at_r", "eccv_rprecision"], deep),
        (["eccv_recalls", "cxc_recalls", "coco_5k_recalls"], first),
        (["coco_1k_recalls"], in_folds),
    ):
        expected.update(metrics.compute_all_metrics(*lists, target_metrics=targets, Ks=(1, 5, 10), verbose=False))
    got = {
        (f"{truth}_{key}".replace("r_precision", "rprecision"), way): value
        for truth, ways in measured.items()
        for way, row in ways.items()
        for key, value in row.items()
    }
    assert got.keys() == {(key, way) for key, ways in expected.items() for way in ways} and len(got) == 28
    for (key, way), value in got.items():
        tolerance = 0.021 if key.startswith("coco") else 1e-6  # a tie by rounding in another tile
        assert value == pytest.approx(100 * float(expected[key][way]), abs=tolerance), (key, way)
    assert 1 < got["eccv_map_at_r", "i2t"] < 99 and got["cxc_r1", "t2i"] > got["coco_5k_r1", "t2i"] - 1


@pytest.mark.slow
def test_the_order_of_the_data_does_not_matter(whole: Case) -> None:
    """Folds are the package's, and a caption that the benchmark does not have is no candidate."""
    metrics, numbers, images, texts, measured = whole
    rng = torch.Generator().manual_seed(1)
    rows, columns = torch.randperm(5000, generator=rng), torch.randperm(25_000, generator=rng)
    moved = coco.Numbers(
        [numbers.images[row] for row in rows], [numbers.captions[column] for column in columns], torch.arange(1, 25_001)
    )
    got = eccv.eccv_caption(Scores(images[rows], torch.cat([images[:1] * 9, texts[columns]])), moved, metrics)
    for truth, ways in got.items():
        for way, row in ways.items():
            assert row == pytest.approx(measured[truth][way], abs=0.021)


def test_the_data_sets_own_numbers(tmp_path: Path, benchmark: coco.Benchmark) -> None:
    """A sixth caption is no candidate, and an order of its own is kept."""
    order = list(benchmark.order)[::-1]
    extra = {10**7: benchmark.image_of[order[0]]}
    file = coco_made.write_karpathy(tmp_path / "coco.json", benchmark.image_of, order, extra=extra)
    source = open_source(file, split="test", pictures=False)
    found = coco.coco_numbers((item for _, item in source.items()), benchmark)
    items = [item for _, item in source.items()]
    image_ids = torch.tensor([item.image_id for item in items])
    owner = torch.repeat_interleave(torch.arange(5000), torch.tensor([len(item.captions) for item in items]))
    got = coco.of_encoded(found, image_ids, owner, "it")
    assert got.captions == order and len(got.texts) == 25_000 and 5 not in got.texts.tolist()
    texts = [caption for item in items for caption in item.captions]
    assert all(texts[place] == f"caption {number}" for place, number in zip(got.texts.tolist(), got.captions, strict=True))
    assert [benchmark.image_of[number] for number in got.captions[::5]] == got.images
    with pytest.raises(CoderError, match="3 of them could not be read"):
        coco.of_encoded(found, image_ids[3:], owner[16:] - 3, "it")


def items_of(benchmark: coco.Benchmark, *, named: bool = True, key: str = "{}") -> list[Item]:
    captions: dict[int, list[int]] = {}
    for caption in benchmark.order or ():
        captions.setdefault(benchmark.image_of[caption], []).append(caption)
    items = []
    for place, (image, own) in enumerate(captions.items()):
        texts = tuple(map(str, own))
        items.append(Item(key.format(image), texts, lambda: None, (str(place),), caption_names=texts if named else ()))
    return items


def test_captions_without_numbers_are_in_karpathys_order(benchmark: coco.Benchmark, caplog: pytest.LogCaptureFixture) -> None:
    items = items_of(benchmark, named=False, key="val2014/COCO_val2014_{:012d}.jpg")
    with caplog.at_level(logging.WARNING):
        got = coco.coco_numbers(items, benchmark)
    assert got == coco.coco_numbers(items_of(benchmark, key="val2014/COCO_val2014_{:012d}.jpg"), benchmark)
    assert "order of Karpathy's file" in caplog.text
    with pytest.raises(CoderError, match="these data have none"):
        coco.coco_numbers(items[::-1], benchmark)


def test_other_data(benchmark: coco.Benchmark) -> None:
    items = items_of(benchmark)

    def named(item: Item, *names: str | None) -> Item:
        return dataclasses.replace(item, caption_names=names)

    five = [str(number) for number in list(benchmark.order or ())[:5]]
    for wrong, match in (
        ([], "none of the 0 images"),
        ([Item(f"x{n}", ("a",), lambda: None) for n in range(5000)], "none of the 5000 images, such as 'x0'"),
        (items[:1000], "5,000 images, and the data have 1,000"),
        ([*items[1:], items[1]], "have 4,999"),
        ([*items[1:], Item("17", ("a",), lambda: None, ("x",))], "have 4,999 of them, and '17' is none"),
        ([*items, Item("17", ("a",), lambda: None, ("x",))], "have 5,000 of them, and '17' is none, in 5,001 images"),
        ([named(items[0], *five[:4], None), *items[1:]], "1 of 25000 captions have no number"),
        ([named(items[0], *five[:4], "38"), *items[1:]], "captions belong to other images .* such as 38"),
        ([named(items[0], *five[:4], "99999999"), *items[1:]], "25,000 captions, and the data have 24,999"),
        ([named(items[0], *five[:4], five[0]), *items[1:]], "have 24,999 of them"),
    ):
        with pytest.raises(CoderError, match=match):
            coco.coco_numbers(wrong, benchmark)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(CoderError, match=r"pip install .+\[eccv\]"):
        eccv.load()


def test_the_table(part: Case) -> None:
    lines = eccv.format_eccv({"a": part.found}).splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert f"{part.found['eccv']['t2i']['map_at_r']:.1f}" in lines[1] and "-" in lines[2]
    assert np.isfinite([float(cell) for cell in lines[1].split()[3:]]).all()
