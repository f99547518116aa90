"""Many queries at once: batches, the cache, and queries that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coder_plugin.errors import CoderError
from coder_plugin.search.records import Image
from coder_plugin.search.searcher import Hit, Query
from coder_plugin.serve import engine as module
from coder_plugin.serve.engine import Engine, UnknownKey


class Searcher:
    """One that finds the query itself, and encodes when it is let."""

    def __init__(self, batch_size: int = 8) -> None:
        self.encoder = SimpleNamespace(batch_size=batch_size)
        self.batches: list[list[Any]] = []
        self.entered, self.let = threading.Semaphore(0), threading.Semaphore(0)
        records = SimpleNamespace(
            captions_of=lambda row, limit, characters: ("one", "two")[:limit],
            metadata=lambda row, characters: {"source": "coco"},
            row_of=lambda key: 7 if key == "7" else None,
        )
        self.index = SimpleNamespace(vectors={}, records=records)

    def text(self, texts: list[str]) -> list[Query]:
        self.batches.append(texts)
        self.entered.release()
        self.let.acquire()
        if "bad" in texts:
            raise ValueError("bad")
        batch = torch.tensor([[[float(len(text))] * 4] for text in texts] + [[[0.0] * 4]])
        return [Query(vectors, "captions", None) for vectors in batch[:-1]]  # views of it

    def image(self, pictures: list[int]) -> list[Query]:
        self.batches.append(pictures)
        return [Query(torch.full((1, 4), float(each)), "images", None) for each in pictures]

    def key(self, key: str) -> Query:
        return Query(torch.full((1, 4), float(key)), "images", None)

    def search(self, query: Query, k: int, *, rerank: Any, among: str) -> list[Hit]:
        row = int(query.vectors[0, 0])
        text = among if among == "captions" else None
        return [Hit(float(rank), row, Image(row, str(rerank), 0), text, None) for rank in range(k)]


@contextmanager
def made(searcher: Any, **options: Any) -> Iterator[Engine]:
    engine = Engine(searcher, **{"threads": 2, **options})
    try:
        yield engine
    finally:
        for _ in range(99):
            searcher.let.release()
        engine.close()
        engine._encoding.join(10)
        assert not engine._encoding.is_alive()


def rows(futures: list[Future]) -> list[int]:
    return [future.result(20)[0].hit.row for future in futures]


def test_what_arrives_while_a_batch_is_encoded_is_the_next_batch() -> None:
    searcher = Searcher(batch_size=3)
    with made(searcher) as engine:
        first = engine.text("a", 1, among="images")
        searcher.entered.acquire()
        others = [engine.text("b" * length, 1, among="images") for length in (2, 3, 4, 5)]
        for _ in range(3):
            searcher.let.release()
        assert rows([first, *others]) == [1, 2, 3, 4, 5]
        assert searcher.batches == [["a"], ["bb", "bbb", "bbbb"], ["bbbbb"]]


def test_texts_and_pictures_of_a_batch_are_encoded_apart_and_equal_texts_once() -> None:
    searcher = Searcher()
    with made(searcher) as engine:
        first = engine.text("a", 1, among="images")
        searcher.entered.acquire()
        ask = [partial(engine.text, "bb"), partial(engine.picture, 9), partial(engine.text, "bb")]
        futures = [each(1, among="images") for each in ask]
        searcher.let.release()
        searcher.let.release()
        assert rows([first, *futures]) == [1, 2, 9, 2] and searcher.batches == [["a"], ["bb"], [9]]


def test_a_query_that_fails_harms_no_other() -> None:
    searcher = Searcher()
    with made(searcher) as engine:
        first = engine.text("a", 1, among="images")
        searcher.entered.acquire()
        futures = [engine.text(text, 1, among="images") for text in ("bb", "bad", "ccc")]
        for _ in range(9):
            searcher.let.release()
        assert rows([first, futures[0], futures[2]]) == [1, 2, 3]
        with pytest.raises(ValueError, match="bad"):
            futures[1].result(20)
        assert searcher.batches[1:] == [["bb", "bad", "ccc"], ["bb"], ["bad"], ["ccc"]]


def test_texts_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 2 * 16)  # of two queries
    searcher = Searcher()
    with made(searcher) as engine:
        for text in ("a", "bb", "a", "ccc", "a", "bb"):
            searcher.let.release()
            assert rows([engine.text(text, 1, among="images")]) == [len(text)]
        assert [batch for [batch] in searcher.batches] == ["a", "bb", "ccc", "bb"]  # "bb" had been the oldest
        vectors = [query.vectors for query in engine._cache.values()]
        assert len(vectors) == 2 and all(each.untyped_storage().nbytes() == 16 for each in vectors)


def test_what_a_result_has() -> None:
    searcher = Searcher()
    with made(searcher, rerank=5, captions=1) as engine:
        [first, second] = engine.key("7", 2, among="images").result(20)
        assert (first.hit.score, second.hit.score) == (0, 1) and first.captions == ("one",)
        assert first.metadata == {"source": "coco"}
        assert first.hit.image.key == "None"  # an image among images is not re-ranked
        [caption] = engine.key("7", 1, among="captions").result(20)
        assert caption.hit.text == "captions" and caption.captions == () and caption.hit.image.key == "5"
        with pytest.raises(UnknownKey, match="nobody"):
            engine.key("nobody", 1, among="images").result(20)


def test_an_error_of_a_search_is_the_futures() -> None:
    searcher = Searcher()

    def fail(*_: Any, **__: Any) -> None:
        raise CoderError("damaged")

    searcher.search = fail  # type: ignore[method-assign, assignment]
    searcher.let.release()
    with made(searcher) as engine, pytest.raises(CoderError, match="damaged"):
        engine.text("a", 1, among="images").result(20)


def test_a_client_that_has_left_is_not_searched_for() -> None:
    searcher = Searcher()
    with made(searcher) as engine:
        first = engine.text("a", 1, among="images")
        searcher.entered.acquire()
        left, stayed = (engine.text(text, 1, among="images") for text in ("bb", "ccc"))
        assert left.cancel()
        searcher.let.release()
        searcher.let.release()
        assert rows([first, stayed]) == [1, 3] and searcher.batches[1:] == [["ccc"]]
