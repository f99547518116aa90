"""The vectors of all segments of an index, searched as one.

Shape letters: N items, D dimensions, V embeddings of an item, q queries, k results, S segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.index.vectors_file import Selection, VectorsFile, check_finite, import_faiss, warn_of_overwritten


class Vectors:
    """One kind of an index's vectors. A row is that of the segment after those of the segments before it.

    Args:
        paths: a file for each segment that has items.
        counts: the items of each, from 1.
        views: V.
        dimensions: D.
        removed: rows that are not found, ascending int64; None: all are.
        verify: also read flat files, whose numbers must be finite.
        gpu: search on the first GPU, where FAISS sees one and supports this kind of index on it.
        **options: of :class:`~coder_plugin.index.vectors_file.VectorsFile`.

    Raises:
        CoderError: a file is not a FAISS index, or not of so many vectors; unknown parameters.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        *,
        views: int,
        dimensions: int,
        removed: np.ndarray | None = None,
        verify: bool = False,
        gpu: bool = True,
        **options: Any,
    ) -> None:
        self.views, self.dimensions, self.items = views, dimensions, sum(counts)
        if gpu:
            warn_of_overwritten()
        faiss = import_faiss()
        # resources must live as long as the indexes
        self._resources = faiss.StandardGpuResources() if gpu and faiss.get_num_gpus() else None
        options |= {"views": views, "dimensions": dimensions, "resources": self._resources}
        self.files = [VectorsFile(path, items=count, **options) for path, count in zip(paths, counts, strict=True)]
        if verify:
            for file in self.files:
                if file.flat:
                    check_finite(file.path, dimensions)
        #: Each segment's first row, and at the end the number of rows.
        self.first = [0, *accumulate(counts)]
        self.removed = np.zeros(0, dtype=np.int64) if removed is None else removed
        self._present = self._selections(None) if len(self.removed) else None
        self._one_training = self._resources is None and all(self.files[0].lists_like(file) for file in self.files)
        if self._one_training:
            for file in self.files[1:]:
                file.share_centroids(self.files[0])

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU searches, which one thread at a time may ask."""
        return any(file.faiss is not file.cpu_index for file in self.files)

    def search(self, queries: np.ndarray, k: int, *, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The k best items of each query.

        An item's score is that of its best embedding. Equal scores are ordered by row. An approximate index may return fewer
        than k items; the remaining rows are then -1 with a score of -inf. Where ``rows`` are given, or rows were removed, it
        returns k as long as so many may be found.

        Args:
            queries: [q, D], finite, any float dtype.
            k: results, 1 or more; at most as many as may be found are returned.
            rows: that may be found, int64 in any order; None: all that were not removed.

        Returns:
            Scores [q, k] float32 in descending order, and rows [q, k] int64.

        Raises:
            CoderError: queries of another shape or not finite; k below 1; rows that the index does not have; an index whose
                results are no rows of it.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimensions:
            raise CoderError(f"queries must be [q, {self.dimensions}], got {list(queries.shape)}")
        if k < 1:
            raise CoderError(f"k must be at least 1, got {k}")
        if not math.isfinite(queries.sum()) and not np.isfinite(queries).all():
            raise CoderError("a query's vector is not finite")
        selections = self._present if rows is None else self._selections(self._checked(rows))
        if selections is None:
            found = self._merged(queries, min(k, self.items), [None] * len(self.files))
        else:
            k = min(k, sum(each.items for each in selections))
            found = self._merged(queries, k, selections)
            few = np.flatnonzero((found[1] < 0).any(1))
            if len(few):
                for values, others in zip(found, self._merged(queries[few], k, selections, exhaustive=True), strict=True):
                    values[few] = others
        return found

    def gather(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors [n, V, D] float32 of n items, as the index stores them; also of those that were removed.

        Raises:
            CoderError: this kind of index does not store them; no such row.
        """
        rows = self._checked(np.asarray(rows))
        vectors = np.empty((len(rows), self.views, self.dimensions), dtype=np.float32)
        segments = np.searchsorted(self.first, rows, side="right") - 1
        for segment in np.unique(segments).tolist():
            here = segments == segment
            vectors[here] = self.files[segment].gather(rows[here] - self.first[segment])
        return vectors

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise CoderError(f"rows must be whole numbers [n], got {rows.dtype} of {list(rows.shape)}")
        rows = rows.astype(np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.items:
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise CoderError(f"{self.files[0].path.parent} has no row {wrong}, only {self.items}")
        return rows

    def _selections(self, rows: np.ndarray | None) -> list[Selection]:
        """What each segment may find: ``rows`` (None: all), without those that were removed."""
        allowed = np.full(self.items, rows is None)
        if rows is not None:
            allowed[rows] = True
        allowed[self.removed] = False
        return [Selection.of(allowed[first:last], self.views) for first, last in pairwise(self.first)]

    def _merged(
        self, queries: np.ndarray, k: int, selections: Sequence[Selection | None], *, exhaustive: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best of all segments, equal scores by row."""
        lists = self.files[0].nearest_lists(queries) if self._one_training and not exhaustive else None
        if lists is not None:
            for file in self.files:
                file.ask_for(lists)  # of all, before the first is searched
        scores, rows = [], []
        for first, file, selection in zip(self.first, self.files, selections, strict=False):
            if (most := min(k, file.items if selection is None else selection.items)) == 0:
                continue
            options = {"selection": selection, "exhaustive": exhaustive, "lists": lists}
            found = file.search(queries, most, **options)  # type: ignore[arg-type]
            scores.append(found[0])
            rows.append(np.where(found[1] < 0, -1, found[1] + first) if first else found[1])
        if len(scores) == 1:
            return scores[0], rows[0]
        if not scores:
            return np.empty((len(queries), 0), dtype=np.float32), np.empty((len(queries), 0), dtype=np.int64)
        every_score, every_row = np.concatenate(scores, 1), np.concatenate(rows, 1)
        order = np.lexsort((every_row, -every_score))[:, :k]
        return np.take_along_axis(every_score, order, 1), np.take_along_axis(every_row, order, 1)
