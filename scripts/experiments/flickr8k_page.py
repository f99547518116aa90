"""Tables, figures and numbers of flickr8k.py's runs."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

#: Resamples of the images for an interval.
RESAMPLES = 10_000
WAYS = {"i2t": "i2t R@1", "t2i": "t2i R@1"}


def write_page(results: Any, page: Path) -> list[str]:
    """Write a page's tables between their markers, ``<!-- begin a regions-bigru -->`` and ``<!-- end -->``, and the figures and
    the numbers beside it.

    Args:
        results: :class:`flickr8k.Results`.
        page: the Markdown file.

    Returns:
        Table and setting of the markers that have no results.
    """
    plan, kept = results.plan, []
    settings = {name: rows for name in plan.chosen_settings if (rows := finished_rows(results, name))}
    numbers = {name: {row: summary(runs) for row, runs in rows.items()} for name, rows in settings.items()}
    sweeps = {name: points for name in plan.chosen_settings if (points := finished_sweeps(results, name))}
    for name, rows in numbers.items():
        peers = [row for row in rows if plan.row(name, row).get("peer")]
        best_peer = max(peers, key=lambda row: rows[row]["held_out"], default=None)
        for row, each in rows.items():
            each["title"] = plan.row(name, row)["title"]
            if "wise_ft" in plan.row(name, row):
                each["seconds_per_epoch"] = None  # it is not trained
            against = plan.against(name, row) or best_peer
            others = {other for other in (*peers, against, *plan.built_on(name, row)) if other != row}
            others = {other for other in others if set(each["seeds"]) & set(rows.get(other, {}).get("seeds", []))}
            each["above"] = {other: compare(settings[name][row], settings[name][other]) for other in rows if other in others}
            each["against"], each["best_peer"] = against if against in others else None, row == best_peer

    def block(match: re.Match[str]) -> str:
        table, setting = match["table"], match["setting"]
        rows, curves = (
            {row: each for row, each in of.get(setting, {}).items() if table in plan.row(setting, row)["tables"]}
            for of in (numbers, sweeps)
        )
        parts = [] if table == "i" or not rows else [format_table(rows)]
        figures = page.parent / "figures"
        figures.mkdir(exist_ok=True)

        def add(kind: str, draw: Any, content: Any) -> None:
            name = f"{page.stem}-{kind}-{setting}.svg"
            draw(figures / name, content)
            parts.append(f"![{plan.settings[setting]['title']}](figures/{name})")

        if rows:
            add(table, draw_curves if table == "i" else draw_bars, rows)
        if curves:
            parts.append(format_sweeps(curves))
            add(f"{table}-options", draw_sweeps, curves)
        if not parts:
            kept.append(f"{table} {setting}")
            return match[0]
        return "\n\n".join([f"{match['begin']}", *parts, "<!-- end -->"])

    pattern = r"(?P<begin><!-- begin (?P<table>\w+) (?P<setting>[\w-]+) -->)\n.*?<!-- end -->"
    page.write_text(re.sub(pattern, block, page.read_text(), flags=re.DOTALL))
    content = {"size": plan.size, "settings": numbers, "sweeps": sweeps}
    page.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    return kept


def finished_rows(results: Any, setting: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of each row's chosen point, as far as they are trained and evaluated."""
    rows = {}
    for row in results.plan.rows_of(setting):
        if results.plan.row(setting, row).get("sweep"):
            continue
        try:
            point = results.chosen(setting, row)
        except LookupError:
            continue
        known = [results.get(replace(point, seed=seed)) for seed in results.plan.seeds(setting, row)]
        if runs := [run for run in known if run is not None and "val" in run]:
            grid = results.plan.grid(setting, row, functools.partial(results.chosen, setting))
            tried = [(each, results.get(each)) for each in grid]
            runs[0]["tried"] = [
                {"lr": each.lr, "options": dict(each.options), "held_out": max(result["held_out"])} for each, result in tried
            ]
            rows[row] = runs
    return rows


def finished_sweeps(results: Any, setting: str) -> dict[str, dict[str, Any]]:
    """The points of each row that is a sweep, by the value of its option, as far as they are trained."""
    sweeps = {}
    for row in results.plan.rows_of(setting):
        content = results.plan.row(setting, row)
        if not content.get("sweep"):
            continue
        try:
            points = results.plan.grid(setting, row, functools.partial(results.chosen, setting))
        except LookupError:
            continue
        [option] = content["grid"][0]
        known = [(dict(point.options)[option], run) for point in points if (run := results.get(point)) is not None]
        if known:
            keys = ("held_out", "best_epoch", "last_step", "command")
            values = [
                {"value": value, **{key: run[key] for key in keys}, **({"val": run["val"]["rsum"]} if "val" in run else {})}
                for value, run in known
            ]
            sweeps[row] = {"title": content["title"], "option": option, "points": values}
    return sweeps


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row's numbers over its seeds."""
    first = runs[0]
    splits = [split for split in ("val", "test") if all(split in run for run in runs)]
    return {
        **{name: first[name] for name in ("command", "lr", "options", "tried")},
        "seeds": [run["seed"] for run in runs],
        "held_out": float(np.mean([max(run["held_out"]) for run in runs])),
        "held_out_by_epoch": [run["held_out"] for run in runs],
        "best_epochs": [run["best_epoch"] for run in runs],
        "seconds_per_epoch": seconds_per_epoch(runs),
        "memory_mb": max(run["memory_mb"] for run in runs),
        "last_step": [run["last_step"] for run in runs],
        **{split: {name: [run[split][name] for run in runs] for name in figures(first[split])} for split in splits},
    }


def figures(split: dict[str, Any]) -> list[str]:
    """Names of the plain numbers of an evaluation."""
    return [name for name, value in split.items() if isinstance(value, (int, float))]


def seconds_per_epoch(runs: list[dict[str, Any]]) -> float | None:
    """Of the runs that were not interrupted, with all that they do besides training, as evaluating the held-out images."""
    timed = [run["seconds"] / len(run["held_out"]) for run in runs if run["seconds"]]
    return round(float(np.median(timed)), 1) if timed else None


def compare(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of R@sum over the seeds that both rows have: ``mean``, ``low`` and ``high`` on the validation split, the mean
    on the held-out images as ``held_out``, None where the rows have different numbers of them, and ``test`` like the first
    three where both have it."""
    best = [{run["seed"]: max(run["held_out"]) for run in each} for each in (runs, others)]
    held_out: float | None = float(np.mean([best[0][seed] - best[1][seed] for seed in best[0].keys() & best[1].keys()]))
    if len({tuple(re.findall(r"--eval-images \d+", each[0]["command"])) for each in (runs, others)}) > 1:
        held_out = None
    test = all("test" in run for each in (runs, others) for run in each)
    return {
        **difference(runs, others, "val"),
        "held_out": held_out,
        **({"test": difference(runs, others, "test")} if test else {}),
    }


def difference(runs: list[dict[str, Any]], others: list[dict[str, Any]], split: str) -> dict[str, float | None]:
    """Mean difference of R@sum over the seeds that both rows have, and its 95 % interval: seeds and images are drawn anew, the
    same ones for both rows. A seed decides the order of the data and, but for the heads, the first weights, for all rows alike.
    One seed fewer is drawn than there are (Rao and Wu 1988): drawing three of three would make the variance of their mean a
    third too small. One seed has no interval.
    """
    by_seed = [{run["seed"]: run[split]["scores"] for run in each} for each in (runs, others)]
    both = sorted(by_seed[0].keys() & by_seed[1].keys())
    scores, other_scores = (np.array([each[seed] for seed in both]) for each in by_seed)
    differences = scores - other_scores
    mean, (count, images) = float(differences.mean()), differences.shape
    if count == 1:
        return {"mean": mean, "low": None, "high": None}
    generator = np.random.default_rng(0)
    drawn = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        seeds, rows = generator.integers(count, size=count - 1), generator.integers(images, size=images)
        drawn[number] = differences[seeds].mean(0)[rows].mean()
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"mean": mean, "low": float(low), "high": float(high)}


def format_table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown; a row for each method."""
    levels = any("concept level" in each["val"] for each in rows.values())
    test = any("test" in each for each in rows.values())
    fused, kept = (any(name in each["val"] for each in rows.values()) for name in ("cosine", "kept"))
    heads = ["row", "rate and options", "held out", "val R@sum", *WAYS.values()]
    heads += [*(["instance / concept level"] if levels else []), *(["by the cosine alone"] if fused else [])]
    heads += ["classes kept, %"] if kept else []
    compared = {each["against"] for each in rows.values()}
    best_peer = next((row for row, each in rows.items() if each["best_peer"] and row in compared), None)
    heads.append("difference [95 %]" if best_peer is None else "above the best peer [95 %]")
    heads += [*(["test R@sum, difference from the same row"] if test else []), "s an epoch", "MB"]
    lines = [heads, ["---"] * len(heads)]
    for each in rows.values():
        val = each["val"]
        options = ", ".join([f"{each['lr']:g}", *(f"{name} {value}" for name, value in each["options"].items())])
        cells = [each["title"], options, f"{each['held_out']:.1f}", spread(val["rsum"])]
        cells += [f"{np.mean(val[f'{way}_r1']):.1f}" for way in WAYS]
        if levels:
            both = [val.get(f"{name} level") for name in ("instance", "concept")]
            cells.append(" / ".join(f"{np.mean(each):.1f}" for each in both) if all(both) else "")
        if fused:
            cells.append(spread(val["cosine"]) if "cosine" in val else "")
        if kept:
            cells.append(spread(val["kept"]) if "kept" in val else "")
        cells.append(format_difference(each, best_peer))
        cells += [format_test(each)] if test else []
        lines.append([*cells, f"{each['seconds_per_epoch'] or '–'}", f"{each['memory_mb']:,}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_difference(row: dict[str, Any], best_peer: str | None) -> str:
    """With its interval, if it has one, and the name of the other row where that is not a table's best peer."""
    if (against := row["against"]) is None:
        return "the best peer" if row["best_peer"] else ""
    above = row["above"][against]
    of = f" from `{against}`" if against != best_peer else ""
    held_out = "" if above["held_out"] is None else f"; held out {above['held_out']:+.1f}"
    return f"{with_interval(above)}{of}{held_out}"


def with_interval(difference: dict[str, Any]) -> str:
    """A mean difference and its interval, or that it has one seed."""
    interval = "(1 seed)" if difference["low"] is None else f"[{difference['low']:+.1f}, {difference['high']:+.1f}]"
    return f"{difference['mean']:+.1f} {interval}"


def format_test(row: dict[str, Any]) -> str:
    """R@sum on the test split, and the difference from the row that this one is compared with."""
    if "test" not in row:
        return ""
    above = row["above"].get(row["against"], {}).get("test")
    return spread(row["test"]["rsum"]) + (f", {with_interval(above)}" if above is not None else "")


def format_sweeps(sweeps: dict[str, dict[str, Any]]) -> str:
    """Markdown; a row for each option, with the best value of each split in bold."""
    both = any("val" in point for each in sweeps.values() for point in each["points"])
    heads = ["option", "values: R@sum on the held-out images, seed 0", *(["on the validation split"] if both else [])]
    lines = [heads, ["---"] * len(heads)]
    for each in sweeps.values():
        points = each["points"]
        cells = [f"{each['title']} (`{each['option']}`)", format_values(points, [max(point["held_out"]) for point in points])]
        cells += [format_values(points, [point["val"] for point in points])] if both else []
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_values(points: list[dict[str, Any]], scores: list[float]) -> str:
    """The points' values with their scores."""
    cells = [f"{point['value']}: {score:.1f}" for point, score in zip(points, scores, strict=True)]
    best = scores.index(max(scores))
    cells[best] = f"**{cells[best]}**"
    return " · ".join(cells)


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation of several."""
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f} ({len(values)})" if len(values) > 1 else " (1)")


def draw_bars(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """R@sum of each row on the validation split: mean, a point for each seed, and a line as long as the interval of the
    difference from the row that it is compared with."""
    plot, figure, axes = canvas(0.6 + 0.32 * len(rows))
    for place, each in enumerate(rows.values()):
        scores = each["val"]["rsum"]
        mean, above = np.mean(scores), each["above"].get(each["against"])
        axes.barh(place, mean, color="C7" if each["best_peer"] else "C0", height=0.7)
        if each["best_peer"]:
            axes.axvline(mean, color="C7", linewidth=1, linestyle="--")
        if above is not None and above["low"] is not None:
            ends = [[above["mean"] - above["low"]], [above["high"] - above["mean"]]]
            axes.errorbar(mean, place, xerr=ends, color="k", linewidth=1, capsize=3)
        axes.plot(scores, [place] * len(scores), "k.", markersize=4)
    axes.set_yticks(range(len(rows)), [textwrap.fill(plain(each["title"]), 42) for each in rows.values()], fontsize=8)
    axes.invert_yaxis()
    least = min(min(each["val"]["rsum"]) for each in rows.values())
    axes.set_xlim(max(0, least - 20), axes.dataLim.x1 + 5)  # the bars begin at 0
    axes.set_xlabel("R@sum, validation split")
    save(plot, figure, path)


def draw_curves(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """R@sum on the held-out images against wall time: mean over seeds, with a band from the least to the greatest."""
    plot, figure, axes = canvas(3.6)
    for each in rows.values():
        if each["seconds_per_epoch"] is None:
            continue
        curves = np.array(each["held_out_by_epoch"])
        minutes = (1 + np.arange(curves.shape[1])) * each["seconds_per_epoch"] / 60
        axes.plot(minutes, curves.mean(0), label=plain(each["title"]))
        axes.fill_between(minutes, curves.min(0), curves.max(0), alpha=0.2)
    axes.set_xlabel("minutes")
    axes.set_ylabel("R@sum, held-out images")
    axes.legend(fontsize=7)
    save(plot, figure, path)


def draw_sweeps(path: Path, sweeps: dict[str, dict[str, Any]]) -> None:
    """R@sum on the held-out images over each option's values, a panel for each."""
    plot, figure, _ = canvas(2.2, columns=len(sweeps))
    for axes, each in zip(figure.axes, sweeps.values(), strict=True):
        values = [point["value"] for point in each["points"]]
        words = isinstance(values[0], str)
        axes.plot(values, [max(point["held_out"]) for point in each["points"]], "o" if words else "o-")
        axes.set_title(plain(each["title"]), fontsize=9)
        axes.tick_params(axis="x", labelsize=7, rotation=30 if words else 0)
        if not words and min(values) > 0:
            axes.set_xscale("log")
    figure.axes[0].set_ylabel("R@sum, held-out images")
    save(plot, figure, path)


def canvas(height: float, columns: int = 1) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flickr8k"  # the same file for the same numbers
    import matplotlib.pyplot as plot

    figure, _ = plot.subplots(1, columns, figsize=(7.5, height), layout="constrained", sharey=True)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return plot, figure, figure.axes[0]


def plain(title: str) -> str:
    """A row's title without Markdown."""
    return title.replace("`", "")


def save(plot: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plot.close(figure)
