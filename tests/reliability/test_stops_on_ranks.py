"""Two processes of one run: a signal to one of them, the lock, and going on with another number of processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import FILES, assert_same_run, options, rows

from coder_plugin.training import checkpoint

SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from tiny_run import trainer
from coder_plugin.errors import CoderError
settings, at = json.loads(sys.argv[1]), json.loads(sys.argv[2])
try:
    made = trainer(settings, loss="dcl", count=32)
    take = made.training_step
    def step(batches):
        if at and made.step == at["step"] and int(os.environ["RANK"]) == at["rank"]:
            os.kill(os.getpid(), getattr(signal, at["signal"]))
        return take(batches)
    made.training_step = step
    made.run()
except CoderError as error:
    print("error:", error, flush=True)
    sys.exit(2)
"""


def run(folder: Path, name: str, *, processes: int, at: dict[str, Any] | None = None, **changes: Any) -> list[tuple[int, str]]:
    """Exit status and output of each process of a run; ``at`` sends a signal to one of them while it takes a step."""
    defaults = {"opt": "sgd", "lr": 0.05, "batch_size": 8 // processes, "set": [], "save_every_steps": 3}
    settings = options(folder, name=name, **{**defaults, **changes})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, json.dumps(settings), json.dumps(at)]
    started = []
    for rank in range(processes):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TINY_RUN_FILES": str(FILES)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
    outputs = [process.communicate(timeout=400)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def check(results: list[tuple[int, str]], status: int = 0) -> None:
    assert [each for each, _ in results] == [status] * len(results), results[0][1][-3000:] + results[-1][1][-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_signal_to_one_of_two_ranks_stops_both_and_they_go_on_as_uninterrupted(tmp_path):
    check(run(tmp_path, "whole", processes=2))
    for name, rank in (("SIGTERM", 1), ("SIGUSR1", 0)):
        results = run(tmp_path, name, processes=2, at={"step": 4, "rank": rank, "signal": name})
        check(results, 75)
        assert f"{name}: stopped after step 5" in results[0][1]
        newest = checkpoint.newest(tmp_path / name / "checkpoints")
        assert newest is not None and newest.name == "step_00000005"
        check(run(tmp_path, name, processes=2, resume="latest"))
        assert_same_run(tmp_path / "whole", tmp_path / name)
    print("2 signals, each to one rank of two: both ranks ended with status 75, resumed as uninterrupted")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """Steps after the change hold the samples of the uninterrupted run's steps, so the losses are the same but for rounding."""
    check(run(tmp_path, "whole", processes=1))
    expected = {row["step"]: row["loss"] for row in rows(tmp_path / "whole") if "loss" in row}
    for first, second in ((1, 2), (2, 1)):
        name = f"{first}-{second}"
        check(run(tmp_path, name, processes=first, at={"step": 4, "rank": 0, "signal": "SIGTERM"}), 75)
        results = run(tmp_path, name, processes=second, resume="latest")
        check(results)
        assert "samples left of epoch 2 are dealt anew" in results[0][1]
        found = {row["step"]: row["loss"] for row in rows(tmp_path / name) if "loss" in row}
        assert found.keys() == expected.keys() == set(range(8))
        assert all(found[step] == pytest.approx(expected[step], rel=2e-4, abs=1e-6) for step in expected)
    print("1 to 2 and 2 to 1 processes in the middle of an epoch: 0 samples missing, 0 twice, losses as uninterrupted")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_run_is_refused_on_all_ranks(tmp_path):
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from coder_plugin.training.disk import run_lock\n"
            "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)",
            str(tmp_path / "run"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "held\n"
        started = time.monotonic()
        results = run(tmp_path, "run", processes=2)
        check(results, 2)
        assert all("is being written by another process" in output for _, output in results)
        print(f"a second run of two ranks was refused on both in {time.monotonic() - started:.0f} s")
    finally:
        reader.send_signal(signal.SIGKILL)
        reader.wait()
