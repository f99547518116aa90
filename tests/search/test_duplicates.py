"""Near-duplicates: against all pairs compared by loops, by an exact and by an approximate index, and on the command line."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.cli.duplicates import summarize
from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.search import duplicates
from coder_plugin.search.build import remove
from coder_plugin.search.duplicates import find_duplicates
from coder_plugin.search.index import Index
from tests.search.made import plant

COUNT, DIMENSIONS = 150, 12


def vectors_of(views: int, seed: int = 0) -> np.ndarray:
    """Random vectors [N, V, D] of random lengths, with copies of other images among them, changed little, and two of zeros."""
    draw = np.random.default_rng(seed)
    vectors = draw.normal(size=(COUNT, views, DIMENSIONS))
    for row in range(40, COUNT, 3):
        vectors[row] = vectors[draw.integers(row)] + draw.normal(size=(views, DIMENSIONS)) * draw.choice([0, 0.02, 0.1])
    vectors[[7, 11]] = 0
    return (vectors * draw.uniform(0.2, 5, size=(COUNT, 1, 1))).astype(np.float32)


def reference(vectors: np.ndarray, threshold: float) -> list[tuple[list[int], list[float]]]:
    """Groups by loops over all pairs, with the cosines with the first of each."""
    exact = vectors.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=2, keepdims=True)
    unit = np.divide(exact, lengths, out=np.zeros_like(exact), where=lengths > 0)
    cosines = np.einsum("avd,bvd->ab", unit, unit) / vectors.shape[1]
    group = list(range(len(vectors)))
    for one in range(len(vectors)):
        for other in range(one):
            if cosines[one, other] >= threshold:
                group = [group[other] if each == group[one] else each for each in group]
    sets: dict[int, list[int]] = {}
    for row, each in enumerate(group):
        sets.setdefault(each, []).append(row)
    found = [(rows, cosines[rows[0], rows].tolist()) for rows in sets.values() if len(rows) > 1]
    return sorted(found, key=lambda each: (-len(each[0]), each[0][0]))


def check(index: Index, vectors: np.ndarray, threshold: float) -> duplicates.Duplicates:
    found = find_duplicates(index, threshold=threshold)
    expected = reference(vectors, threshold)
    assert [group.rows.tolist() for group in found.groups] == [rows for rows, _ in expected]
    for group, (_, similarities) in zip(found.groups, expected, strict=True):
        np.testing.assert_allclose(group.similarities, similarities, atol=1e-6)
    assert found.images == len(vectors) and len(expected) > 5
    return found


def planted(folder: Path, vectors: np.ndarray, **options: Any) -> Index:
    captions = np.random.default_rng(1).normal(size=(len(vectors), vectors.shape[-1]))
    return plant(folder, vectors, captions, list(range(len(vectors))), **options)


@pytest.mark.parametrize(
    ("views", "factory", "lengths"), [(3, "Flat", True), (1, "HNSW32", True), (3, "HNSW32", False), (1, "IVF4,Flat", False)]
)
def test_the_groups_are_those_of_all_pairs(
    views: int, factory: str, lengths: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of different ``lengths`` are compared pair by pair, of equal ones by the neighbours that the index finds."""
    limits = {"_BLOCK": 16, "_AGAINST": 37, "_NEIGHBOURS": 3, "_SAMPLE": 50, "_FLOATS": 50 * views * DIMENSIONS}
    for name, value in limits.items():
        monkeypatch.setattr(duplicates, name, value)
    vectors = vectors_of(views)
    exact = lengths or factory == "Flat"
    if not exact:
        vectors = vectors[[*range(7), *range(8, 11), *range(12, COUNT)]]
        vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    planted(tmp_path / "index", vectors, factory=factory)
    parameters = {"Flat": None, "HNSW32": "efSearch=400", "IVF4,Flat": "nprobe=4"}
    index = Index(tmp_path / "index", parameters=parameters[factory])
    gathered: list[int] = []
    real = index.vectors["images"].gather
    monkeypatch.setattr(index.vectors["images"], "gather", lambda rows: gathered.append(len(rows)) or real(rows))
    for threshold in (0.97, 0.999):
        found = check(index, vectors, threshold)
        assert (found.exact, found.lossless, found.crowded) == (exact, True, 0)
    assert max(gathered) <= 50, "memory is bounded"


def test_a_chain_is_one_group_and_copies_have_a_cosine_of_one(tmp_path: Path) -> None:
    angles = np.array([0, 0.2, 0.4, 2.0, 2.0])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1) * np.array([[1], [3], [0.1], [1], [7]])
    index = planted(tmp_path / "index", vectors)
    found = find_duplicates(index, threshold=0.95)
    chain, copies = found.groups
    assert chain.rows.tolist() == [0, 1, 2] and copies.rows.tolist() == [3, 4]
    np.testing.assert_allclose(chain.similarities, [1, np.cos(0.2), np.cos(0.4)], atol=1e-6)
    assert "Only a chain of others joins 1 of these to the first" in summarize(found, 0.95)
    assert "chain" not in summarize(find_duplicates(index, threshold=0.9), 0.9)


def test_neighbours_of_other_lengths_are_compared_by_their_cosines(tmp_path: Path) -> None:
    """Where the index finds all images as neighbours; two are zeros, and one of a pair was removed."""
    vectors = vectors_of(1)
    planted(tmp_path / "index", vectors, factory="IVF4,Flat")
    found = find_duplicates(Index(tmp_path / "index", parameters="nprobe=4"), threshold=0.97, exact=False)
    expected = reference(vectors, 0.97)
    assert [group.rows.tolist() for group in found.groups] == [rows for rows, _ in expected] and not found.exact


@pytest.mark.parametrize("factory", ["Flat", "HNSW32"])
def test_removed_images_are_in_no_group(factory: str, tmp_path: Path) -> None:
    vectors = np.repeat(np.eye(8), 3, axis=0)
    planted(tmp_path / "index", vectors, factory=factory)
    remove(tmp_path / "index", [f"{row}.jpg" for row in (0, 4, 9, 10, 11, 13, 14, 23)])
    index = Index(tmp_path / "index")
    found = find_duplicates(index)
    assert found.images == 16
    groups = [[int(each.key[:-4]) for each in index.records.images(group.rows.tolist())] for group in found.groups]
    assert groups == [[6, 7, 8], [15, 16, 17], [18, 19, 20], [1, 2], [3, 5], [21, 22]]


def test_what_is_refused(tmp_path: Path) -> None:
    index = planted(tmp_path / "index", np.eye(3))
    assert find_duplicates(index).groups == []
    for threshold in (0, -0.5, 1.01, float("nan")):
        with pytest.raises(CoderError, match="the threshold is a cosine"):
            find_duplicates(index, threshold=threshold)
    del index.vectors["images"]
    with pytest.raises(CoderError, match="no vectors of images"):
        find_duplicates(index)


KEYS = ["a.jpg", "<b>b</b>.jpg", "c\x1b[2J.jpg", "d.jpg", "d.jpg", "e.jpg", "a\r.jpg", "a\n.jpg"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    alike = [[1, 0, 0], [1, 0.01, 0], [1, 0, 0.01]], [[1, 0.01, 0.01], [1, -0.01, 0.01]]
    vectors = np.array([*alike[0], [0, 1, 0], [0, 1, 0], [0, 0, 1], *alike[1]])
    planted(tmp_path / "index", vectors, keys=KEYS)
    return tmp_path / "index"


def test_the_command_prints_groups_and_writes_files(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, keys = tmp_path / "page.html", tmp_path / "keys.txt"
    assert main(["duplicates", str(small), "--html", str(page), "--keys-file", str(keys)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == (
        "2 groups of near-duplicates among 8 images, by a cosine of at least 0.93; "
        "keeping the first of each would remove 5 images."
    )
    assert lines[1:6] == ["", "5 images", "  1.0000  a.jpg", "  1.0000  <b>b</b>.jpg", "  1.0000  c\\u001b[2J.jpg"]
    assert lines[8:] == ["", "2 images", "  1.0000  d.jpg", "  1.0000  d.jpg"]
    assert "left out: 3 keys that an image which is kept has too" in printed.err
    assert keys.read_text() == "<b>b</b>.jpg\nc\x1b[2J.jpg\n"
    text = page.read_text()
    assert "would remove 5 images" in text and "<b>b</b>.jpg" not in text and "e.jpg" not in text
    assert html.unescape(re.sub("<wbr>", "", text)).count("<b>b</b>.jpg") == 2  # once in place of a thumbnail
    assert text.count("✓ kept") == 2

    assert main(["duplicates", str(small), "--json", "--threshold", "0.99999"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == [
        [{"key": "d.jpg", "image_id": stable_hash("d.jpg"), "path": None, "member": None, "similarity": 1.0}] * 2
    ]
    assert "1 group of near-duplicates" in printed.err


def test_the_keys_are_those_that_index_remove_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted(tmp_path / "index", np.repeat(np.eye(4), [1, 3, 2, 1], axis=0), keys=[" a", "b b", "\u2028", "d", "e", "é", "g"])
    index, keys = str(tmp_path / "index"), str(tmp_path / "keys.txt")
    (tmp_path / "folder").mkdir()
    assert main(["duplicates", index, "--keys-file", str(tmp_path / "folder")]) == 2
    assert f"--keys-file {tmp_path / 'folder'} cannot be written: Is a directory" in capsys.readouterr().err
    assert main(["duplicates", index, "--keys-file", keys]) == 0
    assert main(["index", "remove", index, "--keys-file", keys]) == 0
    opened = Index(tmp_path / "index")
    assert [opened.records.row_of(key) for key in (" a", "b b", "\u2028", "d", "e", "é", "g")] == [0, 1, None, None, 2, None, 3]
    capsys.readouterr()
    assert main(["duplicates", index]) == 0
    assert capsys.readouterr().out.startswith("0 groups of near-duplicates among 4 images")
