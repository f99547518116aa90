"""``coder-plugin mine``: an index is made or read, a table and a page are written, and what does not fit is refused."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.data.hard_negatives import read_negatives
from coder_plugin.data.item import stable_hash
from coder_plugin.data.scenes import open_scenes
from coder_plugin.files import read_json
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.pretrained.export import export_model
from coder_plugin.search.mining_options import COLUMNS

COUNT = 20
QUICK = ["--workers", "0", "--batch-size", "8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty scenes as PNG files with two captions each, one of them damaged, in two tables."""
    folder = tmp_path_factory.mktemp("data")
    for name, items in (("train", open_scenes("train", count=COUNT)), ("other", open_scenes("val", count=COUNT))):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            table = csv.writer(file, delimiter="\t")
            table.writerow(["filepath", "title"])
            for number, item in enumerate(items):
                path = folder / f"{name}{number:02d}.png"
                item.load().save(path)
                table.writerows([[str(path), caption] for caption in item.captions[:2]])
    (folder / "train07.png").write_bytes(b"damaged")
    return folder


def export(folder: Path, model: str, seed: int) -> Path:
    torch.manual_seed(seed)
    export_model(coder_plugin.create_model(model, loss="clip"), folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("export"), tiny_model, 0)


@pytest.fixture(scope="module")
def made(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a table and its index."""
    folder = tmp_path_factory.mktemp("made")
    flags = ["--data", str(data / "train.csv"), "--output", str(folder / "negatives.tsv"), "--max-bad-samples", "0.5"]
    assert main(["mine", str(model), *flags, *LOOSE, *QUICK]) == 0
    return folder


LOOSE = ["--relative-margin", "-2", "--max-similarity", "1"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def refused(capsys: pytest.CaptureFixture[str], *command: Any) -> str:
    capsys.readouterr()
    assert main(["mine", *map(str, command)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("coder-plugin: error: ")
    return error


def test_a_table_and_a_page(made: Path, data: Path, tmp_path: Path, capsys) -> None:
    page, output = tmp_path / "page.html", tmp_path / "negatives.tsv"
    command = ["--index", made / "negatives.tsv.index", "--output", output, "--html", page]
    assert main(["mine", *map(str, command), *LOOSE]) == 0
    printed = capsys.readouterr()
    assert output.read_bytes() == (made / "negatives.tsv").read_bytes()  # neither model nor data are needed for it
    rows = rows_of(output)
    images = [str(data / f"train{number:02d}.png") for number in range(COUNT) if number != 7]
    assert list(rows[0]) == list(COLUMNS) and list(dict.fromkeys(row["key"] for row in rows)) == images
    assert {row["negative_key"] for row in rows} <= set(images) and all(row["key"] != row["negative_key"] for row in rows)
    captions = {row[0]: [] for row in csv.reader(open(data / "train.csv"), delimiter="\t")}
    for key, text in csv.reader(open(data / "train.csv"), delimiter="\t"):
        captions[key].append(text)
    assert all(row["caption"] in captions[row["key"]] and row["negative"] in captions[row["negative_key"]] for row in rows)
    lines = printed.out.splitlines()
    assert lines[0] == f"{output}: 95 negatives of 19 images; 19 have the 5 asked for, 0 fewer, 0 none"
    assert lines[1] == "1 sample of the data could not be read when the index was made"
    assert f"page: {page}" in printed.err and "ranks 1 to 1,000" in printed.out and "for more negatives" not in printed.out
    assert re.search(r"^candidates +684  ranks", printed.out, flags=re.M)  # 36 captions of others for each
    assert re.search(r"^ +5% +25% +median +75% +95%\npositive +-?0\.\d{4}", printed.out, flags=re.M)
    html = page.read_text()
    assert html.count('<section class="query">') == 19 and html.count("data:image/jpeg;base64,") == 19 + 95
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|url\(|@import""", html)


def test_the_summary_says_what_was_left_out_and_what_to_change(made: Path, tmp_path: Path, capsys) -> None:
    index = ["--index", str(made / "negatives.tsv.index"), "--output", str(tmp_path / "negatives.tsv")]
    assert main(["mine", *index, "--absolute-margin", "9", "--num-negatives", "2"]) == 0
    out = capsys.readouterr().out
    assert "0 negatives of 19 images; 0 have the 2 asked for, 0 fewer, 19 none" in out
    assert rows_of(tmp_path / "negatives.tsv") == []
    assert re.search(r"^  margin +(\d+)  +\d+\.\d %  a score", out, flags=re.M)
    advice = "for 'margin', a smaller --relative-margin or --absolute-margin"
    assert out.splitlines()[-1] == f"for more negatives: {advice}"
    assert re.search(r"^negative( +–){5}$", out, flags=re.M)
    assert main(["mine", *index, "--absolute-margin", "9", "--margin-from", "min", "--range-max", "9"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"for more negatives: a larger --range-max, or, {advice} or --margin-from max"
    assert main(["mine", *index, *LOOSE[:2], "--max-similarity", "-0.99"]) == 0
    assert "for 'similar caption', a greater --max-similarity" in capsys.readouterr().out
    assert main(["mine", *index, *LOOSE, "--range-min", "3", "--range-max", "9", "--sampling-strategy", "random"]) == 0
    assert "ranks 4 to 9" in capsys.readouterr().out
    assert {int(row["rank"]) for row in rows_of(tmp_path / "negatives.tsv")} == {4, 5, 6, 7, 8, 9}


def test_an_index_of_coder_plugin_index_is_read(made: Path, data: Path, model: Path, tmp_path: Path, monkeypatch) -> None:
    table, index = str(data / "train.csv"), tmp_path / "train.index"
    flags = ["--max-bad-samples", "0.5", "--workers", "0"]
    assert main(["index", str(model), "--data", table, "--output", str(index), *flags, "--batch-size", "5"]) == 0
    monkeypatch.setattr(Encoder, "transformed", lambda *_, **__: pytest.fail("it was encoded again"))
    command = ["--index", index, "--data", table, "--output", tmp_path / "negatives.tsv", *LOOSE]
    assert main(["mine", *map(str, [model, *command])]) == 0
    pairs = [[(row["key"], row["negative"]) for row in rows_of(path / "negatives.tsv")] for path in (tmp_path, made)]
    assert sorted(pairs[0]) == sorted(pairs[1])


def test_another_model_or_other_data_are_refused(made: Path, data: Path, model: Path, tiny_model, tmp_path, capsys) -> None:
    index, output = made / "negatives.tsv.index", tmp_path / "negatives.tsv"
    other = export(tmp_path / "other", tiny_model, 1)
    assert "was made with another model" in refused(capsys, other, "--index", index, "--output", output)
    error = refused(capsys, model, "--index", index, "--data", data / "other.csv", "--output", output)
    assert "was made from other images or captions" in error and "train.csv, split train" in error
    assert "another --index" in error
    assert not output.exists()
    shutil.copytree(index, tmp_path / "cut")
    next((tmp_path / "cut").glob("captions-*.faiss")).write_bytes(b"")
    assert "captions-00001.faiss has 0 bytes" in refused(capsys, "--index", tmp_path / "cut", "--output", output)
    assert "is not an index: it has no index.json" in refused(capsys, "--index", other, "--output", output)
    pictures = ["--data", str(data / "other.csv"), "--what", "images", "--output", str(tmp_path / "pictures")]
    assert main(["index", str(model), *pictures, *QUICK]) == 0
    assert "has no vectors of captions" in refused(capsys, "--index", tmp_path / "pictures", "--output", output)


def test_training_reads_the_table(made: Path, data: Path, tiny_model: str, tmp_path: Path, capsys) -> None:
    """open_clip #869, sentence-transformers #2848 and #3279: hard negatives are mined, read and trained with."""
    table = read_negatives(str(made / "negatives.tsv"))
    rows = rows_of(made / "negatives.tsv")
    assert sum(map(len, table.values())) == len(rows) == 95
    assert table[rows[7]["key"]][2] == (rows[7]["negative"], stable_hash(rows[7]["negative_key"]))
    command = ["train", "--model", tiny_model, "--logs", str(tmp_path), "--name", "run", "--loss", "clip + dcl"]
    command += ["--train-data", str(data / "train.csv"), "--negatives-file", str(made / "negatives.tsv")]
    assert main([*command, "--hard-negatives", "5", "--epochs", "1", *QUICK, "--no-report", "--max-bad-samples", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "hard negatives: 95 of 95 places filled" in printed
    assert main(["mine", str(tmp_path / "run"), "--output", str(tmp_path / "next.tsv"), *LOOSE, *QUICK]) == 0  # and once more


def test_a_run_names_its_training_set(data: Path, tiny_model: str, tmp_path: Path, capsys) -> None:
    """And how it is read: here its columns."""
    (tmp_path / "other.csv").write_text((data / "other.csv").read_text().replace("filepath\ttitle", "picture\ttext"))
    train = ["train", "--model", tiny_model, "--logs", str(tmp_path), "--name", "run"]
    train += ["--train-data", str(tmp_path / "other.csv"), "--csv-img-key", "picture", "--csv-caption-key", "text"]
    assert main([*train, "--epochs", "1", *QUICK, "--no-report", "--loss", "clip"]) == 0
    assert main(["mine", str(tmp_path / "run"), "--output", str(tmp_path / "negatives.tsv"), *LOOSE, *QUICK]) == 0
    plan = read_json(tmp_path / "negatives.tsv.index" / "index.json")["plan"]
    assert plan["data"] == str(tmp_path / "other.csv") and plan["split"] == "train" and not plan["tokens"]
    assert "of 20 images; 20 have" in capsys.readouterr().out
    config = tmp_path / "run" / "config.json"
    content = read_json(config)
    content["data"] |= {"dataset_resampled": True, "hard_negatives": 2, "csv_negatives_key": "wrong"}  # of training alone
    config.write_text(json.dumps(content))
    other = ["--data", str(data / "train.csv"), "--max-bad-samples", "0.5", "--output", str(tmp_path / "other.tsv")]
    assert main(["mine", str(tmp_path / "run"), *other, *LOOSE, *QUICK]) == 0
    content["data"]["train"] = "<100 items>"
    config.write_text(json.dumps(content))
    error = refused(capsys, tmp_path / "run", "--output", tmp_path / "new.tsv")
    assert "the run's training set (<100 items>) is not opened from its configuration: name it with --data" in error
