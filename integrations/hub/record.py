"""The record of a training run for ``coder_run.json`` and the model card, without private paths.

File names stay. Folders, hosts and commands are removed: they reveal user names, the layout of a machine, or passwords.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import read_json
from coder_plugin.pretrained.hub_cache import WISE_FT
from coder_plugin.training.run_folder import RunFolder

#: The record in a shared folder.
RECORD = "coder_run.json"
#: Options that say where a run is stored, not what it computes.
_STORAGE = ("logs", "name", "resume", "cache_dir", "report_to", "wandb_project_name", "dry_run")
#: The end of an export's path, after the name of its run.
_EXPORT = re.compile(r"[/\\]export[/\\](best|last)([/\\][^/\\]*)?$")
#: Entries of ``plan.json`` that are shared.
_PLANNED = ("steps per epoch", "epochs", "batch", "precision", "device", "ranks", "versions")


def run_record(run: Path | None, export: str) -> dict[str, Any]:
    """Read a training run's record of an export, without paths of this machine.

    Returns:
        ``objective``, ``terms`` (every option of every term and head), ``options``, ``run`` and ``results``; None or empty
        where the run's files are missing, or without a run.
    """
    folder = RunFolder(Path()) if run is None else RunFolder.read(run, must_exist=False)
    config, plan = folder.config or {}, folder.plan or {}
    data = {kind: _data(plan.get(kind)) for kind in ("training data", "validation data")}
    return {
        "objective": plan.get("objective"),
        "terms": bare_objective(plan.get("options") or {}),
        "options": {name: _option(name, value) for name, value in config.items() if name not in _STORAGE},
        "run": {**data, **{name: plan[name] for name in _PLANNED if name in plan}} if plan else {},
        "results": folder.results(export),
    }


def read_record(folder: Path) -> dict[str, Any] | None:
    """The content of ``coder_run.json``, which anybody may have written; None if the folder has none.

    Raises:
        CoderError: it cannot be read, or has other fields.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record, dict):
        raise CoderError(f"{path} cannot be read: it is not an object")
    objects = ("options", "terms", "run", "results", "stated", "card")
    record = {"objective": None, **{key: {} for key in objects}, **record}
    for key in objects:
        if not isinstance(record[key], dict):
            raise CoderError(f"{path} cannot be read: {key} is not an object")
    return record


def read_wise_ft(folder: Path) -> dict[str, Any]:
    """``alpha``, ``tuned`` and ``base`` of weights that ``eval --wise-ft-save`` wrote; empty for other exports."""
    values = {key: value for key, value in _read(folder / WISE_FT).items() if key in ("alpha", "tuned", "base")}
    return {key: bare(_EXPORT.sub("", value)) if isinstance(value, str) else value for key, value in values.items()}


def _data(data: Any) -> dict[str, Any] | None:
    return {**data, "name": bare(str(data.get("name")))} if isinstance(data, dict) else None


def bare_objective(objective: Mapping[str, Any]) -> dict[str, Any]:
    """An objective as JSON, with the file names of its heads' vocabularies instead of their paths."""
    heads = {
        head: {name: bare(value) if name == "vocabulary" else value for name, value in options.items()}
        for head, options in objective.get("heads", {}).items()
    }
    return {**objective, "heads": heads} if objective else {}


def _option(name: str, value: Any) -> Any:
    if name == "loss":  # recipes have slashes in their names
        return value
    if isinstance(value, list):
        return [_option(name, each) for each in value]
    return bare(value) if isinstance(value, str) else value


def bare(text: str) -> str:
    """A path's last part. Also for several paths (``a::b``) and for ``KEY=PATH``; hub repositories keep their names.

    Addresses lose their host, query and fragment, and commands become "a command": these may hold passwords.

    Example:
        >>> bare("/home/me/train.tar::https://user:password@host/val.tar?signature=x")
        'train.tar::val.tar'
    """
    if "::" in text:
        return "::".join(map(bare, text.split("::")))
    key, equals, path = text.partition("=")
    if equals and not re.search(r"[/\\]|pipe:", key):
        return f"{key}={bare(path)}"
    if "pipe:" in text:
        return "a command"
    if text.startswith("hf-hub:"):
        return text
    if address := re.search(r"://[^/?#]*([^?#]*)", text):
        text = address[1].strip("/") or "an address"
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def without_paths(value: Any) -> Any:
    """A JSON value with the last part of each absolute path in its objects. Lists stay: they hold words and tokens."""
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items() if key not in ("_name_or_path", "name_or_path")}
    if isinstance(value, str) and re.match(r"(~|[A-Za-z]:)?[/\\].+[/\\]|~[/\\]", value):
        return bare(value)
    return value


def _read(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if it cannot be read."""
    try:
        value = read_json(path)
    except CoderError:
        return {}
    return value if isinstance(value, dict) else {}
