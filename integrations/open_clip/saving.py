"""Every checkpoint that upstream saves says how its heads were made, and leaves an export that plain open_clip opens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from coder_plugin.backbones.clip import MADE_WITH
from coder_plugin.errors import CoderError
from coder_plugin.recipe import Recipe
from coder_plugin.training.config import TrainConfig
from coder_plugin.training.export import export_heads, export_model, made_with
from coder_plugin.training.loop import comparable


def is_checkpoint(value: Any) -> bool:
    return isinstance(value, Mapping) and {"epoch", "state_dict"} <= value.keys()


def saved(checkpoint: Mapping[str, Any], path: str, model: Any, config: TrainConfig) -> dict[str, Any]:
    """The checkpoint with what its heads were made with; its export is written, to ``RUN/export/NAME`` for
    ``RUN/checkpoints/NAME.pt`` and, as links, to ``RUN/export/last``."""
    state = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
    run = Path(path).parent.parent
    name = "epoch_latest" if Path(path).stem == "tmp" else Path(path).stem  # upstream renames tmp.pt
    write_export(model, state, run, name, config)
    return {**checkpoint, MADE_WITH: made_with(model)}


def write_export(model: Any, state: Mapping[str, Any], run: Path, name: str, config: TrainConfig) -> None:
    """One export, and ``last``; beside them the configuration that ``coder-plugin eval RUN`` reads."""
    folder = run / "export" / name
    export_model(model, folder, state)
    export_heads(model, folder, state)
    (run / "config.json").write_text(json.dumps(asdict(config), indent=2))
    last = run / "export" / "last"
    aside = run / "export" / ".last"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside, copy_function=_link)
    shutil.rmtree(last, ignore_errors=True)
    os.replace(aside, last)


def prune(run: Path) -> None:
    """Exports of checkpoints that are there no more."""
    for folder in (run / "export").glob("epoch_*"):
        if folder.name == "epoch_latest":
            continue  # tmp.pt, until upstream renames it
        there = run / "checkpoints" / folder.name
        if not there.is_dir() and not there.with_name(f"{folder.name}.pt").is_file():
            shutil.rmtree(folder)


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def check_resumed(made: Mapping[str, Any] | None, recipe: Recipe, path: str) -> None:
    """:class:`CoderError` where a checkpoint to resume is not of a run with these heads."""
    if made is None:
        raise CoderError(
            f"--resume {path} is no checkpoint of a run with --loss: its optimizer and state know no heads. Start from its "
            "weights with --pretrained"
        )
    then = Recipe.from_dict(made["recipe"])
    if comparable(then) != comparable(recipe):
        raise CoderError(
            f'--resume {path} was trained with --loss "{then}", this run asks for "{recipe}", or other options of heads: '
            "resume with its own recipe, or start from its weights with --pretrained"
        )


def read_made(path: str) -> Mapping[str, Any] | None:
    """What a checkpoint's heads were made with; None where it has none."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return checkpoint.get(MADE_WITH) if is_checkpoint(checkpoint) else None
