"""``--report-to``: every tracker of accelerate's, and those that are registered with it, get the configuration and each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator, tracking
from accelerate.tracking import GeneralTracker, TensorBoardTracker
from accelerate.utils import LoggerType

from coder_plugin import CoderError, Trainer
from coder_plugin.training.trackers import tracker_names


class Noted(GeneralTracker):
    """Keeps what it is given."""

    name = "noted"
    requires_logging_directory = False
    made: list[Noted] = []

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self.project, self.options, self.rows, self.ended = project, options, [], False
        Noted.made.append(self)

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append({"step": step, **values})

    def finish(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "noted", Noted)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    Noted.made.clear()


def train(tmp_path: Path, model: str, trackers: str, **options: Any) -> Trainer:
    config = {
        "dataset_type": "scenes", "train_num_samples": 16, "batch_size": 4, "epochs": 2, "workers": 0, "val_frequency": 0,
        "log_every_n_steps": 1, "logs": str(tmp_path), "name": "run", "report_to": trackers, **options,
    }  # fmt: skip
    trainer = Trainer(model=model, loss="dcl", train="scenes", config=config)
    trainer.run()
    return trainer


def test_a_registered_tracker_and_tensorboard_get_the_same(tmp_path, tiny_model):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = train(tmp_path, tiny_model, "noted, tensorboard", wandb_project_name="shapes")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (noted,) = Noted.made
    assert noted.rows == rows and len(rows) == 8 and [row["step"] for row in rows] == list(range(8))
    assert noted.project == "shapes" and noted.options == {} and noted.ended
    assert noted.config["lr"] == 1e-3 and noted.config["batch_size"] == 4 and noted.config["loss"] == "dcl"
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(8))
    assert [event.value for event in events.Scalars("dcl_loss")] == pytest.approx([row["dcl_loss"] for row in rows])
    settings = yaml.safe_load(next((tmp_path / "run").rglob("hparams.yml")).read_text())
    assert settings["batch_size"] == 4
    assert trainer.accelerator.get_tracker("noted") is noted
    assert isinstance(trainer.accelerator.get_tracker("tensorboard"), TensorBoardTracker)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("wandb", {"name": "run", "dir": "{}/run"}),
        ("mlflow", {"run_name": "run"}),
        ("trackio", {"name": "run"}),
        ("swanlab", {"experiment_name": "run"}),
        ("clearml", {"task_name": "run"}),
        ("dvclive", {"dir": "{}/run/dvclive"}),
        ("comet_ml", {}),
    ],
)
def test_services_are_told_the_project_and_the_name_of_the_run(tmp_path, monkeypatch, name, option):
    from coder_plugin.training.trackers import start_tracker

    accepted = tracking.LOGGER_TYPE_TO_CLASS[name]("project", **{key: value.format(tmp_path) for key, value in option.items()})
    assert accepted.name == name  # accelerate's own takes them too
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, Noted)
    start_tracker(Accelerator(cpu=True), name, tmp_path / "run", project="coder-plugin", config={"lr": 1.0})
    (made,) = Noted.made
    assert made.project == "coder-plugin" and made.config == {"lr": 1.0}
    assert made.options == {key: value.format(tmp_path) for key, value in option.items()}


def test_names_of_trackers(monkeypatch):
    assert tracker_names("") == [] and tracker_names("tensorboard,noted  tensorboard") == ["tensorboard", "noted"]
    assert tracker_names("all") == ["noted", "tensorboard"]
    known = {"aim", "clearml", "comet_ml", "dvclive", "mlflow", "noted", "swanlab", "tensorboard", "trackio", "wandb"}
    with pytest.raises(CoderError, match="unknown tracker mlfow; did you mean 'mlflow'. known: (.*), all") as refused:
        tracker_names("tensorboard,mlfow")
    assert known <= set(str(refused.value).partition("known: ")[2].split(", "))
    with pytest.raises(CoderError, match=r"comet_ml is not installed \(pip install comet-ml\)"):
        tracker_names("comet_ml,tensorboard")
    monkeypatch.setattr(tracking, "_available_trackers", [])
    monkeypatch.delitem(tracking.LOGGER_TYPE_TO_CLASS, "noted")
    with pytest.raises(CoderError, match=r"--report-to all: tensorboard is not installed \(pip install tensorboard\)"):
        tracker_names("all")


def test_an_unknown_tracker_is_refused_before_a_model_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("coder_plugin.training.prepare.make_model", lambda *_, **__: pytest.fail("a model is built"))
    with pytest.raises(CoderError, match="unknown tracker tensorbord; did you mean 'tensorboard'"):
        Trainer(model="coder-tiny", loss="dcl", train="scenes", config={"report_to": "tensorbord", "logs": str(tmp_path)})
