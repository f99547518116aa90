"""Several runs on one page: recall, curves over each other, what differs in their options, time per epoch.

Only the runs' own files are read, no model and no data. Runs may differ in length, have no validation, or lack files: what is
missing is named, and the rest is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin import __version__
from coder_plugin.errors import CoderError
from coder_plugin.html import Html, render
from coder_plugin.report import recall_table
from coder_plugin.report.charts import Series, format_number, line_colour, line_dash, lines
from coder_plugin.report.curves import METRICS, Figure, active_curve
from coder_plugin.report.description import STORAGE
from coder_plugin.report.page import Content, format_seconds, make_content, write_page
from coder_plugin.training.run_folder import Record, RunFolder, metric_names

#: Metrics of evaluations with their titles, in the order of the charts.
_EVALUATIONS = {
    "rsum": "R@sum",
    **{f"t2i_r{k}": f"Text to image R@{k}, %" for k in (1, 5, 10)},
    **{f"i2t_r{k}": f"Image to text R@{k}, %" for k in (1, 5, 10)},
}
#: Entries of ``plan.json`` that are compared besides the options, with their names.
_PLANNED = {
    "training data": "training data",
    "validation data": "validation data",
    "parameters": "parameters",
    "trainable": "trained parameters",
    "ranks": "processes",
    "machine": "machine",
    "precision": "precision, as run",
}


class Run(NamedTuple):
    """A run of the page: its number, from 1, its name, which no other has, and what its folder holds."""

    number: int
    name: str
    folder: RunFolder

    @property
    def label(self) -> str:
        return str(self.number)

    @property
    def objective(self) -> str:
        return str((self.folder.plan or {}).get("objective") or (self.folder.config or {}).get("loss") or "")

    @property
    def swatch(self) -> Html:
        """A piece of the run's line."""
        stroke = f'style="stroke:{line_colour(self.number - 1)}" stroke-width="3"{line_dash(self.number - 1)}'
        return Html(f'<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><path d="M0,4H28" {stroke}/></svg>')


class Difference(NamedTuple):
    """A row of what differs: the option, and each run's value as text."""

    name: str
    values: list[str]


def compare_runs(folders: Sequence[str | Path], *, output: str | Path | None = None, export: str | None = None) -> Path:
    """Write a page that compares training runs.

    Args:
        folders: two or more runs' folders. Differences are to the first.
        output: the file to write; None: ``comparison.html`` beside the first run's folder.
        export: whose results are compared, "best" or "last"; None: the best.

    Returns:
        The file.

    Raises:
        CoderError: fewer than two runs, one named twice, a folder that is no run's, or a file that cannot be written.

    Example:
        >>> compare_runs(["logs/one"])
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: a comparison needs two runs or more
    """
    if len(folders) < 2:
        raise CoderError("a comparison needs two runs or more")
    places = [os.path.realpath(folder) for folder in folders]
    twice = next((str(folder) for folder, place in zip(folders, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise CoderError(f"{twice} is named twice: a comparison needs different runs")
    runs = [
        Run(number, name, RunFolder.read(folder))
        for number, (name, folder) in enumerate(zip(_names(places), folders, strict=True), 1)
    ]
    path = Path(output) if output is not None else Path(places[0]).parent / "comparison.html"
    return write_page(path, render("compare.html", **_values(runs, export or "best")))


def _names(places: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as it takes for all of them to differ."""
    parts = [Path(place).parts for place in places]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(places)


def _values(runs: list[Run], export: str) -> dict[str, Any]:
    """The variables of the template."""
    every = Content(runs)
    return {
        "runs": runs,
        "version": __version__,
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "export": export,
        "columns": recall_table.COLUMNS,
        "recalls": make_content(every, recall_rows, export),
        "warnings": make_content(every, different_data, export),
        "lengths": make_content(every, lengths),
        "recall_curves": make_content(every, recall_curves),
        "training_curves": make_content(every, training_curves),
        "options": make_content(every, different_options),
        "plans": make_content(every, different_plans),
        "same_objective": len({run.objective for run in runs}) == 1,
    }


def recall_rows(runs: Sequence[Run], export: str) -> list[tuple[str, list[recall_table.Cell]]]:
    """Each run's row of the table of recall."""
    results = [run.folder.results(export) for run in runs]
    table = recall_table.compared_cells(results)
    return [(_row_name(run, figures), cells) for run, figures, cells in zip(runs, results, table, strict=True)]


def _row_name(run: Run, figures: Record) -> str:
    if not figures:
        return f"{run.number} {run.name} (no validation)"
    notes = [f"epoch {figures['epoch']:g}"] * ("epoch" in figures)
    notes += [f"re-ranked {figures.get('rerank', '')}".strip()] * ("shortlist" in figures)
    return f"{run.number} {run.name}" + (f" ({', '.join(notes)})" if notes else "")


def different_data(runs: Sequence[Run], export: str) -> list[str]:
    """Why the runs' recall may not be comparable."""
    sets: dict[tuple[Any, Any, Any], list[str]] = {}
    for run in runs:
        if figures := run.folder.results(export):
            data = (run.folder.plan or {}).get("validation data") or {}
            sizes = figures.get("images"), figures.get("texts")
            sets.setdefault((data.get("name"), *sizes), []).append(run.label)
    if len(sets) < 2:
        return []
    parts = [
        f"{name or 'unknown data'} ({_count(images)} images, {_count(texts)} captions): {', '.join(labels)}"
        for (name, images, texts), labels in sets.items()
    ]
    return [f"The runs were validated on different data, so their recall cannot be compared. {'; '.join(parts)}."]


def _count(number: Any) -> str:
    return "?" if number is None else f"{number:,.0f}"


def lengths(runs: Sequence[Run]) -> list[tuple[Run, list[str]]]:
    """Of each run: objective, epochs and steps done, pairs per step, time per epoch."""
    rows = []
    for run in runs:
        folder, plan, manifest = run.folder, run.folder.plan or {}, run.folder.manifest or {}
        done, planned = manifest.get("epoch"), plan.get("epochs") or (folder.config or {}).get("epochs")
        seconds, pairs = folder.seconds_per_epoch, folder.pairs_per_step
        rows.append(
            (
                run,
                [
                    run.objective or "–",
                    " of ".join(f"{each:g}" for each in (done, planned) if each is not None) if done is not None else "–",
                    f"{manifest['step']:,}" if manifest else "–",
                    "–" if pairs is None else f"{pairs:,}",
                    "–" if seconds is None else format_seconds(seconds),
                ],
            )
        )
    return rows


# -- curves -----------------------------------------------------------------------------------------------------------


def recall_curves(runs: Sequence[Run]) -> list[Figure]:
    """Recall of all evaluations against the step."""
    return _overlaid(runs, lambda run: run.folder.evaluations, _EVALUATIONS, high=True)


def training_curves(runs: Sequence[Run]) -> list[Figure]:
    """The losses and what else is logged of the steps, without shares and figures of the heads."""
    keys = dict.fromkeys(
        key for run in runs for key in metric_names(run.folder.steps) if not key.startswith(("coder/", "share/", "epoch/"))
    )
    return _overlaid(runs, lambda run: run.folder.steps, {key: METRICS.get(key, key) for key in keys})


def _overlaid(
    runs: Sequence[Run], records: Callable[[Run], Sequence[Record]], titles: dict[str, str], *, high: bool = False
) -> list[Figure]:
    """A chart for each metric that a run has, with a line for each such run in the run's own colour."""
    figures = []
    for key, title in titles.items():
        series, notes = [], []
        for run in runs:
            steps, values, off = active_curve(records(run), key)
            if values:
                series.append(Series(run.name, steps, values, run.number - 1, run.label))
                extreme = f", highest {format_number(max(values))}" if high and max(values) != values[-1] else ""
                notes.append(f"{run.label}: last {format_number(values[-1])}{extreme}")
            elif off:
                notes.append(f"{run.label}: off, in its warm-up")
        if series:
            note = "; ".join(notes)
            figures.append(Figure(title, lines(series, label=f"{title} against steps: {note}"), note))
    return figures


# -- differences ------------------------------------------------------------------------------------------------------


def different_options(runs: Sequence[Run]) -> list[Difference]:
    """The options that not all runs have the same. A run whose options are not known does not count."""
    configs = [run.folder.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config or {} if name not in STORAGE)
    return _differences([None if config is None else {name: config.get(name) for name in names} for config in configs])


def different_plans(runs: Sequence[Run]) -> list[Difference]:
    """What differs in the runs' data, models, machines and versions."""
    facts: list[dict[str, Any] | None] = []
    for run in runs:
        plan = run.folder.plan
        if plan is None:
            facts.append(None)
            continue
        known = {name: plan.get(key) for key, name in _PLANNED.items()}
        for key in ("training data", "validation data"):
            data = plan.get(key) or {}
            known[key] = ", ".join(filter(None, [str(data.get("name") or ""), _images(data.get("images"))])) or None
        known |= {f"{name}, version": version for name, version in (plan.get("versions") or {}).items()}
        facts.append(known)
    return _differences(facts)


def _images(number: Any) -> str:
    return f"{number:,} images" if number else ""


def _differences(facts: Sequence[dict[str, Any] | None]) -> list[Difference]:
    names = dict.fromkeys(name for each in facts for name in each or {})
    rows = []
    for name in names:
        values = [None if each is None else _text(each.get(name)) for each in facts]
        if len({value for value in values if value is not None}) > 1:
            rows.append(Difference(name, ["not known" if value is None else value for value in values]))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value in (None, "") else f"{value:,}" if type(value) is int else str(value)
