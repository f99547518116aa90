"""A comparison from its plan to its result: estimate, rates and options, seeds, measurement. Each phase can be repeated.

What a phase has found is in the folder before the next one begins, so that a comparison that was stopped anywhere goes on: the
schedule in ``schedule.json``, each finished run's ``result.json``, each measured model's ``val.json``.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from coder_plugin.compare import measure
from coder_plugin.compare.options import with_held_aside, with_options_of_loss
from coder_plugin.compare.plan import Plan, Point, Row, describe, further_rate, middle_first
from coder_plugin.compare.probe import STEPS
from coder_plugin.compare.runs import Runs, start
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, read_json
from coder_plugin.progress import duration
from coder_plugin.terminal import plural

log = logging.getLogger(__name__)


@dataclass
class Schedule:
    """What is run of a plan; a budget may allow less than all of it.

    Args:
        digest: of the plan.
        seconds: of a run of each row, as estimated, then as measured.
        rates: learning rates of each row that are tried, those that a budget would give up last first; empty: it has one.
        seeds: how many.
        measuring: seconds to measure a model.
        spent: seconds so far.
        warnings: of set-ups that train badly.
    """

    digest: str
    seconds: dict[str, float]
    rates: dict[str, list[float]]
    seeds: int
    measuring: float = 0.0
    spent: float = 0.0
    warnings: Sequence[str] = ()


class Comparison:
    """One plan in its folder.

    Args:
        plan: what is compared.
        folder: for runs and results.
        jobs: how many runs at a time.
        budget: seconds for all of it; None: as long as it takes.
        say: takes a line for the user.

    Raises:
        CoderError: options that do not go together, found before anything is trained.
    """

    def __init__(
        self, plan: Plan, folder: Path, *, jobs: int = 1, budget: float | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.jobs, self.budget, self.say = folder, jobs, budget, say
        self.plan = with_held_aside(with_options_of_loss(plan))
        self.runs = Runs(folder, jobs)
        self.notes: list[str] = []
        self.schedule = Schedule("", {}, {}, plan.seeds)
        self._begun, self._spent_before = time.monotonic(), 0.0

    def run(self) -> dict[str, Any]:
        """All phases. Returns the result, which is in ``comparison.json`` too."""
        for phase in (self.estimate, self.choose, self.extend, self.repeat, self.measure):
            phase()
        return self.result()

    # -- before it starts ----------------------------------------------------------------------------------------

    def estimate(self) -> None:
        """Measure what a run of each row costs by a few steps, make the schedule, and say it."""
        path = self.folder / "schedule.json"
        if path.is_file() and (saved := read_json(path))["digest"] == self.plan.digest and saved["budget"] == self.budget:
            saved.pop("budget")
            self.schedule = Schedule(**saved)
            self._spent_before = self.schedule.spent
            self.say(f"continuing the comparison in {self.folder}")
            return
        costs = {row.name: self._probe(row) for row in self.plan.rows if row.command is None}
        seconds = {row.name: costs.get(row.name, {"seconds": 0.0})["seconds"] for row in self.plan.rows}
        measuring = max((each["evaluation"] for each in costs.values()), default=0.0)
        spent = self._elapsed()
        self.schedule = fit(self.plan, seconds, jobs=self.jobs, budget=self.budget, spent=spent, measuring=measuring)
        first: dict[str, str] = {}  # what several rows share is said once
        for name, cost in costs.items():
            for text in cost["warnings"]:
                first.setdefault(text, f"{name}: {text}")
        self.schedule.warnings = list(first.values())
        grid = [point for points in self._grid().values() for point in points]
        runs, finished = len(grid) + len(self.plan.rows) * (self.schedule.seeds - 1), len(grid) - len(self._unfinished(grid))
        disk = sum(each["disk"] for each in costs.values()) / max(1, len(costs))
        disk *= self.jobs + len(self.plan.rows) * self.schedule.seeds
        steps = ", ".join(f"{name} {cost['steps']:,} of {cost['step']:.2g} s" for name, cost in costs.items())
        text = f"{plural(runs, 'run')} of {plural(len(self.plan.rows), 'row')}, {self.jobs} at a time"
        text += f", {finished} of them finished" if finished else ""
        if costs:
            text += (
                f": about {duration(self._left())}, {disk / 1e6:,.0f} MB of disk at most (measured over at most {STEPS} steps; "
                f"steps of a run: {steps})"
            )
        if len(costs) < len(self.plan.rows):
            text += "; how long the commands of your own take is known when they have run once"
        self.say(text + (f"; the budget is {duration(self.budget)}" if self.budget else ""))
        for warning in self.schedule.warnings:
            self.say(f"warning: {warning}")
        self._say_left_out()

    def _probe(self, row: Row) -> dict[str, Any]:
        self.say(f"timing up to {STEPS} steps of {row.name}, which may take a minute")
        point, folder = row.points()[0], self.folder / "probe"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = {**point.options, "report": False, "logs": str(folder), "name": "run", "resume": None}
        (folder / "options.json").write_text(json.dumps(options))
        files = [str(folder / "options.json"), str(folder / "cost.json"), str(time.time())]
        log_file = folder / "log"
        if start([sys.executable, "-m", "coder_plugin.compare.probe", *files], log_file, self.jobs).wait():
            lines = log_file.read_text(errors="replace").strip().splitlines()
            reason = lines[-1].removeprefix("coder_plugin.errors.CoderError: ") if lines else "nothing was logged"
            raise CoderError(f"{row.name} does not train: {reason} (see {log_file})")
        cost: dict[str, Any] = read_json(folder / "cost.json")
        shutil.rmtree(folder)
        return cost

    def next_commands(self) -> list[list[str]]:
        """The commands of the runs that are not finished, as far as they are known now.

        The seeds follow from the chosen rates and options, so those are known when the first runs have been made.
        """
        self.schedule = fit(self.plan, dict.fromkeys((row.name for row in self.plan.rows), 0.0), jobs=1, budget=None)
        waiting = self._unfinished(point for points in self._grid().values() for point in points)
        waiting = waiting or self._unfinished(point for points in self._further().values() for point in points)
        return [self.runs.command(point) for point in waiting or self._unfinished(self._chosen_seeds())]

    # -- runs ----------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Train every row at each of its rates and options with seed 0."""
        grid = [point for points in self._grid().values() for point in points]
        for level, points in enumerate(self._batches(grid, self._level)):
            if level and not self._fits(points):
                self.schedule.rates = {name: rates[:level] for name, rates in self.schedule.rates.items()}
                self._say_left_out()
                break
            self._train(points)

    def extend(self) -> None:
        """Where a row's best rate is the first or last of its grid, try one step further; or say so."""
        further: list[Point] = []
        for points in self._further().values():
            if self._fits([*further, *points], reserve=len(self.plan.rows) * (self.schedule.seeds - 1)):
                further += points
        self._train(further)
        for row in self.plan.rows:
            best = self._best(row)
            if best is not None and best.lr is not None:
                tried = sorted({point.lr for point in self._tried(row) if point.lr is not None})
                if further_rate(tried, best.lr) is not None:
                    edge = f"at the edge of those tried ({_numbers(tried)})"
                    self.notes.append(f"{row.name}: its best rate {best.lr:g} is {edge}")

    def repeat(self) -> None:
        """Train every row's best with the other seeds: all rows with one seed before any with the next."""
        for row in self.plan.rows:
            if (best := self._best(row)) is None:
                self.notes.append(f"{row.name} is left out: {next(iter(self._failures(row)), 'no run')}")
            else:
                for point in self._tried(row):
                    if point != best:
                        self.runs.drop_export(point)
                if self.runs.forget_lost(best):
                    self._train([best])
        others = [point for point in self._chosen_seeds() if point.seed]
        for seed, points in enumerate(self._batches(others, attrgetter("seed")), 1):
            if not self._fits(points):
                self.schedule.seeds = seed
                self._say_left_out()
                break
            self._train(points)

    def _batches(self, points: Iterable[Point], key: Callable[[Point], int]) -> list[list[Point]]:
        """Points by ascending key, those of one key together. Without a budget all together: no job waits for the next key."""
        ordered = sorted(points, key=key)
        return [ordered] if self.budget is None else [list(group) for _, group in groupby(ordered, key)]

    def _train(self, points: Sequence[Point]) -> None:
        def on_end(point: Point, seconds: float) -> None:
            result = self.runs.result(point)
            if seconds:
                self.schedule.seconds[point.row.name] = seconds if result else self.schedule.seconds[point.row.name]
                self._save_schedule()
            if result is not None and seconds:
                best = max(range(len(result["held_aside"])), key=result["held_aside"].__getitem__)
                self.say(
                    f"{point}, seed {point.seed}: R@sum {result['held_aside'][best]:.1f} on the held-out images, after epoch "
                    f"{best + 1} of {len(result['held_aside'])}; {duration(seconds)}; about {duration(self._left())} left"
                )

        self.runs.run(points, on_end)

    # -- what is known -------------------------------------------------------------------------------------------

    def _grid(self) -> dict[str, list[Point]]:
        rates = self.schedule.rates
        return {row.name: row.points(rates[row.name] or None) for row in self.plan.rows}

    def _level(self, point: Point) -> int:
        rates = self.schedule.rates[point.row.name]
        return rates.index(point.lr) if point.lr in rates else 0

    def _further(self) -> dict[str, list[Point]]:
        """Of each row whose best rate is at the edge of its grid, the points at the next rate."""
        further = {}
        for row in self.plan.rows:
            grid = self._grid()[row.name]
            best = self._best_of(grid)
            if best is None or best.lr is None:
                continue
            rate = further_rate([point.lr for point in grid if point.lr is not None], best.lr)
            if rate is not None:
                values = tuple((name, rate if name == "lr" else value) for name, value in best.values)
                further[row.name] = [replace(best, values=values)]
        return further

    def _tried(self, row: Row) -> list[Point]:
        """All points of a row with seed 0 that have a result."""
        points = [*self._grid()[row.name], *self._further().get(row.name, [])]
        return [point for point in points if self.runs.result(point) is not None]

    def _best(self, row: Row) -> Point | None:
        return self._best_of(self._tried(row))

    def _best_of(self, points: Sequence[Point]) -> Point | None:
        finished = [(max(result["held_aside"]), point) for point in points if (result := self.runs.result(point)) is not None]
        return max(finished, key=lambda pair: pair[0])[1] if finished else None

    def _chosen_seeds(self) -> list[Point]:
        best = [point for row in self.plan.rows if (point := self._best(row)) is not None]
        return [replace(point, seed=seed) for seed in range(self.schedule.seeds) for point in best]

    def _unfinished(self, points: Iterable[Point]) -> list[Point]:
        return [point for point in points if self.runs.result(point) is None]

    def _failures(self, row: Row) -> list[str]:
        return [reason for point, reason in self.runs.failed.items() if point.row == row]

    # -- time ----------------------------------------------------------------------------------------------------

    def _cost(self, points: Sequence[Point]) -> float:
        """Seconds of the runs that are not finished."""
        each = [self.schedule.seconds[point.row.name] for point in self._unfinished(points)]
        return max(sum(each) / self.jobs, max(each, default=0.0))

    def _fits(self, points: Sequence[Point], reserve: int = 0) -> bool:
        """Whether there is time for runs, and for as many others of mean length."""
        if self.budget is None or not self._cost(points):
            return True
        mean = sum(self.schedule.seconds.values()) / len(self.schedule.seconds)
        measuring = self.schedule.measuring * (1 + len(self.plan.rows) * self.schedule.seeds)
        return self._elapsed() + self._cost(points) + reserve * mean / self.jobs + measuring <= self.budget

    def _elapsed(self) -> float:
        """Seconds since the comparison began, of a stopped one without the time that it stood still."""
        return self._spent_before + time.monotonic() - self._begun

    def _left(self) -> float:
        grid = [point for points in self._grid().values() for point in points]
        seeds = [replace(row.points()[0], seed=seed) for row in self.plan.rows for seed in range(1, self.schedule.seeds)]
        if self._tried_all(grid):
            seeds = [point for point in self._chosen_seeds() if point.seed]
        return self._cost([*grid, *seeds])

    def _tried_all(self, points: Sequence[Point]) -> bool:
        return all(self.runs.result(point) is not None or point in self.runs.failed for point in points)

    def _left_out(self) -> list[str]:
        """What the schedule has less than the plan."""
        seeds = [f"seeds: {self.schedule.seeds} in place of {self.plan.seeds}"] if self.schedule.seeds < self.plan.seeds else []
        kept = self.schedule.rates
        rates = {row.name: [rate for rate in row.rates if rate not in kept[row.name]] for row in self.plan.rows}
        return [*seeds, *(f"{name}: the rates {_numbers(each)}" for name, each in rates.items() if each)]

    def _say_left_out(self) -> None:
        self._save_schedule()
        if left_out := self._left_out():
            self.say(f"left out to keep within --budget {duration(self.budget or 0)}: {'; '.join(left_out)}")

    def _save_schedule(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.schedule.spent = self._elapsed()
        with atomic_write(self.folder / "schedule.json", "w") as file:
            file.write(json.dumps({**vars(self.schedule), "budget": self.budget}))

    # -- measurement ---------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Measure the chosen runs on the validation data, and the model before training; each once."""
        for point in self._chosen_seeds():
            if self.runs.result(point) is not None:
                self._measured(point)
        self._before()

    def _measured(self, point: Point) -> dict[str, Any]:
        own = (self.runs.result(point) or {}).get("val")
        if own is not None:
            return own  # type: ignore[no-any-return]
        folder = self.runs.path(point)
        data = self.plan.val_data
        return measure.once(folder / "val.json", data, lambda: measure.of_run(folder, data, point.options))

    def _before(self) -> dict[str, Any] | None:
        """Of the model that the first row starts from."""
        point = next((point for point in self._chosen_seeds() if point.row.command is None), None)
        if point is None:
            return None
        path = self.folder / "before.json"
        return measure.once(path, self.plan.val_data, lambda: measure.before(point.options, self.plan.val_data, self.folder))

    def result(self) -> dict[str, Any]:
        """What the comparison has found, from the results in its folder alone."""
        from coder_plugin.compare.result import make_result

        rows = {}
        for row in self.plan.rows:
            if (best := self._best(row)) is None:
                continue
            points = [replace(best, seed=seed) for seed in range(self.schedule.seeds)]
            points = [point for point in points if self.runs.result(point) is not None]
            rows[row.name] = {
                "chosen": {name: value for name, value in best.values},
                "describe": describe(best.values).removeprefix(" at "),
                "lr": best.lr if best.lr is not None else best.options.get("lr"),
                "command": self.runs.command(best),
                "folder": str(self.runs.path(best)),
                "tried": [
                    {"values": dict(point.values), "held_aside": max(self.runs.result(point)["held_aside"])}  # type: ignore[index]
                    for point in self._tried(row)
                ],
                "seeds": [point.seed for point in points],
                "runs": [self.runs.result(point) for point in points],
                "val": [self._measured(point) for point in points],
            }
        if not rows:
            raise CoderError("no run has ended with a result: " + "; ".join(sorted(set(self.runs.failed.values()))))
        notes = [*self.schedule.warnings, *self.notes, *(f"left out for the budget: {each}" for each in self._left_out())]
        return make_result(self.plan, rows, self._before(), notes)


def fit(
    plan: Plan, seconds: Mapping[str, float], *, jobs: int, budget: float | None, spent: float = 0.0, measuring: float = 0.0
) -> Schedule:
    """The schedule that a budget allows: fewer seeds first, then fewer rates.

    Args:
        plan: what is compared.
        seconds: of a run of each row. jobs: runs at a time. budget: seconds for everything; None: no limit.
        spent: seconds so far. measuring: seconds to measure a model.

    Raises:
        CoderError: not even one run of each row fits.
    """
    rates = {row.name: middle_first(row.rates) for row in plan.rows}
    most = max(map(len, rates.values())) or 1

    def cost(seeds: int, level: int) -> float:
        of_row = {row.name: len(row.points(rates[row.name][:level] or None)) + seeds - 1 for row in plan.rows}
        last = measuring * (1 + len(plan.rows) * seeds)
        return spent + sum(seconds[name] * count for name, count in of_row.items()) / jobs + last

    choices = [(seeds, most) for seeds in range(plan.seeds, 0, -1)] + [(1, level) for level in range(most - 1, 0, -1)]
    fitting = next(((seeds, level) for seeds, level in choices if budget is None or cost(seeds, level) <= budget), None)
    if fitting is None:
        raise CoderError(
            f"--budget {duration(budget or 0)} is too little for one run of each row: about {duration(cost(1, 1))} is needed. "
            "Give more, or fewer rows or epochs"
        )
    seeds, level = fitting
    kept = {name: each[:level] for name, each in rates.items()}
    return Schedule(plan.digest, dict(seconds), kept, seeds, measuring, spent)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
