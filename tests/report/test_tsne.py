"""Points of concepts, what is measured of them, and the figure."""

from __future__ import annotations

import builtins
import math

import numpy as np
import pytest
import torch

from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.report import tsne as module
from coder_plugin.report.alignment import Aligner
from coder_plugin.report.tsne import Points, collect_points, measure_points, plot_tsne
from tests import region_model
from tests.training import region_data

RECORDS = list(region_data.records("dev"))


@pytest.fixture(scope="module", autouse=True)
def sklearn():
    pytest.importorskip("sklearn", reason='t-SNE needs scikit-learn: pip install "coder-plugin[report]"')


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    model = region_model.make(word_dim=16, context_length=12)
    return Encoder(model, model.tokenizer(), model.transform(), device=torch.device("cpu"), workers=0)


def source(count: int | None = None, *, broken: int = -1) -> ItemSource:
    def load(number: int):
        if number == broken:
            raise OSError("gone")
        return RECORDS[number].regions

    chosen = RECORDS[:count]
    return ItemSource([Item(r.name, r.captions, lambda n=n: load(n)) for n, r in enumerate(chosen)], name="made")


def placed(points: Points, seed: int = 0) -> np.ndarray:
    return module.tsne(np.concatenate([points.words, points.regions]), seed=seed)


def unit(rows: list[list[float]]) -> np.ndarray:
    array = np.array(rows, np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def points(seed: int = 0, *, spread: float = 0.3, concepts: int = 3, each: int = 6, dim: int = 8) -> Points:
    """Concepts around an axis each; the smaller the spread, the nearer."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(concepts), each)
    around = [unit(np.eye(dim)[labels] + spread * rng.standard_normal((len(labels), dim))) for _ in range(2)]
    return Points(tuple("dog water snow grass".split()[:concepts]), labels, *around)


def test_gap_by_hand() -> None:
    """Own pairs do not count; regions of other concepts count against."""
    east, north, north_east = [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]
    words, regions = unit([east, east, north, north]), unit([east, north_east, north, north])
    gaps = module.concept_gaps(Points(("a", "b"), np.array([0, 0, 1, 1]), words, regions))
    half = math.sqrt(0.5)
    assert gaps["a"] == pytest.approx((half + 1) / 2 - 0, abs=1e-6)
    assert gaps["b"] == pytest.approx(1 - (0 + half) / 2, abs=1e-6)


def test_numbers_tell_aligned_concepts() -> None:
    near, far = measure_points(points(spread=0.1)), measure_points(points(spread=2.0))
    assert near["gap"] > 0.8 > far["gap"] and near["silhouette"] > 0.8 > far["silhouette"]
    assert near["counts"] == {"dog": 6, "water": 6, "snow": 6}
    assert near["gap"] == pytest.approx(np.mean(list(near["gaps"].values())))
    mixed = points(spread=0.1)  # words of one concept at the regions of the next: words alone are as tight as before
    mixed = Points(mixed.concepts, mixed.labels, mixed.words, np.roll(mixed.regions, 6, axis=0))
    assert measure_points(mixed)["gap"] < 0 > measure_points(mixed)["silhouette"]


@pytest.mark.parametrize("labels", [[], [0, 0, 0], [0, 0, 1]])
def test_too_few_to_compare(labels: list[int]) -> None:
    vectors = np.ones((len(labels), 2))
    with pytest.raises(CoderError, match="two"):
        Points(("a", "b")[: len(set(labels))], np.array(labels, np.int64), vectors, vectors)


def test_collected_are_the_models_words_and_regions(encoder: Encoder) -> None:
    found = collect_points(encoder, source(), ["dog", "cat", "man"], per_concept=3)
    assert found.concepts == ("dog", "cat", "man") and found.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    np.testing.assert_allclose(np.linalg.norm(found.words, axis=1), 1, atol=1e-5)
    aligner = Aligner(encoder)
    places = [(concept, n) for concept in found.concepts for n in _holders(concept)[:3]]
    for row, (concept, number) in enumerate(places):
        caption = next(each for each in RECORDS[number].captions if concept in each.split())
        with aligner.evaluating():
            seen, read = aligner.describe_image(source()._items[number]), aligner.describe_caption(caption)
            place = [word.text for word in read.words].index(concept)
            region = aligner.compare(read, seen)[place].argmax()
        np.testing.assert_allclose(
            found.words[row], torch.nn.functional.normalize(read.vectors[place], dim=0), atol=1e-5
        )
        np.testing.assert_allclose(
            found.regions[row], torch.nn.functional.normalize(seen.regions[region], dim=0), atol=1e-5
        )


def _holders(concept: str) -> list[int]:
    return [n for n, record in enumerate(RECORDS) if concept in record.captions[0].split()]


def test_models_side_by_side(tmp_path, monkeypatch) -> None:
    matplotlib = True
    kept = []
    monkeypatch.setattr(
        module, "new_figure", lambda *size, make=module.new_figure: kept.append(make(*size)) or kept[-1]
    )
    rows = {"before": points(spread=2.0), "after/$x": points(1, spread=0.1, concepts=2)}
    measured = plot_tsne(rows, tmp_path / "tsne.png")
    assert measured == {name: measure_points(each) for name, each in rows.items()}
    [figure] = kept
    for axes, (name, each) in zip(figure.axes, rows.items(), strict=True):
        regions, words = axes.collections[::2], axes.collections[1::2]
        assert len(words) == len(regions) == len(each.concepts)
        shown = np.concatenate([part.get_offsets() for part in (*words, *regions)])
        np.testing.assert_allclose(shown, placed(each), atol=1e-5)  # concepts are in the order of the points
        for word, region in zip(words, regions, strict=True):
            np.testing.assert_array_equal(word.get_facecolors()[0], region.get_edgecolors()[0])
        assert f"gap {measured[name]['gap']:.3f}" in axes.get_title()
    colours = [part.get_facecolors()[0].tolist() for part in figure.axes[0].collections[1::2]]
    assert (
        colours[:2]
        == [part.get_facecolors()[0].tolist() for part in figure.axes[1].collections[1::2]]
        != [colours[0]] * 2
    )
    assert matplotlib and [text.get_text() for text in figure.legends[0].get_texts()] == ["dog", "water", "snow"]
    with pytest.raises(CoderError, match="no model"):
        plot_tsne({}, tmp_path / "none.png")


def test_without_sklearn(tmp_path, monkeypatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest):
        if name.split(".")[0] == "sklearn":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CoderError, match=r"scikit-learn: pip install .+\[report\]"):
        placed(points())
    with pytest.raises(CoderError, match=r"pip install .+\[report\]"):
        plot_tsne({"a": points()}, tmp_path / "tsne.png")
    assert not (tmp_path / "tsne.png").exists()
