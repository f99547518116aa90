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
from safetensors.torch import load_file, save_file

from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file, sha256_json
from coder_plugin.training import checkpoint, resume
from coder_plugin.training.loop import Trainer


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


def reseal(path: Path) -> None:
    """Write the manifest's checksums anew."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": sha256_file(path / name), "bytes": (path / name).stat().st_size}
    content = {field: value for field, value in manifest.items() if field != "manifest_sha256"}
    (path / "manifest.json").write_text(json.dumps({**content, "manifest_sha256": sha256_json(content)}))


def edit_json(name: str, **fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads((path / name).read_text())
        for place, value in fields.items():
            node = content
            *parents, last = place.split("__")
            for parent in parents:
                node = node[int(parent) if isinstance(node, list) else parent]
            if value is REMOVED:
                node.pop(last)
            else:
                node[last] = value
        (path / name).write_text(json.dumps(content))

    return change


def edit_tensor(name: str, of: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / name)
        [key] = [each for each in tensors if each.endswith(of)][:1]
        tensors[key] = to(tensors[key]).contiguous()
        save_file(tensors, path / name)

    return change


REMOVED = object()
MANIFEST = {
    "a step below zero": ({"step": -1}, "step -1"),
    "an epoch that is a text": ({"epoch": "one"}, "epoch 'one'"),
    "an epoch that is a list": ({"epoch": [1]}, r"epoch \[1\]"),
    "no ranks": ({"world_size": 0}, "world_size 0"),
    "a config that is a list": ({"config": [1]}, "'config' is not an object"),
    "an objective that is a text": ({"objective": "dcl"}, "'objective' is not an object"),
    "terms that are a number": ({"objective": {"terms": 7, "heads": {}}}, "a list of terms"),
    "results that are a list": ({"best": ["x"]}, "'best' is not an object"),
    "a best sum that is a text": ({"best": {"rsum": "9", "epoch": 1, "step": 1}}, "'best' has rsum='9'"),
    "a best checkpoint that is a number": ({"best": {"rsum": 9, "epoch": 1, "step": 1, "checkpoint": 3}}, "checkpoint='3'"),
    "results without their step": ({"last": {"rsum": 9, "epoch": 1}}, "'last' has step="),
    "a backbone that is a list": ({"backbone": [1]}, "'backbone' is not an object"),
}


@pytest.mark.parametrize("case", MANIFEST)
def test_a_manifest_of_other_types(run: tuple[Trainer, Path], tmp_path: Path, case: str) -> None:
    fields, text = MANIFEST[case]
    path = tmp_path / "step_1"
    shutil.copytree(run[1], path)
    edit_json("manifest.json", **fields)(path)
    reseal(path)
    with pytest.raises(CoderError, match=f"manifest.json is not the manifest of a coder_plugin checkpoint: .*{text}"):
        checkpoint.verify(path)
    problems: list[str] = []
    assert checkpoint.checkpoints(tmp_path, problems=problems) == [] and len(problems) == 1
    assert checkpoint.newest(tmp_path) is None and path.is_dir()


PARTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no terms": (edit_json("manifest.json", objective={}), "the checkpoint does not have the form .*KeyError"),
    "a term that is a number": (edit_json("manifest.json", objective={"terms": [3], "heads": {}}), "does not have the form"),
    "an option of another kind": (edit_json("manifest.json", config={"optim": {"lr": "fast"}}), "cannot resume with other"),
    "an unknown option": (edit_json("manifest.json", config={"optim": {"x": 1}}), "unknown|has no"),
    "no model": (lambda path: (path / "model.json").write_text("{}"), "does not mention the tensor"),
    "a model that is a list": (edit_json("model.json", **{"$": "list"}), "malformed|uses 'list'"),
    "weights of another shape": (edit_tensor("model.safetensors", "proj", lambda t: t[:1]), "of another model"),
    "no groups of parameters": (edit_json("optimizer.json", param_groups=REMOVED), "does not mention the tensor"),
    "a rate that is a text": (edit_json("optimizer.json", param_groups__0__lr="fast"), r"param_groups\[0\].lr is a str"),
    "a group with another name": (edit_json("optimizer.json", param_groups__0__x=1), r"param_groups\[0\] has \['x'\]"),
    "a moment of another shape": (
        edit_tensor("optimizer.safetensors", "exp_avg", lambda tensor: tensor.reshape(-1)[:1]),
        "exp_avg is not of the shape",
    ),
    "a schedule with another attribute": (edit_json("schedule.json", step="x"), r"schedule has \['step'\]"),
    "a schedule of another type": (edit_json("schedule.json", last_epoch="x"), "schedule.last_epoch is a str"),
    "an average of another shape": (edit_tensor("average.safetensors", "proj", lambda t: t[:1]), "the checkpoint's average"),
    "random states of another kind": (
        lambda path: (path / "rng-rank0.json").write_text('{"torch": 1, "numpy": 2, "python": 3}'),
        "does not mention the tensor",
    ),
}


@pytest.mark.parametrize("case", PARTS)
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


def test_memory_errors_pass() -> None:
    from coder_plugin.training.saved_state import reading

    with pytest.raises(torch.OutOfMemoryError), reading("x"):
        raise torch.OutOfMemoryError("no memory")
    with pytest.raises(CoderError, match="x does not have the form that this version saves .KeyError: 'a'"), reading("x"):
        {}["a"]
