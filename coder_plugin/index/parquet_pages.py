"""The page headers of a Parquet file, compared with its footer.

Arrow trusts a page's own number of values, and a few bytes can stand for 2**31 of them. The headers are structs in Thrift's
compact protocol.
"""

from __future__ import annotations

from typing import IO, Any

_TRUE, _FALSE, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, 12
_LONGEST = 1 << 16  # bytes of a header
_DATA_PAGE, _PLAIN = 0, 0
# fields of a page's header, and of the header of a page of data in it
_TYPE, _SIZE, _STORED, _DATA, _COUNT, _ENCODING = 1, 2, 3, 5, 1, 2


def check_pages(file: IO[bytes], start: int, length: int, values: int) -> None:
    """Check that a column chunk consists of pages of plain, uncompressed data with ``values`` values in all.

    Args:
        file: the Parquet file.
        start: where the chunk's first page begins, in bytes.
        length: of the chunk in bytes.
        values: that the footer says it has.

    Raises:
        ValueError: it does not.
    """
    end, total = start + length, 0
    while start < end:
        file.seek(start)
        header, used = _struct(file.read(_LONGEST), 0, 0)
        data = header.get(_DATA)
        if header.get(_TYPE) != _DATA_PAGE or not isinstance(data, dict) or data.get(_ENCODING) != _PLAIN:
            raise ValueError("a page is in a dictionary, or not of plain data")
        size, count = header.get(_SIZE), data.get(_COUNT)
        if not isinstance(size, int) or not isinstance(count, int) or header.get(_STORED) != size or size < 0 or count < 0:
            raise ValueError("a page is compressed, or has no size")
        start, total = start + used + size, total + count
    if start != end or total != values:
        raise ValueError("its pages have other sizes than its footer says")


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while (kind := data[at] if at < len(data) else -1) > 0:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, kind & 15, depth)
    if kind < 0 or depth > 8:
        raise ValueError("a page has no header")
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in _INTEGERS:
        return _integer(data, at)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return None, at + length
    if kind == _STRUCT and depth < 8:
        return _struct(data, at, depth + 1)
    raise ValueError("a page's header has a field that no page has")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a page has no header")
