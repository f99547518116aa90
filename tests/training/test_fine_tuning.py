"""Fine-tuning: a teacher in whole runs, zero-shot accuracy while training, and what is warned of.

Answers to openai/CLIP #150 and #161 and mlfoundations/open_clip #1093 (docs/faq.md).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from coder_plugin import Callback, Trainer, create_loss, create_model
from coder_plugin.cli import build_parser, main
from coder_plugin.cli.train import summary
from coder_plugin.data.source import ItemSource
from coder_plugin.doctor import run as doctor_run
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.report import curves
from coder_plugin.training import fine_tuning
from coder_plugin.training.run_folder import RunFolder
from tests import saved
from tests.doctor.made import examine
from tests.training.test_trainer import run_killed_after


@pytest.fixture(scope="module")
def weights(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights to start from."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "tiny.pt"
    torch.save(create_model(tiny_model, loss="clip").state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six classes of one picture."""
    root = tmp_path_factory.mktemp("classes")
    for number, name in enumerate(("red", "green", "blue", "white", "black", "grey")):
        (root / name).mkdir()
        Image.new("RGB", (64, 64), (40 * number, 255 - 30 * number, 10)).save(root / name / "0.png")
    return str(root)


@pytest.fixture
def config(tiny_model: str, weights: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(name: str = "run", **options: Any) -> dict[str, Any]:
        defaults = {
            "model": tiny_model, "pretrained": weights, "dataset_type": "scenes", "logs": str(tmp_path), "name": name,
            "batch_size": 8, "train_num_samples": 32, "epochs": 2, "workers": 0, "val_frequency": 0, "warmup": 2, "lr": 1e-3,
            "log_every_n_steps": 1, "templates": "simple" if "zeroshot" in options else None,
        }  # fmt: skip
        return {**defaults, **options}

    return make


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return saved.weights(newest)


def rows(folder: Path, key: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in lines if key in row}


@pytest.mark.parametrize(
    "options",
    [{"lock_text": True, "accum_freq": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"lora_rank": 2}))],
    ids=str,
)
def test_a_run_with_a_teacher_resumes_bit_for_bit(config: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Also where the weights that it started from are gone: the checkpoint holds what is needed of them."""
    options = {"loss": "clip + distill(teacher=base) + distill(kind=similarity)", "epochs": 1, **options}
    Trainer.from_config(config("whole", **options)).run()
    run_killed_after(config("broken", save_every_steps=1, **options), 1)
    gone = {"pretrained": None} if len(options) == 2 else {}
    Trainer.from_config(config("broken", resume="latest", **{**options, **gone})).run()
    whole, broken = tensors(tmp_path / "whole"), tensors(tmp_path / "broken")
    assert whole.keys() == broken.keys() and all(torch.equal(whole[key], broken[key]) for key in whole)
    distances = rows(tmp_path / "whole", "distill_loss")
    assert distances == rows(tmp_path / "broken", "distill_loss")
    assert distances[0] < 1e-5 < list(distances.values())[-1]  # the student starts at its teacher
    taught = {name for name in whole if ".teacher." in name}
    twice = [name for name in taught if "token_embedding" in name]
    assert bool(twice) == (len(options) == 2), "what is locked is not saved twice"
    exported = load_file(tmp_path / "whole/export/last/open_clip_model.safetensors")
    assert exported and not any("teacher" in name for name in exported)


def test_another_teacher_must_be_the_same_one_on_resume(config: Any, tmp_path: Path) -> None:
    few = {"train_num_samples": 8, "lr_scheduler": "const"}
    first = {"loss": "clip", "pretrained": None, "seed": 7, **few}
    Trainer.from_config(config("first", epochs=1, **first)).run()
    teacher = tmp_path / "first/export/last"
    loss = f"clip + distill(teacher='{teacher}')"
    trainer = Trainer.from_config(config(loss=loss, epochs=1, **few))
    assert trainer.model.coder.heads["teacher"].notes() == [
        f"features stay near those of {teacher}, which costs another forward pass of both towers"
    ]
    trainer.run()
    kept = [name for name in tensors(tmp_path / "run") if ".teacher." in name]
    assert kept == ["coder.heads.teacher.digest"]
    Trainer.from_config(config(loss=loss, epochs=2, resume="latest", **few)).run()
    Trainer.from_config(config("first", epochs=2, resume="latest", **first)).run()
    with pytest.raises(CoderError, match="the teacher's weights are not those that the run began with"):
        Trainer.from_config(config(loss=loss, epochs=3, resume="latest", **few)).run()


@pytest.mark.slow
def test_a_teacher_holds_what_the_weights_know(config: Any, tmp_path: Path) -> None:
    """openai/CLIP #161: accuracy falls while fine-tuning. A run with the teacher ends nearer to where it started."""
    far = {}
    losses = {"clip": "clip", "features": "clip + 3*distill", "similarity": "clip + 3*distill(kind=similarity)"}
    for name, loss in losses.items():
        trainer = Trainer.from_config(config(name, loss=loss, epochs=2))
        trainer.run()
        before = create_model(trainer.config.model.name, loss="clip", pretrained=trainer.config.model.pretrained).eval()
        image = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            features = trainer.model.eval().embed_image(image), before.embed_image(image)
        far[name] = float((features[0] - features[1]).square().sum(1).mean())
    assert far["features"] < 0.5 * far["clip"] and far["similarity"] < far["clip"], far


# Zero-shot accuracy while training


def few(trainer: Any) -> ItemSource:
    """A few of the scenes, to be quick."""
    return ItemSource([item for _, item in itertools.islice(trainer.val.items(), 8)], name="scenes")


class Results(Callback):
    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []

    def on_evaluation_end(self, trainer: Any, results: Any) -> None:
        self.results.append(dict(results))


def test_zero_shot_accuracy_is_measured_while_training(config: Any, classes: str, tmp_path: Path, capsys: Any) -> None:
    """mlfoundations/open_clip #1093: the loss of what the weights knew is visible from the first epoch on."""
    few_steps = {"loss": "clip", "val_frequency": 2, "val_before": True, "epochs": 3, "train_num_samples": 16}
    few_steps["force_patch_dropout"] = 0.25
    options = config(zeroshot=classes, zeroshot_frequency=2, **few_steps)
    heard = Results()
    trainer = Trainer.from_config(options, callbacks=[heard])
    trainer.val = few(trainer)
    ended = trainer.run()
    printed = capsys.readouterr().out
    folder = tmp_path / "run"
    accuracies = rows(folder, "val/zeroshot_top1")
    assert list(accuracies) == [0, 4, 6] and list(rows(folder, "val/rsum")) == [0, 4, 6]  # after epochs 2 and 3
    assert len(rows(folder, "val/zeroshot_top5")) == len(rows(folder, "val/zeroshot_mean_per_class")) == 3
    said = re.findall(r"zero-shot: top-1 ([\d.]+) %(?: \(before the first step ([\d.]+) %: ([-+][\d.]+)\))?", printed)
    before, last = accuracies[0], accuracies[6]
    assert [float(each[0]) for each in said] == pytest.approx(list(accuracies.values()), abs=0.05)
    assert said[0][1:] == ("", "") and float(said[2][1]) == pytest.approx(before, abs=0.05)
    assert float(said[2][2]) == pytest.approx(last - before, abs=0.11)
    assert [result["zeroshot_top1"] for result in heard.results] == list(accuracies.values())
    assert all("rsum" in result for result in heard.results)
    assert "zero-shot: top-1" in summary(trainer, ended)
    assert f"--zeroshot {classes} --wise-ft 0 0.25 0.5 0.75 1" in summary(trainer, ended)

    run = RunFolder.read(folder)
    chart = next(figure for figure in curves.recalls(run) if figure.name == "Zero-shot accuracy, %")
    assert "top-1" in chart.note and "mean per class" in chart.note
    findings = {each.name: each for each in doctor_run.check_log(folder)}
    assert any(name in findings for name in ("run.zeroshot", "run.zeroshot.fallen")) and "run.recall.finite" not in findings
    build_parser().parse_args(["train", "--zeroshot", classes, "--open-clip", "zeroshot_frequency=2", "--templates", "simple"])

    plain = Trainer.from_config(config("plain", **few_steps))
    plain.val = few(plain)
    plain.run()  # what is measured changes nothing
    unmeasured = tensors(tmp_path / "plain")
    assert all(torch.equal(value, unmeasured[name]) for name, value in tensors(folder).items())


def test_what_cannot_be_classified_is_refused_before_a_model_is_made(
    config: Any, classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "one/class").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "one/class/0.png")
    monkeypatch.setattr("coder_plugin.training.prepare.make_training_model", lambda *_, **__: pytest.fail("too late"))
    for options, message in (
        ({"zeroshot": str(tmp_path / "one")}, "there is only one class"),
        ({"zeroshot": str(tmp_path / "nothing")}, "--zeroshot .*nothing"),
        ({"zeroshot": classes, "classnames": str(tmp_path / "names.txt")}, "cannot be read as names of classes"),
        ({"zeroshot": classes, "templates": str(tmp_path / "prompts.txt")}, "--templates .*prompts.txt"),
    ):
        with pytest.raises(CoderError, match=message):
            Trainer.from_config(config(**options))
    assert not (tmp_path / "run").exists()
    with pytest.raises(CoderError, match="--templates simple needs --zeroshot FOLDER"):
        resolve_config({"templates": "simple"})
    assert main(["train", "--zeroshot", str(tmp_path / "nothing")]) == 2
    assert "error: --zeroshot" in capsys.readouterr().err


# Advice


made = functools.cache(create_model)


def advice(options: dict[str, Any], loss: str = "dcl") -> dict[str, str]:
    config = resolve_config({"train_data": "a.csv", "batch_size": 64, **options})
    model = made(options["model"], loss=loss)
    found = fine_tuning.advice(config, model, create_loss(loss, model=model))
    return {each.name: f"{each.text}: {each.do}" for each in found}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--lr is not given, and the default, 0.0005, is the rate for training from scratch"),
        ({"lr": 1e-4}, "--lr 0.0001: with adamw, pretrained weights seldom bear more than 5e-05"),
        ({"lr": 1e-4, "opt": "timm/lion"}, "--lr 0.0001: with lion, pretrained weights seldom bear more than 1e-05"),
        ({"lr": 2e-5, "opt": "lion"}, "--lr 2e-05: with lion"),
        ({"lr": 1e-3, "layer_decay": 0.9}, "the median of the towers' layers: 0.00081"),
        ({"lr": 2e-5}, None),
        ({"lr": 6e-4, "layer_decay": 0.1}, None),  # the layers in the middle train at a fifth of it or less
        ({"lr": 0.1, "opt": "sgd"}, None),  # rates of another scale
        ({"lr": 1e-3, "pretrained": None}, None),
        ({"recipe": "coder-clip"}, None),
        ({"recipe": "finetune-clip"}, None),
    ],
)
def test_a_rate_above_what_pretrained_weights_bear(options: dict[str, Any], said: str | None, tiny_model: str) -> None:
    """openai/CLIP #150, mlfoundations/open_clip #1093: the rate, 1e-4 with Lion there, is the first thing to look at."""
    found = advice({"model": tiny_model, "pretrained": "weights.pt", **options})
    assert ("rate" in found) == (said is not None), found
    assert said is None or said in found["rate"]


@pytest.mark.parametrize(
    ("options", "warned"),
    [({"lr": 1e-5}, True), ({"lr": 5e-5}, True), ({"lr": 1e-4}, False), ({"lr": 1e-5, "opt": "sgd"}, False)],
)
def test_a_rate_for_pretrained_weights_on_random_ones(options: dict[str, Any], warned: bool, tiny_model: str) -> None:
    found = advice({"model": tiny_model, **options})
    assert ("start from random weights, and --lr" in found.get("rate", "")) is warned
    assert "rate" not in advice({"model": tiny_model, "name": "run", "resume": "latest", **options})
    assert "random" not in advice({"model": tiny_model, "pretrained": "weights.pt", **options}).get("rate", "")


def test_the_rate_of_adapters_and_of_locked_towers_is_their_own(config: Any, caplog: Any) -> None:
    for options, warned in (({"lora_rank": 2}, 0), ({"lock_image": True, "lock_text": True}, 0), ({"lock_text": True}, 1)):
        caplog.clear()
        Trainer.from_config(config(loss="clip", lr=1e-2, **options))
        assert caplog.text.count("pretrained weights seldom bear") == warned, options


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"lock_image": True, "pretrained": None}, True),
        ({"recipe": "coder-frozen", "loss": None, "pretrained": None}, True),
        ({"lock_image": True}, False),
        ({"lock_text": True, "pretrained": None}, False),
        ({"lora_rank": 2, "pretrained": None}, False),  # its adapters learn
    ],
)
def test_an_image_tower_frozen_at_random_weights(config: Any, options: dict[str, Any], warned: bool, caplog: Any) -> None:
    Trainer.from_config(config(**options))
    assert ("the image tower is frozen at random weights" in caplog.text) is warned


@pytest.mark.parametrize(
    ("loss", "options", "warned"),
    [
        ("clip", {"batch_size": 16}, True),
        ("clip + dcl", {"batch_size": 31}, True),
        ("clip", {"batch_size": 16, "accum_freq": 2}, False),
        ("clip", {"batch_size": 32}, False),
        ("clip", {"batch_size": 1}, False),  # another warning has it
        ("dcl", {"batch_size": 16}, False),
        ("clip + m_dcl", {"batch_size": 16}, False),  # the bank has more
    ],
)
def test_a_batch_too_small_for_clip(loss: str, options: dict[str, Any], warned: bool, tiny_model: str) -> None:
    found = advice({"model": tiny_model, **options}, loss)
    assert ("batch" in found) == warned
    assert not warned or f"the {options['batch_size']} captions of a step" in found["batch"]


def test_doctor_gives_the_same_advice(tiny_model: str, weights: str, classes: str, tmp_path: Path) -> None:
    options = {"model": tiny_model, "pretrained": weights, "dataset_type": "scenes", "train_num_samples": 64}
    found = {each.name: each for each in examine(**options, loss="clip", lr=1e-3, batch_size=8, zeroshot=classes)}
    assert found["recipe.rate"].level == found["recipe.batch"].level == "warning"
    assert found["zeroshot"].text == f"{classes}: 6 pictures of 6 classes, 80 prompts each"
    found = {each.name: each for each in examine(**options, loss="dcl", lr=1e-5, zeroshot=str(tmp_path))}
    assert found["recipe.scale_unread"].level == "note" and found["zeroshot.refused"].level == "problem"
    assert not {"recipe.rate", "recipe.batch", "recipe.logit_scale"} & found.keys()
    arguments = ["doctor", "--lr", "1e-3", "--opt", "lion", "--recipe", "finetune-clip", "--zeroshot", classes]
    build_parser().parse_args(arguments)


def test_the_recipe_runs(tiny_model: str, weights: str, tmp_path: Path) -> None:
    """openai/CLIP #150 asks for code to fine-tune with: this is the command."""
    rows_ = ["filepath,title"]
    for number in range(8):
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows_.append(f"{tmp_path / str(number)}.png,a square of shade {number}")
    (tmp_path / "train.csv").write_text("\n".join(rows_) + "\n")
    command = ["train", "--recipe", "finetune-clip", "--model", tiny_model, "--pretrained", weights]
    command += ["--train-data", str(tmp_path / "train.csv"), "--logs", str(tmp_path), "--name", "tuned"]
    assert main([*command, "--batch-size", "4", "--epochs", "1", "--workers", "0", "--no-report"]) == 0
    saved = json.loads((tmp_path / "tuned/config.json").read_text())
    assert saved["optim"]["lr"] == 1e-5 and saved["loss"]["expression"] == "finetune-clip"
    assert (tmp_path / "tuned/export/last/open_clip_model.safetensors").is_file()
