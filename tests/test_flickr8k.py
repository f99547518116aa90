"""scripts/experiments/flickr8k.py: what it trains, how it chooses, and what its tables say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import build_parser
from coder_plugin.evaluation import recall
from coder_plugin.expression import parse_value
from coder_plugin.objective import Objective
from tests.training import region_data

EXPERIMENTS = Path(__file__).resolve().parents[1] / "scripts" / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def points_of(plan: Any, setting: str) -> list[Any]:
    """All points, where each row's first is the chosen one."""

    def first(row: str) -> Any:
        return plan.grid(setting, row, first)[0]

    return [point for row in plan.rows_of(setting) for point in plan.grid(setting, row, first)]


def cases() -> list[tuple[str, str]]:
    settings = [("cpu", "regions-bigru"), ("gpu", "regions-bigru"), ("cpu", "regions-bert"), ("smoke", "regions-bigru")]
    return [*settings, ("cpu", "clip"), ("gpu", "clip"), ("cpu", "clip-base")]


@pytest.mark.parametrize(("size", "setting"), cases())
def test_every_command_is_one_that_train_takes(size: str, setting: str) -> None:
    from flickr8k import Plan, make_run

    pytest.importorskip("pytorch_metric_learning")
    points = points_of(Plan(size), setting)
    assert len({point.name for point in points}) == len(points) > (0 if setting == "clip-base" else 14)
    for point in points:
        command = make_run(Plan(size), point).command
        flags = vars(build_parser().parse_args(command[1:]))
        if command[1] == "eval":
            assert flags["run_folder"][0].startswith(f"runs/{size}/clip/") and flags["wise_ft_save"][0] == "0.5"
            continue
        assert (flags["seed"], flags["lr"], flags["name"]) == (0, point.lr, point.name)
        options = dict(option.split("=", 1) for option in flags.get("set") or [])
        assert options == {name: str(value) for name, value in point.options}
        Objective.parse(flags["loss"]).with_options({name: parse_value(value) for name, value in options.items()})


def test_every_command_of_the_frozen_towers_is_one_that_their_script_takes() -> None:
    import frozen_towers
    from flickr8k import Plan, make_run

    pytest.importorskip("pytorch_metric_learning")
    plan = Plan("cpu")
    points = points_of(plan, "frozen")
    assert len({point.name for point in points}) == len(points) > 50
    rates: dict[str, set[float]] = {point.row: set() for point in points}
    for point in points:
        python, script, *command = make_run(plan, point).command
        assert (python, script) == ("python", "scripts/experiments/frozen_towers.py")
        options = frozen_towers.build_parser().parse_args(command)
        assert (options.seeds, options.lr, options.hold_out) == ([point.seed], [point.lr], 1000)
        assert options.set == [f"{name}={value}" for name, value in point.options] and len(options.losses) == 1
        assert options.batch_size == (int(point.row[-2:]) if "-batch" in point.row else 128)
        rates[point.row].add(point.lr)
    assert rates["coder-paper"] == {1e-4, 3e-4, 1e-3} and rates["clip"] == {3e-5, 1e-4, 3e-4, 1e-3}
    assert rates["coder"] == {1e-4, 3e-4} and len(rates["mu"]) == 1
    assert (plan.seeds("frozen", "dcl"), plan.seeds("frozen", "dcl-batch32")) == (range(5), range(3))


@pytest.mark.parametrize("setting", ["frozen-ascl", "frozen-selfalign", "frozen-camera"])
def test_every_command_of_cached_words_and_maps_is_one_that_their_script_takes(setting: str) -> None:
    import importlib

    from flickr8k import Plan, make_run

    plan = Plan("cpu")
    points = points_of(plan, setting)
    assert len({point.name for point in points}) == len(points) > 3 and len({point.row for point in points}) > 1
    for point in points:
        _, script, *command = make_run(plan, point).command
        options = importlib.import_module(Path(script).stem).build_parser().parse_args(command)
        assert (options.seeds, options.lr) == ([point.seed], [point.lr])
        given = dict(setting.split("=", 1) for setting in options.set)
        assert given.items() >= {name: str(value) for name, value in point.options}.items()
        Objective.parse(options.losses[0]).with_options(
            {name: parse_value(value) for name, value in given.items() if not name.startswith("fusion.")}
        )
        assert options.epochs in (5, 10)
    compared = {plan.against(setting, row) for row in plan.rows_of(setting)} - {None}
    assert compared and compared <= set(plan.rows_of(setting))


def test_frozen_towers_take_the_settings_of_their_terms_and_heads() -> None:
    import frozen_towers

    pytest.importorskip("pytorch_metric_learning")
    settings = frozen_towers.parse_settings(
        ["dcl.mu=0.2", "pml.NTXentLoss.temperature=0.3", "momentum.momentum=0.9", "m_dcl.mu=0.4"]
    )
    objective = frozen_towers.with_settings(Objective.parse("dcl + pml.NTXentLoss"), settings)
    given = {term.name: dict(term.options) for term in objective.terms}
    assert given == {"dcl": {"mu": 0.2}, "pml.NTXentLoss": {"temperature": 0.3}}
    assert "momentum" not in dict(objective.heads)
    objective = frozen_towers.with_settings(Objective.parse("m_dcl"), settings)
    assert dict(dict(objective.heads)["momentum"])["momentum"] == 0.9 and dict(objective.terms[0].options) == {"mu": 0.4}


def test_a_run_on_frozen_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k
    import frozen_towers
    import torch

    from tests.backbones import tiny_bert

    _, text = tiny_bert.make_clip(tmp_path)
    generator = torch.Generator().manual_seed(0)
    width, channels, cache = 256, json.loads((Path(text) / "config.json").read_text())["hidden_size"], {}
    for split, images in (("train", 60), ("val", 20)):
        features, image_of = torch.randn(images, width, generator=generator), torch.arange(images).repeat_interleave(2)
        ids = torch.randint(5, 20, (2 * images, 6), generator=generator)
        tokens = features[image_of, None, :channels].expand(-1, 6, -1).half().contiguous()
        cache[split] = {"images": features, "ids": ids, "tokens": tokens, "image_of_caption": image_of}
    torch.save(cache, tmp_path / "frozen.pt")
    plan = flickr8k.Plan("cpu", ["frozen"], ["clip"])
    setting = plan.settings["frozen"]
    setting["flags"] = shlex.split("train frozen.pt --model tiny.json --hold-out 20 --epochs 4 --batch-size 20")

    def start(command: list[str], *, cwd: Path, **_: Any) -> Any:
        monkeypatch.chdir(cwd)
        frozen_towers.main(command[2:])
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(flickr8k, "subprocess", SimpleNamespace(Popen=start, STDOUT=None))
    work = flickr8k.Work(tmp_path, flickr8k.Results(tmp_path / "results", plan), torch.get_num_threads())
    point = flickr8k.Point("frozen", "clip", 3e-2, (), 0)
    work.evaluate(point, "val")
    result = work.results.get(point)
    assert len(result["held_out"]) == 4 and len(result["val"]["scores"]) == 20
    assert np.mean(result["val"]["scores"]) == pytest.approx(result["val"]["rsum"], abs=1e-3)
    record = json.loads((tmp_path / f"{flickr8k.make_run(plan, point).folder}.json").read_text())
    assert result["held_out"][-1] > 1.5 * record["results"]["0"]["rsum"]  # it has learned
    # the images reported are others than those held out; where they are the same, their recall is that of the best epoch
    assert record["report"]["rsum"] != record["results"][str(result["best_epoch"])]["rsum"]
    cache["val"] = frozen_towers.hold_out(cache, 20)["val"]
    torch.save(cache, tmp_path / "frozen.pt")
    point = flickr8k.Point("frozen", "clip", 0.3, (), 0)  # too high: the last epoch is not the best
    result = work.train(point)
    assert result["best_epoch"] == result["held_out"].index(max(result["held_out"])) + 1 < 4
    assert result["val"]["rsum"] == pytest.approx(max(result["held_out"]), abs=0.01)


def test_rows_take_the_options_of_the_row_that_they_are_like() -> None:
    from flickr8k import Plan, Point

    dcl = Point("regions-bigru", "dcl", 3e-3, (("dcl.mu", 0.05), ("dcl.gamma", 0.5)), 0)
    for size, rates in (("cpu", [3e-3]), ("gpu", Plan("gpu").settings["regions-bigru"]["lr"])):  # the first saves hours
        points = Plan(size).grid("regions-bigru", "m_dcl", {"dcl": dcl}.__getitem__)
        assert [point.lr for point in points] == rates
        assert dict(points[0].options) == {"dcl.mu": 0.05, "dcl.gamma": 0.5, "m_dcl.mu": 0.05, "m_dcl.gamma": 0.5}
    plan = Plan("gpu", ["regions-bigru"])
    plan.rows["other"] = {"like": "dcl", "same_rate": True, "grid": [{"dcl.mu": 0.1}], "loss": "dcl"}
    [point] = plan.grid("regions-bigru", "other", {"dcl": dcl}.__getitem__)
    assert (point.lr, dict(point.options)) == (3e-3, {"dcl.mu": 0.1, "dcl.gamma": 0.5})
    plan.settings["regions-bigru"]["own"] = {"other": {"grid": [{"dcl.mu": 0.2}]}}
    [point] = plan.grid("regions-bigru", "other", {"dcl": dcl}.__getitem__)
    assert (point.lr, dict(point.options)) == (3e-3, {"dcl.mu": 0.2, "dcl.gamma": 0.5})
    plan.settings["regions-bigru"]["same_rate"] = True
    plan.rows["own"] = {"lr": [7e-3], "like": "dcl", "loss": "dcl"}
    assert [point.lr for point in plan.grid("regions-bigru", "own", {"dcl": dcl}.__getitem__)] == [7e-3]
    plan.rows["own"] = {"lr": [7e-3], "loss": "dcl"}
    assert [point.lr for point in plan.grid("regions-bigru", "own", lambda row: pytest.fail(row))] == [7e-3]


def test_the_recipe_of_the_best_row_has_its_settings() -> None:
    from flickr8k import Plan, Point, make_run

    from coder_plugin import recipes
    from coder_plugin.losses.dcl import DCL

    recipe = recipes.load("dcl-bigru")
    row = Point("regions-bigru", "dcl", 6e-3, (("dcl.mu", 0.1), ("dcl.gamma", 0.3)), 0)
    flags = vars(build_parser().parse_args(make_run(Plan("cpu"), row).command[1:]))
    assert recipe.loss == flags["loss"]
    assert {name: flags[name] for name in recipe.settings} == recipe.settings
    assert row.options == tuple((f"dcl.{name}", DCL().options[name]) for name in ("mu", "gamma"))


def test_a_setting_starts_from_the_model_of_its_base() -> None:
    from flickr8k import Plan, make_run

    plan = Plan("cpu", ["clip"])
    point = plan.grid("clip", "clip", lambda row: pytest.fail(row))[0]
    command, base = make_run(plan, point).command, plan.base("clip")
    assert base is not None and plan.base("clip-base") is None and plan.base("regions-bigru") is None
    assert command[-2:] == ["--pretrained", f"runs/cpu/clip-base/{base.name}/export/best"]
    assert make_run(plan, base).command[-2:] == ["--logs", "runs/cpu/clip-base"] and plan.rows_of("clip-base") == ["base"]
    assert "base" not in plan.rows_of("clip") and "coder-clip" not in plan.rows_of("regions-bigru")
    assert "ascl" in plan.rows_of("regions-bigru") and "ascl-fusion" not in plan.rows_of("regions-bigru")
    assert "ascl-fusion" in Plan("gpu").rows_of("regions-bigru")


def test_the_base_is_trained_first_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k

    plan = flickr8k.Plan("cpu", ["clip"], ["clip", "dcl"])
    work = flickr8k.Work(tmp_path, flickr8k.Results(tmp_path / "results", plan), 1)
    names: list[str] = []

    def train(command: list[str], **_: Any) -> Any:
        """In place of the process: writes what a run leaves, and no result."""
        logs, name = (command[command.index(flag) + 1] for flag in ("--logs", "--name"))
        names.append(name)
        (tmp_path / logs / name / "export" / "best").mkdir(parents=True, exist_ok=True)
        record = {"val/rsum": 1.0, "val/epoch": 1}
        (tmp_path / logs / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(flickr8k, "subprocess", SimpleNamespace(Popen=train, STDOUT=None))
    points = points_of(plan, "clip")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work.train, points))
    base = plan.base("clip")
    assert base is not None and names[0] == base.name and sorted(names[1:]) == sorted(point.name for point in points)
    assert work.results.get(base) is not None
    work.results.file(points[0]).unlink()
    assert work.train(points[0])["held_out"] == [1.0] and len(names) == 1 + len(points)  # known from its folder
    finished = work.run_folder(points[0]) / "result.json"
    finished.write_text(json.dumps({**json.loads(finished.read_text()), "command": "of another loss"}))
    work.results.file(points[0]).unlink()
    work.train(points[0])
    assert names.pop() == points[0].name and len(names) == 1 + len(points)  # trained again
    (work.run_folder(base) / "result.json").unlink()
    work.model(base)  # an export alone may be that of an epoch before a stop
    assert names[-1] == base.name and names.count(base.name) == 2


def test_weights_half_way_from_the_base_need_its_fine_tuned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k

    plan = flickr8k.Plan("cpu", ["clip"], ["clip", "clip-wise-ft"])
    work = flickr8k.Work(tmp_path, flickr8k.Results(tmp_path / "results", plan), 1)
    calls: list[list[str]] = []

    def call(command: list[str], **_: Any) -> Any:
        """In place of the process: writes what training or the evaluation of the interpolated weights leaves."""
        calls.append(command)
        if "train" in command:
            logs, name = (command[command.index(flag) + 1] for flag in ("--logs", "--name"))
            (tmp_path / logs / name).mkdir(parents=True)
            (tmp_path / logs / name / "metrics.jsonl").write_text('{"val/rsum": 3.0, "val/epoch": 1}\n')
        else:
            folder = tmp_path / command[command.index("--wise-ft-save") + 2]
            folder.mkdir()  # which has to be new
            measured = {"before: base": 1.0, "clip, wise-ft 0.5": 4.004, "clip": 3.0}
            (tmp_path / command[command.index("--json") + 1]).write_text(
                json.dumps([{"name": name, "rsum": rsum} for name, rsum in measured.items()])
            )
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(flickr8k, "subprocess", SimpleNamespace(Popen=call, STDOUT=None))
    tried = plan.grid("clip", "clip", lambda row: pytest.fail(row))
    for point in tried:
        work.train(point)
    [point] = plan.grid("clip", "clip-wise-ft", lambda row: work.results.chosen("clip", row))
    tuned = work.results.chosen("clip", "clip")
    assert flickr8k.make_run(plan, point).needs == tuned and point.lr == tuned.lr
    assert flickr8k.make_run(plan, tuned).needs == plan.base("clip")
    work.run_folder(point).mkdir()  # what a stopped evaluation leaves
    result = work.train(point)
    assert result["held_out"] == [4.0] and result["command"].startswith(f"coder-plugin eval runs/cpu/clip/{tuned.name} ")
    assert f"--wise-ft-save 0.5 runs/cpu/clip/{point.name} " in result["command"] and len(calls) == 1 + len(tried) + 1
    other_seed = flickr8k.Point("clip", point.row, point.lr, point.options, 1)
    work.train(other_seed)  # trains what it lies before
    assert len(calls) == len(tried) + 4 and calls[-2][calls[-2].index("--name") + 1] == tuned.name.replace("seed0", "seed1")


def test_an_unknown_row_or_setting_is_named() -> None:
    from flickr8k import Plan

    with pytest.raises(SystemExit, match="no setting bigru of size cpu in flickr8k.toml: one of regions-bigru, "):
        Plan("cpu", ["bigru"])
    with pytest.raises(SystemExit, match="no row clop in flickr8k.toml: one of base, clip, "):
        Plan("cpu", rows=["clop"])
    with pytest.raises(SystemExit, match="no table z in flickr8k.toml"):
        Plan("cpu", tables=["a", "z"])
    assert Plan("cpu", rows=["coder", "dcl", "m_dcl"]).chosen == ["dcl", "m_dcl", "coder"]
    assert Plan("cpu", rows=["coder", "dcl"], tables=["h"]).chosen == ["dcl"]


def test_a_row_whose_options_are_not_chosen_yet_names_the_other(tmp_path: Path) -> None:
    import flickr8k

    chosen = {"work": tmp_path, "size": "cpu", "settings": ["regions-bigru"], "rows": ["coder"], "tables": []}
    with pytest.raises(SystemExit, match="row coder takes over options of another row: .* dcl-.* is not trained yet; "):
        flickr8k.run(SimpleNamespace(**chosen, results=None, threads=1, jobs=1))


def random_scores(seed: int, images: int = 40) -> tuple[list[float], float]:
    """What each image adds to R@sum where similarities are random, and R@sum."""
    import torch
    from flickr8k import image_scores

    similarity = torch.rand(images, 5 * images, generator=torch.Generator().manual_seed(seed))
    owner = torch.arange(images).repeat_interleave(5)
    similarity[owner, torch.arange(5 * images)] += 0.5
    figures = recall(similarity, owner)
    return image_scores(figures["i2t_ranks"].tolist(), figures["t2i_ranks"].tolist()), figures["rsum"]


def test_the_mean_of_the_images_scores_is_their_rsum() -> None:
    scores, rsum = random_scores(0)
    assert np.mean(scores) == pytest.approx(rsum, abs=1e-4)


def test_intervals_of_differences() -> None:
    from flickr8k_page import difference, format_difference

    def runs(*seeds: int, add: float = 0.0) -> list[dict[str, Any]]:
        return [{"seed": seed, "val": {"scores": [each + add for each in random_scores(seed)[0]]}} for seed in seeds]

    same = difference(runs(0, 1, 2, add=7.0), runs(0, 1, 2))  # the same images and seeds are drawn for both
    assert same == pytest.approx({"mean": 7.0, "low": 7.0, "high": 7.0})
    common = difference(runs(0, 1, add=7.0), runs(1, 2, 0))
    assert common == pytest.approx({"mean": 7.0, "low": 7.0, "high": 7.0})
    one = difference(runs(0, add=7.0), runs(0, 1, 2))
    assert one == {"mean": pytest.approx(7.0), "low": None, "high": None}
    assert format_difference({"against": "clip", "above": {"clip": one}}, "clip") == "+7.0 (1 seed)"
    assert format_difference({"against": "dcl", "above": {"dcl": one}}, "clip") == "+7.0 (1 seed) from `dcl`"
    assert format_difference({"against": None, "best_peer": False}, None) == ""
    others = [{**run, "seed": (run["seed"] + 1) % 3} for run in runs(0, 1, 2)]
    above = difference(runs(0, 1, 2, add=7.0), others)
    assert above["mean"] == pytest.approx(7.0) and above["low"] < 7 < above["high"]
    written = format_difference({"against": "clip", "above": {"clip": above}}, "clip")
    assert written == f"+7.0 [{above['low']:+.1f}, {above['high']:+.1f}]"
    # three of four seeds: a mean of -3 has a probability of 1/64, one of -7/3 or less has 4/64
    first, scores = random_scores(0)[0], enumerate((-3.0, -1.0, 1.0, 3.0))
    shifted = [{"seed": seed, "val": {"scores": [each + add for each in first]}} for seed, add in scores]
    seeds_alone = difference(shifted, [{"seed": seed, "val": {"scores": first}} for seed in range(4)])
    assert seeds_alone == pytest.approx({"mean": 0.0, "low": -7 / 3, "high": 7 / 3})


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
    write_page(made.results, page)
    written = page.read_text()
    assert written.startswith("Before.\n<!-- begin a regions-bigru -->\n\n| row |") and "old" not in written
    assert written.endswith(kept)
    lines = [line for line in written.splitlines() if line.startswith("| ")]
    scores = [random_scores(number)[1] for number in (0, 1, 2)]
    assert len(lines) == 4 and f"| {scores[0]:.1f} (1) |" in lines[2] and "| the best peer |" in lines[2]
    assert f"| {np.mean(scores[1:]):.1f} ± {np.std(scores[1:], ddof=1):.1f} (2) |" in lines[3]
    assert f"| {scores[1] - scores[0]:+.1f} (1 seed) |" in lines[3] and "| 3.0 | 1,234 |" in lines[3]
    numbers = json.loads(page.with_suffix(".json").read_text())["settings"]["regions-bigru"]
    assert numbers["dcl"]["seeds"] == [0, 1] and numbers["dcl"]["against"] == "clip" and len(numbers["dcl"]["tried"]) == 2
    assert "--seed 0" in numbers["dcl"]["command"] and numbers["clip"]["val"]["rsum"] == [pytest.approx(scores[0])]
    assert list(numbers["dcl"]["above"]) == ["clip"] and numbers["clip"]["against"] is None
    figure = page.parent / "figures" / "results-a-regions-bigru.svg"
    assert "figures/results-a-regions-bigru.svg" in written and figure.read_bytes().startswith(b"<?xml")
    before = figure.read_bytes(), page.read_text()
    write_page(made.results, page)
    assert (figure.read_bytes(), page.read_text()) == before  # the same file from the same numbers


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
    assert f"| {difference:+.1f} (1 seed) from `clip` |" in dcl and "from" not in clip and "peer" not in page.read_text()


def test_the_classes_that_training_keeps(tmp_path: Path) -> None:
    import timm
    import torch
    from flickr8k_kept import kept_classes
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network, pictures = timm.create_model("test_efficientnet", num_classes=5).eval(), torch.randn(64, 3, 32, 32)
    save_file(network.state_dict(), tmp_path / "pretrained.safetensors")
    wanted = network(pictures).argmax(1)
    trunk = timm.create_model("test_efficientnet", num_classes=0).eval()
    trunk.load_state_dict({name: value for name, value in network.state_dict().items() if not name.startswith("classifier.")})
    assert kept_classes(trunk, lambda: trunk(pictures), tmp_path / "pretrained.safetensors") == 1
    with torch.no_grad():
        for weight in trunk.parameters():
            weight += 0.05 * torch.randn_like(weight)
        changed = {name: value.clone() for name, value in trunk.state_dict().items()}
        now = (trunk(pictures) @ network.classifier.weight.T + network.classifier.bias).argmax(1)
        kept = kept_classes(trunk, lambda: trunk(pictures), tmp_path / "pretrained.safetensors")
    assert kept == (now == wanted).double().mean() and 0.1 < kept < 1
    assert all(torch.equal(value, changed[name]) for name, value in trunk.state_dict().items())


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
    line = "| μ (`dcl.mu`) | 0.02: 3.0 · 0.035: 4.0 · **0.05: 5.0** · 0.1: 4.0 |"
    assert line in page.read_text() and "ε" not in page.read_text()
    assert "figures/page-d-options-regions-bigru.svg" in page.read_text()
    [curve] = json.loads(page.with_suffix(".json").read_text())["sweeps"]["regions-bigru"].values()
    assert [point["value"] for point in curve["points"]] == [0.02, 0.035, 0.05, 0.1]


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


@pytest.mark.slow
def test_the_smallest_size_from_training_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flickr8k

    work, page = tmp_path / "work", tmp_path / "page.md"
    for name in ("regions", "regions-val", "regions-test"):
        region_data.write_precomp(work / name)
    region_data.write_vocabulary(work / "concepts.safetensors")
    page.write_text("<!-- begin a regions-bigru -->\n<!-- end -->\n<!-- begin i regions-bigru -->\n<!-- end -->\n")

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["flickr8k.py", *arguments])
        flickr8k.main()

    rows = ["clip", "dcl", "m_dcl", "coder-paper"]
    call("run", str(work), "--size", "smoke", "--rows", *rows, "--jobs", "2")
    results = sorted(work.glob("results/smoke/regions-bigru/*.json"))
    before = {path: path.stat().st_mtime_ns for path in results}
    call("run", str(work), "--size", "smoke", "--rows", *rows)  # nothing to do
    assert {path: path.stat().st_mtime_ns for path in results} == before and len(results) == 8
    published = flickr8k.Results(work / "results", flickr8k.Plan("smoke"))
    point = published.chosen("regions-bigru", "dcl")
    before_loss = published.get(point)
    published.write(point, {name: value for name, value in before_loss.items() if name != "val"})
    shutil.rmtree(work / "runs")  # a result without its model: it is trained again where it has to be evaluated
    call("run", str(work), "--size", "smoke", "--rows", *rows, "--results", str(work / "results"))
    assert published.get(point) == before_loss and len(list(work.glob("runs/smoke/regions-bigru/*/export"))) == 1
    call("page", str(work / "results"), str(page), "--size", "smoke")
    numbers = json.loads(page.with_suffix(".json").read_text())["settings"]["regions-bigru"]
    assert list(numbers) == rows
    assert all(len(each["val"]["rsum"]) == len(each["test"]["rsum"]) == 2 for each in numbers.values())
    assert page.read_text().count("figures/page-") == 2 and "instance / concept level" in page.read_text()
