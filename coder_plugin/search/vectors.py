"""FAISS: train, write and search one file of vectors.

Files are mapped into memory where FAISS can (flat indexes, the lists of inverted files): opening takes no time, and memory
holds what searches read.

Shape letters: N items, D dimensions, V vectors of an item, q queries, k results.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)
#: A flat index's file: name, dimensions, vectors, two unused numbers, trained, metric, floats that follow.
_FLAT = struct.Struct("<4siqqqBiQ")
#: Parts of a factory string that keep vectors unchanged.
_LOSSLESS = re.compile(r"Flat|HNSW\d*|IVF\d+(?:_HNSW\d*)?")
#: Vectors that an index is trained on for each list.
_TRAINED = 64
#: An index without lists is trained as one with so many.
_LISTS = 1024
#: The most results of FAISS's GPU indexes.
_GPU_RESULTS = 2048
#: Of a graph (HNSW) of which a smaller part may be found, the vectors are compared one by one.
_FEW = 0.05
_ROWS = 8192  # vectors that are compared at once


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
        raise CoderError(f"FAISS is not installed, or not completely ({short(error)}): {command}") from error
    return faiss


def short(error: BaseException) -> str:
    """FAISS's message without the source line that it begins with.

    Example:
        >>> short(RuntimeError("Error in void f(int) at /a/b.cpp:12: Error: 'd > 0' failed: d must be positive"))
        'd must be positive'
    """
    message = re.sub(r"^Error in .*? at \S+:\d+: ", "", " ".join(str(error).split()))
    return message.rpartition("failed: ")[2][:200]


def is_lossless(factory: str) -> bool:
    """Whether an index of this FAISS factory string stores vectors as they were added. Of a string that is not known: False.

    Example:
        >>> [is_lossless(factory) for factory in ("Flat", "HNSW32", "IVF1024,Flat", "IVF1024,PQ16", "OPQ16,PQ16")]
        [True, True, True, False, False]
    """
    return all(map(_LOSSLESS.fullmatch, factory.split(",")))


def check_factory(factory: str, dimensions: int | None = None) -> Any:
    """An empty inner-product index of a FAISS factory string.

    Args:
        factory: the string.
        dimensions: D; None: not known yet, and only what does not depend on D is checked.

    Raises:
        CoderError: FAISS does not know the factory, or not for so many dimensions or inner products.
    """
    faiss = import_faiss()
    try:
        index = faiss.index_factory(dimensions or 64, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, AssertionError) as error:
        if dimensions is None and "could not parse" not in str(error):
            return None
        why = "it has no inner product" if "METRIC_L2" in str(error) else short(error)
        size = f" for {dimensions} dimensions" if dimensions else ""
        raise CoderError(
            f"FAISS knows no index factory {factory!r}{size}; use Flat, HNSW32, "
            f"IVF1024,Flat or PQ64, for example: {why}"
        ) from error
    if re.search("IDMap|NSG", factory) or list(_parts(index))[-1].metric_type != faiss.METRIC_INNER_PRODUCT:
        raise CoderError(f"--factory {factory}: take an index of inner products without ids, such as HNSW32 or IVF1024,PQ32")
    for part in _parts(index):
        if hasattr(part, "do_polysemous_training"):  # seconds for each byte of a code, for searches by Hamming distance
            part.do_polysemous_training = False
    return index


def _parts(index: Any) -> Iterator[Any]:
    """An index, and those that it wraps, the innermost last."""
    faiss = import_faiss()
    index = faiss.downcast_index(index)
    yield index
    if isinstance(index, faiss.IndexPreTransform):
        yield from _parts(index.index)
    elif isinstance(index, faiss.IndexRefine):
        yield from _parts(index.base_index)


def build(
    path: Path, factory: str, dimensions: int, count: int, batches: Callable[[], Iterable[np.ndarray]]
) -> int:
    """Write an index of ``count`` vectors, and return how many there were. Memory: a batch of them for ``Flat``; for other
    kinds what the index itself takes, and the vectors that it is trained on, 64 for each list.

    Args:
        path: the file.
        factory: FAISS index factory string.
        dimensions: D.
        count: N * V.
        batches: gives the vectors [n, D] float32 in their order; called twice where training is needed.

    Raises:
        CoderError: FAISS does not know the factory, or cannot train it on so few vectors.
    """
    faiss, index = import_faiss(), check_factory(factory, dimensions)
    if factory == "Flat":
        with open(path, "wb") as file:  # as FAISS writes it, which would hold all of it in memory
            file.write(_FLAT.pack(b"IxFI", dimensions, count, 1 << 20, 1 << 20, 1, 0, count * dimensions))
            for batch in batches():
                np.ascontiguousarray(batch, dtype="<f4").tofile(file)
            return (file.tell() - _FLAT.size) // (4 * dimensions)
    try:
        if not index.is_trained:
            inverted = faiss.try_extract_index_ivf(index)
            lists = _LISTS if inverted is None else max(_LISTS, inverted.nlist)
            index.train(_sample(batches(), count, _TRAINED * lists))
        for batch in batches():
            index.add(np.ascontiguousarray(batch))
        faiss.write_index(index, str(path))
        return index.ntotal
    except RuntimeError as error:
        raise CoderError(
            f"FAISS cannot build --factory {factory} of {count:,} vectors: {short(error)}; with fewer lists, HNSW32 or Flat "
            "nothing is encoded again"
        ) from error


def _sample(batches: Iterable[np.ndarray], count: int, size: int) -> np.ndarray:
    """At most ``size`` of ``count`` vectors, one drawn from each of as many equal stretches; always the same."""
    size = min(size, count)
    starts = np.arange(size + 1, dtype=np.int64) * count // size
    rows = np.random.default_rng(0).integers(starts[:-1], starts[1:])
    parts, first = [], 0
    for batch in batches:
        low, high = np.searchsorted(rows, [first, first + len(batch)])
        parts.append(batch[rows[low:high] - first])
        first += len(batch)
    return np.concatenate(parts)


def _read(path: Path) -> Any:
    """The index in a file, mapped where FAISS can. Its vectors and lists must lie in it: FAISS would read beyond its end.

    Raises:
        CoderError: FAISS cannot read it, or it is not as long as it says.
    """
    faiss = import_faiss()
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_FLAT.size)
    flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
    if flat := head[:4] == b"IxFI":
        if len(head) < _FLAT.size or size != _FLAT.size + 4 * _FLAT.unpack(head)[-1]:
            raise CoderError(f"{path} is damaged: it is not as long as it says; build the index again")
        flags |= getattr(faiss, "IO_FLAG_MMAP_IFC", 0)
    limits = [name for name in ("vector_byte_limit", "loop_limit") if hasattr(faiss, f"set_deserialization_{name}")]
    before = [getattr(faiss, f"get_deserialization_{name}")() for name in limits]
    try:
        for name in limits:  # sizes in the file are not believed
            getattr(faiss, f"set_deserialization_{name}")(max(size, 1 << 20))
        index = faiss.read_index(str(path), flags if flat else flags | faiss.IO_FLAG_MMAP)
    except (OSError, RuntimeError, MemoryError) as error:
        raise CoderError(f"{path} is not a FAISS index: {short(error)}") from error
    finally:
        for name, value in zip(limits, before, strict=True):
            getattr(faiss, f"set_deserialization_{name}")(value)
    inverted = faiss.try_extract_index_ivf(index)
    if inverted is None:
        return index
    lists = faiss.downcast_InvertedLists(inverted.invlists)
    # fast-scan lists pack the codes of several vectors in a block
    fits = isinstance(lists, faiss.BlockInvertedLists) or lists.code_size == inverted.code_size
    if not inverted.quantizer.ntotal == inverted.nlist == lists.nlist or not fits:
        raise CoderError(f"{path} is damaged: its lists do not fit it; build the index again")
    if isinstance(lists, faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0  # threads that a search would begin and end
        places = [lists.lists.at(number) for number in range(lists.nlist)]
        ends = [each.offset + each.capacity * (lists.code_size + 8) for each in places]
        if max(ends, default=0) > size or any(each.size > each.capacity for each in places):
            raise CoderError(f"{path} is damaged: its lists lie beyond its end; build the index again")
    return index


class Vectors:
    """One kind of an index's vectors.

    Args:
        path: a file that :func:`build` made.
        items: N.
        views: V.
        dimensions: D.
        parameters: of FAISS's parameter space, such as ``nprobe=16`` or ``efSearch=64``.
        gpu: search on the first GPU, where FAISS sees one and supports this kind of index on it.

    Raises:
        CoderError: the file is not such an index; parameters that are unknown or out of range.
    """

    def __init__(
        self, path: Path, *, items: int, views: int, dimensions: int, parameters: str | None = None, gpu: bool = True
    ) -> None:
        faiss = import_faiss()
        self.path, self.items, self.views, self.dimensions = path, items, views, dimensions
        self._cpu = index = _read(path)
        if (index.ntotal, index.d, index.metric_type) != (items * views, dimensions, faiss.METRIC_INNER_PRODUCT):
            raise CoderError(
                f"{path} holds {index.ntotal:,} vectors of {index.d} dimensions, expected {items * views:,} of {dimensions} to "
                "compare by inner product: build the index again"
            )
        if not index.is_trained:
            raise CoderError(f"{path} is not trained: build the index again")
        if parameters:
            try:
                faiss.ParameterSpace().set_index_parameters(index, parameters)
            except RuntimeError as error:
                kind = type(faiss.downcast_index(index)).__name__
                raise CoderError(
                    f"{parameters!r} is not valid for this index ({path.name} is {kind}): "
                    "IVF takes nprobe=16 and HNSW efSearch=64, for example; Flat takes none"
                ) from error
        self._inverted = faiss.try_extract_index_ivf(index)
        if self._inverted is not None and self._inverted.nprobe < 1:
            raise CoderError(f"{path} would be searched in no list: nprobe must be 1 or more")
        self._graph = any(isinstance(part, faiss.IndexHNSW) for part in _parts(index))
        self._gpu = _to_gpu(index, path) if gpu else None
        self._warned = self._mapped = False

    @property
    def on_gpu(self) -> bool:
        """Whether searches run on a GPU."""
        return self._gpu is not None

    def search(self, queries: np.ndarray, k: int, *, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The k best items for each query by inner product, the greatest over an item's vectors; equal ones by row.

        An index of lists or a graph that finds fewer than k is searched whole, so k are found as long as there are so many.

        Args:
            queries: [q, D], finite, any float dtype.
            k: results, 1 or more; at most as many as may be found are returned.
            rows: that may be found, int64 in any order; None: all.

        Returns:
            Scores [q, k] float32 in descending order, and rows [q, k] int64.

        Raises:
            CoderError: queries of another shape or not finite; k below 1; rows that the index does not have.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimensions:
            raise CoderError(f"queries must be [q, {self.dimensions}], got {list(queries.shape)}")
        if k < 1:
            raise CoderError(f"k must be at least 1, got {k}")
        if not np.isfinite(queries).all():
            raise CoderError("a query's vector is not finite")
        allowed = None if rows is None else np.unique(self._checked(rows))
        count = self.items if allowed is None else len(allowed)
        k = min(k, count)
        if not k or not len(queries):
            return np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        if allowed is not None and self._graph and count < _FEW * self.items:
            return self._exact(queries, k, allowed)
        try:
            scores, found = self._nearest(queries, k, allowed)
        except RuntimeError as error:
            if allowed is None:
                raise CoderError(f"{self.path} cannot be searched: {short(error)}") from error
            return self._exact(queries, k, allowed)  # a kind of index that cannot leave rows out
        few = np.flatnonzero((found < 0).any(1))
        if len(few):
            scores[few], found[few] = self._whole(queries[few], k, allowed)
        return scores, found

    def gather(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors [n, V, D] float32 of n items, as the index stores them.

        Raises:
            CoderError: this kind of index does not store them; no such row.
        """
        rows = self._checked(np.asarray(rows, dtype=np.int64))
        if self._inverted is not None and not self._mapped:
            self._inverted.make_direct_map()
            self._mapped = True
        numbers = (rows[:, None] * self.views + np.arange(self.views)).reshape(-1)
        try:
            vectors = self._cpu.reconstruct_batch(numbers)
        except RuntimeError as error:
            raise CoderError(f"{self.path}: this kind of index does not store vectors: {short(error)}") from error
        return vectors.reshape(len(rows), self.views, self.dimensions)

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise CoderError(f"rows must be whole numbers [n], got {rows.dtype} of {list(rows.shape)}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.items:
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise CoderError(f"{self.path} has no row {wrong}, only {self.items:,}")
        return rows.astype(np.int64)

    def _nearest(
        self, queries: np.ndarray, k: int, allowed: np.ndarray | None, *, nprobe: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """FAISS's results as rows, -1 in the place of those that it has not found."""
        faiss = import_faiss()
        depth = k * self.views  # the best k items are among the best k * V vectors
        if allowed is None and nprobe is None:
            index = self._gpu if self._gpu is not None and depth <= _GPU_RESULTS else self._cpu
            scores, found = index.search(queries, depth)
            return self._items(scores, found, k)
        selector = None
        if allowed is not None:
            bits = np.zeros(self.items, bool)
            bits[allowed] = True
            packed = np.packbits(np.repeat(bits, self.views), bitorder="little")
            selector = faiss.IDSelectorBitmap(packed)
        parameters = _search_parameters(list(_parts(self._cpu)), selector, nprobe)
        scores, found = self._cpu.search(queries, depth, params=parameters)
        return self._items(scores, found, k)

    def _items(self, scores: np.ndarray, found: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The best k items of vectors in descending order, equal ones by row."""
        if (found >= self.items * self.views).any():
            raise CoderError(f"{self.path} is damaged: it finds vectors that it does not have; build the index again")
        rows = np.where(found < 0, -1, found // self.views)
        scores = np.where(found < 0, -np.inf, scores)
        if self.views > 1:
            order = np.lexsort((-scores, rows))  # of an item, the best vector first
            rows, scores = np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
            again = np.zeros_like(rows, dtype=bool)
            again[:, 1:] = rows[:, 1:] == rows[:, :-1]
            rows, scores = np.where(again, -1, rows), np.where(again, -np.inf, scores)
        order = np.lexsort((np.where(rows < 0, self.items, rows), -scores))[:, :k]
        return np.take_along_axis(scores, order, 1).astype(np.float32), np.take_along_axis(rows, order, 1)

    def _whole(self, queries: np.ndarray, k: int, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """A search of all lists, or of all vectors."""
        if self._inverted is None:
            return self._exact(queries, k, np.arange(self.items) if allowed is None else allowed)
        if not self._warned:
            log.warning(
                "%s: the nearest %d of %d lists have fewer than %d results, so all lists are searched, which is slower: raise "
                "it with --search-parameters nprobe=%d", self.path.name, self._inverted.nprobe, self._inverted.nlist, k,
                min(4 * self._inverted.nprobe, self._inverted.nlist),
            )  # fmt: skip
            self._warned = True
        return self._nearest(queries, k, allowed, nprobe=self._inverted.nlist)

    def _exact(self, queries: np.ndarray, k: int, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best of some rows, all of which are compared."""
        scores = np.empty((len(queries), 0), np.float32)
        rows = np.empty((len(queries), 0), np.int64)
        for start in range(0, len(allowed), _ROWS):
            some = allowed[start : start + _ROWS]
            products = np.einsum("qd,nvd->qnv", queries, self.gather(some), optimize=True).max(2)
            scores = np.concatenate([scores, products], 1)
            rows = np.concatenate([rows, np.broadcast_to(some, products.shape)], 1)
            order = np.lexsort((rows, -scores))[:, :k]
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        return scores, rows


def _search_parameters(parts: Sequence[Any], selector: Any, nprobe: int | None) -> Any:
    """FAISS's parameters of a search for an index and those that it wraps, with what the index was opened with."""
    faiss = import_faiss()
    index, inner = parts[0], parts[1:]
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.SearchParametersPreTransform(index_params=_search_parameters(inner, selector, nprobe))
    if isinstance(index, faiss.IndexRefine):
        base = _search_parameters(inner, selector, nprobe)
        return faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=base)
    options = {} if selector is None else {"sel": selector}
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=nprobe or index.nprobe, **options)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=index.hnsw.efSearch, **options)
    return faiss.SearchParameters(**options)


def _to_gpu(index: Any, path: Path) -> Any:
    """The index on the first GPU; None where FAISS sees none, or does not support it there."""
    faiss = import_faiss()
    if not getattr(faiss, "get_num_gpus", int)():
        return None
    try:
        resources = faiss.StandardGpuResources()
        copy = faiss.index_cpu_to_gpu(resources, 0, index)
        copy.resources = resources  # they must live as long
        return copy
    except (RuntimeError, AttributeError) as error:
        log.warning("%s is searched on the CPU: FAISS does not support it on a GPU: %s", path.name, short(error))
        return None
