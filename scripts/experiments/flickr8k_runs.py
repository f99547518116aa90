"""How flickr8k.py makes a point's model: the command, what has to be there before it, and what it leaves."""

from __future__ import annotations

import json
import shlex
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flickr8k_plan import Plan, Point

HERE = Path(__file__).resolve().parent


def make_run(plan: Plan, point: Point) -> Run:
    """The run that makes a point's model."""
    row = plan.row(point.setting, point.row)
    if "mine" in row and plan.base(point.setting) is None:
        raise SystemExit(f"row {point.row} mines with the model of a base, and setting {point.setting} has none")
    if "wise_ft" in row:
        return Interpolation(plan, point)
    return Script(plan, point) if "script" in plan.settings[point.setting] else Training(plan, point)


@dataclass(frozen=True)
class Run(ABC):
    """What makes a point's model, in a folder of its own below the work folder."""

    plan: Plan
    point: Point

    @property
    def folder(self) -> str:
        """Of the run, in the work folder."""
        return f"runs/{self.plan.size}/{self.point.setting}/{self.point.name}"

    @property
    def needs(self) -> Point | None:
        """The point whose model has to be there before."""
        return None

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """For a reader: in the work folder, with ``coder-plugin`` or ``python`` as its first word."""

    @property
    def mining(self) -> list[str] | None:
        """The command that writes the hard negatives that a run trains with, if it does: its last word is their file."""
        return None

    def arguments(self, threads: int) -> list[str]:
        """What ``python`` runs: the command, and options that change no result."""
        return ["-m", "coder_plugin.cli", *self.command[1:], "--workers", "0" if self.plan.size == "smoke" else "1"]

    def prepare(self, folder: Path) -> None:
        """Make the parent of a run's folder. A kind that cannot go on with what a stopped run has left removes it."""
        folder.parent.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def measured(self, folder: Path) -> dict[str, Any]:
        """Held-out R@sum after each epoch, the best epoch, and what the last step logged."""

    def loss_flags(self) -> tuple[list[str], list[str]]:
        """Flags of the setting and the row, and the loss with its options and its rate."""
        row, setting = self.plan.row(self.point.setting, self.point.row), self.plan.settings[self.point.setting]
        flags = [*setting["flags"], *shlex.split(row.get("flags", ""))]
        if kwargs := [each for of in (setting, row) for each in of.get("model_kwargs", "").split()]:
            flags += ["--model-kwargs", *kwargs]
        options = [f"{key}={value}" for key, value in self.point.options]
        return flags, [row["loss"], *(["--set", *options] if options else []), "--lr", f"{self.point.lr:g}"]


class Training(Run):
    """``coder-plugin train``, from the model of the setting's base if it has one."""

    @property
    def needs(self) -> Point | None:
        return self.plan.base(self.point.setting)

    @property
    def command(self) -> list[str]:
        flags, loss = self.loss_flags()
        run = ["--seed", str(self.point.seed), "--name", self.point.name, "--logs", str(Path(self.folder).parent)]
        if self.needs is not None:
            run += ["--pretrained", f"{make_run(self.plan, self.needs).folder}/export/best"]
        if self.mining is not None:
            run += ["--negatives-file", self.mining[-1]]
        return ["coder-plugin", "train", *flags, "--loss", *loss, *run]

    @property
    def mining(self) -> list[str] | None:
        if (options := self.plan.row(self.point.setting, self.point.row).get("mine")) is None or self.needs is None:
            return None
        flags = self.plan.settings[self.point.setting]["flags"]
        data, output = flags[flags.index("--train-data") + 1], f"{Path(self.folder).parent}/{self.point.row}.tsv"
        base = make_run(self.plan, self.needs).folder
        return ["coder-plugin", "mine", base, "--data", data, *shlex.split(options), "--output", output]

    def arguments(self, threads: int) -> list[str]:
        return [*super().arguments(threads), "--no-report"]

    def measured(self, folder: Path) -> dict[str, Any]:
        held_out, last = {}, {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if "val/rsum" in record:
                held_out[record["val/epoch"]] = record["val/rsum"]
            elif "loss" in record:
                last = record
        return by_epoch([held_out[epoch] for epoch in sorted(held_out) if epoch > 0], last)


class Interpolation(Run):
    """Weights on the way from the base to a fine-tuned model (WiSE-FT), made by ``coder-plugin eval``."""

    @property
    def needs(self) -> Point:
        """The fine-tuned point, of the same seed."""
        return replace(self.point, row=self.plan.row(self.point.setting, self.point.row)["like"])

    @property
    def command(self) -> list[str]:
        flags, row = self.plan.settings[self.point.setting]["flags"], self.plan.row(self.point.setting, self.point.row)
        held_out, tuned = flags[flags.index("--val-data") + 1], make_run(self.plan, self.needs).folder
        save = ["--wise-ft-save", str(row["wise_ft"]), self.folder]
        return ["coder-plugin", "eval", tuned, "--val-data", held_out, *save, "--json", f"{self.folder}.json"]

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        shutil.rmtree(folder, ignore_errors=True)  # it may be half of an export

    def measured(self, folder: Path) -> dict[str, Any]:
        record = json.loads(Path(f"{folder}.json").read_text())
        return by_epoch([row["rsum"] for row in record if ", wise-ft " in row["name"]], {})


class Script(Run):
    """The setting's script, which also measures the validation split, and the cache's test split, at the best epoch."""

    @property
    def command(self) -> list[str]:
        flags, loss = self.loss_flags()
        script = f"scripts/experiments/{self.plan.settings[self.point.setting]['script']}"
        run = ["--seeds", str(self.point.seed), "--json", f"{self.folder}.json"]
        return ["python", script, *flags, "--losses", *loss, *run]

    def arguments(self, threads: int) -> list[str]:
        return [str(HERE / self.plan.settings[self.point.setting]["script"]), *self.command[2:], "--threads", str(threads)]

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        folder.mkdir(exist_ok=True)
        Path(f"{folder}.json").unlink(missing_ok=True)

    def measured(self, folder: Path) -> dict[str, Any]:
        record = json.loads(Path(f"{folder}.json").read_text())
        held_out = [record["results"][epoch]["rsum"] for epoch in sorted(record["results"], key=int) if epoch != "0"]
        reported = {"val": record["report"], **({"test": record["test"]} if "test" in record else {})}
        for figures in reported.values():
            figures["scores"] = image_scores(figures.pop("i2t_ranks"), figures.pop("t2i_ranks"))
            for name in ("instance", "concept"):
                if f"{name} rsum" in figures:
                    figures[f"{name} level"] = figures.pop(f"{name} rsum")
        last = {name: end for name, (_, end) in record["losses"].items()} | record["results"][str(len(held_out))]
        return {**by_epoch(held_out, last), **reported}


def by_epoch(scores: list[float], last_step: dict[str, Any]) -> dict[str, Any]:
    """Held-out R@sum after each epoch, the best epoch, and what the last step logged."""
    held_out = [round(score, 2) for score in scores]
    return {"held_out": held_out, "best_epoch": held_out.index(max(held_out)) + 1, "last_step": last_step}


def image_scores(image_ranks: list[int], caption_ranks: list[int]) -> list[float]:
    """What each image adds to R@sum, in points: its own hits, and those of its captions; their mean is R@sum.

    Every image must have as many captions as the others, in the order of the images.
    """
    captions = len(caption_ranks) // len(image_ranks)
    own = [caption_ranks[number * captions : (number + 1) * captions] for number in range(len(image_ranks))]

    def share(ranks: list[int]) -> float:
        return sum(rank < k for rank in ranks for k in (1, 5, 10)) / len(ranks)

    return [round(100 * (share([rank]) + share(ranks)), 4) for rank, ranks in zip(image_ranks, own, strict=True)]
