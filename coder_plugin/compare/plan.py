"""What is compared: rows, the values that each may choose from, seeds, and what all of them share.

A plan is made by the flags of ``coder-plugin compare``, or read from a file::

    peer = "clip"                       # a row's name or several; the best of them is what the others are compared with
    seeds = 3

    [train]                             # options of coder-plugin train, common to the rows
    train_data = "train.csv"
    val_data = "val.csv"
    recipe = "finetune-clip"
    lr = [1e-5, 3e-5, 1e-4]             # several values: each row takes its best

    [[rows]]
    loss = "clip"

    [[rows]]
    name = "dcl"
    loss = "dcl"
    set = [["dcl.mu=0.1", "dcl.gamma=0.3"], ["dcl.mu=0.05", "dcl.gamma=0.5"]]

    [settings.small]                    # options over those of [train]: a comparison of its own
    model = "ViT-S-32"
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from coder_plugin.config import get_option
from coder_plugin.errors import CoderError
from coder_plugin.files import read_options, sha256_json
from coder_plugin.locations import check_model_addresses, local_only

#: Options of training that a comparison sets itself.
SET_HERE = ("seed", "name", "logs", "resume", "report", "dry_run", "val_frequency")


@dataclass(frozen=True)
class Row:
    """One candidate.

    Args:
        name: in the table.
        options: of ``coder-plugin train``, by flat name, besides the common ones.
        grid: options with the values to choose from.
        command: trains and measures the row in place of ``coder-plugin train``; see docs/compare.md.
        val_data: what the command gets as ``{val_data}``: where it is measured, while an option of this name would choose.
    """

    name: str
    options: Mapping[str, Any]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    command: str | None = None
    val_data: str | None = None

    def points(self, rates: Sequence[float] | None = None) -> list[Point]:
        """Every combination of the grid's values, with seed 0; ``rates`` in place of the grid's learning rates."""
        grid = {**self.grid, **({} if rates is None else {"lr": tuple(rates)})}
        return [Point(self, tuple(zip(grid, values, strict=True)), 0) for values in itertools.product(*grid.values())]

    @property
    def rates(self) -> list[float]:
        """Its learning rates, if it chooses among some, in ascending order."""
        return sorted(self.grid.get("lr", ()))


@dataclass(frozen=True)
class Point:
    """A row with one value of each option of its grid, and a seed: one run."""

    row: Row
    values: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def lr(self) -> float | None:
        return dict(self.values).get("lr")

    @property
    def options(self) -> dict[str, Any]:
        return {**self.row.options, **dict(self.values), "seed": self.seed}

    @cached_property
    def folder(self) -> str:
        """Name of the run's folder: other options of the same row give another one."""
        rate = f"-lr{self.options['lr']:g}" if "lr" in self.options else ""
        command = [self.row.command, *([self.row.val_data] if "{val_data}" in (self.row.command or "") else [])]
        digest = sha256_json([*command, {key: each for key, each in self.options.items() if key != "workers"}])
        return f"{slug(self.row.name)}{rate}-seed{self.seed}-{digest[:8]}"

    def __hash__(self) -> int:
        return hash(self.folder)

    def __str__(self) -> str:
        return f"{self.row.name}{describe(self.values)}"


@dataclass(frozen=True)
class Plan:
    """Rows that are trained and measured on the same data.

    Args:
        name: of the setting; empty if there is one.
        rows: with all of their options.
        peers: names of the rows of which the best is compared with.
        seeds: with the first a row's values are chosen.
        val_data: where the chosen runs are measured; None: on the validation split of the built-in scenes.
    """

    name: str
    rows: tuple[Row, ...]
    peers: tuple[str, ...]
    seeds: int
    val_data: str | None

    @property
    def digest(self) -> str:
        """What tells whether a folder's schedule belongs to this plan."""
        return sha256_json([[point.folder for row in self.rows for point in row.points()], self.seeds, self.peers])


def make_plans(
    rows: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
    *,
    seeds: int,
    peers: Sequence[str] = (),
    select_data: str | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    source: str = "flag",
) -> list[Plan]:
    """A plan for each setting, checked.

    Args:
        rows: options of training of each row, and ``name`` and ``command``.
        common: those of all rows.
        seeds: how many.
        peers: names of rows; none: the first row.
        select_data: data to choose on, in place of images held out of training.
        settings: options over the common ones, by name.
        source: what messages call where the options are from.

    Raises:
        CoderError: fewer than two rows, a name given twice, an unknown option, or one that a comparison sets itself.
    """
    if len(rows) < 2:
        raise CoderError(f"a comparison needs two rows or more, and {len(rows)} are given: --loss clip --loss dcl")
    plans = []
    for name, own in (settings or {"": {}}).items():
        made = [_make_row(each, {**common, **own}, select_data, source) for each in rows]
        names = [row.name for row in made]
        if twice := next((each for each in names if names.count(each) > 1), None):
            raise CoderError(f"two rows are called {twice!r}: give one of them another name in a plan file")
        if unknown := next((each for each in peers if each not in names), None):
            raise CoderError(f"the peer {unknown!r} is not a row: {', '.join(names)}")
        val_data = {**common, **own}.get("val_data")
        plans.append(Plan(name, tuple(made), tuple(peers or names[:1]), seeds, val_data))
    return plans


def read_plan(path: str, flags: Mapping[str, Any], *, trusted: bool = False) -> dict[str, Any]:
    """The arguments of :func:`make_plans` from a TOML file.

    Args:
        path: of the file.
        flags: options of training that win over its ``[train]``.
        trusted: it may name commands, Python files, and models and data to fetch.

    Raises:
        CoderError: it cannot be read, has an unknown entry, or needs to be trusted.
    """
    content = read_options(path, path)
    kinds: dict[str, Any] = {
        "rows": list, "train": dict, "settings": dict, "peer": (str, list), "seeds": int, "select_data": str
    }  # fmt: skip
    for name, value in content.items():
        if name not in kinds:
            raise CoderError(f"{path}: unknown entry {name!r}; known: {', '.join(kinds)}")
        if not isinstance(value, kinds[name]):
            raise CoderError(f"{path}: {name} is {value!r}, which is not of the form that docs/compare.md shows")
    rows = content.get("rows", [])
    if not all(isinstance(each, dict) for each in (*rows, *content.get("settings", {}).values())):
        raise CoderError(f"{path}: write each row as a table [[rows]], and each setting as [settings.NAME]")
    settings = content.get("settings", {})
    if wrong := next((name for name in settings if not re.fullmatch(r"\w[\w.-]*", name)), None):
        raise CoderError(f"{path}: the setting {wrong!r} names a folder: use letters, digits, '.', '_' and '-'")
    if not trusted:
        for table in ({"val_data": content.get("select_data")}, content.get("train", {}), *settings.values(), *rows):
            _check_harmless(table, path)
    peer = content.get("peer", [])
    result = {"rows": rows, "common": {**content.get("train", {}), **flags}, "source": path}
    return {
        **result,
        "peers": [peer] if isinstance(peer, str) else peer,
        "settings": content.get("settings"),
        **{name: content[name] for name in ("seeds", "select_data") if name in content},
    }


def _check_harmless(table: Mapping[str, Any], path: str) -> None:
    """Raise a ``CoderError`` for options that would run a command or a Python file, or fetch a model or data."""
    trust = "if you trust it, give --trust-plan"
    if "command" in table:
        raise CoderError(f"{path} runs the command {str(table['command'])[:200]!r}: {trust}")
    for name, value in table.items():
        is_list = get_option(name).is_list
        for each in _leaves(value):
            if local_only({name: each}) != {name: each}:
                what = "which runs a command or a Python file, or fetches"
                raise CoderError(f"{path}: {name} is {each[:200]!r}, {what}: {trust}")
            try:
                check_model_addresses({name: [each] if is_list else each}, path, {})
            except CoderError as error:
                raise CoderError(f"{str(error).partition(': if you trust')[0]}: {trust}") from error


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list) else [value]


def _make_row(given: Mapping[str, Any], common: Mapping[str, Any], select_data: str | None, source: str) -> Row:
    own = {name: value for name, value in given.items() if name not in ("name", "command")}
    command = given.get("command", common.get("command"))
    options = {**{name: value for name, value in common.items() if name not in ("val_data", "command")}, **own}
    name = str(given.get("name") or own.get("loss") or own.get("recipe") or options.get("recipe") or "")
    if not name:
        raise CoderError(f"{source}: a row has neither a loss nor a recipe")
    if taken := [each for each in SET_HERE if each in options]:
        raise CoderError(f"{get_option(taken[0]).flag}: coder-plugin compare sets it itself (--seeds, --output)")
    fixed, grid = {}, {}
    for key, value in options.items():
        option = get_option(key)
        several = isinstance(value, list) and (not option.is_list or (value != [] and isinstance(value[0], list)))
        values = [option.check(each, source) for each in (value if several else [value])]
        if several and not values:
            raise CoderError(f"{option.flag} has no values to choose from ({source})")
        if len(values) > 1:
            grid[key] = tuple(values)
        else:
            fixed[key] = values[0]
    if select_data is not None:
        fixed["val_data"] = select_data
        if fixed.pop("hold_aside", 0):
            raise CoderError("--select-data and --hold-aside both say which images choose: give one")
    if command is not None:
        check_command(command)
    return Row(name, fixed, grid, command, common.get("val_data"))


def check_command(command: str) -> None:
    """Raise a ``CoderError`` for a command that does not say where its result goes, or has a place that is not an option."""
    places = re.findall(r"\{(\w*)\}", command)
    for place in places:
        if place != "output":
            get_option(place)
    if "output" not in places:
        raise CoderError(f"command: {command!r} must write its result to {{output}}")


def further_rate(rates: Sequence[float], best: float) -> float | None:
    """The rate one step beyond the grid where the best one is at its edge; None: it is not, or there is only one.

    Example:
        >>> further_rate([1e-5, 1e-4], 1e-4), further_rate([1e-5, 1e-4, 1e-3], 1e-4)
        (0.001, None)
    """
    rates = sorted(set(rates))
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    beside = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / beside:.3g}")


def middle_first(rates: Iterable[float]) -> list[float]:
    """The rates in the order in which a budget gives them up last.

    Example:
        >>> middle_first([1, 2, 3, 4])
        [3, 2, 4, 1]
    """
    rates = sorted(rates)
    return sorted(rates, key=lambda rate: (abs(2 * rates.index(rate) - len(rates) + 0.5), rate))


def describe(values: Iterable[tuple[str, Any]]) -> str:
    """Chosen values in words, after a row's name.

    Example:
        >>> describe([("batch_size", 64), ("lr", 1e-4), ("set", ["dcl.mu=0.1"])])
        ' at batch size 64, lr 0.0001, dcl.mu=0.1'
    """
    words = []
    for name, value in values:
        text = " ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
        words.append(text if name == "set" else f"{name.replace('_', ' ')} {text}")
    return f" at {', '.join(words)}" if words else ""


def slug(name: str) -> str:
    """A name as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:40] or "row"
