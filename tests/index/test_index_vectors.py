"""FAISS behind our names: exact against brute force, with ties, several embeddings, and what FAISS refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coder_plugin.errors import CoderError
from coder_plugin.index import vectors
from coder_plugin.index.vectors import Vectors


def made(path: Path, array: np.ndarray, factory: str = "Flat", **options) -> Vectors:
    vectors.write(path, array, factory)
    return Vectors(path, items=len(array), views=array.shape[1], dimensions=array.shape[2], **options)


def brute_force(array: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Best embedding of each item, falling, equal ones by row."""
    scores = np.einsum("qd,nvd->qnv", queries, array).max(2)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), order


def test_faiss_that_is_absent_or_incomplete_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("faiss.index_factory")  # what is left if one of faiss-cpu and faiss-gpu is uninstalled
    with pytest.raises(CoderError, match="not completely .*index_factory.*: pip install .* faiss-cpu"):
        vectors.check_factory("Flat", 4)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(CoderError, match=r"FAISS is not installed.*pip install"):
        vectors.check_factory("Flat", 4)


def test_faiss_for_cpus_over_that_for_gpus_is_said_once(tmp_path, monkeypatch, caplog) -> None:
    installed = {"faiss-gpu": "1.15"}

    def version(name: str) -> str:
        if name not in installed:
            raise vectors.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vectors.metadata, "version", version)
    monkeypatch.delattr("faiss.StandardGpuResources", raising=False)
    array = np.ones((2, 1, 4), np.float32)
    for gpu, present, expected in [(False, "1.15", 0), (True, None, 0), (True, "1.15", 1), (True, "1.15", 1)]:
        installed.clear()
        installed.update({"faiss-gpu": present} if present else {})
        if not caplog.records:
            vectors.warn_of_overwritten.cache_clear()
        made(tmp_path / "x.faiss", array, gpu=gpu)
        assert [record.message.endswith("--no-deps faiss-gpu") for record in caplog.records] == [True] * expected
    monkeypatch.setattr("faiss.StandardGpuResources", object, raising=False)
    vectors.warn_of_overwritten.cache_clear()
    vectors.warn_of_overwritten()
    vectors.warn_of_overwritten.cache_clear()
    assert len(caplog.records) == 1


@settings(max_examples=60, deadline=None)
@given(
    items=st.integers(1, 40),
    views=st.integers(1, 3),
    dimensions=st.integers(1, 9),
    queries=st.integers(1, 30),  # FAISS has another path from 20 queries on
    k=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_a_search_is_brute_force(tmp_path_factory, items, views, dimensions, queries, k, seed) -> None:
    rng = np.random.default_rng(seed)
    array = rng.integers(-2, 3, (items, views, dimensions)).astype(np.float32)  # whole numbers: exact products, many ties
    asked = rng.integers(-2, 3, (queries, dimensions)).astype(np.float32)
    index = made(tmp_path_factory.mktemp("one") / "x.faiss", array)
    scores, rows = index.search(asked, k)
    best, expected = brute_force(array, asked, min(k, items))
    np.testing.assert_array_equal(scores, best)
    if views == 1 and k < items:  # which of those that tie at the end are kept is FAISS's choice
        for row, wanted, score in zip(rows, expected, best, strict=True):
            inside = score > score[-1]
            np.testing.assert_array_equal(row[inside], wanted[inside])
    elif views == 1:
        np.testing.assert_array_equal(rows, expected)
    assert all(len(set(row.tolist())) == len(row) for row in rows)
    np.testing.assert_array_equal(np.take_along_axis(np.einsum("qd,nvd->qnv", asked, array).max(2), rows, 1), scores)


@pytest.mark.parametrize("queries", [1, 25])
def test_real_numbers_of_a_larger_set(tmp_path: Path, queries: int) -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((3000, 1, 96), dtype=np.float32)
    asked = rng.standard_normal((queries, 96), dtype=np.float32)
    scores, rows = made(tmp_path / "x.faiss", array).search(asked, 20)
    best, expected = brute_force(array, asked, 20)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(scores, best, rtol=1e-5)


@pytest.mark.slow
def test_a_hundred_thousand_of_2048_dimensions_are_brute_force(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((100_000, 1, 2048), dtype=np.float32)
    array /= np.linalg.norm(array, axis=-1, keepdims=True)
    array[70_000:70_010] = array[:10]  # duplicates tie
    asked = np.concatenate([array[:10, 0], rng.standard_normal((30, 2048), dtype=np.float32)])
    index = made(tmp_path / "x.faiss", array)
    best, expected = brute_force(array, asked, 100)
    for some in (slice(0, 1), slice(0, 40)):  # one by one and in a batch
        scores, rows = index.search(asked[some], 100)
        np.testing.assert_allclose(scores, best[some], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(rows, expected[some])


@pytest.mark.parametrize("factory, parameters", [("HNSW16", "efSearch=200"), ("IVF8,Flat", "nprobe=8"), ("PQ8x4", None)])
def test_approximate_indexes_find_most(tmp_path: Path, factory: str, parameters: str | None) -> None:
    rng = np.random.default_rng(1)
    array = rng.standard_normal((800, 1, 16), dtype=np.float32)
    index = made(tmp_path / "x.faiss", array, factory, parameters=parameters)
    scores, rows = index.search(array[:50, 0], 10)
    _, expected = brute_force(array, array[:50, 0], 10)
    shared = np.mean([len(set(a) & set(b)) for a, b in zip(rows.tolist(), expected.tolist(), strict=True)])
    assert shared >= (9 if parameters else 2)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_what_an_approximate_index_does_not_find_is_minus_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    array = rng.standard_normal((400, 1, 8), dtype=np.float32)
    scores, rows = made(tmp_path / "x.faiss", array, "IVF64,Flat", parameters="nprobe=1").search(array[:5, 0], 300)
    assert (rows == -1).any() and (rows[:, 0] >= 0).all()
    assert np.isneginf(scores[rows == -1]).all() and np.isfinite(scores[rows >= 0]).all()


def test_a_vector_comes_back(tmp_path: Path) -> None:
    array = np.random.default_rng(3).standard_normal((7, 3, 5), dtype=np.float32)
    np.testing.assert_array_equal(made(tmp_path / "x.faiss", array).gather([4, 1]), array[[4, 1]])
    array = np.random.default_rng(3).standard_normal((99, 1, 5), dtype=np.float32)
    np.testing.assert_array_equal(made(tmp_path / "y.faiss", array, "IVF2,Flat").gather([4, 1]), array[[4, 1]])


@pytest.mark.parametrize(
    "factory, text",
    [("Flatt", "knows no index factory 'Flatt' for 8 dimensions"),
     ("IVF500,Flat", "cannot build 'IVF500,Flat' from 20 vectors"),
     ("PQ3", "PQ3")],
)
def test_refused_factories(tmp_path: Path, factory: str, text: str) -> None:
    with pytest.raises(CoderError, match=text):
        vectors.write(tmp_path / "x.faiss", np.zeros((20, 1, 8), dtype=np.float32), factory)
    assert not (tmp_path / "x.faiss").exists()


def test_refused_queries_and_files(tmp_path: Path) -> None:
    array = np.ones((4, 1, 8), dtype=np.float32)
    index = made(tmp_path / "x.faiss", array)
    for queries, text in (
        (np.ones((2, 7)), r"must be \[q, 8\], got \[2, 7\]"),
        (np.ones(8), r"must be \[q, 8\], got \[8\]"),
        (np.full((1, 8), np.nan), "not finite"),
    ):
        with pytest.raises(CoderError, match=text):
            index.search(queries, 1)
    with pytest.raises(CoderError, match="k must be at least 1, got 0"):
        index.search(np.ones((1, 8)), 0)
    with pytest.raises(CoderError, match="holds 4 vectors of 8 dimensions, expected 5 of 8"):
        Vectors(tmp_path / "x.faiss", items=5, views=1, dimensions=8)
    with pytest.raises(CoderError, match="'nprobe=3' is not valid for this index"):
        Vectors(tmp_path / "x.faiss", items=4, views=1, dimensions=8, parameters="nprobe=3")
    (tmp_path / "y.faiss").write_bytes(b"no index at all")
    with pytest.raises(CoderError, match="y.faiss is not a FAISS index"):
        Vectors(tmp_path / "y.faiss", items=4, views=1, dimensions=8)
