"""The trainer from objects: a model, terms, items, callbacks and an overridden step; where its options come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable as Function
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from coder_plugin import Callback, Trainer, create_loss, create_model, register, registry
from coder_plugin.cli import main
from coder_plugin.data.item import Item
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import Head
from coder_plugin.pretrained.options import resolve_config

STEPS = 3  # steps of an epoch


class Spread(nn.Module):
    """A plain module as a term: the variance of the features."""

    requires = ("image_features", "text_features")

    def forward(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return -(image_features.var(0).sum() + text_features.var(0).sum())


@pytest.fixture
def registered_spread() -> Iterator[None]:
    register("losses", "spread", Spread)
    yield
    registry.unregister("losses", "spread")


@pytest.fixture
def options(tmp_path: Path, tiny_model: str) -> Function[..., dict[str, Any]]:
    def make(name: str, **changes: Any) -> dict[str, Any]:
        defaults = {
            "logs": str(tmp_path), "name": name, "batch_size": 8, "epochs": 2, "workers": 0, "val_frequency": 0,
            "warmup": 2, "log_every_n_steps": 1, "train_num_samples": 8 * STEPS,
        }  # fmt: skip
        return {**defaults, **changes}

    return make


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return open_scenes("train", count=8 * STEPS)


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[float, float]:
    return {record["step"]: record["loss"] for record in records(folder) if "loss" in record}


# Objects


def table(folder: Path, split: str, count: int) -> tuple[Path, list[Item]]:
    """A table of pictures with two captions each, and the items that it names."""
    path, items = folder / f"{split}.csv", []
    rows = ["filepath\ttitle"]
    for index, scene in enumerate(open_scenes(split, count=count)):
        file = folder / f"{split}-{index}.png"
        scene.load().save(file)
        rows += [f"{file.name}\t{caption}" for caption in scene.captions[:2]]
        items.append(Item(file.name, scene.captions[:2], partial(Image.open, file)))
    path.write_text("\n".join(rows) + "\n")
    return path, items


def test_objects_train_as_their_names_do(tmp_path, tiny_model, options, registered_spread):
    """To the last bit of every loss and of every weight."""
    (train_file, train), (val_file, val) = table(tmp_path, "train", 8 * STEPS), table(tmp_path, "val", 6)
    named = {"model": tiny_model, "loss": "clip + 0.5*spread", "train_data": str(train_file), "val_data": str(val_file)}
    by_name = Trainer.from_config({**options("names", val_frequency=2), **named})
    named_results = by_name.run()
    loss = ["clip", (0.5, Spread())]
    torch.manual_seed(by_name.config.run.seed)
    model = create_model(tiny_model, loss=loss)
    config = options("objects", val_frequency=2)
    by_object = Trainer(model=model, loss=loss, train=train, val=val, config=config)
    results = by_object.run()
    assert by_object.model is model and isinstance(model, open_clip.CLIP)
    assert len(set(losses(tmp_path / "names").values())) == 2 * STEPS
    assert losses(tmp_path / "objects") == losses(tmp_path / "names")
    weights = by_name.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert results["last"] == named_results["last"]
    assert results["last"]["images"] == 6 and results["last"]["epoch"] == 2
    assert {"clip_loss", "spread_loss"} <= records(tmp_path / "objects")[1].keys()


def test_a_subclass_decides_what_a_step_does(tmp_path, tiny_model, options, items):
    batches_per_step = []

    class Doubled(Trainer):
        def training_step(self, batches):
            batches_per_step.append([sorted(batch) for batch in batches])
            metrics = super().training_step(batches)
            return {**metrics, "loss": 2 * metrics["loss"], "counted": float(len(batches_per_step))}

    plain = Trainer(model=tiny_model, loss="clip", train=items, config=options("plain", epochs=1))
    plain.run()
    Doubled(model=tiny_model, loss="clip", train=items, config=options("doubled", epochs=1)).run()
    assert batches_per_step == [[["image", "image_id", "text"]]] * STEPS
    doubled = [record for record in records(tmp_path / "doubled") if "loss" in record]
    assert [record["counted"] for record in doubled] == [1, 2, 3]
    assert [record["loss"] for record in doubled] == [2 * value for value in losses(tmp_path / "plain").values()]


def test_a_step_may_return_tensors_and_must_return_a_dict(tmp_path, tiny_model, options, items):
    class Tensors(Trainer):
        def training_step(self, batches):
            return {"loss": torch.tensor(float(self.step))}

    Tensors(model=tiny_model, loss="clip", train=items, config=options("tensors", epochs=1)).run()
    assert losses(tmp_path / "tensors") == {0: 0.0, 1: 1.0, 2: 2.0}

    class Nothing(Trainer):
        def training_step(self, batches):
            return None

    with pytest.raises(CoderError, match="training_step returned NoneType: it must return a dict"):
        Nothing(model=tiny_model, loss="clip", train=items, config=options("nothing", epochs=1)).run()


def test_a_step_written_from_its_parts(tiny_model, options, items):
    """Without the optimizer's part no weight changes."""

    class NoStep(Trainer):
        def training_step(self, batches):
            result = self.forward_backward(batches)
            norm = self.clip_gradients(result)
            self.optimizer.zero_grad()
            return {**result.metrics, "gradient_norm": norm}

    trainer = NoStep(model=tiny_model, loss="clip", train=items, config=options("idle", epochs=1))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.run()
    assert trainer.step == STEPS
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": Spread}, "Spread is a class: pass an instance"),
        ({"train": []}, "train items: no images"),
        (
            {"model": nn.Linear(2, 2)},
            'give the name of the model, which selects its tokenizer: config={"model": "ViT-B-32"}',
        ),
    ],
)
def test_mistakes(tiny_model, options, items, arguments, message):
    with pytest.raises(CoderError, match=message):
        Trainer(**{"model": tiny_model, "loss": "clip", "train": items, "config": options("run"), **arguments})


@pytest.mark.parametrize("read", ["check", "metrics"])
def test_a_norm_is_checked_after_the_figures_were_read(tiny_model, options, items, read):
    class ReadsEarly(Trainer):
        def training_step(self, batches):
            result = self.forward_backward(batches)
            if read == "check":
                result.check()
            assert result.losses and (read != "metrics" or result.metrics)
            if self.step == 1:
                next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float("nan"))
            norm = self.clip_gradients(result)
            assert norm == result.gradient_norm > 0
            self.optimizer_step(result)
            return {**result.metrics, "gradient_norm": norm}

    trainer = ReadsEarly(model=tiny_model, loss="clip", train=items, config=options("run", grad_clip_norm=1.0))
    with pytest.raises(CoderError, match="gradient of .* at step 1 .* the step was not taken"):
        trainer.run()


@pytest.mark.parametrize("result", ["of the step", "of another pass"])
def test_a_step_with_an_optimizer_step_of_its_own_writes_nothing_that_is_not_finite(tiny_model, options, items, result):
    kept = {}

    class Own(Trainer):
        def training_step(self, batches):
            found = self.forward_backward(batches)
            if result == "of another pass":
                self.forward_backward(batches)
            next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float("nan"))
            self.clip_gradients(found)
            kept.update({name: value.clone() for name, value in self.model.state_dict().items()})
            if result == "of the step":
                self.optimizer.step()
            else:
                self.optimizer_step(found)
            return found.metrics

    trainer = Own(model=tiny_model, loss="dcl + m_dcl", train=items, config=options("run"))
    with pytest.raises(CoderError, match="the step was not taken"):
        trainer.run()
    assert all(torch.equal(value, kept[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.following.steps == 0 and not trainer.following.stepping
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


def test_a_finished_model_trains_on_the_scenes(options):
    model = create_model("coder-tiny", loss="dcl")
    config = {**options("run"), "max_steps": 1, "train_num_samples": 64, "batch_size": 16, "val_frequency": 0}
    trainer = Trainer(model=model, loss="dcl", train="scenes", config={**config, "model": "coder-tiny"})
    trainer.run()
    assert trainer.step == 1 and trainer.model is model


# Callbacks


class Recorder(Callback):
    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_step_end(self, trainer, metrics):
        assert {"loss", "clip_loss", "gradient_norm"} <= metrics.keys()
        self.calls.append(("step", trainer.step))
        if trainer.step == self.stop_at:
            trainer.stop = True

    def on_evaluation_end(self, trainer, results):
        assert 0 <= results["rsum"] <= 600 and results["step"] == trainer.step
        self.calls.append(("evaluation", results["epoch"]))

    def on_save(self, trainer, folder):
        assert (folder / "state.pt").is_file() and (trainer.folder / "export" / "last").is_dir()
        self.calls.append(("save", folder.name))

    def on_train_end(self, trainer, results):
        assert results["folder"] == str(trainer.folder) and results["last"]["step"] == trainer.step
        self.calls.append(("end", results["last"]["epoch"]))


def test_callbacks_are_called_in_order(tiny_model, options, items):
    first, second = Recorder(), Recorder()
    config = options("run", val_frequency=1, val_before=True, save_every_steps=2)
    val = open_scenes("val", count=6)
    Trainer(model=tiny_model, loss="clip", train=items, val=val, config=config, callbacks=[first, second]).run()
    assert first.calls == [
        ("evaluation", 0),
        ("step", 1), ("step", 2), ("save", "step_00000002"), ("step", 3),
        ("evaluation", 1), ("save", "step_00000003"),
        ("step", 4), ("save", "step_00000004"), ("step", 5), ("step", 6), ("save", "step_00000006"),
        ("evaluation", 2), ("save", "step_00000006"),
        ("end", 2),
    ]  # fmt: skip
    assert second.calls == first.calls


@pytest.mark.slow
def test_stop_ends_the_run_as_if_the_step_were_the_last(tmp_path, tiny_model, options, items):
    recorder = Recorder(stop_at=2)
    config = options("run", val_frequency=1, epochs=5)
    val = open_scenes("val", count=6)
    trainer = Trainer(model=tiny_model, loss="clip", train=items, val=val, config=config, callbacks=[recorder])
    results = trainer.run()
    assert trainer.step == 2 and results["last"]["step"] == 2
    assert recorder.calls[-3:] == [("evaluation", 0), ("save", "step_00000002"), ("end", 0)], "no epoch is complete"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


# Options that a finished model or loss cannot take


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"set": ["dcl.mu=0.07"]}, "set: the loss is made and no longer takes options: give them when the loss is made"),
        ({"local_loss": True}, "local_loss: the loss is made"),
    ],
)
def test_a_loss_object_takes_no_options(tiny_model, options, items, changes, message):
    model = create_model(tiny_model, loss="dcl")
    with pytest.raises(CoderError, match=message):
        Trainer(model=model, loss=create_loss("dcl", model=model), train=items, config=options("run", **changes))


def test_a_loss_object_belongs_to_its_model(tiny_model, options, items):
    model, other = (create_model(tiny_model, loss="clip") for _ in range(2))
    loss = create_loss("clip", model=model)
    for wrong in (other, tiny_model):
        with pytest.raises(CoderError, match="the loss reads the heads of another model"):
            Trainer(model=wrong, loss=loss, train=items, config=options("run"))
    assert Trainer(model=model, loss=loss, train=items, config=options("run")).loss is loss


class Negated(Head):
    requires, provides = ("image_features", "text_features"), ("coder_image_negated", "coder_text_negated")
    feature_keys = ("coder_image_negated", "coder_text_negated")

    def __init__(self, backbone: Any) -> None:
        super().__init__()

    def forward(self, image_features: Tensor, text_features: Tensor) -> dict[str, Tensor]:
        return {"coder_image_negated": -image_features, "coder_text_negated": -text_features}


def test_a_loss_may_name_the_models_custom_heads(tiny_model, options, items):
    model = create_model(tiny_model, loss="clip + clip@negated", custom_heads=[Negated])
    trainer = Trainer(model=model, loss="clip + clip@negated", train=items, config=options("run", epochs=1))
    trainer.run()
    assert list(trainer.loss.terms) == ["clip", "clip_negated"] and trainer.step == STEPS


# Resuming


@pytest.mark.slow
def test_a_run_with_a_term_object_resumes_when_the_object_is_passed_again(tmp_path, tiny_model, options, items):
    """Also where two terms are of one class, and the weights are not those of the first."""

    def train(name: str, loss: Any, callbacks: list[Callback] | None = None, **changes: Any) -> None:
        config = options(name, **changes)
        Trainer(model=tiny_model, loss=loss, train=items, config=config, callbacks=callbacks or []).run()

    def loss() -> list[Any]:
        return ["clip", (0.5, Spread()), (0.25, Spread())]

    class Interrupt(Callback):
        def on_save(self, trainer: Any, folder: Path) -> None:
            raise KeyboardInterrupt

    train("uninterrupted", loss())
    with pytest.raises(KeyboardInterrupt):
        train("resumed", loss(), [Interrupt()], save_every_steps=2)
    assert len(losses(tmp_path / "resumed")) == 2
    with pytest.raises(CoderError, match=r"the term 'spread' was an object of .*:Spread, .*: pass the object again"):
        train("resumed", "clip", resume="latest")
    with pytest.raises(
        CoderError, match=r'trained with --loss "clip \+ 0.5\*spread \+ 0.25\*spread", this run asks for'
    ):
        train("resumed", ["clip", (0.5, Spread()), (0.3, Spread())], resume="latest")
    train("resumed", loss(), resume="latest")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "uninterrupted")


# Where options come from


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["train", "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_dry_run_says_where_each_value_comes_from(tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text("wd = 0.3\nlr = 7e-4\n[optim]\nepochs = 3\n[data]\ntrain_num_samples = 256\n")
    arguments = ["--recipe", "ascl-clip", "--config", str(file), "--lr", "2e-4", "--logs", str(tmp_path)]
    settings = plan(capsys, *arguments)["settings"]
    origins = {name: (entry["value"], entry["from"]) for name, entry in settings.items()}
    assert origins["workers"] == (2, "default")
    assert origins["batch_size"] == (64, "scenes")
    assert origins["loss"] == ("ascl-clip", "recipe ascl-clip")
    assert origins["wd"] == (0.3, str(file)) and origins["epochs"] == (3, str(file)), (
        "the file over the recipe and scenes"
    )
    assert origins["train_num_samples"] == (256, str(file))
    assert origins["lr"] == (2e-4, "flag"), "the flag over the file and the recipe"
    assert "pretrained" not in settings


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("region_dropout", 1.0, "--region-dropout must be < 1 (a fraction of all), got 1.0"),
        ("word_dropout", 1.5, "--word-dropout must be < 1 (a fraction of all), got 1.5"),
        ("max_regions", 0, "--max-regions must be at least 1, got 0"),
        ("text_lr_scale", -1.0, "--text-lr-scale must be >= 0, got -1.0"),
        ("context_blocks", 0, "--context-blocks must be at least 1, got 0"),
        ("lora_alpha", 0.0, "--lora-alpha must be > 0, got 0.0"),
    ],
)
def test_bounds(option, value, message):
    with pytest.raises(CoderError, match=re.escape(message)):
        resolve_config({option: value})


def test_a_runs_config_file_repeats_it(tmp_path, tiny_model, options, capsys):
    config = {**options("first", epochs=1, lr=3e-4), "model": tiny_model, "loss": "0.5*clip", "train_num_samples": 16}
    Trainer.from_config(config).run()
    file = tmp_path / "first" / "config.json"
    repeated = plan(capsys, "--config", str(file), "--name", "second")
    assert repeated["objective"] == "0.5*clip" and repeated["steps per epoch"] == 2 and repeated["epochs"] == 1
    assert repeated["settings"]["lr"] == {"value": 3e-4, "from": str(file)}
    assert repeated["settings"]["name"] == {"value": "second", "from": "flag"}
    assert not (tmp_path / "second").exists()
