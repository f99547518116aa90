"""Stopping, locking and resuming: damaged checkpoints, changed rates, full disks, signals, a second run of the same name."""

from __future__ import annotations

import errno
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import assert_same_run, differences, exports, in_child, options, rows, state, trainer

from coder_plugin.config import TrainConfig
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import exported_step
from coder_plugin.training import checkpoint, loop, resume
from coder_plugin.training.average import WeightAverage
from coder_plugin.training.disk import run_lock
from coder_plugin.training.metrics_file import append_line, cut_back
from coder_plugin.training.run_folder import RunFolder
from coder_plugin.training.signals import EXIT_STATUS, StopSignals
from coder_plugin.training.step import NonFiniteError
from tests.reliability import ranks as forked


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs in which ``run`` has ended; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    trainer(options(folder)).run()
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# damaged checkpoints


def test_resuming_with_every_checkpoint_damaged_stops_and_touches_nothing(folder):
    for number, path in enumerate((folder / "run/checkpoints").iterdir()):
        flip(path / ("state.pt", "manifest.json")[number % 2], 8 * 200 + 1)
    before = content(folder / "run")
    with pytest.raises(CoderError, match=r"no checkpoint in .* is whole, and nothing was changed: .*step_00000008"):
        trainer(options(folder, resume="latest", epochs=3)).run()
    with pytest.raises(CoderError, match="holds a run already"):
        trainer(options(folder)).run()
    after = content(folder / "run")
    assert {**after, ".lock": b""} == {**before, ".lock": b""}


@pytest.mark.parametrize("file", ["state.pt", pytest.param("manifest.json", marks=pytest.mark.slow)])
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_ends_as_without_damage(finished, folder, file, caplog):
    run = folder / "run"
    flip(run / "checkpoints/step_00000008" / file, 8 * 300)
    damaged = content(run / "checkpoints/step_00000008")
    trainer(options(folder, resume="latest")).run()
    assert "skipped a checkpoint" in caplog.text and "step_00000008" in caplog.text
    assert content(run / "set-aside/step_00000008") == damaged
    assert_same_run(finished / "run", run)


def test_a_mistyped_name_is_no_new_run(folder):
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(CoderError, match="holds no run; did you mean 'run'.*check --name"):
        trainer(options(folder, name="rum", resume="latest"))
    assert sorted(path.name for path in folder.iterdir()) == before


def bit_flips(finished: Path, folder: Path, draws: int) -> dict[str, int]:
    """Flip a bit of one checkpoint, or of each; resume; nothing whole may be lost."""
    random_ = random.Random(7)
    counts = {"refused": 0, "survived": 0}
    whole_run = trainer(options(finished))
    for _ in range(draws):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(finished / "run", folder)
        paths = sorted((folder / "checkpoints").iterdir())
        harmed = paths if random_.random() < 0.4 else [random_.choice(paths)]
        for path in harmed:
            file = random_.choice(sorted(path.iterdir()))
            flip(file, random_.randrange(8 * file.stat().st_size))
        whole = {path.name: content(path) for path in paths if path not in harmed}

        def resume() -> None:
            whole_run.folder = whole_run.log.folder = folder
            whole_run.config = whole_run.config.with_options(resume="latest")
            whole_run.run()

        before = content(folder)
        status = in_child(resume)
        if len(harmed) == len(paths):
            assert status == 2 and {**content(folder), ".lock": b""} == {**before, ".lock": b""}
            counts["refused"] += 1
            continue
        assert status == 0
        counts["survived"] += 1
        for name, files in whole.items():  # the run goes on and may save the same step anew, with the same state
            assert checkpoint.verify(folder / "checkpoints" / name)["step"] == int(name[5:])
            if name != "step_00000008":
                assert content(folder / "checkpoints" / name) == files
        assert not differences(state(finished / "run", "step_00000008"), state(folder, "step_00000008"))
    return counts


@pytest.mark.slow
def test_one_bit_flipped_in_a_checkpoint_many_times(finished, tmp_path):
    counts = bit_flips(finished, tmp_path / "run", 80)
    print(f"bit flips in checkpoints: {counts}")
    assert min(counts.values()) >= 20


# options that change on resume


def test_a_lower_rate_on_resume_is_taken_and_recorded(folder):
    made = trainer(options(folder, lr=2e-3, epochs=3, resume="latest"))
    made.run()
    found = {"step": 8, "option": "lr", "was": 0.01, "is": 0.002}
    manifest = json.loads((folder / "run/checkpoints/step_00000012/manifest.json").read_text())
    plan = json.loads((folder / "run/plan.json").read_text())
    assert found in manifest["changes"] and found in plan["changed on resume"]
    assert {change["option"] for change in manifest["changes"]} == {"lr", "epochs"}
    fresh = trainer(options(folder, name="fresh", lr=2e-3, epochs=3))
    fresh.setup_optimizer()
    assert made.schedule.base_lrs == fresh.schedule.base_lrs and max(fresh.schedule.base_lrs) == 2e-3
    logged = {row["step"]: row["lr"] for row in rows(folder / "run") if "lr" in row}
    for step in range(8, 12):
        rates = zip(fresh.schedule.base_lrs, fresh.schedule.lr_lambdas, strict=True)
        expected = max(rate * factor(step + 1) for rate, factor in rates)  # logged once the step is taken
        assert logged[step] == pytest.approx(expected, rel=1e-12)
    trainer(options(folder, lr=2e-3, epochs=4, resume="latest")).run()
    manifest = json.loads((folder / "run/checkpoints/step_00000016/manifest.json").read_text())
    assert [change["option"] for change in manifest["changes"]].count("lr") == 1


def with_nan(made: Any, at: int) -> None:
    take = made.training_step

    def step(batches):
        if made.step == at:
            with torch.no_grad():
                made.model.text_projection.fill_(float("nan"))
        return take(batches)

    made.training_step = step


def test_after_nan_the_advice_can_be_followed(tmp_path):
    made = trainer(options(tmp_path))
    with_nan(made, 7)
    with pytest.raises(NonFiniteError, match=r"dcl_loss = nan.* at step 7 \(epoch 2\)") as caught:
        made.run()
    named = re.findall(r"--resume (\S+?)(?:,| |$)", str(caught.value))
    assert [Path(each).name for each in named] == ["step_00000006", "step_00000004"]
    again = trainer(options(tmp_path, resume=named[1], lr=1e-3))
    again.run()
    assert again.step == 8 and {"step_00000006", "step_00000008"} <= {p.name for p in (tmp_path / "run/checkpoints").iterdir()}
    assert [path.name for path in (tmp_path / "run/set-aside").iterdir()] == ["step_00000006"]
    steps = [row["step"] for row in rows(tmp_path / "run") if "loss" in row]
    assert steps == list(range(8))
    # the rows and checkpoints of the lower rate, not those that were left behind
    assert checkpoint.verify(tmp_path / "run/checkpoints/step_00000006")["changes"][0]["is"] == 1e-3


# metrics.jsonl


def test_rows_after_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_back(path, step=3, evaluated=-1) == 0 and not path.exists()
    lines = [json.dumps({"step": 0, "val/rsum": 1.0})]
    lines += [json.dumps({"step": step, "loss": 1.0}) for step in range(3)]
    lines += [json.dumps({"step": 3, "val/rsum": 2.0})]
    later = [json.dumps({"step": 3, "loss": 1.0}), "[]", '{"loss": 1}', json.dumps({"step": 4, "val/rsum": 2.0})]
    path.write_text("\n".join([*lines, *later]) + '\n{"step": 1, "lo')
    assert cut_back(path, step=3, evaluated=3) == 5
    assert path.read_text().splitlines() == lines
    assert cut_back(path, step=3, evaluated=0) == 1  # the evaluation was not in the checkpoint: it is repeated
    assert path.read_text().splitlines() == lines[:-1]
    epochs = [json.dumps({"step": 3 * epoch + 3, "epoch": epoch, "epoch/read_samples": 9}) for epoch in range(3)]
    path.write_text("\n".join([*lines[:-1], *epochs]) + "\n")
    assert cut_back(path, step=6, evaluated=0, epochs=2) == 1
    assert path.read_text().splitlines() == [*lines[:-1], *epochs[:2]]


def test_a_row_is_written_as_a_whole_or_not_at_all(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "metrics.jsonl"
    append_line(path, "a" * 50)

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80))
        try:
            append_line(path, "b" * 50)
        except OSError as error:
            assert error.errno == errno.EFBIG
            return
        raise AssertionError

    assert in_child(full) == 0
    assert path.read_text() == "a" * 50 + "\n"


# disks


def failing(monkeypatch: pytest.MonkeyPatch, where: str, code: int = errno.ENOSPC) -> None:
    """Opening a file for writing fails below a folder whose name contains ``where``."""
    real = os.open

    def check(path: Any) -> None:
        if where in str(path):
            raise OSError(code, os.strerror(code), str(path))

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            check(path)
        return real(path, flags, *args, **kwargs)

    import io

    real_open = io.open

    def file_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wxa+"):
            check(path)
        return real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(io, "open", file_open)
    monkeypatch.setattr("builtins.open", file_open)


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.slow)])
def test_a_full_or_read_only_disk_is_one_line_that_names_the_whole_checkpoint(finished, tmp_path, code, monkeypatch):
    made = trainer(options(tmp_path))
    step = made.training_step

    def fill(batches: Any) -> Any:
        if made.step == 5:
            failing(monkeypatch, "step_00000006", code)
        return step(batches)

    made.training_step = fill
    with pytest.raises(CoderError) as caught:
        made.run()
    monkeypatch.undo()
    text = str(caught.value)
    assert text.startswith(f"a checkpoint cannot be written to {tmp_path}/run/checkpoints/step_00000006: {os.strerror(code)}; ")
    assert f"{tmp_path}/run/checkpoints/step_00000004 is whole: remove the cause, then --resume latest" in text
    trainer(options(tmp_path, resume="latest")).run()
    assert_same_run(finished / "run", tmp_path / "run")


def test_a_file_size_limit_while_weights_are_written(tmp_path):
    """A real refusal of the kernel, in the middle of a file that torch writes."""
    resource = pytest.importorskip("resource")
    made = trainer(options(tmp_path))
    step, messages = made.training_step, tmp_path / "message"

    def fill(batches: Any) -> Any:
        if made.step == 5:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return step(batches)

    def run() -> None:
        made.training_step = fill
        try:
            made.run()
        except CoderError as error:
            messages.write_text(str(error))
            raise

    assert in_child(run) == 2
    assert "File too large" in messages.read_text() and "step_00000004 is whole" in messages.read_text()


def test_a_row_of_the_log_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog):
    made = trainer(options(tmp_path, report_to="tensorboard"))
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("x")))
    failing(monkeypatch, "metrics.jsonl")
    made.run()
    assert made.step == 8
    warnings = [record.message for record in caplog.records if "could not be written" in record.message]
    assert len(warnings) == 2 and "metrics.jsonl" in warnings[0] and "No space left on device" in warnings[0]


# signals


def signalled(made: Any, at: int, number: int) -> int:
    """The exit status of a run that gets a signal while it takes a step."""
    step = made.training_step

    def take(batches: Any) -> Any:
        if made.step == at:
            os.kill(os.getpid(), number)
        return step(batches)

    def run() -> None:
        made.training_step = take
        made.run()

    return in_child(run)


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGHUP", "SIGUSR1"))]
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on_as_uninterrupted(finished, tmp_path, name):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    made = trainer(options(tmp_path, name=name))
    assert signalled(made, 4, getattr(signal, name)) == EXIT_STATUS == 75
    newest = checkpoint.newest(tmp_path / name / "checkpoints")
    assert newest is not None and newest.name == "step_00000005"
    assert [row["step"] for row in rows(tmp_path / name) if "loss" in row] == [0, 1, 2, 3, 4]
    trainer(options(tmp_path, name=name, resume="latest")).run()
    assert_same_run(tmp_path / "run", tmp_path / name)


def stop_at_random(made: Any, folder: Path, draws: int, seconds: float) -> list[float]:
    """Signals at random instants of a run and its successors: how long each took to leave, with its checkpoint whole."""
    draw = random.Random(5)
    delays = []
    while len(delays) < draws:
        shutil.rmtree(folder, ignore_errors=True)
        while len(delays) < draws:
            resume = (folder / "config.json").exists()
            read, write = os.pipe()
            child = os.fork()
            if not child:
                status = 1
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                    made.folder = made.log.folder = folder
                    made.config = made.log.config = made.config.with_options(resume="latest" if resume else None)
                    with made.signals:  # as in a run: it has begun when the signal comes
                        os.write(write, b"1")
                        made.run()
                    status = 0
                except SystemExit as error:
                    status = int(error.code or 0)
                finally:
                    os._exit(status)
            os.read(read, 1)
            os.close(read), os.close(write)
            time.sleep(draw.uniform(0, seconds))
            before = checkpoint.newest(folder / "checkpoints", problems=[])
            started = time.monotonic()
            os.kill(child, draw.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT]))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 0:  # the run was over
                break
            assert status == EXIT_STATUS
            delays.append(time.monotonic() - started)
            after = checkpoint.newest(folder / "checkpoints", problems=(problems := []))
            assert not problems and (before is None or (after is not None and after.name >= before.name))
    return delays


@pytest.mark.slow
def test_signals_at_random_instants(finished, tmp_path):
    started = time.monotonic()
    made = trainer(options(finished))
    made_seconds = time.monotonic() - started
    delays = stop_at_random(made, tmp_path / "run", 60, made_seconds)
    print(f"{len(delays)} signals at random instants: left within {max(delays):.1f} s, median {sorted(delays)[30]:.1f} s")
    assert max(delays) < 20  # of which a step on a busy machine


def test_a_signal_during_evaluation_ends_it_and_the_resumed_run_repeats_it(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    made = trainer(options(tmp_path, name="stopped", save_every_steps=0))
    encode = made.encoder.__class__.__call__

    def run() -> None:
        def call(self: Any, source: Any) -> Any:
            if made.step == 4:
                torch.rand(1)  # random numbers of an evaluation that is repeated must not count
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
            return encode(self, source)

        made.encoder.__class__.__call__ = call
        made.run()

    assert in_child(run) == EXIT_STATUS
    assert [path.name for path in (tmp_path / "stopped/checkpoints").iterdir()] == ["step_00000004"]
    assert not (tmp_path / "stopped/export/best").exists()
    trainer(options(tmp_path, name="stopped", resume="latest", save_every_steps=0)).run()
    assert_same_run(tmp_path / "run", tmp_path / "stopped")


#: 1: the average is put in place; 2: the model's own weights are restored.
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_while_weights_are_exchanged_leaves_them_whole(finished, tmp_path, number):
    made = trainer(options(tmp_path, save_every_steps=0))
    copy, calls = WeightAverage._copy, []

    def interrupted(target: Any, weights: Any) -> None:
        if made.step == 4:
            calls.append(1)
        if len(calls) != number:
            return copy(target, weights)
        names = list(weights)
        copy(target, {name: weights[name] for name in names[:1]})
        os.kill(os.getpid(), signal.SIGTERM)
        copy(target, {name: weights[name] for name in names[1:]})

    def run() -> None:
        WeightAverage._copy = staticmethod(interrupted)
        made.run()

    assert in_child(run) == EXIT_STATUS
    resumed = trainer(options(tmp_path, resume="latest", save_every_steps=0))
    resumed.run()
    assert_same_run(finished / "run", tmp_path / "run")


def with_results(monkeypatch: pytest.MonkeyPatch, rsum: dict[int, float], made: Any) -> None:
    """Give the evaluations of a trainer these R@sums, by step."""
    measure = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: {**measure(*a, **k), "rsum": rsum.get(made.step, 0.0)})


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_best_export_is_of_the_run_that_goes_on(tmp_path, monkeypatch, kept, caplog):
    run, more = tmp_path / "run", {"save_frequency": int(kept)}
    made = trainer(options(tmp_path, **more))
    with_results(monkeypatch, {4: 50.0, 8: 90.0}, made)
    made.run()
    monkeypatch.undo()
    first = trainer(options(tmp_path, name="first", epochs=1, **more))
    with_results(monkeypatch, {4: 50.0}, first)
    first.run()
    monkeypatch.undo()
    best = exports(run)
    again = trainer(options(tmp_path, resume=str(run / "checkpoints/step_00000006"), **more))
    begun: list[dict[str, Any]] = []
    train = again._train_epoch
    own = {name: value.clone() for name, value in state(run, "step_00000006").items() if name.startswith("state/model/")}

    def look() -> bool:
        begun.append(exports(run))
        assert not differences(own, {f"state/model/{name}": value for name, value in again.model.state_dict().items()})
        return train()

    again._train_epoch = look
    with_results(monkeypatch, {8: 20.0}, again)
    again.run()
    of_best = "export/best/"
    aside = run / "set-aside/export-best-step_00000008"
    assert {f"{of_best}{name}": value for name, value in content(aside).items()} == {
        name: value for name, value in best.items() if name.startswith(of_best)
    }
    now = {name: value for name, value in exports(run).items() if name.startswith(of_best)}
    if kept:
        expected = {name: value for name, value in exports(tmp_path / "first").items() if name.startswith(of_best)}
        assert expected and not differences(expected, now)
        assert not differences(expected, {name: value for name, value in begun[0].items() if name.startswith(of_best)})
        assert again.best["step"] == 4
    else:  # the checkpoint of step 4 was pruned
        assert not any(name.startswith(of_best) for name in begun[0]) and "step_00000004 cannot be used" in caplog.text
        assert again.best["step"] == exported_step(run / "export/best") == 8


def test_the_rows_of_runs_killed_before_their_first_checkpoint_are_kept(tmp_path):
    made = trainer(options(tmp_path))
    for number in range(3):
        append_line(made.folder / "metrics.jsonl", f'{{"step": {number}}}')
        resume.begin_after(made, None)
    kept = [path.read_text() for path in made.folder.glob("metrics.jsonl.old*")]
    assert sorted(kept) == [f'{{"step": {number}}}\n' for number in range(3)]


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch")
def test_the_first_rank_chooses_the_checkpoint_for_all(folder, tmp_path):
    """The second rank's own choice would be another checkpoint. Where the first finds none, both end with its error."""
    run, damaged = folder / "run", tmp_path / "damaged"
    shutil.copytree(run, damaged)
    for path in (damaged / "checkpoints").iterdir():
        flip(path / "state.pt", 8 * 200 + 1)

    def work(_: Path) -> None:
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        if rank == 1:
            checkpoint.newest = lambda *a, **k: run / "checkpoints/step_00000006"
        config = TrainConfig().with_options(name="run", resume="latest")
        found = resume.find_state(config, run)
        print("found", None if found is None else found.path.name, flush=True)
        resume.find_state(config, damaged)

    endings = forked.run(work, tmp_path)
    assert [ending.status for ending in endings] == [2, 2], endings
    assert all("found step_00000008" in ending.output for ending in endings)
    for ending, text in zip(endings, ("error: no checkpoint in", "error: rank 0: no checkpoint in"), strict=True):
        assert text in ending.output, ending.output


@pytest.mark.slow
def test_the_process_itself_ends_with_the_status(tmp_path):
    """The command in a process group with workers, stopped as a terminal or a scheduler stops it: all its processes at once."""
    flags = {"model": options(tmp_path)["model"], "loss": "dcl", "logs": tmp_path, "name": "run", "batch-size": 4}
    flags |= {"epochs": 10_000, "train-num-samples": 32, "workers": 2, "val-frequency": 0, "log-every-n-steps": 1}
    command = [sys.executable, "-m", "coder_plugin.cli", "train", *(f"--{key}={value}" for key, value in flags.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and "step 3/" not in (tmp_path / "output").read_text():
            time.sleep(0.1)
            assert process.poll() is None, (tmp_path / "output").read_text()[-2000:]
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        status = process.wait(timeout=60)
        seconds = time.monotonic() - started
    finally:
        if process.poll() is None:
            process.kill()
    text = (tmp_path / "output").read_text()
    assert status == EXIT_STATUS and "Traceback" not in text, text[-2000:]
    assert "SIGTERM: stopped after step" in text and seconds < 20
    assert checkpoint.newest(tmp_path / "run/checkpoints") is not None


def test_hangup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_closed_terminal_leaves_a_checkpoint(tmp_path):
    """The lines of its log then have nothing to be written to."""
    flags = {"model": options(tmp_path)["model"], "loss": "dcl", "logs": tmp_path, "name": "run", "batch-size": 4}
    flags |= {"epochs": 10_000, "train-num-samples": 32, "workers": 1, "val-frequency": 0, "save-every-steps": 0}
    child, terminal = pty.fork()
    if not child:
        command = [sys.executable, "-m", "coder_plugin.cli", "train", *(f"--{key}={value}" for key, value in flags.items())]
        os.execv(sys.executable, command)
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_STATUS
    assert checkpoint.newest(tmp_path / "run/checkpoints") is not None


# the lock


def test_a_second_run_of_the_same_name_is_refused_while_the_first_lives(folder):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with run_lock(folder / "run"):
            os.write(write, b"1")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(read, 1)
        with pytest.raises(CoderError, match="run is being written by another process: wait for it, stop it, or choose"):
            trainer(options(folder, resume="latest")).run()
        assert RunFolder.read(folder / "run").manifest is not None  # reports and evaluation read it all the same
        grandchild = os.fork()  # as a worker: it must not inherit the lock
        if not grandchild:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with run_lock(folder / "run"):
            worker = os.fork()
            if not worker:
                os.write(write, b"2")
                time.sleep(60)
                os._exit(0)
            os.read(read, 1)
        with run_lock(folder / "run"):  # though the worker lives
            pass
        for each in (grandchild, worker):
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)
    finally:
        os.close(read), os.close(write)
