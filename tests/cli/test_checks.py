"""What the checks before torch is imported must let through."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coder_plugin.cli import main
from coder_plugin.cli.checks import check_options
from coder_plugin.cli.train import next_commands
from coder_plugin.config import resolve

REMOTE = "pipe:cat {0..3}.tar"


def test_locations_that_only_their_reader_can_look_up() -> None:
    for location in (
        "shards/{00000..00099}.tar", "shards/*.tar", "a.tar::b.tar", "pipe:aws s3 cp s3://bucket/a.tar -",
        "hf://datasets/owner/name/train-{0..3}.tar", "s3://bucket/{a,b}.tar", "https://example.org/pairs.csv",
        "file:/data/train-0.tar", "file:///data/train-0.tar", "${DATA}/{0..3}.tar", "scenes",
    ):  # fmt: skip
        check_options({"train_data": location, "val_data": location})


def test_validation_data_that_are_training_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Also by a link, another path, another pattern."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv", "0.tar", "1.tar", "2.tar", "d/00000.tar", "d/00000_stats.json", "k.json", "s/state.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    Path("k.json").write_text('{"images": [{"sentences": []}]}')
    Path("link.csv").symlink_to("b.csv")
    os.link("b.csv", "hard.csv")

    def said(train: str, val: str, **options: Any) -> str:
        caplog.clear()
        check_options({"train_data": train, "val_data": val, **options})
        return caplog.text

    for train, val in (("b.csv", "b.csv"), ("b.csv", "d/../b.csv"), ("b.csv", "link.csv"), (f"{tmp_path}/hard.csv", "b.csv")):
        assert f"--val-data {val}: 1 of 1 files are also in --train-data, such as {val}" in said(train, val)
    assert "2 of 2 files" in said("{0..2}.tar", "[01].tar")
    assert "1 of 3 files" in said("0.tar::file:1.tar", "file:1.tar::s3://b/2.tar::2.tar")
    assert "1 of 1" in said("d", "d/*.tar") and "1 of 1" in said("s3://b/{0..9}.tar", "s3://b/3.tar")
    assert "1 of 1" in said("hf:o/n:train", "hf:o/n:train") and "1 of 1" in said("b.csv", "b.csv", dataset_type="csv")
    for train, val in (
        ("a.csv", "b.csv"), ("0.tar", "{1..2}.tar"), ("scenes", "scenes"), ("hf:o/n:train", "hf:o/n:test"),
        ("k.json", "k.json"), ("s", "s"), ("hf:o/n", "hf:o/n"),  # of several splits
    ):  # fmt: skip
        assert not said(train, val)


@pytest.mark.parametrize("command", ["eval", "train --loss clip", "concepts --output c.safetensors --vectors none"])
def test_data_that_a_command_opens_must_be_there(command: str, tmp_path: Path, tiny_model: str, capsys: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model": tiny_model, "train_data": "/elsewhere/a.csv"}))
    words = [*command.split(), "--config", str(config)]
    assert main(words) == 2 and "--train-data /elsewhere/a.csv: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, evaluate",
    [
        ({"train_data": "a.csv", "val_data": "b.csv"}, []),
        ({}, []),
        ({"train_data": "a.tar", "val_data": REMOTE}, ["--val-data", REMOTE]),
        (
            {"train_data": "a.csv", "val_data": "b.csv", "regions": "s3://bucket/r.tar"},
            ["--val-data", "b.csv", "--regions", "s3://bucket/r.tar"],
        ),
    ],
)
def test_the_next_command_names_the_data_that_evaluation_does_not_take_from_the_run(options: Any, evaluate: list[str]) -> None:
    config = resolve([("flag", {**options, "model": "coder-tiny"})])
    trainer: Any = SimpleNamespace(config=config, folder=Path("logs/run"), best={"epoch": 1})
    assert shlex.split(next_commands(trainer)[0]) == ["coder-plugin", "eval", "logs/run", *evaluate]
