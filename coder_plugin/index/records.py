"""What an index's rows stand for: keys, ids, captions and thumbnails, in one SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError

_TABLES = """
CREATE TABLE images (row INTEGER PRIMARY KEY, key TEXT NOT NULL, image_id INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE TABLE thumbnails (row INTEGER PRIMARY KEY, file BLOB NOT NULL);
CREATE TABLE captions (row INTEGER PRIMARY KEY, image INTEGER NOT NULL, text TEXT NOT NULL);
"""
_INDEXES = "CREATE INDEX of_image ON captions (image); CREATE INDEX of_key ON images (key);"
#: The longest that a query may take: looking up some hundred rows takes milliseconds, and a damaged file may have loops.
SECONDS = 20.0
_MOST_LENGTH = 1 << 26  # of a caption, a key or a thumbnail
_JPEG = b"\xff\xd8\xff"
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
    connection.executescript(_INDEXES)
    connection.commit()
    connection.close()


class Records:
    """Reads the records, from any thread, one query at a time. Somebody else may have written the file.

    It is opened to be read only, and it is refused unless its tables and indexes are exactly those of :func:`create` and
    :func:`finish`: no view, trigger or virtual table runs. Every query ends within :data:`SECONDS`, and every value is checked.

    Args:
        path: a file that :func:`create`, :func:`add` and :func:`finish` wrote.
        images: how many it holds; None: any number.
        captions: as ``images``.

    Raises:
        CoderError: the file is something else, or does not hold so many. All methods raise it for a row that the file lacks or
            that has a value of another type, and for a query that takes too long.
    """

    def __init__(self, path: Path, *, images: int | None = None, captions: int | None = None) -> None:
        self.path, self._deadline, self._lock = path, float("inf"), threading.Lock()
        try:
            uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)  # the lock keeps threads apart
        except sqlite3.Error as error:
            raise CoderError(f"{path} is not a file of an index's records: {error}") from error
        self._connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 1000)
        for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
            self._query(f"PRAGMA {pragma}")
        schema = {(kind, name, sql) for kind, name, sql in self._query("SELECT type, name, sql FROM sqlite_master LIMIT 100")}
        if schema != _schema():
            names = ", ".join(sorted(str(name)[:40] for _, name, _ in schema ^ _schema()))
            raise CoderError(f"{path} is not a file of an index's records: its tables, views or indexes ({names}) are others")
        for table, count in (("images", images), ("captions", captions)):
            [(first, last)] = self._query(f"SELECT (SELECT MIN(row) FROM {table}), (SELECT MAX(row) FROM {table})")
            if count is not None and (first, last) != ((0, count - 1) if count else (None, None)):
                raise CoderError(f"{path} does not hold the rows of {count} {table}, but {first} to {last}")

    def images(self, rows: Sequence[int]) -> list[Image]:
        """The images of ``rows``, in that order."""
        selected = self._select("images", "row, key, image_id", rows, (int, str, int))
        return [Image(*values) for values in selected]

    def captions(self, rows: Sequence[int]) -> list[Caption]:
        """The captions of ``rows``, in that order."""
        selected = self._select("captions", "row, text, image", rows, (int, str, int))
        return [Caption(*values) for values in selected]

    def captions_of(self, row: int) -> tuple[str, ...]:
        """All captions of an image, in the data's order."""
        rows = self._query("SELECT text FROM captions WHERE image = ? ORDER BY row", [row])
        return tuple(self._checked(values, (str,), "captions", row)[0] for values in rows)

    def thumbnail(self, row: int) -> bytes | None:
        """The JPEG file of an image's thumbnail; None where there is none."""
        for values in self._query("SELECT file FROM thumbnails WHERE row = ?", [row]):
            [file] = self._checked(values, (bytes,), "thumbnails", row)
            if not file.startswith(_JPEG):
                raise CoderError(f"{self.path} holds a thumbnail of image {row} that is not a JPEG file")
            return file
        return None

    def row_of(self, key: str) -> int | None:
        """The row of the first image with this key; None where there is none."""
        [(row,)] = self._query("SELECT MIN(row) FROM images WHERE key = ?", [storable(key)])
        return row

    def close(self) -> None:
        self._connection.close()

    def _select(self, table: str, columns: str, rows: Sequence[int], types: tuple[type, ...]) -> list[Any]:
        by_row = {}
        for start in range(0, len(rows), _MAX_PLACEHOLDERS):
            some = [int(row) for row in rows[start : start + _MAX_PLACEHOLDERS]]
            query = f"SELECT {columns} FROM {table} WHERE row IN ({','.join('?' * len(some))})"
            by_row.update({values[0]: values for values in self._query(query, some)})
        if missing := [row for row in rows if row not in by_row]:
            raise CoderError(f"{self.path} has no row {missing[0]} in its {table}: the index is damaged, build it again")
        return [self._checked(by_row[row], types, table, row) for row in rows]

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[tuple]:
        """All rows of a query, within :data:`SECONDS`."""
        try:
            with self._lock:
                self._deadline = time.monotonic() + SECONDS
                return self._connection.execute(query, values).fetchall()
        except (sqlite3.Error, OverflowError) as error:  # a row beyond 2**63
            if str(error) == "interrupted":
                raise CoderError(f"{self.path} is not a file of an index's records: a query took over {SECONDS} s") from error
            raise CoderError(f"{self.path} is damaged: {error}") from error

    def _checked(self, values: tuple, types: tuple[type, ...], table: str, row: int) -> tuple:
        """SQLite stores any type in any column."""
        for value, kind in zip(values, types, strict=True):
            if type(value) is not kind:
                found = f"a {type(value).__name__}, not a {kind.__name__}"
            elif isinstance(value, (str, bytes)) and len(value) > _MOST_LENGTH:
                found = f"{len(value):,} characters or bytes, over {_MOST_LENGTH:,}"
            else:
                continue
            raise CoderError(f"{self.path} is not a file of an index's records: row {row} of its {table} holds {found}")
        return values


@lru_cache(maxsize=1)
def _schema() -> frozenset[tuple[str, str, str]]:
    """Type, name and definition of all that a file of records holds."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(_TABLES + _INDEXES)
    rows = frozenset(connection.execute("SELECT type, name, sql FROM sqlite_master"))
    connection.close()
    return rows
