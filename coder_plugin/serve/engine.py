"""Answer the queries of many clients: what arrives while a batch is encoded is the next batch.

One thread encodes, because a batch takes less time than its queries one after the other. A few threads search, because FAISS
scans the vectors for one query in one thread.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from coder_plugin.search.records import SHOWN
from coder_plugin.search.searcher import Hit, Query, Searcher
from coder_plugin.search.vectors import import_faiss

#: What is kept of the latest texts' queries: so many bytes, and so many texts.
CACHE_BYTES, CACHE_TEXTS = 64 << 20, 4096


class UnknownKey(LookupError):
    """The index has no image of this key."""


class Result(NamedTuple):
    """A hit with the metadata columns of its image, and captions; none where the hit is a caption."""

    hit: Hit
    captions: tuple[str, ...]
    metadata: dict[str, Any]


class _Job(NamedTuple):
    kind: str  # "text" or "picture"
    content: Any
    search: Callable[[Query], list[Result]]
    done: Future[list[Result]]


class Engine:
    """Encodes queries in batches and searches for them; its methods may be called from any thread.

    Args:
        searcher: an index and its model, which only this engine uses from now on.
        rerank: as in :meth:`~coder_plugin.search.searcher.Searcher.search`.
        captions: of an image that a result has, at most.
        threads: that search; None: one a core, or one in all where FAISS searches on a GPU.
    """

    def __init__(
        self, searcher: Searcher, *, rerank: int | str | None = None, captions: int = 10, threads: int | None = None
    ) -> None:
        self.searcher, self.rerank, self.captions = searcher, rerank, captions
        threads = _search_threads(searcher) if threads is None else threads
        # FAISS's own threads would only wait for those of the other queries
        initializer = partial(import_faiss().omp_set_num_threads, 1) if threads > 1 else None
        self._searches = ThreadPoolExecutor(threads, "search", initializer)
        self._cache: OrderedDict[str, Query] = OrderedDict()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._encoding = threading.Thread(target=self._encode_batches, name="encode", daemon=True)
        self._encoding.start()

    def text(self, text: str, k: int, **options: Any) -> Future[list[Result]]:
        """The k best results for a text.

        Args:
            text: to search for.
            k: results.
            **options: ``among`` and others of :meth:`~coder_plugin.search.searcher.Searcher.search`.
        """
        done: Future[list[Result]] = Future()
        search = partial(self._search, k=k, **options)
        query = self._cached(text)
        if query is None:
            self._jobs.put(_Job("text", text, search, done))
        else:
            self._submit(search, query, done)
        return done

    def picture(self, picture: Any, k: int, **options: Any) -> Future[list[Result]]:
        """As :meth:`text` for a picture (PIL)."""
        done: Future[list[Result]] = Future()
        self._jobs.put(_Job("picture", picture, partial(self._search, k=k, **options), done))
        return done

    def key(self, key: str, k: int, **options: Any) -> Future[list[Result]]:
        """As :meth:`text` for an image of the index; the future's error is :class:`UnknownKey` where there is none."""

        def find() -> list[Result]:
            if self.searcher.index.records.row_of(key) is None:
                raise UnknownKey(key)
            return self._search(self.searcher.key(key), k=k, **options)

        return self._searches.submit(find)

    def close(self) -> None:
        """End the threads. What waits is not answered."""
        self._jobs.put(None)
        self._searches.shutdown(wait=False, cancel_futures=True)

    def _search(self, query: Query, *, k: int, **options: Any) -> list[Result]:
        hits = self.searcher.search(query, k, rerank=self.rerank if query.kind != options.get("among") else None, **options)
        records = self.searcher.index.records
        return [
            Result(
                hit,
                records.captions_of(hit.image.row, limit=self.captions, characters=SHOWN) if hit.text is None else (),
                records.metadata(hit.image.row, characters=SHOWN),
            )
            for hit in hits
        ]

    def _submit(self, search: Callable[[Query], list[Result]], query: Query, done: Future[list[Result]]) -> None:
        def run() -> None:
            if not done.running() and not done.set_running_or_notify_cancel():
                return
            try:
                results = search(query)
            except BaseException as error:  # also when the interpreter ends: the client waits for an answer
                done.set_exception(error)
            else:
                done.set_result(results)

        try:
            self._searches.submit(run)
        except RuntimeError as error:  # the engine has been closed
            done.set_exception(error)

    def _encode_batches(self) -> None:
        most = self.searcher.encoder.batch_size
        while (job := self._jobs.get()) is not None:
            batch = [job]
            with suppress(Empty):
                while len(batch) < most:
                    if (job := self._jobs.get_nowait()) is None:
                        return
                    batch.append(job)
            waiting = [job for job in batch if job.done.set_running_or_notify_cancel()]
            for kind in ("text", "picture"):
                if jobs := [job for job in waiting if job.kind == kind]:
                    self._encode(kind, jobs)

    def _encode(self, kind: str, jobs: Sequence[_Job]) -> None:
        """Encode a batch; if that fails, each query by itself, so that one that cannot be encoded harms no other."""
        contents = [job.content for job in jobs]
        try:
            queries = self._text_queries(contents) if kind == "text" else self.searcher.image(contents)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].done.set_exception(error)
            else:
                for job in jobs:
                    self._encode(kind, [job])
            return
        for job, query in zip(jobs, queries, strict=True):
            self._submit(job.search, query, job.done)

    def _text_queries(self, texts: Sequence[str]) -> list[Query]:
        different = list(dict.fromkeys(texts))
        queries = dict(zip(different, self.searcher.text(different), strict=True))
        for text, query in queries.items():
            item = None if query.item is None else {name: value.clone() for name, value in query.item.items()}
            self._cache[text] = Query(query.vectors.clone(), query.kind, item)  # not views, which keep the whole batch
            while len(self._cache) > max(1, min(CACHE_TEXTS, CACHE_BYTES // _size(query))):
                self._cache.popitem(last=False)
        return [queries[text] for text in texts]

    def _cached(self, text: str) -> Query | None:
        with suppress(KeyError):  # the other thread may remove it meanwhile
            query = self._cache[text]
            self._cache.move_to_end(text)
            return query
        return None


def _search_threads(searcher: Searcher) -> int:
    if any(vectors.on_gpu for vectors in searcher.index.vectors.values()):
        return 1  # a GPU's indexes are for one thread
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _size(query: Query) -> int:
    """Bytes of a query's tensors."""
    return sum(each.nbytes for each in (query.vectors, *(query.item or {}).values()))
