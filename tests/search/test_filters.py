"""Searching among some images only, and where their files are: against brute force, re-ranked, in JSON, table and page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError
from coder_plugin.index.build import build_from_embeddings
from coder_plugin.index.open import open_searcher
from coder_plugin.index.search import Searcher
from coder_plugin.pretrained.export import export_model

COUNT = 30


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty scenes in three segments, with two columns and tokens; in every third the column source is "coco"."""
    folder = tmp_path_factory.mktemp("filters")
    scenes = open_scenes("val")
    (folder / "my pictures").mkdir()
    with open(folder / "all.csv", "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title", "source", "width"])
        for number in range(COUNT):
            item, source = scenes[number], ("coco", "it's", "")[number % 3]
            item.load().save(folder / "my pictures" / f"#{number:03d}.png")
            table.writerows([[f"my pictures/#{number:03d}.png", caption, source, 10 * number] for caption in item.captions[:2]])
    torch.manual_seed(2)
    export_model(coder_plugin.create_model("coder-tiny", loss="clip"), folder / "export")
    command = ["embed", str(folder / "export"), "--data", str(folder / "all.csv"), "--output", str(folder / "embeddings")]
    flags = ["--columns", "source", "width:int64", "--reranker", "maxsim", "--workers", "0", "--image-root", str(folder)]
    assert main([*command, *flags]) == 0
    build_from_embeddings(folder / "index", folder / "embeddings", segment_size=12)
    return folder / "index"


@pytest.fixture(scope="module")
def searcher(index: Path) -> Searcher:
    return open_searcher(index)


def run(capsys: pytest.CaptureFixture, *flags: str) -> str:
    capsys.readouterr()
    assert main(["search", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "where, rows",
    [
        ("source = 'coco'", range(0, COUNT, 3)),
        ("source = 'it''s' AND width < 100", (1, 4, 7)),
        ("key LIKE '%/#02%' OR width = 0", (0, *range(20, 30))),
        ("width > 9999", ()),
    ],
)
def test_only_these_are_found(searcher: Searcher, where: str, rows: tuple[int, ...]) -> None:
    allowed = list(rows)
    [query] = searcher.text(["a red circle and a square"])
    images = torch.cat([torch.from_numpy(searcher.index.vector(row)) for row in range(COUNT)])
    best = sorted(allowed, key=lambda row: -float(images[row] @ query.vectors[0]))
    for k in (4, 99):
        hits = searcher.search(query, k, where=where, rerank=0)
        assert [hit.row for hit in hits] == best[:k] and all(hit.fused is None for hit in hits)
    among_captions = searcher.search(searcher.image([open_scenes("val")[5].load()])[0], 99, where=where, rerank=0)
    assert sorted(hit.row for hit in among_captions) == [caption for row in allowed for caption in (2 * row, 2 * row + 1)]


def test_the_shortlist_is_filtered_too(searcher: Searcher) -> None:
    """Five of those that are allowed are re-ranked, also where none of them is among the five best of all."""
    [query] = searcher.text(["a red circle and a square"])
    every = [hit.row for hit in searcher.search(query, COUNT, rerank=0)]
    where = f"row_number IN ({every[0]})"
    with pytest.raises(CoderError, match="'row_number IN .* cannot be used as a filter"):
        searcher.search(query, where=where)
    last = sorted(every[10:])
    where = "width IN (" + ", ".join(str(10 * row) for row in last) + ")"
    hits = searcher.search(query, 20, where=where, rerank=5)
    assert {hit.row for hit in hits[:5]} == set(every[10:15]) and [hit.row for hit in hits[5:]] == every[15:]
    fused = [hit.fused for hit in hits[:5]]
    assert fused == sorted(fused, reverse=True) and hits[5].fused is None
    whole = {hit.row: hit.fused for hit in searcher.search(query, COUNT, rerank="all")}
    assert fused == pytest.approx([whole[hit.row] for hit in hits[:5]], abs=1e-5)
    assert all(hit.fused is not None for hit in searcher.search(query, 99, where=where, rerank="all"))


def test_queries_share_a_filter(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    records = searcher.index.records
    monkeypatch.setattr(type(records), "where", lambda self, *given, kind: asked.append((given, kind)) or np.arange(2))
    monkeypatch.setattr(searcher.index, "search", lambda vectors, k, *, kind, rows: pytest.fail("k") if k > 2 else NOTHING)
    for query in searcher.text(["one", "two", "three"]):
        searcher.search(query, 2, where="width > 1", rerank="all")
    searcher.search(query, 2, where="width > 1", among="captions", rerank=0)
    searcher.search(query, 2, where="width > 2", rerank=0)
    searcher.search(query, 2, where="width > 1", rerank=0)
    assert asked == [(("width > 1",), "images"), (("width > 1",), "captions"), (("width > 2",), "images")]


NOTHING = (torch.zeros(1, 0).numpy(), torch.zeros(1, 0, dtype=torch.int64).numpy())


def test_results_name_their_files(index: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    flags = ["--text", "two <squares>", "-k", "3", "--where", "source = 'coco'", "--html", str(page)]
    [found] = json.loads(run(capsys, str(index), *flags, "--json"))
    pictures = sorted((index.parent / "my pictures").glob("*.png"))
    for row in found["results"]:
        number = row["metadata"]["width"] // 10
        assert row["metadata"] == {"source": "coco", "width": 10 * number} and number % 3 == 0
        assert row["path"] == str(pictures[number]) and row["key"] == f"my pictures/#{number:03d}.png"
        assert {*row} == {"rank", "score", "fused", "key", "image_id", "path", "metadata", "captions"}
    lines = run(capsys, str(index), *flags).splitlines()
    assert lines[0].split() == ["score", "fused", "image", "caption"] and len(lines) == 4
    assert all(row["path"] in line for row, line in zip(found["results"], lines[1:], strict=True))
    links = re.findall(r'<a href="file://([^"]*)" rel="noreferrer">', page.read_text())
    assert [unquote(link) for link in links] == [row["path"] for row in found["results"] for _ in range(2)]
    assert "(shortlist " in page.read_text() and "%23" in links[0] and " " not in links[0]


def test_nothing_is_found(index: Path, tmp_path: Path, capsys) -> None:
    flags = ["--text", "x", "--where", "source = 'none'"]
    assert json.loads(run(capsys, str(index), *flags, "--json")) == [{"query": "x", "results": []}]
    page = run(capsys, str(index), *flags, "--html", str(tmp_path / "page.html"))
    assert page == "no results: --where is true for no image\n"


@pytest.mark.parametrize(
    "where, text",
    [
        ("", "a filter must be an expression"),
        ("sauce = 'coco'", "no such column: sauce; the columns are key, path, member, source, width"),
        ("source = coco'", "cannot be used as a filter"),
        ("load_extension('x')", "cannot be used as a filter"),
        ("1) UNION SELECT 1 --", "cannot be used as a filter"),
    ],
)
def test_slips(index: Path, capsys, where: str, text: str) -> None:
    assert main(["search", str(index), "--text", "x", "--where", where]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
