"""The commands that repeat a run, from its options: nothing that would be so anyway."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.config import TrainConfig, flatten, options_by_name, resolve
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.options import resolve_config

#: Where a run is kept and how it was called: another is somewhere else.
_OF_PLACE = ("logs", "name", "resume", "dry_run")


def train_command(config: Mapping[str, Any], *, ranks: int = 1) -> str:
    """The command that trains with these options, over several lines.

    Args:
        config: a run's ``config.json``: every option, resolved.

    Raises:
        CoderError: options that this version does not know.
    """
    start = "coder-plugin train"
    if ranks > 1:
        start = f"accelerate launch --num_processes {ranks} -m coder_plugin.cli train"
    return _joined(start, [_flag(name, value) for name, value in needed(config).items()])


def resume_command(config: Mapping[str, Any], folder: Path, *, ranks: int = 1) -> str:
    """The command that goes on with a run that has not come to its end."""
    place = {"logs": str(folder.parent), "name": folder.name, "resume": "latest"}
    return _joined(train_command(config, ranks=ranks), [_flag(name, value) for name, value in place.items()])


def eval_command(folder: str) -> str:
    """The command that evaluates the run's best export on the run's data."""
    return f"coder-plugin eval {shlex.quote(folder)}"


def report_command(folder: str) -> str:
    """The command that writes the run's report."""
    return f"coder-plugin report {shlex.quote(folder)}"


def needed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options without which the configuration would come out another: defaults, also the objective's and those that
    depend on the data, are left out."""
    whole = resolve([("file", {name: value for name, value in flatten(config).items() if name not in _OF_PLACE})]).to_flat()
    defaults = {name: option.default for name, option in options_by_name().items()}
    kept = {name: value for name, value in whole.items() if value not in (None, [])}
    try:
        target = resolve_config(kept)
        for name in list(kept):
            without = {other: value for other, value in kept.items() if other != name}
            if _resolves_to(without, target):
                kept = without
    except CoderError:  # a plugin's objective, or a file, that is gone: then all but the plain defaults are named
        return {name: value for name, value in kept.items() if value != defaults[name]}
    return kept


def _resolves_to(options: Mapping[str, Any], target: TrainConfig) -> bool:
    try:
        return resolve_config(options) == target
    except CoderError:
        return False


def _flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    if value is False:
        return f"--no-{name.replace('_', '-')}"
    values = value if isinstance(value, (list, tuple)) else [value]
    return " ".join([flag, *(shlex.quote(str(each)) for each in values)])


def _joined(start: str, flags: list[str]) -> str:
    return " \\\n  ".join([start, *flags])
