"""FAISS: vectors into a file, and the nearest of them out of it.

Shape letters: N items, D dimensions, V embeddings of an item, q queries, k results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_replace

log = logging.getLogger(__name__)
_ROWS = 4096  # items whose vectors are given to FAISS at once
#: Vectors that an index which has to be trained is trained on, at most.
TRAINING = 262_144


#: FAISS's GPU indexes give no more results than this.
GPU_RESULTS = 2048


def check_factory(factory: str, dimensions: int) -> Any:
    """An empty index of a FAISS factory string, by inner products.

    Raises:
        CoderError: FAISS does not know it, or not for so many dimensions.
    """
    import faiss

    try:
        return faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, AssertionError) as error:
        raise CoderError(
            f"FAISS knows no index factory {factory!r} for {dimensions} dimensions; write Flat, HNSW32, "
            f"IVF1024,Flat, PQ64 or the like: {_short(error)}"
        ) from error


def write(path: Path, array: Any, factory: str) -> None:
    """An index of an array [N, V, D], which may lie on the disk, by inner products.

    Raises:
        CoderError: FAISS does not know the factory, or cannot train it on so few vectors.
    """
    import faiss

    items, views, dimensions = array.shape
    index = check_factory(factory, dimensions)
    try:
        if not index.is_trained:
            step = -(-items // max(1, TRAINING // views))
            index.train(np.ascontiguousarray(array[::step]).reshape(-1, dimensions))
        for rows in _chunks(array):
            index.add(rows)
    except RuntimeError as error:
        raise CoderError(
            f"FAISS cannot make {factory!r} of {items * views} vectors: take fewer clusters, or Flat: {_short(error)}"
        ) from error
    aside = path.with_name(f".{path.name}.writing")
    faiss.write_index(index, str(aside))
    atomic_replace(aside, path)


def _chunks(array: Any) -> Iterator[np.ndarray]:
    """Rows [m, D] in memory."""
    for start in range(0, len(array), _ROWS):
        yield np.ascontiguousarray(array[start : start + _ROWS]).reshape(-1, array.shape[2])


def _short(error: BaseException) -> str:
    """FAISS's own words, without the place in its source that they begin with."""
    return " ".join(str(error).split()).rpartition("failed: ")[2][:200]


class Vectors:
    """One kind of an index's vectors.

    Args:
        path: a file that :func:`write` made. items: N. views: V.
        parameters: of FAISS's parameter space, such as ``nprobe=16`` or ``efSearch=64``.
        gpu: search on the first GPU, where FAISS sees one and has a form of this index for it.

    Raises:
        CoderError: the file is no index, or not of so many vectors; unknown parameters.
    """

    def __init__(
        self, path: Path, *, items: int, views: int, dimensions: int, parameters: str | None = None, gpu: bool = True
    ) -> None:
        import faiss

        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise CoderError(f"{path} is no FAISS index: {_short(error)}") from error
        if (index.ntotal, index.d) != (items * views, dimensions):
            raise CoderError(
                f"{path} holds {index.ntotal} vectors of {index.d} dimensions, and not {items * views} of {dimensions}"
            )
        if parameters:
            try:
                faiss.ParameterSpace().set_index_parameters(index, parameters)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise CoderError(f"{parameters!r} are no parameters of this index ({path.name}): {_short(error)}") from error
        self.plain = index
        if gpu and faiss.get_num_gpus():
            try:
                self._resources = faiss.StandardGpuResources()  # must live as long as the index
                index = faiss.index_cpu_to_gpu(self._resources, 0, index)
            except RuntimeError as error:
                log.warning("%s is searched on the CPU: FAISS has no GPU form of it: %s", path.name, _short(error))
        self.faiss, self.items, self.views, self.dimensions = index, items, views, dimensions

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best of each query: scores [q, k] float32, falling, and rows [q, k] int64; equal scores by row.

        An item's score is that of its best embedding. Exact where the index is; an approximate one may know fewer than k,
        and then ends in rows of -1 with a score of -inf. k is cut to N.

        Args:
            queries: [q, D], finite, any float type.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimensions:
            raise CoderError(f"queries must be [q, {self.dimensions}], got {list(queries.shape)}")
        if k < 1:
            raise CoderError(f"a search wants 1 result or more, got k = {k}")
        if not math.isfinite(queries.sum()) and not np.isfinite(queries).all():
            raise CoderError("a query's vector is not finite")
        k = min(k, self.items)
        index = self.faiss if k * self.views <= GPU_RESULTS else self.plain
        scores, rows = index.search(queries, k * self.views)
        if self.views > 1:
            return self._best(scores, rows, k)
        # counting is the quickest look: a search among a few thousand takes no longer than a dozen calls of numpy
        if np.count_nonzero(scores[:, 1:] == scores[:, :-1]):
            order = np.lexsort((rows, -scores))
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        if np.count_nonzero(rows[:, -1] < 0):
            scores[rows < 0] = -np.inf
        return scores, rows

    def _best(self, scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Items of the best embeddings: among the first k * V of these there are k items, each with its best."""
        best = np.full((len(scores), k), -np.inf, dtype=np.float32)
        items = np.full((len(scores), k), -1, dtype=np.int64)
        for query, (value, row) in enumerate(zip(scores, rows, strict=True)):
            found: dict[int, float] = {}
            for score, item in zip(value[row >= 0].tolist(), (row[row >= 0] // self.views).tolist(), strict=True):
                found.setdefault(item, score)
            ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
            items[query, : len(ordered)] = [item for item, _ in ordered]
            best[query, : len(ordered)] = [score for _, score in ordered]
        return best, items

    def of(self, row: int) -> np.ndarray:
        """The vectors [V, D] of an item, as the index keeps them.

        Raises:
            CoderError: this kind of index does not keep them.
        """
        try:
            return self.plain.reconstruct_n(row * self.views, self.views)
        except RuntimeError as error:
            raise CoderError(f"this kind of index gives no vector back: {_short(error)}") from error
