"""The model card says what was run, what was measured and what nobody knows; the hub can read its header."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import coder_plugin
from coder_plugin.integrations.hub.card import card_text
from coder_plugin.integrations.hub.record import bare, run_record
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import WEIGHTS, export_model

MODEL = {
    "class": "CLIP",
    "name": "CLIP",
    "pictures": True,
    "parameters": 1_234_567,
    "dimensions": 96,
    "views": 1,
    "heads": [],
    "aggregator": "tower",
    "concepts": None,
    "re-ranks": False,
    "text tower": None,
    "max_regions": None,
}
RUN = {
    "training data": {"name": "train-{0..9}.tar", "images": 6000, "samples per epoch": 6000, "captions": "draw"},
    "validation data": {"name": "val.tar", "images": 1000},
    "steps per epoch": 46,
    "epochs": 10,
    "batch": {"per rank and forward": 64, "global per step": 128},
    "precision": "bf16",
    "device": "cuda:0",
    "ranks": 2,
    "versions": {"torch": "9.9"},
}
RECALLS = {"i2t_r1": 1.5, "i2t_r5": 2.5, "i2t_r10": 3.5, "t2i_r1": 4.5, "t2i_r5": 5.5, "t2i_r10": 6.5, "rsum": 24.0}
RESULTS = {**RECALLS, "images": 1000, "texts": 5000, "epoch": 10, "step": 460}


def record(objective: str = "3*dcl(mu=0.07) + clip", **changed: Any) -> dict[str, Any]:
    options = {"model": "ViT-B-32", "seed": 7, "precision": "amp_bf16", "pretrained": "openai"}
    known = {"objective": objective, "terms": Objective.parse(objective).to_dict(), "options": options}
    return {**known, "run": RUN, "results": RESULTS, "model": MODEL, **changed}


def card(made: dict[str, Any], name: str = "folder", **stated: Any) -> ModelCard:
    return ModelCard(card_text(name, made, {"open_clip_model.safetensors": 12_345_678}, on_hub="/" in name, **stated))


def test_what_was_run_and_measured_is_in_it() -> None:
    made = card(record(), license="mit", base_model="group/base", datasets=["nlphuji/flickr30k"])
    for said in (
        "# folder",
        "an open_clip model (CLIP, `ViT-B-32`)",
        "1,234,567",
        "96 dimensions",
        "`open_clip_model.safetensors` 12.3 MB",
        "objective: `3*dcl(mu=0.07) + clip`",
        "- dcl: weight 3, mu=0.07",
        "- clip: weight 1",
        "fine-tuned from: group/base",
        "`train-{0..9}.tar`, 6,000 images",
        "10 epochs of 46 steps, 128 pairs per step, precision bf16, 2 processes on cuda:0, seed 7",
        "torch 9.9",
        "| vectors | 1.50 | 2.50 | 3.50 | 4.50 | 5.50 | 6.50 | 24.00 |",
        "on 1,000 images and 5,000 captions of `val.tar`",
        "after epoch 10 (step 460)",
        "6,000 training images are few",
        "One run with one seed",
        'coder_plugin.from_pretrained("folder")',
        "coder-plugin eval folder --val-data DATA --precision amp_bf16",
        'create_model_from_pretrained("local-dir:folder")',
        'SentenceTransformer("folder", trust_remote_code=True)',
        "arXiv:2208.09843",
        "OpenCLIP",
    ):
        assert said in made.content, said
    assert "No licence was stated" not in made.content and "2405.10029" not in made.content
    data = made.data
    assert (data.library_name, data.license, data.base_model) == ("open_clip", "mit", "group/base")
    assert data.pipeline_tag == "zero-shot-image-classification" and data.datasets == ["nlphuji/flickr30k"]
    measured = {result.metric_name: result.metric_value for result in data.eval_results}
    assert measured == dict(zip(measured, RECALLS.values(), strict=True)) and list(measured)[0] == "image to text R@1"
    assert {result.dataset_name for result in data.eval_results} == {"val.tar"}


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        ("coder", {"2208.09843"}),
        ("clip + ascl", {"2405.10029"}),
        ("clip + 0.5*selfalign", {"2308.14009"}),
        ("coder + selfalign", {"2208.09843", "2308.14009"}),
        ("clip", set()),
    ],
)
def test_the_papers_of_the_losses_are_cited(objective: str, wanted: set[str]) -> None:
    made = card(record(objective)).content
    assert {paper for paper in ("2208.09843", "2405.10029", "2308.14009") if paper in made} == wanted
    assert "zenodo.5143773" in made


def test_a_region_model_promises_no_plain_clip() -> None:
    model = {**MODEL, "name": "region-bert", "pictures": False, "max_regions": 36, "views": 12}
    made = card(record(model=model), "group/name")
    assert "It does not open in plain open_clip" in made.content and "import open_clip" not in made.content
    assert "SentenceTransformer" not in made.content and "OpenCLIP" not in made.content
    assert "--regions FEATURES" in made.content and "(images @ texts.T).amax(1)" in made.content
    assert (made.data.pipeline_tag, made.data.library_name) == ("feature-extraction", "coder_plugin")


def _towers(export: Path) -> Path:
    """The towers of an export, as open_clip would have saved them."""
    towers = export.with_name("towers")
    towers.mkdir()
    shutil.copy(export / "open_clip_config.json", towers)
    save_file(load_file(export / WEIGHTS), towers / WEIGHTS, metadata={"format": "pt"})
    return towers


def test_an_export_without_its_run_knows_the_recipe_of_its_heads(tmp_path: Path, tiny_model: str) -> None:
    """And is shared from wherever it lies; a plain one knows nothing."""
    torch.manual_seed(0)
    model = coder_plugin.create_model(tiny_model, loss="dcl + concept_dcl").eval()
    export_model(model, tmp_path / "export")
    plain = coder_plugin.save_pretrained(_towers(tmp_path / "export"), tmp_path / "plain")
    assert "objective: unknown" in (plain / "README.md").read_text()
    whole = coder_plugin.save_pretrained(tmp_path / "export", tmp_path / "whole")
    text = (whole / "README.md").read_text()
    assert "objective: `dcl + concept_dcl`" in text and "scoring heads: concepts" in text
    assert json.loads((whole / "coder_run.json").read_text())["results"] == {}


def write_run(folder: Path, *, best: dict | None, last: dict | None, step: int, metrics: list[dict]) -> Path:
    from coder_plugin.training import checkpoint

    if best is not None:
        manifest = {"step": step, "epoch": 1, "best": best, "last": last}
        checkpoint.save(folder / "checkpoints", f"step_{step}", manifest=manifest, common={"x": {"y": torch.ones(1)}})
    lines = [json.dumps(record) for record in metrics]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "val/rs']))
    return folder


def logged(step: int, rsum: float, **more: float) -> dict[str, float]:
    return {"step": step, "val/rsum": rsum, "val/epoch": step // 10, **{f"val/{key}": value for key, value in more.items()}}


def test_the_figures_are_of_the_exported_weights(tmp_path: Path) -> None:
    best = {"rsum": 50.0, "epoch": 2, "step": 20, "checkpoint": "step_20"}
    last = {"rsum": 40.0, "epoch": 3, "step": 30}
    metrics = [logged(0, 90.0), logged(10, 30.0), {"step": 15, "loss": 1.0}, logged(20, 50.0), logged(30, 40.0)]
    run = write_run(tmp_path, best=best, last=last, step=30, metrics=metrics)
    assert run_record(run, "best")["results"] == {"rsum": 50.0, "epoch": 2, "step": 20}
    assert run_record(run, "last")["results"] == last
    going_on = write_run(tmp_path, best=best, last=last, step=30, metrics=[*metrics, logged(40, 60.0)])
    assert run_record(going_on, "best")["results"] == {"rsum": 60.0, "epoch": 4, "step": 40}
    assert run_record(going_on, "last")["results"] == last
    worse = write_run(tmp_path, best=best, last=last, step=30, metrics=[*metrics, logged(40, 50.0)])
    assert run_record(worse, "best")["results"]["step"] == 20


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/janedoe/data/train.csv", "train.csv"),
        ("/home/jane doe/data/train.csv", "train.csv"),
        ("~/shards/{00..99}.tar", "{00..99}.tar"),
        ("../janedoe/regions/", "regions"),
        (r"C:\Users\janedoe\x.json", "x.json"),
        ("/a/janedoe/x.tsv::/b/janedoe/y.tsv", "x.tsv::y.tsv"),
        ("text=/home/janedoe/bert", "text=bert"),
        ("/home/janedoe/a=b/x.csv", "x.csv"),
        ("pipe:cat /home/janedoe/{0..9}.tar", "a command"),
        ("train_data=pipe:curl https://h.example/y.tar -H 'Authorization: Bearer SECRET'", "train_data=a command"),
        ("pipe:curl -u me:SECRET https://h.example/d/y.tar::/b/janedoe/z.tar", "a command::z.tar"),
        ("{pipe:curl -u me:SECRET a,pipe:curl -u me:SECRET b}", "a command"),
        ("https://h.example/d/y-{0..3}.tar?X-Amz-Signature=SEC/RET#SECRET", "y-{0..3}.tar"),
        ("val_data=https://me:SECRET@h.example/d/y.tar", "val_data=y.tar"),
        ("{https://h.example/a.tar?s=SECRET,https://h.example/b.tar?s=SECRET}", "a.tar"),
        ("s3://bucket/d/y.tar?s=SECRET::/b/janedoe/z.tar", "y.tar::z.tar"),
        ("https://me:SECRET@h.example/?token=SECRET", "an address"),
        ("https://me:SEC#RET@h.example/y.tar", "an address"),
        ("hf-hub:group/name", "hf-hub:group/name"),
        ("ViT-B-32", "ViT-B-32"),
        ("scenes", "scenes"),
    ],
)
def test_names_stay_and_places_go(text: str, kept: str) -> None:
    assert bare(text) == kept


def test_a_runs_options_lose_their_places(tmp_path: Path) -> None:
    config = {
        "logs": "/home/janedoe/logs",
        "name": "janedoe-1",
        "loss": "coder-printed",
        "set": ["concepts.vocabulary=/home/janedoe/c.safetensors", "dcl.mu=0.07"],
        "train_data": "/home/janedoe/f30k/train.tar",
        "lr": 0.1,
        "image_mean": [0.5, 0.5, 0.5],
    }
    heads = {"concepts": {"vocabulary": "/home/janedoe/c.safetensors", "beta": 0.9}}
    plan = {"objective": "dcl", "options": {"terms": [], "heads": heads}, "run": "/home/janedoe/logs/janedoe-1"}
    plan["training data"] = {"name": "/home/janedoe/f30k/train.tar", "images": None, "captions": "all"}
    plan["validation data"] = None
    config["regions"] = "https://h.example/f30k/regions.tar?X-Amz-Signature=janedoe"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = run_record(tmp_path, "best")
    assert "janedoe" not in json.dumps(found) and found["options"]["regions"] == "regions.tar"
    plan["training data"]["name"] = "https://me:janedoe@h.example/train.tar?sig=janedoe::pipe:curl -u me:janedoe h.example"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert run_record(tmp_path, "best")["run"]["training data"]["name"] == "train.tar::a command"
    assert found["options"]["loss"] == "coder-printed" and found["options"]["train_data"] == "train.tar"
    assert found["options"]["set"] == ["concepts.vocabulary=c.safetensors", "dcl.mu=0.07"]
    assert found["terms"]["heads"]["concepts"] == {"vocabulary": "c.safetensors", "beta": 0.9}
    assert found["run"]["validation data"] is None and found["options"]["image_mean"] == [0.5, 0.5, 0.5]
