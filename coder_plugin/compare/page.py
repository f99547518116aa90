"""The page of a comparison: ``comparison.html``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coder_plugin.compare import measure
from coder_plugin.compare.plan import Plan
from coder_plugin.compare.result import BEFORE, HEAD, best_other, difference_of, table_rows
from coder_plugin.config import get_option
from coder_plugin.report.charts import Figure, Series, intervals, lines
from coder_plugin.report.page import Block, Section, attempt, figures, heading, note, table, write_page

#: Queries of each kind that are shown.
_QUERIES = 3


def write_comparison(result: Mapping[str, Any], plan: Plan, folder: Path) -> Path:
    """Write ``comparison.html`` into a comparison's folder, and return its path.

    Raises:
        CoderError: it cannot be written.
    """
    rows = result["rows"]
    sections = [
        Section("result", "Result", attempt(_table, result)),
        Section("differences", "Differences", attempt(_differences, result)),
        Section("curves", "Curves", attempt(_curves, rows)),
        Section("queries", "Where the rows differ", attempt(_queries, result, plan)),
        Section("settings", "Chosen settings", attempt(_settings, rows)),
        Section("commands", "Commands", attempt(_commands, rows)),
    ]
    said = result["sentence"]
    subtitle = f"{said[0].upper()}{said[1:]}. Measured on {result['images']:,} images of {result['data']}."
    title = f"Comparison of {', '.join(rows)}" + (f": {result['setting']}" if result["setting"] else "")
    return write_page(folder / "comparison.html", title, sections, subtitle=subtitle)


def _table(result: Mapping[str, Any]) -> list[Block]:
    rows = result["rows"]
    blocks = [table(HEAD, [(name, cells) for name, *cells in table_rows(result)])]
    recalls = [
        (name, [f"{np.mean(values):.1f}" for values in row["val"].values()][1:]) for name, row in rows.items()
    ]  # fmt: skip
    if result["before"] is not None:
        recalls.append((BEFORE, [f"{value:.1f}" for value in result["before"].values()][1:]))
    blocks.append(table(["row", "i2t R@1", "R@5", "R@10", "t2i R@1", "R@5", "R@10"], recalls, fold="Recalls, in percent"))
    costs = [(name, [f"{row['minutes']:.1f}", _memory(row), _epochs(row)]) for name, row in rows.items()]
    blocks.append(table(["row", "minutes of training", "memory", "best epoch"], costs, fold="Time and memory of a run"))
    if any("zeroshot" in row for row in rows.values()):
        kept = [
            (name, [f"{accuracy:.1f}" for accuracy in np.mean(row["zeroshot"], 0)])
            for name, row in rows.items() if "zeroshot" in row
        ]  # fmt: skip
        blocks.append(table(["row", "zero-shot top-1 before, %", "after, %"], kept))
    about = (
        "R@sum is the sum of the six recalls, with its standard deviation over seeds. Rates, options and epochs were chosen "
        "on images held out of training. The difference is from the best peer, on the validation images, which only the "
        "chosen runs have seen; its interval is for other images and other seeds."
    )
    return [*blocks, note(about), *(note(f"Note: {each}.") for each in result["notes"])]


def _memory(row: Mapping[str, Any]) -> str:
    return "not known" if row["memory_mb"] is None else f"{row['memory_mb'] / 1024:.1f} GB"


def _epochs(row: Mapping[str, Any]) -> str:
    epochs = zip(row["best_epochs"], row["held_aside_by_epoch"], strict=True)
    return ", ".join(f"{best} of {len(scores)}" for best, scores in epochs)


def _differences(result: Mapping[str, Any]) -> list[Block]:
    peer, made = result["best_peer"], []
    for kind, against in (("difference", peer), ("above_before", BEFORE)):
        shown = []
        for name, row in result["rows"].items():
            if (each := difference_of(row, kind)) is not None:
                base = result["rows"][peer]["val"]["rsum"] if kind == "difference" else [result["before"]["rsum"]]
                dots = [value - np.mean(base) for value in row["val"]["rsum"]]
                shown.append((name, dots, (each.low, each.high)))
        if shown:
            text = "Points of R@sum: a dot for each seed, less the other's mean, and the 95 % interval of the mean difference."
            made.append(Figure(f"Above {against}", intervals(shown, line=0.0, x_label="points of R@sum"), text))
    return figures(made) or [note("There is no other row to compare with.")]


def _curves(rows: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    series = []
    for name, row in rows.items():
        curves, times = row["held_aside_by_epoch"], row["seconds"]
        length = min(map(len, curves))
        minutes = np.mean([each[:length] for each in times], 0) / 60
        series.append(Series(name, minutes.tolist(), np.mean([each[:length] for each in curves], 0).tolist()))
    text = "R@sum on the held-out images after each epoch, mean over seeds, against the time of training."
    by_rate = []
    for name, row in rows.items():
        points = sorted((each["values"]["lr"], each["held_aside"]) for each in row["tried"] if "lr" in each["values"])
        best = {rate: max(score for other, score in points if other == rate) for rate, _ in points}
        if len(best) > 1:
            by_rate.append(Series(name, np.log10(list(best)).tolist(), list(best.values())))
    made = []
    if any(len(each.y) > 1 for each in series):
        made.append(Figure("R@sum by time", lines(series, x_label="minutes"), text))
    if by_rate:
        chart = lines(by_rate, x_label="log10 of the learning rate")
        made.append(Figure("R@sum by rate", chart, "The best at each rate, with seed 0, on the held-out images."))
    return figures(made)


def _queries(result: Mapping[str, Any], plan: Plan) -> list[Block]:
    """Queries that the best row and the best peer rank most differently, with what both find."""
    from coder_plugin.data.from_config import pictures_under_regions
    from coder_plugin.evaluation.evaluate import shortlist_length
    from coder_plugin.report import compare as side_by_side
    from coder_plugin.report.sections import Evaluated

    rows, best = result["rows"], best_other(result)
    if best is None:
        return [note("There is no other row to compare with.")]
    opened = []
    for name in (result["best_peer"], best):
        row = next(row for row in plan.rows if row.name == name)
        if row.command is not None:
            return [note("Not shown: a command of one's own writes ranks alone.")]
        folder, options = Path(rows[name]["folder"]), row.points()[0].options
        encoder, source, rerank = measure.open_run(folder, plan.val_data, options)
        measured = json.loads((folder / "val.json").read_text())
        found: dict[str, Any] = {way: torch.tensor(measured[way]) for way in ("i2t_ranks", "t2i_ranks")}
        pictures = pictures_under_regions(measure.data_config(plan.val_data, options), "val")
        found["depth"] = shortlist_length(rerank, encoder)
        opened.append(Evaluated(name, encoder(source), source, pictures, found))
    return [note("With seed 0."), *side_by_side.queries(opened, _QUERIES)]


def _settings(rows: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """What was chosen, as flags to copy."""
    blocks: list[Block] = []
    for name, row in rows.items():
        words = [word for option, value in row["chosen"].items() for word in get_option(option).words(value)]
        blocks += [heading(name), {"code": " ".join(words) or "nothing was to be chosen"}]
    return blocks


def _commands(rows: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    blocks: list[Block] = [note("The run of each row with seed 0, at its chosen settings.")]
    for name, row in rows.items():
        blocks += [heading(name), {"code": row["command"]}]
    return blocks
