"""What a run's folder says of it: options, plan, metrics, the newest checkpoint's description.

Whatever is missing or damaged is told of in ``faults``, and the rest is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder_plugin.config import flatten
from coder_plugin.errors import CoderError

Record = dict[str, Any]
#: What a plan holds as objects.
_OBJECTS = ("batch", "heads", "options", "training data", "validation data", "versions")


@dataclass(frozen=True)
class Run:
    """A training run, as far as its folder still tells.

    Args:
        config: the options (``config.json``). plan: what they came to (``plan.json``).
        train: records of steps, in their order. val: of evaluations, without ``val/``.
        manifest: of the newest checkpoint; checkpoint: its folder.
        faults: a line for each thing that is not there or not whole.
    """

    folder: Path
    config: Record | None = None
    plan: Record | None = None
    train: tuple[Record, ...] = ()
    val: tuple[Record, ...] = ()
    manifest: Record | None = None
    checkpoint: Path | None = None
    faults: tuple[str, ...] = ()

    @property
    def last(self) -> Record:
        """The last evaluation's figures; empty where there was none."""
        return dict((self.manifest or {}).get("last") or (self.val[-1] if self.val else {}))

    @property
    def best(self) -> Record:
        """Those of the highest R@sum after a step."""
        trained = [record for record in self.val if record["step"]]
        found = max(trained, key=lambda record: record.get("rsum", -1.0), default={})
        return dict((self.manifest or {}).get("best") or found)

    @property
    def heads(self) -> Mapping[str, Any]:
        """The objective's heads with the numbers of their parameters."""
        return (self.plan or {}).get("heads", {})

    @property
    def pairs_per_step(self) -> int | None:
        """The global batch; None: neither the plan nor a checkpoint, which knows the ranks, tells."""
        planned = ((self.plan or {}).get("batch") or {}).get("global per step")
        if planned is not None:
            return int(planned)
        config = self.config or {}
        if self.manifest is None or not config.get("batch_size"):
            return None
        return int(config["batch_size"]) * int(config.get("accum_freq", 1)) * int(self.manifest["world_size"])


def read_run(folder: str | Path) -> Run:
    """Read a run's folder.

    Raises:
        CoderError: it holds nothing of a run.
    """
    from coder_plugin.training import checkpoint

    folder = Path(folder)
    faults: list[str] = []
    config, plan = (_read_json(folder / name, faults) for name in ("config.json", "plan.json"))
    plan = plan and _objects(plan, faults)
    train, val = _read_metrics(folder / "metrics.jsonl", faults)
    found = checkpoint.checkpoints(folder / "checkpoints")
    if not (config or plan or train or val or found):
        raise CoderError(f"{folder} is no training run's folder: no config.json, plan.json, metrics.jsonl or checkpoints")
    if not found:
        faults.append("no whole checkpoint")
    newest = found[0] if found else None
    return Run(
        folder,
        _flat(config or (newest.manifest.get("config") if newest else None), faults),
        plan,
        tuple(train),
        tuple(val),
        newest.manifest if newest else None,
        newest.path if newest else None,
        tuple(faults),
    )


def curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a figure, where records have it."""
    there = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in there], [value for _, value in there]


def keys_of(records: Sequence[Record]) -> list[str]:
    """All figures of the records, in the order in which they first came."""
    return list(dict.fromkeys(key for record in records for key in record if key not in ("step", "epoch")))


@dataclass
class _Rewound:
    """Records in the order of steps: a run that was resumed takes the steps after its checkpoint again, and the later
    records are true."""

    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        while self.records and self.records[-1]["step"] >= record["step"]:
            self.records.pop()
        self.records.append(record)


def _read_metrics(path: Path, faults: list[str]) -> tuple[list[Record], list[Record]]:
    train, val = _Rewound(), _Rewound()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        faults.append(f"{path.name}: {error.strerror or error}")
        return [], []
    unread = 0
    for line in filter(None, map(str.strip, lines)):
        try:
            record = json.loads(line)
            numbers = {key: value for key, value in record.items() if _is_number(value)}
            step = numbers["step"]
        except (ValueError, KeyError, AttributeError):
            unread += 1
            continue
        own = {key.removeprefix("val/"): value for key, value in numbers.items() if key.startswith("val/")}
        if own:
            val.add({"step": step, **own})
        else:
            train.add(numbers)
    if unread:
        faults.append(f"{path.name}: {unread} line{'s' * (unread > 1)} cannot be read")
    return train.records, val.records


def _flat(config: Record | None, faults: list[str]) -> Record | None:
    """Options by their flat names; those that this version does not know are a fault."""
    if config is None:
        return None
    try:
        return flatten(config)
    except CoderError as error:
        faults.append(f"config.json: {error}")
        return None


def _objects(plan: Record, faults: list[str]) -> Record:
    """A plan without what should be an object and is none."""
    wrong = [name for name in _OBJECTS if not isinstance(plan.get(name, {}), dict)]
    faults += [f"plan.json: its {name!r} is no object" for name in wrong if plan[name] is not None]
    return {name: value for name, value in plan.items() if name not in wrong}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _read_json(path: Path, faults: list[str]) -> Record | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(f"{path.name}: {error.strerror or error}")
        return None
    except ValueError as error:
        faults.append(f"{path.name} is damaged: {error}")
        return None
    if not isinstance(value, dict):
        faults.append(f"{path.name} is damaged: no object")
        return None
    return value
