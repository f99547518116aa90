"""A Parquet file's footer is checked before Arrow reads it: fields changed one by one, and thousands of damaged ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coder_plugin.errors import CoderError
from coder_plugin.index import parquet_footer, thrift
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.thrift import BINARY, BOOL, DOUBLE, I8, I16, I32, I64, LIST, STRUCT, read_struct
from tests.index.made_embeddings import embed

Fields = dict[tuple[int, int], Any]


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def written(kind: int, value: Any) -> bytes:
    """A value in Thrift's compact protocol."""
    if kind in (I16, I32, I64):
        return varint((value << 1) ^ (value >> 127))
    if kind == BINARY:
        return varint(len(value)) + value
    if kind == LIST:
        each, values = value
        return bytes([240 | each]) + varint(len(values)) + b"".join(written(each, item) for item in values)
    if kind == STRUCT:
        fields, last = [], 0
        for (number, each), item in sorted(value.items()):
            fields.append(bytes([number - last << 4 | (2 - item if each == BOOL else each)]))
            fields.append(b"" if each == BOOL else written(each, item))
            last = number
        return b"".join(fields) + b"\0"
    return value


def change_footer(path: Path, change: Callable[[Fields], Any]) -> None:
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    fields, used = read_struct(content[start:-8])
    assert used == len(content) - 8 - start
    change(fields)
    footer = written(STRUCT, fields)
    path.write_bytes(content[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def group(fields: Fields) -> Fields:
    return fields[4, LIST][1][0]


def chunk(fields: Fields, column: int = 0) -> Fields:
    return group(fields)[1, LIST][1][column][3, STRUCT]


def place(fields: Fields) -> Fields:
    """What says in which file the first chunk is."""
    return group(fields)[1, LIST][1][0]


def put(where: Callable[[Fields], Fields], number: int, kind: int, value: Any) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        where(fields)[number, kind] = value

    return change


def file(fields: Fields) -> Fields:
    return fields


def drop(where: Callable[[Fields], Fields], *names: tuple[int, int]) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        for name in names:
            del where(fields)[name]

    return change


def element(fields: Fields) -> Fields:
    return fields[2, LIST][1][1]


def arrow_schema(fields: Fields) -> Fields:
    return fields[5, LIST][1][1]


CAPTIONS = 2  # the first column of lists
CHANGES: dict[str, tuple[Callable[[Fields], Any], str]] = {
    "encrypted": (put(file, 8, STRUCT, {}), "is encrypted"),
    "a key of an encrypted footer": (put(file, 9, BINARY, b""), "is encrypted"),
    "no columns": (drop(file, (2, LIST)), "its columns are others than embed.json says"),
    "another name": (put(element, 4, BINARY, b"kez"), "its columns are others"),
    "another type": (put(element, 1, I32, 99), "its columns are others"),
    "a type of another width": (lambda f: element(f).update({(1, I64): element(f).pop((1, I32))}), "its columns are others"),
    "children": (put(element, 5, I32, 2**31 - 1), "its columns are others"),
    "Arrow's types": (put(arrow_schema, 2, BINARY, b"/////"), "its columns are others"),
    "orders": (put(file, 7, LIST, (STRUCT, [{}] * 9)), "its columns are others"),
    "metadata twice": (lambda f: f[5, LIST][1].append(f[5, LIST][1][1]), "metadata name a field twice"),
    "metadata of texts": (put(file, 5, LIST, (BINARY, [b"x"])), "a list of another type"),
    "an old writer": (put(file, 6, BINARY, b"parquet-mr version 1.2.8"), "Arrow did not write it"),
    "a long writer": (put(file, 6, BINARY, b"parquet-cpp-arrow version " + b"9" * 99), "Arrow did not write it"),
    "no writer": (drop(file, (6, BINARY)), "Arrow did not write it"),
    "groups of numbers": (put(file, 4, LIST, (I32, [1])), "a list of another type"),
    "no groups": (drop(file, (4, LIST)), "its row groups have 0 rows, not 20"),
    "other rows": (put(file, 3, I64, 2**62), "its row groups have 20 rows"),
    "negative rows": (put(group, 3, I64, -20), "a row group is larger"),
    "many rows": (put(group, 3, I64, 2**17), "a row group is larger"),
    "no rows": (drop(group, (3, I64)), "a row group is larger"),
    "a large group": (put(group, 2, I64, 2**40), "a row group is larger"),
    "a negative group": (put(group, 2, I64, -1), "a row group is larger"),
    "a column too few": (lambda f: group(f)[1, LIST][1].pop(), "a row group has other columns"),
    "a column twice": (lambda f: group(f)[1, LIST][1].append(group(f)[1, LIST][1][0]), "a row group has other columns"),
    "another column": (put(chunk, 3, LIST, (BINARY, [b"path"])), "a row group has other columns"),
    "a chunk's type": (put(chunk, 1, I32, 1), "a row group has other columns"),
    "a file elsewhere": (put(place, 1, BINARY, b"/etc/passwd"), "in another file, or encrypted"),
    "an encrypted column": (put(place, 8, STRUCT, {}), "in another file, or encrypted"),
    "a chunk without metadata": (drop(place, (3, STRUCT)), "in another file, or encrypted"),
    "an unknown codec": (put(chunk, 4, I32, 77), "key is compressed or in a dictionary"),
    "no codec": (drop(chunk, (4, I32)), "key is compressed or in a dictionary"),
    "an unknown encoding": (put(chunk, 2, LIST, (I32, [77])), "key is compressed or in a dictionary"),
    "encodings of another type": (put(chunk, 2, LIST, (I64, [0])), "key is compressed or in a dictionary"),
    "a dictionary": (put(chunk, 11, I64, 4), "key is compressed or in a dictionary"),
    "an expanding chunk": (put(chunk, 6, I64, 2**40), "key is compressed or in a dictionary"),
    "no values": (drop(chunk, (5, I64)), "key has more values than the file has bytes, or fewer than rows"),
    "a value too many": (put(chunk, 5, I64, 21), "key has more values"),
    "too few captions": (lambda f: chunk(f, CAPTIONS).update({(5, I64): 19}), "captions has more values"),
    "many captions": (lambda f: chunk(f, CAPTIONS).update({(5, I64): 2**30}), "captions has more values"),
    "negative lengths": (lambda f: chunk(f).update({(6, I64): -1, (7, I64): -1}), "key has more values"),
    "a chunk before the file": (put(chunk, 9, I64, -4), "key is not between its neighbours"),
    "a chunk beyond the end": (put(chunk, 9, I64, 2**40), "key is not between its neighbours"),
    "a long chunk": (lambda f: chunk(f).update({(6, I64): 2**40, (7, I64): 2**40}), "key is not between its neighbours"),
    "a chunk within another": (lambda f: chunk(f, 1).update({(9, I64): chunk(f)[9, I64]}), "image_id is not between"),
}  # fmt: skip


@pytest.fixture
def good(tmp_path: Path) -> Path:
    embed(tmp_path / "good", units=1)
    return tmp_path / "good"


def test_the_same_footer_written_again_is_accepted(good: Path) -> None:
    """So that the changes below are refused for what they say."""
    path = good / "00000000.parquet"
    before, content = Embeddings(good).read(0), path.read_bytes()
    change_footer(path, lambda fields: None)
    assert path.read_bytes() != content and Embeddings(good).read(0).equals(before)  # lengths of lists are written otherwise
    change_footer(path, put(group, 12, LIST, (DOUBLE, [bytes(8)])))  # fields that nobody knows yet
    change_footer(path, put(chunk, 20, I8, b"\x01"))
    assert Embeddings(good).read(0).equals(before)


@pytest.mark.parametrize("case", CHANGES)
def test_footers_of_somebody_else_are_refused(good: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    embeddings, (change, message) = Embeddings(good), CHANGES[case]
    change_footer(good / "00000000.parquet", change)
    parquet_footer._expected(embeddings.header.schema())
    monkeypatch.setattr(pq, "ParquetFile", lambda *arguments, **options: pytest.fail("Arrow has read it"))
    with pytest.raises(CoderError, match="00000000.parquet is damaged") as caught:
        embeddings.read(0)
    assert message in str(caught.value)


def test_a_footer_that_is_shorter_than_it_says(good: Path) -> None:
    path = good / "00000000.parquet"
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:-8] + b"\0" + (length + 1).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(CoderError, match="another length than it says"):
        Embeddings(good).read(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends too early"),
        (b"\x15", "ends too early"),
        (b"\x15\x06", "ends too early"),
        (b"\x18\x7fx", "ends too early"),
        (b"\x15\x02\x05\x02\x02\0", "not in order"),  # field 1, and field 1 again by its number
        (b"\x15\xff\xff\xff\xff\x1f\0", "larger than its type"),  # 2**33 of 32 bits
        (b"\x16" + b"\xff" * 10 + b"\x01\0", "larger than its type"),
        (b"\x19\xf5\xff\xff\xff\xff\x07\0", "longer than the bytes"),
        (b"\x1a\x15\0\0", "unknown type"),  # a set
        (b"\x1b\0\0", "unknown type"),  # a map
        (b"\x1c" * 999 + b"\0" * 999, "nested too deeply"),
        (b"\x19" * 999 + b"\0" * 999, "nested too deeply"),
    ],
)
def test_structs_that_are_none(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_struct(content)


@pytest.mark.parametrize("content", [b"\x19\xc5" + bytes(13), b"\x19\xcc" + bytes(13), b"\x11" * 13 + b"\0"])
def test_the_number_of_values_is_limited(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift, "_MOST_VALUES", 13)
    assert read_struct(content)[1] == len(content)
    monkeypatch.setattr(thrift, "_MOST_VALUES", 12)
    with pytest.raises(ValueError, match="too many values"):
        read_struct(content)


DAMAGE = """
import random, sys
from pathlib import Path
from coder_plugin.errors import CoderError
from coder_plugin.index.embeddings import Embeddings
folder, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
path, before = folder / "00000000.parquet", Embeddings(folder).read(0)
content, refused = path.read_bytes(), 0
start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
for number in range(count):
    changed = bytearray(content)
    at, other, length = rng.randrange(start, len(content)), rng.randrange(start, len(content)), rng.randrange(1, 60)
    if number % 4 == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif number % 4 == 1:
        changed[at] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
    elif number % 4 == 2:
        changed[at:at] = content[other : other + length]
    else:
        del changed[at : at + length]
    if number % 4 > 1:
        changed[-8:] = (len(changed) - 8 - start).to_bytes(4, "little") + b"PAR1"
    path.write_bytes(changed)
    try:
        assert Embeddings(folder).read(0).equals(before)  # bytes that nobody reads, such as statistics
    except CoderError as error:
        assert str(path) in str(error)
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_footers_are_refused_or_change_nothing(good: Path, count: int) -> None:
    """In a process of its own, which a fault in Arrow would end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", DAMAGE, str(good), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > count / 2
