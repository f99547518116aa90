"""Searching an index, from Python and the command line: against the vectors, with re-ranking, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.data import open_source
from coder_plugin.data.regions.arrays import npz_bytes
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import export_model
from coder_plugin.search.index import Index
from coder_plugin.search.searcher import open_searcher
from tests import region_model
from tests.search.made import write_model, write_pictures
from tests.training import region_data

COUNT = 24


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes as PNG files, and a table of their captions."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), COUNT).parent


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose score has two levels."""
    objective = coder_plugin.objective.Objective.parse("dcl + concept_dcl").with_options({"concepts.vocabulary": "scenes"})
    return write_model(tmp_path_factory.mktemp("export"), objective)


@pytest.fixture(scope="module")
def index(pictures: Path, export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "index"
    flags = ["--data", str(pictures / "all.csv"), "--output", str(folder), "--workers", "0", "--batch-size", "16"]
    assert main(["index", str(export), *flags]) == 0
    return folder


def run(capsys: pytest.CaptureFixture, *flags: str) -> str:
    capsys.readouterr()
    assert main(["search", *flags]) == 0
    return capsys.readouterr().out


def test_a_text_finds_what_its_vector_is_nearest_to(index: Path, export: Path, pictures: Path, capsys) -> None:
    found = json.loads(run(capsys, str(index), "--text", "a red circle", "two squares", "-k", "7", "--json"))
    assert [each["query"] for each in found] == ["a red circle", "two squares"]
    searcher = open_searcher(index)
    encoder = searcher.encoder
    files = sorted(pictures.glob("*.png"))
    vectors = torch.cat([encoder.image([Image.open(file).convert("RGB")])[0] for file in files])
    assert vectors.shape[1] == 2 * 128  # both levels are in it
    texts, _ = encoder.text(["a red circle", "two squares"])
    scores = texts @ vectors.T
    for each, score in zip(found, scores, strict=True):
        best = score.topk(7)
        assert [Path(row["key"]).name for row in each["results"]] == [files[i].name for i in best.indices]
        assert [row["score"] for row in each["results"]] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [row["rank"] for row in each["results"]] == list(range(1, 8))
        assert all(len(row["captions"]) == 2 for row in each["results"])
    hits = searcher.search(searcher.text(["two squares"])[0], 7)
    assert [hit.image.key for hit in hits] == [row["key"] for row in found[1]["results"]] and hits[0].fused is None


def test_a_picture_finds_captions_and_itself(index: Path, pictures: Path, capsys) -> None:
    one = str(pictures / "007.png")
    [among] = json.loads(run(capsys, str(index), "--image", one, "--json", "--among", "images", "-k", "3"))
    assert Path(among["results"][0]["key"]).name == "007.png" and len(among["results"]) == 3
    [texts] = json.loads(run(capsys, str(index), "--image", one, "--json"))
    assert len(texts["results"]) == 10 and set(texts["results"][0]) == {"rank", "score", "key", "image_id", "path", "text"}
    [by_key] = json.loads(run(capsys, str(index), "--key", among["results"][0]["key"], "--json"))
    got, wanted = ([(row["key"], row["text"]) for row in each["results"]] for each in (by_key, texts))
    assert got == wanted


def test_the_table_and_the_page(index: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a <b>red</b> circle\n\nblue star\n"))
    page = tmp_path / "page.html"
    nothing = ["--text", "x", "--where", "key = ''", "--html", str(tmp_path / "nothing.html")]
    assert run(capsys, str(index), *nothing) == "no results: --where is true for no image\n"
    lines = run(capsys, str(index), "--text", "-", "-k", "2", "--html", str(page)).splitlines()
    assert lines[0] == "a <b>red</b> circle:" and lines[1].split() == ["score", "image", "caption"]
    assert re.match(r"1  -?\d\.\d{4}  .*\.png  \w", lines[2]) and lines[5] == "blue star:" and len(lines) == 9
    html = page.read_text()
    assert "a &lt;b&gt;red&lt;/b&gt; circle" in html and "<b>red" not in html
    assert html.count("data:image/jpeg;base64,") == 4
    assert not re.search(r"""(?:src|href)=["'](?!data:|file:|#)|url\(|@import""", html)


def test_a_folder_of_pictures(pictures: Path, export: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(9, 14):
        shutil.copy(pictures / f"{number:03d}.png", tmp_path / "pictures")
    flags = ["--data", str(tmp_path / "pictures"), "--workers", "0"]
    assert main(["index", str(export), *flags, "--output", str(tmp_path / "index"), "--thumbnails", "0"]) == 0
    assert "5 images, 0 captions; vectors of images: 5 of 256 dimensions" in capsys.readouterr().out
    [found] = json.loads(run(capsys, str(tmp_path / "index"), "--image", str(pictures / "011.png"), "--json"))
    assert found["results"][0]["key"] == "011.png" and found["results"][0]["captions"] == []  # no captions to find
    page = tmp_path / "page.html"
    run(capsys, str(tmp_path / "index"), "--text", "x", "--html", str(page))
    assert "data:image" not in page.read_text() and '<div class="blank">' in page.read_text()


def test_thumbnails_are_small_pictures_of_the_right_image(index: Path, pictures: Path) -> None:
    records = open_searcher(index).index.records
    for row in (0, 23):
        small = Image.open(io.BytesIO(records.thumbnail(row)))
        [key] = [each.key for each in records.images([row])]
        original = Image.open(key).convert("RGB")
        assert small.format == "JPEG" and max(small.size) <= 128
        difference = np.abs(np.asarray(small, dtype=float) - np.asarray(original.resize(small.size), dtype=float)).mean()
        assert difference < 12


def test_another_model_is_refused(index: Path, export: Path, tmp_path: Path, capsys) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(export, moved)
    assert main(["search", str(index), "--text", "x", "--model", str(moved)]) == 0  # the same, elsewhere
    other = write_model(tmp_path / "other", "dcl", seed=1)
    capsys.readouterr()
    assert main(["search", str(index), "--text", "x", "--model", str(other)]) == 2
    error = capsys.readouterr().err
    assert "was made with another model" in error and "give the model that it was made with, " in error
    plain: Any = SimpleNamespace(folder=index, note={"model": {"fingerprint": "", "name": "tiny", "objective": ""}})
    with pytest.raises(CoderError, match="made with, tiny, or another index$"):
        Index.check_model(plain, SimpleNamespace(name="other", fingerprint=lambda: "1"))
    assert main(["search", str(index), "--text", "x", "--model", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "its model cannot be opened" in error and "neither an export nor a run" in error and "if it has moved" not in error
    note = json.loads((index / "index.json").read_text())
    shutil.copytree(index, tmp_path / "index")
    (tmp_path / "index" / "index.json").write_text(json.dumps({**note, "model": {**note["model"], "spec": "nowhere"}}))
    with pytest.raises(CoderError, match="; if it has moved, name its folder with --model$"):
        open_searcher(tmp_path / "index")


@pytest.mark.parametrize(
    "flags, text",
    [
        ([], "nothing to search for: give --text, --image or --key"),
        (["--text", " "], "--text ' ': there is nothing to search for"),
        (["--text", "x", "-k", "0"], "k must be at least 1, got 0"),
        (["--text", "x", "--rerank", "8"], "--rerank 8: the index keeps nothing to re-rank by: build it"),
        (["--text", "x", "--rerank=-1"], "must be a number of candidates, or all, got '-1'"),
        (["--key", "nobody"], "has no image 'nobody'"),
        (["--image", "nowhere.png"], "--image nowhere.png: no such file or folder"),
        (["--text", "x", "--html", "nowhere/page.html"], "--html nowhere/page.html: the folder nowhere does not exist"),
        (["--text", "x", "--search-parameters", "nprobe=x"], "is not valid for this index"),
    ],
)
def test_slips(index: Path, capsys, flags: list[str], text: str) -> None:
    assert main(["search", str(index), *flags]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_regions_with_a_fusion_score(tmp_path: Path, capsys) -> None:
    """By text: the shortlist by products, in the fused score's order; by regions; by an image of the index."""
    data = region_data.write_precomp(tmp_path)
    export_model(region_model.make("dcl + ascl(similarity=fusion)", seed=3), tmp_path / "export")
    flags = ["--data", data, "--split", "dev", "--workers", "0", "--batch-size", "5", "--output", str(tmp_path / "index")]
    assert main(["index", str(tmp_path / "export"), *flags]) == 0
    searcher = open_searcher(tmp_path / "index")
    encoder, head = searcher.encoder, searcher.head
    encoded = encoder(open_source(data, split="dev"))
    scores = encoded.texts[:1] @ encoded.images.T
    fused = head.scorer(encoded.items.images, encoded.items.texts).all_pairs()[:, 0]
    first = scores[0].topk(10).indices
    expected = first[fused[first].argsort(descending=True)]
    [query] = searcher.text([encoded.captions[0]])
    hits = searcher.search(query, 12, rerank=10)
    assert [hit.row for hit in hits[:10]] == expected.tolist()
    assert [hit.row for hit in hits[10:]] == scores[0].topk(12).indices[10:].tolist()
    assert [hit.fused for hit in hits[:10]] == pytest.approx(fused[expected].tolist(), abs=2e-4) and hits[10].fused is None
    assert [hit.score for hit in hits[:10]] == pytest.approx(scores[0][expected].tolist(), abs=1e-5)
    plain = searcher.search(query, 3, rerank=0)
    assert [hit.row for hit in plain] == scores[0].topk(3).indices.tolist() and plain[0].fused is None
    every = searcher.search(query, 3, rerank="all")
    assert [hit.row for hit in every] == fused.argsort(descending=True)[:3].tolist()
    assert [hit.row for hit in searcher.search(query, 3)] == [hit.row for hit in every]  # 24 of 32
    with pytest.raises(CoderError, match="re-ranking compares an image with a text, and both are captions here"):
        searcher.search(query, 3, among="captions", rerank=4)

    regions = next(region_data.records("dev")).regions
    (tmp_path / "one.npz").write_bytes(npz_bytes({"features": regions.features, "boxes": regions.boxes}))
    [found] = json.loads(run(capsys, str(tmp_path / "index"), "--image", str(tmp_path / "one.npz"), "--json"))
    [by_key] = json.loads(run(capsys, str(tmp_path / "index"), "--key", "dev_000", "--json"))
    assert [row["text"] for row in found["results"]] == [row["text"] for row in by_key["results"]]
    fused_scores = [[row["fused"] for row in each["results"]] for each in (found, by_key)]
    assert fused_scores[0] == pytest.approx(fused_scores[1], abs=2e-3)  # the index keeps its in half precision
    Image.new("RGB", (9, 9)).save(tmp_path / "one.png")
    assert main(["search", str(tmp_path / "index"), "--image", str(tmp_path / "one.png")]) == 2
    assert "this index's model reads regions" in capsys.readouterr().err


def test_candidates_are_as_many_as_in_evaluation(tmp_path: Path) -> None:
    """All of them where the vectors were never trained: a shortlist by them would mean nothing."""
    data = region_data.write_precomp(tmp_path)
    export_model(region_model.make("ascl(similarity=fusion)"), tmp_path / "export")
    flags = ["--data", data, "--split", "dev", "--workers", "0", "--output", str(tmp_path / "index")]
    assert main(["index", str(tmp_path / "export"), *flags]) == 0
    searcher = open_searcher(tmp_path / "index")
    [query] = searcher.text(["a man and a dog"])
    assert searcher.shortlist is None
    found, every = searcher.search(query, 3), searcher.search(query, 3, rerank="all")
    assert found == every and all(hit.fused is not None for hit in found)


@pytest.mark.parametrize("flags", [("--factory", "Round"), ("--thumbnails", "-1"), ("--data", "nowhere")])
def test_a_refused_command_leaves_the_folder_to_the_corrected_one(export: Path, tmp_path: Path, flags: Any, capsys) -> None:
    command = ["index", str(export), "--data", "scenes", "--workers", "0", "--output", str(tmp_path / "index")]
    assert main([*command, *flags]) == 2
    capsys.readouterr()
    assert not [each.name for each in tmp_path.glob("index/[!.]*")]


def test_a_finished_index_is_made_of_the_same_data(index: Path, export: Path, pictures: Path, capsys) -> None:
    """The same command does nothing; one with another option is refused, and neither leaves anything."""
    before = {path: path.stat().st_mtime_ns for path in index.rglob("*") if path.name != ".lock"}
    flags = ["--data", str(pictures / "all.csv"), "--output", str(index), "--workers", "0", "--batch-size", "16"]
    command = ["index", str(export), *flags]
    assert main(command) == 0
    assert main([*command, "--thumbnails", "5"]) == 2 and "thumbnails was 128, is 5" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in index.rglob("*") if path.name != ".lock"} == before


def test_the_fingerprint_is_of_what_decides_the_vectors(index: Path, export: Path, monkeypatch) -> None:
    from coder_plugin.pretrained.open import open_pretrained

    one, again = (open_pretrained(export, {}) for _ in range(2))
    before = one.fingerprint()
    assert before == again.fingerprint()
    with torch.no_grad():
        next(again.model.coder.heads["concepts"].parameters()).add_(1e-6)
    assert before != again.fingerprint()
    for change in ({"quick_gelu": True}, {"text_cfg": {**one.model.coder_config["text_cfg"], "heads": 1}}):
        with monkeypatch.context() as patch:  # the same weights in another architecture
            patch.setattr(one.model, "coder_config", {**one.model.coder_config, **change})
            assert one.fingerprint() != before
    one.model.coder_config = {**one.model.coder_config, "init_logit_scale": 3.0}
    assert one.fingerprint() == before
    one.model.visual.preprocess_cfg = {**one.model.visual.preprocess_cfg, "mean": (0.1, 0.2, 0.3)}
    assert one.fingerprint() != before
