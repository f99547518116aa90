"""``accelerate launch`` with two gloo processes equals one process with the joint batch, and resumes."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from coder_plugin.cli import main
from coder_plugin.data.scenes import open_scenes
from coder_plugin.training import checkpoint
from tests import fresh
from tests.reliability import ranks

#: For evaluation, with five captions each.
PICTURES = 10


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of a few scenes: all 500 take longer to evaluate than the steps of these runs."""
    folder = tmp_path_factory.mktemp("pictures")
    rows = ["filepath\ttitle"]
    for number, scene in enumerate(open_scenes("val", count=PICTURES)):
        scene.load().save(folder / f"{number}.png")
        rows += [f"{number}.png\t{caption}" for caption in scene.captions]
    (folder / "val.csv").write_text("\n".join(rows) + "\n")
    return folder / "val.csv"


def train(folder: Path, name: str, *, processes: int, launched: bool = False, **flags: object) -> None:
    """``coder-plugin train`` in this process, or in two, which are forked or ``launched`` by accelerate."""
    options = {
        "logs": folder,
        "name": name,
        "dataset-type": "scenes",
        "batch-size": 16 // processes,
        "train-num-samples": 48,
        "epochs": 2,
        "warmup": 2,
        "workers": 0,
        "val-frequency": 2,
        "opt": "sgd",  # Adam blows up rounding where the true gradient is zero, as for attention keys' bias
        "lr": 0.05,
        **flags,
    }
    arguments = ["train", "--no-report"]
    for key, value in options.items():
        arguments += [f"--{key}", *(value if isinstance(value, list) else [str(value)])]
    if processes == 1:
        assert main(arguments) == 0
        return
    if not launched:
        endings = ranks.run(lambda _: sys.exit(main(arguments)), folder, ranks=processes, timeout=240)
        assert [ending.status for ending in endings] == [0] * processes, endings
        return
    # accelerate starts one process with --cpu, whatever their number; --multi_gpu is torchrun, without GPUs too
    launch = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", str(processes), "--multi_gpu"]
    launch += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = fresh.run([*launch, "-m", "coder_plugin.cli", *arguments], timeout=500, env=environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def records(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path, name: str) -> dict[str, torch.Tensor]:
    newest = sorted((folder / name / "checkpoints").iterdir())[-1]
    return checkpoint.load(newest)[1]["model"]


#: Without pgc: ids of its centres follow the order of a batch's pairs, which two ranks gather in another one. Without
#: BatchNorm: over a few pairs it magnifies rounding, by 1e-2 within ten steps (tests/heads/test_concepts.py has its gradient).
CODER = [
    "3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl", "--set", "momentum.bank_size=32", "concepts.norm=none",
    "concepts.tower_gradient=1",
]  # fmt: skip


def ordered(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the banks' entries by id: within a batch they lie in the order of ranks."""
    bank = "coder.heads.momentum.bank."
    order = state[f"{bank}ids"].argsort() if f"{bank}ids" in state else None
    return {k: v[order] if k in (f"{bank}ids", f"{bank}image", f"{bank}text") else v for k, v in state.items()}


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one(tmp_path, tiny_model, pictures, launched):
    flags = {"model": tiny_model, "loss": CODER, "val-data": pictures, "log-every-n-steps": 3}
    train(tmp_path, "one", processes=1, **flags)
    train(tmp_path, "two", processes=2, launched=launched, **{"save-frequency": 1}, **flags)
    one, two = records(tmp_path, "one"), records(tmp_path, "two")
    assert len(one) == len(two)
    assert {row["step"] for row in two if "loss" in row} == {0, 2, 3, 5}  # every third, and the ends of epochs
    assert "val/rsum" in one[-1] and one[-1]["step"] == 6
    for ours, theirs in zip(one, two, strict=True):
        for key in ours:
            ranks_differ = 2.0 if key.startswith("val/") else 1e-6  # rounding turns the ranks of near ties
            assert theirs[key] == pytest.approx(ours[key], rel=2e-4, abs=ranks_differ), key
    before, after = ordered(state(tmp_path, "one")), ordered(state(tmp_path, "two"))
    for key, value in before.items():
        value, other = value.double(), after[key].double()
        assert (other - value).norm() <= 1e-3 * value.norm() + 1e-6, key
    # back to the checkpoint of the first epoch: two processes go on as if they had not been stopped
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_00000006")
    train(tmp_path, "two", processes=2, resume="latest", **{"save-frequency": 1}, **flags)
    assert [row["step"] for row in records(tmp_path, "two")] == [row["step"] for row in two]  # no row missing, none twice
    resumed = ordered(state(tmp_path, "two"))
    assert all(torch.equal(value, resumed[key]) for key, value in after.items())
