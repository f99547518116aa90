"""Vector stores: the same queries have the same results in each as in a flat FAISS index; no table is half written."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.data.item import stable_hash
from coder_plugin.index.build import build_from_embeddings
from coder_plugin.index.changes import remove
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.embeddings_header import Header
from coder_plugin.index.unit_file import Rows, write_unit
from coder_plugin.integrations.vector_stores import parquet, sources
from coder_plugin.integrations.vector_stores.export import export
from coder_plugin.integrations.vector_stores.sources import open_source, table_of
from tests import fresh
from tests.index.test_mine import plant

COUNT, DIMENSIONS, K = 45, 16, 10
#: Keys and captions that a store, or its query language, could misunderstand.
HOSTILE = ["it's", '"; DROP TABLE images; --', "tab\there", "line\nbreak", "\\x\\N", "nul\0", "猫 \U0001f408", "{a}", "%s", ""]
COLUMNS = {"source": "string", "width": "int64", "quality": "float64", "good": "bool", "view": "int64"}
#: PostgreSQL needs a server: tests write to schemas of their own in the database that this names.
POSTGRES = os.environ.get("CODER_POSTGRES")
NO_SERVER = pytest.mark.skipif(not POSTGRES, reason="CODER_POSTGRES names no database with pgvector")
STORES = ("lancedb", "milvus", "numpy", pytest.param("pgvector", marks=NO_SERVER), "qdrant")


def rows_of(views: int, start: int, stop: int) -> Rows:
    """Images ``start`` to ``stop`` of a made-up set; the vectors are not of length 1."""
    images = np.random.default_rng(0).normal(size=(COUNT, views, DIMENSIONS)).astype(np.float32)
    numbers = range(start, stop)
    captions = [[f"{HOSTILE[number % 10]} {number} {each}" for each in range(number % 4)] for number in numbers]
    texts = np.stack([np.zeros(DIMENSIONS), *(text_vector(number, each) for number in numbers for each in range(number % 4))])
    metadata = {
        "source": [None if number % 4 == 0 else HOSTILE[number % 10] for number in numbers],
        "width": [number if number % 5 else None for number in numbers],
        "quality": [number / 7 for number in numbers],
        "good": [number % 2 == 0 for number in numbers],
        "view": list(numbers),
    }
    return Rows(
        [f"{HOSTILE[number % 10]}/{number}.jpg" for number in numbers],
        captions,
        images[start:stop, 0] if views == 1 else images[start:stop],
        texts[1:],
        [f"/pictures/{number}.jpg" if number % 2 else None for number in numbers],
        [None] * len(numbers),
        columns=metadata,
    )


def text_vector(number: int, each: int) -> np.ndarray:
    return np.random.default_rng([number, each]).normal(size=DIMENSIONS) * 3


def write(folder: Path, views: int = 1, **options: Any) -> Path:
    folder.mkdir()
    header = Header(
        model={"fingerprint": "f" * 64}, plan={}, units=3, dimensions=DIMENSIONS, views=views, columns=COLUMNS, **options
    )
    header.write(folder)
    for unit in range(3):
        write_unit(folder / header.file(unit), header, unit, [rows_of(views, unit * COUNT // 3, (unit + 1) * COUNT // 3)])
    return folder


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of embeddings by the number of an image's vectors."""
    folder = tmp_path_factory.mktemp("embeddings")
    return {views: write(folder / str(views), views) for views in (1, 3)}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_ROWS", 10)


def queries() -> np.ndarray:
    return np.random.default_rng(9).normal(size=(K, DIMENSIONS)).astype(np.float32)


def expected(views: int, kind: str) -> list[list[tuple[int, float]]]:
    """Ids and scores of the best by a flat FAISS index; the best of an image's vectors counts."""
    rows = rows_of(views, 0, COUNT)
    if kind == "images":
        vectors, ids = rows.images.reshape(-1, DIMENSIONS), [stable_hash(key) for key in rows.keys for _ in range(views)]
    else:
        vectors = rows.texts.astype(np.float32)
        ids = [stable_hash(key, n) for key, texts in zip(rows.keys, rows.captions, strict=True) for n in range(len(texts))]
    index = faiss.IndexFlatIP(DIMENSIONS)
    index.add(np.ascontiguousarray(vectors))
    scores, found = index.search(queries(), K * views)
    return [best((ids[row], score) for row, score in zip(*each, strict=True)) for each in zip(found, scores, strict=True)]


def best(pairs: Iterator[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first of each id."""
    seen: dict[int, float] = {}
    for number, score in pairs:
        seen.setdefault(number, float(score))
    return list(seen.items())[:K]


class Lancedb:
    """How a reader of the documentation queries each store, and what a row then has."""

    def __init__(self, where: str) -> None:
        import lancedb

        self.database = lancedb.connect(where)

    def search(self, table: str, views: int) -> list[list[tuple[int, float]]]:
        opened = self.database.open_table(table)
        hits = (opened.search(query).distance_type("dot").limit(K * views).to_list() for query in queries())
        kind = "image_id" if "captions" in opened.schema.names else "id"
        return [best((row[kind], 1 - row["_distance"]) for row in each) for each in hits]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.database.open_table(table).to_arrow().to_pylist()


class Qdrant:
    def __init__(self, where: str) -> None:
        from qdrant_client import QdrantClient

        self.client = QdrantClient(path=where)

    def search(self, table: str, views: int) -> list[list[tuple[int, float]]]:
        vectors = [query.tolist() if views == 1 else [query.tolist()] for query in queries()]
        points = [self.client.query_points(table, query=vector, limit=K).points for vector in vectors]
        return [[(point.id, point.score) for point in each] for each in points]

    def rows(self, table: str) -> list[dict[str, Any]]:
        points = self.client.scroll(table, limit=10_000, with_vectors=True)[0]
        return [{"id": point.id, "vector": point.vector, **point.payload} for point in points]

    def close(self) -> None:
        self.client.close()


class Milvus:
    def __init__(self, where: str) -> None:
        from pymilvus import MilvusClient

        self.client = MilvusClient(where)
        for each in self.client.list_collections():
            self.client.load_collection(each)

    def search(self, table: str, views: int) -> list[list[tuple[int, float]]]:
        hits = self.client.search(table, queries().tolist(), limit=K * views, output_fields=["image_id", "caption"])
        kind = "image_id" if table == "images" else "id"
        return [best((hit["entity"].get(kind, hit["id"]), hit["distance"]) for hit in each) for each in hits]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.client.query(table, limit=10_000, output_fields=["*"])

    def close(self) -> None:
        from milvus_lite.server_manager import server_manager_instance

        self.client.close()
        server_manager_instance.release_all()  # the file stays locked while a process has opened it


class Numpy:
    def __init__(self, where: str) -> None:
        self.folder = Path(where)

    def search(self, table: str, views: int) -> list[list[tuple[int, float]]]:
        vectors = np.load(self.folder / f"{table}.npy", mmap_mode="r").reshape(-1, views, DIMENSIONS)
        scores = np.einsum("qd,nvd->qnv", queries(), vectors).max(2)
        ids = [row["id"] for row in self.rows(table)]
        return [[(ids[row], float(each[row])) for row in np.argsort(-each)[:K]] for each in scores]

    def rows(self, table: str) -> list[dict[str, Any]]:
        vectors = np.load(self.folder / f"{table}.npy")
        lines = (self.folder / f"{table}.jsonl").read_text(encoding="utf-8").splitlines()
        return [{**json.loads(line), "vector": vector.tolist()} for line, vector in zip(lines, vectors, strict=True)]


class Pgvector:
    def __init__(self, where: str) -> None:
        import psycopg

        self.connection = psycopg.connect(where, row_factory=psycopg.rows.dict_row)

    def search(self, table: str, views: int) -> list[list[tuple[int, float]]]:
        kind = "image_id" if table == "images" else "id"
        command = f"SELECT {kind} AS id, -(vector <#> %s::vector) AS score FROM {table} ORDER BY vector <#> %s::vector LIMIT %s"
        texts = (str(query.tolist()) for query in queries())
        hits = (self.connection.execute(command, [text, text, K * views]).fetchall() for text in texts)  # type: ignore[call-overload]
        return [best((row["id"], row["score"]) for row in each) for each in hits]

    def rows(self, table: str) -> list[dict[str, Any]]:
        rows = self.connection.execute(f"SELECT * FROM {table}").fetchall()  # type: ignore[call-overload]
        return [{**row, "vector": json.loads(row["vector"])} for row in rows]

    def close(self) -> None:
        self.connection.close()


CLIENTS = {"lancedb": Lancedb, "qdrant": Qdrant, "milvus": Milvus, "numpy": Numpy, "pgvector": Pgvector}


def client(store: str, where: str) -> Any:
    return CLIENTS[store](where)


def close(opened: Any) -> None:
    getattr(opened, "close", lambda: None)()


def place(store: str, folder: Path) -> str:
    if store == "pgvector":
        import psycopg

        schema = f"t{stable_hash(str(folder))}"
        with psycopg.connect(POSTGRES) as connection:
            connection.execute(f"CREATE EXTENSION IF NOT EXISTS vector; CREATE SCHEMA IF NOT EXISTS {schema}")  # type: ignore[arg-type]
        return f"{POSTGRES}&options=-csearch_path%3D{schema},public"
    return str(folder / ("store.db" if store == "milvus" else "store"))


def check_rows(found: list[dict[str, Any]], kind: str, store: str) -> None:
    """Every row has what was exported. PostgreSQL's texts have no null characters."""
    rows = rows_of(1, 0, COUNT)
    expected = {}
    texts = iter(rows.texts)
    for number, key in enumerate(rows.keys):
        metadata = {f"{name}_" if name == "view" else name: values[number] for name, values in rows.columns.items()}
        common = {"key": key, "image_id": stable_hash(key), "path": rows.paths[number], "member": None, **metadata}
        if kind == "images":
            expected[stable_hash(key)] = {**common, "captions": rows.captions[number], "vector": rows.images[number]}
        for each, caption in enumerate(rows.captions[number] if kind == "captions" else ()):
            expected[stable_hash(key, each)] = {**common, "caption": caption, "vector": next(texts)}
    assert {row["id"] for row in found} == {*expected} and len(found) == len(expected)
    for row in found:
        wanted = expected[row["id"]]
        np.testing.assert_allclose(row.pop("vector"), wanted.pop("vector"), rtol=1e-6)
        if store == "pgvector":
            wanted = json.loads(json.dumps(wanted).replace("\\u0000", "\\ufffd"))
        assert {name: value for name, value in row.items() if name != "id"} == wanted


@pytest.mark.parametrize("store", STORES)
def test_queries_give_what_a_flat_index_gives(store: str, embeddings: dict[int, Path], tmp_path: Path) -> None:
    where = place(store, tmp_path)
    assert main(["export", str(embeddings[1]), "--to", store, "--output", where, "--what", "both"]) == 0
    opened = client(store, where)
    for kind in ("images", "captions"):
        for found, wanted in zip(opened.search(kind, 1), expected(1, kind), strict=True):
            assert [number for number, _ in found] == [number for number, _ in wanted]
            np.testing.assert_allclose([score for _, score in found], [score for _, score in wanted], atol=1e-5)
        check_rows(opened.rows(kind), kind, store)
    close(opened)


@pytest.mark.parametrize("store", STORES)
def test_the_best_of_several_vectors_counts(store: str, embeddings: dict[int, Path], tmp_path: Path) -> None:
    [written] = export(embeddings[3], store, place(store, tmp_path)).tables
    assert (written.items, written.rows) == (COUNT, COUNT if store in ("numpy", "qdrant") else 3 * COUNT)
    opened = client(store, place(store, tmp_path))
    assert len({row["id"] for row in opened.rows("images")}) == written.rows
    for found, wanted in zip(opened.search("images", 3), expected(3, "images"), strict=True):
        assert [number for number, _ in found] == [number for number, _ in wanted]
        np.testing.assert_allclose([score for _, score in found], [score for _, score in wanted], atol=1e-5)
    close(opened)


@pytest.mark.parametrize("store", STORES)
def test_a_table_is_replaced_only_on_request(store: str, embeddings: dict[int, Path], tmp_path: Path, capsys) -> None:
    command = ["export", str(embeddings[1]), "--to", store, "--output", place(store, tmp_path)]
    assert main([*command, "--what", "captions", "--table", "mine"]) == 0
    assert main([*command, "--table", "mine"]) == 2
    assert "the table mine exists: name another --table, or replace it with --overwrite" in capsys.readouterr().err
    assert main([*command, "--table", "other"]) == 0
    for _ in range(2):
        assert main([*command, "--table", "mine", "--overwrite"]) == 0
        assert capsys.readouterr().out.endswith(f"{store}: mine: {COUNT} rows of {COUNT} images\n")
    opened = client(store, place(store, tmp_path))
    check_rows(opened.rows("mine"), "images", store)
    check_rows(opened.rows("other"), "images", store)
    close(opened)


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError])
def test_a_table_that_cannot_be_read_is_not_replaced(
    error: type[Exception], embeddings: dict[int, Path], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lancedb

    def broken(*_: Any, **__: Any) -> None:
        raise error("the network was not found")

    where = str(tmp_path / "store")
    lancedb.connect(where).create_table("images", data=[{"mine": 1}])
    with monkeypatch.context() as patch:
        patch.setattr(lancedb.db.LanceDBConnection, "open_table", broken)
        assert main(["export", str(embeddings[1]), "--to", "lancedb", "--output", where]) == 2
    assert "lancedb cannot be asked for the table images" in capsys.readouterr().err
    assert client("lancedb", where).rows("images") == [{"mine": 1}]


def test_the_collection_of_an_alias_of_somebody_is_kept(embeddings: dict[int, Path], tmp_path: Path) -> None:
    from qdrant_client import models

    opened = client("qdrant", str(tmp_path / "store")).client
    opened.create_collection("theirs", vectors_config=models.VectorParams(size=2, distance=models.Distance.DOT))
    alias = models.CreateAlias(collection_name="theirs", alias_name="images")
    opened.update_collection_aliases(change_aliases_operations=[models.CreateAliasOperation(create_alias=alias)])
    opened.close()
    for _ in range(2):
        export(embeddings[1], "qdrant", str(tmp_path / "store"), overwrite=True)
    opened = client("qdrant", str(tmp_path / "store"))
    check_rows(opened.rows("images"), "images", "qdrant")
    assert len(opened.client.get_collections().collections) == 2 and opened.client.collection_exists("theirs")
    close(opened)


STOPPED = """
import os, signal, sys
from coder_plugin.integrations.vector_stores import export, sources
sources._ROWS = 10
folder, to, where, overwrite, stop = sys.argv[1:]
real, seen = sources.EmbeddingsSource.rows, []
def rows(*arguments, **options):
    for batch in real(*arguments, **options):
        seen.append(batch)
        if len(seen) == int(stop):
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
sources.EmbeddingsSource.rows = rows
export.export(folder, to, where, overwrite=bool(overwrite))
"""


@pytest.mark.parametrize("store", [pytest.param("milvus", marks=pytest.mark.slow), *(s for s in STORES if s != "milvus")])
def test_a_killed_export_leaves_the_old_table_or_none(store: str, embeddings: dict[int, Path], tmp_path: Path) -> None:
    where = place(store, tmp_path)

    def run(overwrite: str, stop: int) -> None:
        done = fresh.run(["-c", STOPPED, str(embeddings[1]), store, where, overwrite, str(stop)])
        assert done.returncode == (-signal.SIGKILL if stop else 0), done.stderr

    def write(overwrite: str) -> None:  # Milvus Lite locks a file as long as the process lives
        run(overwrite, 0) if store == "milvus" else export(embeddings[1], store, where, overwrite=bool(overwrite))

    run("", 4)
    opened = client(store, where)
    with pytest.raises(Exception):  # noqa: B017 each client has its own
        opened.rows("images")
    close(opened)
    write("")  # the same command, without --overwrite
    run("overwrite", 4)
    opened = client(store, where)
    check_rows(opened.rows("images"), "images", store)
    close(opened)
    write("overwrite")
    opened = client(store, where)
    check_rows(opened.rows("images"), "images", store)
    close(opened)


def write_column(folder: Path, *names: str) -> Path:
    """Embeddings with metadata columns of these names."""
    folder.mkdir()
    columns = {name: [f"{name} {number}" for number in range(COUNT)] for name in names}
    header = Header(
        model={"fingerprint": "f" * 64}, plan={}, units=1, dimensions=DIMENSIONS, columns=dict.fromkeys(names, "string")
    )
    header.write(folder)
    write_unit(folder / header.file(0), header, 0, [rows_of(1, 0, COUNT)._replace(columns=columns)])
    return folder


@pytest.mark.parametrize("name", sorted(sources._TAKEN))
def test_a_column_whose_name_is_taken_gets_an_underscore(name: str, tmp_path: Path) -> None:
    export(write_column(tmp_path / "embeddings", name), "numpy", str(tmp_path / "arrays"), what="both")
    opened, keys = client("numpy", str(tmp_path / "arrays")), rows_of(1, 0, COUNT).keys
    for row in (*opened.rows("images"), *opened.rows("captions")):
        assert row[f"{name}_"] == f"{name} {keys.index(row['key'])}"
        assert isinstance(row["id"], int) and isinstance(row["vector"], list) and "view" not in row
    assert all("caption" not in row for row in opened.rows("images"))
    captions = [each for texts in rows_of(1, 0, COUNT).captions for each in texts]
    assert [row["caption"] for row in opened.rows("captions")] == captions


def test_two_columns_of_one_name_are_refused(tmp_path: Path, capsys) -> None:
    folder = write_column(tmp_path / "embeddings", "view", "view_")
    assert main(["export", str(folder), "--to", "numpy", "--output", str(tmp_path / "arrays")]) == 2
    assert "the columns view and view_ would both be view_ in the table" in capsys.readouterr().err


@pytest.mark.parametrize("store", STORES)
def test_a_damaged_source_is_one_clear_error(store: str, embeddings: dict[int, Path], tmp_path: Path, capsys) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(embeddings[1], folder)
    file = folder / "00000001.parquet"
    content = bytearray(file.read_bytes())
    content[content.index(rows_of(1, 0, COUNT).images[COUNT // 2].tobytes())] ^= 1
    file.write_bytes(content)
    assert main(["export", str(folder), "--to", store, "--output", place(store, tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "00000001.parquet is damaged" in error and "Traceback" not in error


def test_a_store_that_cannot_be_opened_is_one_line(embeddings: dict[int, Path], tmp_path: Path, capsys) -> None:
    file = tmp_path / "file"
    file.touch()
    for store, where, expected in (
        ("lancedb", file, "is a file: name a folder"),
        ("qdrant", file, "is a file: name a folder"),
        ("milvus", file, "a file of Milvus Lite ends in .db"),
        ("milvus", file / "m.db", "milvus cannot be opened"),
        ("pgvector", "mine", "give a connection string, such as postgresql://USER@HOST/DATABASE"),
        ("numpy", file, "is a file: name a folder"),
        ("parquet", file, "a folder of Parquet files already: copy it"),
        ("pgvector", "postgresql://me:secret@localhost:1/x", "postgresql://localhost:1 cannot be opened: OperationalError"),
        ("qdrant", "http://localhost:1", "qdrant at http://localhost:1 cannot be asked for the table images"),
    ):
        assert main(["export", str(embeddings[1]), "--to", store, "--output", str(where)]) == 2
        error = capsys.readouterr().err
        assert expected in error.replace("\n", "") and "secret" not in error and error.count("\n") == 1, error


def test_a_folder_that_cannot_be_made_is_one_line(index: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["export", str(index), "--to", "parquet", "--output", str(tmp_path / "file" / "e")]) == 2
    error = capsys.readouterr().err
    assert "file/e cannot be written: NotADirectoryError" in error and error.count("\n") == 1


def test_other_readers_read_the_folder_of_embeddings(embeddings: dict[int, Path], tmp_path: Path) -> None:
    """The Parquet files are read as they are by datasets, DuckDB and LanceDB, with the same values."""
    import datasets
    import duckdb
    import lancedb
    import pyarrow.dataset

    files, rows = str(embeddings[1] / "*.parquet"), rows_of(1, 0, COUNT)
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["key"][:] == list(rows.keys) and loaded["captions"][:] == list(rows.captions)
    assert loaded["width"][:] == rows.columns["width"] and loaded["thumbnail"][:] == [None] * COUNT
    np.testing.assert_array_equal(loaded.with_format("numpy")["image_vector"][:], rows.images)
    assert [len(each) for each in loaded["text_vectors"][:]] == [len(each) for each in rows.captions]

    query = queries()[0]
    wanted = expected(1, "images")[0]
    command = f"""SELECT image_id, list_dot_product(image_vector::FLOAT[], ?::FLOAT[]) AS score FROM read_parquet('{files}')
        ORDER BY score DESC LIMIT {K}"""
    found = duckdb.execute(command, [query.tolist()]).fetchall()
    assert [number for number, _ in found] == [number for number, _ in wanted]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in wanted], atol=1e-5)
    by_source = f"SELECT count(*) FROM read_parquet('{files}') WHERE source = 'it''s' AND NOT good"
    assert duckdb.execute(by_source).fetchone() == (sum(
        source == "it's" and not good for source, good in zip(rows.columns["source"], rows.columns["good"], strict=True)
    ),)  # fmt: skip

    parquet = pyarrow.dataset.dataset(embeddings[1], format="parquet", exclude_invalid_files=True)
    table = lancedb.connect(tmp_path / "lancedb").create_table("images", parquet.to_table())
    hits = table.search(query, vector_column_name="image_vector").distance_type("dot").limit(K).to_list()
    assert [hit["image_id"] for hit in hits] == [number for number, _ in wanted]
    np.testing.assert_allclose([1 - hit["_distance"] for hit in hits], [score for _, score in wanted], atol=1e-5)
    assert table.count_rows() == COUNT


@pytest.fixture
def index(embeddings: dict[int, Path], tmp_path: Path) -> Path:
    """An index of the same images, in three segments."""
    build_from_embeddings(tmp_path / "index", embeddings[1], segment_size=COUNT // 3)
    return tmp_path / "index"


def test_an_index_gives_the_same_tables(index: Path, tmp_path: Path) -> None:
    export(index, "numpy", str(tmp_path / "arrays"), what="both")
    opened = client("numpy", str(tmp_path / "arrays"))
    for kind in ("images", "captions"):
        check_rows(opened.rows(kind), kind, "numpy")


def test_vectors_in_half_precision_become_float32(tmp_path: Path) -> None:
    export(write(tmp_path / "half", dtype="float16"), "numpy", str(tmp_path / "arrays"))
    found = np.load(tmp_path / "arrays" / "images.npy")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rows_of(1, 0, COUNT).images.astype(np.float16))


def test_captions_in_any_order_keep_their_vectors_and_images(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    owners, vectors = draw.permutation(40) // 2, draw.normal(size=(40, 8))
    texts = [f"text {row} of {owner}.jpg" for row, owner in enumerate(owners)]
    plant(tmp_path / "index", draw.normal(size=(20, 8)), vectors, owners.tolist(), texts=texts)
    export(tmp_path / "index", "numpy", str(tmp_path / "arrays"), what="both", name="mine")
    rows = client("numpy", str(tmp_path / "arrays")).rows("mine_captions")
    assert {row["caption"] for row in rows} == {*texts} and all(row["caption"].endswith(f" {row['key']}") for row in rows)
    wanted = vectors[[texts.index(row["caption"]) for row in rows]]
    np.testing.assert_allclose([row["vector"] for row in rows], wanted, rtol=1e-6)


def test_removed_images_are_not_exported(index: Path, tmp_path: Path) -> None:
    remove(index, [rows_of(1, 0, COUNT).keys[number] for number in (0, 4, 16, 20, 44)])
    exported = export(index, "numpy", str(tmp_path / "arrays"), what="both")
    opened, rows = client("numpy", str(tmp_path / "arrays")), rows_of(1, 0, COUNT)
    kept = [number for number in range(COUNT) if number not in (0, 4, 16, 20, 44)]
    assert [row["key"] for row in opened.rows("images")] == [rows.keys[number] for number in kept]
    captions = [text for number in kept for text in rows.captions[number]]
    assert [row["caption"] for row in opened.rows("captions")] == captions
    assert [(each.items, each.rows) for each in exported.tables] == [(40, 40), (len(captions), len(captions))]
    assert [table_of(open_source(index), kind, kind).count for kind in ("images", "captions")] == [40, len(captions)]


@pytest.mark.parametrize("views", [1, 3])
def test_an_index_becomes_a_folder_of_embeddings(
    views: int, embeddings: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_BATCHES", 2)
    build_from_embeddings(tmp_path / "index", embeddings[views], segment_size=COUNT // 3)
    command = ["export", str(tmp_path / "index"), "--to", "parquet", "--output", str(tmp_path / "folder")]
    assert main([*command, "--what", "both"]) == 0
    found, wanted = Embeddings(tmp_path / "folder"), Embeddings(embeddings[views])
    assert found.units > 1 and found.model == wanted.model and found.columns == wanted.columns

    def rows(opened: Embeddings) -> list[dict[str, Any]]:
        return [row for unit in range(opened.units) for row in opened.read(unit).to_pylist()]

    assert rows(found) == rows(wanted)
    assert main(command) == 2
    assert "exists: name another --output, or replace it with --overwrite" in capsys.readouterr().err
    kept = tmp_path / "folder" / "index"
    kept.mkdir()
    assert main([*command, "--overwrite"]) == 2
    assert "holds also index, so it is not replaced" in capsys.readouterr().err and kept.is_dir()
    kept.rmdir()
    (tmp_path / "folder" / ".00000000.lock").touch()
    (tmp_path / "folder" / "00000000.safetensors").touch()
    assert main([*command, "--overwrite"]) == 0
    assert Embeddings(tmp_path / "folder").header.what == "images"
    assert main(["export", str(tmp_path / "index"), "--to", "parquet", "--output", str(tmp_path), "--overwrite"]) == 2
    assert "holds something else than embeddings" in capsys.readouterr().err and (tmp_path / "index").exists()


def test_compressed_vectors_are_said_to_be_so(embeddings: dict[int, Path], tmp_path: Path, capsys) -> None:
    build_from_embeddings(tmp_path / "pq", embeddings[1], what="images", factory="PQ4x2")
    assert main(["export", str(tmp_path / "pq"), "--to", "numpy", "--output", str(tmp_path / "arrays")]) == 0
    assert "note: an index PQ4x2 stores compressed vectors: scores are approximate" in capsys.readouterr().err
    command = ["export", str(tmp_path / "pq"), "--to", "numpy", "--output", str(tmp_path / "arrays"), "--what", "captions"]
    assert main(command) == 2
    assert "has no vectors of captions, only of images" in capsys.readouterr().err


def test_postgresql_is_sent_one_transaction_with_quoted_names(
    embeddings: dict[int, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What psycopg is called with; the other tests need a server."""
    import psycopg

    sent: list[str] = []
    written: list[list[Any]] = []

    class Recorder:
        """A connection, a transaction, a cursor and a COPY in one."""

        def execute(self, command: Any, values: Any = None) -> Recorder:
            sent.append(command if isinstance(command, str) else command.as_string(None))
            return self

        def transaction(self) -> Recorder:
            sent.append("BEGIN")
            return self

        def copy(self, command: Any) -> Recorder:
            return self.execute(command)

        def cursor(self) -> Recorder:
            return self

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *_: object) -> None:
            sent.append("END")

        def fetchone(self) -> list[bool]:
            return [False]

        def write_row(self, row: list[Any]) -> None:
            written.append(row)

        def close(self) -> None:
            sent.append("close")

    monkeypatch.setattr(psycopg, "connect", lambda where: Recorder())
    address = "postgresql://me:secret@host/mine"
    assert main(["export", str(embeddings[1]), "--to", "pgvector", "--output", address, "--table", "Mine"]) == 0
    printed = capsys.readouterr()
    assert "secret" not in printed.out + printed.err
    columns = '"id", "key", "image_id", "captions", "path", "member", "source", "width", "quality", "good", "view_", "vector"'
    created = next(each for each in sent if each.startswith("CREATE TABLE"))
    assert created.startswith('CREATE TABLE "Mine" ("id" bigint, "key" text, "image_id" bigint, "captions" text[], ')
    assert created.endswith('"good" boolean, "view_" bigint, "vector" vector(16) NOT NULL)')
    assert sent[2:6] == ["END", "BEGIN", "CREATE EXTENSION IF NOT EXISTS vector", 'DROP TABLE IF EXISTS "Mine"']
    assert sent[7] == f'COPY "Mine" ({columns}) FROM STDIN'
    assert sent[-3:] == ['CREATE INDEX ON "Mine" (id)', "END", "close"] and sent.count("BEGIN") == 2
    rows = rows_of(1, 0, COUNT)
    assert [row[1] for row in written] == [key.replace("\0", "\ufffd") for key in rows.keys]
    np.testing.assert_allclose([json.loads(row[-1]) for row in written], rows.images, rtol=1e-6)
