"""The exports of a resumed run: those that are not the checkpoint's are written again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from coder_plugin.distributed import on_first_rank
from coder_plugin.errors import CoderError
from coder_plugin.files import move_into
from coder_plugin.pretrained.export import export_model, exported_step, inference_options
from coder_plugin.training import checkpoint, finite

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer

_log = logging.getLogger(__name__)


def last_is_behind(folder: Path, step: int) -> bool:
    """Whether ``export/last`` of a run is not that of ``step``. Every rank calls this and gets rank 0's answer.

    Example:
        >>> last_is_behind(Path("nowhere"), 0)
        True
    """
    return bool(on_first_rank(lambda: exported_step(folder / "export" / "last") != step))


def set_aside_best(folder: Path, target: Path, *, after: int) -> Path | None:
    """Move ``export/best`` of a run into ``target`` if its step is after ``after``. Returns its new place, or None."""
    best = folder / "export" / "best"
    step = exported_step(best)
    return move_into(target, best, name=f"export-best-step_{step:08d}") if step is not None and step > after else None


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
        manifest, common = checkpoint.load(checkpoints / Path(name).name)
        if manifest["step"] != trainer.best["step"]:
            raise CoderError(f"its step is {manifest['step']}, not {trainer.best['step']}")
        weights = {**common["model"], **common.get("average", {})}
        finite.check_loaded(weights)
        trainer.model.load_state_dict(weights)
        options = inference_options(trainer.config)
        export_model(trainer.model, folder, tokenizer=trainer.tokenizer, options=options, step=manifest["step"])
    except (CoderError, KeyError, RuntimeError) as error:
        trainer.best = {}
        _log.warning("export/best is written at the next evaluation, because %s cannot be used: %s", name, error)
    finally:
        trainer.model.load_state_dict(own)
