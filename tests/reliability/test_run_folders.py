"""A run's folder from somebody else: links in it, names and addresses in its configuration, data that have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import options, trainer

from coder_plugin import Trainer
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.options import resolve_config
from tests.few import few
from tests.reliability import ranks as forked
from tests.reliability.rank_faults import options as scene_options


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody else's finished run."""
    folder = tmp_path_factory.mktemp("victim")
    trainer(options(folder)).run()
    return folder / "run"


LINKS = ".lock metrics.jsonl config.json plan.json checkpoints export export/last export/best set-aside".split()


@pytest.mark.parametrize("name", few([*LINKS, "checkpoints/step_00000002"], 2))
def test_a_link_in_a_run_is_refused_and_what_it_points_to_stays(name: str, victim: Path, tmp_path: Path) -> None:
    target = victim / (name if name != "checkpoints/step_00000002" else "checkpoints/step_00000008")
    if name == "set-aside":
        target.mkdir(exist_ok=True)
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target, target_is_directory=target.is_dir())
    before = tree(victim)
    for resume in ("latest", None):
        with pytest.raises(CoderError, match=f"run/{name} is a link: writing there would change files elsewhere|holds no run"):
            trainer(options(tmp_path, resume=resume)).run()
    assert tree(victim) == before


def test_a_link_is_refused_on_all_ranks(tmp_path: Path, tiny_model: str) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "notes")
    config = scene_options(tmp_path, model=tiny_model)
    endings = forked.run(lambda _: Trainer(model=tiny_model, loss="dcl", train="scenes", config=config).run(), tmp_path)
    assert [ending.status for ending in endings] == [2, 2] and (tmp_path / "notes").read_text() == "mine"
    assert all(".lock is a link" in ending.output for ending in endings)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch", target_is_directory=True)
    trainer(options(tmp_path, epochs=1, val_frequency=0)).run()
    assert (tmp_path / "scratch" / "checkpoints").is_dir()


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "/tmp/x", "a\\b", "a\0b"])
def test_a_name_that_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="is not a folder's name: leave out"):
        trainer(options(tmp_path / "logs", name=name))
    assert not list(tmp_path.iterdir())


ADDRESSES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "model": ({"model": "hf-hub:some/one"}, {"model": "ViT-B-32"}, "--model hf-hub:some/one"),
    "transformers": ({"model": "transformers:some/one"}, {"model": "ViT-B-32"}, "--model transformers:some/one"),
    "weights": ({"model": "ViT-B-32", "pretrained": "https://a.b/c"}, {"pretrained": "openai"}, "--pretrained https://a.b/c"),
    "teacher": ({"set": ["teacher.weights=hf-hub:a/b"]}, {"set": ["teacher.weights=base"]}, "--set teacher.weights=hf-hub:a/b"),
    "loss": (
        {"loss": "clip + distill(teacher='hf-hub:a/b')"},
        {"loss": "clip + distill"},
        "--loss 'clip + distill(teacher=",
    ),
    "encoder": (
        {"model": "region-bert", "model_kwargs": ["text=some/bert"]},
        {"model_kwargs": ["text=bert-base-uncased"]},
        "--model-kwargs text=some/bert",
    ),
}


@pytest.mark.parametrize("case", ADDRESSES)
@pytest.mark.parametrize("kind", ["file", "recipe"])
def test_the_address_of_a_model_must_be_typed(case: str, kind: str, tmp_path: Path) -> None:
    options, typed, flag = ADDRESSES[case]
    data = {"train_data": "a.csv", "model": "ViT-B-32"} if "model" not in options else {"train_data": "a.csv"}
    if kind == "file":
        layers: dict[str, Any] = {"file": options, "file_name": "their.json"}
    else:
        path = tmp_path / "their.toml"
        lines = ["[recipes.theirs]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in {"loss": "dcl", **options}.items() if name != "set"]
        lines += ["[recipes.theirs.options]", 'teacher.weights = "hf-hub:a/b"'] if "set" in options else []
        path.write_text("\n".join(lines))
        data["recipe"] = str(path)
        layers = {}
    with pytest.raises(CoderError) as caught:
        resolve_config(data, **layers)
    assert flag in str(caught.value) and "which would be fetched: if you trust it" in str(caught.value)
    config = resolve_config({**data, **typed}, **layers)
    assert config.to_flat()["train_data"] == "a.csv"
