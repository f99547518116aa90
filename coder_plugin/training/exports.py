"""The exports of a resumed run: what a kill has left is removed, and an export behind its checkpoint is written again."""

from __future__ import annotations

import shutil
from pathlib import Path

from coder_plugin import distributed
from coder_plugin.pretrained.export import exported_step


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
