"""Banks and centres of a run's newest checkpoint, as numbers and charts."""

from __future__ import annotations

from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.report.charts import format_number, histogram
from coder_plugin.report.curves import Figure
from coder_plugin.report.records import Run
from coder_plugin.report.state import Bank, Centres, read_state


def state_blocks(run: Run) -> list[dict[str, Any]]:
    """Each bank and set of centres: its ``name``, ``tiles`` of a number and what it counts, and ``figures``.

    Raises:
        CoderError: no checkpoint, or the objective keeps no such state.
    """
    if run.checkpoint is None:
        raise CoderError("no whole checkpoint: nothing to read banks and centres from")
    batch = run.pairs_per_step
    if batch is None:
        raise CoderError("neither plan.json nor the checkpoint's options tell how many pairs a step had")
    heads = ((run.manifest or {}).get("objective") or {}).get("heads", {})
    patience = float(next((options["patience"] for options in heads.values() if "patience" in options), 30.0))
    found = read_state(run.checkpoint, pairs_per_step=batch, patience=patience)
    if not found:
        raise CoderError("the objective keeps no banks and no centres")
    return [_bank(each) if isinstance(each, Bank) else _centres(each) for each in found]


def _bank(bank: Bank) -> dict[str, Any]:
    tiles = [
        (f"{bank.filled:,}", f"of {bank.size:,} entries are filled"),
        (f"{bank.images:,}", "different images among them"),
        (f"{int(bank.ages.max()):,}" if bank.filled else "–", f"steps old is the oldest entry ({bank.pairs_per_step} a step)"),
    ]
    figures = []
    if bank.filled:
        note = "keys are of unit length: a norm away from 1 is a fault"
        norms = histogram(bank.norms, label="Norms of the bank's entries", x_label="norm", least=0.02)
        ages = histogram({"entries": bank.ages.tolist()}, label="Ages of the bank's entries", x_label="steps ago", whole=True)
        figures = [
            Figure("Norms of the entries", norms, note),
            Figure("Age of the entries", ages, f"median {int(bank.ages.median()):,} steps"),
        ]
    return {"name": f"{bank.head}: banks", "tiles": tiles, "figures": figures}


def _centres(centres: Centres) -> dict[str, Any]:
    tiles = [
        (f"{centres.filled:,}", f"of {centres.clusters:,} centres are filled"),
        (f"{centres.clusters - centres.filled:,}", "are empty"),
        (f"{centres.idle:,}", f"filled ones that none of the last {centres.window:,} pairs chose"),
        (f"{centres.reseeded:,}", "reseeded so far"),
    ]
    figures = []
    if centres.filled:
        sizes = sorted(centres.sizes)
        middle = sizes[len(sizes) // 2]
        top = sizes[min(len(sizes) - 1, int(0.99 * len(sizes)))]
        chart = histogram({"centres": sizes}, label="Sizes of the clusters", x_label="pairs assigned", top=top, whole=True)
        note = f"median {format_number(middle)}, largest {format_number(sizes[-1])}, of {centres.seen:,} pairs seen"
        if sizes[-1] > top:
            note += f"; the last bar is of {format_number(top)} and more"
        norms = histogram({"centres": centres.norms}, label="Norms of the centres", x_label="norm", least=0.02)
        figures = [
            Figure("Sizes of the clusters", chart, note),
            Figure("Norms of the centres", norms, "centres are of unit length: a norm away from 1 is a fault"),
        ]
    return {"name": f"{centres.head}: centres", "tiles": tiles, "figures": figures}
