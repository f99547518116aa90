"""SIGKILL at every write, rename and flush of a run, at random instants, and many times in a row."""

from __future__ import annotations

import builtins
import io
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_run import FILES, assert_same_run, coder_options, in_child, options, trainer

from coder_plugin.training import checkpoint

#: Functions whose every call is a point to die at: before it and after it.
CALLS = "fsync replace rename unlink remove rmdir mkdir ftruncate truncate".split()


class Points:
    """Counts the points at which a run writes below a folder, and kills the process at one of them.

    Args:
        folder: what counts.
        fatal: the number of the point to die at; -1 for none.
    """

    def __init__(self, folder: Path, fatal: int = -1) -> None:
        self.folder, self.fatal, self.count, self.kinds = str(folder), fatal, 0, []

    def reach(self, kind: str) -> None:
        self.kinds.append(kind)
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def counts(self, path: Any) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return str(path).startswith(self.folder)

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self.around(name, getattr(os, name)))
        for owner in (io, builtins):
            owner.open = self.opening(io.open if owner is io else builtins.open)
        os.open = self.opening_descriptor(os.open)
        safetensors.torch.save_file = self.saving(safetensors.torch.save_file)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            counted = self.counts(path)
            if counted:
                self.reach(f"before {name}")
            result = function(path, *args, **kwargs)
            if counted:
                self.reach(f"after {name}")
            return result

        return call

    def opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wxa+") or isinstance(path, int) or not self.counts(path):
                return function(path, mode, *args, **kwargs)
            self.reach("before open")
            return Written(function(path, mode, *args, **kwargs), self)

        return open_

    def opening_descriptor(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR) and self.counts(path):
                self.reach("before open")
            return function(path, flags, *args, **kwargs)

        return open_

    def saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """safetensors writes by itself: die before, with a part of the file, and after."""

        def save(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            if not self.counts(path):
                return function(tensors, path, *args, **kwargs)
            self.reach("before safetensors")
            function(tensors, path, *args, **kwargs)
            if self.count == self.fatal:
                os.truncate(path, os.path.getsize(path) // 2)
            self.reach("half of safetensors")
            self.reach("after safetensors")

        return save


class Written:
    """A file whose every write has three points: before it, after half of it, and after it."""

    def __init__(self, file: Any, points: Points) -> None:
        self._file, self._points = file, points

    def write(self, content: Any) -> int:
        self._points.reach("before write")
        half = len(content) // 2
        self._file.write(content[:half])
        if self._points.count == self._points.fatal:
            self._file.flush()
        self._points.reach("half of write")
        written = self._file.write(content[half:])
        if self._points.count == self._points.fatal:
            self._file.flush()
        self._points.reach("after write")
        return half + written

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def use(made: Any, folder: Path, *, resume: bool) -> None:
    """Let a trainer that was made once write into another folder; called in a forked process."""
    made.folder = made.log.folder = folder
    if resume:
        made.config = made.log.config = made.config.with_options(resume="latest")


def run(made: Any, folder: Path, *, resume: bool = False, fatal: int | None = None) -> int:
    def work() -> None:
        use(made, folder, resume=resume)
        if fatal is not None:
            Points(folder, fatal).install()
        made.run()

    return in_child(work)


def enumerated(made: Any, folder: Path) -> list[str]:
    """The kinds of all points of an uninterrupted run."""

    def work() -> None:
        use(made, folder, resume=False)
        points = Points(folder)
        points.install()
        made.run()
        (FILES / "kinds").write_text("\n".join(points.kinds))

    assert in_child(work) == 0
    return (FILES / "kinds").read_text().splitlines()


def newest_step(folder: Path) -> int:
    path = checkpoint.newest(folder / "checkpoints", problems=[])
    return 0 if path is None else checkpoint.verify(path)["step"]


def check_kills(made: Any, whole: Path, folder: Path, fatal: list[int]) -> list[int]:
    """Kill at each point, resume, and compare with the uninterrupted run. Returns the steps resumed from."""
    steps = []
    for point in fatal:
        shutil.rmtree(folder, ignore_errors=True)
        assert run(made, folder, fatal=point) == -signal.SIGKILL, point
        steps.append(newest_step(folder))
        begun = any((folder / name).exists() for name in ("config.json", "plan.json", "metrics.jsonl", "checkpoints"))
        assert run(made, folder, resume=begun) == 0, point
        assert_same_run(whole, folder)
        leftovers = [path for path in folder.rglob(".*") if path.name != ".lock"]
        assert not leftovers, (point, leftovers)
    assert steps == sorted(steps)  # the later the kill, the newer the checkpoint
    return steps


@pytest.fixture(scope="module")
def made() -> Any:
    """A trainer, made once: every run is a process forked from here."""
    return trainer(options(FILES))


def test_killed_at_points_of_a_run(made, tmp_path):
    kinds = enumerated(made, tmp_path / "whole")
    assert {"before fsync", "after replace", "half of write", "half of safetensors", "before open"} <= {*kinds}
    (step,) = check_kills(made, tmp_path / "whole", tmp_path / "run", [len(kinds) // 2])
    assert 0 < step < 8


@pytest.mark.parametrize("max_steps", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_killed_between_the_last_step_and_its_evaluation(max_steps, tmp_path, monkeypatch):
    """The checkpoint of the last step has its position within the epoch: the resumed run takes no step, evaluates and saves."""
    made = trainer(options(FILES, max_steps=max_steps, epochs=2 if max_steps else 1, save_every_steps=1, report=False))
    assert run(made, tmp_path / "whole") == 0
    evaluate = type(made)._evaluate

    def killed(self, *args: Any, **further: Any) -> None:
        if self.step == self.total_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        evaluate(self, *args, **further)

    with monkeypatch.context() as patch:
        patch.setattr(type(made), "_evaluate", killed)
        assert run(made, tmp_path / "run") == -signal.SIGKILL
    for _ in range(2):  # a finished run stays as it is
        assert run(made, tmp_path / "run", resume=True) == 0
        assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_killed_at_every_point_of_a_run(tmp_path):
    """All state of CODER, both exports with heads and vocabulary, the log: at most 600 points, evenly, and at least 200."""
    made = trainer(coder_options(FILES), loss="coder")
    kinds = enumerated(made, tmp_path / "whole")
    stride = max(1, len(kinds) // 400)
    fatal = list(range(0, len(kinds), stride))
    assert len(fatal) >= 200
    started = time.monotonic()
    steps = check_kills(made, tmp_path / "whole", tmp_path / "run", fatal)
    names = sorted({kind.split(" ", 1)[1] for kind in kinds})
    print(
        f"{len(fatal)} kills at points of {len(kinds)} ({', '.join(names)}), resumed from steps "
        f"{ {step: steps.count(step) for step in sorted({*steps})} }: all as uninterrupted; {time.monotonic() - started:.0f} s"
    )


def chain(made: Any, whole: Path, folder: Path, kills: int, seconds: float, draw: random.Random) -> list[int]:
    """Kill a run and its successors at random instants, then let it end."""
    steps = []
    for _ in range(kills):
        resume = any((folder / name).exists() for name in ("config.json", "plan.json", "metrics.jsonl", "checkpoints"))
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                torch.set_num_threads(1)
                use(made, folder, resume=resume)
                made.run()
                status = 0
            finally:
                os._exit(status)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (-signal.SIGKILL, 0), status
        steps.append(newest_step(folder))
    assert steps == sorted(steps)  # no kill loses a checkpoint
    assert run(made, folder, resume=folder.exists() and (folder / "config.json").exists()) == 0
    assert_same_run(whole, folder)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("chains, kills", [(3, 10)])
def test_chains_of_kills_at_random_instants(made, tmp_path, chains, kills):
    draw = random.Random(3)
    started = time.monotonic()
    assert run(made, tmp_path / "whole") == 0
    seconds = time.monotonic() - started
    for number in range(chains):
        steps = chain(made, tmp_path / "whole", tmp_path / str(number), kills, 0.4 * seconds, draw)
        print(f"chain {number}: newest step after each kill {steps}: as uninterrupted")
