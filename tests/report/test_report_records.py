"""What is read of a run's folder, and the state in its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.errors import CoderError
from coder_plugin.memory.bank import CoupledBank
from coder_plugin.memory.kmeans import OnlineKMeans
from coder_plugin.report import facts
from coder_plugin.report.run import report_run
from coder_plugin.report.state import state_blocks
from coder_plugin.training.run_folder import RunFolder, curve, metric_names


def write_metrics(folder: Path, *records: object) -> None:
    folder.mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_resumed_runs_later_records_are_true(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"step": 0, "val/rsum": 1.0, "val/epoch": 0},
        *({"step": step, "loss": 1.0 * step} for step in range(0, 50, 10)),
        {"step": 40, "val/rsum": 30.0, "val/epoch": 1},
        *({"step": step, "loss": 100.0 + step} for step in (25, 35)),
        {"step": 36, "val/rsum": 20.0, "val/epoch": 1},
    )
    run = RunFolder.read(tmp_path)
    assert curve(run.steps, "loss") == ([0, 10, 20, 25, 35], [0.0, 10.0, 20.0, 125.0, 135.0])
    assert curve(run.evaluations, "rsum") == ([0, 36], [1.0, 20.0])
    assert run.results("best")["rsum"] == 20.0 == run.results("last")["rsum"]


def test_what_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 0, "loss": 1.0, "nothing": None}, '{"step": 1, "lo', "[1]", {"loss": 2.0})
    (tmp_path / "config.json").write_text("{")
    run = RunFolder.read(tmp_path)
    assert curve(run.steps, "loss") == ([0], [1.0]) and metric_names(run.steps) == ["loss"]
    told = "; ".join(map(str, run.problems))
    assert "3 lines cannot be read" in told and "config.json: cannot be read as" in told and "plan.json: No such file" in told
    assert "no complete checkpoint" in told and run.config is None


def test_a_damaged_plan_is_a_problem(tmp_path: Path) -> None:
    plan = {"model": "RN50", "heads": None, "batch": {"global per step": "many"}, "parameters": 5, "trainable": "all"}
    plan |= {"training data": {"name": "a", "images": "2k"}, "validation data": None, "ranks": [1]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = RunFolder.read(tmp_path)
    assert run.plan == {"model": "RN50", "parameters": 5, "validation data": None}
    assert [each.text for each in run.problems if each.file == "plan.json"] == [
        "its 'heads' is not an object",
        "in its 'batch', 'global per step': not a number",
        "its 'trainable' is not a number",
        "in its 'training data', 'images': not a number",
        "its 'ranks' is not a number",
    ]
    assert run.heads == {} and run.pairs_per_step is None
    assert facts.describe(run)["model"] == "RN50"


@pytest.mark.parametrize("content", ["{", "[]", '{"no_such_option": 1}'])
def test_a_damaged_configuration_does_not_stop_a_report(tmp_path: Path, content: str) -> None:
    write_metrics(tmp_path, {"step": 0, "loss": 1.0})
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in report_run(tmp_path, {}).read_text()
    with pytest.raises(CoderError, match="config.json cannot be read"):
        report_run(tmp_path, {"val_data": "scenes"})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="not a training run's folder"):
        RunFolder.read(tmp_path)
    with pytest.raises(CoderError, match="not a training run's folder"):
        RunFolder.read(tmp_path / "absent")


def test_state_is_the_checkpoints(tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    bank, centres = CoupledBank(32, 4), OnlineKMeans(8, 4)
    tensors: dict[str, Any] = {"visual.weight": torch.zeros(3)}
    monkeypatch.setattr("coder_plugin.report.state._model_state", lambda path: tensors)
    drawn: list[Any] = []
    monkeypatch.setattr("coder_plugin.report.state.histogram", lambda values, **_: drawn.append(values))
    run = RunFolder(tmp_path, {"batch_size": 6}, manifest={"world_size": 1}, checkpoint=tmp_path)
    with pytest.raises(CoderError, match="keeps no banks and no centres"):
        state_blocks(run)
    for step in range(3):
        keys = torch.nn.functional.normalize(torch.randn(6, 4), dim=1)
        bank.enqueue(keys, 2 * keys, torch.arange(6) + 2 * step)
    centres.recluster(torch.nn.functional.normalize(torch.randn(30, 4), dim=1))
    tensors |= {f"coder.heads.momentum.bank.{name}": value for name, value in bank.state_dict().items()}
    tensors |= {f"coder.heads.prototypes.centres.{name}": value for name, value in centres.state_dict().items()}
    passed = {"passed": torch.tensor(18), "changed": torch.tensor(0.25), "restarted": torch.tensor(3)}
    tensors |= {f"coder.heads.prototypes.{name}": value for name, value in passed.items()}
    blocks = state_blocks(run)
    assert [each["heading"] for each in blocks if "heading" in each] == ["momentum: banks", "prototypes: centres"]
    banks, sizes = (dict(reversed(tile) for tile in each["tiles"]) for each in blocks if "tiles" in each)
    assert banks["of 32 entries are filled"] == "18" and banks["different images among them"] == "10"
    assert banks["steps since the oldest entry was written (6 entries a step)"] == "2"
    norms = [banks[f"norms of the {side} entries: any other than 1 is a fault"] for side in ("image", "text")]
    assert norms == ["1.000–1.000", "2.000–2.000"]
    assert list(sizes.values()) == ["8", "25 %", "3", "1.000–1.000"]
    assert drawn == [[2] * 6 + [1] * 6 + [0] * 6, centres.counts.double().tolist()]
    tensors["coder.heads.prototypes.centres.ready"] = torch.tensor(False)
    assert state_blocks(run)[-1]["tiles"] == [("8", "centres, not yet clustered")]
