"""The names behind an index's rows: keys, ids, captions and thumbnails, in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError

_TABLES = """
CREATE TABLE images (row INTEGER PRIMARY KEY, key TEXT NOT NULL, image_id INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE TABLE thumbnails (row INTEGER PRIMARY KEY, file BLOB NOT NULL);
CREATE TABLE captions (row INTEGER PRIMARY KEY, image INTEGER NOT NULL, text TEXT NOT NULL);
"""
_MANY = 500  # placeholders of one query: SQLite bounds them


class Image(NamedTuple):
    """An image of an index. ``image_id``: the stable hash of its key that training knows it by."""

    row: int
    key: str
    image_id: int


class Caption(NamedTuple):
    """A caption of an index, and the row of its image."""

    row: int
    text: str
    image: int


def create(path: Path) -> sqlite3.Connection:
    """An empty file of records, of any that was there."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    # written aside and flushed as a whole: a journal of its own would only cost time
    connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA page_size = 8192;" + _TABLES)
    return connection


def add(
    connection: sqlite3.Connection,
    images: Iterable[tuple[int, str, int, int]],
    thumbnails: Iterable[tuple[int, bytes]],
    captions: Iterable[tuple[int, int, str]],
) -> None:
    """Rows of images (row, key, image_id, position), of thumbnails (image's row, file) and of captions (row, image's row,
    text)."""
    image_rows = ((row, plain(key), *others) for row, key, *others in images)
    connection.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", image_rows)
    connection.executemany("INSERT INTO thumbnails VALUES (?, ?)", thumbnails)
    caption_rows = ((row, image, plain(text)) for row, image, text in captions)
    connection.executemany("INSERT INTO captions VALUES (?, ?, ?)", caption_rows)


def plain(text: str) -> str:
    """Text that can be stored: what is half of a character, as in a file name that is not UTF-8, is spelt out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def finish(connection: sqlite3.Connection) -> None:
    """The indexes that look-ups use, and the end of writing."""
    connection.executescript("CREATE INDEX of_image ON captions (image); CREATE INDEX of_key ON images (key);")
    connection.commit()
    connection.close()


class Records:
    """Reads them; from the thread that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            self._connection.execute("SELECT key FROM images LIMIT 1")
        except sqlite3.Error as error:
            raise CoderError(f"{path} is no file of an index's records: {error}") from error

    def images(self, rows: Sequence[int]) -> list[Image]:
        """Those of ``rows``, in their order."""
        found = {each[0]: each for each in self._select("SELECT row, key, image_id FROM images WHERE row IN ({})", rows)}
        return [Image(*found[row]) for row in rows]

    def captions_of(self, row: int) -> tuple[str, ...]:
        """All captions of an image's row, in their order; looked up when they are shown, for a search is as fast without."""
        found = self._connection.execute("SELECT text FROM captions WHERE image = ? ORDER BY row", (row,))
        return tuple(text for (text,) in found)

    def captions(self, rows: Sequence[int]) -> list[Caption]:
        """Those of ``rows``, in their order."""
        found = {each[0]: each for each in self._select("SELECT row, text, image FROM captions WHERE row IN ({})", rows)}
        return [Caption(*found[row]) for row in rows]

    def thumbnail(self, row: int) -> bytes | None:
        """The small picture's JPEG file of an image's row; None where there is none."""
        found = self._connection.execute("SELECT file FROM thumbnails WHERE row = ?", (row,)).fetchone()
        return None if found is None else found[0]

    def row_of(self, key: str) -> int | None:
        """The first image of this key."""
        found = self._connection.execute("SELECT MIN(row) FROM images WHERE key = ?", (plain(key),)).fetchone()
        return found[0]

    def close(self) -> None:
        self._connection.close()

    def _select(self, query: str, rows: Sequence[int]) -> Iterator[Any]:
        for start in range(0, len(rows), _MANY):
            some = [int(row) for row in rows[start : start + _MANY]]
            yield from self._connection.execute(query.format(",".join("?" * len(some))), some)
