"""What flickr8k.py trains: rows, settings, and the commands of their points."""

from __future__ import annotations

from pathlib import Path

import pytest

from coder_plugin.cli import build_parser
from coder_plugin.expression import parse_value
from coder_plugin.noise.generators import parse_noise
from coder_plugin.noise.positives import Positives
from coder_plugin.objective import Objective
from tests.experiments.plans import points_of


def cases() -> list[tuple[str, str]]:
    settings = [("cpu", "regions-bigru"), ("gpu", "regions-bigru"), ("cpu", "regions-bert"), ("smoke", "regions-bigru")]
    clips = [(size, f"clip{name}") for size in ("cpu", "gpu") for name in ("", "-base", "-base-1", "-distill")]
    return [*settings, ("gpu", "regions-bert"), *clips]


def check(loss: str, options: dict[str, str]) -> None:
    """Terms and heads have the options; noise and positives are ones that there are."""
    values = {name: parse_value(value) for name, value in options.items()}
    Objective.parse(loss).with_options(values)
    if values.get("asymmetry.negatives") is not None:
        parse_noise(values["asymmetry.negatives"])
    if values.get("asymmetry.positives") is not None:
        Positives(values["asymmetry.positives"])


@pytest.mark.parametrize(("size", "setting"), cases())
def test_every_command_is_one_that_train_takes(size: str, setting: str) -> None:
    from flickr8k import Plan, make_run

    pytest.importorskip("pytorch_metric_learning")
    points = points_of(Plan(size), setting)
    few = {"clip-base": 1, "clip-base-1": 1, "clip-distill": 3, "regions-vsrn": 2, "regions-bert": 12 if size == "cpu" else 15}
    fewest = few.get(setting, 15)
    assert len({point.name for point in points}) == len(points) >= fewest
    for point in points:
        command = make_run(Plan(size), point).command
        flags = vars(build_parser().parse_args(command[1:]))
        if command[1] == "eval":
            assert flags["run_folder"][0].startswith(f"runs/{size}/clip/") and flags["wise_ft_save"][0] == "0.5"
            continue
        assert point.seed == (1 if setting == "clip-base-1" else 0)
        assert (flags["seed"], flags["lr"], flags["name"]) == (point.seed, point.lr, point.name)
        options = dict(option.split("=", 1) for option in flags.get("set") or [])
        assert options == {name: str(value) for name, value in point.options}
        check(flags["loss"], options)


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
    from flickr8k_prepare import ASCL_TEXTS

    plan = Plan("cpu")
    points = points_of(plan, setting)
    assert len({point.name for point in points}) == len(points) > 3 and len({point.row for point in points}) > 1
    for point in points:
        _, script, *command = make_run(plan, point).command
        options = importlib.import_module(Path(script).stem).build_parser().parse_args(command)
        assert (options.seeds, options.lr) == ([point.seed], [point.lr])
        given = dict(setting.split("=", 1) for setting in options.set)
        assert given.items() >= {name: str(value) for name, value in point.options}.items()
        check(options.losses[0], {name: value for name, value in given.items() if not name.startswith("fusion.")})
        if texts := getattr(options, "texts", None):
            flag, kind = ASCL_TEXTS[texts.removeprefix("words-").removesuffix(".pt")]
            assert given[{"--noise": "asymmetry.negatives", "--positives": "asymmetry.positives"}[flag]] == kind
        assert options.epochs in (5, 10)
    compared = {plan.against(setting, row) for row in plan.rows_of(setting)} - {None}
    assert compared and compared <= set(plan.rows_of(setting))


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
    assert plan.built_on("regions-bigru", "coder") == ["m_dcl", "dcl"] and plan.built_on("regions-bigru", "dcl") == []


def test_the_recipe_of_the_best_row_has_its_settings() -> None:
    from flickr8k import Plan, Point, make_run

    from coder_plugin import recipes
    from coder_plugin.losses.dcl import DCL

    recipe = recipes.load("dcl-bigru")
    row = Point("regions-bigru", "dcl", 6e-3, (("dcl.mu", 0.1), ("dcl.gamma", 0.3)), 0)
    flags = vars(build_parser().parse_args(make_run(Plan("cpu"), row).command[1:]))
    assert recipe.loss == flags["loss"]
    assert {name: flags[name] for name in recipe.settings} == recipe.settings
    assert row.options == tuple((f"dcl.{name}", getattr(DCL(), name)) for name in ("mu", "gamma"))


def test_a_setting_starts_from_the_model_of_its_base() -> None:
    from flickr8k import Plan, Point, make_run

    plan = Plan("cpu", ["clip"])
    point = plan.grid("clip", "clip", lambda row: pytest.fail(row))[0]
    command, base = make_run(plan, point).command, plan.base("clip")
    assert base is not None and plan.base("clip-base") is None and plan.base("regions-bigru") is None
    other = plan.base("clip-distill")
    assert other == Point("clip-base-1", "base", base.lr, (), 1)
    assert make_run(plan, other).command == [
        {base.name: other.name, "runs/cpu/clip-base": "runs/cpu/clip-base-1"}.get(word, word) if word != "0" else "1"
        for word in make_run(plan, base).command
    ]
    assert command[-2:] == ["--pretrained", f"runs/cpu/clip-base/{base.name}/export/best"]
    assert make_run(plan, base).command[-2:] == ["--logs", "runs/cpu/clip-base"] and plan.rows_of("clip-base") == ["base"]
    assert "base" not in plan.rows_of("clip") and "coder-clip" not in plan.rows_of("regions-bigru")
    assert "ascl" in plan.rows_of("regions-bigru") and "ascl-fusion" not in plan.rows_of("regions-bigru")
    assert "ascl-fusion" in Plan("gpu").rows_of("regions-bigru")
