#!/usr/bin/env python3
"""Does ``coder-plugin compare`` find a difference that is there, and none where there is none?

    python scripts/planted_comparison.py scores --repetitions 1000
    python scripts/planted_comparison.py trained FOLDER --repetitions 10

`scores` draws the ranks of images for rows with a known difference, and for equal rows, and counts how often the interval
contains the difference, and how often one is claimed. `trained` trains `clip` twice on the built-in scenes, on other images of
them, which must not differ, and once at a rate of nearly zero, which must; each repetition holds other images aside.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def scores(repetitions: int) -> None:
    from coder_plugin.compare.statistics import differences
    from tests.compare.planted import margin, rows

    print("images seeds spread | margin covered claimed-of-equal, in percent")
    settings = ((100, 3, 0.0), (100, 3, 0.1), (300, 3, 0.05), (300, 5, 0.05), (1000, 3, 0.05), (100, 2, 0.05))
    for images, seeds, spread in settings:
        setting = {"images": images, "seeds": seeds, "spread": spread}
        truth, covered, claimed = margin(0.2, spread), 0, 0
        for number in range(repetitions):
            better = differences(*rows(number, gain=0.2, **setting), resamples=400)["rsum"]
            covered += better.low <= truth <= better.high
            claimed += differences(*rows(number, gain=0.0, **setting), resamples=400)["rsum"].is_clear
        shares = (100 * count / repetitions for count in (covered, claimed))
        print(f"{images:6} {seeds:5} {spread:6} | {truth:6.1f} " + " ".join(f"{share:6.1f}" for share in shares), flush=True)


def trained(folder: Path, repetitions: int) -> None:
    """Equal rows train on other images of one kind, in another order: so they differ as two seeds of one loss do."""
    from coder_plugin.cli import main

    claimed = found = 0
    for number in range(repetitions):
        plan = folder / f"{number}.toml"
        plan.parent.mkdir(parents=True, exist_ok=True)
        common = "loss = 'clip'\nepochs = 2\ntrain_num_samples = 1024\nbatch_size = 64\nhold_aside = 100\nworkers = 0"
        rows = [("clip", number, 1e-3), ("same", number + 1000, 1e-3), ("slow", number, 1e-9)]
        tables = [f'[[rows]]\nname = "{name}"\nhold_aside_seed = {seed}\nlr = {rate}' for name, seed, rate in rows]
        plan.write_text(f"seeds = 3\n[train]\n{common}\n" + "\n".join(tables) + "\n")
        output = folder / str(number)
        if main(["compare", str(plan), "--output", str(output)]):
            raise SystemExit(f"{plan} could not be compared")
        result = json.loads((output / "comparison.json").read_text())["rows"]
        intervals = {name: result[name]["difference"]["rsum"] for name in ("same", "slow")}
        claimed += not intervals["same"]["low"] <= 0 <= intervals["same"]["high"]
        found += intervals["slow"]["high"] < 0
        print(f"{number + 1}: claimed between equal rows {claimed}; found where one does not learn {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    each = commands.add_parser("scores", help="rows whose images' scores are drawn")
    each.add_argument("--repetitions", type=int, default=1000, help="comparisons of each kind [1000]")
    each = commands.add_parser("trained", help="rows that are trained on the built-in scenes")
    each.add_argument("folder", type=Path, metavar="FOLDER", help="for the comparisons; a stopped one continues")
    each.add_argument("--repetitions", type=int, default=10, help="comparisons [10]")
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    if options.command == "scores":
        scores(options.repetitions)
    else:
        trained(options.folder, options.repetitions)


if __name__ == "__main__":
    main()
