"""What an index's rows stand for: keys, ids, captions and thumbnails, in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError

_TABLES = """
CREATE TABLE images (row INTEGER PRIMARY KEY, key TEXT NOT NULL, image_id INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE TABLE thumbnails (row INTEGER PRIMARY KEY, file BLOB NOT NULL);
CREATE TABLE captions (row INTEGER PRIMARY KEY, image INTEGER NOT NULL, text TEXT NOT NULL);
"""
_MAX_PLACEHOLDERS = 500  # of one query: SQLite limits them


class Image(NamedTuple):
    """An image of an index. ``image_id`` is the stable hash of its key, as in training."""

    row: int
    key: str
    image_id: int


class Caption(NamedTuple):
    """A caption of an index, and the row of its image."""

    row: int
    text: str
    image: int


def create(path: Path) -> sqlite3.Connection:
    """An empty file of records; replaces an existing one."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    # a temporary file that is flushed as a whole before it is renamed: SQLite's journal would only cost time
    connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA page_size = 8192;" + _TABLES)
    return connection


def add(
    connection: sqlite3.Connection,
    images: Iterable[tuple[int, str, int, int]],
    thumbnails: Iterable[tuple[int, bytes]],
    captions: Iterable[tuple[int, int, str]],
) -> None:
    """Insert rows.

    Args:
        connection: of :func:`create`.
        images: (row, key, image_id, position in the data).
        thumbnails: (row of the image, JPEG file).
        captions: (row, row of the image, text).
    """
    image_rows = ((row, storable(key), *others) for row, key, *others in images)
    connection.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", image_rows)
    connection.executemany("INSERT INTO thumbnails VALUES (?, ?)", thumbnails)
    caption_rows = ((row, image, storable(text)) for row, image, text in captions)
    connection.executemany("INSERT INTO captions VALUES (?, ?, ?)", caption_rows)


def storable(text: str) -> str:
    """The text as valid UTF-8: lone surrogates, as in a file name that is not UTF-8, become escapes.

    Example:
        >>> storable("caf\\udce9.png")
        'caf\\\\udce9.png'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def finish(connection: sqlite3.Connection) -> None:
    """Create the indexes for look-ups, commit and close."""
    connection.executescript("CREATE INDEX of_image ON captions (image); CREATE INDEX of_key ON images (key);")
    connection.commit()
    connection.close()


class Records:
    """Reads the records, from the thread that opened them.

    Args:
        path: a file that :func:`create`, :func:`add` and :func:`finish` wrote.

    Raises:
        CoderError: the file is something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            self._connection.execute("SELECT key FROM images LIMIT 1")
        except sqlite3.Error as error:
            raise CoderError(f"{path} is not a file of an index's records: {error}") from error

    def images(self, rows: Sequence[int]) -> list[Image]:
        """The images of ``rows``, in that order."""
        return [Image(*values) for values in self._select("SELECT row, key, image_id FROM images WHERE row IN ({})", rows)]

    def captions(self, rows: Sequence[int]) -> list[Caption]:
        """The captions of ``rows``, in that order."""
        return [Caption(*values) for values in self._select("SELECT row, text, image FROM captions WHERE row IN ({})", rows)]

    def captions_of(self, row: int) -> tuple[str, ...]:
        """All captions of an image, in the data's order."""
        rows = self._connection.execute("SELECT text FROM captions WHERE image = ? ORDER BY row", (row,))
        return tuple(text for (text,) in rows)

    def thumbnail(self, row: int) -> bytes | None:
        """The JPEG file of an image's thumbnail; None where there is none."""
        values = self._connection.execute("SELECT file FROM thumbnails WHERE row = ?", (row,)).fetchone()
        return None if values is None else values[0]

    def row_of(self, key: str) -> int | None:
        """The row of the first image with this key; None where there is none."""
        return self._connection.execute("SELECT MIN(row) FROM images WHERE key = ?", (storable(key),)).fetchone()[0]

    def close(self) -> None:
        self._connection.close()

    def _select(self, query: str, rows: Sequence[int]) -> list[Any]:
        by_row = {}
        for start in range(0, len(rows), _MAX_PLACEHOLDERS):
            some = [int(row) for row in rows[start : start + _MAX_PLACEHOLDERS]]
            selected = self._connection.execute(query.format(",".join("?" * len(some))), some)
            by_row.update({values[0]: values for values in selected})
        return [by_row[row] for row in rows]
