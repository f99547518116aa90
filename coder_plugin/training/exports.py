"""The exports of a resumed run: what a kill has left is removed, and exports that are not the checkpoint's are replaced."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.files import fsync_path
from coder_plugin.pretrained.export import export_model, exported_step, inference_options
from coder_plugin.training import checkpoint, finite

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer

_log = logging.getLogger(__name__)


def last_is_behind(folder: Path, step: int) -> bool:
    """Whether ``export/last`` of a run is not that of ``step``, after the leftovers of killed saves are removed.

    Every rank calls this and gets rank 0's answer. No other process may write to the run.

    Args:
        folder: of the run.
        step: of the checkpoint that the run resumes from.

    Example:
        >>> last_is_behind(Path("nowhere"), 0)
        True
    """
    behind = False
    if distributed.rank() == 0:
        _clean(folder / "export")
        behind = exported_step(folder / "export" / "last") != step
    return distributed.gather_objects(behind)[0]


def set_aside_best(folder: Path, target: Path, *, after: int) -> Path | None:
    """Move ``export/best`` of a run into ``target`` if its step is after ``after``. Returns its new place, or None."""
    best = folder / "export" / "best"
    step = exported_step(best)
    if step is None or step <= after:
        return None
    target.mkdir(exist_ok=True)
    place = target / f"export-best-step_{step:08d}"
    if place.exists():
        place = place.with_name(f"{place.name}-{time.time_ns()}")
    os.replace(best, place)
    fsync_path(target)
    fsync_path(best.parent)
    return place


def restore_best(trainer: Trainer, checkpoints: Path) -> None:
    """Write ``export/best`` from the best evaluation's checkpoint, if there is none. It needs no other rank.

    Without that checkpoint there is no ``export/best`` until an evaluation is better.

    Args:
        checkpoints: the folder of the checkpoint from which the run goes on.
    """
    name, folder = trainer.best.get("checkpoint"), trainer.folder / "export" / "best"
    if name is None or folder.exists():
        return
    own = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
    try:
        manifest, common, _ = checkpoint.load(checkpoints / Path(name).name)
        if manifest["step"] != trainer.best["step"]:
            raise CoderError(f"its step is {manifest['step']}, not {trainer.best['step']}")
        weights = {**common["model"], **common.get("average", {})}
        finite.check_loaded(weights)
        trainer.model.load_state_dict(weights)
    except (CoderError, OSError, KeyError, RuntimeError) as error:
        trainer.model.load_state_dict(own)
        trainer.best = {}
        _log.warning("export/best is written at the next evaluation, because %s cannot be used: %s", name, error)
        return
    try:
        options = inference_options(trainer.config)
        export_model(trainer.model, folder, tokenizer=trainer.tokenizer, options=options, step=manifest["step"])
    finally:
        trainer.model.load_state_dict(own)


def _clean(exports: Path) -> None:
    """Remove unfinished exports, also those of another host's process; an export whose replacement was not finished stays."""
    for path in list(exports.glob(".*")):
        if path.name.endswith(".old"):
            whole = exports / path.name.removeprefix(".").removesuffix(".old")
            if not whole.exists():
                path.rename(whole)
                continue
        elif not path.name.endswith(".writing"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
