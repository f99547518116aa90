"""Logged metrics against steps, as charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coder_plugin.report.charts import Figure, Series, format_number, lines
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


def objective(run: RunFolder) -> list[Figure]:
    """The loss, each term, the gradient norm, the learning rate, what else is logged, and the terms' shares of the gradient."""
    keys = [key for key in metric_names(run.steps) if not key.startswith(("coder/", "share/"))]
    shares = {key.removeprefix("share/").removesuffix("_loss"): key for key in metric_names(run.steps) if "share/" in key}
    return [
        *(_one(run.steps, key, METRICS.get(key, key)) for key in keys),
        *_several(run.steps, "shares of the gradient", shares if len(shares) > 1 else {}),
    ]


def recalls(run: RunFolder) -> list[Figure]:
    """Recall of both directions, before re-ranking too, median ranks, and zero-shot accuracy: what was measured of these."""
    directions = {"i2t": "Image to text", "t2i": "Text to image"}
    figures = []
    for prefix, suffix in (("", ""), ("shortlist/", ", shortlist")):
        figures += [
            _one(run.evaluations, key, f"R@sum{suffix}", high=True)
            for key in metric_names(run.evaluations)
            if key == f"{prefix}rsum"
        ]
        for way, title in directions.items():
            figures += _several(run.evaluations, f"{title}, %{suffix}", {f"R@{k}": f"{prefix}{way}_r{k}" for k in (1, 5, 10)})
    medians = {title.lower(): f"{way}_medr" for way, title in directions.items()}
    accuracies = {"top-1": "top1", "top-5": "top5", "mean per class": "mean_per_class", "top-1 by vectors": "vectors_top1"}
    accuracies = {name: f"zeroshot_{key}" for name, key in accuracies.items()}
    figures += _several(run.evaluations, "Median rank", medians)
    return figures + _several(run.evaluations, "Zero-shot accuracy, %", accuracies)


def health(run: RunFolder) -> list[Figure]:
    """Each metric of the heads' state."""
    figures = []
    for key in metric_names(run.steps):
        if key.startswith("coder/"):
            name = key.removeprefix("coder/")
            figure = _one(run.steps, key, name.replace("/", ": ").replace("_", " "), zero=True)
            figures.append(figure._replace(note=f"{_HEALTH[name]}; {figure.note}") if name in _HEALTH else figure)
    return figures


def active_curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float], int]:
    """Steps and values of a metric, and how many values of a loss's warm-up were left out before them.

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
        return Figure(name, note=f"off in all {off} rows of the log: the term is in its warm-up, and gives no gradient")
    best = max(values) if high else min(values)
    extreme = f"{'highest' if high else 'lowest'} {format_number(best)} at step {steps[values.index(best)]:,}"
    note = f"last {format_number(values[-1])} at step {steps[-1]:,}; {extreme}"
    if off:
        note = f"off before step {steps[0]:,}, in its warm-up; {note}"
    return Figure(name, lines([Series(name, steps, values)], zero=zero), note)


def _several(records: Sequence[Record], name: str, keys: Mapping[str, str]) -> list[Figure]:
    """A chart with a line of each key that is logged; none if no key is."""
    logged = set(metric_names(records))
    series = [Series(each, *curve(records, key)) for each, key in keys.items() if key in logged]
    if not series:
        return []
    last = ", ".join(f"{each.name} {format_number(each.y[-1])}" for each in series)
    return [Figure(name, lines(series, zero=True), f"last: {last}")]
