"""What was run: options, data, machine, and the objective's terms and heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coder_plugin.report.charts import format_number
from coder_plugin.report.page import Block, format_seconds, heading, table
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


def option_blocks(run: RunFolder) -> list[Block]:
    """All options of the run."""
    rows = [(name, [text_of(value)]) for name, value in sorted((run.config or {}).items())]
    return [heading("Options"), table((), rows, fold=f"All {len(rows)} options")] if rows else []
