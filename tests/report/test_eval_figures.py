"""`eval --pictures`: flags, what is collected of each model, what is written, and pictures under regions."""

from __future__ import annotations

import builtins
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coder_plugin.cli import main
from coder_plugin.cli.eval import Command, evaluate_command
from coder_plugin.config import DataConfig, TrainConfig
from coder_plugin.data import open_source
from coder_plugin.data.from_config import pictures_under_regions
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import compare
from coder_plugin.pretrained.encode import Encoder
from coder_plugin.report import eval_figures
from tests import region_model
from tests.training import region_data


@pytest.fixture(scope="module", autouse=True)
def extras():
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return region_data.write_precomp(tmp_path_factory.mktemp("made"))


def make_encoder(data: str, seed: int = 0, loss: str = "dcl") -> tuple[Encoder, Any]:
    model = region_model.make(loss, seed=seed, word_dim=16)
    encoder = Encoder(model, model.tokenizer(), model.transform(), device=torch.device("cpu"), workers=0)
    return encoder, open_source(data, split="dev")


def test_flags_are_checked(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "folder")
    figure_options = eval_figures.figure_options
    assert figure_options(None) is None
    assert figure_options(folder) == (Path(folder), 8, ())
    options = figure_options(folder, images=2, concepts="Dog, water,dog,snow")
    assert options == (Path(folder), 2, ("dog", "water", "snow")) and Path(folder).is_dir()
    (tmp_path / "file").write_text("")
    for wrong, match in (
        ({"folder": str(tmp_path / "file")}, "cannot be made"),
        ({"folder": folder, "reweighted": True}, "leave out --beta"),
        ({"folder": folder, "concepts": "dog,dog"}, "two words"),
        ({"folder": None, "images": 3, "concepts": "a,b"}, "--pictures-count and --pictures-concepts.*--pictures FOLDER"),
    ):
        with pytest.raises(CoderError, match=match):
            figure_options(**wrong)


@pytest.mark.parametrize("absent", ["matplotlib", "sklearn"])
def test_what_is_missing_is_told_of_at_once(absent: str, tmp_path: Path, monkeypatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest):
        if name.split(".")[0] == absent:
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(compare._Setting, "data", lambda *_: pytest.fail("read before the extras were looked for"))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CoderError, match=r"pip install .+\[report\]"):
        evaluate_command(Command(run_folder=["a"], pictures=str(tmp_path / "new")), {})


def test_the_command_writes_every_models(data: str, tmp_path: Path, monkeypatch, capsys) -> None:
    def opened_model(setting: compare._Setting, run: str, source: Any) -> Any:
        encoder, _ = make_encoder(data, seed=len(run), loss="dcl + cra" if run == "runs/a" else "dcl")
        return SimpleNamespace(name=run, encoder=lambda: encoder, rerank=None)

    monkeypatch.setattr(compare._Setting, "data", lambda *_: (make_encoder(data)[1], DataConfig()))
    monkeypatch.setattr(compare._Setting, "open", opened_model)
    monkeypatch.chdir(tmp_path)
    for run in ("runs/a", "runs/bb"):
        Path(run).mkdir(parents=True)
    folder = tmp_path / "pictures"
    flags = ["--pictures", str(folder), "--pictures-count", "3", "--pictures-concepts", "dog,cat,ball"]
    assert main(["eval", "runs/a", "runs/bb", *flags, "--json", str(tmp_path / "numbers.json")]) == 0
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    own = ["alignment-000.png", "alignment-001.png", "alignment-002.png", "alignment.json"]
    assert names == [
        *(f"1-runs-a/{name}" for name in own),
        *(f"2-runs-bb/{name}" for name in own),
        "tsne.json",
        "tsne.png",
    ]
    both = [json.loads((folder / each / "alignment.json").read_text()) for each in ("1-runs-a", "2-runs-bb")]
    for rows in both:
        assert [row["image"] for row in rows] == ["dev_000", "dev_001", "dev_002"]
    assert [rows[0]["regions"]["context"] is not None for rows in both] == [True, False]  # one has the head contexts
    measured = json.loads((folder / "tsne.json").read_text())
    assert list(measured) == ["runs/a", "runs/bb"] and list(measured["runs/a"]["counts"]) == ["dog", "cat", "ball"]
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert [row.get("concept_words") for row in numbers] == [*measured.values(), None, None]  # ensemble and mean have none
    assert f"other concepts' {measured['runs/bb']['gap']:.3f}" in capsys.readouterr().out


def test_regions_without_boxes_have_numbers_alone(data: str, tmp_path: Path, caplog) -> None:
    encoder, source = make_encoder(data)
    bare = [
        Item(item.key, item.captions, lambda item=item: Regions(item.load().features)) for _, item in source.items()
    ]
    options = eval_figures.FigureOptions(tmp_path, 2, ("dog", "cat"))
    with caplog.at_level(logging.WARNING):
        found = eval_figures.collect(options, encoder, ItemSource(bare))
    eval_figures.write(options, {"x": found})
    assert "without boxes" in caplog.text and not list(tmp_path.glob("alignment-*.png"))
    assert json.loads((tmp_path / "alignment.json").read_text())[0]["words"][0]["box"] is None


def test_pictures_lie_under_their_regions(tmp_path: Path) -> None:
    """A Karpathy file with regions in another place, and pictures beside it: of the first image alone."""
    folder = tmp_path / "data"
    folder.mkdir()
    regions = region_data.write_precomp(tmp_path / "regions")
    spec = region_data.write_karpathy(folder / "dataset.json")
    (folder / "images").mkdir()
    Image.new("RGB", (50, 45), (10, 200, 30)).save(folder / "images" / "dev_000.jpg")
    config = TrainConfig().with_options(train_data=spec, val_data=spec, regions=regions, model="region-bigru")
    beside = pictures_under_regions(config.data, "val")
    encoder, _ = make_encoder(regions)
    by_name = {record.name: record.regions for record in region_data.records("dev")}
    captions = open_source(spec, split="val", pictures=False)
    items = [Item(i.key, i.captions, lambda i=i: by_name[i.key[:-4]]) for _, i in captions.items()]
    found = eval_figures.collect(
        eval_figures.FigureOptions(tmp_path, 2, ("dog", "cat")), encoder, ItemSource(items), beside
    )
    first, second = (each.picture for each in found.alignments)
    assert first.shape == (45, 50, 3) and np.abs(first[0, 0].astype(int) - [10, 200, 30]).max() < 8
    assert second.shape == (288, 320, 3) and len(np.unique(second)) == 1  # blank
    assert pictures_under_regions(TrainConfig().with_options(train_data=spec, val_data=spec).data, "val") is None
