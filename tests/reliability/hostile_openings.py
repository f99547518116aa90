"""Hostile configurations, exports and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.reliability.hostile import Case, copy_run


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file's value in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _data(location: str, field: str, folder: Path, canary: Path) -> None:
    """A run whose configuration reads data from a location that would execute or fetch."""
    run = copy_run(folder)
    edit(run / "config.json", lambda config: config["data"].update({field: location.format(canary=canary)}))


def _val(location: str) -> Callable[[Path, Path], object]:
    return partial(_data, location, "val")


CASES = [
    Case(
        name="config-val-data-pipe-report",
        write=_val("pipe:touch {canary}; cat x.tar"),
        commands=[["report", "run", "--export", "last"]],
        status=0,
        says=["--val-data"],
    ),
    Case(
        name="config-val-data-pipe-eval",
        write=_val("pipe:touch {canary}; cat x.tar"),
        commands=[["eval", "run", "--export", "last"]],
        says=["--val-data", "pipe:"],
    ),
]
