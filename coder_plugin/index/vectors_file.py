"""FAISS: write vectors to a file, train, and search one file.

Flat files and the lists of inverted files are mapped into memory: opening takes no time, and memory holds what searches read.

Shape letters: N items, D dimensions, V embeddings of an item, q queries, k results.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import re
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.index.read_ahead import ReadAhead

log = logging.getLogger(__name__)
_ROWS = 4096  # vectors that are read at once
#: A flat index's file: name, dimensions, vectors, two unused numbers, trained, metric, floats that follow.
_FLAT, _FLAT_NAME, _UNUSED = struct.Struct("<4siqqqBiQ"), b"IxFI", 1 << 20
#: Parts of a factory string that keep vectors unchanged.
_LOSSLESS = re.compile(r"Flat|HNSW\d*|(?:IVF\d+|IMI2x\d+)(?:_HNSW\d*)?")
#: Parts of a factory string whose indexes take no vectors without ids, or no second batch of vectors.
_UNSUPPORTED = re.compile(r"IDMap|NSG")
#: Results that a search which cannot leave rows out may hold at once: 192 MB with their rows and scores.
_MOST_RESULTS = 1 << 24
#: FAISS may always read vectors of so many bytes: constants of small indexes.
_LEAST_LIMIT = 1 << 20
#: The most results that FAISS's GPU indexes return.
GPU_RESULTS = 2048
#: Of a graph (HNSW) whose rows may be found to a smaller part, the vectors are searched one by one.
_FEW = 0.05


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
        CoderError: FAISS does not know the factory, or not for so many dimensions or inner products; IDMap or NSG.
    """
    faiss = import_faiss()

    if _UNSUPPORTED.search(factory):
        raise CoderError(f"an index {factory!r} cannot be built in segments: use Flat, HNSW32 or IVF1024,Flat, for example")
    try:
        index = faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, AssertionError) as error:
        why = "it has no inner product" if "METRIC_L2" in str(error) else short(error)
        raise CoderError(
            f"FAISS knows no index factory {factory!r} for {dimensions} dimensions; use Flat, HNSW32, "
            f"IVF1024,Flat or PQ64, for example: {why}"
        ) from error
    if _parts(index)[1].metric_type != faiss.METRIC_INNER_PRODUCT:
        raise CoderError(f"FAISS does not compare by inner products in {factory!r}: use HNSW32 or IVF1024,PQ64, for example")
    return index


def is_lossless(factory: str) -> bool:
    """Whether an index of this FAISS factory string stores vectors as they were added. Of a string that is not known: False.

    Example:
        >>> [is_lossless(factory) for factory in ("Flat", "HNSW32", "IVF1024,Flat", "IVF1024,PQ16", "OPQ16,PQ16")]
        [True, True, True, False, False]
    """
    return all(map(_LOSSLESS.fullmatch, factory.split(",")))


def short(error: BaseException) -> str:
    """FAISS's message without the source line that it begins with.

    Example:
        >>> short(RuntimeError("Error in void f(int) at /a/b.cpp:12: Error: 'd > 0' failed: d must be positive"))
        'd must be positive'
        >>> short(RuntimeError("Error in void f(int) at /a/b.cpp:12: could not parse"))
        'could not parse'
    """
    message = re.sub(r"^Error in .*? at \S+:\d+: ", "", " ".join(str(error).split()))
    return message.rpartition("failed: ")[2][:200]


def write(path: Path, batches: Iterable[np.ndarray], empty: Any) -> int:
    """Write vectors to a file. A flat index is written as the vectors come; of other kinds one file is held in memory.

    Args:
        path: the file.
        batches: vectors [n, D] float32.
        empty: the index that they are added to, trained and empty; or None for a flat one.

    Returns:
        The number of vectors.

    Raises:
        CoderError: FAISS cannot add the vectors.
    """
    faiss = import_faiss()

    if empty is None:
        return _write_flat(path, batches)
    try:
        for batch in batches:
            empty.add(np.ascontiguousarray(batch))
        faiss.write_index(empty, str(path))
    except RuntimeError as error:
        raise CoderError(f"FAISS cannot write {path}: {short(error)}") from error
    return empty.ntotal


def _write_flat(path: Path, batches: Iterable[np.ndarray]) -> int:
    """The file that FAISS writes of IndexFlatIP, of which one batch at a time is in memory."""
    count = dimensions = 0
    with open(path, "wb") as file:
        file.seek(_FLAT.size)
        for batch in batches:
            np.ascontiguousarray(batch, dtype="<f4").tofile(file)
            count, dimensions = count + len(batch), batch.shape[1]
        file.seek(0)
        file.write(_FLAT.pack(_FLAT_NAME, dimensions, count, _UNUSED, _UNUSED, 1, 0, count * dimensions))
    return count


def read(path: Path, *, mapped: bool = True) -> Any:
    """The index in a file that FAISS alone can read, which is kept to the file's own size and folder.

    FAISS can map any file, but it reads beyond the end of one that ends early. So only the lists of inverted files are
    mapped, and their places are checked; other kinds are read.

    Args:
        path: the file.
        mapped: False: read the lists too, so that vectors can be added.

    Raises:
        CoderError: FAISS cannot read it, or its lists lie beyond its end.
    """
    faiss = import_faiss()

    size = path.stat().st_size
    limits = ("deserialization_vector_byte_limit", "deserialization_loop_limit")
    before = {name: getattr(faiss, f"get_{name}")() for name in limits if hasattr(faiss, f"set_{name}")}
    # Lists that lie in another file are looked for in the index's folder only, and nothing is written to. FAISS's precomputed
    # table is not made: it may be larger than the file, and only Euclidean distances use it.
    flags = faiss.IO_FLAG_READ_ONLY | (faiss.IO_FLAG_MMAP if mapped else faiss.IO_FLAG_ONDISK_SAME_DIR)
    flags |= faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
    try:
        for name in before:
            getattr(faiss, f"set_{name}")(max(size, _LEAST_LIMIT))
        index = faiss.read_index(str(path), flags)
    except (OSError, RuntimeError, MemoryError) as error:
        raise CoderError(f"{path} is not a FAISS index: {short(error)}") from error
    finally:
        for name, value in before.items():
            getattr(faiss, f"set_{name}")(value)
    if (inverted := faiss.try_extract_index_ivf(index)) is not None:
        lists = faiss.downcast_InvertedLists(inverted.invlists)
        if isinstance(lists, faiss.OnDiskInvertedLists):
            _check_lists(path, size, lists, inverted)
    return index


def _check_lists(path: Path, size: int, lists: Any, inverted: Any) -> None:
    """Mapped lists lie within the file."""
    lists.prefetch_nthread = 0  # threads that a search would begin and end
    if lists.nlist != inverted.nlist or lists.code_size != inverted.code_size or lists.totsize > size:
        raise CoderError(f"{path} is not a FAISS index: its lists do not fit it")
    if not lists.nlist:
        return
    counts, capacities, places = _places(lists).astype(np.float64).T
    ends = places + capacities * (lists.code_size + 8)
    if (counts > capacities).any() or ends.max() > size or counts.sum() != inverted.ntotal:
        raise CoderError(f"{path} is not a FAISS index: its lists lie beyond its end")


def _places(lists: Any) -> np.ndarray:
    """Of each mapped list its size, the size that it may grow to, and its first byte in the file: [nlist, 3] uint64."""
    fields = (ctypes.c_size_t * (3 * lists.nlist)).from_address(int(lists.lists.data().this))
    return np.frombuffer(fields, dtype=np.uint64).reshape(-1, 3).copy()


def _read_ahead(index: Any) -> ReadAhead | None:
    """Of an inverted file whose lists are mapped; None of others."""
    faiss = import_faiss()

    inverted = faiss.try_extract_index_ivf(index)
    lists = None if inverted is None else faiss.downcast_InvertedLists(inverted.invlists)
    if not isinstance(lists, faiss.OnDiskInvertedLists) or not lists.nlist:
        return None
    _, capacities, starts = _places(lists).astype(np.int64).T
    return ReadAhead(lists, np.stack([starts, capacities * (lists.code_size + 8)], 1))


def _read_flat(path: Path) -> Any:
    """A flat index, mapped. Its header was checked: it ends where its vectors do."""
    faiss = import_faiss()

    index = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
    if hasattr(faiss, "IO_FLAG_MMAP_IFC") and sys.platform == "linux":  # FAISS asks to read no pages ahead
        page = mmap.PAGESIZE
        address = int(faiss.downcast_index(index).get_xb()) // page * page
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(path.stat().st_size), mmap.MADV_NORMAL)
    return index


def _check_flat(path: Path, head: bytes, count: int, dimensions: int) -> None:
    """A flat inner-product index, whose file is a header of fixed length and the vectors."""
    faiss = import_faiss()

    if len(head) < _FLAT.size:
        raise CoderError(f"{path} is not a FAISS index: it ends in its header")
    _, d, total, _, _, trained, metric, length = _FLAT.unpack(head)
    if (d, total, length) != (dimensions, count, count * dimensions):
        raise CoderError(f"{path} holds {total} vectors of {d} dimensions, expected {count} of {dimensions}")
    if trained != 1 or metric != faiss.METRIC_INNER_PRODUCT:
        raise CoderError(f"{path} does not compare by inner products: it was not written by coder-plugin index")
    if (size := path.stat().st_size) != _FLAT.size + 4 * length:
        raise CoderError(f"{path} has {size} bytes, not the {_FLAT.size + 4 * length} of its {count} vectors")


def check_finite(path: Path, dimensions: int) -> None:
    """Read a flat index's vectors.

    Raises:
        CoderError: one of them is not finite.
    """
    vectors = np.memmap(path, "<f4", "r", _FLAT.size).reshape(-1, dimensions)
    for start in range(0, len(vectors), _ROWS):
        if not math.isfinite(float(np.abs(vectors[start : start + _ROWS]).max())):
            raise CoderError(f"{path} holds vectors that are not finite, from row {start} on: build the index again")


class Selection(NamedTuple):
    """The embeddings of a file that a search may find: a bit for each, and their number of items."""

    bits: np.ndarray  # [ceil(N * V / 8)] uint8, the lowest bit first
    items: int

    @classmethod
    def of(cls, allowed: np.ndarray, views: int) -> Selection:
        """From which items [N] are allowed, bool."""
        return cls(np.packbits(np.repeat(allowed, views), bitorder="little"), int(np.count_nonzero(allowed)))


class VectorsFile:
    """One kind of a segment's vectors.

    Args:
        path: a file that :func:`write` made.
        items: N.
        views: V.
        dimensions: D.
        flat: the file must be a flat index, which FAISS reads after its header has been checked here.
        parameters: of FAISS's parameter space, such as ``nprobe=16`` or ``efSearch=64``.
        resources: of the GPU to search on, if FAISS supports this kind of index on it; None: the CPU.

    Raises:
        CoderError: the file is not a FAISS index, or not of so many vectors; parameters that are unknown or out of range.
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
        resources: Any = None,
    ) -> None:
        faiss = import_faiss()

        with open(path, "rb") as file:
            head = file.read(_FLAT.size)
        self.flat = head[:4] == _FLAT_NAME
        if self.flat:
            _check_flat(path, head, items * views, dimensions)
        elif flat:
            raise CoderError(f"{path} is not a flat index, as its manifest says: it was not written by coder-plugin index")
        index = _read_flat(path) if self.flat else read(path)
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
                kind = type(faiss.downcast_index(index)).__name__
                raise CoderError(
                    f"{parameters!r} is not valid for this index ({path.name} is {kind}): "
                    "IVF takes nprobe=16 and HNSW efSearch=64, for example; Flat takes none"
                ) from error
        if (inverted := faiss.try_extract_index_ivf(index)) is not None:
            if inverted.nprobe < 1:
                raise CoderError(f"{path} would be searched in no list: nprobe must be 1 or more, got {inverted.nprobe}")
            if inverted.quantizer.ntotal != inverted.nlist:
                raise CoderError(f"{path} is not a FAISS index: its lists do not fit it")
        self.cpu_index = index
        if resources is not None:
            try:
                index = faiss.index_cpu_to_gpu(resources, 0, index)
            except RuntimeError as error:
                log.warning("%s is searched on the CPU: FAISS does not support it on a GPU: %s", path.name, short(error))
        self.path, self.faiss, self.items, self.views, self.dimensions = path, index, items, views, dimensions
        self.transforms, self.inner = _parts(self.cpu_index)
        self.read_ahead = _read_ahead(self.cpu_index)

    def search(
        self,
        queries: np.ndarray,
        k: int,
        *,
        selection: Selection | None = None,
        exhaustive: bool = False,
        lists: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best items of each query, without those that ``selection`` leaves out.

        Args:
            queries: [q, D] float32, contiguous.
            k: results, from 1 to N.
            selection: which may be found; None: all.
            exhaustive: look at every vector of a selection, also in an approximate index.
            lists: of :meth:`nearest_lists`; a selection does not use them.

        Returns:
            Scores [q, k] float32 in descending order, and rows [q, k] int64; -inf and -1 for what was not found.

        Raises:
            CoderError: an index whose results are no rows of it, or not numbers.
        """
        count = k * self.views
        try:
            if selection is not None:
                scores, rows = self._selected(queries, count, selection, exhaustive)
            elif lists is not None:
                inputs = self._transformed(queries)
                scores, rows = self.inner.search_preassigned(inputs, count, lists[1], lists[0])
            else:
                index = self.faiss if count <= GPU_RESULTS else self.cpu_index
                scores, rows = index.search(queries, count)
        except (RuntimeError, AssertionError) as error:
            raise CoderError(f"{self.path} cannot be searched: {short(error)}") from error
        if rows.max(initial=-1) >= self.items * self.views or np.isnan(scores).any():
            raise CoderError(f"{self.path} is damaged: it has results that are no rows, or not numbers; build it again")
        if self.flat and (rows.min(initial=0) < 0 or scores.max(initial=0) == np.inf):  # all that may be found is found
            raise CoderError(f"{self.path} holds vectors that are not finite: build the index again")
        if self.views > 1:
            return self._best(scores, rows, k)
        # count_nonzero is the fastest check: searching a few thousand vectors takes no longer than a dozen numpy calls
        if np.count_nonzero(scores[:, 1:] == scores[:, :-1]):
            order = np.lexsort((rows, -scores))
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        if np.count_nonzero(rows[:, -1] < 0):
            scores[rows < 0] = -np.inf
        return scores, rows

    def lists_like(self, other: VectorsFile) -> bool:
        """Whether the lists of both can be chosen by one search of their centroids: inverted files of one training."""
        kinds = ("IndexIVFFlat", "IndexIVFPQ", "IndexIVFScalarQuantizer")
        return (
            type(self.inner).__name__ in kinds
            and type(self.inner) is type(other.inner)
            and (self.inner.nlist, self.inner.nprobe) == (other.inner.nlist, other.inner.nprobe)
            and len(self.transforms) == len(other.transforms)
        )

    def share_centroids(self, other: VectorsFile) -> None:
        """Use the centroids of another file of the same training, instead of a copy in memory."""
        faiss = import_faiss()
        own, theirs = (faiss.downcast_index(each.inner.quantizer) for each in (self, other))
        if isinstance(own, faiss.IndexFlat) and isinstance(theirs, faiss.IndexFlat) and own.ntotal == theirs.ntotal:
            if self.inner.own_fields and own.d == theirs.d:
                self.inner.own_fields = False
                self.inner.quantizer = theirs
                faiss.IndexIVFFlat(own, own.d, own.ntotal).own_fields = True  # its end, here, frees what it owns

    def nearest_lists(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and numbers [q, nprobe] of the lists that a search of an inverted file looks at."""
        return self.inner.quantizer.search(self._transformed(queries), min(self.inner.nprobe, self.inner.nlist))

    def ask_for(self, lists: tuple[np.ndarray, np.ndarray]) -> None:
        """Let the operating system read the lists of :meth:`nearest_lists`, if they are mapped; returns at once."""
        if self.read_ahead is not None:
            self.read_ahead.ask(lists[1])

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The vectors [n, V, D] float32 of n items from 0 to N - 1, as the index stores them.

        Raises:
            CoderError: this kind of index does not store them; they are not finite.
        """
        keys = (rows[:, None] * self.views + np.arange(self.views)).reshape(-1)
        try:
            if (lists := import_faiss().try_extract_index_ivf(self.cpu_index)) is not None:
                lists.make_direct_map()  # where each row is; does nothing the second time
            vectors = self.cpu_index.reconstruct_batch(keys).reshape(len(rows), self.views, self.dimensions)
        except RuntimeError as error:
            raise CoderError(f"this kind of index does not store its vectors: {short(error)}") from error
        if not math.isfinite(vectors.sum()) and not np.isfinite(vectors).all():
            raise CoderError(f"{self.path} holds vectors that are not finite: build the index again")
        return vectors

    def _transformed(self, queries: np.ndarray) -> np.ndarray:
        for transform in self.transforms:
            queries = transform.apply(queries)
        return queries

    def _selected(
        self, queries: np.ndarray, count: int, selection: Selection, exhaustive: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best embeddings of a selection, on the CPU."""
        faiss = import_faiss()
        index, share = self.cpu_index, selection.items / self.items
        if isinstance(self.inner, faiss.IndexHNSW) and (exhaustive or share < _FEW):
            index, queries = faiss.downcast_index(self.inner.storage), self._transformed(queries)
        selector = faiss.IDSelectorBitmap(selection.bits)
        parameters = _parameters(index, selector, exhaustive=exhaustive, width=math.ceil(count / share))
        if parameters is None:
            return _filtered(index, queries, count, selection)
        return index.search(queries, count, params=parameters)

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


def _parts(index: Any) -> tuple[list[Any], Any]:
    """The linear transforms before an index, and the index behind them."""
    faiss = import_faiss()

    index, transforms = faiss.downcast_index(index), []
    if isinstance(index, faiss.IndexPreTransform):
        chain = (index.chain.at(number) for number in range(index.chain.size()))
        transforms = [faiss.downcast_VectorTransform(each) for each in chain]
        index = faiss.downcast_index(index.index)
    return transforms, index


def _parameters(index: Any, selector: Any, *, exhaustive: bool, width: int) -> Any:
    """FAISS's parameters of a search that leaves rows out; None for a kind of index that cannot.

    ``width``: results that hold as many of the selection as are asked for, on average.
    """
    faiss = import_faiss()

    _, inner = _parts(index)
    if isinstance(inner, faiss.IndexRefine):
        base = _parameters(inner.base_index, selector, exhaustive=exhaustive, width=width)
        if base is None:
            return None
        return faiss.IndexRefineSearchParameters(k_factor=inner.k_factor, base_index_params=base)
    if isinstance(inner, (faiss.IndexPQ, faiss.IndexFastScan, faiss.IndexAdditiveQuantizer)):
        return None
    if isinstance(inner, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=inner.nlist if exhaustive else inner.nprobe)
    if isinstance(inner, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(width, inner.hnsw.efSearch))
    return faiss.SearchParameters(sel=selector)


def _filtered(index: Any, queries: np.ndarray, count: int, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
    """The best embeddings of a selection, from a search that cannot leave any out: it asks for more until they are enough."""
    block = max(1, _MOST_RESULTS // index.ntotal)
    if len(queries) > block:
        blocks = [_filtered(index, queries[start : start + block], count, selection) for start in range(0, len(queries), block)]
        return np.concatenate([scores for scores, _ in blocks]), np.concatenate([rows for _, rows in blocks])
    wanted = 2 * count
    while True:
        wanted = min(wanted, index.ntotal)
        scores, rows = index.search(queries, wanted)
        valid = (rows >= 0) & (rows < index.ntotal)
        kept = valid & (selection.bits[np.where(valid, rows, 0) >> 3] >> (rows & 7) & 1).astype(bool)
        if wanted == index.ntotal or kept.sum(1).min() >= count:
            break
        wanted *= 4
    best = np.full((len(queries), count), -np.inf, dtype=np.float32)
    found = np.full((len(queries), count), -1, dtype=np.int64)
    for query, keep in enumerate(kept):
        places = np.flatnonzero(keep)[:count]
        best[query, : len(places)], found[query, : len(places)] = scores[query, places], rows[query, places]
    return best, found
