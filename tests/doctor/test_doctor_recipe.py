"""Objective, model, concepts, word vectors and regions, each with a fault planted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coder_plugin.data.regions.base import Record, Regions
from coder_plugin.data.regions.shards import write_shard
from coder_plugin.doctor import captions
from coder_plugin.doctor.findings import Finding
from tests.conftest import TINY
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
    assert "reads pictures of 64 x 64 pixels and texts of 40 tokens" in told["recipe.model"]
    assert (
        told["recipe.steps"]
        == "12 samples per epoch: 3 steps of 4 pairs, 0 left over; 9 steps in 3 epochs, with one process"
    )
    assert "train.captions.length" in told


@pytest.mark.parametrize(
    ("flags", "name", "text"),
    [
        ({"loss": "nonsense"}, "recipe.refused", "nonsense"),
        ({"model": "ViT-B-23"}, "recipe.refused", "did you mean"),
        ({"loss": "coder"}, "recipe.refused", "coder-plugin concepts --train-data"),
        ({"batch_size": 40}, "recipe.steps", "12 samples is shorter than one step of 40 pairs"),
        ({"batch_size": 8}, "recipe.left_over", "4 of 12 samples"),
        ({"loss": "dcl + m_dcl", "set": ["momentum.bank_size=3"]}, "recipe.sizes", "bank_size 3 is smaller"),
        ({"loss": "selfalign-clip", "tagger": "no_such_pipeline"}, "recipe.tagger", "no_such_pipeline"),
        ({"model": "RN50", "pretrained": "nowhere"}, "recipe.pretrained.unknown", "neither a file nor a tag"),
        ({"pretrained_image": True}, "recipe.pretrained_image", "not checked"),
        ({"aug_cfg": ["nonsense=1"]}, "recipe.refused", "unknown option 'nonsense'"),
    ],
)
def test_a_recipe_that_cannot(train: str, tiny_model: str, flags: dict[str, Any], name: str, text: str) -> None:
    found = amiss(examine(**{"train_data": train, "model": tiny_model, "loss": "clip", "batch_size": 4, **flags}))
    assert name in found and text in found[name].text, found


def test_a_tag_is_not_downloaded(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *args, **kwargs: pytest.fail("downloaded"))
    found = amiss(examine(train_data=train, model="RN50-quickgelu", pretrained="openai", loss="clip", batch_size=4))
    assert found.pop("recipe.rate").level == found.pop("recipe.batch").level == "warning"  # the defaults, and 4 pairs
    assert "were not checked" in found.pop("recipe.pretrained").text
    assert found.keys() == {"train.pictures.small"}  # for 224 pixels


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("text", [{"hf_model_name": "nobody/nothing"}, {"hf_tokenizer_name": "nobody/nothing"}])
def test_what_a_hub_has_is_not_looked_at(train: str, tmp_path: Path, offline: None, text: dict[str, str]) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "text_cfg": {**TINY["text_cfg"], **text}}))
    flags = {"train_data": train, "loss": "triplet", "batch_size": 4, "cache_dir": str(tmp_path)}
    found = examine(**flags, model=str(tmp_path / "tiny.json"))
    assert amiss(found).keys() == {"recipe.absent"}, "the run would not stop"
    tokenizer_alone = "hf_tokenizer_name" in text
    assert ("the tokenizer of" in amiss(found)["recipe.absent"].text) == tokenizer_alone
    told = {each.name for each in found}
    assert "recipe.steps" in told and ("recipe.model" in told) == tokenizer_alone
    assert amiss(examine(**flags, model="hf-hub:nobody/nothing")).keys() == {"recipe.absent"}


def test_an_encoder_that_no_hub_has_is_refused(tmp_path: Path, offline: None) -> None:
    flags = {"train_data": write_regions(tmp_path / "a"), "model": "region-bert", "loss": "dcl", "batch_size": 4}
    flags["cache_dir"] = str(tmp_path)
    assert amiss(examine(**flags, model_kwargs=["text=nobody/nothing"])).keys() == {"recipe.absent"}
    assert amiss(examine(**flags, model_kwargs=[f"text={tmp_path}/absent"])).keys() == {"recipe.refused"}


def test_data_that_cannot_be_read_leave_the_model_aside(tmp_path: Path, tiny_model: str) -> None:
    train = made.write_split(tmp_path, "train", 0, x=made.sample(7, json={"captions": []}))
    found = amiss(examine(train_data=train, model=tiny_model, loss="clip"))
    assert found.keys() == {"train.samples.refused", "recipe.data"}


def test_concepts(tmp_path: Path, train: str, tiny_model: str) -> None:
    def names(path: str) -> dict[str, Finding]:
        flags = {"train_data": train, "model": tiny_model, "loss": "coder", "batch_size": 2, "epochs": 9}
        return amiss(examine(concepts=path, set=["prototypes.clusters=4"], **flags))

    good = made.write_vocabulary(tmp_path / "good.safetensors", ["dog", "cat", "ball", "tree"])
    assert names(good) == {}
    few = names(made.write_vocabulary(tmp_path / "few.safetensors", ["dog", "cat", "ball"], missing=("cat",)))
    assert list(few) == ["words.concepts.random"] and "'cat'" in few["words.concepts.random"].text
    other = names(made.write_vocabulary(tmp_path / "other.safetensors", ["dog", "galaxy", "neuron"]))
    assert list(other) == ["words.concepts.absent"] and "'galaxy', 'neuron'" in other["words.concepts.absent"].text
    Path(good).with_suffix(".json").unlink()
    assert {"words.concepts", "recipe.refused"} == names(good).keys()


def test_inflected_forms_are_found() -> None:
    counts = captions.count_words(["Two DOGS, running; a girl's parties (hoped) played."])
    assert counts == dict.fromkeys("two dogs running a girl's parties hoped played".split(), 1)
    assert all(captions._occurs(word, counts) for word in ("dog", "run", "party", "hope", "play"))
    assert not captions._occurs("cat", counts)


def test_word_vectors(tmp_path: Path, train: str) -> None:
    known = [*made.THINGS, *made.PLACES, *"a on the number with".split()]
    lines = [f"{word} 0.5 -0.{number + 1} 1.5" for number, word in enumerate(known)]
    file = tmp_path / "vectors.txt"

    def names(text: str) -> dict[str, Finding]:
        file.write_text(text)
        return amiss(examine(train_data=train, vectors=str(file)))

    assert names("\n".join(lines)) == {}
    few = names("\n".join(lines[:15]))
    assert (
        list(few) == ["words.vectors.few"] and "missing, most frequent first: 'the', " in few["words.vectors.few"].text
    )
    broken = names("\n".join([*lines, "late 0.5 1"]))
    assert list(broken) == ["words.vectors"] and f"line {len(lines) + 1}" in broken["words.vectors"].text
    alone = amiss(examine(vectors=str(tmp_path / "absent.txt")))
    assert list(alone) == ["words.vectors"]
    file.write_text("\n".join(lines))
    assert list(amiss(examine(vectors=str(file)))) == ["words.vectors.words"]


# regions


def write_regions(folder: Path, change: Any = None, split: str = "train") -> str:
    from coder_plugin.data.regions.shards import write

    folder.mkdir()
    records = list(region_data.records(split))[:12]
    if change is not None:
        records[3] = records[3]._replace(regions=change(records[3].regions))
    write(str(folder), iter(records), split=split)
    return str(folder / f"{split}-*.tar")


REGION_FAULTS: dict[str, tuple[Any, dict[str, str]]] = {
    "outside": (lambda r: replace(r, size=(50.0, 45.0)), {"train.regions.outside": "'train_003'"}),
    "no extent": (lambda r: replace(r, boxes=r.boxes[:, [2, 3, 0, 1]]), {"train.regions.empty": "'train_003'"}),
    "zeros": (
        lambda r: replace(r, features=np.concatenate([r.features[:5], np.zeros((1, 12), np.float32)])),
        {"train.regions.zeros": "'train_003'"},
    ),
    "channels": (lambda r: replace(r, features=r.features[:, :10]), {"train.regions.channels": "'train_003'"}),
    "boxless": (lambda r: replace(r, boxes=None), {"train.regions.boxless": "'train_003'"}),
    "many": (
        lambda r: Regions(np.ones((40, 12), np.float32), np.tile(np.float32([0, 0, 9, 9]), (40, 1)), (100.0, 90.0)),
        {"train.regions.many": "the first 36 are read"},
    ),
}


def test_clean_regions(tmp_path: Path) -> None:
    found = examine(train_data=write_regions(tmp_path / "a"), val_data=write_regions(tmp_path / "b", split="dev"))
    assert amiss(found) == {}
    told = {each.name: each.text for each in found}
    assert told["train.regions"] == "12 of 12 images read: 6 regions of 12 channels, 12 with boxes"


@pytest.mark.parametrize("fault", REGION_FAULTS)
def test_a_fault_of_regions(tmp_path: Path, fault: str) -> None:
    change, expected = REGION_FAULTS[fault]
    found = amiss(examine(train_data=write_regions(tmp_path / "a", change)))
    assert found.keys() == expected.keys()
    assert all(text in found[name].text for name, text in expected.items())


def test_regions_of_nan_cannot_be_read(tmp_path: Path) -> None:
    """Ours would not write them; another tool may."""
    path = write_regions(tmp_path / "a").replace("*", "000000")
    content = Path(path).read_bytes()
    number = next(iter(region_data.records("train"))).regions.features[2, 3].tobytes()
    assert content.count(number) >= 1
    Path(path).write_bytes(content.replace(number, np.float32(np.nan).tobytes(), 1))
    found = amiss(examine(train_data=path))
    assert list(found) == ["train.regions.unreadable"]


def test_regions_from_another_file(tmp_path: Path) -> None:
    """Captions in one place and regions in another, of which one lacks."""
    karpathy = region_data.write_karpathy(tmp_path / "dataset.json")
    records = [Record(r.name, r.regions) for r in region_data.records("train")][:-1]
    write_shard(str(tmp_path / "regions.tar"), records)
    flags = {"train_data": karpathy, "regions": str(tmp_path / "regions.tar")}
    found = amiss(examine(**flags))
    assert found.keys() == {"train.said", "train.regions.unreadable"}
    assert "train_047" in found["train.said"].text and "train_047" in found["train.regions.unreadable"].text
    assert list(amiss(examine(**flags, max_bad_samples=0.0))) == ["train.refused"]


def test_regions_of_shards_elsewhere(tmp_path: Path) -> None:
    """What finds regions by the first images looks at those that are here."""
    regions = write_regions(tmp_path / "a")
    local = regions.replace("*", "000000")
    command = f"pipe:touch {tmp_path}/ran; cat {local}"
    for train in (f"{command}::{local}", command):
        assert amiss(examine(train_data=train, regions=regions)).keys() == {"train.shards.remote"}
    assert not (tmp_path / "ran").exists()


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


def test_no_model(train: str) -> None:
    assert list(amiss(examine(train_data=train, loss="clip"))) == ["recipe.model"]
