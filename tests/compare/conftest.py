"""Comparisons whose runs take no time: what a run of ``coder-plugin train`` would leave is written at once."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coder_plugin.cli import build_parser
from coder_plugin.cli.flags import read_flags
from coder_plugin.compare import measure, page, run, runs
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training import checkpoint

IMAGES, CAPTIONS = 80, 2
write_comparison = page.write_comparison
parser = functools.cache(build_parser)


class World:
    """What training would come to.

    Attributes:
        gain: of a loss, in units of the images' spread of difficulty. best: its best learning rate.
        seconds: of a run. estimate: of a run, as the probe says; None: ``seconds``.
        trained: names of the runs that were trained, in their order.
        skips: training samples that each run leaves out. warnings: of a loss's set-up, as the probe says.
        of_another: which row is measured on other data: "mine" (a command of one's own; "fewer": on fewer images), or a loss.
        stop_after: raise KeyboardInterrupt after so many processes.
        now: seconds since the beginning. jobs: among how many the processes shared the cores.
    """

    def __init__(self) -> None:
        self.gain = {"clip": 0.0, "dcl": 0.6}
        self.best = {"clip": 1e-4, "dcl": 1e-4}
        self.seconds = {"clip": 100.0, "dcl": 100.0}
        self.estimate: float | None = None
        self.trained: list[str] = []
        self.fails: set[str] = set()
        self.warnings: dict[str, list[str]] = {}
        self.skips = 0
        self.stop_after: int | None = None
        self.of_another = ""
        self.jobs: set[int] = set()
        self.now = 0.0
        self.measured: list[str] = []

    def start(self, words: Sequence[str], log_file: Path, jobs: int = 1) -> Any:
        self.jobs.add(jobs)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        if self.stop_after is not None:
            if self.stop_after == 0:
                raise KeyboardInterrupt
            self.stop_after -= 1
        if words[0] == "mine":  # a command of one's own
            made = {"held_aside": [300.0], "val": {**self.ranks(0.9, 5), "images": "its own name of them"}}
            if self.of_another == "mine":
                made["val"]["image_of_text"][-1] = 0
            if self.of_another == "fewer":
                made["val"]["i2t_ranks"].pop()
            Path(words[1]).write_text(json.dumps(made))
            return Process(self, self.now + 1, lambda: 0)
        if "coder_plugin.compare.probe" in words:
            options = json.loads(Path(words[3]).read_text())
            seconds = self.estimate or self.seconds[options["loss"]]
            warnings = self.warnings.get(options["loss"], [])
            cost = {"seconds": seconds, "steps": 90, "step": 1.0, "evaluation": 1.0, "disk": 5e6, "warnings": warnings}
            Path(words[4]).write_text(json.dumps(cost))
            return Process(self, 0.0, lambda: 0)
        options = read_flags(parser().parse_args(words[3:]))
        end = self.now + self.seconds[options["loss"]]
        return Process(self, end, lambda: self.train(options, log_file))

    def train(self, options: dict[str, Any], log_file: Path) -> int:
        config = resolve_config(options)
        if config.loss.expression in self.fails:
            log_file.write_text("coder-plugin: error: the loss is not finite\n")
            return 2
        self.trained.append(options["name"])
        folder = Path(options["logs"]) / options["name"]
        (folder / "export" / "best").mkdir(parents=True)
        rate = np.log10(options.get("lr", 1e-4) / self.best[options["loss"]])
        score = 300 + 50 * self.gain[options["loss"]] - 20 * abs(rate) + options["seed"]
        curve = [score - 9, score, score - 3]
        records = [{"step": 10 * epoch, "val/epoch": epoch, "val/rsum": value} for epoch, value in enumerate([30.0, *curve])]
        if self.skips:
            records.append({"step": 9, "epoch/skipped_samples": self.skips, "epoch/read_samples": 1234, "epoch": 0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        best = {"rsum": score, "epoch": 2, "step": 20}
        manifest = {"step": 30, "epoch": 3, "seconds": 90.0, "memory_mb": 2048, "best": best, "last": best}
        manifest["config"] = config.with_options(epochs=3).to_dict()
        checkpoint.save(folder / "checkpoints", "step_00000030", manifest=manifest, common={})
        return 0

    def of_run(self, folder: Path, val_data: str | None, options: dict[str, Any]) -> dict[str, Any]:
        self.measured.append(folder.name)
        ranks = self.ranks(self.gain[options["loss"]], options["seed"] + 17 * len(options["loss"]))
        return {**ranks, "images": "others"} if options["loss"] == self.of_another else ranks

    def ranks(self, gain: float, seed: int) -> dict[str, Any]:
        difficulty = np.random.default_rng(0).normal(size=IMAGES)
        noise = np.random.default_rng(seed + 1).normal(scale=0.3, size=(CAPTIONS + 1, IMAGES))
        ranks = np.exp(np.clip(2.5 - 2 * (difficulty + noise + gain), -9, 4)).astype(int)
        owner = np.repeat(np.arange(IMAGES), CAPTIONS)
        return {
            "images": "same", "i2t_ranks": ranks[0].tolist(), "t2i_ranks": ranks[1:].T.ravel().tolist(),
            "image_of_text": owner.tolist(),
        }  # fmt: skip


class Process:
    """A process that ends at a time."""

    def __init__(self, world: World, end: float, work: Callable[[], int]) -> None:
        self.world, self.end, self.work = world, end, work
        self.status: int | None = None

    def poll(self) -> int | None:
        if self.status is None and self.world.now >= self.end:
            self.status = self.work()
        return self.status

    def wait(self) -> int:
        self.world.now = max(self.world.now, self.end)
        return self.poll() or 0

    def send_signal(self, number: int) -> None:
        self.status = 75


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    def sleep(seconds: float) -> None:
        made.now += 1.0

    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=sleep, time=lambda: made.now)
    for module in (run, runs):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "start", made.start)
    monkeypatch.setattr(page, "write_comparison", lambda *_: "not written")
    monkeypatch.setattr(measure, "of_run", made.of_run)
    monkeypatch.setattr(measure, "before", lambda *_: made.ranks(-1.0, 99))
    return made


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``coder-plugin compare`` on two rows of the built-in scenes; returns what it prints."""
    from coder_plugin.cli import main

    def compare(text: str = "", *, output: str = "out", status: int = 0, rows: str = "--loss clip dcl") -> str:
        words = [*shlex.split(rows), "--hold-aside", "50", "--output", str(tmp_path / output), *shlex.split(text)]
        given = main(["compare", *words])
        printed = capsys.readouterr()
        assert given == status, printed.err
        return printed.out if status == 0 else printed.err

    return compare
