"""The snippets of docs/embed.md for LanceDB and Qdrant's local mode: the same ten results as a flat index."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest

from coder_plugin.search.build import build_index
from coder_plugin.search.index import Index
from tests.documentation import ROOT, blocks
from tests.search.made import embed


@pytest.mark.parametrize("library", [pytest.param("lancedb", marks=pytest.mark.slow), "qdrant_client"])
def test_a_store_finds_what_the_index_does(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    embed(tmp_path / "e", units=2, rows=30)  # Qdrant commits each point
    build_index(tmp_path / "index", tmp_path / "e")
    index = Index(tmp_path / "index")
    texts = [block.text for block in blocks(ROOT / "docs" / "embed.md", "python")]
    [snippet] = [text for text in texts if f"import {library}" in text or f"from {library}" in text]
    fill, ask = re.split(r"^(?=found = |results = )", snippet, maxsplit=1, flags=re.M)
    queries = np.random.default_rng(5).standard_normal((10, 8), dtype=np.float32)
    data = pyarrow.dataset.dataset(str(tmp_path / "index" / "embeddings"))
    given = {"vector": queries[0].tolist(), "data": data, "columns": ["image_id", "key", "path", "image_vector"]}
    exec(fill, given)
    for query in queries:
        exec(ask, given | {"vector": query.tolist()}, results := {})  # type: ignore[var-annotated]
        scores, rows = index.search(query[None], 10)
        assert [key for key, _ in results["results"]] == [each.key for each in index.records.images(rows[0].tolist())]
        np.testing.assert_allclose([score for _, score in results["results"]], scores[0], atol=1e-5)
