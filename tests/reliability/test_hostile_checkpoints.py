"""Checkpoints that somebody has changed and whose checksums were written anew: each is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file, sha256_json
from coder_plugin.training import checkpoint, resume
from coder_plugin.training.loop import Trainer
from tests.few import few


def config(tiny_model: str, folder: Path, **options: Any) -> dict[str, Any]:
    made = {"model": tiny_model, "logs": str(folder), "name": "run", "batch_size": 8, "train_num_samples": 16, "epochs": 2}
    return {**made, "workers": 0, "val_frequency": 0, "warmup": 0, "ema_decay": 0.9, "report": False, **options}


@pytest.fixture(scope="module")
def run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A run of four steps: its trainer, ready to restore, and its newest checkpoint."""
    folder = tmp_path_factory.mktemp("logs")
    Trainer.from_config(config(tiny_model, folder)).run()
    trainer = Trainer.from_config(config(tiny_model, folder, epochs=3, resume="latest"))
    trainer.setup_optimizer()
    return trainer, checkpoint.newest(folder / "run" / "checkpoints")


def reseal(path: Path, **fields: Any) -> None:
    """Change fields of the manifest and write its checksums anew."""
    manifest = json.loads((path / "manifest.json").read_text()) | fields
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": sha256_file(path / name), "bytes": (path / name).stat().st_size}
    content = {field: value for field, value in manifest.items() if field != "manifest_sha256"}
    (path / "manifest.json").write_text(json.dumps({**content, "manifest_sha256": sha256_json(content)}))


def edit(file: str, *place: Any, to: Any) -> Callable[[Path], None]:
    """Replace one value of a file, or remove it with ``to=REMOVED``; a function is applied to the value."""

    def change(path: Path) -> None:
        state = node = torch.load(path / file, weights_only=True)
        *parents, last = place
        for parent in parents:
            node = node[parent]
        if to is REMOVED:
            del node[last]
        else:
            node[last] = to(node[last]) if callable(to) else to
        torch.save(state, path / file)

    return change


REMOVED = object()
RESULTS = {"rsum": 9, "epoch": 1, "step": 1}
MANIFEST = {
    "a step below zero": {"step": -1},
    "an epoch that is a text": {"epoch": "one"},
    "an epoch that is a list": {"epoch": [1]},
    "no ranks": {"world_size": 0},
    "a config that is a list": {"config": [1]},
    "an objective that is a text": {"objective": "dcl"},
    "terms that are a number": {"objective": {"terms": 7, "heads": {}}},
    "results that are a list": {"best": ["x"]},
    "a best sum that is a text": {"best": {**RESULTS, "rsum": "9"}},
    "a best checkpoint that is a number": {"best": {**RESULTS, "checkpoint": 3}},
    "results without their step": {"last": {"rsum": 9, "epoch": 1}},
    "a backbone that is a list": {"backbone": [1]},
    "accuracies that are lists": {"zero_shot": {"step": 8, "zeroshot_top1": [1]}},
    "seconds without end": {"seconds": float("inf")},
}


@pytest.mark.parametrize("case", MANIFEST)
def test_a_manifest_of_other_types(run: tuple[Trainer, Path], tmp_path: Path, case: str) -> None:
    path = tmp_path / "step_1"
    shutil.copytree(run[1], path)
    reseal(path, **MANIFEST[case])
    [name] = MANIFEST[case]
    with pytest.raises(CoderError, match=f"manifest.json is not the manifest of a coder_plugin checkpoint: its '{name}' is "):
        checkpoint.verify(path)
    problems: list[str] = []
    assert checkpoint.checkpoints(tmp_path, problems=problems) == [] and len(problems) == 1
    assert checkpoint.newest(tmp_path) is None and path.is_dir()


def fields(**changed: Any) -> Callable[[Path], None]:
    return lambda path: reseal(path, **changed)


def state(*place: Any, to: Any) -> Callable[[Path], None]:
    return edit("state.pt", *place, to=to)


def first_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].clone()


PROJ, MOMENT = "visual.proj", ("optimizer", "state", 0, "exp_avg")
FORM = "does not have the form that this version saves"
PARTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no terms": (fields(objective={}), f"{FORM} .KeyError"),
    "a term that is a number": (fields(objective={"terms": [3], "heads": {}}), FORM),
    "an option of another kind": (fields(config={"optim": {"lr": "fast"}}), "cannot resume with other"),
    "an unknown option": (fields(config={"optim": {"x": 1}}), "unknown|has no"),
    "no model": (state("model", to=REMOVED), f"{FORM} .KeyError: 'model'"),
    "a model that is a list": (state("model", to=[1]), FORM),
    "a weight that is a text": (state("model", PROJ, to="x"), FORM),
    "weights of another shape": (state("model", PROJ, to=first_row), "belongs to another model"),
    "sparse weights": (state("model", PROJ, to=torch.Tensor.to_sparse), f"{FORM}|belongs to another model"),
    "no groups of parameters": (state("optimizer", "param_groups", to=REMOVED), f"{FORM} .KeyError: 'param_groups'"),
    "a moment of another shape": (state(*MOMENT, to=first_row), "exp_avg has not its parameter's shape"),
    "a moment that is a list": (state(*MOMENT, to=[1]), f"{FORM} .AttributeError"),
    "a parameter too many": (state("optimizer", "state", 10_000, to={"exp_avg": torch.ones(1)}), f"{FORM} .AttributeError"),
    "a group too many": (state("optimizer", "param_groups", to=lambda groups: groups * 2), "optimizer does not fit this run"),
    "a schedule of another type": (state("schedule", to="x"), f"{FORM} .TypeError"),
    "an average of another shape": (state("average", PROJ, to=first_row), f"{FORM} .ValueError: the average of {PROJ}"),
    "other random states": (edit("rank0.pt", "rng", to={"torch": 1, "numpy": 2, "python": 3}), FORM),
    "no random states": (edit("rank0.pt", "rng", to=REMOVED), f"{FORM} .KeyError: 'rng'"),
}


@pytest.mark.parametrize("case", few(PARTS))
def test_parts_of_other_types(run: tuple[Trainer, Path], tmp_path: Path, case: str) -> None:
    trainer, newest = run
    change, text = PARTS[case]
    path = tmp_path / "step_1"
    shutil.copytree(newest, path)
    change(path)
    reseal(path)
    checkpoint.verify(path)  # the checksums match
    with pytest.raises(CoderError, match=text):
        config = replace(trainer.config, run=replace(trainer.config.run, resume=str(path)))
        state = resume.find_state(config, path)
        assert state is not None
        resume.restore_model(trainer, state)
        resume.restore_training(trainer, state)


def test_an_unchanged_one_is_restored(run: tuple[Trainer, Path]) -> None:
    trainer, newest = run
    state = resume.find_state(trainer.config, newest.parent.parent)
    assert state is not None
    resume.restore_model(trainer, state)
    resume.restore_training(trainer, state)
    assert trainer.step == 4
