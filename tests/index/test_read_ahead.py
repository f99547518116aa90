"""Lists of a mapped inverted file are read before they are searched."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.index import read_ahead, vectors_file
from coder_plugin.index.training import train
from coder_plugin.index.vectors import Vectors

VECTORS = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)


def written(folder: Path, factory: str) -> Vectors:
    paths = [folder / "0.faiss", folder / "1.faiss"]
    for path, part in zip(paths, (VECTORS[:400], VECTORS[400:]), strict=True):
        vectors_file.write(path, [part], train(factory, 8, lambda count: VECTORS[:count]))
    return Vectors(paths, [400, 200], views=1, dimensions=8, gpu=False, parameters="nprobe=2")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
@pytest.mark.parametrize("factory", ["IVF16,Flat", "IVF16,SQ8", "OPQ4,IVF16,PQ4x4"])
def test_the_lists_that_are_searched_are_asked_for_once(
    factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = written(tmp_path, factory)
    asked: list[tuple[int, int]] = []

    def madvise(start: int, length: int, advice: int) -> int:
        asked.append((start, length))
        return real(start, length, advice)

    real: Any = read_ahead._madvise()
    monkeypatch.setattr(read_ahead, "_madvise", lambda: madvise)
    _, numbers = vectors.files[0].nearest_lists(VECTORS[:1])
    plain = [file.cpu_index.search(VECTORS[:1], 5) for file in vectors.files]
    scores, rows = vectors.search(VECTORS[:1], 5)
    assert scores.max() == max(each[0].max() for each in plain)
    sizes = [[file.inner.invlists.list_size(number) for number in numbers[0].tolist()] for file in vectors.files]
    bytes_each = vectors.files[0].inner.code_size + 8
    for file, counts in zip(vectors.files, sizes, strict=True):
        starts = [int(file.inner.invlists.get_codes(number)) for number in numbers[0].tolist()]
        for start, count in zip(starts, counts, strict=True):
            end = start + count * bytes_each
            assert not count or any(end - size <= first <= start < first + mmap.PAGESIZE for first, size in asked)
    assert len(asked) == sum(count > 0 for counts in sizes for count in counts)
    vectors.search(VECTORS[:1], 5)
    assert len(asked) == sum(count > 0 for counts in sizes for count in counts)
    monkeypatch.setattr(read_ahead, "_FORGET", -1.0)
    vectors.search(VECTORS[:1], 5)
    assert len(asked) == 2 * sum(count > 0 for counts in sizes for count in counts)


def test_results_are_those_of_each_file(tmp_path: Path) -> None:
    vectors = written(tmp_path, "IVF16,Flat")
    scores, rows = vectors.search(VECTORS[:20], 10)
    merged = [file.cpu_index.search(VECTORS[:20], 10) for file in vectors.files]
    every = np.concatenate([merged[0][0], merged[1][0]], 1)
    numbers = np.concatenate([merged[0][1], np.where(merged[1][1] < 0, -1, merged[1][1] + 400)], 1)
    order = np.argsort(-every, 1, kind="stable")[:, :10]
    np.testing.assert_array_equal(rows, np.take_along_axis(numbers, order, 1))
    np.testing.assert_array_equal(scores, np.take_along_axis(every, order, 1))
