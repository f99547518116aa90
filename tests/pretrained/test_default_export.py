"""A run without validation has no best export: whatever opens a run then takes the last one, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import coder_plugin
from coder_plugin.cli import main
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import export_model
from coder_plugin.pretrained.open import default_export, export_folder, open_pretrained

NOTE = "has no export/best (no validation was run, or it was removed): using export/last"


def export(folder: Path, model: str, seed: int) -> Path:
    torch.manual_seed(seed)
    export_model(coder_plugin.create_model(model, loss="dcl"), folder)
    return folder


@pytest.fixture
def run(tiny_model: str, tmp_path: Path) -> Path:
    """A run that was trained without validation."""
    folder = tmp_path / "run"
    export(folder / "export" / "last", tiny_model, 0)
    (folder / "config.json").write_text(json.dumps({"val_frequency": 0, "workers": 0, "batch_size": 8}))
    return folder


def test_the_last_is_opened_with_one_line(run: Path, tiny_model: str, caplog: Any) -> None:
    assert export_folder(run) == run / "export" / "last" and default_export(run) == "last"
    opened = open_pretrained(run, device="cpu")
    assert [record.getMessage() for record in caplog.records] == [f"{run} {NOTE}"]
    assert opened.fingerprint() == open_pretrained(run / "export" / "last", device="cpu").fingerprint()
    with pytest.raises(CoderError, match=r"export/best \(it has --export last\)"):
        open_pretrained(run, export="best", device="cpu")
    export(run / "export" / "best", tiny_model, 1)
    assert open_pretrained(run, device="cpu").fingerprint() != opened.fingerprint()
    assert open_pretrained(run, export="last", device="cpu").fingerprint() == opened.fingerprint()
    assert caplog.text.count(NOTE) == 1


def test_a_best_export_that_is_damaged_is_not_replaced(run: Path) -> None:
    (run / "export" / "best").mkdir()
    with pytest.raises(CoderError, match="export/best"):
        open_pretrained(run, device="cpu")
    (run / "export" / "best").rmdir()
    shutil.copytree(run / "export" / "last", run / "export" / ".best.old")  # a kill between two renames left it
    assert export_folder(run) == run / "export" / ".best.old"


@pytest.mark.parametrize("command", ["eval", "share"])
def test_a_command_takes_it_too(run: Path, tmp_path: Path, command: str, caplog: Any) -> None:
    flags = ["--to", str(tmp_path / "shared")]
    if command == "eval":
        table = tmp_path / "scenes.csv"
        item = open_scenes("val")[0]
        item.load().save(tmp_path / "0.png")
        table.write_text(f"filepath\ttitle\n{tmp_path / '0.png'}\t{item.captions[0]}\n")
        flags = ["--val-data", str(table)]
    assert main([command, str(run), *flags, "--export", "best"]) == 2
    assert main([command, str(run), *flags]) == 0
    assert caplog.text.count(NOTE) == 1


def test_an_index_names_the_export_that_made_it(run: Path, tiny_model: str, tmp_path: Path, caplog: Any, capsys: Any) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(3):
        open_scenes("val")[number].load().save(pictures / f"{number}.png")
    made = ["--data", str(pictures), "--output"]
    assert main(["index", str(run), *made, str(tmp_path / "no"), "--export", "best"]) == 2
    assert main(["index", str(run), *made, str(tmp_path / "index")]) == 0
    assert caplog.text.count(NOTE) == 1
    assert json.loads((tmp_path / "index" / "index.json").read_text())["model"]["export"] == "last"
    assert main(["index", str(run / "export" / "last"), *made, str(tmp_path / "other")]) == 0
    export(run / "export" / "best", tiny_model, 1)  # the run went on with validation: the index is still of the last
    assert main(["search", str(tmp_path / "index"), "--text", "a circle"]) == 0
    moved = shutil.copytree(run, tmp_path / "moved")
    shutil.rmtree(moved / "export" / "best")
    assert main(["search", str(tmp_path / "other"), "--text", "a circle", "--model", str(moved)]) == 0
    assert f"{moved} {NOTE}" in caplog.text
    capsys.readouterr()


def test_a_run_of_open_clips_trainer_writes_no_best(run: Path, caplog: Any) -> None:
    (run / "export" / "epoch_latest").mkdir()
    assert default_export(run) == "last"
    assert [record.getMessage() for record in caplog.records] == [
        f"{run} has no export/best (open_clip's trainer writes none): using export/last"
    ]
