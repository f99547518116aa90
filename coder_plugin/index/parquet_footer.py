"""The footer of a Parquet file of embeddings, checked before Arrow reads it: some damaged ones make Arrow end the process."""

from __future__ import annotations

import functools
import io
import os
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from coder_plugin.index.embeddings_header import NOTE
from coder_plugin.index.thrift import BINARY, I32, I64, LIST, STRUCT, read_struct

if TYPE_CHECKING:
    import pyarrow as pa

_ARROW = b"ARROW:schema"  # the key of Arrow's own types among a file's metadata
_WRITER = b"parquet-cpp-arrow version "  # Arrow reads beyond the end of a column that some others wrote
_MOST_FOOTER = 1 << 26
_MOST_GROUP_ROWS, _MOST_GROUP_BYTES = 1 << 16, 1 << 30
_UNCOMPRESSED, _ENCODINGS = 0, {0, 3, 4}  # plain; of levels: in runs, or of bits
# fields, by the structs of the format's definition (parquet.thrift)
_SCHEMA, _ROWS, _GROUPS, _METADATA, _CREATED_BY, _ORDERS = (2, LIST), (3, I64), (4, LIST), (5, LIST), (6, BINARY), (7, LIST)
_CHUNKS, _GROUP_SIZE, _GROUP_ROWS = (1, LIST), (2, I64), (3, I64)
_CHUNK = (3, STRUCT)
_TYPE, _CHUNK_ENCODINGS, _PATH, _CODEC, _VALUES, _SIZE, _STORED, _START = (
    (1, I32), (2, LIST), (3, LIST), (4, I32), (5, I64), (6, I64), (7, I64), (9, I64)
)  # fmt: skip
_ENCRYPTED, _CHUNK_ELSEWHERE, _CHUNK_INDEX = {8, 9}, {1, 8, 9}, {10, 11}  # numbers of fields that no file of ours has


class Chunk(NamedTuple):
    """Where the values of a column in a row group are."""

    column: str
    start: int  # in bytes
    length: int
    values: int


class Footer(NamedTuple):
    """What a footer says."""

    rows: int
    metadata: dict[bytes, bytes]
    chunks: list[Chunk]


def read_footer(file: IO[bytes], schema: pa.Schema) -> Footer:
    """Read the footer of a Parquet file, and check all of it that Arrow would believe.

    Values must be stored plainly, without compression or dictionaries: what is read then needs no more memory than the file has
    bytes.

    Args:
        file: a regular file.
        schema: the columns that it must have.

    Raises:
        ValueError: it is no Parquet file with these columns that Arrow wrote in this way, or its footer has another fault.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> pq.write_table(pa.table({"x": [1, 2]}), file := io.BytesIO(), compression="none", use_dictionary=False)
        >>> read_footer(file, pa.schema({"x": pa.int64()})).rows
        2
    """
    content, end = _content(file)
    footer, used = read_struct(content)
    if used != len(content) or _ENCRYPTED & {number for number, _ in footer}:
        raise ValueError("its footer has another length than it says, or is encrypted")
    expected = _expected(schema)
    writer = footer.get(_CREATED_BY, b"")
    metadata = _pairs(footer)
    same = footer.get(_SCHEMA) == expected[_SCHEMA] and metadata.get(_ARROW) == _pairs(expected)[_ARROW]
    if not same or footer.get(_ORDERS) not in (None, expected.get(_ORDERS)):
        raise ValueError(f"its columns are others than {NOTE} says")
    if not writer.startswith(_WRITER) or len(writer) > 100:
        raise ValueError("Arrow did not write it")
    rows, chunks, position = 0, [], 4
    columns = [(chunk[_TYPE], chunk[_PATH]) for chunk in _columns(_structs(expected, _GROUPS)[0])]
    for group in _structs(footer, _GROUPS):
        if not 0 <= group.get(_GROUP_ROWS, -1) <= _MOST_GROUP_ROWS or not 0 <= group.get(_GROUP_SIZE, -1) <= _MOST_GROUP_BYTES:
            raise ValueError("a row group is larger than any should be")
        found = _columns(group)
        if [(chunk.get(_TYPE), chunk.get(_PATH)) for chunk in found] != columns:
            raise ValueError("a row group has other columns than the file")
        for fields in found:
            chunks.append(_chunk(fields, group[_GROUP_ROWS], position, end))
            position = chunks[-1].start + chunks[-1].length
        rows += group[_GROUP_ROWS]
    if rows != footer.get(_ROWS):
        raise ValueError(f"its row groups have {rows:,} rows, not {footer.get(_ROWS, 0):,}")
    return Footer(rows, metadata, chunks)


def _content(file: IO[bytes]) -> tuple[bytes, int]:
    """The bytes of the footer, and where they begin."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    if size < 12 or tail[4:] != b"PAR1":
        raise ValueError("it has no end of a Parquet file")
    length = int.from_bytes(tail[:4], "little")
    if length > min(size - 12, _MOST_FOOTER):
        raise ValueError("its footer is larger than the file, or than 64 MiB")
    file.seek(size - 8 - length)
    return file.read(length), size - 8 - length


@functools.lru_cache(maxsize=8)
def _expected(schema: pa.Schema) -> dict[tuple[int, int], Any]:
    """The footer of a file with these columns and no rows."""
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(schema.empty_table(), file)
    return read_struct(_content(file)[0])[0]


def _structs(fields: dict[tuple[int, int], Any], name: tuple[int, int]) -> list[Any]:
    """A list of structs; empty where the field is missing."""
    kind, values = fields.get(name, (STRUCT, []))
    if kind != STRUCT and values:
        raise ValueError("its footer has a list of another type")
    return values


def _pairs(footer: dict[tuple[int, int], Any]) -> dict[bytes, bytes]:
    """The file's metadata by key."""
    pairs = [(pair.get((1, BINARY), b""), pair.get((2, BINARY), b"")) for pair in _structs(footer, _METADATA)]
    if len(pairs) != len(dict(pairs)):  # readers would disagree on which counts
        raise ValueError("its metadata name a field twice")
    return dict(pairs)


def _columns(group: dict[tuple[int, int], Any]) -> list[dict[tuple[int, int], Any]]:
    """The chunks of a row group."""
    chunks = _structs(group, _CHUNKS)
    if any(_CHUNK_ELSEWHERE & {number for number, _ in chunk} or _CHUNK not in chunk for chunk in chunks):
        raise ValueError("a column is in another file, or encrypted")
    return [chunk[_CHUNK] for chunk in chunks]


def _chunk(fields: dict[tuple[int, int], Any], rows: int, position: int, end: int) -> Chunk:
    """A chunk between ``position``, where the one before it ends, and the footer."""
    path = fields[_PATH][1]
    name = path[0].decode("ascii", "replace")[:60]
    start, length, values = (fields.get(field, -1) for field in (_START, _STORED, _VALUES))
    encodings = fields.get(_CHUNK_ENCODINGS, (I32, []))
    plain = fields.get(_CODEC) == _UNCOMPRESSED and fields.get(_SIZE) == length and encodings[0] == I32
    if not plain or not _ENCODINGS.issuperset(encodings[1]) or _CHUNK_INDEX & {number for number, _ in fields}:
        raise ValueError(f"{name} is compressed or in a dictionary")
    # of lists of any length each value takes four bytes or, of float16, two; an empty list takes one place
    if length < 0 or not (values == rows if len(path) == 1 else rows <= values <= length // 2 + rows):
        raise ValueError(f"{name} has more values than the file has bytes, or fewer than rows")
    start = start if values else position  # Arrow writes 0 where there are no values
    if not position <= start <= end - length:
        raise ValueError(f"{name} is not between its neighbours in the file")
    return Chunk(name, start, length, values)
