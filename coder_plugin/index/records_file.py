"""The records of one segment: keys, ids, captions, paths, thumbnails and metadata of its images, in one SQLite file."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.index import records
from coder_plugin.index.manifest import COLUMN_TYPES
from coder_plugin.index.records import storable

_TABLES = """
CREATE TABLE images (row INTEGER PRIMARY KEY, key TEXT NOT NULL, image_id INTEGER NOT NULL, path TEXT, member TEXT{columns});
CREATE TABLE thumbnails (row INTEGER PRIMARY KEY, file BLOB NOT NULL);
CREATE TABLE captions (row INTEGER PRIMARY KEY, image INTEGER NOT NULL, text TEXT NOT NULL);
"""
_INDEXES = "CREATE INDEX of_image ON captions (image); CREATE INDEX of_key ON images (key);"
#: Names that no metadata column may have: the table's own.
RESERVED = ("row", "key", "image_id", "path", "member")
_SQL_TYPES = {"string": "TEXT", "int64": "INTEGER", "float64": "REAL", "bool": "INTEGER"}
_MOST_LENGTH = 1 << 26  # of a caption, a key or a thumbnail
_JPEG = b"\xff\xd8\xff"
_MAX_PLACEHOLDERS = 500  # of one query: SQLite limits them
#: What an expression of :meth:`RecordsFile.where` may call: functions whose time and memory do not explode.
FUNCTIONS = (
    *("abs", "coalesce", "glob", "ifnull", "instr", "length", "like", "lower", "ltrim", "max", "min", "nullif", "round"),
    *("rtrim", "substr", "trim", "upper"),
)


def create(path: Path, columns: Mapping[str, str] = {}) -> sqlite3.Connection:
    """An empty file of records; replaces an existing one.

    Args:
        path: the file.
        columns: metadata columns, and the type of each ("string", "int64", "float64" or "bool").

    Raises:
        CoderError: a metadata column has a name that an index uses itself.
    """
    if taken := [name for name in columns if name.lower() in RESERVED]:
        raise CoderError(f"the metadata column {taken[0]!r} cannot be kept in an index, which uses this name itself: rename it")
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    # a temporary file that is flushed as a whole before it is renamed: SQLite's journal would only cost time
    settings = "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA page_size = 8192;"
    connection.executescript(settings + _tables(tuple(columns.items())))
    return connection


def add(
    connection: sqlite3.Connection,
    images: Iterable[tuple],
    thumbnails: Iterable[tuple[int, bytes]],
    captions: Iterable[tuple[int, int, str]],
    *,
    columns: int = 0,
) -> None:
    """Insert rows.

    Args:
        connection: of :func:`create`.
        images: (row, key, image_id, path or None, member or None, one value for each metadata column).
        thumbnails: (row of the image, JPEG file).
        captions: (row, row of the image, text).
        columns: the number of metadata columns.
    """
    image_rows = ((row, storable(key), *others) for row, key, *others in images)
    connection.executemany(f"INSERT INTO images VALUES (?, ?, ?, ?, ?{', ?' * columns})", image_rows)
    connection.executemany("INSERT INTO thumbnails VALUES (?, ?)", thumbnails)
    caption_rows = ((row, image, storable(text)) for row, image, text in captions)
    connection.executemany("INSERT INTO captions VALUES (?, ?, ?)", caption_rows)


def finish(connection: sqlite3.Connection) -> None:
    """Create the indexes for look-ups, commit and close."""
    connection.executescript(_INDEXES)
    connection.commit()
    connection.close()


class RecordsFile:
    """Reads the records of a segment, whose rows begin at 0. Somebody else may have written the file.

    It is opened to be read only, and it is refused unless its tables and indexes are exactly those of :func:`create` and
    :func:`finish`: no view, trigger or virtual table runs. Every query ends within 20 seconds, and every value is checked.
    Several threads may use it; one query runs at a time, and beside it any number of filters.

    Args:
        path: a file that :func:`create`, :func:`add` and :func:`finish` wrote.
        images: how many it holds; None: any number.
        captions: as ``images``.
        columns: its metadata columns, and the type of each.

    Raises:
        CoderError: the file is something else, or does not hold so many. All methods raise it for a row that the file lacks or
            that has a value of another type, and for a query that takes too long.
    """

    def __init__(
        self, path: Path, *, images: int | None = None, captions: int | None = None, columns: Mapping[str, str] = {}
    ) -> None:
        self.path, self.columns, self._deadline, self._lock = path, dict(columns), float("inf"), threading.Lock()
        self._connection = self._open()
        schema = {(kind, name, sql) for kind, name, sql in self._query("SELECT type, name, sql FROM sqlite_master LIMIT 100")}
        expected = _schema(tuple(self.columns.items()))
        if schema != expected:
            names = ", ".join(sorted(str(name)[:40] for _, name, _ in schema ^ expected))
            raise CoderError(f"{path} is not a file of an index's records: its tables, views or indexes ({names}) are others")
        for table, count in (("images", images), ("captions", captions)):
            [(first, last)] = self._query(f"SELECT (SELECT MIN(row) FROM {table}), (SELECT MAX(row) FROM {table})")
            if count is not None and (first, last) != ((0, count - 1) if count else (None, None)):
                raise CoderError(f"{path} does not hold the rows of {count} {table}, but {first} to {last}")

    def images(self, rows: Sequence[int]) -> list[tuple]:
        """(row, key, image_id, path, member) of the images of ``rows``, in that order."""
        return self._select("images", "row, key, image_id, path, member", rows, (int, str, int, (str,), (str,)))

    def captions(self, rows: Sequence[int]) -> list[tuple]:
        """(row, text, row of the image) of the captions of ``rows``, in that order."""
        return self._select("captions", "row, text, image", rows, (int, str, int))

    def captions_of(self, row: int, *, limit: int | None = None, characters: int | None = None) -> list[tuple[int, str]]:
        """Row and text of all captions of an image, or of the first, in the data's order; of each so many characters."""
        text = "text" if characters is None else f"substr(text, 1, {characters:d})"
        query = f"SELECT row, {text} FROM captions WHERE image = ? ORDER BY row LIMIT ?"
        rows = self._query(query, [row, -1 if limit is None else limit])
        return [self._checked(values, (int, str), "captions", row) for values in rows]

    def caption_rows(self, images: Sequence[int]) -> np.ndarray:
        """Rows of all captions of images, ascending."""
        found: list[tuple[int]] = []
        for some in _chunks(images):
            found += self._query(f"SELECT row FROM captions WHERE image IN ({','.join('?' * len(some))})", some)
        return np.sort(np.fromiter((row for (row,) in found), np.int64, len(found)))

    def thumbnail(self, row: int) -> bytes | None:
        """The JPEG file of an image's thumbnail; None where there is none."""
        for values in self._query("SELECT file FROM thumbnails WHERE row = ?", [row]):
            [file] = self._checked(values, (bytes,), "thumbnails", row)
            if not file.startswith(_JPEG):
                raise CoderError(f"{self.path} holds a thumbnail of image {row} that is not a JPEG file")
            return file
        return None

    def rows_of(self, keys: Sequence[str]) -> dict[str, list[int]]:
        """Rows of the images with these keys, by key, ascending; keys that are not there are left out."""
        found: dict[str, list[int]] = {}
        for some in _chunks(list(map(storable, keys))):
            query = f"SELECT key, row FROM images WHERE key IN ({','.join('?' * len(some))}) ORDER BY row"
            for values in self._query(query, some):
                key, row = self._checked(values, (str, int), "images", 0)
                found.setdefault(key, []).append(row)
        return found

    def metadata(self, row: int, *, characters: int | None = None) -> dict[str, Any]:
        """The metadata columns of an image, of a text so many characters; None where a column has no value."""
        if not self.columns:
            return {}
        cut = "{}" if characters is None else f"substr({{}}, 1, {characters:d})"
        names = ", ".join((cut if kind == "string" else "{}").format(f'"{name}"') for name, kind in self.columns.items())
        types = tuple((int if kind == "bool" else COLUMN_TYPES[kind],) for kind in self.columns.values())
        [values] = self._select("images", f"row, {names}", [row], (int, *types))
        kinds = zip(self.columns.items(), values[1:], strict=True)
        return {name: bool(value) if kind == "bool" and value is not None else value for (name, kind), value in kinds}

    def values(self, column: str, most: int) -> list[Any] | None:
        """The different values of a metadata column, without null; None where they are more than ``most``."""
        kind = self.columns[column]
        found = self._query(f'SELECT DISTINCT "{column}" FROM images WHERE "{column}" IS NOT NULL LIMIT {most + 1}')
        types = (int if kind == "bool" else COLUMN_TYPES[kind],)
        values = [self._checked(each, types, "images", 0)[0] for each in found]
        return None if len(values) > most else [bool(value) if kind == "bool" else value for value in values]

    def where(self, expression: str, kind: str = "images", *, size: int, end: float) -> np.ndarray:
        """Rows of the images, or of the captions of the images, for which an SQL expression is true.

        Args:
            expression: see :meth:`~coder_plugin.index.records.Records.where`.
            kind: "images" or "captions".
            size: how many the file has of these.
            end: when it must have ended, by ``time.monotonic``.

        Returns:
            int64, ascending.
        """
        condition = f"SELECT row FROM images WHERE ({expression}\n)"
        query = condition if kind == "images" else f"SELECT row FROM captions WHERE image IN ({condition})"
        with contextlib.closing(self._open()) as connection:  # of its own, so that look-ups do not wait
            connection.set_authorizer(self._authorize)
            connection.set_progress_handler(lambda: time.monotonic() > end, 1000)
            if hasattr(connection, "setlimit"):  # from Python 3.11 on
                limits: Any = sqlite3
                connection.setlimit(limits.SQLITE_LIMIT_LENGTH, _MOST_LENGTH)
                connection.setlimit(limits.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
            try:
                cursor = islice(connection.execute(query), size + 1)
                rows = np.fromiter((row for (row,) in cursor), np.int64)
                rows.sort(kind="stable")  # fast, because they are nearly always in order
                if len(rows) > size or (len(rows) and not 0 <= rows[0] <= rows[-1] < size):
                    raise ValueError("it has results that are no rows")
            except (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, OverflowError) as error:
                reason = f"it takes over {records.SECONDS:g} s" if str(error) == "interrupted" else str(error)
                names = f"the columns are {', '.join(('key', 'path', 'member', *self.columns))}"
                raise CoderError(f"{expression[:200]!r} cannot be used as a filter: {reason}; {names}") from error
        return rows[np.diff(rows, prepend=-1) != 0]

    def close(self) -> None:
        self._connection.close()

    def _authorize(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        """Let a filter read the columns of images, and call a few functions; nothing else."""
        if action == sqlite3.SQLITE_READ:
            readable = {"images": ("row", "key", "path", "member", *self.columns), "captions": ("row", "image")}
            allowed = (second or "") in readable.get(first or "", ()) or second == ""  # "": of a table, no column
        elif action == sqlite3.SQLITE_FUNCTION:
            allowed = (second or "").lower() in FUNCTIONS
        else:
            allowed = action == sqlite3.SQLITE_SELECT
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def _open(self) -> sqlite3.Connection:
        try:
            address = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
            connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 1000)
            for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
                self._run(connection, f"PRAGMA {pragma}")
        except sqlite3.Error as error:
            try:
                self.path.open("rb").close()
            except OSError as reason:
                advice = "; build the index again with larger segments, or raise ulimit -n" * (reason.errno == errno.EMFILE)
                raise CoderError(f"{self.path} cannot be opened: {reason.strerror}{advice}") from error
            raise CoderError(f"{self.path} is not a file of an index's records: {error}") from error
        return connection

    def _select(self, table: str, columns: str, rows: Sequence[int], types: tuple) -> list[tuple]:
        by_row = {}
        for some in _chunks([int(row) for row in rows]):
            query = f"SELECT {columns} FROM {table} WHERE row IN ({','.join('?' * len(some))})"
            by_row.update({values[0]: values for values in self._query(query, some)})
        if missing := [row for row in rows if row not in by_row]:
            raise CoderError(f"{self.path} has no row {missing[0]} in its {table}: the index is damaged, build it again")
        return [self._checked(by_row[row], types, table, row) for row in rows]

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[tuple]:
        """All rows of a query, in time."""
        try:
            return self._run(self._connection, query, values)
        except (sqlite3.Error, OverflowError) as error:  # a row beyond 2**63
            if str(error) == "interrupted":
                reason = f"a query took over {records.SECONDS} s"
                raise CoderError(f"{self.path} is not a file of an index's records: {reason}") from error
            raise CoderError(f"{self.path} is damaged: {error}") from error

    def _run(self, connection: sqlite3.Connection, query: str, values: Sequence[Any] = ()) -> list[tuple]:
        with self._lock:
            self._deadline = time.monotonic() + records.SECONDS
            return connection.execute(query, values).fetchall()

    def _checked(self, values: tuple, types: tuple, table: str, row: int) -> tuple:
        """SQLite stores any type in any column. A type in a tuple: null is allowed too."""
        for value, kind in zip(values, types, strict=True):
            if isinstance(kind, tuple):
                if value is None:
                    continue
                [kind] = kind
            if type(value) is not kind:
                found = f"a {type(value).__name__}, not a {kind.__name__}"
            elif isinstance(value, (str, bytes)) and len(value) > _MOST_LENGTH:
                found = f"{len(value):,} characters or bytes, over {_MOST_LENGTH:,}"
            else:
                continue
            raise CoderError(f"{self.path} is not a file of an index's records: row {row} of its {table} holds {found}")
        return values


def _chunks(values: Sequence[Any]) -> Iterable[list[Any]]:
    """As many values as one query may have."""
    for start in range(0, len(values), _MAX_PLACEHOLDERS):
        yield list(values[start : start + _MAX_PLACEHOLDERS])


def _tables(columns: tuple[tuple[str, str], ...]) -> str:
    return _TABLES.format(columns="".join(f', "{name}" {_SQL_TYPES[kind]}' for name, kind in columns))


@lru_cache(maxsize=8)
def _schema(columns: tuple[tuple[str, str], ...]) -> frozenset[tuple[str, str, str]]:
    """Type, name and definition of all that a file of records holds."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(_tables(columns) + _INDEXES)
    rows = frozenset(connection.execute("SELECT type, name, sql FROM sqlite_master"))
    connection.close()
    return rows
