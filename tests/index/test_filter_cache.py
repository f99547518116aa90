"""The rows of the latest filters are kept, of a bounded size."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from coder_plugin.errors import CoderError
from coder_plugin.index import filter_cache
from coder_plugin.index.filter_cache import FilterCache


class Evaluated:
    """Records that note what is evaluated; a filter "n" allows n rows."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def where(self, expression: str, *, kind: str) -> np.ndarray:
        self.asked.append((expression, kind))
        if not expression.isdecimal():
            raise CoderError("no filter")
        return np.arange(int(expression))


def test_each_filter_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    records: Any = Evaluated()
    cache = FilterCache(records)
    for _ in range(3):
        for expression, kind in (("3", "images"), ("4", "images"), ("3", "captions")):
            assert len(cache.where(expression, kind)) == int(expression)
    assert records.asked == [("3", "images"), ("4", "images"), ("3", "captions")]


def test_the_oldest_is_dropped_when_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_cache, "_BYTES", 2 * (filter_cache._ENTRY + 8 * 100 + 4 * 3))
    records: Any = Evaluated()
    cache = FilterCache(records)
    for expression in ("100", "099", "100", "098", "100", "099"):  # 098 drops 099, and not 100, which was used since
        cache.where(expression, "images")
    assert [expression for expression, _ in records.asked] == ["100", "099", "098", "099"]
    for _ in range(2):  # larger than all that is kept
        cache.where("99999", "images")
    assert [expression for expression, _ in records.asked[4:]] == ["99999"] and len(cache._rows) == 1
    cache.where("1", "images")
    assert list(cache._rows) == [("1", "images")] and cache._bytes < 2000


def test_errors_are_not_kept() -> None:
    records: Any = Evaluated()
    cache = FilterCache(records)
    for _ in range(2):
        with pytest.raises(CoderError):
            cache.where("x", "images")
    assert len(records.asked) == 2 and not cache._rows


def test_threads_get_the_rows_of_their_own_filter() -> None:
    """Also two that ask for the same one at once: it is counted once."""
    records: Any = Evaluated()
    cache, both = FilterCache(records), threading.Barrier(2)
    where, found = records.where, []

    def slow(expression: str, *, kind: str) -> np.ndarray:
        both.wait(10)
        return where(expression, kind=kind)

    records.where = slow
    for expressions in (("5", "7"), ("9", "9")):
        threads = [
            threading.Thread(target=lambda each=each: found.append((int(each), len(cache.where(each, "images")))))
            for each in expressions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert sorted(found) == [(5, 5), (7, 7), (9, 9), (9, 9)]
    assert cache._bytes == sum(filter_cache._size(*each) for each in cache._rows.items()) and len(cache._rows) == 3
