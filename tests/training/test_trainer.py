"""Whole runs on a few built-in scenes: resuming, averaging, adapters, exports, and what a person may get wrong."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from coder_plugin.cli import main
from coder_plugin.config import flatten
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from coder_plugin.pretrained.open import load_model
from coder_plugin.report.callback import WriteReport
from coder_plugin.training import resume
from coder_plugin.training.loop import Trainer
from coder_plugin.training.plan import _name_frozen, frozen_parts, not_as_printed
from tests import saved
from tests.data.test_remote_shards import write_shards


@pytest.fixture(autouse=True)
def model(tiny_model, monkeypatch):
    """Every run below trains the tiny model unless it says otherwise."""
    monkeypatch.setitem(MODEL, "model", tiny_model)


MODEL: dict[str, str] = {}


def config(folder: Path, name: str = "run", **options) -> dict[str, Any]:
    defaults = {
        **MODEL,
        "logs": str(folder),
        "name": name,
        "batch_size": 8,
        "train_num_samples": 24,
        "epochs": 2,
        "workers": 0,
        "val_frequency": 0,
        "warmup": 2,
        "log_every_n_steps": 1,
    }
    return {**defaults, **options}


def weights(folder: Path, name: str = "run") -> dict[str, torch.Tensor]:
    newest = sorted((folder / name / "checkpoints").iterdir())[-1]
    return saved.weights(newest)


def losses(folder: Path, name: str = "run") -> dict[int, float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}


class Killed(Exception):
    pass


def run_killed_after(config: dict[str, Any], steps: int) -> None:
    trainer = Trainer.from_config(config)
    take = trainer.training_step

    def step(*args, **kwargs):
        if trainer.step == steps:
            raise Killed
        return take(*args, **kwargs)

    trainer.training_step = step
    with pytest.raises(Killed):
        trainer.run()


@pytest.mark.parametrize(("workers", "saved", "killed"), [pytest.param(0, 4, 5, marks=pytest.mark.slow), (2, 4, 5)])
def test_resumed_in_mid_epoch_equals_uninterrupted_bit_for_bit(tmp_path, workers, saved, killed):
    options = {"workers": workers, "loss": "dcl + clip", "ema_decay": 0.9, "force_patch_dropout": 0.25}
    Trainer.from_config(config(tmp_path, "whole", **options)).run()
    run_killed_after(config(tmp_path, "broken", save_every_steps=saved, **options), killed)
    Trainer.from_config(config(tmp_path, "broken", resume="latest", **options)).run()
    whole, broken = weights(tmp_path, "whole"), weights(tmp_path, "broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[key], broken[key]) for key in whole)
    assert losses(tmp_path, "whole") == losses(tmp_path, "broken")


def test_the_scenes_own_model_is_channels_last_when_it_is_trained_resumed_and_opened(tmp_path):
    """It is a ResNet; its weights' layout decides that of its activations. The file of an export does not show it."""
    options = {"model": "coder-tiny", "loss": "dcl", "epochs": 1, "train_num_samples": 16}
    trainer = Trainer.from_config(config(tmp_path, "whole", **options))
    trainer.run()
    images = torch.randn(2, 3, 64, 64)
    assert trainer.config.origins["channels_last"] == "scenes"
    assert trainer.model.visual.layer1[0].conv2.weight.stride(1) == 1  # channels are innermost
    run_killed_after(config(tmp_path, "broken", save_every_steps=1, **options), 1)
    resumed = Trainer.from_config(config(tmp_path, "broken", resume="latest", **options))
    resumed.run()
    whole, broken = weights(tmp_path, "whole"), weights(tmp_path, "broken")
    assert all(torch.equal(whole[key], broken[key]) for key in whole)
    opened = load_model(tmp_path / "whole")
    with torch.no_grad():
        for model in (trainer.model.eval(), resumed.model.eval()):
            assert opened.embed_image(images).equal(model.embed_image(images))


CODER = {
    "loss": "coder", "train_num_samples": 48,
    "set": ["momentum.bank_size=24", "prototypes.clusters=10", "prototypes.recluster=40", "concepts.warmup=6"],
}  # fmt: skip


@pytest.mark.slow  # test_region_training.py has all heads at once
@pytest.mark.parametrize("accum_freq", [1, 2])
def test_coder_resumes_bit_for_bit_banks_centres_and_momentum_included(tmp_path, accum_freq):
    options = {**CODER, "accum_freq": accum_freq, "ema_decay": 0.9, "epochs": 4 - accum_freq}
    Trainer.from_config(config(tmp_path, "whole", **options)).run()
    killed, saved = (14, 8) if accum_freq == 1 else (5, 4)
    run_killed_after(config(tmp_path, "broken", save_every_steps=saved, **options), killed)
    Trainer.from_config(config(tmp_path, "broken", resume="latest", **options)).run()
    whole, broken = weights(tmp_path, "whole"), weights(tmp_path, "broken")
    assert {f"coder.heads.momentum.bank.{name}" for name in ("image", "ids", "pointer")} <= whole.keys()
    assert whole["coder.heads.prototypes.centres.ready"] and whole["coder.heads.momentum.bank.count"] == 24
    assert all(torch.equal(whole[key], broken[key]) for key in whole)
    assert losses(tmp_path, "whole") == losses(tmp_path, "broken")


def test_coder_in_micro_batches_is_coder_in_one_batch(tmp_path):
    """Losses, banks and centres, where nothing is normalised over a batch."""
    settings = {**CODER, "set": [*CODER["set"], "concepts.norm=none"]}
    one = Trainer.from_config(config(tmp_path, "one", **settings, batch_size=16, epochs=1, opt="sgd", lr=0.05))
    two = Trainer.from_config(config(tmp_path, "two", **settings, batch_size=8, accum_freq=2, epochs=1, opt="sgd", lr=0.05))
    one.run(), two.run()
    for step, value in losses(tmp_path, "one").items():
        assert losses(tmp_path, "two")[step] == pytest.approx(value, rel=1e-4)
    for name in ("momentum.bank.image", "prototypes.centres.centres", "momentum.towers.model.visual.proj"):
        ours, theirs = (trainer.model.state_dict()[f"coder.heads.{name}"] for trainer in (one, two))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_run_ends_in_a_page_to_open(tmp_path, capsys, caplog, monkeypatch, with_report):
    """With the model's results where there are any; a fault in it is told of, and the run has ended well all the same."""
    report, short = [WriteReport()], {"epochs": 1, "train_num_samples": 8}
    Trainer.from_config(config(tmp_path, val_frequency=1, **short), callbacks=report).run()
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"report: {tmp_path / 'run' / 'report.html'}" in capsys.readouterr().out
    assert "the model after epoch 1" in page and page.count("data:image/jpeg") > 4
    Trainer.from_config(config(tmp_path, "blind", **short), callbacks=report).run()
    assert "--val-frequency 0" in (tmp_path / "blind" / "report.html").read_text()

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("coder_plugin.report.callback.write_report", broken)
    assert Trainer.from_config(config(tmp_path, "broken", **short), callbacks=report).run()["folder"].endswith("broken")
    assert "no report could be written" in caplog.text and not (tmp_path / "broken" / "report.html").exists()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in config(tmp_path, "without", **short).items()]
    assert main(["train", *flags, "--no-report"]) == 0
    assert caplog.text.count("no report") == 1


def test_a_coder_run_is_evaluated_from_its_export_alone(tmp_path, capsys):
    """With the concept level in the score, its vocabulary from the export, and a row for each beta."""
    from coder_plugin.concepts import scenes_vocabulary

    scenes_vocabulary().save(tmp_path / "words.safetensors")
    options = {**CODER, "set": CODER["set"][:2], "concepts": str(tmp_path / "words.safetensors")}
    result = Trainer.from_config(config(tmp_path, **options, val_frequency=1, epochs=1)).run()
    for file in tmp_path.glob("words.*"):
        file.unlink()
    target = tmp_path / "result.json"
    command = ["eval", str(tmp_path / "run"), "--export", "last", "--json", str(target)]
    assert main(command) == 0
    measured = json.loads(target.read_text())
    assert measured["rsum"] == pytest.approx(result["last"]["rsum"], abs=0.2)
    assert "i2t R@1" in capsys.readouterr().out
    assert main([*command, "--beta", "0.9", "1", "0"]) == 0
    rows = json.loads(target.read_text())
    assert [row["name"].split(", ")[1] for row in rows] == ["beta 0.9", "beta 1", "beta 0"]
    assert rows[0]["rsum"] == pytest.approx(measured["rsum"], abs=0.3)  # products of rescaled vectors: rounding
    assert main([*command, "--beta", "1.5"]) == 2
    Trainer.from_config(config(tmp_path, "plain", val_frequency=0, epochs=1)).run()
    assert main(["eval", str(tmp_path / "plain"), "--export", "last", "--beta", "0.5"]) == 2
    error = capsys.readouterr().err
    assert "--beta must be in [0, 1], got 1.5" in error and "this model scores with: no head" in error


@pytest.mark.slow
def test_momentum_copies_of_adapted_towers_follow_their_adapters(tmp_path):
    pytest.importorskip("peft")
    bank = ["momentum.bank_size=16"]
    trainer = Trainer.from_config(config(tmp_path, loss="dcl + m_dcl", set=bank, lora_rank=2, lr=1e-2, epochs=1))
    copied = trainer.model.coder.heads["momentum"].towers.model
    before = {name: value.clone() for name, value in copied.named_parameters() if "lora_B" in name}
    trainer.run()
    after = dict(copied.named_parameters())
    assert before and all(not torch.equal(value, after[name]) for name, value in before.items())


def test_exports_open_in_plain_open_clip_and_start_a_new_run_at_the_same_recall(tmp_path):
    import open_clip

    first = Trainer.from_config(config(tmp_path, "first", loss="clip", val_frequency=1, epochs=1))
    result = first.run()
    export = tmp_path / "first" / "export" / "last"
    plain = open_clip.create_model("tiny-vit-for-tests", pretrained=str(export / "open_clip_model.safetensors"))
    assert type(plain) is open_clip.CLIP
    ours = first.model.eval()
    image, text = torch.randn(2, 3, 64, 64), torch.randint(1, 400, (2, 40))
    assert torch.equal(plain.eval().encode_image(image), ours.encode_image(image))
    assert torch.equal(plain.encode_text(text), ours.encode_text(text))
    assert type(open_clip.create_model(f"local-dir:{export}")) is open_clip.CLIP

    second = Trainer.from_config(
        config(tmp_path, "second", loss="dcl", pretrained=str(export / "open_clip_model.safetensors"), val_frequency=1)
    )
    second.setup_optimizer()
    second._evaluate("before the first step")
    recall = {key: value for key, value in second.last.items() if key not in ("epoch", "step")}
    assert recall == {key: result["last"][key] for key in recall}


def test_a_run_on_relative_paths_is_evaluated_and_resumed_from_another_folder(tmp_path, capsys, monkeypatch):
    for folder in ("data", "other"):
        (tmp_path / folder).mkdir()
    write_shards(tmp_path / "data", size=8, side=32)
    monkeypatch.chdir(tmp_path)
    data = {"train_data": "data/s{0..1}.tar", "val_data": "./data/s1.tar", "train_num_samples": None}
    Trainer.from_config(config(tmp_path, **data, epochs=1, val_frequency=1)).run()
    saved = flatten(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert saved["train_data"] == f"{tmp_path}/data/s{{0..1}}.tar" and saved["val_data"] == f"{tmp_path}/data/s1.tar"
    monkeypatch.chdir(tmp_path / "other")
    assert main(["eval", str(tmp_path / "run")]) == 0
    flags = ["--config", str(tmp_path / "run" / "config.json"), "--resume", "latest", "--epochs", "2", "--no-report"]
    assert main(["train", *flags]) == 0
    changed = json.loads((tmp_path / "run" / "plan.json").read_text())["changed on resume"]
    assert {each["option"] for each in changed} == {"epochs"}
    monkeypatch.chdir(tmp_path)  # the same data as at first: no option has changed
    trainer = Trainer.from_config(config(tmp_path, **data, epochs=3, val_frequency=1, resume="latest"))
    manifest = {"step": 4, "config": saved}
    assert {each["option"] for each in resume.changed_options(trainer.config, manifest)} == {"epochs"}


def test_weight_average_is_what_is_exported(tmp_path):
    trainer = Trainer.from_config(config(tmp_path, ema_decay=0.5, epochs=1))
    trainer.run()
    exported = load_file(tmp_path / "run" / "export" / "last" / "open_clip_model.safetensors")
    name = "text_projection"
    assert torch.equal(exported[name], trainer.average.weights[name])
    assert not torch.equal(exported[name], dict(trainer.model.named_parameters())[name])


def test_lora_trains_adapters_and_exports_merged_weights(tmp_path):
    pytest.importorskip("peft")
    import open_clip

    trainer = Trainer.from_config(config(tmp_path, lora_rank=2, lr=1e-2, epochs=1))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.run()
    after = dict(trainer.model.named_parameters())
    # peft adds an attention's adapter and takes it away in each forward: its weight drifts by rounding, no more
    moved = {name for name in before if (before[name] - after[name]).abs().max() > 1e-5}
    assert any("lora_" in name for name in moved)
    assert not any("resblocks" in name and "lora_" not in name for name in moved)
    plain = open_clip.create_model(
        "tiny-vit-for-tests", pretrained=str(tmp_path / "run" / "export" / "last" / "open_clip_model.safetensors")
    ).eval()
    text = torch.randint(1, 400, (2, 40))
    with torch.no_grad():
        assert torch.allclose(plain.encode_text(text), trainer.model.eval().encode_text(text), atol=1e-5)


def test_best_and_last_and_chosen_checkpoints_are_kept(tmp_path):
    trainer = Trainer.from_config(config(tmp_path, epochs=4, save_frequency=3, train_num_samples=16))
    trainer.run()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_00000006", "step_00000008"]  # epoch 3 by --save-frequency, and the last


def test_a_run_is_not_overwritten_nor_resumed_with_another_recipe_or_optimizer(tmp_path):
    Trainer.from_config(config(tmp_path, epochs=1)).run()
    for options, message in (
        ({}, "holds a run already"),
        ({"loss": "clip", "resume": "latest"}, 'trained with --loss "dcl"'),
        ({"opt": "sgd", "accum_freq": 2, "resume": "latest"}, "--opt was adamw, is sgd; --accum-freq was 1, is 2"),
    ):
        with pytest.raises(CoderError, match=message):
            Trainer.from_config(config(tmp_path, epochs=2, **options)).run()


def test_an_optimizer_that_counts_in_its_groups_is_resumed(tmp_path):
    Trainer.from_config(config(tmp_path, epochs=1, opt="lamb")).run()
    trainer = Trainer.from_config(config(tmp_path, epochs=2, opt="lamb", resume="latest"))
    trainer.run()
    assert trainer.step == 6 == trainer.optimizer.param_groups[0]["step"]


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    arguments = ["train", "--dry-run", "--json", "--logs", str(tmp_path), "--loss", "3*dcl + clip", "--set", "dcl.mu=0.07"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["objective"] == "3*dcl(mu=0.07) + clip"
    assert plan["heads"] == {"ids": 0}
    assert plan["outputs"]["image_features"] == ["B", 128]
    assert plan["steps per epoch"] == 6000 // 64 and plan["frozen because no term reads them"] == []
    assert main([*arguments[:6], "dcl"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["frozen because no term reads them"] == ["logit_scale"] and plan["frozen"] == {}
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_what_a_recipe_freezes(tmp_path, capsys):
    arguments = ["train", "--dry-run", "--logs", str(tmp_path), "--recipe", "coder-frozen"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["frozen"].keys() == {
        "positional_embedding", "text_projection", "visual", "transformer", "token_embedding", "ln_final"
    }  # fmt: skip
    assert sum(plan["frozen"].values()) == plan["parameters"] - plan["trainable"] - 1  # and logit_scale, which no term reads
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert re.search(r"^frozen .*visual \([\d,]+ parameters\).*, logit_scale \(no term reads it\)$", text, re.M), text


def test_of_many_frozen_parts_the_plan_names_the_first():
    model = nn.ModuleDict({str(number): nn.Linear(1, 1) for number in range(9)})
    for layer in model.values():
        layer.weight.requires_grad_(False)
    model["8"].requires_grad_(False)
    parts = frozen_parts(model, ["8.bias", "7.weight"])
    assert parts == {f"{number}.weight": 1 for number in (*range(7), 8)}
    assert _name_frozen(parts, ["8.bias"]) == (
        ", ".join(f"{number}.weight (1 parameters)" for number in range(6)) + ", 2 more, 8.bias (no term reads it)"
    )


def test_the_plan_says_what_is_derived_and_what_the_paper_prints_otherwise(tmp_path, capsys):
    """On the built-in scenes: 6,000 images and 46 steps of 128 an epoch."""
    arguments = ["train", "--dry-run", "--logs", str(tmp_path), "--loss", "coder", "--epochs", "30", "--batch-size", "128"]
    arguments += ["--set", "m_dcl.mu=0.05"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    derived = {"momentum.bank_size": 6000 // 7, "momentum.momentum": 0.9, "prototypes.clusters": 2000}
    assert {name: plan["derived options"][name] for name in derived} == derived
    printed = {name: (each["value"], each["printed"]) for name, each in plan["not as printed"].items()}
    assert printed.pop("concepts.beta", None) is None and "dcl.mu" not in printed  # as printed
    assert printed == {
        "dcl.positive_weight": (1.0, "mu"), "dcl.mask_same_image": (True, False), "m_dcl.mu": (0.05, 0.1),
        "m_dcl.positive_weight": (1.0, "mu"), "m_dcl.mask_same_image": (True, False), "m_dcl.reverse": ("none", "all"),
        "concept_dcl.positive_weight": (2.0, "mu"), "concept_dcl.mask_same_image": (True, False),
        "concepts.decoder": ("linear", "mlp"), "concepts.tower_gradient": (0.0, 1.0),
        "momentum.momentum": (0.9, 0.995), "momentum.bank_size": (857, 4096),
        "prototypes.clusters": (2000, 10_000), "prototypes.scale": (4.0, 1.0),
    }  # fmt: skip
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert re.search(r"^derived .*momentum.bank_size=857", text, re.M)
    assert re.search(r"^not as in paper .*dcl.mask_same_image=true \(paper: false\)", text, re.M)


@pytest.mark.parametrize("validated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_of_max_steps_ends_without_an_evaluation_and_so_does_its_repetition(tmp_path, validated):
    options = {"logs": str(tmp_path), "name": "run", "batch_size": 4, "workers": 0, "max_steps": 2, "report": False}
    options["val_frequency"] = 0
    saves = []

    class Counted(Trainer):
        def _save(self):
            saves.append(self.step)
            super()._save()

    for resume_from in (None, "latest"):
        config = {**options, "resume": resume_from}
        val = open_scenes("val", count=4) if validated else None
        Counted(model=MODEL["model"], loss="clip", train=open_scenes("train", count=32), val=val, config=config).run()
    assert saves[0] == 2 and len(saves) <= 2


def test_what_a_paper_prints_for_either_data_set_is_printed():
    settings = {"prototypes.clusters": 20_000, "ascl.temperature": 0.01, "fusion.local_weight": 0.8, "cra.hard_negatives": 64}
    objective = Objective.parse("coder-printed + ascl-printed + selfalign-printed").with_options(settings)
    assert not_as_printed(objective, required_heads(objective)) == {"cra.hard_negatives": {"value": 64, "printed": 512}}


def test_what_no_paper_prints_is_not_compared():
    """CODER names a threshold of its graph, a factor of its softmax and encoders of its queries; SelfAlign a margin."""
    settings = {"concepts.threshold": 0.5, "concepts.scale": 5.0, "concepts.norm": "none", "prototypes.scale": 2.0}
    settings |= {"cra.margin": 0.1, "lca.epsilon": 0.1}
    objective = Objective.parse("coder-printed + selfalign-printed").with_options(settings)
    assert not_as_printed(objective, required_heads(objective)) == {"prototypes.scale": {"value": 2.0, "printed": 1.0}}
    base = Objective.parse("vse-infinity")
    assert not_as_printed(base, ()) == {"triplet.mask_same_image": {"value": True, "printed": False}}
    masked = Objective.parse("selfalign")
    assert set(not_as_printed(masked, required_heads(masked))) == {"lca.assignment", "cra.ca_on", "cra.mask_same_image"}


#: Others are in tests/cli/test_slips.py.
MISTAKES = {
    "half precision on a CPU": (["--precision", "amp"], "needs a GPU"),
    "bank smaller than the batch": (
        ["--loss", "dcl + m_dcl", "--set", "momentum.bank_size=32"],
        "bank_size 32 is smaller than the global batch of 64",
    ),
    "more prototypes than samples": (
        ["--loss", "coder", "--set", "prototypes.clusters=40000"],
        "clusters=40000 is more than the 23808 samples of the whole run",
    ),
    "no vocabulary": (
        ["--loss", "coder", "--train-data", "{csv}", "--model", "coder-tiny", "--batch-size", "1"],
        "needs a concept vocabulary: --concepts FILE, written by coder-plugin concepts",
    ),
    "banks of other features": (
        ["--loss", "m_dcl@concepts"],
        "momentum banks and generated texts have the backbone's own features only",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_one_line(mistake, capsys, tmp_path):
    arguments, message = MISTAKES[mistake]
    if torch.cuda.is_available() and mistake == "half precision on a CPU":
        pytest.skip("there is a GPU")
    (tmp_path / "pairs.csv").write_text("filepath\ttitle\n" + "a.jpg\ta dog\n" * 200)
    arguments = [argument.replace("{csv}", str(tmp_path / "pairs.csv")) for argument in arguments]
    assert main(["train", "--logs", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("coder-plugin: error: ") and message in error


def test_lora_leaves_a_locked_tower_alone(tmp_path):
    pytest.importorskip("peft")
    trainer = Trainer.from_config(config(tmp_path, lora_rank=2, lock_image=True))
    adapters = [name for name, p in trainer.model.named_parameters() if p.requires_grad and "lora_" in name]
    assert adapters and not any(name.startswith("visual.") for name in adapters)
    assert not trainer.model.token_embedding.weight.requires_grad and trainer.model.text_projection.requires_grad


def test_accelerates_own_accumulation_does_not_divide_gradients(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Trainer.from_config(config(tmp_path)).accelerator.gradient_accumulation_steps == 1


def test_an_exports_preprocessing_goes_with_it(tmp_path):
    first = Trainer.from_config(config(tmp_path, "first", epochs=1, image_mean=[0.5, 0.5, 0.5], image_resize_mode="squash"))
    first.run()
    export = tmp_path / "first" / "export" / "last" / "open_clip_model.safetensors"
    second = Trainer.from_config(config(tmp_path, "second", pretrained=str(export)))
    assert tuple(second.model.visual.preprocess_cfg["mean"]) == (0.5, 0.5, 0.5)
    assert second.model.visual.preprocess_cfg["resize_mode"] == "squash"
