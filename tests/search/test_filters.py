"""Searching among some images only, and where their files are: against brute force, re-ranked, in JSON, table and page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import export_model
from coder_plugin.search import records
from coder_plugin.search.build import build_index
from coder_plugin.search.searcher import Searcher, open_searcher

COUNT = 30


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty scenes in three files, with two columns and tokens; in every third the column source is "coco"."""
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
    flags += ["--rows-per-file", "12"]
    assert main([*command, *flags]) == 0
    build_index(folder / "index", folder / "embeddings")
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
    real = records.Records._where
    monkeypatch.setattr(records.Records, "_where", lambda self, text: asked.append(text) or real(self, text))
    for query in searcher.text(["one", "two", "three"]):
        searcher.search(query, 2, where="width > 11", rerank="all")
    searcher.search(query, 2, where="width > 11", among="captions", rerank=0)
    searcher.search(query, 2, where="width > 12", rerank=0)
    searcher.search(query, 2, where="width > 11", rerank=0)
    assert asked == ["width > 11", "width > 12"]


def test_results_name_their_files(index: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    flags = ["--text", "two <squares>", "-k", "3", "--where", "source = 'coco'", "--html", str(page)]
    [found] = json.loads(run(capsys, str(index), *flags, "--json"))
    pictures = sorted((index.parent / "my pictures").glob("*.png"))
    for row in found["results"]:
        number = row["metadata"]["width"] // 10
        assert row["metadata"] == {"source": "coco", "width": 10 * number} and number % 3 == 0
        assert row["path"] == str(pictures[number]) and row["key"] == f"my pictures/#{number:03d}.png"
        assert {*row} == {"rank", "score", "fused", "key", "image_id", "path", "metadata", "caption", "captions"}
        assert row["caption"] in row["captions"]
    lines = run(capsys, str(index), *flags).splitlines()
    assert lines[0].split() == ["score", "fused", "image", "caption"] and len(lines) == 4
    assert all(row["path"] in line for row, line in zip(found["results"], lines[1:], strict=True))
    links = re.findall(r'<a href="file://([^"]*)" rel="noreferrer">', page.read_text())
    assert [unquote(link) for link in links] == [row["path"] for row in found["results"] for _ in range(2)]
    assert "(shortlist " in page.read_text() and "%23" in links[0] and " " not in links[0]


def test_nothing_is_found(index: Path, capsys) -> None:
    flags = ["--text", "x", "--where", "source = 'none'"]
    assert json.loads(run(capsys, str(index), *flags, "--json")) == [{"query": "x", "results": []}]


def test_an_image_is_shown_with_the_caption_that_matches_best(searcher: Searcher) -> None:
    captions = open_scenes("val")[4].captions[:2]
    for caption in captions:
        [query] = searcher.text([caption])
        [hit] = searcher.search(query, 1, where="width = 40")
        assert hit.caption == caption
    [hit] = searcher.search(query, 1, where="width = 40", among="captions", rerank=0)
    assert hit.caption == hit.text == captions[1]


@pytest.mark.parametrize(
    "where, text",
    [
        ("", "a filter must be an expression"),
        ("x" * 10_001, "a filter must be an expression"),
        ("sauce = 'coco'", '"sauce" not found .* it is an SQL expression over key, path, member, source, width'),
        ("source = coco'", "unterminated|Parser Error"),
        ("true; DROP TABLE x", "Parser Error"),
        ("1) UNION SELECT 1 --", "Parser Error"),
        ("source", "Could not convert string 'coco' to BOOL"),
        ("key IN (SELECT content FROM read_text('/etc/passwd'))", "file system operations are disabled by configuration"),
        ("key IN (SELECT column0 FROM '/etc/passwd')", "disabled by configuration|does not exist"),
        ("key = (SELECT max(key) FROM images)", "Table with name images does not exist"),
        ("getenv('HOME') = key", "getenv does not exist"),
        ("width > (SELECT value FROM duckdb_settings() WHERE name = 'x' LIMIT (SELECT 1 FROM range(3)))", "Error"),
    ],
)
def test_filters_that_are_refused(searcher: Searcher, where: str, text: str) -> None:
    with pytest.raises(CoderError, match=text) as caught:
        searcher.index.records.where(where)
    assert "\n" not in str(caught.value)


def test_a_filter_ends_in_time(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SECONDS", 0.3)
    endless = "width = (SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE (a.range * b.range) % 7 = 3)"
    with pytest.raises(CoderError, match="it took over 0.3 seconds"):
        searcher.index.records.where(endless)


def test_slips(index: Path, capsys) -> None:
    assert main(["search", str(index), "--text", "x", "--where", "sauce = 1"]) == 2
    error = capsys.readouterr().err
    assert "--where sauce = 1: " in error and error.count("\n") == 1
