"""Several runs on one page: one table of recall, length, time, and the options that differ, and curves over each other.

Only the runs' own files are read, no model and no data, unless it is asked for what the models find: the same queries, and maps
of all embeddings, side by side. CODER compares its base and the whole model so, by t-SNE (supplement, figure 3) and by queries
(figure 4), and SelfAlign by queries (figures 6 and 7). What a run lacks is named, and the rest is shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError
from coder_plugin.report import sections
from coder_plugin.report.charts import Figure, Series, lines
from coder_plugin.report.curves import METRICS, active_curve
from coder_plugin.report.examples import WAYS, example_blocks, finder, of_different_images
from coder_plugin.report.facts import STORAGE, describe, text_of
from coder_plugin.report.page import (
    RECALL,
    RECALL_NOTE,
    Block,
    Cell,
    Section,
    attempt,
    figures,
    note,
    recall_cells,
    table,
    write_page,
)
from coder_plugin.report.run import open_run
from coder_plugin.report.sections import Evaluated
from coder_plugin.training.run_folder import RunFolder, metric_names

#: Images of a map, with all their captions: those of CODER's.
_IMAGES = 1000


class Run(NamedTuple):
    """A run of the page: its number from 1 and a name that no other has, and what its folder holds."""

    number: int
    name: str
    folder: RunFolder


def compare_runs(
    folders: Sequence[str | Path],
    *,
    output: str | Path | None = None,
    export: str | None = None,
    images: int | None = None,
    options: Mapping[str, Any] | None = None,
    split: str = "val",
) -> Path:
    """Write a page that compares training runs.

    Args:
        folders: two or more runs' folders. Differences are to the first.
        output: the file to write; None: ``comparison.html`` beside the first run's folder.
        export: whose results are compared, "best" or "last"; None: the best.
        images: open the models too, and show so many queries of each kind with what each run finds, and a map of each run's
            images and captions; None: open none.
        options: of model and data, by flag name, such as ``val_data``; they replace the runs'. split: of the data.

    Returns:
        The file.

    Raises:
        CoderError: fewer than two runs, one named twice, a folder that is no run's, a file that cannot be written, or models
            that cannot be opened or read different data.

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
    read = map(RunFolder.read, folders)
    runs = [Run(number, name, folder) for number, (name, folder) in enumerate(zip(_names(places), read, strict=True), 1)]
    path = Path(output) if output is not None else Path(places[0]).parent / "comparison.html"
    problems = [f"{problem} (run {run.number})" for run in runs for problem in run.folder.problems]
    shown = [
        Section("runs", "Results, and what differs", attempt(_table, runs, export or "best")),
        Section("curves", "Curves", attempt(_curves, runs)),
    ]
    if images is not None:
        named = {f"{run.number} {run.name}": run.folder for run in runs}
        opened = open_runs(named, options or {}, export=export, split=split)
        shown += [
            Section("recall", "Recall, measured again", attempt(recall, opened)),
            Section("examples", "Queries side by side", attempt(queries, opened, images)),
            Section("map", "Images and all captions", attempt(maps, opened)),
        ]
    return write_page(path, f"{len(runs)} training runs compared", shown, problems=problems)


def _names(places: Sequence[str]) -> list[str]:
    """The paths from the folder that holds all of them."""
    above = os.path.commonpath([os.path.dirname(place) for place in places])
    return [os.path.relpath(place, above) for place in places]


def _table(runs: Sequence[Run], export: str) -> list[Block]:
    """A column of each run."""
    results = [run.folder.results(export) for run in runs]
    rows: list[tuple[str, Sequence[Any]]] = [
        ("epoch", [text_of(each.get("epoch")) if each else "no validation" for each in results]),
        ("re-ranked", [text_of(each.get("rerank")) if each.get("shortlist") else "–" for each in results]),
        *(
            (name, compared_cells([each.get(key) for each in results], less=key.endswith("medr")))
            for key, name in RECALL.items()
        ),
    ]
    facts = [describe(run.folder) for run in runs]
    configs = [run.folder.config for run in runs]
    rows += _rows([each or None for each in facts], always=("epochs done", "steps done", "time per epoch"))
    rows += _rows([None if each is None else {key: text_of(value) for key, value in each.items()} for each in configs])
    text = (
        f"Of each run's {export} evaluation. {RECALL_NOTE} ★ marks the best; the second number is the difference to the first "
        "run. Below: the data, versions and options that differ."
    )
    blocks = [note(text), table(["", *(f"{run.number} {run.name}" for run in runs)], rows)]
    if len({_data(run, each) for run, each in zip(runs, results, strict=True) if each}) > 1:
        blocks.insert(0, {"warning": "The runs were validated on different data, so their recall cannot be compared."})
    return blocks


def compared_cells(values: Sequence[float | None], *, less: bool = False) -> list[Cell]:
    """A figure of each run with its difference to the first, the best marked.

    Numbers are compared as they are shown. Where all are equal, or there is but one, none is the best.

    Example:
        >>> first, second = compared_cells([250.0, 251.5])
        >>> first, second
        (Cell(text='250.0', difference='', best=False), Cell(text='251.5', difference='+1.5', best=True))
    """
    shown = [None if value is None else round(float(value), 1) for value in values]
    known = [value for value in shown if value is not None]
    best = (min if less else max)(known) if len(set(known)) > 1 else None
    cells = []
    for number, value in enumerate(shown):
        if value is None:
            cells.append(Cell())
            continue
        first = shown[0] if number else None
        difference = "" if first is None else f"{value - first:+,.1f}".replace("+0.0", "±0").replace("-0.0", "±0")
        cells.append(Cell(f"{value:,.1f}", difference, value == best))
    return cells


def _data(run: Run, results: Mapping[str, Any]) -> tuple[str, ...]:
    """The data of a run's validation."""
    data = (run.folder.plan or {}).get("validation data") or {}
    return tuple(map(str, (data.get("name"), results.get("images"), results.get("texts"))))


def _rows(facts: Sequence[Mapping[str, str] | None], *, always: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """What the runs do not all have the same, and ``always``. A run of which nothing is known does not count."""
    names = dict.fromkeys(name for each in facts for name in each or {} if name not in STORAGE)
    rows = []
    for name in names:
        values = [None if each is None else each.get(name, "–") for each in facts]
        if name in always or len({value for value in values if value is not None}) > 1:
            rows.append((name, ["not known" if value is None else value for value in values]))
    return rows


def _curves(runs: Sequence[Run]) -> list[Block]:
    """R@sum of all evaluations, the losses and what else is logged of the steps, without figures of the heads."""
    made = _overlaid(runs, ["rsum"], evaluations=True)
    keys = dict.fromkeys(
        key for run in runs for key in metric_names(run.folder.steps) if not key.startswith(("coder/", "share/", "epoch/"))
    )
    made += _overlaid(runs, list(keys))
    if not made:
        raise CoderError("no run has a metrics.jsonl with records")
    blocks = [note("The numbers are those of the runs above.")]
    objectives = {str((run.folder.plan or {}).get("objective") or "") for run in runs} - {""}
    if len(objectives) > 1:
        blocks.append(note("The objectives differ: their losses are not comparable, recall is."))
    return [*blocks, *figures(made)]


def _overlaid(runs: Sequence[Run], keys: Sequence[str], *, evaluations: bool = False) -> list[Figure]:
    """A chart of each key with a line of each run; a run has the same colour in all of them."""
    made = []
    for key in keys:
        series = []
        for run in runs:
            steps, values, _ = active_curve(run.folder.evaluations if evaluations else run.folder.steps, key)
            if values:
                series.append(Series(str(run.number), steps, values, colour=run.number - 1))
        if series:
            made.append(Figure("R@sum" if evaluations else METRICS.get(key, key), lines(series)))
    return made


# -- what the models find ------------------------------------------------------------------------------------------------


def open_runs(runs: Mapping[str, RunFolder], options: Mapping[str, Any], *, export: str | None, split: str) -> list[Evaluated]:
    """Encode the data with each run's model, one model at a time.

    Args:
        runs: by their names on the page.
        options: of model and data, by flag name; they replace the runs' own.
        export: "best" or "last"; None: best, or last if there is no best. split: of the data.

    Raises:
        CoderError: a model or its data cannot be opened, or the runs read different images or captions.
    """
    opened: list[Evaluated] = []
    for name, run in runs.items():
        model = open_run(run, options, export=export, split=split)
        sections.measure(model, run)
        opened.append(model._replace(name=name, encoder=None))
        first, last = opened[0].encoded, opened[-1].encoded
        if (first.captions, first.image_of_text.tolist()) != (last.captions, last.image_of_text.tolist()):
            raise CoderError(f"{opened[0].name} and {name} read different data: name one for both with --val-data")
    return opened


def recall(opened: Sequence[Evaluated]) -> list[Block]:
    """Recall of all runs' models on the data that were read for the page."""
    rows = [(each.name, recall_cells(each.result)) for each in opened]
    return [note(f"Measured for this page, on {opened[0].source.name}."), table(["Run", *RECALL.values()], rows)]


def queries(opened: Sequence[Evaluated], count: int) -> list[Block]:
    """The queries whose rank differs most between the first run and the last, with what each run finds.

    Ranks are compared by their ratio: from 4 to 1 is as much as from 400 to 100. Of an image's captions only one is shown.

    Args:
        count: most queries of each kind.
    """
    first, last = opened[0], opened[-1]
    titled: dict[str, list[Any]] = {}
    for way, title in WAYS.items():
        before, after = (each.result[f"{way}_ranks"].double() + 1 for each in (first, last))
        gains = (before / after).log2()
        images = range(len(gains)) if way == "i2t" else first.encoded.image_of_text.tolist()
        find = [finder(each.encoded, way, each.result["depth"]) for each in opened]
        for which, sign in (("better", 1), ("worse", -1)):
            order = (-sign * gains).argsort(stable=True)
            chosen = of_different_images(order[sign * gains[order] > 0].tolist(), images.__getitem__, count)
            titled[f"{title}, {which} in {last.name} than in {first.name}"] = [
                (way, of_run(query), f", {each.name}")
                for query in chosen
                for each, of_run in zip(opened, find, strict=True)
            ]
    shown = example_blocks(first.encoded, first.source, first.pictures, titled)
    if not shown:
        raise CoderError(f"every query has the same rank in {first.name} and in {last.name}")
    return [note("The queries whose rank changes most. A frame and ✓ mark a match; the number is the score."), *shown]


def maps(opened: Sequence[Evaluated]) -> list[Block]:
    """A t-SNE of each run: images spread evenly over the data, and all their captions."""
    made = [sections.map_figure(each.encoded, each.name, images=_IMAGES, all_captions=True) for each in opened]
    return figures(made, wide=True)
