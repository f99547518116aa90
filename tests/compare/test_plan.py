"""What flags and plan files become."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coder_plugin.cli.compare import Command, make_plans
from coder_plugin.compare import plan
from coder_plugin.compare.options import with_options_of_loss
from coder_plugin.compare.plan import Plan, further_rate, middle_first
from coder_plugin.compare.runs import Runs
from coder_plugin.errors import CoderError

PLAN = """
peer = ["clip", "siglip"]
seeds = 2
[train]
lr = [1e-4, 1e-3]
epochs = 4
[[rows]]
loss = "clip"
lr = 1e-3
[[rows]]
loss = "siglip"
[[rows]]
name = "ours"
loss = "3*dcl"
set = [["dcl.mu=0.1", "dcl.gamma=0.3"], ["dcl.mu=0.05", "dcl.gamma=0.5"]]
"""


def plans_of(tmp_path: Path, text: str, *, trust_plan: bool = True, **flags: Any) -> list[Plan]:
    (tmp_path / "plan.toml").write_text(text)
    return make_plans(Command(plan=str(tmp_path / "plan.toml"), trust_plan=trust_plan), flags)


def test_a_row_chooses_among_all_combinations_of_its_values(tmp_path: Path) -> None:
    [plan] = plans_of(tmp_path, PLAN)
    clip, siglip, ours = plan.rows
    assert (plan.seeds, plan.peers) == (2, ("clip", "siglip"))
    assert [len(row.points()) for row in plan.rows] == [1, 2, 4] and clip.options["lr"] == 1e-3
    assert {(point.lr, tuple(point.options["set"])) for point in ours.points()} == {
        (lr, ("dcl.mu=" + mu, "dcl.gamma=" + gamma)) for lr in (1e-4, 1e-3) for mu, gamma in (("0.1", "0.3"), ("0.05", "0.5"))
    }
    assert all(point.options["epochs"] == 4 and point.options["loss"] == "3*dcl" for point in ours.points())
    assert len({point.folder for row in plan.rows for point in row.points()}) == 7
    words = Runs(tmp_path).command(ours.points()[0])
    assert words[:2] == ["coder-plugin", "train"] and "--no-report" in words
    assert words[words.index("--set") + 1 :][:2] == ["dcl.mu=0.1", "dcl.gamma=0.3"]
    assert words[words.index("--lr") + 1] == "0.0001"


def test_flags_win_over_a_plan_and_settings_are_comparisons_of_their_own(tmp_path: Path) -> None:
    text = PLAN + '\n[settings.a]\nbatch_size = 8\n[settings.b]\nbatch_size = 16\nval_data = "scenes"\n'
    plans = plans_of(tmp_path, text, epochs=9)
    assert [plan.name for plan in plans] == ["a", "b"]
    assert [plan.rows[0].options["batch_size"] for plan in plans] == [8, 16]
    assert [plan.val_data for plan in plans] == [None, "scenes"]
    assert {row.options["epochs"] for plan in plans for row in plan.rows} == {9}


def test_a_recipe_is_compared_with_clip() -> None:
    [plan] = make_plans(Command(lr=[1e-5]), {"recipe": "finetune-clip", "train_data": "train.csv"})
    assert [(row.name, row.options.get("loss")) for row in plan.rows] == [("clip", "clip"), ("finetune-clip", None)]
    [plan] = make_plans(Command(loss=["dcl", "clip"]), {})
    assert plan.peers == ("dcl",) and plan.rows[0].options["epochs"] == 2, "of the scenes"
    [plan] = make_plans(Command(), {"loss": "siglip"})  # of --config
    assert [row.name for row in plan.rows] == ["clip", "siglip"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rows]]\nloss = "clip"', "needs two rows or more, and 1 are given"),
        (PLAN + "\nrates = 3", "unknown option rates"),
        ("rates = 3\n" + PLAN, "unknown entry 'rates'; known: rows, train, settings"),
        (PLAN.replace("epochs", "epoch"), "unknown option epoch .did you mean epochs"),
        (PLAN.replace("epochs = 4", "epochs = 0"), "--epochs must be at least 1, got 0"),
        (PLAN.replace("epochs = 4", "seed = 4"), "--seed: coder-plugin compare sets it itself"),
        (PLAN.replace('name = "ours"', 'name = "clip"'), "two rows are called 'clip'"),
        (PLAN.replace('"siglip"]', '"sigmoid"]'), "the peer 'sigmoid' is not a row: clip, siglip, ours"),
        (PLAN.replace("[1e-4, 1e-3]", "[]"), "--lr has no values to choose from"),
        (PLAN.replace('loss = "siglip"', "opt = 'sgd'"), "a row has neither a loss nor a recipe"),
        (PLAN.replace("seeds = 2", "seeds = 'two'"), "seeds is 'two'"),
        ("seeds", "plan.toml"),
        (PLAN.replace("epochs = 4", "command = 'python x.py {loss}'"), "must write its result to {output}"),
        (PLAN.replace("epochs = 4", "command = 'python x.py {loss} {rate} {output}'"), "unknown option rate"),
    ],
)
def test_what_a_plan_may_not_hold(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CoderError, match=message.replace("{", r"\{").replace("[", r"\[")):
        plans_of(tmp_path, text)


TABLES = ["[train]", "[[rows]]\nloss = 'dcl'", "[settings.a]"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("command = 'touch x {output}'", "runs the command 'touch x {output}'"),
        ("train_data = 'pipe:touch x'", "train_data is 'pipe:touch x', which runs a command"),
        ("val_data = ['pipe:touch x']", "val_data is 'pipe:touch x', which runs a command"),
        ("model = 'hf-hub:a/b'", "names the model 'hf-hub:a/b', which would be fetched"),
        ("model_kwargs = ['text=a/b']", "names the model 'a/b', which would be fetched"),
    ],
)
def test_a_plan_that_runs_or_fetches_must_be_trusted(tmp_path: Path, entry: str, message: str) -> None:
    for table in TABLES:
        text = PLAN.replace("[train]", f"[train]\n{entry}") if table == "[train]" else f"{PLAN}\n{table}\n{entry}\n"
        with pytest.raises(CoderError, match=re.escape(message) + ".*if you trust it, give --trust-plan"):
            plans_of(tmp_path, text, trust_plan=False)


def test_a_plans_python_files_and_folders_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="loss is 'evil.py:Loss', which runs a command or a Python file.*--trust-plan"):
        plans_of(tmp_path, PLAN.replace("siglip\"\n", 'evil.py:Loss"\n'), trust_plan=False)
    with pytest.raises(CoderError, match="names a model in the loss 'clip .*, which would be fetched.*--trust-plan"):
        plans_of(tmp_path, PLAN.replace('siglip"\n', 'clip + distill(teacher=\\"hf-hub:a/b\\")"\n'), trust_plan=False)
    with pytest.raises(CoderError, match="val_data is 'pipe:x'.*--trust-plan"):
        plans_of(tmp_path, f"select_data = 'pipe:x'\n{PLAN}", trust_plan=False)
    with pytest.raises(CoderError, match="the setting '../a' names a folder"):
        plans_of(tmp_path, f"{PLAN}\n[settings.'../a']\nepochs = 1\n")
    with pytest.raises(CoderError, match="plan.toml: "):
        plans_of(tmp_path, f"a = {'[' * 9000}")
    assert len(plans_of(tmp_path, PLAN, trust_plan=False)[0].rows) == 3


def test_a_command_gets_the_data_of_the_measurement(tmp_path: Path) -> None:
    text = PLAN.replace("epochs = 4", "val_data = 'my {lr} val.csv'\ncommand = 'x {loss} {val_data} {output}'")
    points = [made.rows[0].points()[0] for more in ("", "select_data = 'a.csv'\n") for made in plans_of(tmp_path, more + text)]
    assert [Runs(tmp_path).command(point)[:3] for point in points] == [["x", "clip", "my {lr} val.csv"]] * 2
    [without] = plans_of(tmp_path, "select_data = 'a.csv'\n" + text.replace("val_data = 'my {lr} val.csv'", ""))
    assert len(Runs(tmp_path).command(without.rows[0].points()[0])) == 3, "the data that choose do not take its place"
    [other] = plans_of(tmp_path, text.replace("my {lr} val", "other"))
    assert other.rows[0].points()[0].folder != points[0].folder


def test_images_that_choose_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    given = Command(plan=str(tmp_path / "plan.toml"), select_data="select.csv")
    [plan] = make_plans(given, {"val_data": "val.csv"})
    assert plan.val_data == "val.csv" and {row.options["val_data"] for row in plan.rows} == {"select.csv"}
    with pytest.raises(CoderError, match="--select-data and --hold-aside both say"):
        make_plans(given, {"hold_aside": 5})


def test_rates() -> None:
    assert further_rate([1e-4], 1e-4) is None and further_rate([1e-5, 1e-4, 1e-3], 1e-4) is None
    assert further_rate([1e-5, 3e-5], 3e-5) == 9e-5 and further_rate([1e-5, 3e-5], 1e-5) == 3.33e-6
    assert set(middle_first([1, 2, 3])[:1]) == {2} and set(middle_first([1, 2, 3, 4])[:2]) == {2, 3}


@pytest.mark.parametrize(("images", "aside"), [(60, 10), (9000, 1000)])
def test_a_sixth_of_the_images_is_held_aside_and_at_most_a_thousand(
    monkeypatch: pytest.MonkeyPatch, images: int, aside: int
) -> None:
    from types import SimpleNamespace

    import coder_plugin.training.prepare  # noqa: F401 - it imports make_source, which must not be the stand-in
    from coder_plugin.compare.options import with_held_aside
    from coder_plugin.data import from_config

    monkeypatch.setattr(from_config, "make_source", lambda *_, **__: SimpleNamespace(num_images=images))
    given = {"train_data": "train.csv", "model": "coder-tiny", "val_data": "val.csv"}
    [plan] = make_plans(Command(), given)
    assert [row.options["hold_aside"] for row in with_held_aside(plan).rows] == [aside] * 2
    [plan] = make_plans(Command(select_data="select.csv"), given)
    assert [row.options.get("hold_aside") for row in with_held_aside(plan).rows] == [None] * 2
    [plan] = make_plans(Command(), {**given, "hold_aside": 7})
    assert [row.options["hold_aside"] for row in with_held_aside(plan).rows] == [7] * 2
    del given["val_data"]
    with pytest.raises(CoderError, match="--val-data: name the images on which the rows are compared"):
        with_held_aside(make_plans(Command(), given)[0])
    monkeypatch.setattr(from_config, "make_source", lambda *_, **__: SimpleNamespace(num_images=None))
    with pytest.raises(CoderError, match="--select-data"):
        with_held_aside(make_plans(Command(), {**given, "val_data": "val.csv"})[0])


def test_an_option_of_a_loss_is_for_the_rows_whose_loss_reads_it() -> None:
    """So ``--concepts`` and ``--set`` may be common where ``clip`` is a row, as it nearly always is."""
    data = {"model": "ViT-B-32", "train_data": "train.csv"}
    common = {**data, "concepts": "c.safetensors", "set": ["dcl.mu=0.05", "concept_dcl.gamma=0.5"]}
    hard = {"hard_negatives": 5, "negatives_file": "n.jsonl"}
    losses = ("clip", "3*dcl", "3*dcl + concept_dcl", "ascl", "siglip")
    rows = [{"loss": loss, **hard, **({"negatives": "mixture"} if loss == "ascl" else {})} for loss in losses]
    (made,) = plan.make_plans(rows, common, seeds=1)
    of = {row.name: row.options for row in with_options_of_loss(made).rows}
    assert of["siglip"] == {"loss": "siglip", **data}
    assert of["clip"] == {"loss": "clip", **data, **hard}
    assert of["3*dcl"] == {"loss": "3*dcl", "set": ["dcl.mu=0.05"], **data, **hard}
    assert of["3*dcl + concept_dcl"] == {"loss": "3*dcl + concept_dcl", **common, **hard}
    assert of["ascl"] == {"loss": "ascl", "negatives": "mixture", **data}
    (made,) = plan.make_plans([{"loss": "clip"}, {"loss": "3*dcl"}], common, seeds=1)
    of = {row.name: row.options for row in with_options_of_loss(made).rows}
    assert of["clip"]["set"] == of["3*dcl"]["set"][1:] == ["concept_dcl.gamma=0.5"], "what nothing reads is refused by training"
    assert of["clip"]["concepts"] == "c.safetensors"
