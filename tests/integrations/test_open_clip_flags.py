"""The adapter's command line: what is ours never reaches upstream, what cannot work is refused with its reason."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("open_clip_train.main", reason="open_clip's trainer needs the extra open-clip", exc_type=ImportError)

import open_clip
import open_clip_train.main as trainer

from coder_plugin.errors import CoderError
from coder_plugin.integrations.open_clip import adapted, command, flags
from tests import fresh

ARGV = ["--model", "coder-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8", "--batch-size", "4"]
EXTRA = {
    "--coder-concepts": ["scenes"],
    "--coder-negatives": ["none"],
    "--coder-positives": ["join"],
    "--coder-tagger": ["scenes"],
    "--coder-set": ["dcl.mu=0.07", "dcl.gamma=0.2"],
    "--coder-aggregator": ["gpo"],
    "--coder-context-blocks": ["2"],
    "--coder-captions": ["all"],
    "--coder-heads-lr-scale": ["10"],
    "--coder-loss-impl": ["reference"],
    "--coder-gather-dtype": ["bfloat16"],
    "--coder-hard-negatives": ["3"],
    "--coder-negatives-file": ["negatives.tsv"],
    "--coder-csv-negatives-key": ["wrong"],
}


def test_all_of_ours_is_known_here() -> None:
    assert {flag.removeprefix("--coder-").replace("-", "_") for flag in EXTRA} == set(flags.OURS)


def test_ours_never_reaches_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    own = trainer.parse_args
    monkeypatch.setattr(trainer, "parse_args", lambda argv: seen.append(list(argv)) or own(argv))
    ours = [word for flag, values in EXTRA.items() for word in (flag, *values)]
    with adapted() as adapter:
        loss = ["--loss", "dcl"]
        for argv in ([*loss, *ours, *ARGV], [*ARGV, "--loss=dcl", *ours], [*ARGV[:4], *ours, *loss, *ARGV[4:]]):
            kept, rest = flags.split(argv)
            assert rest == ARGV and kept.loss == "dcl" and kept.set == EXTRA["--coder-set"] and kept.context_blocks == 2
        args = trainer.parse_args(["--loss", "dcl(mu=0.07)", *ARGV])
        assert seen == [ARGV] and adapter.run is not None and str(adapter.run.objective).startswith("dcl")
        assert (args.batch_size, args.model) == (4, "coder-tiny")
        assert args.loss_dist_impl is None if hasattr(args, "loss_dist_impl") else True


def test_without_a_loss_everything_is_upstreams() -> None:
    plain = vars(trainer.parse_args(ARGV))
    with adapted() as adapter:
        assert vars(trainer.parse_args(ARGV)) == plain and adapter.run is None
        trainer.parse_args(["--loss", "clip", *ARGV])
        assert adapter.run is not None
        assert vars(trainer.parse_args(ARGV)) == plain and adapter.run is None, "the run before is forgotten"


@pytest.mark.parametrize("flag", EXTRA)
def test_our_flags_need_a_loss(flag: str) -> None:
    with pytest.raises(CoderError, match=f"{flag} without --loss: name the loss"):
        flags.split([*ARGV, flag, *EXTRA[flag]])


@pytest.mark.parametrize("flag", EXTRA)
def test_names_without_the_prefix_get_a_hint(flag: str) -> None:
    bare = flag.replace("--coder-", "--")
    for argv in ([bare, *EXTRA[flag]], [f"{bare}={EXTRA[flag][0]}"]):
        with pytest.raises(CoderError, match=f"^{bare} is {flag} here$"):
            flags.split(["--loss", "dcl", *ARGV, *argv])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--torchscript"], "--torchscript does not go with --loss.*--torchcompile works"),
        (["--trace"], "--trace does not go with --loss"),
        (["--horovod"], "--horovod does not go with --loss.*torchrun"),
        (["--use-bnb-linear", "SwitchBackLinearGlobal"], "--use-bnb-linear does not go with --loss"),
        (["--precision", "fp16"], "--precision fp16 does not go with --loss.*amp"),
        (["--precision", "pure_fp16"], "--precision pure_fp16 does not go with --loss"),
        (["--model", "region-bert"], "region-bert reads regions.*coder-plugin train"),
        (["--loss", "no-such-loss"], "no-such-loss"),
        (["--coder-set", "dcl.mu"], "--set dcl.mu: write OWNER.OPTION=VALUE"),
        (["--coder-positives", "join"], "--positives: no term of --loss"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(argv: list[str], reason: str) -> None:
    known = flags.parser().parse_known_args(argv)[1]
    if "--horovod" in known and "--horovod" not in _upstreams_help():
        pytest.skip("this open_clip has no --horovod")
    with adapted(), pytest.raises(CoderError, match=reason):
        trainer.parse_args(["--loss", "dcl", *ARGV, *argv])


def _upstreams_help() -> str:
    import inspect

    from open_clip_train import params

    return inspect.getsource(params)


def test_a_file_of_our_options(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    argv = ["--loss", "dcl", "--coder-config", str(file), *ARGV]
    with adapted() as adapter:
        file.write_text(json.dumps({"aggregator": "gpo", "context_blocks": 3}))
        trainer.parse_args([*argv, "--coder-context-blocks", "2"])
        assert adapter.run is not None and adapter.run.config.model.aggregator == "gpo"
        assert adapter.run.config.model.context_blocks == 2
        file.write_text(json.dumps({"lr": 1e-3, "set": ["dcl.mu=0.07"]}))
        with pytest.raises(CoderError, match="--lr must be set by upstream's own flags here"):
            trainer.parse_args(argv)
        file.write_text(json.dumps({"captions": "some"}))
        with pytest.raises(CoderError, match="captions is 'some'; allowed: draw, all"):
            trainer.parse_args(argv)


def test_messages_name_the_flags_as_they_are_called_here() -> None:
    renamed = flags.renamed
    assert renamed("--concepts FILE, made by coder-plugin concepts --output FILE") == (
        "--coder-concepts FILE, made by coder-plugin concepts --output FILE"
    )
    assert renamed("--set a.b=c and --heads-lr-scale=2, not --setting") == (
        "--coder-set a.b=c and --coder-heads-lr-scale=2, not --setting"
    )
    assert renamed("--coder-set --batch-size --pretrained") == "--coder-set --batch-size --pretrained"


def test_exit_codes_and_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainer, "setup_logging", lambda *args, **options: None)  # it is for a whole process
    (table := tmp_path / "t.csv").write_text("file\ttext\n")
    late = ["--loss", "dcl", "--model", "coder-tiny", "--device", "cpu", "--logs", f"{tmp_path}/l", "--train-data", f"{table}"]
    assert command.main(late) == 2
    assert f"coder-plugin: error: {table}: no column 'filepath' (--csv-img-key)" in capsys.readouterr().err.splitlines()[-1]
    assert command.main([*ARGV, "--coder-captions", "all"]) == 2
    assert capsys.readouterr().err.startswith("coder-plugin: error: --coder-captions without --loss")
    assert command.main([*ARGV, "--loss", "dcl", "--coder-positives", "join"]) == 2
    assert "error: --coder-positives: no term" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        command.main(["--no-such-flag"])
    assert stopped.value.code == 2
    for done, status in ((None, 0), (-1, 2)):  # upstream's -1 stands behind a message of its own
        monkeypatch.setattr(trainer, "main", lambda argv, done=done: done)
        assert command.main(ARGV) == status


def test_help_lists_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--loss", "coder", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--loss EXPR", *EXTRA, "--coder-config", "--train-data", "--lock-image-unlocked-groups", "--report-to"):
        assert flag in text, flag


@pytest.mark.parametrize(("version", "gone"), [("2.30.0", None), ("5.0.0", None), ("3.3.0", "create_loss"), ("4.1.0", None)])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, gone: str | None) -> None:
    fake: dict[str, Any] = {"create_loss": None, "__name__": "open_clip_train.main"}
    fake.pop(gone or "", None)
    monkeypatch.setattr(open_clip, "__version__", version)
    monkeypatch.setattr("open_clip_train.main", Namespace(**fake))
    with pytest.raises(CoderError, match=f"knows the trainers of open_clip 3.3 and of 4, with its tasks; this is {version}"):
        command.find_adapter()


def test_the_module_is_the_command() -> None:
    done = fresh.run(["-m", "coder_plugin.integrations.open_clip", "--coder-set", "dcl.mu=1"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("coder-plugin: error: --coder-set without --loss")
