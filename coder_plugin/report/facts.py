"""What was run, in words: options, data, machine, and the objective's terms and heads with every option."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.report.charts import format_number
from coder_plugin.report.records import Run


class Part(NamedTuple):
    """A term or a head of the objective.

    Args:
        set: options that the objective gives. default: those that it leaves as they are.
    """

    name: str
    weight: str
    set: str
    default: str


def described(run: Run) -> list[tuple[str, str]]:
    """Rows of a table: what, and how it was."""
    config, plan = run.config or {}, run.plan or {}
    rows: list[tuple[str, str]] = [
        ("Objective", str(plan.get("objective") or config.get("loss") or "")),
        ("Model", _model(plan, config)),
        ("Training data", _data(plan.get("training data"))),
        ("Validation data", _data(plan.get("validation data"))),
        ("Batch", _batch(plan.get("batch"))),
        ("Length", _length(run)),
        ("Optimisation", _optimisation(config)),
        ("Machine", _machine(plan)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in _versions(run).items())),
        ("Seed", str(config.get("seed", ""))),
        ("Last checkpoint", _moment(run.manifest["saved_at"]) if run.manifest else ""),
    ]
    return [(name, text) for name, text in rows if text]


def terms_of(run: Run) -> list[Part]:
    objective = _recipe(run)
    parts = []
    for term in objective.get("terms", ()):
        name = term["name"] + (f"@{term['head']}" if term.get("head") else f"@{term['source']}" if term.get("source") else "")
        parts.append(Part(name, format_number(float(term["weight"])), *_options("losses", term["name"], term["options"])))
    return parts


def heads_of(run: Run) -> list[Part]:
    """The heads that were built, with the numbers of their parameters."""
    given = _recipe(run).get("heads", {})
    return [Part(name, f"{count:,}", *_options("heads", name, given.get(name, {}))) for name, count in run.heads.items()]


def _recipe(run: Run) -> Mapping[str, Any]:
    return (run.manifest or {}).get("objective") or (run.plan or {}).get("options") or {}


def _options(group: str, name: str, given: Mapping[str, Any]) -> tuple[str, str]:
    try:
        parameters = list(inspect.signature(registry.load(group, name)).parameters.values())
    except (CoderError, ValueError):  # a plugin that is not installed here
        parameters = []
    defaults = {
        each.name: each.default
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.default is not each.empty and each.name not in given
    }
    return _listed(given), _listed(defaults)


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={'none' if value is None else value}" for name, value in options.items())


def _model(plan: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    name = str(plan.get("model") or config.get("model") or "")
    if "parameters" in plan and "trainable" in plan:
        name += f"; {plan['trainable']:,} of {plan['parameters']:,} parameters train"
    if frozen := plan.get("frozen because no term reads them"):
        name += f"; frozen, for no term reads them: {', '.join(frozen)}"
    return name


def _data(data: Mapping[str, Any] | None) -> str:
    if not data:
        return ""
    parts = [str(data.get("name", ""))]
    if data.get("images"):
        parts.append(f"{data['images']:,} images")
    if "samples per epoch" in data:
        parts.append(f"{data['samples per epoch']:,} samples per epoch")
    if "captions" in data:
        kinds = {"draw": "one caption of each drawn", "all": "every caption a pair"}
        parts.append(kinds.get(data["captions"], data["captions"]))
    return "; ".join(parts)


def _batch(batch: Mapping[str, Any] | None) -> str:
    if not batch:
        return ""
    said = {"global per step": "pairs a step", "per rank and forward": "of a rank in a forward"}
    return ", ".join(f"{batch[key]:,} {text}" for key, text in said.items() if key in batch)


def _length(run: Run) -> str:
    plan, manifest = run.plan or {}, run.manifest or {}
    parts = []
    if "epochs" in plan and "steps per epoch" in plan:
        parts.append(f"{plan['epochs']} epochs of {plan['steps per epoch']:,} steps")
    if manifest:
        epochs = manifest.get("epoch", 0)
        parts.append(f"{manifest['step']:,} steps ({epochs} epoch{'s' * (epochs != 1)}) done")
    return "; ".join(parts)


def _optimisation(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    parts = [f"{config.get('opt')}, learning rate {config.get('lr')}, weight decay {config.get('wd')}"]
    parts.append(f"{config.get('lr_scheduler')} schedule")
    if config.get("grad_clip_norm") is not None:
        parts.append(f"gradient clipped at {config['grad_clip_norm']}")
    if config.get("ema_decay") is not None:
        parts.append(f"weights averaged with decay {config['ema_decay']}")
    return ", ".join(parts)


def _machine(plan: Mapping[str, Any]) -> str:
    if "device" not in plan:
        return ""
    machine, precision = plan.get("machine") or plan["device"], plan.get("precision")
    return f"{plan.get('ranks', 1)} × {machine}, precision {'fp32' if precision == 'no' else precision}"


def _versions(run: Run) -> Mapping[str, str]:
    return (run.manifest or {}).get("versions") or (run.plan or {}).get("versions") or {}


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
