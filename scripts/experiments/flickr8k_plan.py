"""What flickr8k.py trains: the settings, rows and points of flickr8k.toml."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PLAN = Path(__file__).resolve().parent / "flickr8k.toml"


@dataclass(frozen=True)
class Point:
    """A row of the tables at one learning rate, with values of its options and a seed."""

    setting: str
    row: str
    lr: float
    options: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder."""
        options = "".join(f"-{key.split('.')[-1]}{value}" for key, value in self.options)
        return f"{self.row}{options}-lr{self.lr:g}-seed{self.seed}"


class Plan:
    """What is trained: flickr8k.toml at a size."""

    def __init__(self, size: str, settings: Iterable[str] = (), rows: Iterable[str] = (), tables: Iterable[str] = ()) -> None:
        content = tomllib.loads(PLAN.read_text())
        self.size, self.rows = size, content["rows"]
        every = content["settings"]
        for name, each in every.items():
            if each.get("like", name) not in every:
                raise SystemExit(f"setting {name} is like {each['like']}, which is none of {', '.join(every)}")
        merged = {name: {**every.get(each.get("like"), {}), **each} for name, each in every.items()}
        known = {name: each for name, each in merged.items() if size in each["sizes"]}
        if unknown := [name for name in settings if name not in known]:
            raise SystemExit(f"no setting {unknown[0]} of size {size} in {PLAN.name}: one of {', '.join(known)}")
        if unknown := [name for name in rows if name not in self.rows]:
            raise SystemExit(f"no row {unknown[0]} in {PLAN.name}: one of {', '.join(self.rows)}")
        #: Those to train, and those that they start from.
        self.settings = {name: {**known[name], **known[name]["sizes"][size]} for name in known}
        for name, setting in self.settings.items():
            setting["flags"] = shlex.split(f"{known[name]['flags']} {setting['flags']}")
        self.chosen_settings = list(settings) or list(known)
        if unknown := sorted(set(tables).difference(*(row["tables"] for row in self.rows.values()))):
            raise SystemExit(f"no table {unknown[0]} in {PLAN.name}")
        #: In the order of the file, where a row comes after those that it is like.
        self.chosen = [name for name in self.rows if name in (rows or self.rows)]
        self.tables = set(tables)

    def row(self, setting: str, row: str) -> dict[str, Any]:
        """What a row is in a setting."""
        return {**self.rows[row], **self.settings[setting].get("own", {}).get(row, {})}

    def rows_of(self, setting: str) -> list[str]:
        """The rows to train in a setting."""
        own = self.settings[setting].get("rows")

        def has(name: str, row: dict[str, Any]) -> bool:
            if self.tables and self.tables.isdisjoint(row["tables"]):
                return False
            if own is not None:
                return name in own
            return setting in row.get("settings", [setting]) and self.size in row.get("sizes", [self.size])

        return [name for name in self.chosen if has(name, self.row(setting, name))]

    def against(self, setting: str, row: str) -> str | None:
        """The row that a row is compared with, if that is not the best peer."""
        return self.row(setting, row).get("against", self.settings[setting].get("against"))

    def built_on(self, setting: str, row: str) -> list[str]:
        """The row that a row is like, the row that this one is like, and so on."""
        like = self.row(setting, row).get("like")
        return [like, *self.built_on(setting, like)] if like else []

    def base(self, setting: str) -> Point | None:
        """The point whose model the setting's runs start from."""
        if (name := self.settings[setting].get("base")) is None:
            return None
        [row], [rate] = self.settings[name]["rows"], self.settings[name]["lr"]
        return Point(name, row, rate, (), self.seeds(name, row)[0])

    def seeds(self, setting: str, row: str) -> range:
        """The seeds of a row's chosen point; with the first of them it is chosen."""
        first = self.settings[setting].get("first_seed", 0)
        return range(first, first + self.row(setting, row).get("seeds", self.settings[setting]["seeds"]))

    def grid(self, setting: str, row: str, chosen: Callable[[str], Point]) -> list[Point]:
        """The points of a row to choose from, with its first seed."""
        content = self.row(setting, row)
        rates, fixed = content.get("lr", self.settings[setting]["lr"]), dict(content.get("options", {}))
        if content.get("like"):
            like = chosen(content["like"])
            known = dict(like.options)
            fixed = {**known, **{name: known[other] for name, other in content.get("copies", {}).items()}, **fixed}
            same = "lr" not in content and self.settings[setting].get("same_rate")
            rates = [like.lr] if same or content.get("same_rate") else rates
        points = itertools.product(rates, content.get("grid", [{}]))
        seed = self.seeds(setting, row)[0]
        return [Point(setting, row, lr, tuple({**fixed, **options}.items()), seed) for lr, options in points]
