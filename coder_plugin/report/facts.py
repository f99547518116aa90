"""What was run: options, data, machine, the objective's terms and heads, and the commands to repeat it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from coder_plugin.report.charts import format_number
from coder_plugin.report.page import Block, format_seconds, heading, note, table
from coder_plugin.training.run_folder import RunFolder

#: Options that say where a run is stored, not what it computes.
STORAGE = ("logs", "name", "resume", "dry_run")


def text_of(value: Any) -> str:
    """A value of JSON in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of(each)}" for name, each in value.items() if each is not None)
    if isinstance(value, (list, tuple)):
        return " ".join(map(text_of, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value in (None, "") else f"{value:,}" if isinstance(value, int) else str(value)


def describe(run: RunFolder) -> dict[str, str]:
    """The plan in words: data, model, batch, machine and versions; what a damaged plan lacks is left out."""
    plan, manifest = run.plan or {}, run.manifest or {}
    names = {"objective": "objective", "model": "model", "parameters": "parameters", "trainable": "trained parameters"}
    names |= {"training data": "training data", "validation data": "validation data", "batch": "batch", "ranks": "processes"}
    names |= {"machine": "machine", "precision": "precision"}
    facts = {name: text_of(plan[key]) for key, name in names.items() if plan.get(key) is not None}
    done, planned = manifest.get("epoch"), plan.get("epochs") or (run.config or {}).get("epochs")
    if done is not None:
        facts["epochs done"] = f"{done}" + (f" of {planned}" if planned else "")
        facts["steps done"] = text_of(manifest.get("step"))
    if run.seconds_per_epoch is not None:
        facts["time per epoch"] = format_seconds(run.seconds_per_epoch)
    versions = manifest.get("versions") or plan.get("versions") or {}
    return facts | {f"{name}, version": text_of(version) for name, version in versions.items()}


def fact_blocks(run: RunFolder) -> list[Block]:
    """Two columns: subject and text."""
    return [table((), [(name, [text]) for name, text in describe(run).items()])]


def term_blocks(run: RunFolder) -> list[Block]:
    """The terms with their weights and the options that were set."""
    rows = []
    for term in run.objective.get("terms", ()):
        suffix = term.get("head") or term.get("source")
        name = f"{term['name']}@{suffix}" if suffix else term["name"]
        rows.append((name, [format_number(float(term["weight"])), _options(term["options"])]))
    return [heading("Terms of the loss"), table(["Term", "Weight", "Options"], rows)] if rows else []


def head_blocks(run: RunFolder) -> list[Block]:
    """The heads with their numbers of parameters and the options that were set."""
    options = run.objective.get("heads", {})
    rows = [(name, [f"{count:,}", _options(options.get(name, {}))]) for name, count in run.heads.items()]
    return [heading("Heads"), table(["Head", "Parameters", "Options"], rows)] if rows else []


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in options.items()) or "–"


def command_blocks(run: RunFolder) -> list[Block]:
    """Commands for a shell that train, resume, evaluate, and write the report again."""
    folder, file = shlex.quote(str(run.path)), shlex.quote(str(run.path / "config.json"))
    ranks = (run.plan or {}).get("ranks", 1)
    start = f"accelerate launch --num_processes {ranks} -m coder_plugin.cli" if ranks > 1 else "coder-plugin"
    texts = {}
    if run.config is not None:
        texts["train with the same options"] = f"{start} train --config {file}"
        done, steps = run.manifest or {}, (run.plan or {}).get("steps", math.inf)
        if done.get("epoch", 0) < (run.config.get("epochs") or 0) and done.get("step", 0) < steps:
            place = run.path.resolve()
            where = f"--logs {shlex.quote(str(place.parent))} --name {shlex.quote(place.name)}"
            texts["resume the run, which has not reached its last epoch"] = (
                f"{start} train --config {file} {where} --resume latest"
            )
    texts["evaluate it"] = f"coder-plugin eval {folder}"
    texts["write this report again"] = f"coder-plugin report {folder}"
    blocks = [heading("Commands")]
    for what, text in texts.items():
        blocks += [note(f"To {what}:"), {"code": text}]
    options = sorted((run.config or {}).items())
    if options:
        rows = [(name, [text_of(value)]) for name, value in options]
        blocks.append(table((), rows, fold=f"All {len(options)} options"))
    return blocks
