"""What commands print: help in two lengths, the plan, a run's lines, the commands that come next, an interruption."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from coder_plugin import create_model
from coder_plugin.cli import main
from coder_plugin.config import get_option, options_by_name, resolve
from coder_plugin.functional import dcl
from coder_plugin.training import log
from coder_plugin.training.loop import Trainer


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_of_train_is_short_and_help_all_has_every_option(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    brief, full = shown(capsys, "train", "--help"), shown(capsys, "train", "--help-all")
    assert brief.startswith("usage: coder-plugin train [options]\n") and len(brief.splitlines()) <= 94
    titles = ("objective:", "model:", "data:", "optimisation:", "evaluation:", "run and output:")
    assert [line for line in brief.splitlines() if line in titles] == list(titles)
    objective = brief.partition("\nobjective:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (--\w+) ", objective, flags=re.M)[:2] == ["--recipe", "--loss"]
    assert {"--zeroshot", "--hard-negatives", "--grad-checkpointing", "--lock-text"} <= set(re.findall(r"--[a-z-]+", brief))
    flags = [option.flag for option in options_by_name().values() if not option.listed] + ["--open-clip"]
    assert all(f"  {flag}" in full for flag in flags)
    listed = " ".join(full.partition("--open-clip ")[2].split())
    assert all(f"{name}: {option.help}" in listed for name, option in options_by_name().items() if option.listed)
    hidden = [flag for flag in flags if not re.search(rf"  {flag}[\s,]", brief)]
    assert "--gather-dtype" in hidden and not {"--train-data", "--model", "--loss", "--batch-size", "--resume"} & set(hidden)
    assert f"\n{len(hidden)} more options: coder-plugin train --help-all\n" in brief and "more options" not in full
    assert "required with --train-data" in " ".join(brief.split())


def test_help_of_a_command_that_does_not_train_speaks_of_no_training(capsys) -> None:
    for command in ("embed", "index", "eval", "mine"):
        text = " ".join(shown(capsys, command, "--help").split())
        assert "--train-data" not in text and "pairs per rank" not in text and "--model NAME in place of RUN" in text
        assert "coder-tiny" not in text  # no model is the default
        text = " ".join(shown(capsys, command, "--help-all").split())
        options = "batch_size", "workers", "max_regions", "max_bad_samples", "precision"
        flags = [re.escape(get_option(name).flag) for name in options]
        assert all(re.search(rf" {flag} (?:N|X|{{auto,[^}}]*}}) [^-\[]*\[the (?:run|model)'s, else ", text) for flag in flags)
    text = " ".join(shown(capsys, "index", "add", "--help").split())
    assert "If that model has moved, name it by --model." in text and "coder-tiny" not in text


def test_usage_names_what_must_be_given(capsys) -> None:
    assert shown(capsys, "index", "--help").startswith("usage: coder-plugin index --output INDEX [RUN] [options]\n")
    assert "usage: coder-plugin regions extract IMAGES OUTPUT [options]\n" in shown(capsys, "regions", "extract", "--help")


def test_the_plan_is_a_table(tmp_path, tiny_model, capsys) -> None:
    file = tmp_path / "options.toml"
    file.write_text("lr = 7e-4\n")
    command = ["train", "--dry-run", "--model", tiny_model, "--logs", str(tmp_path / "logs"), "--name", "run"]
    command += ["--batch-size", "8", "--accum-freq", "2", "--train-num-samples", "16", "--epochs", "1"]
    assert main([*command, "--config", str(file)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip())
    assert lines["run"] == str(tmp_path / "logs" / "run") and lines["objective"] == "dcl"
    assert lines["training"] == "data    scenes (train): 6,000 images, 16 samples per epoch (one caption per image)"
    assert lines["validation"] == "data  scenes (val): 100 images"
    assert lines["batch"] == "16 pairs per step (8 per process and forward)"
    assert lines["length"] == "1 epoch of 1 step, 1 step in all"
    assert lines["frozen"] == "logit_scale (no term reads it)"
    if not torch.cuda.is_available():
        assert lines["machine"] == "fp32, 1 process, CPU"
    assert lines["--lr"].split() == ["0.0007", str(file)] and lines["--batch-size"].split() == ["8", "flag"]
    assert lines["--wd"].split() == ["0.2", "default"]
    assert lines["--warmup"].split(maxsplit=1) == ["0", "default (5 % of all steps)"]
    assert lines["--model"].split() == [tiny_model, "flag"] and "--opt" not in lines and "--dry-run" not in lines
    assert not (tmp_path / "logs").exists()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    rows = ["image,caption"]
    for number in range(12):
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,a red square of shade {number}")
    (folder / "my pairs.csv").write_text("\n".join(rows) + "\n")
    return folder / "my pairs.csv"


def test_a_plan_warns_of_the_default_rate_and_of_one_pair_once(table, tmp_path, tiny_model, capsys, caplog) -> None:
    torch.save(create_model(tiny_model, loss="clip").state_dict(), tmp_path / "weights.pt")
    command = ["train", "--dry-run", "--model", tiny_model, "--loss", "clip + m_dcl", "--batch-size", "1"]
    command += ["--logs", str(tmp_path)]
    command += ["--train-data", str(table), "--csv-img-key", "image", "--csv-caption-key", "caption"]
    assert main([*command, "--pretrained", str(tmp_path / "weights.pt")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip())
    assert lines["--lr"].split() == ["0.0005", "default"]
    for words in ("the rate for training from scratch", "a batch of one pair has no negatives"):
        assert caplog.text.count(words) == 1, words


@pytest.mark.parametrize("validation", [False, True])
def test_a_run_ends_with_commands_that_work_as_printed(validation, table, tmp_path, tiny_model, capsys, caplog) -> None:
    data = ["--train-data", str(table), "--csv-img-key", "image", "--csv-caption-key", "caption"]
    data += ["--val-data", str(table)] if validation else []
    caplog.set_level("INFO", "coder_plugin")
    command = ["train", *data, "--model", tiny_model, "--logs", str(tmp_path), "--name", "a run", "--epochs", "1"]
    assert main([*command, "--batch-size", "6", "--workers", "0", "--no-report", "--log-every-n-steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "1 epoch of 2 steps, 6 pairs per step" in printed and "1 process" in printed and "report" not in printed
    assert "epoch 1/1 step 2/2: loss " in printed and "waiting for data, 0:00 left" in printed
    assert "separated by" not in caplog.text  # a comma is expected
    assert printed.count("no validation data: recall is not measured") == (not validation)
    assert "No pretrained weights" not in caplog.text
    after = printed.splitlines()
    commands = [shlex.split(line) for line in after[after.index("next:") + 1 :]]
    names = ["eval", "index", "search"] if validation else ["index", "search"]
    assert [words[:2] for words in commands] == [["coder-plugin", name] for name in names]
    assert ("--export" in commands[0]) is not validation
    if validation:
        for words in commands:
            assert main([*words[1:], *(["--workers", "0"] if words[1] != "search" else [])]) == 0, words
        found = capsys.readouterr().out
        assert "12 images, 12 captions" in found and "a red square of shade" in found


def test_lines_of_training_say_what_is_left_and_explain_a_loss_below_zero_once(monkeypatch, tmp_path) -> None:
    now, lines = [0.0], []
    monkeypatch.setattr(log, "echo", lines.append)
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    run = log.RunLog(tmp_path, None, resolve([("flag", {"epochs": 3, "log_every_n_steps": 2})]))
    for epoch, left in ((1, 8), (2, 4)):
        of_epoch = log.StepLines(run, epoch, 0, 4, left)
        for _ in range(4):
            now[0] += 2.0
            of_epoch.update({"loss": -0.5, "dcl_loss": -0.7, "clip_loss": 0.2, "gradient_norm": 1.0}, 0.5)
    losses = "loss -0.5000, dcl_loss -0.7000, clip_loss 0.2000; 0.50 steps/s, 25 % waiting for data"
    assert [lines[0], *lines[2:]] == [
        f"epoch 2/3 step 2/4: {losses}, 0:12 left",
        f"epoch 2/3 step 4/4: {losses}, 0:08 left",
        f"epoch 3/3 step 2/4: {losses}, 0:04 left",
        f"epoch 3/3 step 4/4: {losses}, 0:00 left",
    ]
    assert lines[1].startswith("dcl_loss can be negative (minimum -1.39 times its weight)")
    eye = torch.eye(2, dtype=torch.float64)
    no_negatives = dcl(eye[:1], eye[:1], effective_negatives=None).item()
    assert round(no_negatives, 2) == -1.39, "as the line says"


def test_an_epoch_that_ends_early_prints_its_last_step_and_missing_pictures_name_the_option(
    table, tmp_path, tiny_model, capsys
) -> None:
    lines = table.read_text().splitlines()
    for number, name in enumerate(("few", "all")):
        missing = [line.replace(".png", ".jpg") for line in lines[1:]]
        (table.parent / f"{name}.csv").write_text("\n".join([lines[0], *missing[: 3 + 9 * number], *lines[4 + 9 * number :]]))
    command = ["train", "--model", tiny_model, "--logs", str(tmp_path), "--epochs", "1", "--batch-size", "6", "--workers", "0"]
    command += ["--no-report", "--csv-img-key", "image", "--csv-caption-key", "caption"]
    few, every = (str(table.parent / f"{name}.csv") for name in ("few", "all"))
    assert main([*command, "--train-data", few, "--name", "few"]) == 0
    assert "epoch 1/1 step 1/2: loss " in capsys.readouterr().out
    advice = ": fix the paths, or name the folder that they are relative to (--image-root); "
    advice += "a model that reads region features needs their files instead (--regions)\n"
    assert main([*command, "--train-data", every]) == 2
    told = capsys.readouterr().err
    assert "none of the first 12 images can be read; the first: 0.jpg: not found: '" in told and told.endswith(advice)
    assert main([*command, "--train-data", few, "--val-data", every, "--name", "all"]) == 2
    told = capsys.readouterr().err
    assert "no image can be used to evaluate: 12 of 12 samples skipped (missing 12)" in told and told.endswith(advice)


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupted_run_says_what_is_kept_and_how_to_go_on(saved, tmp_path, tiny_model, capsys, monkeypatch) -> None:
    take = Trainer.training_step

    def step(self, batches):
        if self.step == 1:
            raise KeyboardInterrupt
        return take(self, batches)

    monkeypatch.setattr(Trainer, "training_step", step)
    command = ["train", "--model", tiny_model, "--logs", str(tmp_path), "--name", "run", "--batch-size", "8", "--workers", "0"]
    command += ["--train-num-samples", "16", "--val-frequency", "0", "--no-report", "--epochs", "1"]
    assert main([*command, *(["--save-every-steps", "1"] if saved else [])]) == 130
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("coder-plugin: interrupted: ") and "--name run --resume latest" in error
    assert (str(tmp_path / "run" / "checkpoints" / "step_00000001") in error) is saved
    assert ("no checkpoint" in error) is not saved
    monkeypatch.setattr(Trainer, "training_step", take)
    assert main([*command, "--resume", "latest"]) == 0, "as the message says"
