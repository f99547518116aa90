"""What was run: options, data, machine, the objective's terms and heads with every option, and the commands to repeat it."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin import registry
from coder_plugin.config import TrainConfig, flatten, get_option, options_by_name, resolve
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.report.charts import format_number
from coder_plugin.training.run_folder import RunFolder

#: Options that say where a run is stored, not what it computes.
STORAGE = ("logs", "name", "resume", "dry_run")


class Part(NamedTuple):
    """A term or a head of the objective, with the options that were set and those left at their defaults."""

    name: str
    weight: str
    set: str
    default: str


def describe(run: RunFolder) -> list[tuple[str, str]]:
    """Rows of a table: subject and text."""
    config, plan = run.config or {}, run.plan or {}
    versions = (run.manifest or {}).get("versions") or plan.get("versions") or {}
    saved_at = (run.manifest or {}).get("saved_at")
    rows: list[tuple[str, str]] = [
        ("Objective", str(plan.get("objective") or config.get("loss") or "")),
        ("Model", _model(plan, config)),
        ("Training data", _data(plan.get("training data"))),
        ("Validation data", _data(plan.get("validation data"))),
        ("Batch", _batch(plan.get("batch"))),
        ("Length", _length(run)),
        ("Optimisation", _optimisation(config)),
        ("Machine", _machine(plan)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Seed", str(config.get("seed", ""))),
        ("Last checkpoint", f"{datetime.fromtimestamp(saved_at, timezone.utc):%Y-%m-%d %H:%M} UTC" if saved_at else ""),
    ]
    return [(name, text) for name, text in rows if text]


def describe_terms(run: RunFolder) -> list[Part]:
    """The terms with their weights."""
    parts = []
    for term in run.objective.get("terms", ()):
        name = term["name"] + (
            f"@{term['head']}" if term.get("head") else f"@{term['source']}" if term.get("source") else ""
        )
        parts.append(
            Part(name, format_number(float(term["weight"])), *_options("losses", term["name"], term["options"]))
        )
    return parts


def describe_heads(run: RunFolder) -> list[Part]:
    """The heads with their numbers of parameters."""
    options = run.objective.get("heads", {})
    return [
        Part(name, f"{count:,}", *_options("heads", name, options.get(name, {}))) for name, count in run.heads.items()
    ]


def _options(group: str, name: str, options: Mapping[str, Any]) -> tuple[str, str]:
    try:
        parameters = list(inspect.signature(registry.load(group, name)).parameters.values())
    except (CoderError, ValueError):  # a plugin that is not installed here
        parameters = []
    defaults = {
        each.name: each.default
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.default is not each.empty and each.name not in options
    }

    def listed(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={'none' if value is None else value}" for name, value in values.items())

    return listed(options), listed(defaults)


def _model(plan: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    name = str(plan.get("model") or config.get("model") or "")
    if "parameters" in plan and "trainable" in plan:
        name += f"; {plan['trainable']:,} of {plan['parameters']:,} parameters are trained"
    if frozen := plan.get("frozen because no term reads them"):
        name += f"; frozen because no term reads them: {', '.join(frozen)}"
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
        kinds = {"draw": "one caption per image, drawn at random", "all": "one pair per caption"}
        parts.append(kinds.get(data["captions"], data["captions"]))
    return "; ".join(parts)


def _batch(batch: Mapping[str, Any] | None) -> str:
    names = {"global per step": "pairs per step", "per rank and forward": "per rank and forward pass"}
    return ", ".join(f"{batch[key]:,} {text}" for key, text in names.items() if key in batch) if batch else ""


def _length(run: RunFolder) -> str:
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
    names = {"opt": "{}", "lr": "learning rate {}", "wd": "weight decay {}", "lr_scheduler": "{} schedule"}
    names |= {"grad_clip_norm": "gradient clipped at {}", "ema_decay": "weights averaged with decay {}"}
    return ", ".join(text.format(config[name]) for name, text in names.items() if config.get(name) is not None)


def _machine(plan: Mapping[str, Any]) -> str:
    if "device" not in plan:
        return ""
    machine, precision = plan.get("machine") or plan["device"], plan.get("precision")
    return f"{plan.get('ranks', 1)} × {machine}, precision {'fp32' if precision == 'no' else precision}"


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(run: RunFolder) -> list[tuple[str, str]]:
    """Commands for a shell: what each does, and its text."""
    folder = shlex.quote(str(run.path))
    others = [
        (f"evaluate the {'best' if run.results('best') else 'last'} export", f"coder-plugin eval {folder}"),
        ("write this report again", f"coder-plugin report {folder}"),
    ]
    if run.config is None:
        return others
    ranks = int((run.plan or {}).get("ranks", 1))
    try:
        train = [("train", train_command(run.config, ranks=ranks))]
        done, steps = run.manifest or {}, (run.plan or {}).get("steps", math.inf)
        if done.get("epoch", 0) < (run.config.get("epochs") or 0) and done.get("step", 0) < steps:
            resume = resume_command(run.config, run.path.resolve(), ranks=ranks)
            train.append(("resume the run, which has not reached its last epoch", resume))
    except CoderError as error:
        train = [("train", f"# {error}")]
    return train + others


def train_command(config: Mapping[str, Any], *, ranks: int = 1) -> str:
    """The command that trains with these options, over several lines.

    Args:
        config: a run's options, by flag name or nested as in ``config.json``.
        ranks: number of processes.

    Raises:
        CoderError: options that this version does not know.
    """
    start = "coder-plugin train"
    if ranks > 1:
        start = f"accelerate launch --num_processes {ranks} -m coder_plugin.cli train"
    return " \\\n  ".join([start, *(_flag(name, value) for name, value in needed(config).items())])


def resume_command(config: Mapping[str, Any], folder: Path, *, ranks: int = 1) -> str:
    """The command that resumes an unfinished run."""
    storage = {"logs": str(folder.parent), "name": folder.name, "resume": "latest"}
    return " \\\n  ".join(
        [train_command(config, ranks=ranks), *(_flag(name, value) for name, value in storage.items())]
    )


def needed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that must be given to get this configuration: those that no default, recipe or data set implies."""
    options = {name: value for name, value in flatten(config).items() if name not in STORAGE}
    options = resolve([("file", options)]).to_flat()
    kept = {name: value for name, value in options.items() if value not in (None, [])}
    try:
        target = resolve_config(kept)
        for name in list(kept):
            without = {other: value for other, value in kept.items() if other != name}
            if _resolves_to(without, target):
                kept = without
    except CoderError:  # a plugin's objective or a file is missing: leave out plain defaults only
        defaults = {name: option.default for name, option in options_by_name().items()}
        return {name: value for name, value in kept.items() if value != defaults[name]}
    return kept


def _resolves_to(options: Mapping[str, Any], target: TrainConfig) -> bool:
    try:
        return resolve_config(options) == target
    except CoderError:
        return False


def _flag(name: str, value: Any) -> str:
    return " ".join(map(shlex.quote, get_option(name).words(value)))
