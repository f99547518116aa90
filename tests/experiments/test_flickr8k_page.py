"""What flickr8k.py chooses from its results, and what its tables say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.experiments.plans import EXPERIMENTS, points_of, random_scores


class MadeResults:
    """The results of two rows, without training."""

    def __init__(self, folder: Path) -> None:
        from flickr8k import Plan, Results

        self.plan = Plan("smoke", ["regions-bigru"], ["clip", "dcl"])
        self.plan.rows["dcl"]["grid"] = [{"dcl.mu": 0.1}, {"dcl.mu": 0.05}]
        self.results = Results(folder, self.plan)
        for number, point in enumerate(points_of(self.plan, "regions-bigru")):
            self.finish(point, held_out=[10.0, 20.0 + number, 15.0])

    def finish(self, point: Any, held_out: list[float], seconds: int | None = 9) -> None:
        """Write what training writes."""
        from flickr8k import make_run

        result = {"command": shlex.join(make_run(self.plan, point).command), "seed": point.seed, "lr": point.lr}
        result |= {"seconds": seconds, "options": dict(point.options), "memory_mb": 1234, "last_step": {"loss": 1.0}}
        self.results.write(point, {**result, "held_out": held_out, "best_epoch": 2})

    def evaluate(self, point: Any, seed: int) -> None:
        """Write what evaluating writes."""
        scores, rsum = random_scores(seed)
        figures = {"rsum": rsum, "i2t_r1": 1.0, "t2i_r1": 2.0, "scores": scores}
        self.results.write(point, {**self.results.get(point), "val": figures})


def test_the_mean_of_the_images_scores_is_their_rsum() -> None:
    scores, rsum = random_scores(0)
    assert np.mean(scores) == pytest.approx(rsum, abs=1e-4)


def test_intervals_of_differences() -> None:
    from flickr8k_page import compare, format_difference, format_test

    def runs(*seeds: int, add: float = 0.0) -> list[dict[str, Any]]:
        scores = {seed: [each + add for each in random_scores(seed)[0]] for seed in seeds}
        each = {seed: {"val": {"scores": scores[seed]}, "held_out": [1.0, seed + add / 2]} for seed in seeds}
        return [{"seed": seed, "command": "train", **run} for seed, run in each.items()]

    def difference(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in compare(runs, others).items() if name != "held_out"}

    same = difference(runs(0, 1, 2, add=7.0), runs(0, 1, 2))  # the same images and seeds are drawn for both
    assert same == pytest.approx({"mean": 7.0, "low": 7.0, "high": 7.0})
    common = compare(runs(0, 1, add=7.0), runs(1, 2, 0))
    assert common == pytest.approx({"mean": 7.0, "low": 7.0, "high": 7.0, "held_out": 3.0})  # 2.5 and 3.5: seed 0's best is 1
    one = compare(runs(0, add=7.0), runs(0, 1, 2))
    assert one == {"mean": pytest.approx(7.0), "low": None, "high": None, "held_out": 2.5}
    assert format_difference({"against": "clip", "above": {"clip": one}}, "clip") == "+7.0 (1 seed); held out +2.5"
    assert format_difference({"against": "dcl", "above": {"dcl": one}}, "clip") == "+7.0 (1 seed) from `dcl`; held out +2.5"
    fewer = [{**run, "command": "train --eval-images 250"} for run in runs(0)]
    above = compare(fewer, runs(0, 1))  # recall of other images
    assert above == {"mean": 0.0, "low": None, "high": None, "held_out": None}
    assert format_difference({"against": "clip", "above": {"clip": above}}, "clip") == "+0.0 (1 seed)"
    assert compare(fewer, fewer)["held_out"] == 0
    tested = [[{**run, "test": runs(run["seed"], add=add)[0]["val"]} for run in runs(0, 1)] for add in (2.0, 0.0)]
    above = compare(*tested)
    assert above["mean"] == 0 and above["test"] == pytest.approx({"mean": 2.0, "low": 2.0, "high": 2.0})
    assert "test" not in compare(tested[0], runs(0, 1))
    row = {"test": {"rsum": [100.0, 102.0]}, "against": "clip", "above": {"clip": above}}
    assert format_test(row) == "101.0 ± 1.4 (2), +2.0 [+2.0, +2.0]" and format_test({}) == ""
    assert format_test({**row, "against": None}) == "101.0 ± 1.4 (2)"
    assert format_difference({"against": None, "best_peer": False}, None) == ""
    others = [{**run, "seed": (run["seed"] + 1) % 3} for run in runs(0, 1, 2)]
    above = compare(runs(0, 1, 2, add=7.0), others)
    assert above["mean"] == pytest.approx(7.0) and above["low"] < 7 < above["high"]
    written = format_difference({"against": "clip", "above": {"clip": above}}, "clip")
    assert written == f"+7.0 [{above['low']:+.1f}, {above['high']:+.1f}]; held out +3.2"
    # three of four seeds: a mean of -3 has a probability of 1/64, one of -7/3 or less has 4/64
    first = random_scores(0)[0]
    shifted = [{**run, "val": {"scores": [each + 2 * run["seed"] - 3 for each in first]}} for run in runs(*range(4))]
    seeds_alone = difference(shifted, [{**run, "val": {"scores": first}} for run in runs(*range(4))])
    assert seeds_alone == pytest.approx({"mean": 0.0, "low": -7 / 3, "high": 7 / 3})


def test_the_point_with_the_best_held_out_epoch_is_chosen(tmp_path: Path) -> None:
    made = MadeResults(tmp_path)
    points = [point for point in points_of(made.plan, "regions-bigru") if point.row == "dcl"]
    assert made.results.chosen("regions-bigru", "dcl") == points[-1]
    made.results.write(points[0], {**made.results.get(points[0]), "held_out": [99.0, 1.0]})
    assert made.results.chosen("regions-bigru", "dcl") == points[0]
    made.results.write(points[1], {**made.results.get(points[1]), "command": "of another loss"})
    with pytest.raises(LookupError, match="is not trained yet"):
        made.results.chosen("regions-bigru", "dcl")


def test_a_page_has_the_tables_of_its_markers(tmp_path: Path) -> None:
    from dataclasses import replace

    from flickr8k_page import write_page

    pytest.importorskip("matplotlib")
    made, page = MadeResults(tmp_path / "results"), tmp_path / "docs" / "results.md"
    chosen = {row: made.results.chosen("regions-bigru", row) for row in ("clip", "dcl")}
    for row, number in (("clip", 0), ("dcl", 1)):
        made.evaluate(chosen[row], number)
    made.finish(replace(chosen["dcl"], seed=1), [30.0, 40.0, 35.0], seconds=None)
    made.evaluate(replace(chosen["dcl"], seed=1), 2)
    page.parent.mkdir()
    kept = "Between.\n<!-- begin a regions-bert -->\nkept\n<!-- end -->\n"
    page.write_text(f"Before.\n<!-- begin a regions-bigru -->\nold\n<!-- end -->\n{kept}")
    assert write_page(made.results, page) == ["a regions-bert"]
    written = page.read_text()
    assert written.startswith("Before.\n<!-- begin a regions-bigru -->\n\n| row |") and "old" not in written
    assert written.endswith(kept)
    lines = [line for line in written.splitlines() if line.startswith("| ")]
    scores = [random_scores(number)[1] for number in (0, 1, 2)]
    assert len(lines) == 4 and f"| {scores[0]:.1f} (1) |" in lines[2] and "| the best peer |" in lines[2]
    assert f"| {np.mean(scores[1:]):.1f} ± {np.std(scores[1:], ddof=1):.1f} (2) |" in lines[3]
    assert f"| {scores[1] - scores[0]:+.1f} (1 seed); held out +2.0 |" in lines[3] and "| 3.0 | 1,234 |" in lines[3]
    numbers = json.loads(page.with_suffix(".json").read_text())["settings"]["regions-bigru"]
    assert numbers["dcl"]["seeds"] == [0, 1] and numbers["dcl"]["against"] == "clip" and len(numbers["dcl"]["tried"]) == 2
    assert "--seed 0" in numbers["dcl"]["command"] and numbers["clip"]["val"]["rsum"] == [pytest.approx(scores[0])]
    assert list(numbers["dcl"]["above"]) == ["clip"] and numbers["clip"]["against"] is None
    assert "test" not in lines[0]
    figure = page.parent / "figures" / "results-a-regions-bigru.svg"
    assert "figures/results-a-regions-bigru.svg" in written and figure.read_bytes().startswith(b"<?xml")
    before = figure.read_bytes(), page.read_text()
    write_page(made.results, page)
    assert (figure.read_bytes(), page.read_text()) == before  # the same file from the same numbers
    made.results.file(chosen["dcl"]).write_text(json.dumps({**made.results.get(chosen["dcl"]), "val": None}))
    dcl = {name: value for name, value in made.results.get(chosen["dcl"]).items() if name != "val"}
    made.results.write(chosen["dcl"], dcl)
    write_page(made.results, page)  # the rows have no seed in common
    [row] = [line for line in page.read_text().splitlines() if line.startswith("| DCL")]
    assert f"| {scores[2]:.1f} (1) |" in row and "held out +" not in row
    for each in (chosen["clip"], replace(chosen["dcl"], seed=1)):
        result = made.results.get(each)
        made.results.write(each, {**result, "test": {**result["val"], "rsum": 33.25}, "machine": {"processor": "one"}})
    write_page(made.results, page)
    head, _, *rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert "| test R@sum, difference from the same row |" in head and all("| 33.2 (1) |" in row for row in rows)


def test_a_row_is_compared_with_the_one_that_it_names(tmp_path: Path) -> None:
    from flickr8k_page import write_page

    pytest.importorskip("matplotlib")
    made, page = MadeResults(tmp_path / "results"), tmp_path / "page.md"
    made.plan.rows["dcl"]["against"], made.plan.rows["clip"]["against"] = "clip", "m_dcl"  # the second is not finished
    made.plan.rows["clip"]["peer"] = False
    for number, row in enumerate(("clip", "dcl")):
        made.evaluate(made.results.chosen("regions-bigru", row), number)
    page.write_text("<!-- begin a regions-bigru -->\n<!-- end -->\n")
    write_page(made.results, page)
    clip, dcl = page.read_text().splitlines()[4:6]
    difference = random_scores(1)[1] - random_scores(0)[1]
    assert f"| {difference:+.1f} (1 seed) from `clip`; held out +2.0 |" in dcl and "from" not in clip
    assert "peer" not in page.read_text()


def test_a_sweep_is_a_curve_over_one_option(tmp_path: Path) -> None:
    from flickr8k import Plan, Results, make_run
    from flickr8k_page import write_page

    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text("<!-- begin d regions-bigru -->\n<!-- end -->\n")
    results = Results(tmp_path / "results", Plan("cpu", ["regions-bigru"], ["dcl", "mu", "epsilon"]))
    for point in results.plan.grid("regions-bigru", "dcl", results.chosen):
        command = shlex.join(make_run(results.plan, point).command)
        results.write(point, {"held_out": [1.0 + point.lr], "best_epoch": 1, "last_step": {}, "command": command})
    points = results.plan.grid("regions-bigru", "mu", lambda row: results.chosen("regions-bigru", row))
    assert {point.lr for point in points} == {6e-3} and [dict(point.options)["dcl.gamma"] for point in points] == [0.3] * 5
    for number, point in enumerate(points[:4]):
        result = {"held_out": [1.0, 5.0 - abs(number - 2)], "best_epoch": 2, "last_step": {}}
        words = reversed(make_run(results.plan, point).command)  # in another order
        results.write(point, {**result, "command": shlex.join(words)})
    write_page(results, page)
    assert "validation split" not in page.read_text()
    line = "| μ (`dcl.mu`) | 0.02: 3.0 · 0.035: 4.0 · **0.05: 5.0** · 0.1: 4.0 |"
    assert line in page.read_text() and "ε" not in page.read_text()
    assert "figures/page-d-options-regions-bigru.svg" in page.read_text()
    [curve] = json.loads(page.with_suffix(".json").read_text())["sweeps"]["regions-bigru"].values()
    assert [point["value"] for point in curve["points"]] == [0.02, 0.035, 0.05, 0.1]
    for number, point in enumerate(points[:4]):
        results.write(point, {**results.get(point), "val": {"rsum": 9.0 - number}})
    write_page(results, page)
    assert f"{line} **0.02: 9.0** · 0.035: 8.0 · 0.05: 7.0 · 0.1: 6.0 |" in page.read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/flickr8k.md", "docs/finetune_clip.md"])
def test_every_interval_that_a_page_names_is_one_of_the_results(page: str) -> None:
    root = EXPERIMENTS.parents[1]
    settings = json.loads((root / "docs" / "flickr8k.json").read_text())["settings"]
    known = set()
    for above in (above for rows in settings.values() for row in rows.values() for above in row["above"].values()):
        if above["low"] is not None:
            mean, low, high = above["mean"], above["low"], above["high"]
            known |= {f"{mean:.1f} [{low:.1f}, {high:.1f}]", f"{-mean:.1f} [{-high:.1f}, {-low:.1f}]"}
    number = r"-?\d+(?:\.\d+)?"
    named = re.findall(rf"{number} \[{number}, {number}\]", (root / page).read_text())
    assert named and not set(named) - known
