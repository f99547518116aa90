"""What an index's rows stand for: keys, ids, captions, paths, thumbnails and metadata, read from its Parquet files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError, install_command
from coder_plugin.search.parquet import Table, storable

#: The longest that a filter may take, and the most memory.
SECONDS, _MEMORY = 20.0, "1GB"
_LONGEST = 10_000  # characters of an expression
#: Characters of a caption, or of a key, that a page or an answer shows: somebody else's index may have far longer ones.
SHOWN = 2000
_FILTERS = 8  # whose results are kept
_SMALL = ("key", "image_id", "captions", "path", "member")


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


def place(image: Image) -> str:
    """The path or URL of a picture; of one in a shard ``TAR:MEMBER``; its key where the path is not known.

    Example:
        >>> place(Image(row=0, key="dog", image_id=1, path="/data/0.tar", member="dog.jpg"))
        '/data/0.tar:dog.jpg'
    """
    if image.path is None:
        return image.key
    return image.path if image.member is None else f"{image.path}:{image.member}"


def link(image: Image) -> str | None:
    """The address that opens a picture in a browser: ``file://`` for a file on this machine, else its ``http(s)://`` URL.

    None for a picture in a shard, for one whose path is not known, and for other addresses, such as ``javascript:`` or a
    network share, which a click should not open.

    Example:
        >>> link(Image(row=0, key="dog", image_id=1, path="/data/a dog.jpg"))
        'file:///data/a%20dog.jpg'
    """
    path = image.path
    if path is None or image.member is not None or len(path) > 4096 or not path.isprintable():
        return None
    if path.startswith(("https://", "http://")):
        return path
    if path.startswith(("//", "\\\\")) or not Path(path).is_absolute():
        return None
    return Path(path).as_uri()


class Records:
    """The rows of an index. Its methods may be called from any thread.

    Args:
        table: of the index's files.
        starts: of each image the row of its first caption, and at the end the number of captions, int64 [N + 1].

    Raises:
        CoderError: by all methods: a row that the index lacks, or a damaged file.
    """

    def __init__(self, table: Table, starts: np.ndarray) -> None:
        self.table, self.starts = table, starts
        self._columns = (*_SMALL, *table.columns)
        self._filtered = lru_cache(maxsize=_FILTERS)(lambda expression: self._where(expression))

    @cached_property
    def image_ids(self) -> np.ndarray:
        """Of all images, int64 [N]."""
        return self.table.image_ids()

    def images(self, rows: Sequence[int]) -> list[Image]:
        """Images, in the order of ``rows``."""
        found = self.table.rows(rows, self._columns)
        return [
            Image(int(row), each["key"], each["image_id"], each["path"], each["member"])
            for row, each in zip(rows, found, strict=True)
        ]

    def captions(self, rows: Sequence[int]) -> list[Caption]:
        """Captions, in the order of ``rows``."""
        if len(rows) and not 0 <= min(rows) <= max(rows) < self.starts[-1]:
            raise CoderError(f"the index has no captions {min(rows)} to {max(rows)}, only {self.starts[-1]:,}")
        owners = np.searchsorted(self.starts, np.asarray(rows, dtype=np.int64), side="right") - 1
        texts = self.table.rows(owners.tolist(), self._columns)
        found = []
        for row, owner, each in zip(rows, owners.tolist(), texts, strict=True):
            number = int(row - self.starts[owner])
            if number >= len(each["captions"] or ()):
                folder = self.table.paths[0].parent
                raise CoderError(f"{folder}: image {owner} has fewer captions than its index: build it again")
            found.append(Caption(int(row), each["captions"][number] or "", owner))
        return found

    def captions_of(self, row: int, *, limit: int | None = None, characters: int | None = None) -> tuple[str, ...]:
        """The captions of an image, at most ``limit``, each cut after so many characters."""
        [found] = self.table.rows([row], self._columns)
        return tuple((text or "")[:characters] for text in (found["captions"] or [])[:limit])

    def caption_rows(self, row: int) -> range:
        """Rows of the captions of an image."""
        return range(int(self.starts[row]), int(self.starts[row + 1]))

    def thumbnail(self, row: int) -> bytes | None:
        """The JPEG file of an image's thumbnail; None where there is none."""
        content = self.table.large(row, "thumbnail")
        if content is not None and content[:3] != b"\xff\xd8\xff":
            raise CoderError(f"{self.table.paths[0].parent}: the thumbnail of image {row} is not a JPEG file: embed again")
        return content

    def metadata(self, row: int, *, characters: int | None = None) -> dict[str, Any]:
        """The metadata columns of an image, of a text so many characters; None where a column has no value."""
        [found] = self.table.rows([row], self._columns)
        values = {name: found[name] for name in self.table.columns}
        return {name: value[:characters] if isinstance(value, str) else value for name, value in values.items()}

    def values(self, column: str, most: int) -> list[Any] | None:
        """The different values of a metadata column, ascending; None where they are more than ``most``."""
        found: set[Any] = set()
        for _, batch in self.table.batches([column], rows=65536):
            found.update(batch.column(0).unique().drop_null().to_pylist())
            if len(found) > most:
                return None
        return sorted(found)

    def row_of(self, key: str) -> int | None:
        """The row of the first image with this key; None where there is none."""
        return next(iter(self.rows_of(key)), None)

    def rows_of(self, key: str) -> list[int]:
        """Rows of all images with this key, ascending."""
        key = storable(key)
        rows = np.flatnonzero(self.image_ids == stable_hash(key)).tolist()
        return [row for row, each in zip(rows, self.images(rows), strict=True) if each.key == key]

    def where(self, expression: str, *, kind: str = "images") -> np.ndarray:
        """Rows of the images for which an expression is true. The results of the latest expressions are kept.

        Args:
            expression: an SQL expression of DuckDB over ``key``, ``path``, ``member`` and the metadata columns, such as
                ``source = 'coco' AND width > 640``. It can read nothing else.
            kind: "images"; or "captions": rows of the captions of these images.

        Returns:
            int64, ascending.

        Raises:
            CoderError: not an expression, one that reads or calls something else, or one that takes over 20 seconds.
        """
        if not isinstance(expression, str) or not expression.strip() or len(expression) > _LONGEST:
            raise CoderError(f"a filter must be an expression of 1 to {_LONGEST:,} characters, such as source = 'coco'")
        rows = self._filtered(expression)
        if kind == "images":
            return rows
        counts = self.starts[rows + 1] - self.starts[rows]
        first = np.repeat(self.starts[rows] - np.cumsum(counts) + counts, counts)
        return first + np.arange(len(first))

    def _where(self, expression: str) -> np.ndarray:
        import pyarrow as pa

        try:
            import duckdb
        except ImportError:
            raise CoderError(f"--where needs DuckDB: {install_command('filters')}") from None
        names = [name for name in ("key", "path", "member", *self.table.columns) if name.lower() in expression.lower()]
        faults: list[CoderError] = []

        def batches() -> Any:
            try:
                for first, batch in self.table.batches(names or ["image_id"], rows=16384):
                    rows = pa.array(np.arange(first, first + len(batch)))
                    yield pa.record_batch([rows, *(batch.column(name) for name in names)], schema=schema)
            except CoderError as error:  # DuckDB would report it as its own
                faults.append(error)
                raise

        kinds = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
        fields = [(name, kinds[self.table.columns.get(name, "string")]) for name in names]
        schema = pa.schema([("row", pa.int64()), *fields])
        connection = duckdb.connect(":memory:", config={"enable_external_access": "false"})
        timer = threading.Timer(SECONDS, connection.interrupt)
        try:
            for setting in ("python_enable_replacements = false", f"memory_limit = '{_MEMORY}'", "lock_configuration = true"):
                connection.execute(f"SET {setting}")
            timer.start()
            relation = connection.from_arrow(pa.RecordBatchReader.from_batches(schema, batches()))
            found = relation.filter(expression).project('"row"').fetchnumpy()["row"]
        except duckdb.InterruptException:
            raise CoderError(f"--where {expression[:200]}: it took over {SECONDS:g} seconds") from None
        except duckdb.Error as error:
            if faults:
                raise faults[0] from None
            reason = " ".join(str(error).partition("\n")[0].split())[:300]
            columns = ", ".join(("key", "path", "member", *self.table.columns))
            raise CoderError(f"--where {expression[:200]}: {reason}; it is an SQL expression over {columns}") from None
        finally:
            timer.cancel()
            connection.close()
        return np.sort(np.asarray(found, dtype=np.int64))
