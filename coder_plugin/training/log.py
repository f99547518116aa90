"""A run's log: console lines, ``metrics.jsonl`` and trackers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from coder_plugin import distributed
from coder_plugin.config import TrainConfig
from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.files import atomic_write
from coder_plugin.progress import duration
from coder_plugin.terminal import echo, plural
from coder_plugin.training.metrics_file import append_line
from coder_plugin.training.trackers import start_tracker, tracker_names

_log = logging.getLogger(__name__)


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    numbers = {"python": sys.version.split()[0]}
    for name in ("coder-plugin", "torch", "open_clip_torch", "timm", "transformers", "accelerate", "webdataset"):
        with contextlib.suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers


def machine(device: torch.device) -> str:
    """The hardware of one rank, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} of {platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def peak_memory(device: torch.device) -> int:
    """The most memory so far in MiB: of tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most >> (20 if sys.platform == "darwin" else 10)


class RunLog:
    """Writes a run's files and console lines on rank 0, and nothing on the others."""

    def __init__(self, folder: Path, accelerator: Any, config: TrainConfig) -> None:
        self.folder, self.accelerator, self.config = folder, accelerator, config
        self.main = distributed.rank() == 0
        self.warned: set[str] = set()

    def say(self, text: str) -> None:
        if self.main:
            with self._optional("a line on standard output"):
                echo(text)

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write ``plan.json`` and ``config.json``. Call it on rank 0."""
        for name, content in (("plan", plan), ("config", self.config.to_dict())):
            with atomic_write(self.folder / f"{name}.json", "w") as file:
                file.write(json.dumps(content, indent=2))

    def start(self, plan: Mapping[str, Any]) -> None:
        if self.main:
            machine_name = "CPU" if plan["device"] == "cpu" else plan["machine"]
            self.say(
                f"run {plan['run']}: {plan['objective']} on {plan['model']}, {plan['trainable']:,} of "
                f"{plan['parameters']:,} parameters are trained; {plural(plan['epochs'], 'epoch')} of "
                f"{plural(plan['steps per epoch'], 'step')}, {plan['batch']['global per step']} pairs per step; "
                f"{plan['precision']}, {plural(plan['ranks'], 'process')}, {machine_name}"
            )
            if plan["validation data"] is None:
                self.say("no validation data: recall is not measured (--val-data)")
            for head, notes in plan["notes"].items():
                for note in notes:
                    self.say(f"{head}: {note}")
            run = self.config.run
            flat = {k: v for k, v in self.config.to_flat().items() if isinstance(v, (int, float, str, bool))}
            for name in tracker_names(run.report_to):
                with self._optional(f"the settings for {name}"):
                    start_tracker(self.accelerator, name, self.folder, project=run.wandb_project_name, config=flat)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for tracker in self.accelerator.trackers:
                with self._optional(f"the end of the log for {tracker.name}"):
                    tracker.finish()

    def write(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """One record in ``metrics.jsonl`` and in the trackers. What cannot be written is reported once and never ends a run."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float)) and math.isfinite(value)}
        if self.main:
            with self._optional("a row of metrics.jsonl"):
                append_line(self.folder / "metrics.jsonl", json.dumps({"step": step, **numbers}))
        for tracker in self.accelerator.trackers:
            with self._optional(f"a row for {tracker.name}"):
                tracker.log(numbers, step=step)

    @contextlib.contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # trackers raise of any kind
            if what not in self.warned:
                self.warned.add(what)
                _log.warning("%s could not be written (%s): the run goes on; further ones are not reported", what, error)

    def warn(self, text: str | None) -> None:
        if self.main and text is not None:
            _log.warning("%s", text)

    def bad_samples(self, bad: BadSamples, *, epoch: int, step: int) -> None:
        """At the end of an epoch, counted from 0: the samples that all ranks left out, by kind."""
        if self.main and len(bad):
            _log.warning("%s: epoch %d: %s", bad.name, epoch + 1, bad)
        if len(bad):
            kinds = {f"skipped_samples/{kind}": count for kind, count in bad.kinds.items()}
            counts = {"read_samples": bad.read, "skipped_samples": len(bad), **kinds}
            self.write({f"epoch/{name}": count for name, count in counts.items()} | {"epoch": epoch}, step=step)


class StepLines:
    """Prints a line every ``--log-every-n-steps`` steps of an epoch: losses, speed, and the time that the run still takes.

    Args:
        log: prints the lines.
        epoch: counts from 0; what is printed counts from 1.
        done, total: steps of the epoch.
        left: training steps of the whole run; evaluations are not counted.
    """

    def __init__(self, log: RunLog, epoch: int, done: int, total: int, left: int) -> None:
        self.log, self.epoch, self.done, self.total, self.left = log, epoch, done, total, left
        self.since, self.steps, self.waited = time.perf_counter(), 0, 0.0

    def update(self, metrics: Mapping[str, float], waited: float, *, ends: bool = False) -> None:
        """A step is done; ``ends``: the epoch with it, perhaps before ``total``."""
        self.done, self.left = self.done + 1, self.left - 1
        self.steps, self.waited = self.steps + 1, self.waited + waited
        config = self.log.config
        if self.done % config.run.log_every_n_steps and self.done != self.total and not ends:
            return
        losses = {key: value for key, value in metrics.items() if key.endswith("loss") and not key.startswith("share/")}
        seconds = max(time.perf_counter() - self.since, 1e-9)
        self.log.say(
            f"epoch {self.epoch + 1}/{config.optim.epochs} step {self.done}/{self.total}: "
            f"{', '.join(f'{key} {value:.4f}' for key, value in losses.items())}; {self.steps / seconds:.2f} steps/s, "
            f"{100 * self.waited / seconds:.0f} % waiting for data, {duration(max(self.left, 0) * seconds / self.steps)} left"
        )
        below = [name for name, value in losses.items() if value < 0 and "dcl" in name]
        if below and "below zero" not in self.log.warned:
            self.log.warned.add("below zero")
            self.log.say(
                f"{' and '.join(below)} can be negative (minimum -1.39 times its weight): DCL's term of the positive, "
                "-log(1 + S) in both directions, falls to 2 * -log 2 as pairs match"
            )
        self.since, self.steps, self.waited = time.perf_counter(), 0, 0.0
