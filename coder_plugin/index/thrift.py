"""Reader of Thrift's compact protocol, in which a Parquet file's footer and the headers of its pages are written."""

from __future__ import annotations

from typing import Any

BOOL, I8, I16, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 2, 3, 4, 5, 6, 7, 8, 9, 12
_TRUE, _BITS = 1, {I16: 16, I32: 32, I64: 64}
_MOST_VALUES, _DEEPEST = 1 << 22, 12


def read_struct(data: bytes) -> tuple[dict[tuple[int, int], Any], int]:
    """The struct at the beginning of ``data``.

    Nothing is believed: lengths are compared with the bytes that are left, and values and nesting are counted.

    Returns:
        Its values by the number and type of their field, as readers of Thrift find them: a field of another type than expected
        counts as missing. Lists are pairs of their values' type and the values. And the length of the struct in bytes.

    Raises:
        ValueError: ``data`` does not begin with a struct, ends within it, or has more than 4 million values.

    Example:
        >>> read_struct(bytes([0x15, 0x06, 0x18, 0x02, 0x68, 0x69, 0x00]))
        ({(1, 5): 3, (2, 8): b'hi'}, 7)
    """
    reader = _Reader(data)
    return reader.struct(0), reader.at


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.left = data, 0, _MOST_VALUES

    def struct(self, depth: int) -> dict[tuple[int, int], Any]:
        fields: dict[tuple[int, int], Any] = {}
        last = 0
        while head := self.take(1)[0]:
            kind = head & 15
            number = last + (head >> 4) if head >> 4 else self.integer(16)
            if number <= last:  # as no writer does; readers would disagree on which of two fields counts
                raise ValueError("its fields are not in order")
            last = number
            self.count(1)
            if kind in (_TRUE, BOOL):  # a field of a struct has its value in its type
                fields[number, BOOL] = kind == _TRUE
            else:
                fields[number, kind] = self.value(kind, depth)
        return fields

    def value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        if bits := _BITS.get(kind):
            return self.integer(bits)
        if kind == BINARY:
            return self.take(self.varint())
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind == LIST:
            head = self.take(1)[0]
            length = head >> 4 if head >> 4 < 15 else self.varint()
            if length > len(self.data) - self.at:  # each value has a byte or more
                raise ValueError("a list is longer than the bytes that are left")
            self.count(length)
            return head & 15, [self.value(head & 15, depth + 1) for _ in range(length)]
        if kind in (_TRUE, BOOL, I8, DOUBLE):  # in a list a bool has a byte too
            return self.take(8 if kind == DOUBLE else 1)
        raise ValueError("a field has an unknown type")

    def count(self, values: int) -> None:
        self.left -= values
        if self.left < 0:
            raise ValueError("it has too many values")

    def integer(self, bits: int) -> int:
        value = self.varint()
        if value >> bits:
            raise ValueError("a number is larger than its type")
        return (value >> 1) ^ -(value & 1)

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number is larger than its type")

    def take(self, length: int) -> bytes:
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("it ends too early")
        return self.data[start : self.at]
