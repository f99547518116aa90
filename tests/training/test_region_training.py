"""Whole runs of region models on generated features: learning, resuming, exports, ensembles, what a person may get wrong."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coder_plugin.cli import main
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import recall
from coder_plugin.functional import triplet
from coder_plugin.training.loop import Trainer
from coder_plugin.training.optim import parameter_groups
from tests.backbones import tiny_bert
from tests.data.regions import layouts
from tests.training import region_data
from tests.training.test_trainer import run_killed_after, weights
from tests.training.test_two_processes import ordered, records, state, train

SMALL = ["embed_dim=16", "context_length=16"]
BIGRU = [*SMALL, "word_dim=8"]
CAPTIONER = ["captioner.hidden=16", "captioner.word_dim=8"]
CAMERA = [*SMALL, "heads=4", "views=3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, str]:
    """Paths: a tiny BERT with dropout, the features as a precomp folder, the captions as a Karpathy file, concepts."""
    folder = tmp_path_factory.mktemp("regions")
    return {
        "bert": tiny_bert.make(folder / "bert", dropout=0.1),
        "precomp": region_data.write_precomp(folder / "precomp"),
        "karpathy": region_data.write_karpathy(folder / "dataset.json"),
        "concepts": region_data.write_vocabulary(folder / "concepts.safetensors"),
    }


def config(made: dict[str, str], logs: Path, name: str = "run", **options: Any) -> dict[str, Any]:
    model = options.get("model", "region-bert")
    text = [f"text={made['bert']}"] if "bert" in model else []
    defaults = {
        "model": model,
        "model_kwargs": [*(BIGRU if "bigru" in model else CAMERA if "camera" in model else SMALL), *text],
        "train_data": made["precomp"],
        "val_data": made["precomp"],
        "logs": str(logs),
        "name": name,
        "batch_size": 8,
        "epochs": 2,
        "lr": 1e-2,
        "workers": 0,
        "val_frequency": 0,
        "warmup": 2,
        "log_every_n_steps": 1,
    }
    return {**defaults, **options}


def coder(made: dict[str, str]) -> dict[str, Any]:
    heads = ["momentum.bank_size=24", "prototypes.clusters=6", "prototypes.recluster=40", "concepts.warmup=6"]
    return {"loss": "coder", "concepts": made["concepts"], "set": heads}


def losses(folder: Path, name: str = "run") -> list[float]:
    return [record["loss"] for record in records(folder, name) if "loss" in record]


def result(tmp_path: Path, *arguments: str) -> Any:
    target = tmp_path / "result.json"
    assert main(["eval", *arguments, "--json", str(target)]) == 0
    return json.loads(target.read_text())


# learning


@pytest.mark.parametrize(
    ("model", "loss", "options"),
    [
        pytest.param("region-bert", "dcl", {}, marks=pytest.mark.slow),
        pytest.param("region-bigru", "triplet(hardest=false)", {"lr": 3e-3}, marks=pytest.mark.slow),
        pytest.param("region-bert-camera", "triplet + 0.01*view_diversity", {}, marks=pytest.mark.slow),
        pytest.param(
            "region-bigru-vsrn",
            "triplet(hardest=false) + 0.1*caption",
            {"lr": 3e-3, "set": CAPTIONER},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_learns_and_its_evaluation_repeats(tmp_path, made, model, loss, options):
    """With region and word dropout at their defaults; chance is some 125 here."""
    when = {"epochs": 5, "val_frequency": 5, "val_before": True}
    options = {"model": model, "loss": loss, "captions": "all", "wd": 0.0, **when, **options}
    found = Trainer.from_config(config(made, tmp_path, **options)).run()
    value = losses(tmp_path)
    assert sum(value[-5:]) < 0.85 * sum(value[:5]), (value[:5], value[-5:])
    before = next(record["val/rsum"] for record in records(tmp_path, "run") if "val/rsum" in record)
    assert before < 220 and found["last"]["rsum"] > 300, (before, found["last"])
    again = result(tmp_path, str(tmp_path / "run"), "--export", "last")
    assert again["rsum"] == pytest.approx(found["last"]["rsum"], abs=0.01) and again["images"] == 24


@pytest.mark.slow
def test_coder_learns_with_its_banks_concepts_and_prototypes(tmp_path, made):
    options = {**coder(made), "epochs": 5, "val_frequency": 5, "captions": "all", "log_every_n_steps": 5}
    trainer = Trainer.from_config(config(made, tmp_path, **options, wd=0.0))
    found = trainer.run()
    value = losses(tmp_path)
    assert sum(value[-4:]) < 0.95 * sum(value[4:8]), value  # when all terms have begun to speak
    assert found["last"]["rsum"] > 250, found["last"]
    state = trainer.model.state_dict()
    assert state["coder.heads.momentum.bank.count"] == 24 and state["coder.heads.prototypes.centres.ready"]
    again = result(tmp_path, str(tmp_path / "run"), "--export", "last")  # with the concept level in the score
    assert again["rsum"] == pytest.approx(found["last"]["rsum"], abs=0.01)
    rows = result(tmp_path, str(tmp_path / "run"), "--export", "last", "--beta", "1", "0.9")
    assert rows[1]["rsum"] == pytest.approx(found["last"]["rsum"], abs=0.5) and len(rows) == 2


# resuming


#: Every head of the three papers.
EVERY = "coder + ascl(similarity=fusion,temperature=0.1) + lca + cra(ca_on=combined)"


@pytest.mark.parametrize(
    ("model", "loss", "workers"),
    [
        ("region-bert", EVERY, 0),
        pytest.param("region-bigru-vsrn", "triplet + caption", 0, marks=pytest.mark.slow),
        pytest.param("region-bert", "dcl", 2, marks=pytest.mark.slow),
        pytest.param("region-bigru", "vse-infinity", 0, marks=pytest.mark.slow),
    ],
)
def test_resumed_in_mid_epoch_equals_uninterrupted_bit_for_bit(tmp_path, made, model, loss, workers):
    """All dropouts on: of regions, of words, inside BERT and of the captioner; BatchNorm's statistics go with it, and AsCL's
    noise and captions are drawn again as they were."""
    options = {"model": model, "workers": workers, "loss": loss}
    if loss == EVERY:
        options |= coder(made) | {"loss": loss}
        options["set"] = [*options["set"], "fusion.heads=2", "alignment.prototypes=12", "alignment.freeze_steps=7"]
    options |= {"set": CAPTIONER} if "caption" in loss else {}
    options |= {"region_dropout": 0.3, "word_dropout": 0.3, "ema_decay": 0.9}
    Trainer.from_config(config(made, tmp_path, "whole", **options)).run()
    run_killed_after(config(made, tmp_path, "broken", save_every_steps=4, **options), 9)
    Trainer.from_config(config(made, tmp_path, "broken", resume="latest", **options)).run()
    whole, broken = weights(tmp_path, "whole"), weights(tmp_path, "broken")
    assert whole.keys() == broken.keys() and all(torch.equal(whole[key], broken[key]) for key in whole)
    by_step = [{r["step"]: r["loss"] for r in records(tmp_path, name) if "loss" in r} for name in ("whole", "broken")]
    assert by_step[0] == by_step[1] and len(by_step[0]) == 12


def test_vse_infinity_takes_all_negatives_in_the_first_epoch(tmp_path, made):
    options = {"loss": "vse-infinity", "epochs": 2, "batch_size": 4, "accum_freq": 2}
    trainer = Trainer.from_config(config(made, tmp_path, **options))
    assert trainer.model.coder.heads["progress"].steps_per_epoch == trainer.steps_per_epoch == 6
    losses: list[tuple[int, dict[bool, float], float]] = []

    def compare(term: Any, args: Any, outputs: dict[str, torch.Tensor], loss: torch.Tensor) -> None:
        similarity = (outputs["image_features"] @ outputs["text_features"].T).detach()
        ids, forms = outputs["coder_ids"], {}
        for hardest in (False, True):
            forms[hardest] = float(triplet(similarity, margin=0.2, hardest=hardest, reduction="sum", image_ids=ids))
        losses.append((trainer.step, forms, float(loss)))

    trainer.loss.terms["triplet"].register_forward_hook(compare, with_kwargs=True)
    trainer.run()
    assert {step for step, *_ in losses} == set(range(12))
    for step, forms, loss in losses:
        assert loss == pytest.approx(forms[step >= 6], rel=1e-5), step
    assert sum(abs(forms[True] - forms[False]) > 0.01 for _, forms, _ in losses) > 6


def test_dropouts_change_what_is_trained_on(tmp_path, made):
    found = {}
    for name, dropped in {"none": (0.0, 0.0), "regions": (0.4, 0.0), "words": (0.0, 0.4)}.items():
        region, word = dropped
        trainer = Trainer.from_config(config(made, tmp_path, name, region_dropout=region, word_dropout=word))
        batch = next(iter(trainer.loader.epoch(0)))
        found[name] = batch["image"]["mask"].sum(), batch["text"]
        assert trainer.encoder.transform.dropout == 0 and trainer.encoder.tokenizer.word_dropout == 0
    assert found["none"][0] == 8 * 6 == found["words"][0] and found["regions"][0] < 45
    assert torch.equal(found["none"][1], found["regions"][1]) and not torch.equal(found["none"][1], found["words"][1])


@pytest.mark.slow
def test_micro_batches_are_one_batch(tmp_path, made):
    """Without BatchNorm and dropout; the features of micro-batches are cached as dicts of regions go by."""
    plain = {"region_dropout": 0.0, "word_dropout": 0.0, "epochs": 1, "opt": "sgd", "lr": 0.05}
    bert = tiny_bert.make(tmp_path / "bert")
    kwargs = {"model_kwargs": [*SMALL, "mlp=false", f"text={bert}"], **plain}
    Trainer.from_config(config(made, tmp_path, "one", batch_size=16, **kwargs)).run()
    Trainer.from_config(config(made, tmp_path, "two", batch_size=8, accum_freq=2, **kwargs)).run()
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=1e-4)


TWO = {
    "views": (["triplet + 0.1*view_diversity(reduction='sum')"], ["image_pooling=views", "views=3"]),
    "coder": (["3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl"], []),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO)
def test_two_processes_train_as_one(tmp_path, made, case):
    """Regions are dropped by image and epoch, so on any number of ranks the same ones; words by chunk, so not here."""
    loss, kwargs = TWO[case]
    bert = tiny_bert.make(tmp_path / "bert")
    flags = {
        "model": "region-bert",
        "model-kwargs": [*SMALL, "mlp=false", f"text={bert}", *kwargs],  # without BatchNorm: its batch is a rank's
        "dataset-type": "precomp",
        "train-data": made["precomp"],
        "val-data": made["precomp"],
        "train-num-samples": 48,
        "region-dropout": 0.3,
        "word-dropout": 0.0,
        "log-every-n-steps": 1,
        "loss": [*loss, *(["--concepts", made["concepts"], "--set", "momentum.bank_size=32"] if case == "coder" else [])],
    }
    for name, processes in (("one", 1), ("two", 2)):
        train(tmp_path, name, processes=processes, **flags)
    one, two = records(tmp_path, "one"), records(tmp_path, "two")
    assert len(one) == len(two) and sum("loss" in record for record in one) == 6
    for ours, theirs in zip(one, two, strict=True):
        for key in ours:
            assert theirs[key] == pytest.approx(ours[key], rel=2e-4, abs=1e-6), key
    before, after = ordered(state(tmp_path, "one")), ordered(state(tmp_path, "two"))
    for key, value in before.items():
        value, other = value.double(), after[key].double()
        assert (other - value).norm() <= 1e-3 * value.norm() + 1e-6, key


# the vocabulary


@pytest.fixture(scope="module")
def bigru(made, tmp_path_factory) -> Trainer:
    """A finished run."""
    trainer = Trainer.from_config(config(made, tmp_path_factory.mktemp("bigru"), model="region-bigru", epochs=1))
    trainer.run()
    return trainer


def test_a_bigrus_vocabulary_is_the_training_captions_words(tmp_path, made, bigru):
    words = list(bigru.tokenizer.ids)
    assert words[:4] == ["<pad>", "<start>", "<end>", "<unk>"]
    assert set(words[4:]) == {*region_data.WORDS, *"a and with the of two on in ,".split()}
    exported = json.loads((bigru.folder / "export" / "last" / "coder_model.json").read_text())
    assert exported["options"]["vocabulary"] == words and exported["options"]["region_dim"] == 12
    (tmp_path / "words.json").write_text(json.dumps([*words[:4], "dog"]))
    kwargs = [*BIGRU, f"vocabulary={tmp_path / 'words.json'}"]
    assert Trainer.from_config(config(made, tmp_path, "given", model="region-bigru", model_kwargs=kwargs)).tokenizer.size == 5


# evaluation


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory) -> list[str]:
    """Two finished runs of two models."""
    folder = tmp_path_factory.mktemp("runs")
    models = {"seed": 1}, {"seed": 2, "model": "region-bert-camera", "loss": "triplet"}
    for name, options in zip("ab", models, strict=True):
        Trainer.from_config(config(made, folder, name, epochs=1, **options)).run()
    return [str(folder / name) for name in "ab"]


def test_splits_folds_and_an_ensemble_from_the_command_line(tmp_path, made, runs, capsys):
    alone = [result(tmp_path, run, "--export", "last", "--folds", "4") for run in runs]
    assert alone[0]["images"] == 24 and alone[0]["texts"] == 120 and len(alone[0]["folds"]["folds"]) == 4
    rows = result(tmp_path, *runs, "--export", "last", "--folds", "4")
    assert [row["name"] for row in rows] == [*runs, "ensemble of 2", "mean of 2 runs"]
    for one, row in zip(alone, rows, strict=False):
        assert row["rsum"] == pytest.approx(one["rsum"])
    similarity, owners = averaged(runs)
    expected = recall(similarity, owners)
    for key in ("i2t_r1", "i2t_r10", "t2i_r1", "t2i_r10", "rsum"):
        assert rows[2][key] == pytest.approx(expected[key], abs=1.0), key
    assert rows[2]["folds"]["rsum"] > rows[2]["rsum"]  # smaller sets are easier
    assert result(tmp_path, runs[0], "--export", "last", "--split", "test")["images"] == 20
    assert main(["eval", *runs, "--export", "last", "--beta", "0.5"]) == 2
    assert main(["eval", runs[0], "--export", "last", "--split", "testall"]) == 2
    error = capsys.readouterr().err
    assert "--beta is for one model" in error and "no testall_ims.npy; splits present: dev, test, train" in error


def test_each_model_of_an_ensemble_reads_its_own_features(tmp_path, made, runs):
    noisy = tmp_path / "noisy"
    shutil.copytree(made["precomp"], noisy)
    copy = Path(shutil.copytree(runs[0], tmp_path / "copy"))
    (copy / "config.json").write_text((copy / "config.json").read_text().replace(made["precomp"], str(noisy)))
    features = np.load(noisy / "dev_ims.npy")
    np.save(noisy / "dev_ims.npy", features + np.random.default_rng(0).standard_normal(features.shape).astype(np.float32))
    both = [runs[0], str(copy)]
    alone = [result(tmp_path, run, "--export", "last") for run in both]
    assert alone[0]["i2t_meanr"] != alone[1]["i2t_meanr"]
    rows = result(tmp_path, *both, "--export", "last")
    assert [row["i2t_meanr"] for row in rows[:2]] == [each["i2t_meanr"] for each in alone]


def averaged(runs: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the runs' similarities on the validation images, by their embeddings one image at a time."""
    from coder_plugin import create_model
    from coder_plugin.data import open_source

    total: Any = 0
    owners: list[int] = []
    for run in runs:
        export = Path(run) / "export" / "last"
        model = create_model(str(export), loss="dcl", pretrained=str(export / "coder_model.safetensors")).eval()
        data = json.loads((Path(run) / "config.json").read_text())["data"]["val"]
        images, texts, owners = [], [], []
        transform, tokenizer = model.transform(), model.tokenizer()
        with torch.no_grad():
            for index, item in open_source(data, split="val").items():
                image = {key: value[None] for key, value in transform(item.load()).items()}
                images.append(model.embed_image(image)[0])
                texts.append(model.embed_text(tokenizer(list(item.captions))))
                owners += [index] * len(item.captions)
        rows = [(image.reshape(-1, image.shape[-1]) @ torch.cat(texts).T).amax(0) for image in images]
        total = total + torch.stack(rows)
    return total / len(runs), torch.tensor(owners)


def test_an_export_starts_another_run_and_needs_no_bert(tmp_path, made):
    own = {**made, "bert": str(tmp_path / "bert")}
    shutil.copytree(made["bert"], own["bert"])
    first = Trainer.from_config(config(own, tmp_path, "first", epochs=1, val_frequency=1)).run()
    shutil.rmtree(own["bert"])
    export = tmp_path / "first" / "export" / "last"
    options = {"model": str(export), "model_kwargs": None, "pretrained": str(export / "coder_model.safetensors")}
    second = Trainer.from_config(config(own, tmp_path, "second", **options, val_frequency=1))
    second.setup_optimizer()
    second._evaluate("before the first step")
    assert second.last["rsum"] == first["last"]["rsum"]


# captions from one file, regions from another


@pytest.mark.parametrize("layout", [pytest.param("shards", marks=pytest.mark.slow), "precomp"])
def test_captions_and_regions_of_two_files(tmp_path, made, layout, caplog):
    """The regions of all splits in one, as ``regions extract`` and ``regions convert`` write them."""
    everything = [record for split in region_data.SPLITS for record in region_data.records(split)]
    left_out = {"train_003", "train_030", "dev_007"}
    layouts.write_tsv(tmp_path / "regions.tsv", [each for each in everything if each.name not in left_out])
    data = {"train_data": made["karpathy"], "val_data": made["karpathy"], "regions": str(tmp_path / "regions.tsv")}
    with pytest.raises(CoderError, match="files of the layout tsv are not trained on: convert them once .coder-plugin regions"):
        Trainer.from_config(config(made, tmp_path, "direct", **data))
    assert main(["regions", "convert", data["regions"], str(tmp_path / "regions"), "--to", layout]) == 0
    data["regions"] = str(tmp_path / "regions")
    with caplog.at_level(logging.WARNING):
        found = Trainer.from_config(config(made, tmp_path, **data, epochs=1, val_frequency=1)).run()
    assert found["last"]["images"] == 23 and found["last"]["texts"] == 115
    told = [record.getMessage() for record in caplog.records if "have no regions" in record.getMessage()]
    assert any("2 of 48 images have no regions" in each and "train_003.jpg" in each for each in told)
    assert any("1 of 24 images have no regions" in each and "dev_007.jpg" in each for each in told)
    again = result(tmp_path, str(tmp_path / "run"), "--export", "last", "--split", "test")
    assert again["images"] == 20
    with pytest.raises(CoderError, match="2 of 48 images have no regions.*at most 1 may lack them"):
        Trainer.from_config(config(made, tmp_path, "strict", **data, max_bad_samples=0.001))


def test_regions_that_are_forgotten(tmp_path, made, bigru, capsys):
    """The captions name pictures, which need not exist where regions are read."""
    with pytest.raises(CoderError, match=r"not found.*reads region features needs their files instead \(--regions\)"):
        Trainer.from_config(config(made, tmp_path, train_data=made["karpathy"]))
    run, data = str(bigru.folder), made["karpathy"]
    for words in (["eval", run, "--val-data", data], ["index", run, "--data", data, "--output", str(tmp_path / "out")]):
        assert main(words) == 2
        assert "a model that reads region features needs their files instead (--regions)" in capsys.readouterr().err


# damaged features


def damaged(made: dict[str, str], folder: Path, split: str, *places: int) -> str:
    shutil.copytree(made["precomp"], folder)
    features = np.load(folder / f"{split}_ims.npy")
    features[list(places), 1, 2] = np.nan
    np.save(folder / f"{split}_ims.npy", features)
    return str(folder)


def test_an_image_of_nan_is_skipped_named_and_counted(tmp_path, made, caplog):
    """Also where it is the first image, off which the trainer reads the channels."""
    path = damaged(made, tmp_path / "data", "train", 0)
    options = {"train_data": path, "epochs": 1, "loss": "triplet"}
    with caplog.at_level(logging.WARNING):
        trainer = Trainer.from_config(config(made, tmp_path, **options))
        trainer.run()
    assert trainer.loader.bad.kinds == {"regions": 1} and trainer.step == 5  # 47 images fill five batches of eight
    told = [record.getMessage() for record in caplog.records if "skipped sample" in record.getMessage()]
    assert len(told) == 1 and "'train_000'" in told[0] and "1 of 72 numbers in the features are NaN" in told[0]
    assert all(np.isfinite(losses(tmp_path)))


# rates


def test_text_lr_scale_is_of_the_pretrained_encoder_alone(tmp_path, made):
    trainer = Trainer.from_config(config(made, tmp_path, text_lr_scale=0.1, wd=0.05))
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = parameter_groups(trainer.model, lr=1e-2, weight_decay=0.05, text_lr_scale=0.1)
    assert {(group["lr_scale"], group["weight_decay"]) for group in groups} == {(0.1, 0), (0.1, 0.05), (1, 0), (1, 0.05)}
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert (group["lr_scale"] == 0.1) == name.startswith("text.transformer."), name
            assert (group["weight_decay"] == 0) == (parameter.ndim < 2), name
    trainer.setup_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {1e-3 / 2, 1e-2 / 2}  # warm-up's first step of two
    bigru = Trainer.from_config(config(made, tmp_path, "bigru", model="region-bigru", text_lr_scale=0.1))
    assert {group["lr_scale"] for group in parameter_groups(bigru.model, lr=1, weight_decay=0, text_lr_scale=0.1)} == {1.0}


# what a person may get wrong


def arguments(made: dict[str, str], tmp_path: Path, model: str = "region-bert") -> list[str]:
    text = [f"text={made['bert']}"] if "bert" in model else []
    kwargs = {"region-bert-camera": CAMERA, "region-bigru": BIGRU}.get(model, SMALL)
    return [
        "train", "--logs", str(tmp_path), "--train-data", made["precomp"], "--model", model, "--model-kwargs", *kwargs, *text,
        "--epochs", "1", "--batch-size", "8", "--workers", "0", "--dry-run",
    ]  # fmt: skip


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "CLIP on regions": ("coder-tiny", [], "the data are regions; they need --model region-bert"),
    "GPO over pooled regions": ("region-bert", ["--aggregator", "gpo"], "region-bert pools its regions itself"),
    "an option without value": ("region-bert", ["--model-kwargs", "embed_dim"], "write OPTION=VALUE, such as embed_dim=512"),
    "an unknown option": ("region-bert", ["--model-kwargs", "dim=5"], "region-bert has no option dim; it has: region_dim"),
    "an option out of range": ("region-bert", ["--model-kwargs", "embed_dim=0"], "embed_dim must be 1 or more, got 0"),
    "other channels": ("region-bert", ["--model-kwargs", "region_dim=2048"], "12 channels, but the model reads 2048"),
    "coder with views": ("region-bert-camera", ["--loss", "dcl + m_dcl"], "this model gives an image 3 features"),
    "clip with views": ("region-bert-camera", ["--loss", "clip"], "compares one feature of an image"),
    "a BERT that is not there": ("region-bert", ["--model-kwargs", "text=no/where"], "text encoder 'no/where' cannot be"),
    "groups of regions' layers": (
        "region-bert", ["--lock-image", "--open-clip", "lock_image_unlocked_groups=1"], "no layer groups",
    ),
    "layers of a BiGRU": (
        "region-bigru", ["--lock-text", "--open-clip", "lock_text_unlocked_layers=1"], "has no layers to unlock",
    ),
    "adapters in a BiGRU": ("region-bigru", ["--lora-rank", "2"], "no unlocked linear layer in numbered blocks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_one_line(tmp_path, made, capsys, mistake):
    model, more, message = MISTAKES[mistake]
    command = arguments(made, tmp_path, model)
    if "kwargs" not in " ".join(more) and model == "coder-tiny":
        command = [part for part in command if part not in ("--model-kwargs", *SMALL)]
    if mistake == "other channels":
        command.remove("--dry-run")
    assert main([*command, *more]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("coder-plugin: error: ") and message in error, error


def test_region_models_on_pictures_and_their_options_on_clip(tmp_path, made, tiny_model, capsys):
    from PIL import Image

    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "pairs.csv").write_text("filepath\ttitle\n" + "".join(f"{number % 4}.png\ta dog\n" for number in range(20)))
    train = ["train", "--dry-run", "--logs", str(tmp_path), "--train-data", str(tmp_path / "pairs.csv"), "--batch-size", "4"]
    kwargs = ["--model-kwargs", *SMALL, f"text={made['bert']}"]
    assert main([*train, "--model", "region-bert", *kwargs]) == 2
    assert main([*train, "--model", tiny_model, "--model-kwargs", "embed_dim=8"]) == 2
    error = capsys.readouterr().err
    assert "the data are pictures; they need an open_clip --model, or region features of the pictures: --regions" in error
    assert re.search(r"--model-kwargs are options of region models, and \S+ is not one", error)


def test_camera_without_boxes_is_told_and_can_do_without(tmp_path, made, capsys):
    folder = tmp_path / "data"
    shutil.copytree(made["precomp"], folder)
    for path in [*folder.glob("*_boxes.npy"), *folder.glob("*_img_sizes.npy")]:
        path.unlink()
    own = {**made, "precomp": str(folder)}
    command = [part for part in arguments(own, tmp_path, "region-bert-camera") if part != "--dry-run"]
    assert main([*command, "--dry-run"]) == 2
    assert "its first image: it has no boxes, which this model reads" in capsys.readouterr().err
    assert main([*command, "--name", "without", "--model-kwargs", "boxes=false"]) == 0
    options = json.loads((tmp_path / "without" / "export" / "last" / "coder_model.json").read_text())["options"]
    assert options["context"] == options["text_context"] == "camera" and options["boxes"] is False


def test_the_plan_of_a_region_model(tmp_path, made, capsys):
    assert main([*arguments(made, tmp_path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"] == "region-bert (RegionText)" and plan["outputs"]["image_features"] == ["B", 16]
    assert plan["training data"]["images"] == 48 and plan["steps per epoch"] == 6
    assert not [path for path in tmp_path.iterdir()]


# adapters


def test_adapters_go_into_bert_and_come_out_merged(tmp_path, made):
    pytest.importorskip("peft")
    trainer = Trainer.from_config(config(made, tmp_path, lora_rank=2, epochs=1, loss="triplet", text_lr_scale=0.5))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.run()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    inside = {name for name in moved if name.startswith("text.transformer.")}
    assert inside and all("lora_" in name for name in inside) and "visual.fc.weight" in moved
    from coder_plugin import create_model

    export = tmp_path / "run" / "export" / "last"
    plain = create_model(str(export), loss="dcl", pretrained=str(export / "coder_model.safetensors")).eval()
    text = plain.tokenizer()(["a red ball", "the dog"])
    with torch.no_grad():
        torch.testing.assert_close(plain.embed_text(text), trainer.model.eval().embed_text(text), rtol=1e-4, atol=1e-5)
