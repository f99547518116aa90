"""Runs, exports and indexes on disk: sound ones give no finding, and each kind of damage its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin.cli import main
from coder_plugin.doctor import run
from coder_plugin.doctor.findings import Finding, guarded
from coder_plugin.errors import CoderError
from tests.doctor import made
from tests.doctor.made import amiss


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """A short run with banks and prototypes."""
    folder = tmp_path_factory.mktemp("logs")
    flags = "--epochs 2 --batch-size 4 --workers 0 --log-every-n-steps 1 --name run"
    sizes = ["--set", "momentum.bank_size=16", "prototypes.clusters=4"]
    options = {
        "--train-data": made.write_split(folder, "train", 0),
        "--val-data": made.write_split(folder, "val", 500),
        "--model": tiny_model,
        "--loss": "dcl + m_dcl + concept_dcl + pgc",
        "--concepts": made.write_vocabulary(folder / "concepts.safetensors", ["dog", "cat", "tree"]),
        "--logs": str(folder),
    }
    assert main(["train", *flags.split(), *sizes, *(each for pair in options.items() for each in pair)]) == 0
    return folder / "run"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def examine(folder: Path) -> list[Finding]:
    return [found for check in run.checks_for(folder) for found in guarded("run", check, folder)]


def test_a_sound_run(trained: Path) -> None:
    found = examine(trained)
    assert amiss(found) == {}
    told = [each.name for each in found]
    assert told.count("run.export") == 2 and "run.checkpoints" in told
    assert [each.name for each in examine(trained / "export" / "best")] == ["run.export"]
    assert [each.level for each in examine(trained / "export" / "best")] == ["ok"]


def test_a_damaged_checkpoint(copy: Path) -> None:
    (checkpoint,) = (path for path in (copy / "checkpoints").iterdir() if path.name.endswith("6"))
    with (checkpoint / "state.pt").open("r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    (copy / "checkpoints" / ".step_00000009.writing").mkdir()
    found = amiss(guarded("run", run.check_checkpoints, copy))
    assert found.keys() == {"run.checkpoints.damaged", "run.checkpoints.unfinished"}
    assert "state.pt is damaged" in found["run.checkpoints.damaged"].text
    assert "--resume latest uses the newest whole checkpoint" in found["run.checkpoints.damaged"].do
    for path in (copy / "checkpoints").glob("[!.]*"):
        if path != checkpoint:
            shutil.rmtree(path)
    do = amiss(guarded("run", run.check_checkpoints, copy))["run.checkpoints.damaged"].do
    assert "no checkpoint here is whole" in do and "another --name" in do and "delete" not in do
    shutil.rmtree(copy / "checkpoints")
    assert amiss(guarded("run", run.check_checkpoints, copy)).keys() == {"run.checkpoints"}


def test_damaged_exports(copy: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from coder_plugin.pretrained.export_manifest import seal_again

    weights = copy / "export" / "best" / "open_clip_model.safetensors"
    state = load_file(weights)
    name = next(iter(state))
    state[name].view(-1)[0] = torch.nan
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    save_file(state, weights, metadata=metadata)
    seal_again(weights.parent)
    heads = copy / "export" / "last" / "coder.safetensors"
    heads.write_bytes(heads.read_bytes()[:100])
    found = amiss(guarded("run", run.check_exports, copy))
    assert found.keys() == {"run.export.finite", "run.export"}
    assert name in found["run.export.finite"].text and "coder.safetensors" in found["run.export"].text
    shutil.rmtree(copy / "export")
    assert amiss(guarded("run", run.check_exports, copy)).keys() == {"run.exports"}


def test_an_export_that_asks_a_hub(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def ask(*arguments: Any, **options: Any) -> Any:
        try:
            raise LocalEntryNotFoundError("offline")
        except LocalEntryNotFoundError as error:
            raise CoderError("cannot be made") from error

    monkeypatch.setattr("coder_plugin.pretrained.open.open_pretrained", ask)
    found = amiss(guarded("run", run.check_exports, copy))
    assert found.keys() == {"run.export.absent"} and found["run.export.absent"].level == "note"


def test_a_finished_run_without_validation(copy: Path) -> None:
    """Rows of training tell the epoch that they are in; the checkpoints, how many are done."""
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if "val/epoch" not in row]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert amiss(guarded("run", run.check_log, copy)).keys() == {"run.recall"}
    for path in (copy / "checkpoints").glob("*/manifest.json"):
        path.write_text(json.dumps({"epoch": 1}) if path.parent.name.endswith("3") else "damaged")
    found = amiss(guarded("run", run.check_log, copy))
    assert found.keys() == {"run.recall", "run.unfinished"} and "1 of 2 epochs" in found["run.unfinished"].text


def log(folder: Path, rows: list[dict[str, Any]], epochs: int = 3) -> dict[str, Finding]:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"epochs": epochs}))
    return amiss(guarded("run", run.check_log, folder))


def steps(count: int = 30, **last: float) -> list[dict[str, Any]]:
    rows = [
        {"step": step, "epoch": 0, "loss": 2.0 - step / 100, "coder/momentum/image_spread": 0.7}
        for step in range(count)
    ]
    return [*rows[:-1], {**rows[-1], **{name.replace("__", "/"): value for name, value in last.items()}}]


def recall(*sums: float, images: int = 1000) -> list[dict[str, Any]]:
    return [
        {"step": 30 + epoch, "val/rsum": value, "val/images": images, "val/epoch": epoch}
        for epoch, value in enumerate(sums, 1)
    ]


@pytest.mark.parametrize(
    ("last", "name"),
    [
        ({"coder__momentum__image_spread": 0.01}, "run.health.collapse"),
        ({"coder__momentum__text_spread": 0.01}, "run.health.collapse"),
        ({"coder__momentum__drift": 0.8}, "run.health.drift"),
        ({"coder__momentum__images": 0.3}, "run.health.bank"),
        ({"coder__concepts__text_spread": 0.01}, "run.health.collapse"),
        ({"coder__prototypes__used": 0.05}, "run.health.crowded"),
    ],
)
def test_alarming_figures(tmp_path: Path, last: dict[str, float], name: str) -> None:
    assert list(log(tmp_path / "run", [*steps(**last), *recall(1, 2, 300)])) == [name]
    assert log(tmp_path / "run", [*steps(**last)[-5:], *recall(1, 2, 300)]) == {}, "a run that has only begun"
    sound = 0.6 if name == "run.health.bank" else 0.4
    earlier = [{**steps(**last)[-1], "step": 0}, *steps(**dict.fromkeys(last, sound))[1:]]
    assert log(tmp_path / "run", [*earlier, *recall(1, 2, 300)]) == {}, "the latest figures count"


def test_losses_and_recalls(tmp_path: Path) -> None:
    good = recall(1, 2, 300)
    lost = [{key: value for key, value in row.items() if key != "loss" or row["step"] != 7} for row in steps()]
    found = log(tmp_path / "run", [*lost, *good])
    assert list(found) == ["run.loss.finite"] and "first at 7" in found["run.loss.finite"].text
    rising = [{**row, "loss": 4.0 - row["loss"]} for row in steps()]
    assert list(log(tmp_path / "run", [*rising, *good])) == ["run.loss.flat"]
    begun = [
        {**row, "pgc_loss": 0.0 if n < 15 else 9.0, "loss": row["loss"] + (n >= 15) * 9}
        for n, row in enumerate(steps())
    ]
    assert log(tmp_path / "run", [*begun, *good]) == {}, "a term that begins late raises the sum"
    assert list(log(tmp_path / "run", [*steps(), *recall(1, 2, 4)])) == ["run.recall.chance"]
    assert list(log(tmp_path / "run", [*steps(), *recall(100, 300, 200)])) == ["run.recall.fallen"]
    assert list(log(tmp_path / "run", [*steps(), *recall(100, 200)])) == ["run.unfinished"]
    assert log(tmp_path / "run", [*steps(), {"step": 31, "val/images": 9, "val/epoch": 3}]).keys() == {"run.recall.finite"}
    assert log(tmp_path / "run", steps()).keys() == {"run.recall", "run.unfinished"}
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')
    assert "run.log.broken" in amiss(guarded("run", run.check_log, tmp_path / "run"))
    (tmp_path / "run" / "config.json").write_text("{")
    assert "run.config" in amiss(guarded("run", run.check_log, tmp_path / "run"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert list(amiss(guarded("run", run.check_log, tmp_path / "run"))) == ["run.log"]


def test_what_is_none_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="neither a run's folder nor an export's"):
        run.checks_for(tmp_path)


def test_the_command(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coder_plugin.doctor.installation.check_plugins", lambda: iter(()))
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "installation\n  ok       Python" in out and "\nmachine\n" in out and "\ntrain\n" not in out
    train = made.write_split(copy, "train", 0, x=made.sample(7000, jpg=b"x"))
    data = ["--train-data", train, "--batch-size", "4", "--max-bad-samples", "0"]
    before = sorted(path for path in tmp_path.rglob("*"))
    assert main(["doctor", *data]) == 1
    told = capsys.readouterr().out
    assert "problem  1 of 13 (7.7 %) pictures cannot be read: 'image 7000'" in told and "12 of 13 pictures decoded" in told
    assert sorted(path for path in tmp_path.rglob("*")) == before, "nothing is written"
    data[-1] = "0.5"
    assert main(["doctor", *data]) == 0 and main(["doctor", *data, "--strict"]) == 1
    capsys.readouterr()
    assert main(["doctor", *data, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in told} >= {"installation.python", "train.pictures.unreadable"}
    assert set(told[0]) == {"level", "name", "text", "do"}
    (copy / "metrics.jsonl").write_text("")
    assert main(["doctor", str(copy), "--json", str(tmp_path / "found.json")]) == 0
    assert any(each["name"] == "run.export" for each in json.loads((tmp_path / "found.json").read_text()))


def test_a_shared_model_is_taken_from_the_cache_alone(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coder_plugin.doctor.installation.check_plugins", lambda: iter(()))
    for name, export in (("whole", trained / "export" / "best"), ("begun", None)):
        repository = tmp_path / f"models--owner--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        if export is not None:
            shutil.copytree(export, repository / "snapshots" / ("0" * 40))
        else:
            (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    cache = ["--open-clip", f"cache_dir={tmp_path}"]
    assert main(["doctor", "hf-hub:owner/whole", *cache]) == 0
    assert "opens, " in capsys.readouterr().out
    for name in ("begun", "absent"):
        assert main(["doctor", f"hf-hub:owner/{name}", *cache]) == 2
        said = capsys.readouterr().err
        assert f"no complete copy in the hub's cache, and doctor downloads nothing: hf download owner/{name}" in said
    assert main(["doctor", "hf-hub:not a name", *cache]) == 2 and "OWNER/NAME" in capsys.readouterr().err


def test_a_run_s_configuration_names_its_data_and_recipe(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coder_plugin.doctor.installation.check_plugins", lambda: iter(()))
    assert main(["doctor", "--config", str(copy / "config.json")]) == 0
    assert "recipe\n  ok       --loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["nowhere"], "neither a run's"),
        (["--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_slips_are_told_of_in_one_line(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert text in capsys.readouterr().err
