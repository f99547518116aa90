"""The folder of embeddings: what is written comes back, and files of somebody else are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.index import parquet_footer, unit_file
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.embeddings_header import COLUMN_TYPES, DTYPES, WHAT, Header
from coder_plugin.index.parquet_pages import check_pages
from coder_plugin.index.records import storable
from coder_plugin.index.unit_file import Rows, image_vectors, is_complete, text_vectors, write_unit

MODEL = {"name": "x", "fingerprint": "f" * 64}
JPEG = b"\xff\xd8\xff"


def make_header(**fields: Any) -> Header:
    return Header(**{"model": MODEL, "plan": {"data": "x"}, "units": 1, "dimensions": 4, **fields})


def make_rows(header: Header, captions: list[list[str]], seed: int = 0, **fields: Any) -> Rows:
    rng, count, texts = np.random.default_rng(seed), len(captions), sum(map(len, captions))
    shape = (count, header.dimensions) if header.views == 1 else (count, header.views, header.dimensions)
    values: dict[str, Any] = {
        "keys": [f"{seed}/{n}.jpg" for n in range(count)],
        "captions": captions,
        "images": None if header.what == "captions" else rng.normal(size=shape).astype(header.dtype),
        "texts": None if header.what == "images" else rng.normal(size=(texts, header.dimensions)).astype(header.dtype),
        "paths": [f"/data/{n}.jpg" for n in range(count)],
        "members": [None] * count,
        "columns": {name: [None] * count for name in header.columns},
    }
    return Rows(**{**values, **fields})


def make_folder(folder: Path, header: Header, *rows: Rows, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    header.write(folder)
    write_unit(folder / header.file(0), header, 0, rows, **options)
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder of one unit with everything in it."""
    header = make_header(columns={"source": "string", "year": "int64"})
    rows = make_rows(header, [["a dog", "a cat"], [], ["a bird"]])
    rows = rows._replace(
        thumbnails=[JPEG + b"1", b"", JPEG],
        columns={"source": ["coco", None, "web"], "year": [1999, None, 2001]},
        image_tokens={"tokens": np.ones((3, 2, 2), np.float16)},
        text_tokens={"tokens": np.ones((3, 5), np.float16)},
    )
    return make_folder(tmp_path / "good", header, rows, bad=[("picture", "b.jpg")])


VALUES: dict[str, Any] = {
    "string": st.text(st.characters(codec="utf-8"), max_size=9),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
}


@given(st.data())
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    columns = {f"column_{n}": kind for n, kind in enumerate(data.draw(st.lists(st.sampled_from(COLUMN_TYPES), max_size=3)))}
    header = make_header(
        dimensions=data.draw(st.integers(1, 5)),
        views=data.draw(st.integers(1, 3)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        what=data.draw(st.sampled_from(WHAT)),
        columns=columns,
    )
    text = st.text(max_size=6)  # with halves of surrogate pairs, as in a file name that is not UTF-8
    batches = []
    for number, captions in enumerate(data.draw(st.lists(st.lists(st.lists(text, max_size=3), max_size=4), max_size=3))):
        count = len(captions)
        each = {
            "keys": data.draw(st.lists(text, min_size=count, max_size=count)),
            "paths": data.draw(st.lists(st.none() | text, min_size=count, max_size=count)),
            "members": data.draw(st.lists(st.none() | text, min_size=count, max_size=count)),
            "thumbnails": [JPEG * data.draw(st.integers(0, 2)) for _ in range(count)],
            "columns": {
                name: data.draw(st.lists(st.none() | VALUES[kind], min_size=count, max_size=count))
                for name, kind in columns.items()
            },
        }
        batches.append(make_rows(header, captions, number, **each))
    folder = make_folder(tmp_path_factory.mktemp("made"), header, *batches)
    embeddings = Embeddings(folder)
    table = embeddings.read(0)
    count = sum(len(batch.keys) for batch in batches)
    assert (embeddings.rows, table.num_rows) == (count, count) and table.schema.equals(header.schema())
    expected = {name: [] for name in table.schema.names}  # type: dict[str, list[Any]]
    for batch in batches:
        expected["key"] += map(storable, batch.keys)
        expected["image_id"] += map(stable_hash, batch.keys)
        expected["captions"] += [list(map(storable, each)) for each in batch.captions]
        expected["path"] += [each if each is not None and storable(each) == each else None for each in batch.paths]
        expected["member"] += [each if each is not None and storable(each) == each else None for each in batch.members]
        expected["thumbnail"] += [each or None for each in batch.thumbnails]
        for name in columns:
            expected[name] += batch.columns[name]
        if batch.images is not None:
            expected["image_vector"] += batch.images.tolist()
        if batch.texts is not None:
            ends = np.cumsum([0, *map(len, batch.captions)])
            expected["text_vectors"] += [batch.texts[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]
    assert table.to_pydict() == expected
    parts = list(embeddings.batches(0, rows=2))
    assert all(1 <= len(part) <= 2 for part in parts) and sum(map(len, parts)) == count
    if parts and header.what != "captions":
        found = np.concatenate([image_vectors(part, header) for part in parts])
        given_vectors = np.concatenate([batch.images.reshape(-1, header.views, header.dimensions) for batch in batches])
        assert found.dtype == np.float32 and np.array_equal(found, given_vectors.astype(np.float32))
    if parts and header.what != "images":
        found = np.concatenate([text_vectors(part, header) for part in parts])
        assert found.dtype == np.float32 and np.array_equal(found, np.concatenate([batch.texts for batch in batches]))


def test_row_groups_are_small_and_read_in_order(tmp_path: Path) -> None:
    header = make_header(what="images")
    folder = make_folder(tmp_path / "x", header, *(make_rows(header, [[]] * 700, seed) for seed in range(4)))
    assert pq.ParquetFile(folder / header.file(0)).num_row_groups == 4  # of two batches 1,024 and 376 rows
    sizes = [len(batch) for batch in Embeddings(folder).batches(0, ["key"])]
    assert sum(sizes) == 2800 and max(sizes) <= 1024
    assert Embeddings(folder).read(0, ["key"])["key"].to_pylist() == [f"{s}/{n}.jpg" for s in range(4) for n in range(700)]


def test_a_row_group_is_written_when_it_has_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_file, "_GROUP_BYTES", 1000)
    header = make_header(what="images", dimensions=64)
    folder = make_folder(tmp_path / "x", header, *(make_rows(header, [[]] * 3, seed) for seed in range(4)))
    assert pq.ParquetFile(folder / header.file(0)).num_row_groups == 2


def test_tokens_are_padded_to_the_longest(tmp_path: Path) -> None:
    header, rng = make_header(), np.random.default_rng(0)
    tokens = [rng.normal(size=(2, length, 3)).astype(dtype) for length, dtype in ((2, np.float16), (4, np.float32))]
    rows = [
        make_rows(header, [["x"], ["y"]], seed, image_tokens={"tokens": value}, text_tokens={"tokens": value})
        for seed, value in enumerate(tokens)
    ]
    embeddings = Embeddings(make_folder(tmp_path / "x", header, *rows))
    found = embeddings.tokens(0)
    assert {name: (value.shape, value.dtype.name) for name, value in found.items()} == {
        "image_tokens": ((4, 4, 3), "float32"), "text_tokens": ((4, 4, 3), "float32")
    }  # fmt: skip
    assert np.array_equal(found["image_tokens"][:2, :2], tokens[0].astype(np.float32))
    assert not found["text_tokens"][:2, 2:].any()
    assert np.array_equal(found["text_tokens"][2:], tokens[1])
    assert make_folder(tmp_path / "x", header, rows[0]._replace(image_tokens={}, text_tokens={}))
    assert Embeddings(tmp_path / "x").tokens(0) == {} and not list((tmp_path / "x").glob("*.safetensors"))


def test_a_summary_needs_no_rows(good: Path) -> None:
    embeddings = Embeddings(good)
    summary = embeddings.summary(0)
    assert (summary.rows, summary.captions, summary.bad) == (3, 3, [("picture", "b.jpg")])
    assert (embeddings.units, embeddings.dimensions, embeddings.views, embeddings.dtype) == (1, 4, 1, "float32")
    assert embeddings.columns == {"source": "string", "year": "int64"} and embeddings.model == MODEL
    shapes = {name: value.shape for name, value in embeddings.tokens(0).items()}
    assert shapes == {"image_tokens": (3, 2, 2), "text_tokens": (3, 5)}


def test_missing_units_are_named(tmp_path: Path) -> None:
    header = make_header(units=4, what="images")
    folder = make_folder(tmp_path / "x", header, make_rows(header, [[]]))
    write_unit(folder / header.file(2), header, 2, [make_rows(header, [[]] * 2)])
    (folder / "00000009.parquet").touch()  # beyond the last one
    with pytest.raises(CoderError, match=r"2 of 4 files are missing, the first: 00000001.parquet: run its coder-plugin embed"):
        Embeddings(folder)
    embeddings = Embeddings(folder, allow_missing=True)
    assert embeddings.present == [0, 2] and embeddings.rows == 3
    with pytest.raises(CoderError, match="00000001.parquet"):
        embeddings.read(1)
    with pytest.raises(CoderError, match="no column 'vector'; it has key, image_id"):
        embeddings.read(0, ["vector"])


class Killed(BaseException):
    pass


def test_a_stop_while_writing_leaves_the_old_file(good: Path) -> None:
    header, before = Header.read(good), sorted((path.name, path.read_bytes()) for path in good.iterdir())

    def stopping() -> Any:
        yield make_rows(header, [["new"]])
        raise Killed

    with pytest.raises(Killed):
        write_unit(good / header.file(0), header, 0, stopping())
    assert sorted((path.name, path.read_bytes()) for path in good.iterdir()) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": np.full((1, 4), np.nan)}, "vectors of images are not finite, so they cannot be searched"),
        ({"texts": np.full((1, 4), 1e5)}, "vectors of captions are not finite as float16: use --dtype float32"),
        ({"images": np.zeros((1, 5))}, r"vectors of images are \[1, 5\], expected \[1, 4\]"),
        ({"texts": np.zeros((2, 4))}, r"vectors of captions are \[2, 4\], expected \[1, 4\]"),
        ({"images": None}, r"vectors of images are None"),
    ],
)
def test_vectors_that_cannot_be_searched_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    header = make_header(dtype="float16")
    with pytest.raises(CoderError, match=message):
        make_folder(tmp_path, header, make_rows(header, [["x"]], **fields))
    assert [path.name for path in tmp_path.iterdir()] == ["embed.json"]


# files of somebody else


def rewrite(folder: Path, change: Any = lambda table: table, *, content: Any = (), **options: Any) -> None:
    """Write a folder's file again with other rows, other fields of our metadata, or other options of the writer."""
    path = folder / "00000000.parquet"
    with pq.ParquetFile(path) as file:
        table, metadata = file.read(), json.loads(file.metadata.metadata[b"coder_plugin"])
    table, schema = change(table).replace_schema_metadata(None), Header.read(folder).schema()
    ours = dict(zip(schema.names, schema, strict=True))
    fields = [ours[old.name] if old.name in ours and ours[old.name].type == old.type else old for old in table.schema]
    table = table.cast(pa.schema(fields))  # Arrow names what is in lists otherwise when it reads
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, **options}
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table)
        if content is not None:
            writer.add_key_value_metadata({"coder_plugin": json.dumps({**metadata, **dict(content)})})


def column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        number = table.schema.get_field_index(name)
        array = values if isinstance(values, pa.Array) else pa.array(values, table.schema.field(name).type)
        return table.set_column(number, pa.field(name, array.type), array)

    return change


def bytes_as_text(values: list[bytes]) -> pa.Array:
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


def vectors(value: float | None) -> list[Any]:
    return [[1.0, 2.0, 3.0, value]] * 3


def replaced(folder: Path) -> Path:
    """The name of the file, which is removed."""
    (folder / "00000000.parquet").unlink()
    return folder / "00000000.parquet"


#: What was done to the file, and words of the message.
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda f: (f / "00000000.parquet").write_bytes(b""), "no end of a Parquet file"),
    "text": (lambda f: (f / "00000000.parquet").write_text("x" * 99), "no end of a Parquet file"),
    "a large footer": (
        lambda f: (f / "00000000.parquet").write_bytes(b"PAR1" + b"\xff\xff\xff\x7fPAR1"), "footer is larger"
    ),
    "a footer as long as the file": (
        lambda f: (f / "00000000.parquet").write_bytes(b"PAR1" + bytes(8) + b"\x11\0\0\0PAR1"), "footer is larger"
    ),
    "a footer of noise": (
        lambda f: (f / "00000000.parquet").write_bytes(b"PAR1" + b"\x99" * 64 + b"\x40\0\0\0PAR1"), "is damaged"
    ),
    "a named pipe": (lambda f: os.mkfifo(replaced(f)), "not a regular"),
    "a folder": (lambda f: replaced(f).mkdir(), "is damaged"),
    "compressed": (lambda f: rewrite(f, compression="zstd"), "key is compressed"),
    "a dictionary": (lambda f: rewrite(f, use_dictionary=["key"]), "key is compressed or in a dictionary"),
    "differences": (lambda f: rewrite(f, column_encoding={"key": "DELTA_BYTE_ARRAY"}), "key is compressed or in"),
    "no metadata": (lambda f: rewrite(f, content=None), "metadata are not those of coder-plugin embed"),
    "another unit": (lambda f: rewrite(f, content={"unit": 1}), "another unit than embed.json"),
    "another plan": (lambda f: rewrite(f, content={"plan": "0" * 64}), "another plan than embed.json"),
    "another model": (lambda f: rewrite(f, content={"fingerprint": "0" * 64}), "another fingerprint"),
    "a fraction for two": (lambda f: rewrite(f, content={"version": 2.0}), "another version"),
    "an unknown field": (lambda f: rewrite(f, content={"more": 1}), "metadata are not those"),
    "negative rows": (lambda f: rewrite(f, content={"captions": -1}), "metadata have other types"),
    "other rows": (lambda f: rewrite(f, content={"rows": 4}), "it has 3 rows, not 4"),
    "bad samples of another type": (lambda f: rewrite(f, content={"bad": [["x"]]}), "bad samples are no pairs"),
    "tokens of another type": (lambda f: rewrite(f, content={"tokens": {"bytes": 1}}), "tokens are named without"),
    "rows without a checksum": (lambda f: rewrite(f, content={"content": "x"}), "rows have no checksum"),
    "a column too many": (lambda f: rewrite(f, lambda t: t.append_column("more", [[1, 2, 3]])), "its columns are others"),
    "a column too few": (lambda f: rewrite(f, lambda t: t.drop_columns("path")), "its columns are others"),
    "a column of another type": (lambda f: rewrite(f, column("key", pa.array([1, 2, 3]))), "its columns are others"),
    "no key": (lambda f: rewrite(f, column("key", ["a", None, "c"])), "key has rows without a value"),
    "no captions": (lambda f: rewrite(f, column("captions", [["a", "b"], None, ["c"]])), "captions has rows"),
    "no caption": (lambda f: rewrite(f, column("captions", [["a", None], [], ["c"]])), "captions has rows"),
    "no vector": (lambda f: rewrite(f, column("image_vector", [*vectors(1)[:2], None])), "image_vector has rows"),
    "no number": (lambda f: rewrite(f, column("image_vector", vectors(None))), "image_vector has vectors without"),
    "not a number": (lambda f: rewrite(f, column("image_vector", vectors(float("nan")))), "numbers that are not finite"),
    "infinity": (
        lambda f: rewrite(f, column("text_vectors", [[[1, 2, 3, float("inf")]] * 2, [], [[1, 2, 3, 4]]])),
        "text_vectors has numbers that are not finite",
    ),
    "a vector too many": (
        lambda f: rewrite(f, column("text_vectors", [[[1, 2, 3, 4]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]])),
        "another number of captions than of their vectors",
    ),
    "no UTF-8": (lambda f: rewrite(f, column("key", bytes_as_text([b"a", b"\xff", b"c"]))), "UTF8"),
    "a negative id": (lambda f: rewrite(f, column("image_id", [1, -2, 3])), "image_id is negative"),
    "no JPEG": (lambda f: rewrite(f, column("thumbnail", [b"<svg>", None, None])), "thumbnail is not a JPEG"),
}  # fmt: skip


def test_rows_that_arrow_does_not_find_are_missed(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *arguments, **options: iter(()))
    with pytest.raises(CoderError, match="3 of its rows are missing"):
        Embeddings(good).read(0)


@pytest.mark.parametrize("case", HOSTILE)
def test_files_of_somebody_else_are_refused_by_name(good: Path, case: str) -> None:
    change, message = HOSTILE[case]
    change(good)
    with pytest.raises(CoderError) as caught:
        Embeddings(good).read(0)
    assert f"{good}/00000000.parquet is damaged (" in str(caught.value) and message in str(caught.value)
    assert "run its coder-plugin embed command again" in str(caught.value) and "\n" not in str(caught.value)


def test_the_same_rows_written_again_are_accepted(good: Path) -> None:
    """So that the cases above are refused for what they say."""
    before = Embeddings(good).read(0)
    rewrite(good)
    assert Embeddings(good).read(0).equals(before)


@pytest.mark.parametrize("limit", ["_MOST_GROUP_ROWS", "_MOST_GROUP_BYTES"])
def test_large_row_groups_are_refused(good: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(parquet_footer, limit, 2)
    with pytest.raises(CoderError, match="a row group is larger than any should be"):
        Embeddings(good).summary(0)


def chunk_of(folder: Path, name: str, group: int = 0) -> tuple[int, int, int]:
    """Start, length and number of values of a column chunk."""
    found = pq.ParquetFile(folder / "00000000.parquet").metadata.row_group(group)
    chunk = next(c for c in map(found.column, range(found.num_columns)) if c.path_in_schema.startswith(name))
    return chunk.dictionary_page_offset or chunk.data_page_offset, chunk.total_compressed_size, chunk.num_values


def test_pages_must_be_as_the_footer_says(good: Path, tmp_path: Path) -> None:
    path = good / "00000000.parquet"
    start, length, values = chunk_of(good, "captions")
    with open(path, "rb") as file:
        check_pages(file, start, length, values)
        for changed in ((start, length, values + 1), (start, length - 1, values), (start + 1, length, values)):
            with pytest.raises(ValueError, match="page"):
                check_pages(file, *changed)
    rewrite(good, use_dictionary=["key"])
    with open(path, "rb") as file, pytest.raises(ValueError, match="in a dictionary"):
        check_pages(file, *chunk_of(good, "key"))
    rewrite(good, compression="zstd")
    with open(path, "rb") as file, pytest.raises(ValueError, match="compressed"):
        check_pages(file, *chunk_of(good, "image_vector"))


def test_a_page_that_says_it_has_more_values_is_refused_before_it_is_read(good: Path) -> None:
    """The page's own number of captions, a zigzag integer after the sizes, is made 2**30."""
    path = good / "00000000.parquet"
    start, length, values = chunk_of(good, "captions")
    content = bytearray(path.read_bytes())
    found = content.index(bytes([0x15, 2 * values, 0x15, 0]), start, start + length)  # number of values, PLAIN
    changed = bytes([0x15, 0x80, 0x80, 0x80, 0x80, 0x08, 0x15, 0])
    assert len(changed) == 8
    content[found : found + 8] = changed
    path.write_bytes(content)
    with pytest.raises(CoderError, match=r"captions.* page"):
        Embeddings(good).read(0)


def test_torn_files_are_not_complete(good: Path) -> None:
    header, path = Header.read(good), good / "00000000.parquet"
    content = path.read_bytes()
    assert is_complete(path, header, 0) and not is_complete(path, header, 1)
    assert not is_complete(path, replace(header, plan={"data": "y"}), 0)
    for length in range(0, len(content), 41):
        path.write_bytes(content[:length])
        assert not is_complete(path, header, 0)
        with pytest.raises(CoderError, match="is damaged"):
            Embeddings(good).read(0)
    path.write_bytes(content)
    tokens = good / header.tokens_file(0)
    tokens.write_bytes(tokens.read_bytes()[:-1])
    assert not is_complete(path, header, 0)
    tokens.unlink()
    assert not is_complete(path, header, 0)


FLIPS = """
import random, sys
from pathlib import Path
from coder_plugin.errors import CoderError
from coder_plugin.index.embeddings import Embeddings
folder, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
path, before = folder / "00000000.parquet", Embeddings(folder).read(0)
content, refused = path.read_bytes(), 0
footer = 8 + int.from_bytes(content[-8:-4], "little")
for _ in range(count):
    changed = bytearray(content)
    changed[rng.randrange(len(content) - footer)] ^= 1 << rng.randrange(8)
    path.write_bytes(changed)
    try:
        assert Embeddings(folder).read(0).equals(before)  # a byte that nobody reads, such as a page's statistics
    except CoderError as error:
        assert str(path) in str(error)
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("count", [50, pytest.param(20_000, marks=pytest.mark.slow)])
def test_flipped_bits_are_refused_or_change_nothing(good: Path, count: int) -> None:
    """In a process of its own, which a fault in Arrow would end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FLIPS, str(good), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > count / 2


def test_damaged_tokens_are_refused_by_name(good: Path) -> None:
    from safetensors.numpy import save_file

    path, header = good / "00000000.tokens.safetensors", Header.read(good)
    content = path.read_bytes()
    for changed in (content[:-1], content + b"\0", content[:-1] + b"\x01"):
        path.write_bytes(changed)
        with pytest.raises(CoderError, match=r"tokens.safetensors is damaged \(its size or checksum is another"):
            Embeddings(good).tokens(0)
    path.unlink()
    with pytest.raises(CoderError, match=r"tokens.safetensors is damaged"):
        Embeddings(good).tokens(0)
    for tensors in (
        {"image_tokens": np.ones((2, 2), np.float16)},  # of two images
        {"other_tokens": np.ones((3, 2), np.float16)},
        {"image_tokens": np.ones((3, 2), np.uint8)},
    ):
        save_file(tensors, path)
        rewrite(good, content={"tokens": {"bytes": path.stat().st_size, "sha256": unit_file.sha256_file(path)}})
        with pytest.raises(CoderError, match=r"tokens.safetensors is damaged \('(image|other)_tokens' is"):
            Embeddings(good).tokens(0)
    assert is_complete(good / header.file(0), header, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "x"}, "was not written by coder-plugin embed"),
        ({"version": 1}, "has version 1 of the format"),
        ({"more": 1}, "missing or unknown: more"),
        ({"units": 0}, "units is '0'; it must be from 1"),
        ({"units": True}, "units is 'True'"),
        ({"dimensions": 1 << 21}, "dimensions is '2097152'"),
        ({"views": 1.5}, "views is '1.5'"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of float32, float16"),
        ({"what": "all"}, "what is 'all'"),
        ({"model": {}}, "its model has no fingerprint"),
        ({"plan": []}, "its plan is no object"),
        ({"columns": {"1x": "string"}}, "column '1x'"),
        ({"columns": {"Key": "string"}}, "column 'Key': the file has a column of that name"),
        ({"columns": {"a": "string", "A": "string"}}, "column 'a'"),
        ({"columns": {"a": "list"}}, "has the type 'list'"),
        ({"columns": []}, "its columns are no names"),
    ],
    ids=str,
)
def test_a_note_of_somebody_else_is_refused(good: Path, fields: dict[str, Any], message: str) -> None:
    path = good / "embed.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(CoderError) as caught:
        Embeddings(good)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_note_that_lacks_a_field_or_is_deep_is_refused(good: Path) -> None:
    path = good / "embed.json"
    content = json.loads(path.read_text())
    assert {name: content[name] for name in asdict(Header.read(good))} == asdict(Header.read(good))
    for name in ("model", "dtype", "columns"):
        path.write_text(json.dumps({key: value for key, value in content.items() if key != name}))
        with pytest.raises(CoderError, match=f"missing or unknown: {name}"):
            Embeddings(good)
    path.write_text(json.dumps({**content, "plan": {"x": 0}}).replace('{"x": 0}', '{"x":' * 5000 + "0" + "}" * 5000))
    with pytest.raises(CoderError, match="nested too deeply"):
        Embeddings(good)
