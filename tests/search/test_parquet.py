"""The Parquet files of embeddings: what is written is read, by others too, and what somebody else has written is checked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.search.parquet import Rows, Table, read_header, read_npy, schema_of, write_file
from tests.search.made import embed

HEADER: dict[str, Any] = {"model": {"fingerprint": "f"}, "plan": {}, "units": 1, "unit": 0, "bad": []}


def table_of(folder: Path) -> Table:
    return Table(sorted(folder.glob("*.parquet")))


@pytest.mark.parametrize(("views", "dtype"), [(1, "float32"), (3, "float16")])
def test_what_is_written_is_read(tmp_path: Path, views: int, dtype: str) -> None:
    """Seven hundred rows are three groups; rows of both files in any order."""
    vectors = embed(tmp_path, units=2, rows=700, views=views, dtype=dtype, tokens=True)
    table = table_of(tmp_path)
    atol = 0 if dtype == "float32" else 2e-3
    assert len(table) == 1400 and pq.read_metadata(table.paths[0]).num_row_groups == 3
    for kind, expected in vectors.items():
        np.testing.assert_allclose(np.concatenate([*table.vector_batches(kind)]), expected.reshape(-1, 8), atol=atol)
    rows = [1399, 0, 700, 256, 255]
    np.testing.assert_allclose(table.vectors("images", rows), vectors["images"][rows], atol=atol)
    starts = np.cumsum([0] + [number % 3 for _ in range(2) for number in range(700)])
    own = vectors["captions"][starts[698] : starts[699]]
    np.testing.assert_allclose(table.vectors("captions", [698])[:, 0], own, atol=atol)
    found = table.rows(rows, ["key", "image_id", "captions", "width"])
    assert [each["key"] for each in found] == ["a-1-699", "a-0-0", "a-1-0", "a-0-256", "a-0-255"]
    assert found[3] == {
        "key": "a-0-256", "image_id": stable_hash("a-0-256"), "captions": ["caption 0 of a-0-256"], "width": 25600,
    }  # fmt: skip
    assert table.large(6, "thumbnail") == b"\xff\xd8\xffa-0-6" and table.large(5, "thumbnail") is None
    [cell] = [batch.column(0)[3].as_py() for first, batch in table.batches(["image_tokens_t"]) if first == 700]
    assert read_npy(cell).shape == (3, 3) and read_npy(cell).dtype == np.float16
    with pytest.raises(CoderError, match="has no row 1400, only 1,400"):
        table.rows([1400], ["key"])


def test_others_read_it(tmp_path: Path) -> None:
    import duckdb

    vectors = embed(tmp_path, units=2)
    noted = json.loads(pq.read_schema(tmp_path / "00000000.parquet").metadata[b"coder_plugin"])
    assert noted["model"]["fingerprint"] == "f" * 64
    header = read_header(tmp_path / "00000000.parquet")
    [counts] = duckdb.sql(f"SELECT count(*), sum(len(captions)) FROM '{tmp_path}/00000000.parquet'").fetchall()
    assert (header["rows"], header["captions"]) == counts
    named = f"'{tmp_path}/*.parquet'"
    assert duckdb.sql(f"SELECT count(*), max(width) FROM {named} WHERE source = 'coco'").fetchall() == [(20, 1900)]
    [(vector,)] = duckdb.sql(f"SELECT image_vector FROM {named} WHERE key = 'a-1-7'").fetchall()
    np.testing.assert_array_equal(np.float32(vector), vectors["images"][27, 0])


def test_a_vector_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    for value, dtype in ((np.nan, "float32"), (1e6, "float16")):
        rows = Rows(["a"], [[]], np.full((1, 2), value), None, [None], [None])
        with pytest.raises(CoderError, match="a vector is not finite"):
            write_file(tmp_path / "a.parquet", schema_of(2, dtype=dtype, what="images"), HEADER, [rows])
    assert not list(tmp_path.iterdir())


def test_files_of_other_models_or_columns_are_no_table(tmp_path: Path) -> None:
    embed(tmp_path / "a", units=1)
    others = [({"fingerprint": "e" * 64}, "another model"), ({"columns": {}}, "other columns"), ({"dimensions": 4}, "vectors")]
    for number, (options, text) in enumerate(others):
        embed(tmp_path / str(number), units=1, **options)  # type: ignore[arg-type]
        with pytest.raises(CoderError, match=f"{number}/00000000.parquet has .*{text}"):
            Table([tmp_path / "a" / "00000000.parquet", tmp_path / str(number) / "00000000.parquet"])


def rewrite(change: Callable[[pa.Table], pa.Table], **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        counts = pq.read_metadata(path).metadata[b"coder_plugin_counts"]
        table = pq.read_table(path)
        table = change(table.replace_schema_metadata({**table.schema.metadata, b"coder_plugin_counts": counts}))
        options_ = {"compression": "none", "use_dictionary": False, **options}
        pq.write_table(table, path, **options_)

    return write


def replaced(name: str, array: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.schema.get_field_index(name), name, array(table))


def header(**fields: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        content = {**json.loads(table.schema.metadata[b"coder_plugin"]), **fields}
        return table.replace_schema_metadata({**table.schema.metadata, b"coder_plugin": json.dumps(content).encode()})

    return change


def with_null(name: str) -> Callable[[pa.Table], pa.Table]:
    def array(table: pa.Table) -> pa.Array:
        return pa.array([None, *table.column(name).to_pylist()[1:]], table.schema.field(name).type)

    return replaced(name, array)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda path: path.write_text("x"), "damaged"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged"),
    "another program's": (rewrite(lambda table: table.replace_schema_metadata({})), "was not written by coder-plugin embed"),
    "another version": (rewrite(header(format="coder-plugin embeddings 2")), "has another format"),
    "deep json": (
        rewrite(lambda t: t.replace_schema_metadata({b"coder_plugin": b"[" * 10_000})), "was not written by coder-plugin embed",
    ),
    "fewer rows": (rewrite(lambda table: table[:5]), "its number of rows is not what it says"),
    "compressed": (rewrite(lambda table: table, compression="zstd"), "it is compressed"),
    "a dictionary": (rewrite(lambda table: table, use_dictionary=True), "it is compressed"),
    "no key": (rewrite(lambda table: table.drop_columns("key")), "it has no column key"),
    "keys of bytes": (
        rewrite(replaced("key", lambda table: table.column("key").cast(pa.binary()))), "its column key is not string",
    ),
    "an unknown type": (
        rewrite(lambda table: table.append_column("day", pa.array([0] * 20, pa.date32()))), "column 'day' has the type",
    ),
    "vectors of text": (rewrite(replaced("image_vector", lambda table: table.column("key"))), "image_vector has no vectors"),
    "a missing vector": (rewrite(with_null("image_vector")), "a vector is missing"),
    "a missing key": (rewrite(with_null("key")), "an image has no key"),
    "a missing id": (rewrite(with_null("image_id")), "an image has no image_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_not_ours_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    embed(tmp_path, units=1)
    change, text = HOSTILE[name]
    change(tmp_path / "00000000.parquet")
    with pytest.raises(CoderError, match=text) as caught:
        table = table_of(tmp_path)
        [*table.vector_batches("images"), *table.batches(["key", "image_id"])]
    if "column" not in text:
        assert "00000000.parquet" in str(caught.value) and "\n" not in str(caught.value)


def test_a_flipped_bit_changes_no_value_in_silence(tmp_path: Path) -> None:
    """Of a page, its checksum finds it; of the footer, it is refused, or what it changes is not a value."""
    embed(tmp_path / "whole", units=1)
    [path] = (tmp_path / "whole").iterdir()
    content, whole, refused = path.read_bytes(), table_of(tmp_path / "whole"), 0
    expected = [batch.to_pylist() for _, batch in whole.batches(whole.names)]
    draw = random.Random(0)
    flipped = tmp_path / "00000000.parquet"
    for _ in range(60):
        changed = bytearray(content)
        bit = draw.randrange(8 * len(content))
        changed[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(changed)
        try:
            table = Table([flipped])
            found = [batch.to_pylist() for _, batch in table.batches(table.names)]
        except CoderError:
            refused += 1
        else:
            assert found == expected or table.names != whole.names, f"bit {bit}"
    assert refused > 30


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x80\x04.", np.array([None]).dumps()])
def test_tokens_that_are_no_arrays(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_npy(content)
