"""The runs of a comparison: their commands, their processes, and what they leave."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.compare.plan import Point
from coder_plugin.config import flatten, get_option
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, read_json
from coder_plugin.training.run_folder import RunFolder
from coder_plugin.training.signals import EXIT_STATUS

log = logging.getLogger(__name__)
#: What :meth:`Runs.finish` writes into a run's folder; a run that has it is never repeated.
RESULT = "result.json"
#: Lines of a failed run's log that are shown.
_LAST_LINES = 3


class Runs:
    """Runs in a folder, each in a process of its own.

    Args:
        folder: of the comparison; each run has a folder in ``runs`` below it.
        jobs: how many run at a time.
    """

    def __init__(self, folder: Path, jobs: int = 1) -> None:
        self.folder, self.jobs = folder / "runs", jobs
        #: Why a point has no result.
        self.failed: dict[Point, str] = {}
        self._results: dict[Point, dict[str, Any]] = {}
        self._running: dict[Point, tuple[subprocess.Popen[bytes], float]] = {}

    def path(self, point: Point) -> Path:
        """The folder of a point's run."""
        return self.folder / point.folder

    def command(self, point: Point) -> list[str]:
        """The words of the command that makes a run: for a shell, from any folder in which the data's paths hold."""
        if point.row.command is not None:
            return self._own_command(point)
        words: list[str] = []
        for name, value in {**point.options, "report": False, "logs": str(self.folder), "name": point.folder}.items():
            option = get_option(name)
            if option.kind is bool and value is False and option.default is False:
                continue  # its flag can only set it
            words += option.words(value)
        return ["coder-plugin", "train", *words]

    def _own_command(self, point: Point) -> list[str]:
        """Each ``{option}`` is its value, of a list with the flag, and nothing where it is not set."""
        values = {name: get_option(name).words(value)[not isinstance(value, list) :] for name, value in point.options.items()}
        values["output"] = [str(self.path(point) / "output.json")]
        values["val_data"] = [] if point.row.val_data is None else [point.row.val_data]  # not those that choose
        return shlex.split(re.sub(r"\{(\w+)\}", lambda place: shlex.join(values.get(place[1], [])), point.row.command or ""))

    def result(self, point: Point) -> dict[str, Any] | None:
        """What a run has left, or None if it is not finished, or its process has not ended.

        Returns:
            ``held_aside``: R@sum on the images that choose, after each epoch; ``seconds``: after each epoch, of training;
            ``memory_mb``; ``skipped``: training samples of the first epoch that were left out, and how many were read;
            ``zeroshot``: accuracy before, and after the best epoch, where it was measured; ``val``: of a command
            of one's own.
        """
        if point in self._running:
            return None
        if point not in self._results and (made := self._read_result(point)) is not None:
            self._results[point] = made
        return self._results.get(point)

    def _read_result(self, point: Point) -> dict[str, Any] | None:
        folder = self.path(point)
        if (folder / RESULT).is_file():
            return read_json(folder / RESULT)  # type: ignore[no-any-return]
        made = _own_result(folder) if point.row.command is not None else _train_result(folder)
        if made is None:
            return None
        with atomic_write(folder / RESULT, "w") as file:
            file.write(json.dumps(made) + "\n")
        for name in ("checkpoints", "export/last", "set-aside"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return made

    def drop_export(self, point: Point) -> None:
        """Remove the weights of a run that was not chosen."""
        shutil.rmtree(self.path(point) / "export", ignore_errors=True)

    def forget_lost(self, point: Point) -> bool:
        """Remove a run whose weights another comparison has removed, and which was not measured. Returns whether it did."""
        folder = self.path(point)
        lost = point.row.command is None and not (folder / "export").is_dir() and not (folder / "val.json").is_file()
        if lost:
            shutil.rmtree(folder)
            self._results.pop(point, None)
        return lost

    def run(self, points: Sequence[Point], on_end: Callable[[Point, float], None]) -> None:
        """Make all runs that are not finished, ``jobs`` at a time.

        A run that fails is noted in ``failed``, and the others go on.

        Args:
            points: of the runs.
            on_end: called with each point and the seconds that its process took; 0 for one that was finished.

        Raises:
            KeyboardInterrupt: after Ctrl-C, or if a run was stopped by a signal; the running ones have saved a checkpoint.
        """
        waiting: list[Point] = []
        running = self._running
        for point in points:
            if self.result(point) is None:
                waiting.append(point)
            else:
                on_end(point, 0.0)
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    point = waiting.pop(0)
                    running[point] = self._start(point), time.monotonic()
                for point, (process, begun) in list(running.items()):
                    if (status := process.poll()) is not None:
                        del running[point]
                        if status in (EXIT_STATUS, -2):
                            raise KeyboardInterrupt
                        if self.result(point) is None:
                            self.failed[point] = self._reason(point, status)
                            log.warning("%s, seed %d: %s", point, point.seed, self.failed[point])
                        on_end(point, time.monotonic() - begun)
                time.sleep(0.1 if running else 0)
        except KeyboardInterrupt:
            for process, _ in running.values():  # a terminal has sent them the signal, too
                process.terminate()  # to train a further signal is as good as one; Ctrl-C twice would end it without saving
                process.wait()
            running.clear()
            raise

    def _start(self, point: Point) -> subprocess.Popen[bytes]:
        folder = self.path(point)
        words = self.command(point)
        if point.row.command is not None:
            folder.mkdir(parents=True, exist_ok=True)
        elif (folder / "config.json").exists():
            words += ["--resume", "latest"]
        programs = {"coder-plugin": [sys.executable, "-m", "coder_plugin.cli"], "python": [sys.executable]}
        words = [*programs.get(words[0], words[:1]), *words[1:]]
        return start(words, self.folder / f"{point.folder}.log", self.jobs)

    def _reason(self, point: Point, status: int) -> str:
        log_file = self.folder / f"{point.folder}.log"
        lines = log_file.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "nothing was logged")
        return f"the run ended with status {status}: {last.strip()[:300]} (see {log_file})"


def start(words: Sequence[str], log_file: Path, jobs: int = 1) -> subprocess.Popen[bytes]:
    """Start a process that writes into a log file, and that ends with this one.

    Several ``jobs`` share out the cores: if each started a thread for every core, steps would take several times as long.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} if jobs > 1 else {}
    with log_file.open("ab") as output:
        return subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**threads, **os.environ},
            preexec_fn=partial(_die_with, os.getpid()) if sys.platform == "linux" else None,
        )  # fmt: skip


def _die_with(parent: int) -> None:
    """In a new process on Linux: the kernel kills it when its parent ends, however that ends."""
    kill, pdeathsig = 9, 1
    ctypes.CDLL(None).prctl(pdeathsig, kill)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _train_result(folder: Path) -> dict[str, Any] | None:
    """The result of ``coder-plugin train``."""
    run = RunFolder.read(folder, must_exist=False)
    if run.manifest is None or not run.results("best"):
        return None
    options = flatten(run.manifest["config"])
    step, steps = run.manifest["step"], options.get("max_steps")
    if not (run.manifest["epoch"] >= options["epochs"] or (steps is not None and step >= steps)):
        return None
    curve = [each for each in run.evaluations if each["step"] > 0 and "rsum" in each]
    seconds = run.manifest.get("seconds") or 0.0
    zeroshot = [each["zeroshot_top1"] for each in run.evaluations if "zeroshot_top1" in each]
    best = max(range(len(curve)), key=lambda number: curve[number]["rsum"])
    lost = ("epoch/skipped_samples", "epoch/read_samples")
    skipped = [[each[name] for name in lost] for each in run.steps if lost[0] in each]
    return {
        "held_aside": [round(each["rsum"], 3) for each in curve],
        "before": next((each["rsum"] for each in run.evaluations if each["step"] == 0 and "rsum" in each), None),
        "seconds": [round(seconds * each["step"] / max(1, step), 2) for each in curve],
        "memory_mb": run.manifest.get("memory_mb"),
        **({"skipped": skipped[0]} if skipped else {}),
        **({"zeroshot": [zeroshot[0], curve[best].get("zeroshot_top1")]} if len(zeroshot) > 1 else {}),
    }


def _own_result(folder: Path) -> dict[str, Any] | None:
    """The result of a command of one's own, checked."""
    path = folder / "output.json"
    if not path.is_file():
        return None
    made = read_json(path, most=1 << 30)
    if not isinstance(made, dict) or not made.get("held_aside") or not isinstance(made.get("val"), dict):
        raise CoderError(f"{path}: it must hold held_aside, a list of R@sum, and val, with ranks: see docs/compare.md")
    ranks = {name: made["val"].get(name) for name in ("i2t_ranks", "t2i_ranks", "image_of_text")}
    if missing := next((name for name, each in ranks.items() if not isinstance(each, list)), None):
        raise CoderError(f"{path}: val has no list {missing!r}")
    epochs = len(made["held_aside"])
    return {
        "held_aside": made["held_aside"], "before": made.get("before"), "memory_mb": made.get("memory_mb"),
        "seconds": made.get("seconds") or [0.0] * epochs, "val": {"images": None, **ranks},
    }  # fmt: skip
