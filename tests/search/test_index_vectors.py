"""FAISS files: against brute force, among some rows, with several vectors an item, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from coder_plugin.errors import CoderError
from coder_plugin.search.vectors import Vectors, build, check_factory

ITEMS, DIMENSIONS = 400, 16


def vectors_of(views: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ITEMS, views, DIMENSIONS), dtype=np.float32)


def make(folder: Path, factory: str, vectors: np.ndarray, **options: Any) -> Vectors:
    items, views, dimensions = vectors.shape
    flat, path = vectors.reshape(-1, dimensions), folder / "a.faiss"
    build(path, factory, dimensions, len(flat), lambda: np.array_split(flat, 7))
    return Vectors(path, items=items, views=views, dimensions=dimensions, **options)


def brute(vectors: np.ndarray, queries: np.ndarray, k: int, allowed: np.ndarray) -> np.ndarray:
    scores = np.einsum("qd,nvd->qnv", queries, vectors[allowed]).max(2)
    return allowed[np.argsort(-scores, 1, kind="stable")[:, :k]]


PARAMETERS = {"Flat": None, "HNSW32": "efSearch=400", "IVF8,Flat": "nprobe=8", "OPQ8,IVF8,SQ8": "nprobe=8", "SQfp16": None}


@pytest.mark.parametrize(
    ("factory", "views"),
    [("Flat", 1), ("Flat", 3), ("HNSW32", 3), ("IVF8,Flat", 3), ("SQfp16", 1), ("OPQ8,IVF8,SQ8", 1), ("PQ8x4fs", 3)],
)
def test_searches_are_those_of_brute_force(factory: str, views: int, tmp_path: Path) -> None:
    """Of all rows, of half of them, and of three. Compressed vectors are compared with themselves."""
    given = vectors_of(views)
    found = make(tmp_path, factory, given, parameters=PARAMETERS.get(factory))
    lossless = factory in ("Flat", "HNSW32", "IVF8,Flat")
    stored = given if lossless else found.gather(np.arange(ITEMS))
    queries = vectors_of(seed=1)[:5, 0]
    for rows in (None, np.arange(1, ITEMS, 2)[::-1], np.array([7, 3, 399])):
        allowed = np.arange(ITEMS) if rows is None else np.sort(rows)
        scores, result = found.search(queries, 10, rows=rows)
        assert result.shape == (5, min(10, len(allowed))) and (np.diff(scores, axis=1) <= 0).all()
        expected = brute(stored, queries, 10, allowed)
        if lossless or factory == "SQfp16":
            np.testing.assert_array_equal(result, expected)
        else:
            assert np.mean([len({*one} & {*other}) / len(other) for one, other in zip(result, expected, strict=True)]) > 0.9
        assert np.isin(result, allowed).all() and all(len({*row}) == len(row) for row in result)
    if lossless:
        np.testing.assert_array_equal(found.gather([5, 2]), given[[5, 2]])


def test_a_flat_file_is_faisss_own(tmp_path: Path) -> None:
    given = vectors_of()[:, 0]
    make(tmp_path, "Flat", given[:, None])
    plain = faiss.IndexFlatIP(DIMENSIONS)
    plain.add(given)
    faiss.write_index(plain, str(tmp_path / "b.faiss"))
    assert (tmp_path / "a.faiss").read_bytes() == (tmp_path / "b.faiss").read_bytes()


def test_equal_scores_are_in_the_order_of_rows(tmp_path: Path) -> None:
    given = np.repeat(vectors_of()[:4], 5, axis=0)
    _, rows = make(tmp_path, "Flat", given).search(given[6], 20)
    assert [*rows[0][:5]] == [5, 6, 7, 8, 9] and [*rows[0][5:10]] == sorted(rows[0][5:10])


@pytest.mark.parametrize("rows", [None, np.arange(0, ITEMS, 3)])
def test_too_few_lists_are_searched_again_with_a_note(rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = vectors_of()
    found = make(tmp_path, "IVF32,Flat", given, parameters="nprobe=2")
    queries = vectors_of(seed=1)[:3, 0]
    _, result = found.search(queries, 100, rows=rows)
    np.testing.assert_array_equal(result, brute(given, queries, 100, np.arange(ITEMS) if rows is None else rows))
    text = "the nearest 2 of 32 lists have fewer than 100 results, so all lists are searched, which is slower: raise it with"
    assert text in caplog.text and "--search-parameters nprobe=8" in caplog.text
    found.search(queries, 100, rows=rows)
    assert caplog.text.count("so all lists are searched") == 1
    caplog.clear()
    found.search(queries, 2)
    assert not caplog.text


@pytest.mark.parametrize(("factory", "count"), [("IVF512,Flat", 400), ("OPQ8,PQ8", 99)])
def test_too_few_vectors_to_train_on(factory: str, count: int, tmp_path: Path) -> None:
    with pytest.raises(CoderError, match=rf"--factory {factory} of {count} vectors: .*training points.*fewer lists"):
        make(tmp_path, factory, vectors_of()[:count])


def test_product_quantisers_are_not_trained_for_hamming_distances() -> None:
    assert not check_factory("IVF64,PQ8", DIMENSIONS).do_polysemous_training  # half a minute, and the same results


@pytest.mark.parametrize("factory", ["Round", "PQ5", "LSH", "IDMap,Flat", "NSG32", "HNSW16_PQ3"])
def test_factories_that_are_refused(factory: str) -> None:
    with pytest.raises(CoderError, match=r"factory"):
        check_factory(factory, DIMENSIONS)


def test_what_is_refused(tmp_path: Path) -> None:
    found = make(tmp_path, "Flat", vectors_of())
    query = np.zeros((1, DIMENSIONS), np.float32)
    for queries, k, rows, text in (
        (query[:, :3], 1, None, r"queries must be \[q, 16\], got \[1, 3\]"),
        (query, 0, None, "k must be at least 1, got 0"),
        (query + np.inf, 1, None, "a query's vector is not finite"),
        (query, 1, np.array([ITEMS]), "has no row 400, only 400"),
        (query, 1, np.array([0.5]), "rows must be whole numbers"),
    ):
        with pytest.raises(CoderError, match=text):
            found.search(queries, k, rows=rows)
    assert found.search(query, 5, rows=np.array([], np.int64))[1].shape == (1, 0)
    with pytest.raises(CoderError, match="'nprobe=3' is not valid for this index"):
        make(tmp_path, "Flat", vectors_of(), parameters="nprobe=3")


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "HNSW16"])
def test_a_damaged_file_is_refused_before_it_is_searched(factory: str, tmp_path: Path) -> None:
    make(tmp_path, factory, vectors_of())
    path, sizes = tmp_path / "a.faiss", {"items": ITEMS, "views": 1, "dimensions": DIMENSIONS}
    content = path.read_bytes()
    for damaged in (content[:-9], content[: len(content) // 2], content[:30], b"", b"x" * 99):
        path.write_bytes(damaged)
        with pytest.raises(CoderError, match=r"a.faiss (is damaged|is not a FAISS index|holds)"):
            Vectors(path, **sizes)
    path.write_bytes(content)
    with pytest.raises(CoderError, match="holds 400 vectors of 16 dimensions, expected 399 of 16"):
        Vectors(path, **{**sizes, "items": ITEMS - 1})
    euclidean = faiss.IndexFlatL2(DIMENSIONS)
    euclidean.add(vectors_of()[:, 0])
    faiss.write_index(euclidean, str(path))
    with pytest.raises(CoderError, match=r"a.faiss"):
        Vectors(path, **sizes)
