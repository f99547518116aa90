"""A real comparison that is killed in every phase, and goes on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = shlex.split(
    "compare --loss clip dcl --lr 1e-3 --seeds 2 --epochs 2 --train-num-samples 128 --batch-size 32 --hold-aside 20 --workers 0"
)


def start(folder: Path, output: str) -> subprocess.Popen[bytes]:
    with (folder / f"{output}.log").open("ab") as log:
        command = [sys.executable, "-m", "coder_plugin.cli", *COMMAND, "--output", output]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def kill_when(reached: Callable[[], bool], folder: Path) -> None:
    """Kill the comparison as soon as it has reached a phase."""
    process = start(folder, "killed")
    while not reached():
        assert process.poll() is None, (folder / "killed.log").read_text()
        time.sleep(0.01)
    process.kill()
    process.wait()


def shown(folder: Path, output: str) -> dict[str, Any]:
    """The result without what differs from run to run: times, memory and paths."""
    assert start(folder, output).wait() == 0, (folder / f"{output}.log").read_text()
    result = json.loads((folder / output / "comparison.json").read_text())
    assert (folder / output / "comparison.html").stat().st_size > 10_000
    for row in result["rows"].values():
        for name in ("seconds", "minutes", "memory_mb", "folder", "command"):
            del row[name]
    return result  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_comparison_killed_in_every_phase_ends_with_the_same_result(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    runs = out / "runs"

    def trains(seed: int) -> bool:
        """A run with this seed has begun its training and not ended it."""
        folders = [path.parent for path in runs.glob(f"*-seed{seed}-*/metrics.jsonl")]
        return any(not (folder / "result.json").exists() for folder in folders)

    phases = {
        "probe": lambda: (out / "probe" / "run").is_dir(),
        "grid": lambda: trains(0) and len(list(runs.glob("*/result.json"))) == 1,
        "seeds": lambda: trains(1),
        "result": lambda: len(list(runs.glob("*/val.json"))) == 3,
    }
    for reached in phases.values():
        kill_when(reached, tmp_path)
        assert not (out / "comparison.json").exists()
    made = shown(tmp_path, "killed")
    assert made == shown(tmp_path, "whole")
    assert "warning: clip: a run has 8 steps, too few to learn" in (tmp_path / "whole.log").read_text()
    assert len(list(runs.glob("*/result.json"))) == len(list((tmp_path / "whole" / "runs").glob("*/result.json"))) == 4
