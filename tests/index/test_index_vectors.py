"""FAISS behind our names: exact against brute force, with ties, several embeddings, and what FAISS refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coder_plugin.errors import CoderError
from coder_plugin.index import training, vectors_file
from coder_plugin.index.vectors import Vectors


def made(path: Path, array: np.ndarray, factory: str = "Flat", *, segments: int = 1, **options) -> Vectors:
    """The vectors [N, V, D] in so many segments of one training."""
    views, dimensions = array.shape[1:]

    def sample(size: int) -> np.ndarray:
        return array.reshape(-1, dimensions)[training.sample_rows(len(array) * views, size)]

    trained = training.train(factory, dimensions, sample)
    parts = [part for part in np.array_split(array, segments) if len(part)]
    paths = [path.with_name(f"{number}-{path.name}") for number in range(len(parts))]
    for each, part in zip(paths, parts, strict=True):
        empty = None if trained is None else faiss.clone_index(trained)
        vectors_file.write(each, [part.reshape(-1, dimensions)], empty)
    return Vectors(paths, [len(part) for part in parts], views=views, dimensions=dimensions, **options)


def brute_force(array: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Best embedding of each item, falling, equal ones by row."""
    scores = np.einsum("qd,nvd->qnv", queries, array).max(2)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), order


def test_faiss_that_is_absent_or_incomplete_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("faiss.index_factory")  # what is left if one of faiss-cpu and faiss-gpu is uninstalled
    with pytest.raises(CoderError, match="not completely .*index_factory.*: pip install .* faiss-cpu"):
        vectors_file.check_factory("Flat", 4)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(CoderError, match=r"FAISS is not installed.*pip install"):
        vectors_file.check_factory("Flat", 4)


def test_faiss_for_cpus_over_that_for_gpus_is_said_once(tmp_path, monkeypatch, caplog) -> None:
    installed = {"faiss-gpu": "1.15"}

    def version(name: str) -> str:
        if name not in installed:
            raise vectors_file.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vectors_file.metadata, "version", version)
    monkeypatch.delattr("faiss.StandardGpuResources", raising=False)
    array = np.ones((2, 1, 4), np.float32)
    for gpu, present, expected in [(False, "1.15", 0), (True, None, 0), (True, "1.15", 1), (True, "1.15", 1)]:
        installed.clear()
        installed.update({"faiss-gpu": present} if present else {})
        if not caplog.records:
            vectors_file.warn_of_overwritten.cache_clear()
        made(tmp_path / "x.faiss", array, gpu=gpu)
        assert [record.message.endswith("--no-deps faiss-gpu") for record in caplog.records] == [True] * expected
    monkeypatch.setattr("faiss.StandardGpuResources", object, raising=False)
    vectors_file.warn_of_overwritten.cache_clear()
    vectors_file.warn_of_overwritten()
    vectors_file.warn_of_overwritten.cache_clear()
    assert len(caplog.records) == 1


@settings(max_examples=60, deadline=None)
@given(
    items=st.integers(1, 40),
    views=st.integers(1, 3),
    dimensions=st.integers(1, 9),
    queries=st.integers(1, 30),  # FAISS has another path from 20 queries on
    k=st.integers(1, 50),
    segments=st.integers(1, 4),
    removed=st.integers(0, 9),
    asked_rows=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_search_is_brute_force(
    tmp_path_factory, items, views, dimensions, queries, k, segments, removed, asked_rows, seed
) -> None:
    rng = np.random.default_rng(seed)
    array = rng.integers(-2, 3, (items, views, dimensions)).astype(np.float32)  # whole numbers: exact products, many ties
    asked = rng.integers(-2, 3, (queries, dimensions)).astype(np.float32)
    gone = np.sort(rng.permutation(items)[:removed])
    chosen = rng.permutation(items)[: rng.integers(0, items + 1)] if asked_rows else None
    index = made(tmp_path_factory.mktemp("one") / "x.faiss", array, segments=segments, removed=gone)
    scores, rows = index.search(asked, k, rows=chosen)
    allowed = np.setdiff1d(np.arange(items) if chosen is None else chosen, gone)
    most = min(k, len(allowed))
    assert scores.shape == rows.shape == (queries, most)
    best, expected = brute_force(array[allowed], asked, most)
    np.testing.assert_array_equal(scores, best)
    if views == 1 and k < len(allowed):  # which of those that tie at the end are kept is FAISS's choice
        for row, wanted, score in zip(rows, allowed[expected], best, strict=True):
            inside = score > score[-1]
            np.testing.assert_array_equal(row[inside], wanted[inside])
    elif views == 1:
        np.testing.assert_array_equal(rows, allowed[expected])
    assert all(len(set(row.tolist())) == len(row) for row in rows)
    assert np.isin(rows, allowed).all()
    if most:
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


@pytest.mark.parametrize("factory", ["OPQ16,IVF64,PQ16", "PQ16,RFlat"])
def test_few_vectors_are_trained_on_with_one_warning(tmp_path: Path, capfd, caplog, factory: str) -> None:
    array = np.random.default_rng(2).standard_normal((300, 1, 32), dtype=np.float32)
    index = made(tmp_path / "x.faiss", array, factory)  # a table of 64 x 16 x 256 floats would be larger than the file
    assert faiss.read_index(str(index.files[0].path)).ntotal == index.search(array[:1, 0], 300)[1].size == 300
    assert [record.getMessage() for record in caplog.records] == [
        f"{factory} is trained on 300 vectors, where FAISS advises 9,984 or more: Flat may be better"
    ]
    assert "WARNING" not in capfd.readouterr().err.replace(caplog.text, "")
    if "IVF" in factory:  # as trained by FAISS alone
        theirs = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
        theirs.train(array[:, 0])
        theirs.add(array[:, 0])
        assert index.files[0].path.read_bytes() == faiss.serialize_index(theirs).tobytes()


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
    [("Flatt", "knows no index factory 'Flatt' for 8 dimensions; .*, for example: could not parse index string Flatt$"),
     ("IVF500,Flat", "cannot train 'IVF500,Flat' on 20 vectors"),
     ("IDMap,Flat", "'IDMap,Flat' cannot be built in segments"),
     ("PCA4,NSG16,Flat", "'PCA4,NSG16,Flat' cannot be built in segments"),
     ("HNSW8_PQ4", "FAISS does not compare by inner products in 'HNSW8_PQ4'"),
     ("PCA4,HNSW8_PQ4", "FAISS does not compare by inner products in"),
     ("LSH", "'LSH' for 8 dimensions.*: it has no inner product$"),
     ("PQ3", "PQ3")],
)
def test_refused_factories(tmp_path: Path, factory: str, text: str) -> None:
    with pytest.raises(CoderError, match=text):
        made(tmp_path / "x.faiss", np.zeros((20, 1, 8), dtype=np.float32), factory)
    assert not list(tmp_path.iterdir())


def test_refused_queries_and_files(tmp_path: Path) -> None:
    array = np.ones((4, 1, 8), dtype=np.float32)
    index = made(tmp_path / "x.faiss", array)
    path = index.files[0].path
    for queries, text in (
        (np.ones((2, 7)), r"must be \[q, 8\], got \[2, 7\]"),
        (np.ones(8), r"must be \[q, 8\], got \[8\]"),
        (np.full((1, 8), np.nan), "not finite"),
    ):
        with pytest.raises(CoderError, match=text):
            index.search(queries, 1)
    with pytest.raises(CoderError, match="k must be at least 1, got 0"):
        index.search(np.ones((1, 8)), 0)
    for rows, text in (([4], "has no row 4, only 4"), ([-1], "has no row -1"), ([[1]], "must be whole"), ([0.5], "whole")):
        with pytest.raises(CoderError, match=text):
            index.search(np.ones((1, 8)), 1, rows=np.array(rows))
        with pytest.raises(CoderError, match=text):
            index.gather(np.array(rows))
    with pytest.raises(CoderError, match="holds 4 vectors of 8 dimensions, expected 5 of 8"):
        Vectors([path], [5], views=1, dimensions=8)
    with pytest.raises(CoderError, match=r"'nprobe=3' is not valid for this index \(0-x.faiss is IndexFlatIP\): IVF takes"):
        Vectors([path], [4], views=1, dimensions=8, parameters="nprobe=3")
    with pytest.raises(CoderError, match="nprobe must be 1 or more, got 0"):
        made(tmp_path / "z.faiss", np.eye(8, dtype=np.float32)[:, None], "IVF1,Flat", parameters="nprobe=0")
    (tmp_path / "y.faiss").write_bytes(b"no index at all")
    with pytest.raises(CoderError, match="y.faiss is not a FAISS index"):
        Vectors([tmp_path / "y.faiss"], [4], views=1, dimensions=8)


def test_inverted_files_that_cannot_be_searched(tmp_path: Path) -> None:
    array, path = np.random.default_rng(0).standard_normal((100, 8), dtype=np.float32), tmp_path / "x.faiss"

    def written(**fields: Any) -> None:
        index = faiss.index_factory(8, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
        index.train(array)
        index.add(array)
        index.nprobe = fields.get("nprobe", 1)
        faiss.downcast_index(index.quantizer).add(array[: fields.get("more", 0)])
        faiss.write_index(index, str(path))

    for fields, options, text in (
        ({}, {"parameters": "nprobe=0"}, "nprobe must be 1 or more, got 0"),
        ({"nprobe": 0}, {}, "nprobe must be 1 or more, got 0"),
        ({"more": 3}, {}, "its lists do not fit it"),
    ):
        written(**fields)
        with pytest.raises(CoderError, match=f"x.faiss .*{text}"):
            Vectors([path], [100], views=1, dimensions=8, gpu=False, **options)
    written()
    assert Vectors([path], [100], views=1, dimensions=8, gpu=False).search(array[:1], 1)[1].shape == (1, 1)
    content = bytearray(path.read_bytes())
    content[8:16] = (101).to_bytes(8, "little")  # vectors in all, more than the lists have
    path.write_bytes(content)
    with pytest.raises(CoderError, match="its lists lie beyond its end"):
        Vectors([path], [101], views=1, dimensions=8, gpu=False)


def test_a_flat_file_is_that_of_faiss(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((9, 1, 5), dtype=np.float32)
    flat = faiss.IndexFlatIP(5)
    flat.add(array[:, 0])
    faiss.write_index(flat, str(tmp_path / "theirs"))
    assert vectors_file.write(tmp_path / "ours", iter([array[:4, 0], array[4:, 0]]), None) == 9
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("queries", [1, 25])
def test_segments_score_as_one_index_to_the_last_bit(tmp_path: Path, queries: int) -> None:
    rng = np.random.default_rng(4)
    array, asked = rng.standard_normal((2001, 1, 37), dtype=np.float32), rng.standard_normal((queries, 37), dtype=np.float32)
    one, many = (made(tmp_path / f"{count}.faiss", array, segments=count).search(asked, 30) for count in (1, 7))
    np.testing.assert_array_equal(one[1], many[1])
    np.testing.assert_array_equal(one[0], many[0])


FACTORIES = ("Flat", "HNSW8", "IVF8,Flat", "PQ4x4", "OPQ4,IVF8,PQ4x4", "IVF8,PQ4x4fs", "SQ8", "PCA4,HNSW8", "IVF8,PQ4x4,RFlat",
             "RQ2x4", "LSQ2x4")


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("views", [1, 2])
def test_removed_and_filtered_rows(tmp_path: Path, factory: str, views: int) -> None:
    """k results without the removed ones, whatever kind of index it is; a filter of few rows finds all of them."""
    rng = np.random.default_rng(5)
    array, asked = rng.standard_normal((1000, views, 8), dtype=np.float32), rng.standard_normal((6, 8), dtype=np.float32)
    all_rows = made(tmp_path / "x.faiss", array, factory, segments=3)
    gone = np.unique(all_rows.search(asked, 30)[1])  # the best of all
    index = made(tmp_path / "x.faiss", array, factory, segments=3, removed=gone)
    scores, rows = index.search(asked, 20)
    assert rows.shape == (6, 20) and (rows >= 0).all() and not np.isin(rows, gone).any()
    assert (np.diff(scores, axis=1) <= 0).all() and all(len({*row}) == 20 for row in rows.tolist())
    few = np.concatenate([rng.choice(np.setdiff1d(np.arange(1000), gone), 9, replace=False), gone[:3]])
    found = index.search(asked, 20, rows=few)[1]
    assert [sorted(row) for row in found.tolist()] == [sorted(few[:9].tolist())] * 6
    most = np.setdiff1d(np.arange(1000), gone)[:600]
    assert np.isin(index.search(asked, 20, rows=most)[1], most).all()
    assert index.search(asked, 20, rows=gone)[1].shape == (6, 0)
    if factory in ("Flat", "SQ8", "HNSW8"):  # exact, or nearly, over what is left
        _, expected = brute_force(array[most], asked, 20)
        shared = np.isin(index.search(asked, 20, rows=most)[1], most[expected]).mean()
        assert shared == 1 if factory == "Flat" else shared > 0.8


@pytest.mark.parametrize("factory", ["PQ4x4", "RQ2x4"])
def test_filtered_searches_hold_so_many_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str) -> None:
    """Queries are searched in blocks, where an index cannot leave rows out, and find the same."""
    rng = np.random.default_rng(8)
    array, asked = rng.standard_normal((900, 1, 8), dtype=np.float32), rng.standard_normal((10, 8), dtype=np.float32)
    index = made(tmp_path / "x.faiss", array, factory)
    scores, rows = index.search(asked, 5, rows=np.arange(0, 900, 90))
    sizes, filtered = [], vectors_file._filtered
    monkeypatch.setattr(vectors_file, "_filtered", lambda *args: sizes.append(len(args[1])) or filtered(*args))
    monkeypatch.setattr(vectors_file, "_MOST_RESULTS", 3 * 900)
    again = index.search(asked, 5, rows=np.arange(0, 900, 90))
    assert sizes == [10, 3, 3, 3, 1]
    np.testing.assert_array_equal(again[1], rows)
    np.testing.assert_allclose(again[0], scores, atol=1e-5)


def test_results_depend_on_no_other_query(tmp_path: Path) -> None:
    """A query that finds too few is searched again, without the others."""
    rng = np.random.default_rng(7)
    array, asked = rng.standard_normal((2000, 1, 8), dtype=np.float32), rng.standard_normal((64, 8), dtype=np.float32)
    index = made(tmp_path / "x.faiss", array, "IVF32,Flat", removed=np.array([5]))
    scores, rows = index.search(asked, 50)
    alone = [index.search(query, 50) for query in asked[:, None]]
    np.testing.assert_array_equal(rows, np.concatenate([each for _, each in alone]))
    np.testing.assert_allclose(scores, np.concatenate([each for each, _ in alone]), rtol=1e-5)
    assert (rows >= 0).all() and (rows != brute_force(array, asked, 50)[1]).any()


def test_lists_of_one_training_are_chosen_once(tmp_path: Path, monkeypatch) -> None:
    """Segments of an inverted file find what one index finds, and its centroids are searched once."""
    rng = np.random.default_rng(6)
    array, asked = rng.standard_normal((900, 1, 8), dtype=np.float32), rng.standard_normal((5, 8), dtype=np.float32)
    one, many = (made(tmp_path / f"{n}.faiss", array, "IVF16,Flat", segments=n, parameters="nprobe=4") for n in (1, 4))
    expected = one.search(asked, 10)
    calls = []
    nearest = vectors_file.VectorsFile.nearest_lists
    monkeypatch.setattr(vectors_file.VectorsFile, "nearest_lists", lambda *args: calls.append(1) or nearest(*args))
    found = many.search(asked, 10)
    assert len(calls) == 1
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


def test_all_views_are_trained_on() -> None:
    rows = training.sample_rows(2000, 1000)  # of two views one after the other
    assert 400 < (rows % 2).sum() < 600
    assert (np.diff(rows) > 0).all() and ((rows // 2) == np.arange(1000)).all()
    np.testing.assert_array_equal(rows, training.sample_rows(2000, 1000))
    assert training.sample_rows(0, 5).tolist() == []


def test_vectors_that_are_not_finite(tmp_path: Path) -> None:
    """A search reads what it maps: they are refused where it meets them, and by a verification before."""
    for value in (np.nan, np.inf, -np.inf):
        array = np.ones((6, 1, 4), np.float32)
        array[3, 0, 2] = value
        made(tmp_path / "x.faiss", np.ones_like(array), verify=True)
        with pytest.raises(CoderError, match=r"0-x.faiss holds vectors that are not finite, from row 0 on"):
            made(tmp_path / "x.faiss", array, verify=True)
        index = made(tmp_path / "x.faiss", array)
        with pytest.raises(CoderError, match=r"0-x.faiss (holds vectors that are not finite|is damaged)"):
            index.search(np.ones((1, 4)), 6)
        with pytest.raises(CoderError, match="not finite"):
            index.gather([3])


@pytest.mark.parametrize(
    "factory, size", [("Flat", 0), ("HNSW8", 0), ("PQ8x4", 262_144), ("IVF64,Flat", 262_144), ("IVF16384,Flat", 1 << 22)]
)
def test_training_samples_grow_with_the_lists(factory: str, size: int) -> None:
    assert training.sample_size(factory, 64) == min(size, 1 << 20)  # 256 MiB of 64 dimensions
    assert training.sample_size("IVF16384,Flat", 2048) == 64 * 16384
    rows = training.sample_rows(1000, 7)
    assert (rows * 7 // 1000).tolist() == [*range(7)]
