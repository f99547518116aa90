"""An index repairs what is derived, and refuses notes of strangers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coder_plugin.errors import CoderError
from coder_plugin.search.build import add, build_index, remove
from coder_plugin.search.index import NOTE, Index
from coder_plugin.search.parquet import read_header, write_tables
from tests.search.made import embed


def keys_of(folder: Path) -> list[str]:
    index = Index(folder)
    return sorted(image.key for image in index.records.images(range(index.size("images"))))



def test_what_is_derived_is_built_again_from_the_parquet_files(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    folder = tmp_path / "index"
    build_index(folder, tmp_path / "e")
    remove(folder, ["a-0-1"])
    keys = keys_of(folder)
    next(folder.glob("images-*.faiss")).unlink()
    with pytest.raises(CoderError, match="is missing: build the index again"):
        Index(folder)
    build_index(folder, tmp_path / "e")
    assert keys_of(folder) == keys
    for source in (folder, folder / "embeddings"):  # also where the files are no longer those of one embed
        build_index(tmp_path / f"of-{source.name}", source)
        assert keys_of(tmp_path / f"of-{source.name}") == keys


def test_links_to_embeddings_are_followed(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    (tmp_path / "links").mkdir()
    for path in (tmp_path / "e").glob("*.parquet"):
        os.symlink(os.path.relpath(path, tmp_path / "links"), tmp_path / "links" / path.name)
    build_index(tmp_path / "index", tmp_path / "links")
    assert len(keys_of(tmp_path / "index")) == 60


def test_fast_scan_lists_open(tmp_path: Path) -> None:
    embed(tmp_path / "e", units=1, rows=400)
    build_index(tmp_path / "index", tmp_path / "e", factory="IVF2,PQ4x4fs", what="images")
    assert Index(tmp_path / "index").search(np.ones((1, 8), np.float32), 3)[1].shape == (1, 3)


def test_a_model_that_a_note_names_is_not_fetched(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    folder = tmp_path / "index"
    build_index(folder, tmp_path / "e")
    note = json.loads((folder / NOTE).read_text())
    note["model"] = {**note["model"], "spec": "hf-hub:somebody/model", "export": "best", "options": {}}
    (folder / NOTE).write_text(json.dumps(note))
    with pytest.raises(CoderError, match="would fetch 'hf-hub:somebody/model'"):
        add(folder, {"data": "scenes"})


@pytest.mark.parametrize("factory", ["Flat", "HNSW16"])
def test_vectors_that_are_not_those_of_the_captions_are_refused(factory: str, tmp_path: Path) -> None:
    embed(tmp_path / "e")
    path = tmp_path / "e" / "00000000.parquet"
    table, header = pq.read_table(path), read_header(path)
    vectors = [each[:1] for each in table.column("text_vectors").to_pylist()]
    number = table.schema.get_field_index("text_vectors")
    fewer = table.set_column(number, table.schema.field(number), pa.array(vectors, table.schema.field(number).type))
    write_tables(path, table.schema, header, [fewer])
    with pytest.raises(CoderError, match=r"has \d+ vectors of captions, not 57: embed the data again"):
        build_index(tmp_path / "index", tmp_path / "e", factory=factory)


def test_results_of_filters_are_not_kept_without_bound(tmp_path: Path) -> None:
    embed(tmp_path / "e")
    build_index(tmp_path / "index", tmp_path / "e")
    records = Index(tmp_path / "index").records
    for number in range(20):
        assert len(records.where(f"width = {-number - 1}")) == 0
    assert records._filtered.cache_info().currsize == 8
