"""What was run, without where: for ``coder_run.json`` and the model card.

Names of files stay, the folders they lay in do not: these tell who somebody is and how their machine is laid out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.config import flatten
from coder_plugin.pretrained.hub_cache import WISE_FT
from coder_plugin.training import checkpoint

#: Options of a run that say where it ran or what it was called, and not what was run.
_OF_PLACE = ("logs", "name", "resume", "cache_dir", "report_to", "wandb_project_name", "dry_run")
#: The end of the path of a run's export, which is called as the run is.
_EXPORT = re.compile(r"[/\\]export[/\\](best|last)([/\\][^/\\]*)?$")
#: What of a plan is of interest to others.
_PLANNED = ("steps per epoch", "epochs", "batch", "precision", "device", "ranks", "versions")


def run_record(run: Path | None, export: str) -> dict[str, Any]:
    """``objective``, ``terms`` (every option of every term and head), ``options``, ``run`` and ``results`` of a training run's
    folder, as far as its files are there; of no run, None and empty ones."""
    config = {} if run is None else _read(run / "config.json")
    plan = {} if run is None else _read(run / "plan.json")
    data = {kind: _data(plan.get(kind)) for kind in ("training data", "validation data")}
    return {
        "objective": plan.get("objective"),
        "terms": bare_objective(plan.get("options", {})),
        "options": {name: _option(name, value) for name, value in flatten(config).items() if name not in _OF_PLACE},
        "run": {**data, **{name: plan[name] for name in _PLANNED if name in plan}} if plan else {},
        "results": {} if run is None else results_of(run, export),
    }


def read_wise_ft(folder: Path) -> dict[str, Any]:
    """``alpha``, ``tuned`` and ``base`` of weights between two models' that ``eval --wise-ft-save`` wrote; else empty."""
    found = {key: value for key, value in _read(folder / WISE_FT).items() if key in ("alpha", "tuned", "base")}
    return {key: bare(_EXPORT.sub("", value)) if isinstance(value, str) else value for key, value in found.items()}


def results_of(run: Path, export: str) -> dict[str, Any]:
    """The validation figures of a run's export, with their ``epoch`` and ``step``; empty where there are none.

    Of the newest checkpoint's manifest; the best also of what a run that goes on has logged since.
    """
    newest = checkpoint.newest(run / "checkpoints", verify=False)
    manifest = {} if newest is None else _read(newest / "manifest.json")
    known = [manifest[export]] if manifest.get(export) else []
    since = [record for record in _validations(run / "metrics.jsonl") if record["step"] > manifest.get("step", 0)]
    if export == "last":
        found = known or since[-1:]
    else:
        # of equals the first, as in training
        found = sorted([*known, *since], key=lambda record: record["rsum"], reverse=True)[:1]
    return {name: value for name, value in found[0].items() if name != "checkpoint"} if found else {}


def _validations(path: Path) -> list[dict[str, Any]]:
    """Of ``metrics.jsonl``, as a manifest has them; a line that was not finished is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "val/rsum" not in record:
            continue
        named = {key.removeprefix("val/"): value for key, value in record.items() if key.startswith("val/")}
        shortlist = {key.removeprefix("shortlist/"): value for key, value in named.items() if key.startswith("shortlist/")}
        plain = {key: value for key, value in named.items() if not key.startswith("shortlist/")}
        found.append({**plain, "step": record["step"], **({"shortlist": shortlist} if shortlist else {})})
    return found


def _data(data: Any) -> dict[str, Any] | None:
    return {**data, "name": bare(str(data.get("name")))} if isinstance(data, dict) else None


def bare_objective(objective: Mapping[str, Any]) -> dict[str, Any]:
    """An objective as JSON, its heads' vocabularies without where they lay."""
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
    """A path's last part; of several, ``a::b``, and of ``KEY=PATH`` likewise. Repositories of the hub keep their names.

    Of an address also without host, query and fragment, and nothing of a command: these hold passwords and signatures.
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
    """A JSON value in whose objects absolute paths are their last parts. Lists stay: those of words and tokens are no paths."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in ("_name_or_path", "name_or_path")}
        return {key: without_paths(each) for key, each in kept.items()}
    if isinstance(value, str) and re.match(r"(~|[A-Za-z]:)?[/\\].+[/\\]|~[/\\]", value):
        return bare(value)
    return value


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is none: a card says what is known."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
