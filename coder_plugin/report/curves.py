"""Logged metrics against steps, as charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coder_plugin.html import Html
from coder_plugin.report.charts import Series, format_number, lines
from coder_plugin.training.run_folder import Record, RunFolder, curve, metric_names

#: What the heads' metrics mean (see their ``health``).
_HEALTH = {
    "momentum/filled": "share of the bank's entries that are filled",
    "momentum/images": "share of the filled entries that are of different images",
    "momentum/image_spread": "variance of the image keys about their mean: 0 if they have collapsed, at most 1",
    "momentum/text_spread": "variance of the text keys about their mean: 0 if they have collapsed, at most 1",
    "momentum/drift": "distance of the momentum towers from the model, over the model's norm",
    "alignment/divergence": "LCA less the entropy of its targets, nats: 0 if all predictions equal their targets",
    "alignment/entropy": "entropy of LCA's targets, nats: log K if they are uniform and teach nothing",
    "alignment/placed": "share of LCA's prototypes that regions have replaced",
    "concepts/image_spread": "1 - mean cosine between the concept embeddings of a batch's images: 0 if they have collapsed",
    "concepts/text_spread": "1 - mean cosine between the concept embeddings of a batch's texts: 0 if they have collapsed",
    "concepts/image_concepts": "number of concepts that share an image's attention",
    "concepts/text_concepts": "number of concepts that share a text's attention",
    "concepts/score": "mean cosine of a pair's two concept embeddings",
    "prototypes/changed": "share of the pairs whose label the last clustering changed",
    "prototypes/restarted": "clusters that had become empty and started anew so far, divided by the number of clusters",
    "prototypes/used": "perplexity of the centres' sizes over their number: 1 if all are of the same size",
}
#: Names of logged metrics where they are not those of the log.
METRICS = {
    "gradient_norm": "gradient norm",
    "lr": "learning rate",
    "image_rank": "effective rank (images)",
    "text_rank": "effective rank (texts)",
}
_ACCURACIES = {"top-1": "top1", "top-5": "top5", "mean per class": "mean_per_class", "top-1 by vectors": "vectors_top1"}
_DIRECTIONS = {"i2t": "Image to text", "t2i": "Text to image"}


class Figure(NamedTuple):
    """A chart, which may be empty, with its name and a sentence below."""

    name: str
    chart: Html
    note: str


def objective(run: RunFolder) -> list[Figure]:
    """The loss, each term, the terms' shares of the gradient, its norm, the learning rate, and all other logged metrics."""
    keys = [key for key in metric_names(run.steps) if not key.startswith("coder/")]
    shares = [key for key in keys if key.startswith("share/")]
    figures = [_one(run.steps, key, METRICS.get(key, key)) for key in keys if key not in shares]
    if len(shares) > 1:
        series = [Series(key.removeprefix("share/").removesuffix("_loss"), *curve(run.steps, key)) for key in shares]
        last = ", ".join(f"{each.name} {each.y[-1]:.2f}" for each in series)
        chart = lines(series, label=f"Shares of the terms against steps; last: {last}", zero=True)
        place = next((number for number, each in enumerate(figures) if each.name == "gradient norm"), len(figures))
        figures.insert(place, Figure("shares of the gradient", chart, f"last: {last}"))
    return figures


def recalls(run: RunFolder) -> list[Figure]:
    """R@sum, R@1, 5, 10 of both directions and median ranks, those of the shortlists too if a fusion score re-ranks; zero-shot
    accuracy, if it was measured."""
    keys = metric_names(run.evaluations)
    figures = []
    for prefix, suffix in (("", ""), ("shortlist/", ", shortlist")):
        if f"{prefix}rsum" in keys:
            figures.append(_one(run.evaluations, f"{prefix}rsum", f"R@sum{suffix}", high=True))
        for way, title in _DIRECTIONS.items():
            logged = {f"R@{k}": f"{prefix}{way}_r{k}" for k in (1, 5, 10) if f"{prefix}{way}_r{k}" in keys}
            if logged:
                series = [Series(name, *curve(run.evaluations, key)) for name, key in logged.items()]
                figures.append(_several(series, f"{title}, %{suffix}"))
    medians = [
        Series(title.lower(), *curve(run.evaluations, f"{way}_medr"))
        for way, title in _DIRECTIONS.items()
        if f"{way}_medr" in keys
    ]
    if medians:
        figures.append(_several(medians, "Median rank"))
    accuracies = {name: f"zeroshot_{key}" for name, key in _ACCURACIES.items() if f"zeroshot_{key}" in keys}
    if accuracies:
        series = [Series(name, *curve(run.evaluations, key)) for name, key in accuracies.items()]
        figures.append(_several(series, "Zero-shot accuracy, %"))
    return figures


def health(run: RunFolder) -> list[Figure]:
    """Each metric of the heads' state."""
    figures = []
    for key in metric_names(run.steps):
        if key.startswith("coder/"):
            name = key.removeprefix("coder/")
            figure = _one(run.steps, key, name.replace("/", ": ").replace("_", " "), zero=True)
            meaning = _HEALTH.get(name)
            figures.append(figure._replace(note=f"{meaning}; {figure.note}") if meaning else figure)
    return figures


def active_curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float], int]:
    """Steps and values of a metric, and the number of values before them that are left out: those of a loss's warm-up, in which
    a term is off.

    A term that waits for a bank to fill or for a first clustering gives a loss of exactly 0, without a gradient.

    Example:
        >>> active_curve([{"step": 0, "pgc_loss": 0.0}, {"step": 8, "pgc_loss": 2.5}], "pgc_loss")
        ([8], [2.5], 1)
    """
    steps, values = curve(records, key)
    is_loss = key.endswith("_loss") and not key.startswith("share/")
    off = next((number for number, value in enumerate(values) if value), len(values)) if is_loss else 0
    return steps[off:], values[off:], off


def _one(records: Sequence[Record], key: str, name: str, *, high: bool = False, zero: bool = False) -> Figure:
    """One line; below it the last value, and the lowest or, if ``high``, the highest. A term in its warm-up is "off"."""
    steps, values, off = active_curve(records, key)
    if not values:
        return Figure(name, Html(""), f"off in all {off} rows of the log: the term is in its warm-up, and gives no gradient")
    best = max(values) if high else min(values)
    extreme = f"{'highest' if high else 'lowest'} {format_number(best)} at step {steps[values.index(best)]:,}"
    note = f"last {format_number(values[-1])} at step {steps[-1]:,}; {extreme}"
    if off:
        note = f"off before step {steps[0]:,}, in its warm-up; {note}"
    return Figure(name, lines([Series(name, steps, values)], label=f"{name} against steps: {note}", zero=zero), note)


def _several(series: Sequence[Series], name: str) -> Figure:
    last = ", ".join(f"{each.name} {format_number(each.y[-1])}" for each in series)
    return Figure(name, lines(series, label=f"{name} against steps; last: {last}", zero=True), f"last: {last}")
