"""The Parquet files of embeddings: how one is written, and many read as one table.

A file has one row an image. What all rows share is JSON in the schema's metadata. Somebody else may have written a file, so
what is read is checked: layout, sizes, types, checksums of pages, finite vectors.

Shape letters: n images, t captions, D dimensions, V vectors of an image.
"""

from __future__ import annotations

import io
import json
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_path

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "coder-plugin embeddings 3"
KINDS = ("images", "captions")
#: The column of the vectors of each kind, and the prefix of the columns of its tokens.
VECTORS = {"images": "image_vector", "captions": "text_vectors"}
TOKENS = {"images": "image_tokens_", "captions": "text_tokens_"}
#: Columns that every file has, or may have.
OWN_COLUMNS = ("key", "image_id", "captions", "path", "member", *VECTORS.values(), "thumbnail")
COLUMN_TYPES = ("string", "int64", "float64", "bool")
#: Keys of our JSON in a file: what is known before its rows, in the schema, and what was counted.
_METADATA, _COUNTS = b"coder_plugin", b"coder_plugin_counts"
#: Rows of a group, the least that a search reads for one image. _MOST_ROWS: of somebody else's file.
_GROUP_ROWS, _MOST_ROWS = 256, 1 << 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


class Rows(NamedTuple):
    """Images with their captions, for :func:`write_file`."""

    keys: Sequence[str]  # n
    captions: Sequence[Sequence[str]]  # n
    images: np.ndarray | None  # [n, D] or [n, V, D]; None: no vectors of images
    texts: np.ndarray | None  # [t, D], the captions of all images one after the other; None: no vectors of captions
    paths: Sequence[str | None]  # n
    members: Sequence[str | None]  # n
    thumbnails: Sequence[bytes] = ()  # n JPEG files, empty where there is none; or none at all
    columns: Mapping[str, Sequence[Any]] = {}  # n values each, of the column's type, or None
    image_tokens: Mapping[str, np.ndarray] = {}  # [n, ...] each, for re-ranking
    text_tokens: Mapping[str, Sequence[np.ndarray]] = {}  # t arrays each


def storable(text: str) -> str:
    """The text as valid UTF-8: lone surrogates, as in a file name that is not UTF-8, become escapes.

    Example:
        >>> storable("caf\\udce9.png")
        'caf\\\\udce9.png'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def check_columns(columns: Mapping[str, str]) -> None:
    """Check the names and types of further columns.

    Raises:
        CoderError: a name or type that is not allowed.
    """
    lower = [name.lower() for name in columns]
    for name, kind in columns.items():
        if not _NAME.fullmatch(name):
            raise CoderError(f"column {name[:60]!r}: a name has letters, digits and _, and begins with no digit")
        if name.lower() in (*OWN_COLUMNS, "row") or name.startswith(tuple(TOKENS.values())) or lower.count(name.lower()) > 1:
            raise CoderError(f"column {name!r}: the file has a column of that name already (capitals do not count)")
        if kind not in COLUMN_TYPES:
            raise CoderError(f"column {name!r} has the type {kind[:60]!r}; it must be one of {', '.join(COLUMN_TYPES)}")


def schema_of(
    dimensions: int,
    *,
    views: int = 1,
    dtype: str = "float32",
    what: str = "both",
    columns: Mapping[str, str] | None = None,
    tokens: Iterable[str] = (),
) -> pa.Schema:
    """The columns of a file.

    Args:
        dimensions: D. views: V. dtype: of the vectors, "float32" or "float16". what: whose vectors.
        columns: further columns, and the type of each. tokens: names of the columns of tokens.
    """
    import pyarrow as pa

    vector = pa.list_(pa.float16() if dtype == "float16" else pa.float32(), dimensions)
    types = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
    fields = [("key", pa.string()), ("image_id", pa.int64()), ("captions", pa.list_(pa.string()))]
    fields += [("path", pa.string()), ("member", pa.string())]
    if what != "captions":
        fields.append((VECTORS["images"], vector if views == 1 else pa.list_(vector, views)))
    if what != "images":
        fields.append((VECTORS["captions"], pa.list_(vector)))
    fields.append(("thumbnail", pa.binary()))
    fields += [(name, types[kind]) for name, kind in (columns or {}).items()]
    fields += [(name, pa.binary() if name.startswith(TOKENS["images"]) else pa.list_(pa.binary())) for name in tokens]
    return pa.schema(fields)


def write_file(path: str | Path, schema: pa.Schema, header: Mapping[str, Any], rows: Iterable[Rows]) -> dict[str, Any]:
    """Write a file batch by batch, and rename it when it is complete.

    Args:
        path: of the file; its folder must exist.
        schema: of :func:`schema_of`.
        header: JSON values for the schema's metadata; ``model`` needs a ``fingerprint``. ``bad``, the kind and the key of each
            sample that was left out, is read after the last batch.
        rows: batches of images.

    Returns:
        The header with ``format`` and the numbers of ``rows`` and ``captions``.

    Raises:
        CoderError: vectors that are not finite in the schema's type.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "00000000.parquet"
        >>> batch = Rows(["a.jpg"], [["a dog"]], np.ones((1, 2)), None, ["/pictures/a.jpg"], [None])
        >>> write_file(path, schema_of(2, what="images"), {"model": {"fingerprint": "f"}}, [batch])["rows"]
        1
        >>> Table([path]).vectors("images", [0]).tolist()
        [[[1.0, 1.0]]]
    """
    with atomic_path(path) as temporary:
        counts = write_tables(temporary, schema, header, (_table(batch, schema) for batch in rows))
    return {"format": FORMAT, **header, **counts}


def write_tables(path: Path, schema: pa.Schema, header: Mapping[str, Any], tables: Iterable[pa.Table]) -> dict[str, Any]:
    """Write Arrow's tables of :func:`schema_of` to a file, as :func:`write_file` does.

    It is not compressed: vectors and pictures do not get smaller, and a file cannot expand in a reader's memory.

    Returns:
        The numbers of ``rows`` and ``captions``, and ``bad``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    statistics = [name for name in schema.names if name in ("key", "image_id") or name not in OWN_COLUMNS]
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    known = {name: value for name, value in header.items() if name not in ("rows", "captions", "bad")}
    schema = schema.with_metadata({_METADATA: json.dumps({"format": FORMAT, **known})})
    images = captions = 0
    pending = schema.empty_table()
    with pq.ParquetWriter(path, schema, write_statistics=statistics, **options) as writer:
        for table in tables:
            images, captions = images + len(table), captions + (pc.sum(pc.list_value_length(table["captions"])).as_py() or 0)
            pending = pa.concat_tables([pending, table.cast(schema)])
            if full := len(pending) // _GROUP_ROWS * _GROUP_ROWS:
                writer.write_table(pending[:full], row_group_size=_GROUP_ROWS)
                pending = pending[full:]
        if len(pending):
            writer.write_table(pending, row_group_size=_GROUP_ROWS)
        counts = {"rows": images, "captions": captions, "bad": header.get("bad", [])}
        writer.add_key_value_metadata({_COUNTS.decode(): json.dumps(counts)})
    return counts


def _table(batch: Rows, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    count, ends = len(batch.keys), [0, *accumulate(map(len, batch.captions))]
    values: dict[str, Any] = {
        "key": [storable(key) for key in batch.keys],
        "image_id": [stable_hash(key) for key in batch.keys],
        "captions": [list(map(storable, each)) for each in batch.captions],
        "path": [None if each is None else storable(each) for each in batch.paths],
        "member": [None if each is None else storable(each) for each in batch.members],
        "thumbnail": [each or None for each in batch.thumbnails or [b""] * count],
        **batch.columns,
        **{TOKENS["images"] + name: [_npy(each) for each in array] for name, array in batch.image_tokens.items()},
    }
    for name, arrays in batch.text_tokens.items():
        cells = [_npy(each) for each in arrays]
        values[TOKENS["captions"] + name] = [cells[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    columns = {name: pa.array(value, schema.field(name).type) for name, value in values.items()}
    if batch.images is not None:
        columns[VECTORS["images"]] = _vectors(batch.images, schema.field(VECTORS["images"]).type)
    if batch.texts is not None:
        vectors = _vectors(batch.texts, schema.field(VECTORS["captions"]).type.value_type)
        columns[VECTORS["captions"]] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), vectors)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _vectors(vectors: np.ndarray, kind: pa.DataType) -> pa.Array:
    """[..., D] -> lists of D, or lists of lists."""
    import pyarrow as pa

    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(vectors, dtype=np.float16 if "halffloat" in str(kind) else np.float32)
    if not np.isfinite(numbers).all():
        raise CoderError("a vector is not finite: the model diverged, or the vectors are too large for --dtype float16")
    array = pa.array(numbers.reshape(-1))
    for size in reversed(numbers.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array.cast(kind) if array.type != kind else array


def _npy(array: np.ndarray) -> bytes:
    """An array as NumPy's file, which says its shape and type."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def read_npy(content: bytes) -> np.ndarray:
    """The array of numbers in such bytes; ``ValueError`` for anything else."""
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (EOFError, MemoryError, OverflowError, SyntaxError, TypeError) as error:
        raise ValueError(f"it is not an array: {type(error).__name__}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.nbytes > len(content):
        raise ValueError("it is not an array of numbers")
    return array


def read_header(path: Path) -> dict[str, Any]:
    """The JSON of a file's metadata, after its layout was checked.

    Raises:
        CoderError: it was not written by ``coder-plugin embed``, is damaged or of another version.
    """
    return _File(path).header


class _File:
    """A file's layout, checked."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self.path = path
        with _reading(path):
            if not path.is_file():
                raise ValueError("no such file")
            size = path.stat().st_size
            self.file = pq.ParquetFile(path, page_checksum_verification=True, memory_map=False)
            metadata, self.schema = self.file.metadata, self.file.schema_arrow
            try:
                both = [json.loads((metadata.metadata or {})[name]) for name in (_METADATA, _COUNTS)]
                self.header: dict[str, Any] = both[0] | both[1]
                self.fingerprint: str = self.header["model"]["fingerprint"]
                known = self.header["format"] == FORMAT
            except (KeyError, TypeError, ValueError, RecursionError):
                raise CoderError(f"{path} was not written by coder-plugin embed") from None
            if not known:
                raise CoderError(f"{path} has another format than {FORMAT!r}: embed the data again with this coder-plugin")
            self.ends = [0]
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                self.ends.append(self.ends[-1] + group.num_rows)
                chunks = [group.column(column) for column in range(group.num_columns)]
                # written so by us: a small file then cannot become large in memory
                plain = all(each.compression == "UNCOMPRESSED" and not each.has_dictionary_page for each in chunks)
                if not plain or group.num_rows > _MOST_ROWS or max(each.num_values for each in chunks) > size:
                    raise ValueError("it is compressed, or its groups of rows are too large")
            if self.ends[-1] != metadata.num_rows or self.header.get("rows") != metadata.num_rows:
                raise ValueError("its number of rows is not what it says")
            types = {each.name: each.type for each in schema_of(1, columns=self.columns(), tokens=self.tokens())}
            for name, kind in types.items():
                if name in self.schema.names and name not in VECTORS.values() and self.schema.field(name).type != kind:
                    raise ValueError(f"its column {name} is not {kind}")
            if missing := [name for name in types if name not in (*self.schema.names, *VECTORS.values())]:
                raise ValueError(f"it has no column {missing[0]}")

    def columns(self) -> dict[str, str]:
        """Further columns, and the type of each."""
        names = {"string": "string", "int64": "int64", "double": "float64", "bool": "bool"}
        known = (*OWN_COLUMNS, *self.tokens())
        columns = {each.name: names.get(str(each.type), str(each.type)) for each in self.schema if each.name not in known}
        check_columns(columns)
        return columns

    def tokens(self) -> list[str]:
        """Names of the columns of tokens, which become names of files."""
        names = [name for name in self.schema.names if name.startswith(tuple(TOKENS.values()))]
        if wrong := [name for name in names if not re.fullmatch(r"\w{1,110}", name)]:
            raise ValueError(f"its column {wrong[0][:60]!r} is not a name")
        return names

    def form(self) -> tuple[Any, ...]:
        """What all files of a table have in common."""
        with _reading(self.path):
            return self.fingerprint, self.sizes(), self.columns(), self.tokens()

    def sizes(self) -> dict[str, dict[str, int]]:
        """``dimensions`` and ``views`` of each kind of vectors."""
        sizes = {}
        for kind, name in VECTORS.items():
            if name in self.schema.names:
                shape, each = [], self.schema.field(name).type
                each = each.value_type if kind == "captions" else each
                while hasattr(each, "list_size"):
                    shape.append(each.list_size)
                    each = each.value_type
                if str(each) not in ("halffloat", "float") or not 1 <= len(shape) <= (1 if kind == "captions" else 2):
                    raise ValueError(f"its column {name} has no vectors")
                sizes[kind] = {"dimensions": shape[-1], "views": shape[0] if len(shape) > 1 else 1}
        return sizes


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of Arrow and of our checks name the file."""
    import pyarrow as pa

    try:
        yield
    except CoderError:
        raise
    except FileNotFoundError:
        raise CoderError(f"{path} is missing: the folder was changed, open it again, or make it again") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CoderError(f"{path} is damaged or not a file of coder-plugin embed ({reason}): make it again") from error


class Table:
    """Files read as one table; a row's number counts the rows of the files before it.

    Args:
        paths: of the files, at least one, in their order; those without rows may have other columns.
        known: what an index says of them, so that a file is opened when it is read: ``model``, ``vectors``, ``columns``,
            ``tokens`` as the attributes below, and ``rows`` of each.

    Raises:
        CoderError: by all methods: a file that is damaged, or not like the others; a row that is not there.

    Example:
        >>> Table([Path("a.parquet")])
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: a.parquet is damaged or not a file of coder-plugin embed (no such file): make it again
    """

    def __init__(self, paths: Sequence[Path], known: Mapping[str, Any] | None = None) -> None:
        self.paths = list(paths)
        self._lock = threading.Lock()  # Arrow's readers are for one thread
        self._file = lru_cache(maxsize=64)(self._open)
        self._group = lru_cache(maxsize=256)(self._read_group)
        self._form: Any = None
        self.headers: list[Mapping[str, Any]] = []
        if known is None:
            for path in self.paths:
                file = self._file(path)
                self.headers.append(file.header)
                if file.ends[-1] and self._form is None:
                    self._form, self.model = file.form(), file.header["model"]
            if self._form is None:
                raise CoderError(f"{self.paths[0].parent}: no image could be embedded")
            counts = [header["rows"] for header in self.headers]
        else:
            self.model, counts = known["model"], known["rows"]
            self._form = (self.model["fingerprint"], known["vectors"], known["columns"], known["tokens"])
        self.first = [0, *accumulate(counts)]
        _, self.vector_sizes, self.columns, self.tokens = self._form

    def _open(self, path: Path) -> _File:
        file = _File(path)
        if self._form is not None and file.ends[-1] and (form := file.form()) != self._form:
            differ = "another model" if form[0] != self._form[0] else "other columns, or vectors of other sizes"
            raise CoderError(f"{path} has {differ} than {self.paths[0]}: embed all data with one model and the same options")
        return file

    def __len__(self) -> int:
        return self.first[-1]

    @property
    def names(self) -> list[str]:
        """All columns."""
        vectors = [VECTORS[kind] for kind in self.vector_sizes]
        own = [name for name in OWN_COLUMNS if name not in VECTORS.values() or name in vectors]
        return [*own, *self.columns, *self.tokens]

    def rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Values of some rows, in this order. Columns of a few bytes are cached with their neighbours."""
        places = [self._place(row) for row in rows]
        groups = {place[:2]: self._group(*place[:2], tuple(columns)) for place in sorted(places)}
        return [{name: groups[file, group][name][local] for name in columns} for file, group, local in places]

    def large(self, row: int, column: str) -> Any:
        """A value of a column whose neighbours should not be kept in memory."""
        file, group, local = self._place(row)
        return self._read_group(file, group, (column,))[column][local]

    def batches(self, columns: Sequence[str], *, rows: int = 1024) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All rows, a few at a time, each time with the number of the first of them."""
        for number, path in enumerate(self.paths):
            first = self.first[number]
            if self.first[number + 1] == first:
                continue
            with _reading(path):
                file = _File(path).file  # its own reader: this thread may be in the midst of it for long
                for batch in file.iter_batches(rows, columns=list(columns), use_threads=False):
                    yield first, _checked(batch.select(list(columns)))
                    first += len(batch)
                if first != self.first[number + 1]:
                    raise ValueError("some of its rows are missing")

    def image_ids(self) -> np.ndarray:
        """Of all images, int64 [n]."""
        return np.concatenate([batch.column(0).to_numpy() for _, batch in self.batches(["image_id"], rows=65536)])

    def vector_batches(self, kind: str) -> Iterator[np.ndarray]:
        """The vectors of all images or captions, [n * V, D] float32 each time."""
        size = self.vector_sizes[kind]
        for first, batch in self.batches([VECTORS[kind]], rows=4096):
            with _reading(self.paths[bisect_right(self.first, first) - 1]):
                yield _numbers(batch.column(0), size).reshape(-1, size["dimensions"])

    def vectors(self, kind: str, rows: Sequence[int]) -> np.ndarray:
        """Vectors [n, V, D] float32 of a few images, or [t, 1, D] of all captions of these images."""
        found = []
        for row in rows:
            file, group, local = self._place(row)
            with self._lock, _reading(self.paths[file]):
                column = self._file(self.paths[file]).file.read_row_group(group, [VECTORS[kind]], use_threads=False).column(0)
                found.append(_numbers(column.combine_chunks()[local : local + 1], self.vector_sizes[kind]))
        return np.concatenate(found)

    def _place(self, row: int) -> tuple[int, int, int]:
        """A row's file, group and row there."""
        if not 0 <= row < len(self):
            raise CoderError(f"{self.paths[0].parent} has no row {row}, only {len(self):,}")
        number = bisect_right(self.first, row) - 1
        ends = self._file(self.paths[number]).ends
        group = bisect_right(ends, row - self.first[number]) - 1
        return number, group, int(row) - self.first[number] - ends[group]

    def _read_group(self, file: int, group: int, columns: tuple[str, ...]) -> dict[str, list[Any]]:
        path = self.paths[file]
        with self._lock, _reading(path):
            table = self._file(path).file.read_row_group(group, list(columns), use_threads=False)
            return _checked(table).to_pydict()


def _checked(rows: Any) -> Any:
    """A table or batch whose arrays are valid, and whose images have keys and ids."""
    rows.validate(full=True)
    for name in {"key", "image_id"} & {*rows.schema.names}:
        if rows.column(name).null_count:
            raise ValueError(f"an image has no {name}")
    return rows


def _numbers(column: pa.Array, sizes: Mapping[str, int]) -> np.ndarray:
    """A column of vectors, or of lists of vectors, as [n, V, D] float32."""
    while hasattr(column.type, "value_type"):  # lists, most of a fixed size, of lists, of numbers
        if column.null_count:
            raise ValueError("a vector is missing")
        column = column.flatten()
    vectors = column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not np.isfinite(vectors).all():  # as no missing number is
        raise ValueError("a vector is missing or not finite")
    return vectors.reshape(-1, sizes["views"], sizes["dimensions"])
