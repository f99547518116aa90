"""FAISS: write vectors to an index file, and search it.

Shape letters: N items, D dimensions, V embeddings of an item, q queries, k results.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_path

log = logging.getLogger(__name__)
_ROWS = 4096  # items added to FAISS at once
#: At most so many vectors train an index that needs training.
TRAINING = 262_144
#: A flat index's file: name, dimensions, vectors, two unused numbers, trained, metric, floats that follow.
_FLAT, _FLAT_NAME = struct.Struct("<4siqqqBiQ"), b"IxFI"
#: Parts of a factory string that keep vectors unchanged.
_LOSSLESS = re.compile(r"Flat|IDMap2?|(?:HNSW|NSG)\d*|(?:IVF\d+|IMI2x\d+)(?:_HNSW\d*)?")
#: FAISS may always read vectors of so many bytes: constants of small indexes.
_LEAST_LIMIT = 1 << 20
#: The most results that FAISS's GPU indexes return.
GPU_RESULTS = 2048


def import_faiss() -> Any:
    """The module ``faiss``.

    faiss-cpu and faiss-gpu hold the same module: where one of two is uninstalled, a folder with a few files stays.

    Raises:
        CoderError: it is not installed, or not complete.
    """
    try:
        import faiss

        faiss.index_factory  # noqa: B018
    except (ImportError, AttributeError) as error:
        command = "pip install --force-reinstall --no-deps faiss-cpu (or faiss-gpu)"
        raise CoderError(f"FAISS is not installed, or not completely ({_short(error)}): {command}") from error
    return faiss


@cache
def warn_of_overwritten() -> None:
    """Warn, once, where faiss-gpu is installed and faiss-cpu has overwritten its files."""
    if hasattr(import_faiss(), "StandardGpuResources"):
        return
    with suppress(metadata.PackageNotFoundError):
        metadata.version("faiss-gpu")
        command = "pip install --force-reinstall --no-deps faiss-gpu"
        log.warning("FAISS searches on the CPU: faiss-cpu has overwritten the files of faiss-gpu: %s", command)


def check_factory(factory: str, dimensions: int) -> Any:
    """An empty inner-product index of a FAISS factory string.

    Raises:
        CoderError: FAISS does not know the factory, or not for so many dimensions.
    """
    faiss = import_faiss()

    try:
        return faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, AssertionError) as error:
        raise CoderError(
            f"FAISS knows no index factory {factory!r} for {dimensions} dimensions; use Flat, HNSW32, "
            f"IVF1024,Flat or PQ64, for example: {_short(error)}"
        ) from error


def is_lossless(factory: str) -> bool:
    """Whether an index of this FAISS factory string stores vectors as they were added. Of a string that is not known: False.

    Example:
        >>> [is_lossless(factory) for factory in ("Flat", "HNSW32", "IVF1024,Flat", "IVF1024,PQ16", "OPQ16,PQ16")]
        [True, True, True, False, False]
    """
    return all(map(_LOSSLESS.fullmatch, factory.split(",")))


def write(path: Path, array: Any, factory: str) -> None:
    """Write an inner-product index of an array [N, V, D] of float32, which may be a memory map.

    Raises:
        CoderError: FAISS does not know the factory, or cannot train it on so few vectors.
    """
    faiss = import_faiss()

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
            f"FAISS cannot build {factory!r} from {items * views} vectors: use fewer clusters, or Flat: {_short(error)}"
        ) from error
    with atomic_path(path) as temporary:
        faiss.write_index(index, str(temporary))


def _chunks(array: Any) -> Iterator[np.ndarray]:
    """Rows [m, D] in memory."""
    for start in range(0, len(array), _ROWS):
        yield np.ascontiguousarray(array[start : start + _ROWS]).reshape(-1, array.shape[2])


def _short(error: BaseException) -> str:
    """FAISS's message without the source line that it begins with."""
    return " ".join(str(error).split()).rpartition("failed: ")[2][:200]


def _read(path: Path, count: int, dimensions: int, *, flat: bool) -> Any:
    """The index in a file. A flat one is read here; of the others, whose files only FAISS can read, FAISS is kept to the file's
    own size and folder."""
    faiss = import_faiss()

    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_FLAT.size)
    if head[:4] == _FLAT_NAME:
        return _read_flat(path, head, size, count, dimensions)
    if flat:
        raise CoderError(f"{path} is not a flat index, as its manifest says: it was not written by coder-plugin index")
    limits = ("deserialization_vector_byte_limit", "deserialization_loop_limit")
    before = {name: getattr(faiss, f"get_{name}")() for name in limits if hasattr(faiss, f"set_{name}")}
    try:
        for name in before:
            getattr(faiss, f"set_{name}")(max(size, _LEAST_LIMIT))
        # lists that lie in another file are looked for in the index's folder only, and are not written to
        return faiss.read_index(str(path), faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY)
    except (RuntimeError, MemoryError) as error:
        raise CoderError(f"{path} is not a FAISS index: {_short(error)}") from error
    finally:
        for name, value in before.items():
            getattr(faiss, f"set_{name}")(value)


def _read_flat(path: Path, head: bytes, size: int, count: int, dimensions: int) -> Any:
    """A flat inner-product index, whose file is a header of fixed length and the vectors; each must be finite."""
    faiss = import_faiss()

    if len(head) < _FLAT.size:
        raise CoderError(f"{path} is not a FAISS index: it ends in its header")
    _, d, total, _, _, trained, metric, length = _FLAT.unpack(head)
    if (d, total, length) != (dimensions, count, count * dimensions):
        raise CoderError(f"{path} holds {total} vectors of {d} dimensions, expected {count} of {dimensions}")
    if trained != 1 or metric != faiss.METRIC_INNER_PRODUCT:
        raise CoderError(f"{path} does not compare by inner products: it was not written by coder-plugin index")
    if size != _FLAT.size + 4 * length:
        raise CoderError(f"{path} has {size} bytes, not the {_FLAT.size + 4 * length} of its {count} vectors")
    index = faiss.IndexFlatIP(dimensions)
    for start in range(0, count, _ROWS):
        rows = min(_ROWS, count - start)
        vectors = np.fromfile(path, "<f4", rows * dimensions, offset=_FLAT.size + 4 * start * dimensions)
        if not math.isfinite(float(np.abs(vectors).max())):
            raise CoderError(f"{path} holds vectors that are not finite, from row {start} on: build the index again")
        index.add(np.ascontiguousarray(vectors.reshape(rows, dimensions), dtype=np.float32))
    return index


class Vectors:
    """One kind of an index's vectors.

    Args:
        path: a file that :func:`write` made.
        items: N.
        views: V.
        dimensions: D.
        flat: the file must be a flat index, which is read here and not by FAISS.
        parameters: of FAISS's parameter space, such as ``nprobe=16`` or ``efSearch=64``.
        gpu: search on the first GPU, where FAISS sees one and supports this kind of index on it.

    Raises:
        CoderError: the file is not a FAISS index, or not of so many vectors; unknown parameters.
    """

    def __init__(
        self,
        path: Path,
        *,
        items: int,
        views: int,
        dimensions: int,
        flat: bool = False,
        parameters: str | None = None,
        gpu: bool = True,
    ) -> None:
        faiss = import_faiss()

        index = _read(path, items * views, dimensions, flat=flat)
        if (index.ntotal, index.d) != (items * views, dimensions):
            raise CoderError(
                f"{path} holds {index.ntotal} vectors of {index.d} dimensions, expected {items * views} of {dimensions}"
            )
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise CoderError(f"{path} does not compare by inner products: it was not written by coder-plugin index")
        if not index.is_trained:
            raise CoderError(f"{path} is not trained: it was not written by coder-plugin index")
        if parameters:
            try:
                faiss.ParameterSpace().set_index_parameters(index, parameters)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise CoderError(f"{parameters!r} is not valid for this index ({path.name}): {_short(error)}") from error
        self.cpu_index = index
        if gpu:
            warn_of_overwritten()
        if gpu and faiss.get_num_gpus():
            try:
                self._resources = faiss.StandardGpuResources()  # must live as long as the index
                index = faiss.index_cpu_to_gpu(self._resources, 0, index)
            except RuntimeError as error:
                log.warning("%s is searched on the CPU: FAISS does not support it on a GPU: %s", path.name, _short(error))
        self.path, self.faiss, self.items, self.views, self.dimensions = path, index, items, views, dimensions

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best items of each query.

        An item's score is that of its best embedding. Equal scores are ordered by row. An approximate index may return fewer
        than k items; the remaining rows are then -1 with a score of -inf.

        Args:
            queries: [q, D], finite, any float dtype.
            k: results, 1 or more; at most N are returned.

        Returns:
            Scores [q, k] float32 in descending order, and rows [q, k] int64.

        Raises:
            CoderError: queries of another shape or not finite; k below 1; an index whose results are no rows of it.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimensions:
            raise CoderError(f"queries must be [q, {self.dimensions}], got {list(queries.shape)}")
        if k < 1:
            raise CoderError(f"k must be at least 1, got {k}")
        if not math.isfinite(queries.sum()) and not np.isfinite(queries).all():
            raise CoderError("a query's vector is not finite")
        k = min(k, self.items)
        index = self.faiss if k * self.views <= GPU_RESULTS else self.cpu_index
        try:
            scores, rows = index.search(queries, k * self.views)
        except RuntimeError as error:
            raise CoderError(f"{self.path} cannot be searched: {_short(error)}") from error
        if rows.max(initial=-1) >= self.items * self.views or np.isnan(scores).any():
            raise CoderError(f"{self.path} is damaged: it has results that are no rows, or not numbers; build it again")
        if self.views > 1:
            return self._best(scores, rows, k)
        # count_nonzero is the fastest check: searching a few thousand vectors takes no longer than a dozen numpy calls
        if np.count_nonzero(scores[:, 1:] == scores[:, :-1]):
            order = np.lexsort((rows, -scores))
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        if np.count_nonzero(rows[:, -1] < 0):
            scores[rows < 0] = -np.inf
        return scores, rows

    def _best(self, scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Items from embeddings: the best k * V embeddings belong to k items or more."""
        best = np.full((len(scores), k), -np.inf, dtype=np.float32)
        items = np.full((len(scores), k), -1, dtype=np.int64)
        for query, (value, row) in enumerate(zip(scores, rows, strict=True)):
            score_of: dict[int, float] = {}
            for score, item in zip(value[row >= 0].tolist(), (row[row >= 0] // self.views).tolist(), strict=True):
                score_of.setdefault(item, score)
            ordered = sorted(score_of.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
            items[query, : len(ordered)] = [item for item, _ in ordered]
            best[query, : len(ordered)] = [score for _, score in ordered]
        return best, items

    def gather(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors [n, V, D] float32 of n items, as the index stores them.

        Raises:
            CoderError: this kind of index does not store them; no such row.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.items:
            raise CoderError(f"{self.path} has no row {rows.min() if rows.min() < 0 else rows.max()}, only {self.items}")
        keys = (rows[:, None] * self.views + np.arange(self.views)).reshape(-1)
        try:
            if (lists := import_faiss().try_extract_index_ivf(self.cpu_index)) is not None:
                lists.make_direct_map()  # where each row is; does nothing the second time
            return self.cpu_index.reconstruct_batch(keys).reshape(len(rows), self.views, self.dimensions)
        except RuntimeError as error:
            raise CoderError(f"this kind of index does not store its vectors: {_short(error)}") from error
