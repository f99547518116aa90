"""Objective, model, concepts, word vectors and regions, each with a fault planted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import main
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.shards import write_shard
from tests.doctor import made
from tests.doctor.made import amiss, examine
from tests.training import region_data


@pytest.fixture
def train(tmp_path: Path) -> str:
    return made.write_split(tmp_path, "train", 0)


def test_a_recipe_that_can_be_trained(train: str, tiny_model: str) -> None:
    found = examine(train_data=train, model=tiny_model, loss="dcl + m_dcl", batch_size=4, epochs=3)
    assert amiss(found) == {}
    told = {each.name: each.text for each in found}
    assert "texts of 40 tokens" in told["recipe.model"] and "heads: ids, momentum" in told["recipe.loss"]
    assert "train.captions.length" in told


def test_a_recipe_that_names_loss_and_model(train: str, tiny_model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'loss = "dcl + m_dcl"\nmodel = "{tiny_model}"\nbatch_size = 4')
    told = {each.name: each.text for each in examine(train_data=train, recipe=str(recipe))}
    assert "heads: ids, momentum" in told["recipe.loss"] and "texts of 40 tokens" in told["recipe.model"]


@pytest.mark.parametrize(
    ("flags", "name", "text"),
    [
        ({"loss": "nonsense"}, "recipe.refused", "nonsense"),
        ({"model": "ViT-B-23"}, "recipe.refused", "did you mean"),
        ({"loss": "coder"}, "recipe.refused", "coder-plugin concepts --train-data"),
        ({"loss": "dcl + m_dcl", "set": ["momentum.bank_size=3"]}, "recipe.refused", "bank_size 3 is smaller"),
        ({"pretrained": "nowhere"}, "recipe.pretrained.unknown", "neither a file nor a tag"),
        ({"pretrained_image": True}, "recipe.pretrained_image", "not checked"),
    ],
)
def test_a_recipe_that_cannot(
    train: str, tiny_model: str, flags: dict[str, Any], name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("open_clip.list_pretrained_tags_by_model", lambda name: ["openai"])
    found = amiss(examine(**{"train_data": train, "model": tiny_model, "loss": "clip", "batch_size": 4, **flags}))
    assert name in found and text in found[name].text, found


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--accum-freq 4", "--accum-freq 4 is more than the 3 batches of an epoch"),
        ("--aug-cfg scales=1", "--aug-cfg: unknown option 'scales'"),
        ("--tagger en_core_web_sm", "reads word classes"),
        ("--lock-image --lock-text --loss triplet", "nothing is left to train"),
        ("--gather ring --loss-impl reference", "gather='ring' computes losses by tiles"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)  # refused in other tests, too
            for each in (
                ("--batch-size 64", "--batch-size 64 is larger than the data (12 samples)"),
                ("--batch-size 1", "a step has one pair and therefore no negatives"),
                ("--accum-freq 2 --loss 'ascl(similarity=fusion) + ascl'", "scores every pair of a batch inside the model"),
                ("--loss 'dcl + m_dcl' --set momentum.bank_size=3", "bank_size 3 is smaller"),
                ("--negatives-file n.tsv", "--negatives-file without --hard-negatives N"),
            )
        ),
    ],
)
def test_what_training_refuses_is_a_problem(
    train: str, tiny_model: str, flags: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "n.tsv").write_text("image\tnegatives\n")
    options = ["--train-data", train, "--model", tiny_model, "--loss", "clip", "--batch-size", "4", *shlex.split(flags)]
    assert main(["train", "--dry-run", *options]) == 2 and text in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert main(["doctor", "--json", "-", *options]) == 1
    problems = [each["text"] for each in json.loads(capsys.readouterr().out) if each["level"] == "problem"]
    assert len(problems) == 1 and text in problems[0], problems


def test_a_batch_larger_than_the_data_is_a_problem_without_a_model(train: str, capsys: Any) -> None:
    found = amiss(made.examine(train_data=train, batch_size=64))
    assert found.keys() == {"train.refused"} and "(12 samples): use a smaller --batch-size" in found["train.refused"].text
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"reading train data: {train} …", "checking 12 images of train …"]
    assert examine(train_data=train)[0].text == "an epoch has 6 steps of 2 pairs, in one process"


def test_a_tag_is_not_downloaded(train: str, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    monkeypatch.setattr("open_clip.list_pretrained_tags_by_model", lambda name: ["openai"])
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *args, **kwargs: pytest.fail("downloaded"))
    found = amiss(examine(train_data=train, model=tiny_model, pretrained="openai", loss="clip", batch_size=4))
    assert found.pop("recipe.rate").level == found.pop("recipe.batch").level == "warning"  # the defaults, and 4 pairs
    assert "were not checked" in found.pop("recipe.pretrained").text
    assert not found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_an_encoder_that_no_hub_has_is_refused(tmp_path: Path, offline: None) -> None:
    flags = {"train_data": write_regions(tmp_path / "a"), "model": "region-bert", "loss": "dcl", "batch_size": 4}
    flags["cache_dir"] = str(tmp_path)
    assert amiss(examine(**flags, model_kwargs=["text=nobody/nothing"])).keys() == {"recipe.absent"}
    assert amiss(examine(**flags, model_kwargs=[f"text={tmp_path}/absent"])).keys() == {"recipe.refused"}


def test_data_that_cannot_be_read_leave_the_model_aside(tmp_path: Path, tiny_model: str) -> None:
    train = made.write_split(tmp_path, "train", 0)
    shard = tmp_path / "train-1.tar"
    shard.write_bytes(shard.read_bytes()[:12_000])
    found = amiss(examine(train_data=train, model=tiny_model, loss="clip"))
    assert found.keys() == {"train.broken", "recipe.data"}


def write_regions(folder: Path, change: Any = None, split: str = "train") -> str:
    from coder_plugin.data.regions.shards import write

    folder.mkdir()
    records = list(region_data.records(split))[:12]
    if change is not None:
        records[3] = records[3]._replace(regions=change(records[3].regions))
    write(str(folder), iter(records), split=split)
    return str(folder / f"{split}-*.tar")


def test_regions_of_nan_cannot_be_read(tmp_path: Path) -> None:
    """Ours would not write them; another tool may."""
    path = write_regions(tmp_path / "a").replace("*", "000000")
    content = Path(path).read_bytes()
    number = next(iter(region_data.records("train"))).regions.features[2, 3].tobytes()
    assert content.count(number) >= 1
    Path(path).write_bytes(content.replace(number, np.float32(np.nan).tobytes(), 1))
    found = amiss(examine(train_data=path))
    assert list(found) == ["train.pictures.unreadable"]


def test_regions_from_another_file(tmp_path: Path) -> None:
    """Captions in one place and regions in another, of which one lacks."""
    karpathy = region_data.write_karpathy(tmp_path / "dataset.json")
    records = [Record(r.name, r.regions) for r in region_data.records("train")][:-1]
    write_shard(str(tmp_path / "regions.tar"), records)
    flags = {"train_data": karpathy, "regions": str(tmp_path / "regions.tar")}
    found = amiss(examine(**flags))
    assert found.keys() == {"train.said", "train.pictures.unreadable"}
    assert "train_047" in found["train.said"].text and "train_047" in found["train.pictures.unreadable"].text
    assert list(amiss(examine(**flags, max_bad_samples=0.0))) == ["train.refused"]


def test_a_region_model_for_other_regions(tmp_path: Path) -> None:
    train = write_regions(tmp_path / "a")
    flags = {"train_data": train, "model": "region-bigru", "loss": "dcl", "batch_size": 4}
    assert amiss(examine(**flags, model_kwargs=["embed_dim=16", "word_dim=16"])) == {}
    found = amiss(examine(**flags, model_kwargs=["region_dim=7", "embed_dim=16", "word_dim=16"]))
    assert "recipe.refused" in found and "the model reads 7" in found["recipe.refused"].text
    views = ["context=camera", "image_pooling=views", "heads=2", "embed_dim=16", "word_dim=16"]
    found = amiss(examine(**{**flags, "loss": "clip"}, model_kwargs=views))
    assert "image_pooling=gpo" in found["recipe.refused"].text, "what the loss asks of the model counts, too"
    found = amiss(examine(**{**flags, "model": "ViT-B-32"}))
    assert "region-bert" in found["recipe.refused"].text
