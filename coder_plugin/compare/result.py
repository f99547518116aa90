"""The result of a comparison: figures of each row, differences, the table, and the sentence that says what to use."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coder_plugin.compare.measure import hits
from coder_plugin.compare.plan import Plan
from coder_plugin.compare.statistics import FIGURES, Difference, Hits, differences, spread
from coder_plugin.terminal import plural

BEFORE = "before training"
#: A difference that one would not want to miss, in points of R@sum.
_WORTH = 3.0


def make_result(
    plan: Plan, rows: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any] | None, notes: Sequence[str]
) -> dict[str, Any]:
    """All that the table, the page and ``comparison.json`` show.

    Args:
        plan: what was compared.
        rows: of each row that has a result its choice, runs and measurements.
        before: the measurement of the model before training; None: it was not made.
        notes: what a reader must know besides.
    """
    every = [each for row in rows.values() for each in row["val"]]
    first = next((each for each in every if each["images"]), every[0])  # a command of one's own does not say which images
    measured = {
        name: dict(zip(row["seeds"], (hits(each, first) for each in row["val"]), strict=True)) for name, row in rows.items()
    }
    start = None if before is None else hits(before, first)
    content = {name: _row(row, measured[name]) for name, row in rows.items()}
    peers = [name for name in plan.peers if name in rows]
    best_peer = max(peers, key=lambda name: content[name]["held_aside"], default=None)
    for name, row in content.items():
        row["peer"] = name in peers
        if best_peer is not None and name != best_peer:
            row["difference"] = _differences(measured[name], measured[best_peer])
        if start is not None:
            row["above_before"] = _differences(measured[name], dict.fromkeys(measured[name], start))
    images = len(first["i2t_ranks"])
    own = {bool(row.command) for row in plan.rows}
    if own == {True}:
        data = "the commands' own validation data"
    else:
        data = "validation data that differ between the rows" if True in own else "the validation split of the built-in scenes"
    result: dict[str, Any] = {
        "setting": plan.name,
        "data": plan.val_data or data,
        "images": images,
        "best_peer": best_peer,
        "rows": content,
        "before": None if start is None else dict(zip(FIGURES, _figures(start), strict=True)),
        "notes": [*_notes(content, plan), *notes],
    }
    return {"sentence": sentence(result), **result}


def _row(row: Mapping[str, Any], measured: Mapping[int, Hits]) -> dict[str, Any]:
    runs = row["runs"]
    aside = [max(run["held_aside"]) for run in runs]
    figures = [_figures(each) for each in measured.values()]
    memory = [run["memory_mb"] for run in runs if run.get("memory_mb")]
    zeroshot = [run["zeroshot"] for run in runs if run.get("zeroshot")]
    return {
        **{name: row[name] for name in ("chosen", "describe", "lr", "folder", "tried", "seeds")},
        "command": shlex.join(row["command"]),
        "held_aside": float(np.mean(aside)),
        "held_aside_by_epoch": [run["held_aside"] for run in runs],
        "best_epochs": [run["held_aside"].index(best) + 1 for run, best in zip(runs, aside, strict=True)],
        "val": {name: [float(each[number]) for each in figures] for number, name in enumerate(FIGURES)},
        "seconds": [run["seconds"] for run in runs],
        "minutes": float(np.mean([run["seconds"][-1] for run in runs])) / 60,
        "memory_mb": max(memory) if memory else None,
        **({"zeroshot": zeroshot} if zeroshot else {}),
        **({"skipped": runs[0]["skipped"]} if runs[0].get("skipped") else {}),
    }


def _figures(each: Hits) -> list[float]:
    return [round(float(value), 4) for value in each.recalls(np.ones(len(each.number)))[0]]


def _differences(runs: Mapping[int, Hits], others: Mapping[int, Hits]) -> dict[str, dict[str, float]]:
    if not runs.keys() & others.keys():
        return {}
    return {name: vars(each) for name, each in differences(runs, others).items()}


def _notes(rows: Mapping[str, Mapping[str, Any]], plan: Plan) -> list[str]:
    notes = [f"{row.name}: one rate, which was not chosen" for row in plan.rows if row.name in rows and not row.grid]
    skipped = {tuple(row["skipped"]): name for name, row in rows.items() if row.get("skipped")}
    notes += [
        f"{count:,} of {read:,} training samples were skipped, such as damaged or missing pictures: see the logs of {name}"
        for (count, read), name in skipped.items()
    ]
    if all(len(row["seeds"]) == 1 for row in rows.values()):
        notes.append("one seed: the intervals are for other images alone, and another seed may give other differences")
    return notes


def difference_of(row: Mapping[str, Any], kind: str = "difference") -> Difference | None:
    """A row's difference in R@sum, from the best peer or with ``kind="above_before"`` from before training."""
    return Difference(**row[kind]["rsum"]) if row.get(kind) else None


def best_other(result: Mapping[str, Any]) -> str | None:
    """Of the rows besides the best peer the one that the held-out images prefer; None: there is no other, or no peer."""
    rows, peer = result["rows"], result["best_peer"]
    others = [name for name in rows if name != peer]
    return max(others, key=lambda name: rows[name]["held_aside"]) if peer is not None and others else None


def sentence(result: Mapping[str, Any]) -> str:
    """What to use, in one sentence.

    The row that the held-out images prefer is compared with the best peer on the validation images, and no other row is: so
    one interval decides. Where the best peer is preferred itself, the best of the others is compared with it.
    """
    rows, peer, images = result["rows"], result["best_peer"], result["images"]
    best = best_other(result)
    if best is None:
        return f"only {' and '.join(rows)} could be trained: there is nothing to compare"
    difference = difference_of(rows[best])
    if difference is None:
        return f"{best} and {peer} have no seed in common: there is nothing to compare"
    seeds = difference.seeds
    if seeds == 1:
        return (
            f"nothing can be said with one seed: {best} is {difference} from {peer} over the {images:,} images alone; "
            "use --seeds 3, or a longer --budget if it left seeds out: the same command continues"
        )
    if not difference.is_clear:
        needed = difference.images_needed(images, _WORTH)
        more = (
            f"more seeds than {seeds} are needed to show {_WORTH:g} points"
            if needed is None or needed <= images
            else f"about {needed:,} would show {_WORTH:g} points"
        )
        text = f"no difference can be seen with {plural(images, 'image')}: {best} is {difference} from {peer}; {more}"
        before = [difference_of(rows[name], "above_before") for name in (best, peer)]
        if all(each is not None and not (each.is_clear and each.mean > 0) for each in before):
            text += f"; neither is certainly better than {BEFORE}"
        return text
    winner, loser = (best, peer) if difference.mean > 0 else (peer, best)
    above = difference if difference.mean > 0 else Difference(-difference.mean, -difference.high, -difference.low, seeds)
    text = f"use {winner}{_with(rows[winner])}: {above} above {loser}; seeds {seeds}"
    start = difference_of(rows[winner], "above_before")
    if start is not None and start.is_clear and start.mean < 0:
        text = f"keep the model as it is: {winner}, the best row, is {-start.mean:.1f} below {BEFORE}; lower rates may help"
    return text


def _with(row: Mapping[str, Any]) -> str:
    words = row["describe"] or (f"lr {row['lr']:g}" if row["lr"] else "")
    return f" at {words}" if words else ""


def table_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The table: row, R@sum with its standard deviation over seeds, difference with its interval, minutes."""
    lines = []
    seeds = max(len(row["seeds"]) for row in result["rows"].values())
    for name, row in result["rows"].items():
        mean, deviation = spread(row["val"]["rsum"])
        difference = difference_of(row)
        text = "the best peer" if name == result["best_peer"] else "–" if difference is None else f"{difference.mean:+.1f}"
        if difference is not None:
            text += f" [{difference.low:+.1f}, {difference.high:+.1f}]"
            text += f" ({plural(difference.seeds, 'seed')})" if difference.seeds == 1 or difference.seeds < seeds else ""
        scores = f"{mean:.1f}" + ("" if math.isnan(deviation) else f" ± {deviation:.1f}")
        lines.append((f"{name}{_with(row)}", scores, text, f"{row['minutes']:.1f}"))
    if result["before"] is not None:
        lines.append((BEFORE, f"{result['before']['rsum']:.1f}", _from_peer(result), "–"))
    return lines


def _from_peer(result: Mapping[str, Any]) -> str:
    above = difference_of(result["rows"][result["best_peer"]], "above_before") if result["best_peer"] else None
    return "–" if above is None else f"{-above.mean:+.1f} [{-above.high:+.1f}, {-above.low:+.1f}]"


HEAD = ("row", "R@sum ± SD", "difference [95 %]", "minutes")


def format_result(result: Mapping[str, Any]) -> str:
    """The table, the notes and the sentence, for a terminal."""
    lines = [HEAD, *table_rows(result)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = []
    for name, *cells in lines:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text.append("  ".join([name.ljust(widths[0]), *numbers]))
    setting = [f"{result['setting']}:"] if result["setting"] else []
    notes = [f"note: {note}" for note in result["notes"]]
    return "\n".join(["", *setting, *text, *notes, "", result["sentence"]])
