"""Every checkpoint that upstream saves says how its heads were made, and leaves an export that plain open_clip opens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.backbones.clip import MADE_WITH, read_training_checkpoint
from coder_plugin.config import TrainConfig, nest
from coder_plugin.errors import CoderError
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import export_heads, export_model, inference_options
from coder_plugin.training.resume import comparable

#: In the directory of a sharded checkpoint (main): what its heads were made with.
SHARDED = "coder.json"


def is_checkpoint(value: Any) -> bool:
    return isinstance(value, Mapping) and {"epoch", "state_dict"} <= value.keys()


def saved(
    checkpoint: Mapping[str, Any], path: str, model: Any, config: TrainConfig, made: Mapping[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The checkpoint with what its heads were ``made`` with; its export is written, to ``RUN/export/NAME`` for
    ``RUN/checkpoints/NAME.pt`` and, as links, to ``RUN/export/last``."""
    state = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
    write_export(model, state, Path(path).parent.parent, export_name(path), config, tokenizer)
    return {**checkpoint, MADE_WITH: made}


def begin_sharded(path: str, made: Mapping[str, Any]) -> None:
    """What a run with heads was ``made`` with, in the directory of a sharded checkpoint, before upstream fills it and makes it
    one to resume."""
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / SHARDED).write_text(json.dumps(made))


def export_name(path: str) -> str:
    stem = Path(path).stem
    return "epoch_latest" if stem in ("tmp", "_tmp_latest") else stem  # upstream renames these


def write_export(
    model: Any, state: Mapping[str, Any], run: Path, name: str, config: TrainConfig, tokenizer: Any
) -> None:
    """One export, and ``last``; beside them the configuration that ``coder-plugin eval RUN`` reads.

    Each folder is made aside and renamed: a run that is killed here leaves the ones before whole.
    """
    exports = run / "export"
    aside = _aside(exports / name)
    export_model(model, aside, state, tokenizer=tokenizer, options=inference_options(config))
    export_heads(model, aside, state)
    linked = _aside(exports / "last")
    shutil.copytree(aside, linked, copy_function=_link)
    _rename(aside, exports / name)
    _rename(linked, exports / "last")
    written = run / ".config.json.writing"
    written.write_text(json.dumps(nest(config.given()), indent=2))
    os.replace(written, run / "config.json")


def prune(run: Path, name: str) -> None:
    """Exports of checkpoints that are there no more; ``name`` is being saved."""
    for folder in (run / "export").glob("epoch_[0-9]*"):
        checkpoint = run / "checkpoints" / folder.name
        if folder.name != name and not checkpoint.is_dir() and not checkpoint.with_name(f"{folder.name}.pt").is_file():
            shutil.rmtree(folder)


def _aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def _rename(aside: Path, folder: Path) -> None:
    """Put one folder in the place of another."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(aside, folder)
    shutil.rmtree(old, ignore_errors=True)


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def check_resumed(made: Mapping[str, Any] | None, now: Mapping[str, Any], path: str, *, trains: bool) -> None:
    """:class:`CoderError` where a checkpoint to resume is not of a run with these heads."""
    if made is None:
        raise CoderError(
            f"--resume {path} is no checkpoint of a run with --loss: its optimizer and state know no heads. Start from its "
            "weights with --pretrained"
        )
    then, objective = Objective.from_dict(made["objective"]), Objective.from_dict(now["objective"])
    if comparable(then) != comparable(objective):
        raise CoderError(
            f'--resume {path} was trained with --loss "{then}", this run asks for "{objective}", or other options of heads: '
            "resume with its own objective, or start from its weights with --pretrained"
        )
    for name in ("aggregator", "context_blocks", *(["heads_lr_scale"] if trains else [])):
        if made[name] != now[name]:
            raise CoderError(
                f"--resume {path} was trained with --{name.replace('_', '-')} {made[name]}, this run has {now[name]}: resume "
                "with the same, or start from its weights with --pretrained"
            )


def read_made(path: str) -> Mapping[str, Any] | None:
    """What a checkpoint's heads were made with, of a file or of a sharded one's directory; None where it has none."""
    if Path(path).is_dir():
        made = Path(path) / SHARDED
        return json.loads(made.read_text()) if made.is_file() else None
    checkpoint = read_training_checkpoint(path)
    return None if checkpoint is None else checkpoint[MADE_WITH]
