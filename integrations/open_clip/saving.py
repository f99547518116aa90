"""Every checkpoint that upstream saves records how its heads were built, and an export for plain open_clip is written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.backbones.clip import HEAD_OPTIONS, read_training_checkpoint
from coder_plugin.config import TrainConfig, nest
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_folder, atomic_write
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import inference_options
from coder_plugin.pretrained.export import write_export as write_files
from coder_plugin.training.resume import comparable

#: File in the directory of a sharded checkpoint (main) that records how its heads were built.
SHARDED = "coder.json"


def is_checkpoint(value: Any) -> bool:
    return isinstance(value, Mapping) and {"epoch", "state_dict"} <= value.keys()


def saved(
    checkpoint: Mapping[str, Any], path: str, model: Any, config: TrainConfig, made: Mapping[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The checkpoint with the record ``made`` of how its heads were built. Its export is written to ``RUN/export/NAME`` for
    ``RUN/checkpoints/NAME.pt``, and as links to ``RUN/export/last``."""
    state = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
    write_export(model, state, Path(path).parent.parent, export_name(path), config, tokenizer)
    return {**checkpoint, HEAD_OPTIONS: made}


def begin_sharded(path: str, made: Mapping[str, Any]) -> None:
    """Write the record of the heads into the directory of a sharded checkpoint, before upstream fills it."""
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / SHARDED).write_text(json.dumps(made))


def export_name(path: str) -> str:
    stem = Path(path).stem
    return "epoch_latest" if stem in ("tmp", "_tmp_latest") else stem  # upstream renames these


def write_export(
    model: Any, state: Mapping[str, Any], run: Path, name: str, config: TrainConfig, tokenizer: Any
) -> None:
    """Write one export, and ``last``, and the configuration that ``coder-plugin eval RUN`` reads.

    Each folder is written under a temporary name and then renamed, so a run that is killed here leaves the old ones complete.
    """
    exports = run / "export"
    with atomic_folder(exports / "last") as last, atomic_folder(exports / name) as folder:
        write_files(model, folder, state, tokenizer=tokenizer, options=inference_options(config))
        shutil.copytree(folder, last, copy_function=_link, dirs_exist_ok=True)
    with atomic_write(run / "config.json", "w") as file:
        file.write(json.dumps(nest(config.given()), indent=2))


def prune(run: Path, name: str) -> None:
    """Delete exports whose checkpoints no longer exist, except ``name``, which is being saved."""
    for folder in (run / "export").glob("epoch_[0-9]*"):
        checkpoint = run / "checkpoints" / folder.name
        if folder.name != name and not checkpoint.is_dir() and not checkpoint.with_name(f"{folder.name}.pt").is_file():
            shutil.rmtree(folder)


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def check_resumed(made: Mapping[str, Any] | None, now: Mapping[str, Any], path: str, *, trains: bool) -> None:
    """Raise :class:`CoderError` if a checkpoint is not from a run with these heads."""
    if made is None:
        raise CoderError(
            f"--resume {path} is no checkpoint of a run with --loss, so it has no state of heads. Start from its "
            "weights with --pretrained"
        )
    then, objective = (Objective.from_dict(each["objective"], inference=True) for each in (made, now))
    if comparable(then) != comparable(objective):
        raise CoderError(
            f'--resume {path} was trained with --loss "{then}", this run asks for "{objective}", or other options of heads: '
            "resume with its own loss, or start from its weights with --pretrained"
        )
    for name in ("aggregator", "context_blocks", *(["heads_lr_scale"] if trains else [])):
        if made[name] != now[name]:
            raise CoderError(
                f"--resume {path} was trained with --{name.replace('_', '-')} {made[name]}, this run has {now[name]}: resume "
                "with the same, or start from its weights with --pretrained"
            )


def read_made(path: str) -> Mapping[str, Any] | None:
    """The record of a checkpoint's heads, from a file or a sharded checkpoint's directory; None if there is none."""
    if Path(path).is_dir():
        made = Path(path) / SHARDED
        return json.loads(made.read_text()) if made.is_file() else None
    checkpoint = read_training_checkpoint(path)
    return None if checkpoint is None else checkpoint[HEAD_OPTIONS]
