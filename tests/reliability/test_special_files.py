"""Named pipes and devices where a file is expected: refused at once, neither waited for nor read until memory ends."""

from __future__ import annotations

import os
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.data.shard_lists import recorded_size
from coder_plugin.data.shards import open_shards
from coder_plugin.data.tables import open_csv, open_karpathy
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json
from coder_plugin.integrations.hub.record import read_wise_ft
from coder_plugin.pretrained.hub_cache import WISE_FT
from coder_plugin.training import checkpoint
from coder_plugin.training.run_folder import RunFolder

Make = Callable[[Path], object]


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


class Hangs(BaseException):
    """The function under test waits."""


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make, name", [(os.mkfifo, "config.json"), (device, "plan.json"), (os.mkfifo, "metrics.jsonl")])
def test_in_a_runs_folder(make: Make, name: str, tmp_path: Path) -> None:
    for each in ("config.json", "plan.json"):
        (tmp_path / each).write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / name).unlink()
    make(tmp_path / name)
    told = {each.file: each.text for each in RunFolder.read(tmp_path, must_exist=False).problems}
    assert told[name] == "it is not a regular file"


@pytest.mark.parametrize("make, read", [(os.mkfifo, open_csv), (device, open_karpathy), (os.mkfifo, read_json)])
def test_as_a_table(make: Make, read: Callable[[str], object], tmp_path: Path) -> None:
    make(tmp_path / "data")
    with pytest.raises(CoderError, match="data.*it is not a regular file"):
        read(str(tmp_path / "data"))


@pytest.mark.parametrize("make, name", [(device, "sizes.json"), (os.mkfifo, "nshards.txt")])
def test_beside_shards(make: Make, name: str, tmp_path: Path) -> None:
    tarfile.open(tmp_path / "0.tar", "w").close()
    make(tmp_path / name)
    with pytest.raises(CoderError, match=f"{name}.*it is not a regular file"):
        open_shards(str(tmp_path), split="test") if name == "nshards.txt" else recorded_size([str(tmp_path / "0.tar")])


def test_in_what_is_shared(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WISE_FT)
    assert read_wise_ft(tmp_path) == {}
    (tmp_path / WISE_FT).unlink()
    (tmp_path / WISE_FT).write_text("[" * 100_000)
    assert read_wise_ft(tmp_path) == {}


@pytest.mark.parametrize("make, name", [(os.mkfifo, "manifest.json"), (device, "state.pt"), (os.mkfifo, "rank0.pt")])
def test_in_a_checkpoint(make: Make, name: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, "good", manifest={"step": 1}, common={"model": {"a": torch.zeros(1)}})
    (path / name).unlink()
    make(path / name)
    with pytest.raises(CoderError, match=f"{name} is missing"):
        checkpoint.load(path), checkpoint.load_rank(path, 0)
