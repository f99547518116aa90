#!/usr/bin/env python3
"""Write the tables and figures of docs/evidence.

    python scripts/experiments/evidence.py                                         # anew, from docs/evidence/*.json
    python scripts/experiments/evidence.py --add frozen comparison/comparison.json  # and take over a comparison as frozen.json

Between `<!-- begin NAME -->` and `<!-- end -->` a page has the table of NAME.json and its figure, evidence-NAME.svg; between
`<!-- pooled ROW: NAMES -->` and `<!-- end -->` the row's mean difference from the best peers of these settings.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.compare.result import HEAD, difference_of, table_rows

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: What a page needs of a row, besides its differences.
KEPT = ("chosen", "describe", "lr", "tried", "seeds", "held_aside", "best_epochs", "val", "minutes", "memory_mb")


def slim(result: Mapping[str, Any]) -> dict[str, Any]:
    """A comparison without curves, commands with paths, and differences of single recalls."""
    rows = {
        name: {key: row[key] for key in KEPT}
        | {kind: {"rsum": row[kind]["rsum"]} for kind in ("difference", "above_before") if kind in row}
        for name, row in result["rows"].items()
    }
    return {**result, "rows": rows}


def block(name: str, result: Mapping[str, Any]) -> str:
    """The table and the figure, as Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *table_rows(result)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    draw(DOCS / "figures" / f"evidence-{name}.svg", result)
    return f"{table}\n\n![Points of R@sum above {result['best_peer']}](../figures/evidence-{name}.svg)"


def pooled(row: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The mean over settings of a row's difference from each best peer.

    The settings report the same images, so their errors are not independent. The half width of the interval is the mean of the
    settings' half widths: right if the errors are equal, and too wide if they are not.
    """
    found = [each for result in results if (each := difference_of(result["rows"][row])) is not None]
    low, mean, high = np.mean([[each.low, each.mean, each.high] for each in found], 0)
    clear = sum(each.is_clear for each in found)
    return (
        f"Over {len(found)} settings `{row}` is {mean:+.1f} [{low:+.1f}, {high:+.1f}] from the best peer; "
        f"in {clear} of them the\ninterval leaves out zero."
    )


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """A dot for each seed, less the best peer's mean, and the interval of the mean difference."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = {name: row for name, row in result["rows"].items() if name != result["best_peer"]}
    figure = Figure(figsize=(7, 0.7 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows.values()):
        if (difference := difference_of(row)) is not None:
            axes.plot([difference.low, difference.high], [place, place], color="C0", linewidth=2)
        base = np.mean(result["rows"][result["best_peer"]]["val"]["rsum"])
        axes.plot(np.array(row["val"]["rsum"]) - base, [place] * len(row["val"]["rsum"]), "o", color="C1", markersize=4)
    axes.axvline(0, color="0.5", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(f"points of R@sum above {result['best_peer']}")
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "evidence"}):  # the same file for the same numbers
        figure.savefig(path, metadata={"Date": None}, transparent=True)


def write(docs: Path | None = None) -> list[str]:
    """Write all blocks of all pages; returns the names that pages show."""
    folder, shown = (docs or DOCS) / "evidence", []
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}

    def fill(found: re.Match[str]) -> str:
        shown.append(found[1])
        return f"<!-- begin {found[1]} -->\n\n{block(found[1], results[found[1]])}\n<!-- end -->"

    def pool(found: re.Match[str]) -> str:
        text = pooled(found[1], [results[name] for name in found[2].split()])
        return f"<!-- pooled {found[1]}: {found[2]} -->\n\n{text}\n<!-- end -->"

    for page in sorted(folder.glob("*.md")):
        text = re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end -->", fill, page.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(r"<!-- pooled (.+?): ([\w -]+) -->.*?<!-- end -->", pool, text, flags=re.S)
        page.write_text(text, encoding="utf-8")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("NAME", "COMPARISON"), help="take over a comparison.json")
    options = parser.parse_args()
    if options.add:
        name, path = options.add
        content = json.dumps(slim(json.loads(Path(path).read_text())), ensure_ascii=False, indent=1)
        (DOCS / "evidence" / f"{name}.json").write_text(content + "\n", encoding="utf-8")
    print("written:", ", ".join(write()))


if __name__ == "__main__":
    main()
