"""Every save of upstream's trainer leaves an export that plain open_clip opens and that our own commands go on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs the extra open-clip", exc_type=ImportError)

import open_clip
from safetensors.torch import load_file

import coder_plugin
from coder_plugin import cli
from coder_plugin.backbones.clip import HEAD_OPTIONS
from coder_plugin.cli.eval import Command, evaluate_command
from coder_plugin.cli.flags import read_command, read_options
from coder_plugin.config import TrainConfig
from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip import saving
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import head_settings
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training import prepare
from tests.integrations import upstream_runs

pytestmark = pytest.mark.skipif(not open_clip.__version__.startswith("3.3."), reason="runs open_clip 3.3's trainer")
RECIPE = "dcl + concept_dcl"
CONFIG = TrainConfig().with_options(model="vit-for-saving.json", force_context_length=20)
WRITTEN_CONFIG = {"model": {"name": "vit-for-saving.json", "force_context_length": 20}}
OVERRIDES = {
    "force_image_size": (40, 24),
    "force_context_length": 20,
    "force_quick_gelu": True,
    "force_custom_text": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Three epochs of a model that half of upstream's flags have changed; each epoch's checkpoint replaces the one before."""
    folder = tmp_path_factory.mktemp("saving")
    model = folder / "vit-for-saving.json"
    model.write_text(json.dumps({"embed_dim": 32, **upstream_runs.MODELS["vit"]}))
    data = upstream_runs.write_scenes(folder)
    flags = (
        f"--val-data {folder}/pairs.csv --force-image-size 40 24 --force-context-length 20 --force-quick-gelu "
        "--force-custom-text --image-mean .4 .5 .6 --image-interpolation bilinear --image-resize-mode squash "
        "--delete-previous-checkpoint --save-most-recent --coder-concepts scenes"
    )
    argv = upstream_runs.command(
        folder, "run", str(model), data["csv"], *flags.split(), "--loss", RECIPE, epochs=3, save_frequency=1
    )
    ran = upstream_runs.train(argv)
    return SimpleNamespace(
        folder=ran.folder, last=ran.folder / "export/last", state=ran.state, model=str(model), data=f"{folder}/pairs.csv"
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def towers(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith("coder.")}


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_exports_are_of_the_checkpoints_that_are_there(run: SimpleNamespace) -> None:
    assert {path.name for path in (run.folder / "checkpoints").glob("*.pt")} == {"epoch_3.pt", "epoch_latest.pt"}
    assert {path.name for path in (run.folder / "export").iterdir()} == {"epoch_3", "epoch_latest", "last"}
    assert content(run.folder / "export/epoch_latest") == content(run.last)
    assert content(run.folder / "export/epoch_3").keys() == content(run.last).keys()
    for file in run.last.glob("*.safetensors"):
        assert_same(load_file(run.folder / "export/epoch_3" / file.name), load_file(file))
    assert (run.last / "open_clip_model.safetensors").stat().st_nlink > 1, "last is links"


def test_checkpoints_say_what_their_heads_were_made_with(run: SimpleNamespace) -> None:
    for name in ("epoch_3", "epoch_latest"):
        checkpoint = torch.load(run.folder / "checkpoints" / f"{name}.pt", weights_only=True)
        assert {"epoch", "name", "state_dict", "optimizer", HEAD_OPTIONS} <= checkpoint.keys()
        then = checkpoint[HEAD_OPTIONS]
        assert (then["aggregator"], then["context_blocks"], then["heads_lr_scale"]) == ("tower", 1, 1)
        assert str(Objective.from_dict(then["objective"])).startswith(RECIPE)
        assert_same(checkpoint["state_dict"], run.state)


def test_plain_open_clip_opens_an_export_with_every_override(run: SimpleNamespace) -> None:
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{run.last}")
    assert type(model).__module__.startswith("open_clip.") and type(model) is open_clip.CustomTextCLIP
    assert_same(model.state_dict(), towers(run.state))
    assert tuple(model.visual.image_size) == (40, 24) and model.context_length == 20
    assert isinstance(model.visual.transformer.resblocks[0].mlp.gelu, open_clip.transformer.QuickGELU)
    kept = model.visual.preprocess_cfg
    assert tuple(kept["mean"]) == (0.4, 0.5, 0.6) and (kept["interpolation"], kept["resize_mode"]) == ("bilinear", "squash")
    assert "bilinear" in str(preprocess) and "(0.4, 0.5, 0.6)" in str(preprocess).replace("[", "(").replace("]", ")")


def test_our_evaluation_reads_the_runs_folder(run: SimpleNamespace) -> None:
    """The same recall as the last validation in upstream's loop."""
    kept = json.loads((run.folder / "config.json").read_text())
    assert kept["model"]["name"] == run.model, "the path: another process does not know the name"
    argv = ["eval", str(run.folder), "--export", "last", "--workers", "0"]
    [found] = evaluate(argv).values()
    logged = json.loads((run.folder / "checkpoints" / "results.jsonl").read_text().splitlines()[-1])
    assert logged["epoch"] == 3 and logged["num_images"] == found["images"] == 16 and found["texts"] == 32
    assert found["rsum"] == pytest.approx(logged["rsum"])
    for ours, name in (("i2t", "image_to_text"), ("t2i", "text_to_image")):
        assert found[f"{ours}_meanr"] == pytest.approx(logged[f"{name}_mean_rank"])
        for k in (1, 5, 10):
            assert found[f"{ours}_r{k}"] / 100 == pytest.approx(logged[f"{name}_R@{k}"])


def evaluate(argv: list[str]) -> dict[str, Any]:
    arguments = cli.build_parser().parse_args(argv)
    return evaluate_command(read_command(Command, arguments), read_options(arguments))


@pytest.mark.parametrize("start", ["checkpoints/epoch_3.pt", "export/last/open_clip_model.safetensors"])
def test_our_trainer_starts_from_either(run: SimpleNamespace, start: str) -> None:
    config = resolve_config(
        {
            "model": run.model,
            "pretrained": str(run.folder / start),
            "loss": RECIPE,
            "concepts": "scenes",
            "train_data": run.data,
            **OVERRIDES,
        }
    )
    objective = prepare.fit_objective(prepare.make_objective(config), config, samples_per_epoch=32)
    model = prepare.make_training_model(config, objective, torch.device("cpu"))
    state = model.state_dict()
    assert_same(towers(state), towers(run.state))
    heads = load_file(run.last / "coder.safetensors")
    assert heads and set(heads) <= set(state)
    assert_same({name: state[name] for name in heads}, {name: run.state[name] for name in heads})


@pytest.fixture(scope="module")
def small(tiny_model: str) -> Any:
    objective = Objective.parse(RECIPE).with_options({"concepts.vocabulary": "scenes"})
    return coder_plugin.create_model(tiny_model, loss=objective)


def save(model: Any, run: Path, name: str) -> dict[str, Any]:
    """What the adapter does when upstream saves ``name``.pt; the weights say how often they were saved."""
    with torch.no_grad():
        model.logit_scale += 1
    checkpoint = {"epoch": 1, "state_dict": {f"module.{key}": value for key, value in model.state_dict().items()}}
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    saved = saving.saved(checkpoint, str(run / "checkpoints" / f"{name}.pt"), model, CONFIG, made(model), None)
    (run / "checkpoints" / f"{name}.pt").touch()
    return saved


def made(model: Any, **other: Any) -> dict[str, Any]:
    return {**head_settings(model), "heads_lr_scale": 1.0, **other}


def scale(folder: Path) -> float:
    return float(load_file(folder / "open_clip_model.safetensors")["logit_scale"])


@pytest.mark.parametrize("broken", ["write_files", "shutil.copytree", "os.replace", "nest"])
def test_a_save_that_is_killed_leaves_the_one_before_whole(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    save(small, tmp_path, "tmp")
    before, epoch = content(tmp_path / "export"), float(small.logit_scale)
    assert scale(tmp_path / "export/last") == epoch
    assert json.loads((tmp_path / "config.json").read_text()) == WRITTEN_CONFIG

    def killed(*args: Any, **options: Any) -> None:
        if broken == "write_files":  # in the middle of a file
            (args[1] / "open_clip_model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    if broken == "os.replace":  # of a folder
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda old, new: (killed if Path(old).is_dir() else replace)(old, new))
    else:
        monkeypatch.setattr(f"coder_plugin.integrations.open_clip.saving.{broken}", killed)
    with pytest.raises(KeyboardInterrupt):
        save(small, tmp_path, "tmp")
    monkeypatch.undo()
    names = ("epoch_latest", "last")
    after = {name: content(tmp_path / "export" / name) for name in names}
    if broken == "nest":  # the last file that is written
        assert scale(tmp_path / "export/last") == pytest.approx(epoch + 1)
    else:
        assert {f"{name}/{path}": blob for name in names for path, blob in after[name].items()} == before
    assert json.loads((tmp_path / "config.json").read_text()) == WRITTEN_CONFIG
    save(small, tmp_path, "tmp")
    assert {path.name for path in (tmp_path / "export").iterdir()} == {"epoch_latest", "last"}, "nothing is left lying"
    assert scale(tmp_path / "export/last") == scale(tmp_path / "export/epoch_latest") == pytest.approx(epoch + 2)


@pytest.mark.parametrize(
    ("checkpoints", "saved", "kept"),
    [
        ("epoch_2 epoch_3", "epoch_3", "epoch_2 epoch_3"),  # upstream has still to remove epoch_2
        ("epoch_2", "epoch_3", "epoch_2 epoch_3"),  # it is saved after its export
        ("epoch_3", "epoch_latest", "epoch_3"),
        ("epoch_9 epoch_10", "epoch_10", "epoch_9 epoch_10"),
        ("", "epoch_latest", ""),
    ],
)
def test_exports_go_with_their_checkpoints(tmp_path: Path, checkpoints: str, saved: str, kept: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in checkpoints.split():
        (tmp_path / "checkpoints" / f"{name}.pt").touch()
    for name in {*checkpoints.split(), saved, "epoch_1", "epoch_latest", "last"}:
        (tmp_path / "export" / name).mkdir(parents=True)
    saving.prune(tmp_path, saved)
    assert {path.name for path in (tmp_path / "export").iterdir()} == {*kept.split(), "epoch_latest", "last"}


def test_resuming_needs_the_same_heads(small: Any, tmp_path: Path) -> None:
    then = save(small, tmp_path, "epoch_1")[HEAD_OPTIONS]
    saving.check_resumed(then, made(small), "run.pt", trains=True)
    with pytest.raises(CoderError, match="no checkpoint of a run with --loss.*--pretrained"):
        saving.check_resumed(None, made(small), "run.pt", trains=True)
    with pytest.raises(CoderError, match='was trained with --loss "dcl.*this run asks for "clip"'):
        saving.check_resumed(then, made(small, objective=Objective.parse("clip").to_dict()), "run.pt", trains=True)
    for name, other in (("aggregator", "gpo"), ("context_blocks", 2), ("heads_lr_scale", 10.0)):
        with pytest.raises(CoderError, match=f"--{name.replace('_', '-')} .* this run has {other}"):
            saving.check_resumed(then, made(small, **{name: other}), "run.pt", trains=True)
