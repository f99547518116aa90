"""A run's figures against its steps, as charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coder_plugin.html import Html
from coder_plugin.report.charts import Series, format_number, lines
from coder_plugin.report.records import Record, Run, curve, keys_of

#: What figures of heads say (see their ``health``).
_HEALTH = {
    "momentum/filled": "share of the bank's entries that are filled",
    "momentum/images": "share of the filled entries that are of different images",
    "momentum/image_spread": "variance of the image keys about their mean: 0 where they have collapsed, 1 at most",
    "momentum/text_spread": "variance of the text keys about their mean: 0 where they have collapsed, 1 at most",
    "momentum/drift": "distance of the momentum towers from the model, over the model's norm",
    "prototypes/filled": "share of the centres that are filled; the term is silent below 1",
    "prototypes/idle": "share of the filled centres that none of the last patience · K / 2 pairs chose",
    "prototypes/reseeded": "centres reseeded so far, over all centres",
    "prototypes/used": "perplexity of the centres' sizes over their number: 1 where all are as large",
}
_WAYS = {"i2t": "Image to text", "t2i": "Text to image"}


class Figure(NamedTuple):
    """A chart with its name and a sentence below."""

    name: str
    chart: Html
    note: str


def objective(run: Run) -> list[Figure]:
    """The loss, each term, the terms' shares of the gradient, its norm, the learning rate, and whatever else was logged of
    steps; not the heads' state."""
    keys = [key for key in keys_of(run.train) if not key.startswith("coder/")]
    shares = [key for key in keys if key.startswith("share/")]
    names = {"gradient_norm": "gradient norm", "lr": "learning rate"}
    figures = [_one(run.train, key, names.get(key, key)) for key in keys if key not in shares]
    if len(shares) > 1:
        series = [Series(key.removeprefix("share/").removesuffix("_loss"), *curve(run.train, key)) for key in shares]
        last = ", ".join(f"{each.name} {each.y[-1]:.2f}" for each in series)
        chart = lines(series, label=f"Shares of the terms against steps; last: {last}", zero=True)
        place = next((number for number, each in enumerate(figures) if each.name == "gradient norm"), len(figures))
        figures.insert(place, Figure("shares of the gradient", chart, f"last: {last}"))
    return figures


def recalls(run: Run) -> list[Figure]:
    """R@sum, R@1, 5, 10 of both directions, of the shortlists too where a fusion score re-ranks, and median ranks."""
    keys = keys_of(run.val)
    figures = []
    for prefix, suffix in (("", ""), ("shortlist/", ", shortlist")):
        if f"{prefix}rsum" in keys:
            figures.append(_one(run.val, f"{prefix}rsum", f"R@sum{suffix}", high=True))
        for way, title in _WAYS.items():
            there = {f"R@{k}": f"{prefix}{way}_r{k}" for k in (1, 5, 10) if f"{prefix}{way}_r{k}" in keys}
            if there:
                series = [Series(shown, *curve(run.val, key)) for shown, key in there.items()]
                figures.append(_several(series, f"{title}, %{suffix}", zero=True))
    medians = [Series(title.lower(), *curve(run.val, f"{way}_medr")) for way, title in _WAYS.items() if f"{way}_medr" in keys]
    if medians:
        figures.append(_several(medians, "Median rank", zero=True))
    return figures


def health(run: Run) -> list[Figure]:
    """Each figure of the heads' state."""
    figures = []
    for key in keys_of(run.train):
        if key.startswith("coder/"):
            name = key.removeprefix("coder/")
            said = _HEALTH.get(name)
            figure = _one(run.train, key, name.replace("/", ": ").replace("_", " "), zero=True)
            figures.append(figure._replace(note=f"{said}; {figure.note}") if said else figure)
    return figures


def _one(records: Sequence[Record], key: str, name: str, *, high: bool = False, zero: bool = False) -> Figure:
    """One line; below it the last value, and the lowest or, of what should be ``high``, the highest."""
    steps, values = curve(records, key)
    best = max(values) if high else min(values)
    extreme = f"{'highest' if high else 'lowest'} {format_number(best)} at step {steps[values.index(best)]:,}"
    note = f"last {format_number(values[-1])} at step {steps[-1]:,}; {extreme}"
    return Figure(name, lines([Series(name, steps, values)], label=f"{name} against steps: {note}", zero=zero), note)


def _several(series: Sequence[Series], name: str, *, zero: bool) -> Figure:
    last = ", ".join(f"{each.name} {format_number(each.y[-1])}" for each in series)
    return Figure(name, lines(series, label=f"{name} against steps; last: {last}", zero=zero), f"last: {last}")
