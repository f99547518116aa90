"""What an index's rows stand for: keys, ids, captions, paths, thumbnails and metadata, over all its segments."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.index.records_file import RecordsFile

#: The longest that a filter or a query may take: looking up some hundred rows takes milliseconds, and a damaged file may have
#: loops.
SECONDS = 20.0
_LONGEST = 10_000  # characters of an expression
#: Characters of a caption, or of a key, that a page or an answer shows: somebody else's index may have far longer ones.
SHOWN = 2000


class Image(NamedTuple):
    """An image of an index.

    ``image_id`` is the stable hash of its key, as in training. ``path`` is where the picture is: an absolute path or a URL, of
    the tar for a picture in a shard, whose name in it is ``member``; None where that is not known.
    """

    row: int
    key: str
    image_id: int
    path: str | None = None
    member: str | None = None


class Caption(NamedTuple):
    """A caption of an index, and the row of its image."""

    row: int
    text: str
    image: int


def storable(text: str) -> str:
    """The text as valid UTF-8: lone surrogates, as in a file name that is not UTF-8, become escapes.

    Example:
        >>> storable("caf\\udce9.png")
        'caf\\\\udce9.png'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Records:
    """The records of all segments as one; a row is that of the segment after those of the segments before it.

    Args:
        files: of the segments, in their order.
        images: how many images each holds.
        captions: how many captions each holds.
        removed: rows that were removed, by kind, ascending: they keep their records, but :meth:`row_of` and :meth:`where` do
            not find them.

    Raises:
        CoderError: by all methods: a row that the index lacks, or a damaged file.
    """

    def __init__(
        self,
        files: Sequence[RecordsFile],
        images: Sequence[int],
        captions: Sequence[int],
        removed: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.files = list(files)
        #: Each segment's first row, and at the end the number of rows, by kind.
        self.first = {"images": [0, *accumulate(images)], "captions": [0, *accumulate(captions)]}
        self.removed = removed or dict.fromkeys(self.first, np.zeros(0, dtype=np.int64))

    def images(self, rows: Sequence[int]) -> list[Image]:
        """The images of ``rows``, in that order."""
        return self._gather("images", rows, self._images)

    def captions(self, rows: Sequence[int]) -> list[Caption]:
        """The captions of ``rows``, in that order."""
        return self._gather("captions", rows, self._captions)

    def captions_of(self, row: int, *, limit: int | None = None, characters: int | None = None) -> tuple[str, ...]:
        """The captions of an image, in the data's order.

        Args:
            row: of the image.
            limit: captions, at most; None: all.
            characters: of each, at most; None: all.
        """
        segment, local = self._place("images", row)
        return tuple(text for _, text in self.files[segment].captions_of(local, limit=limit, characters=characters))

    def caption_rows(self, images: np.ndarray) -> np.ndarray:
        """Rows of all captions of images, ascending, int64; ``images`` are rows in ascending order."""
        found = [np.zeros(0, dtype=np.int64)]
        for segment, file in enumerate(self.files):
            first, end = self.first["images"][segment : segment + 2]
            local = images[np.searchsorted(images, first) : np.searchsorted(images, end)] - first
            if len(local):
                found.append(file.caption_rows(local.tolist()) + self.first["captions"][segment])
        return np.concatenate(found)

    def thumbnail(self, row: int) -> bytes | None:
        """The JPEG file of an image's thumbnail; None where there is none."""
        segment, local = self._place("images", row)
        return self.files[segment].thumbnail(local)

    def metadata(self, row: int, *, characters: int | None = None) -> dict[str, Any]:
        """The metadata columns of an image, of a text so many characters; None where a column has no value."""
        segment, local = self._place("images", row)
        return self.files[segment].metadata(local, characters=characters)

    def values(self, column: str, most: int) -> list[Any] | None:
        """The different values of a metadata column, ascending; None where they are more than ``most``."""
        found: set[Any] = set()
        for file in self.files:
            some = file.values(column, most)
            if some is None or len(found := found | set(some)) > most:
                return None
        return sorted(found)

    def row_of(self, key: str) -> int | None:
        """The row of the first image with this key that was not removed; None where there is none."""
        return next((row for rows in self.rows_of([key]).values() for row in rows), None)

    def rows_of(self, keys: Sequence[str]) -> dict[str, list[int]]:
        """Rows of all images with these keys that were not removed, by key; keys that are not there are left out."""
        found: dict[str, list[int]] = {}
        for first, file in zip(self.first["images"], self.files, strict=False):
            for key, rows in file.rows_of(keys).items():
                found.setdefault(key, []).extend(row + first for row in rows)
        every = np.array([row for rows in found.values() for row in rows], dtype=np.int64)
        if removed := {*every[self.is_removed(every)].tolist()}:
            left = {key: [row for row in rows if row not in removed] for key, rows in found.items()}
            found = {key: rows for key, rows in left.items() if rows}
        return found

    def where(self, expression: str, *, kind: str = "images") -> np.ndarray:
        """Rows of the images for which an expression is true.

        Args:
            expression: an SQL expression of SQLite over ``key``, ``path``, ``member`` and the metadata columns, such as
                ``source = 'coco' AND width > 640``.
            kind: "images"; or "captions": rows of the captions of these images.

        Returns:
            int64, ascending; without those that were removed.

        Raises:
            CoderError: not an expression, one that reads or calls something else, or one that takes over 20 seconds.
        """
        if not isinstance(expression, str) or not expression.strip() or len(expression) > _LONGEST:
            raise CoderError(f"a filter must be an expression of 1 to {_LONGEST:,} characters, such as source = 'coco'")
        rows, end = np.zeros(0, dtype=np.int64), time.monotonic() + SECONDS
        for file, (first, last) in zip(self.files, pairwise(self.first[kind]), strict=True):
            rows = np.concatenate([rows, file.where(expression, kind, size=last - first, end=end) + first])
        return rows[~self.is_removed(rows, kind=kind)]

    def is_removed(self, rows: np.ndarray, *, kind: str = "images") -> np.ndarray:
        """Which of ``rows`` were removed."""
        removed = self.removed[kind]
        return np.searchsorted(removed, rows, "left") != np.searchsorted(removed, rows, "right")

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def _place(self, kind: str, row: int) -> tuple[int, int]:
        """A row's segment, and its row there."""
        if not 0 <= row < self.first[kind][-1]:
            raise CoderError(f"{self.files[0].path} has no row {row} in its {kind}: the index is damaged, build it again")
        segment = bisect_right(self.first[kind], row) - 1
        return segment, int(row) - self.first[kind][segment]

    def _gather(self, kind: str, rows: Sequence[int], read: Callable[[int, list[int]], Iterator[Any]]) -> list[Any]:
        places = [self._place(kind, row) for row in rows]
        by_segment: dict[int, list[int]] = {}
        for segment, local in places:
            by_segment.setdefault(segment, []).append(local)
        found = {segment: iter(read(segment, local)) for segment, local in by_segment.items()}
        return [next(found[segment]) for segment, _ in places]

    def _images(self, segment: int, rows: list[int]) -> Iterator[Image]:
        for row, *others in self.files[segment].images(rows):
            yield Image(row + self.first["images"][segment], *others)

    def _captions(self, segment: int, rows: list[int]) -> Iterator[Caption]:
        first, end = self.first["images"][segment : segment + 2]
        for row, text, image in self.files[segment].captions(rows):
            if not 0 <= image < end - first:
                path = self.files[segment].path
                raise CoderError(f"{path} is damaged: caption {row} belongs to no image; build the index again")
            yield Caption(row + self.first["captions"][segment], text, image + first)
