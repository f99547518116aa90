"""The commands of docs/multi_node.md with two launchers on this machine, one process each, against one launcher with two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coder_plugin.training import checkpoint

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun(machine: int, port: int, *, machines: int) -> list[str]:
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "run1"]
    return ["torch.distributed.run", "--nnodes", str(machines), "--nproc_per_node", str(2 // machines), *meeting, "-m", "--"]


def accelerate(machine: int, port: int, *, machines: int) -> list[str]:
    return [
        "accelerate.commands.launch", "--multi_gpu", "--num_machines", str(machines), "--machine_rank", str(machine),
        "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--mixed_precision", "no",
        "--dynamo_backend", "no", "-m",
    ]  # fmt: skip


def srun(machine: int, port: int, *, machines: int) -> list[str]:
    """No launcher: SLURM's variables alone, which :func:`environment` sets."""
    return []


def environment(launcher: object, machine: int, port: int) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    plain |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    if launcher is not srun:
        return plain
    task = {"SLURM_PROCID": str(machine), "SLURM_LOCALID": "0", "SLURM_NODEID": str(machine), "SLURM_NTASKS": "2"}
    return plain | task | {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def train(folder: Path, name: str, model: str, launcher, *, machines: int) -> dict[str, torch.Tensor]:
    """A run of two processes -> the weights and state of its last checkpoint."""
    flags = {
        "model": model, "loss": "dcl", "logs": folder, "name": name, "dataset-type": "scenes", "batch-size": 8, "epochs": 1,
        "train-num-samples": 32, "warmup": 1, "workers": 0, "val-frequency": 0, "lr": 0.01,
    }  # fmt: skip
    port = free_port()
    launchers = []
    for machine in range(2 if launcher is srun else machines):
        command = [sys.executable, "-m", *launcher(machine, port, machines=machines), "coder_plugin.cli", "train"]
        command += [str(part) for key, value in flags.items() for part in (f"--{key}", value)]
        log = open(folder / f"{name}-{machine}.log", "w+")
        environ = environment(launcher, machine, port)
        launchers.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ), log))
    try:
        for process, log in launchers:
            status = process.wait(timeout=240)
            log.seek(0)
            assert status == 0, log.read()[-4000:]
    finally:
        for process, log in launchers:
            process.kill()
            log.close()
    return checkpoint.load(sorted((folder / name / "checkpoints").iterdir())[-1])[1]["model"]


@pytest.mark.parametrize("launcher", [torchrun, accelerate, srun])
def test_two_launchers_train_as_one_does(launcher, tmp_path, tiny_model) -> None:
    expected = train(tmp_path, "one", tiny_model, torchrun, machines=1)
    found = train(tmp_path, "two", tiny_model, launcher, machines=2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
