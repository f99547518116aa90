"""``coder-plugin compare``: choice, differences, budget, resumption."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coder_plugin.compare.run import Comparison, fit
from tests.compare.conftest import World

Compare = Callable[..., str]
RATES = "--lr 1e-5 1e-4 1e-3 --seeds 3"
PHASES = ("choose", "extend", "repeat", "result")


def result(tmp_path: Path, output: str = "out") -> dict[str, Any]:
    return json.loads((tmp_path / output / "comparison.json").read_text())  # type: ignore[no-any-return]


def seeds_of(world: World, row: str) -> list[int]:
    return [int(re.search(r"seed(\d)", name)[1]) for name in world.trained if name.startswith(row)]  # type: ignore[index]


def test_each_row_is_trained_at_its_rates_and_then_its_best_with_the_other_seeds(
    world: World, command: Compare, tmp_path: Path
) -> None:
    world.best = {"clip": 1e-4, "dcl": 1e-4}
    text = command(RATES)
    assert seeds_of(world, "clip") == seeds_of(world, "dcl") == [0, 0, 0, 1, 2]
    assert [name for name in world.trained if "seed2" in name and "lr0.0001-" not in name] == []
    found = result(tmp_path)
    assert found["rows"]["dcl"]["chosen"] == {"lr": 1e-4} and found["rows"]["dcl"]["best_epochs"] == [2, 2, 2]
    difference = found["rows"]["dcl"]["difference"]["rsum"]
    assert difference["low"] > 0 and difference["seeds"] == 3
    mean, low, high = (difference[name] for name in ("mean", "low", "high"))
    expected = f"use dcl at lr 0.0001: {mean:.1f} [{low:.1f}, {high:.1f}] above clip; seeds 3"
    assert found["sentence"] == expected and expected in text
    lines = [line for line in text.splitlines() if "  " in line]
    assert re.match(r"row +R@sum ± SD +difference \[95 %\] +minutes$", lines[-4])
    assert "the best peer" in lines[-3] and "±" in lines[-3] and lines[-2].startswith("dcl at lr 0.0001")
    assert lines[-1].startswith("before training") and "1.5" in lines[-2]  # 90 seconds


def test_only_the_chosen_runs_see_the_validation_data_and_keep_their_weights(
    world: World, command: Compare, tmp_path: Path
) -> None:
    command(RATES)
    assert len(world.measured) == 6 and all("lr0.0001-" in name for name in world.measured)
    kept = [path.parent.name for path in (tmp_path / "out" / "runs").glob("*/export")]
    assert sorted(kept) == sorted(world.measured)
    assert not list((tmp_path / "out" / "runs").glob("*/checkpoints"))


def test_a_best_rate_at_the_edge_is_followed_one_step(world: World, command: Compare, tmp_path: Path) -> None:
    world.best["dcl"] = 1e-2
    text = command(RATES)
    assert result(tmp_path)["rows"]["dcl"]["chosen"] == {"lr": 1e-2}
    assert "dcl: its best rate 0.01 is at the edge of those tried (1e-05, 0.0001, 0.001, 0.01)" in text
    assert "clip: its best rate" not in text
    world.best["dcl"] = 2e-6
    command("--lr 1e-5 1e-4 --seeds 1", output="low")
    assert result(tmp_path, "low")["rows"]["dcl"]["chosen"] == {"lr": 1e-6}
    options = tmp_path / "plan.toml"  # each rate is tried with two options, and named once
    options.write_text('[[rows]]\nloss = "clip"\n[[rows]]\nloss = "dcl"\nset = [["dcl.mu=0.1"], ["dcl.mu=0.05"]]\n')
    world.best["dcl"] = 1e-2
    text = command("--lr 1e-4 1e-3 --seeds 1", output="options", rows=str(options))
    assert "at the edge of those tried (0.0001, 0.001, 0.01)" in text


def test_equal_rows_give_no_difference_and_the_number_of_images_that_would(
    world: World, command: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coder_plugin.compare import measure

    world.gain["dcl"] = 0.02
    text = command("--lr 1e-4 --seeds 3")
    assert "no difference can be seen with 80 images: dcl is" in text and "neither is" not in text
    assert re.search(r"about [\d,]+ would show 3 points|more seeds than 3", text)
    monkeypatch.setattr(measure, "before", lambda *_: world.ranks(0.0, 5))
    assert "neither is certainly better than before training" in command("--lr 1e-4 --seeds 3", output="again")


def test_samples_that_runs_left_out_are_in_the_result(world: World, command: Compare) -> None:
    assert "skipped" not in command("--lr 1e-4 --seeds 2")
    world.skips = 3
    assert "note: 3 of 1,234 training samples were skipped" in command("--lr 1e-4 --seeds 2", output="again")


def test_a_worse_row_is_not_recommended(world: World, command: Compare) -> None:
    world.gain["dcl"] = -0.6
    text = command("--lr 1e-4 --seeds 3")
    assert re.search(r"use clip at lr 0.0001: \d+\.\d \[\d+\.\d, \d+\.\d\] above dcl; seeds 3", text)


def test_rows_below_the_model_before_training_are_not_recommended(
    world: World, command: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coder_plugin.compare import measure

    monkeypatch.setattr(measure, "before", lambda *_: world.ranks(2.0, 5))
    assert "keep the model as it is: dcl, the best row, is" in command("--lr 1e-4 --seeds 3")


def test_one_seed_is_said(world: World, command: Compare) -> None:
    text = command("--lr 1e-4 --seeds 1")
    assert "nothing can be said with one seed: dcl is" in text and "a longer --budget" in text
    assert "(1 seed)" in text and "note: one seed:" in text


def test_the_peer_is_the_best_of_those_named(world: World, command: Compare, tmp_path: Path) -> None:
    world.gain |= {"siglip": 0.3}
    world.best |= {"siglip": 1e-4}
    world.seconds |= {"siglip": 50.0}
    command("--lr 1e-4 --seeds 2 --peer clip siglip", rows="--loss clip siglip dcl")
    found = result(tmp_path)
    assert found["best_peer"] == "siglip" and found["rows"]["clip"]["difference"]["rsum"]["mean"] < 0
    assert "unknown" not in command("--peer nobody", status=2) and "nobody" in command("--peer nobody", status=2)


# -- stops ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "phase"),
    [
        (0.5, "measure"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip((0.0, 0.1, 0.9, 1.0), PHASES, strict=True)),
    ],
)
def test_a_comparison_stopped_anywhere_ends_with_the_same_result(
    share: float, phase: str, world: World, command: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some processes, and at the beginning of a phase."""
    world.best["dcl"] = 1e-3
    whole = command(RATES, output="whole")
    expected = {name: value for name, value in result(tmp_path, "whole").items() if name != "rows"}
    processes = len(world.trained) + 2
    world.stop_after, world.trained = int(share * (processes - 1)), []
    assert "the same command continues" in command(RATES, output="process", status=130)
    world.stop_after = None
    command(RATES, output="process")
    assert len(world.trained) == len(set(world.trained)) == processes - 2, "no run is made twice"
    assert {name: value for name, value in result(tmp_path, "process").items() if name != "rows"} == expected
    with monkeypatch.context() as patched:
        patched.setattr(Comparison, phase, lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        command(RATES, output=phase, status=130)
    text = command(RATES, output=phase)
    assert text.split("\n\n")[-1].splitlines()[0] == whole.split("\n\n")[-1].splitlines()[0]


def test_another_plan_in_the_folder_uses_the_runs_that_fit(world: World, command: Compare) -> None:
    command("--lr 1e-4 1e-3 --seeds 2")
    world.trained = []
    command("--lr 1e-4 1e-3 --seeds 3")
    assert len(world.trained) == 2 and all("seed2" in name for name in world.trained)
    world.trained = []
    command("--lr 1e-3 --seeds 1")
    assert [name for name in world.trained if "lr0.001-" in name], "its weights were removed, and it is chosen now"
    world.trained = []
    command("--lr 1e-4 1e-3 --seeds 3 --epochs 7")
    assert len(world.trained) >= 6, "other options are other runs"


def test_a_command_of_ones_own_beside_losses(world: World, command: Compare, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("peer = 'clip'\n[[rows]]\nname = 'mine'\ncommand = 'mine {output}'\n" + "".join(
        f"[[rows]]\nloss = '{loss}'\n" for loss in ("clip", "dcl")
    ))  # fmt: skip
    options = "--lr 1e-4 --seeds 2 --trust-plan"
    text = command(options, rows=str(plan))
    assert text.split("use ")[1].startswith("dcl at lr 0.0001: ") and " above clip; seeds 2" in text
    refused = "measured on different images or captions"
    for world.of_another in ("mine", "fewer", "dcl"):  # another caption's image; an image less; other images
        assert refused in command(options, rows=str(plan), output=world.of_another, status=2)


def test_a_run_that_fails_is_named_and_the_others_go_on(world: World, command: Compare) -> None:
    world.gain |= {"siglip": 0.0}
    world.best |= {"siglip": 1e-4}
    world.seconds |= {"siglip": 50.0}
    world.fails = {"siglip"}
    text = command("--lr 1e-4 --seeds 2", rows="--loss clip dcl siglip")
    assert "note: siglip is left out: the run ended with status 2: coder-plugin: error: the loss is not finite" in text
    assert "use dcl at lr 0.0001" in text
    world.fails = {"siglip", "clip", "dcl"}
    assert "no run has ended with a result" in command("--lr 1e-4", output="none", status=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--set dcl.nu=0.1", "nu"),
        ("--loss 'clip + dlc'", "dlc"),
        ("--budget soon", "--budget soon: write a time such as 2h"),
        ("--loss coder --train-data scenes.csv", "scenes.csv"),
        ("--seed 3", "unknown option --seed"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    world: World, command: Compare, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    if "seed" in text:
        with pytest.raises(SystemExit):
            command(text)
        assert re.search(message, capsys.readouterr().err)
    else:
        assert re.search(message, command(text, status=2))
    assert world.trained == []


# -- budget --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "estimate"), [(12, 60.0), (18, 100.0), (18, 150.0)])
def test_a_budget_is_kept(world: World, command: Compare, minutes: int, estimate: float) -> None:
    """Two rows at three rates with three seeds take 10 runs of 100 seconds, whatever a probe has estimated."""
    world.estimate = estimate
    text = command(f"{RATES} --budget {minutes}min")
    assert world.now <= 60 * minutes * 1.1
    assert ("left out to keep within --budget" in text) == (len(world.trained) < 10)
    if minutes == 18 and estimate == 100.0:
        assert len(world.trained) == 10


def test_a_budget_gives_up_seeds_before_rates(world: World, command: Compare) -> None:
    text = command(f"{RATES} --budget 14min")
    assert "seeds: 2 in place of 3" in text and "rates" not in text.partition("note")[0].replace("rates 1", "")
    assert seeds_of(world, "dcl") == [0, 0, 0, 1]
    world.trained = []
    text = command(f"{RATES} --budget 8min", output="less")
    assert "left out to keep within --budget 8:00: seeds: 1 in place of 3; clip: the rates 1e-05; dcl: the rates 1e-05" in text
    assert "note: left out for the budget: clip: the rates 1e-05" in text
    assert seeds_of(world, "dcl") == [0, 0] and not any("lr1e-05" in name for name in world.trained)
    assert "is too little for one run of each row: about 3:23 is needed" in command(
        f"{RATES} --budget 2min", output="least", status=2
    )


def test_jobs_run_at_a_time(world: World, command: Compare) -> None:
    world.best = {"clip": 1e-2, "dcl": 1e-2}  # both grids are extended
    command(RATES, output="one")
    assert seeds_of(world, "clip") == seeds_of(world, "dcl") == [0, 0, 0, 0, 1, 2]
    alone, world.now = world.now, 0.0
    world.jobs.clear()
    command(f"{RATES} --jobs 2", output="two")
    assert world.jobs == {2}, "the timing of steps has as many threads as the runs"
    assert world.now == pytest.approx(alone / 2, rel=0.1)
    # runs of unequal length: no job waits for the slowest run of a rate or a seed, which would take 500 seconds
    world.best, world.seconds, world.now = {"clip": 1e-4, "dcl": 1e-4}, {"clip": 100.0, "dcl": 40.0}, 0.0
    command(f"{RATES} --jobs 2", output="unequal")
    assert world.now < 400


def test_the_estimate_is_said_before_anything_is_trained(world: World, command: Compare) -> None:
    text = command(RATES)
    timing, also, estimate = text.splitlines()[:3]
    assert (timing, also) == tuple(f"timing up to 8 steps of {name}, which may take a minute" for name in ("clip", "dcl"))
    assert estimate.startswith("10 runs of 2 rows, 1 at a time: about 16:40, 35 MB of disk at most")
    assert "steps of a run: clip 90 of 1 s, dcl 90 of 1 s" in estimate
    again = command(f"{RATES} --budget 2h").splitlines()[2]
    assert again.startswith("10 runs of 2 rows, 1 at a time, 6 of them finished: about ")


def test_a_setup_that_trains_badly_is_said_before_and_with_the_result(world: World, command: Compare) -> None:
    world.warnings = {"clip": ["--lr 1e-5 is low: give 5e-4"], "dcl": ["--lr 1e-5 is low: give 5e-4", "few steps: more epochs"]}
    first, again = command(RATES), command(RATES)
    before = first.partition("seed 0")[0]
    assert before.count("warning: ") == 2 and "warning: dcl: few steps: more epochs" in before
    for text in (first, again):  # what two rows share is said once
        assert text.count("note: ") == 2 and text.count("is low: give 5e-4") == 1 + (text == first)


# -- commands ------------------------------------------------------------------------------------------------------------


def test_printed_commands_make_the_runs_that_the_comparison_reads(world: World, command: Compare, tmp_path: Path) -> None:
    """As a scheduler would: commands until there are none, and then the comparison trains nothing."""
    import shlex

    world.best["dcl"] = 1e-3
    rounds = []
    while printed := command(f"{RATES} --print-commands").splitlines():
        rounds.append(len(printed))
        for line in printed:
            words = shlex.split(line)
            assert words[:2] == ["coder-plugin", "train"]
            process = world.start(["python", "-m", "coder_plugin.cli", *words[1:]], tmp_path / "log")
            assert process.wait() == 0
    assert rounds == [6, 1, 4]
    world.trained = []
    command(RATES)
    assert world.trained == []
    assert result(tmp_path)["rows"]["dcl"]["chosen"] == {"lr": 1e-3}


def test_fit_drops_the_outer_rates_last_to_first(world: World) -> None:
    from coder_plugin.compare.plan import make_plans

    [plan] = make_plans([{"loss": "clip"}, {"loss": "dcl"}], {"lr": [1e-5, 1e-4, 1e-3, 1e-2]}, seeds=3)
    seconds = {"clip": 10.0, "dcl": 10.0}
    kept = [fit(plan, seconds, jobs=1, budget=budget) for budget in (120, 100, 80, 60, 40, 20)]
    assert [(each.seeds, len(each.rates["clip"])) for each in kept] == [(3, 4), (2, 4), (1, 4), (1, 3), (1, 2), (1, 1)]
    assert kept[-1].rates["clip"] in ([1e-4], [1e-3])
