"""What the folder of a training run holds: options, plan, logged metrics and the newest checkpoint's manifest.

Missing or damaged files are listed in ``RunFolder.problems``; everything else is read all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.config import flatten
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular, read_json
from coder_plugin.training import checkpoint

#: One line of ``metrics.jsonl``, its numbers only.
Record = dict[str, Any]
#: Of these a run's folder has at least one.
FILES = ("config.json", "plan.json", "metrics.jsonl", "checkpoints")
#: Entries of ``plan.json`` that must be objects.
_OBJECTS = ("batch", "heads", "options", "training data", "validation data", "versions")
#: Entries of ``plan.json`` that must be numbers; all entries of ``batch`` and ``heads`` must be, too.
_NUMBERS = ("parameters", "trainable", "steps per epoch", "epochs", "ranks")
#: Entries of the data's objects that must be numbers; a number of images that is not known is null.
_DATA_NUMBERS = ("images", "samples per epoch")

#: Most characters of ``metrics.jsonl`` that are read.
_MOST_LOGGED = 1 << 30


class Problem(NamedTuple):
    """A file that is missing or damaged, and why."""

    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


@dataclass(frozen=True)
class RunFolder:
    """A training run as its folder describes it.

    Args:
        path: the folder.
        config: the run's options by flag name, from ``config.json`` or else the newest checkpoint; None if both are missing.
        plan: ``plan.json``, what the options came to; None if it cannot be read.
        steps: log records of training steps, in the order of steps.
        evaluations: log records of evaluations, their keys without ``val/``.
        manifest: of the newest checkpoint, or None. checkpoint: that checkpoint's folder.
        problems: missing and damaged files.

    Example:
        >>> run = RunFolder(Path("run"), evaluations=({"step": 5, "rsum": 90.0}, {"step": 9, "rsum": 80.0}))
        >>> run.results("best"), run.results("last")
        ({'step': 5, 'rsum': 90.0}, {'step': 9, 'rsum': 80.0})
    """

    path: Path
    config: Record | None = None
    plan: Record | None = None
    steps: tuple[Record, ...] = ()
    evaluations: tuple[Record, ...] = ()
    manifest: Record | None = None
    checkpoint: Path | None = None
    problems: tuple[Problem, ...] = ()

    @classmethod
    def read(cls, path: str | Path, *, must_exist: bool = True) -> RunFolder:
        """Read a folder.

        Args:
            path: the run's folder.
            must_exist: whether a folder without any of a run's files is an error.

        Raises:
            CoderError: ``must_exist``, and the folder has none of a run's files.
        """
        path = Path(path)
        problems: list[Problem] = []
        config = _read_object(path / "config.json", problems)
        plan = _read_object(path / "plan.json", problems)
        if plan is not None:
            plan = _checked_plan(plan, problems)
        steps, evaluations = _read_metrics(path / "metrics.jsonl", problems)
        damaged: list[str] = []
        checkpoints = checkpoint.checkpoints(path / "checkpoints", problems=damaged)
        problems += [Problem("checkpoints", text) for text in damaged]
        if must_exist and not (config or plan or steps or evaluations or checkpoints):
            raise CoderError(f"{path} is not a training run's folder: it has none of {', '.join(FILES)}")
        if not checkpoints:
            problems.append(Problem("checkpoints", "no complete checkpoint"))
        newest = checkpoints[0] if checkpoints else None
        return cls(
            path,
            _by_flag(config or (newest.manifest.get("config") if newest else None), problems),
            plan,
            tuple(steps),
            tuple(evaluations),
            newest.manifest if newest else None,
            newest.path if newest else None,
            tuple(problems),
        )

    def results(self, export: str) -> Record:
        """Validation results of an export, ``best`` or ``last``, with ``epoch`` and ``step``; empty if nothing was evaluated.

        From the newest checkpoint, and from evaluations logged after it. An evaluation before the first step does not count.
        """
        manifest = self.manifest or {}
        saved = [manifest[export]] if manifest.get(export) else []
        done = manifest.get("step", 0)
        later = [_nested(each) for each in self.evaluations if each["step"] > done and "rsum" in each]
        if export == "last":
            results = (saved or later)[-1:]
        else:  # of equal results the first, as in training
            results = sorted([*saved, *later], key=lambda each: each["rsum"], reverse=True)[:1]
        return {name: value for name, value in results[0].items() if name != "checkpoint"} if results else {}

    @property
    def objective(self) -> Mapping[str, Any]:
        """Terms and heads with their options."""
        return (self.manifest or {}).get("objective") or (self.plan or {}).get("options") or {}

    @property
    def heads(self) -> Mapping[str, Any]:
        """Heads of the model with their numbers of parameters."""
        return (self.plan or {}).get("heads", {})

    @property
    def pairs_per_step(self) -> int | None:
        """The global batch; None if neither the plan nor a checkpoint, which stores the number of ranks, tells it."""
        planned = ((self.plan or {}).get("batch") or {}).get("global per step")
        if planned is not None:
            return int(planned)
        config = self.config or {}
        if self.manifest is None or not config.get("batch_size"):
            return None
        return int(config["batch_size"]) * int(config.get("accum_freq", 1)) * int(self.manifest["world_size"])

    @property
    def seconds_per_epoch(self) -> float | None:
        """Mean time of an epoch's steps, with the waits for data, without evaluation and saving; None if it is not known.

        Example:
            >>> RunFolder(Path("run"), plan={"steps per epoch": 100}, manifest={"step": 50, "seconds": 20.0}).seconds_per_epoch
            40.0
        """
        manifest, steps = self.manifest or {}, (self.plan or {}).get("steps per epoch")
        seconds = manifest.get("seconds")
        return seconds / manifest["step"] * steps if seconds and steps and manifest["step"] else None


def curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric.

    Example:
        >>> curve([{"step": 1, "loss": 3.0}, {"step": 2}, {"step": 3, "loss": 2.0}], "loss")
        ([1, 3], [3.0, 2.0])
    """
    points = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in points], [value for _, value in points]


def metric_names(records: Sequence[Record]) -> list[str]:
    """All metrics of the records, in the order in which they first appear."""
    return list(dict.fromkeys(key for record in records for key in record if key not in ("step", "epoch")))


def _checked_plan(plan: Record, problems: list[Problem]) -> Record:
    """The plan without entries of a wrong kind, which are added to the problems."""
    checked = {}
    for name, value in plan.items():
        text = ""
        if name in _NUMBERS and not _is_number(value):
            text = f"its {name!r} is not a number"
        elif name in _OBJECTS and not isinstance(value, dict):
            absent = name == "validation data" and value is None  # a run without validation
            text = "" if absent else f"its {name!r} is not an object"
        elif name in _OBJECTS:
            numbers = {key: each for key, each in value.items() if name in ("batch", "heads") or key in _DATA_NUMBERS}
            wrong = [key for key, each in numbers.items() if not _is_number(each) and (key, each) != ("images", None)]
            text = f"in its {name!r}, {', '.join(map(repr, wrong))}: not a number" if wrong else ""
        if text:
            problems.append(Problem("plan.json", text))
        else:
            checked[name] = value
    return checked


def _by_flag(config: Record | None, problems: list[Problem]) -> Record | None:
    try:
        return None if config is None else flatten(config)
    except CoderError as error:  # options of another version
        problems.append(Problem("config.json", str(error)))
        return None


def _read_metrics(path: Path, problems: list[Problem]) -> tuple[list[Record], list[Record]]:
    try:
        with open_regular(path, encoding="utf-8", errors="replace") as file:
            content = file.read(_MOST_LOGGED + 1)
        if len(content) > _MOST_LOGGED:
            raise OSError(f"it has over {_MOST_LOGGED:,} characters")
        lines = content.splitlines()
    except OSError as error:
        problems.append(Problem(path.name, str(error.strerror or error)))
        return [], []
    steps: list[Record] = []
    evaluations: list[Record] = []
    unread = 0
    for line in filter(None, map(str.strip, lines)):
        try:
            numbers = {key: value for key, value in json.loads(line).items() if _is_number(value)}
            step = numbers["step"]
        except (ValueError, KeyError, AttributeError, RecursionError):
            unread += 1
            continue
        validation = {key.removeprefix("val/"): value for key, value in numbers.items() if key.startswith("val/")}
        if validation:
            _append(evaluations, {"step": step, **validation})
        else:
            _append(steps, numbers)
    if unread:
        problems.append(Problem(path.name, f"{unread} line{'s' * (unread > 1)} cannot be read"))
    return steps, evaluations


def _append(records: list[Record], record: Record) -> None:
    """A resumed run takes the steps after its checkpoint again; the later records replace the earlier ones."""
    while records and records[-1]["step"] >= record["step"]:
        records.pop()
    records.append(record)


def _nested(record: Record) -> Record:
    """``shortlist/…`` as an object of its own, as in a checkpoint's manifest."""
    shortlist = {key.removeprefix("shortlist/"): value for key, value in record.items() if key.startswith("shortlist/")}
    plain = {key: value for key, value in record.items() if not key.startswith("shortlist/")}
    return {**plain, "shortlist": shortlist} if shortlist else plain


def _is_number(value: Any) -> bool:
    if isinstance(value, int):  # JSON may hold integers beyond what a float can
        return not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)


def _read_object(path: Path, problems: list[Problem]) -> Record | None:
    """A JSON file's object; None, and a problem, if there is none."""
    try:
        value = read_json(path)
    except CoderError as error:
        problems.append(Problem(path.name, str(error).removeprefix(f"{path} ").removeprefix("cannot be read: ")))
    else:
        if isinstance(value, dict):
            return value
        problems.append(Problem(path.name, "damaged: not an object"))
    return None


def describe(problems: Iterable[Problem], file: str) -> str:
    """The problems of one file, in one line; empty if it has none."""
    return "; ".join(problem.text for problem in problems if problem.file == file)
