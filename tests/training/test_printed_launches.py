"""Every line with torchrun or ``accelerate launch`` that the pages print, run: the launcher's part as printed, with two
processes on this machine in the place of those of several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import PAGES
from tests.test_docs_commands import commands, shell, shown  # noqa: F401  (a fixture)
from tests.training.test_two_launchers import free_port

pytestmark = pytest.mark.slow

#: Numbers and places of a cluster, and what stands for them here.
HERE = {
    "--nnodes": "1", "--nproc_per_node": "2", "--rdzv_endpoint": "127.0.0.1:{port}", "--num_processes": "2",
    "--num_machines": "1", "--machine_rank": "0", "--main_process_ip": "127.0.0.1", "--main_process_port": "{port}",
}  # fmt: skip
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
#: So many forms are printed, with other numbers and data.
FORMS = 2
TRAIN = (
    "train --loss dcl --dataset-type scenes --train-num-samples 32 --batch-size 8 --epochs 1 --warmup 1 --workers 0 "
    "--val-frequency 0 --no-report --name run"
).split()


def launchers(folder: Path) -> dict[tuple[str, ...], str]:
    """What is printed before our module, each form once, to where it was found; on this machine."""
    found = {}
    for page in PAGES:
        for block in (block for block in shown(page) if block.reason is None):
            for program, *arguments in commands(block.text, folder):
                if program not in MODULES or "coder_plugin.cli" not in arguments:
                    continue
                place = arguments.index("coder_plugin.cli")
                if {"train", "eval", "…"} & set(arguments[place + 1 : place + 2]):
                    here = [HERE.get(before, each) for before, each in zip(["", *arguments], arguments[:place], strict=False)]
                    found.setdefault((program, *here), f"{block.name}: {program} {' '.join(arguments)}")
    return found


def test_the_lines_are_found(shell: Path) -> None:  # noqa: F811
    lines = launchers(shell)
    assert len(lines) == FORMS and len([line for line in lines if line[0] == "torchrun"]) == 1
    assert all("-m" in line and not re.search(r"\b8\b|machine:", " ".join(line)) for line in lines)


@pytest.mark.parametrize("number", range(FORMS))
def test_printed_launches_run(shell: Path, tmp_path: Path, tiny_model: str, number: int) -> None:  # noqa: F811
    (program, *launcher), printed = list(launchers(shell).items())[number]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    port = free_port()
    start = [sys.executable, "-m", MODULES[program], *(each.format(port=port) for each in launcher), "coder_plugin.cli"]
    steps = [[*TRAIN, "--model", tiny_model, "--logs", str(tmp_path)]]
    if number == 0:  # evaluation is printed with one launcher
        steps.append(["eval", str(tmp_path / "run"), "--workers", "0"])
    for ours in steps:
        done = subprocess.run([*start, *ours], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{printed}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    several = "--multi_gpu" in launcher or program == "torchrun"  # accelerate starts one process where there is no GPU
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["ranks"] == (2 if several else 1), printed
