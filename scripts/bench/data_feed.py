#!/usr/bin/env python3
"""Samples a second of the training loader, against a loop that only decodes and transforms the same pictures.

    python scripts/bench/data_feed.py                                   1,280 drawn JPEG pictures of 500 x 375
    python scripts/bench/data_feed.py --data 'train-{000000..000005}.tar' --samples 2000 --json data_feed.json

Peers, in the same run and in rotating order, so that other load on the machine slows all alike:

decode      Pillow and open_clip's training transform, one thread: nothing else is done
webdataset  open_clip's own pipeline (shuffle, decode, tokenize, batch) of the webdataset library, one worker

A ratio is the median over repetitions of a feed's samples per second over those of ``decode`` in the same repetition, ``best``
that of the fastest repetitions of both; 1 means that feeding costs nothing beside decoding. A feed's time includes opening the
data, starting its worker and tokenizing. CPU time counts this process and its workers, and is what to read on a busy
machine. ``normalized`` adds what the trainer does with a batch of 8-bit pictures, here on the CPU instead of on the GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from open_clip import get_tokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch.utils.data import DataLoader

from coder_plugin.data import open_source
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.pixels import eight_bit
from coder_plugin.data.shard_lists import expand

Feed = Callable[[], Iterator[int]]
FEEDS = (
    "loader, 0 workers",
    "loader, 1 worker",
    "loader, 1 worker, float",
    "loader, 1 worker, normalized",
    "webdataset, 1 worker",
)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        spec = options.data or draw_shards(Path(folder), options)
        options.samples = min(options.samples, open_source(spec).samples("draw")) // options.batch_size * options.batch_size
        feeds = {name: feed for name, feed in make_feeds(spec, options).items() if name in ("decode", *options.feeds)}
        print(machine(options))
        measured = measure(feeds, options)
    report = summary(measured, options)
    for name, row in report.items():
        print(name.ljust(28), *(f"{key} {value:.3f}" if "ratio" in key else f"{key} {value:.0f}" for key, value in row.items()))
    if options.json:
        content = {"machine": machine(options), "options": vars(options), "feeds": report, "seconds": measured}
        Path(options.json).write_text(json.dumps(content, indent=1))


def make_feeds(spec: str, options: argparse.Namespace) -> dict[str, Feed]:
    """Functions that yield the numbers of samples of batches, without end or up to one epoch."""
    transform = image_transform_v2(PreprocessCfg(size=options.size), is_train=True)
    pixels = eight_bit(transform)
    tokenizer = get_tokenizer("ViT-B-32")
    files = [item.load.args[1].read() for _, item in zip(range(options.samples), source_items(spec), strict=False)]

    def decode() -> Iterator[int]:
        for start in range(0, len(files), options.batch_size):
            batch = files[start : start + options.batch_size]
            for content in batch:
                transform(Image.open(io.BytesIO(content)).convert("RGB"))
            yield len(batch)

    def loader(transform: Any, workers: int) -> Iterator[dict[str, Any]]:
        made = TrainLoader(
            open_source(spec),
            batch_size=options.batch_size,
            transform=transform,
            tokenizer=tokenizer,
            workers=workers,
            shuffle_buffer=options.shuffle_buffer,
        )
        for batch in made.epoch(0):
            made.position()  # as the trainer does after each step
            yield batch

    def feed(transform: Any, workers: int) -> Feed:
        return lambda: (len(batch["image_id"]) for batch in loader(transform, workers))

    def normalized() -> Iterator[int]:
        for batch in loader(pixels, 1):
            yield len(pixels.normalize(batch["image"]))

    def webdataset() -> Iterator[int]:
        pipeline = wds.DataPipeline(
            wds.SimpleShardList(expand(spec)),
            wds.split_by_worker,
            wds.tarfile_to_samples(),
            wds.shuffle(options.shuffle_buffer, initial=options.shuffle_buffer // 4),
            wds.decode("pilrgb"),
            wds.rename(image="jpg;png;jpeg;webp", text="txt"),
            wds.map_dict(image=transform, text=lambda text: tokenizer(text)[0]),
            wds.to_tuple("image", "text"),
            wds.batched(options.batch_size, partial=False),
        )
        for images, _ in DataLoader(pipeline, batch_size=None, num_workers=1):
            yield len(images)

    return {
        "decode": decode,
        "loader, 0 workers": feed(pixels, 0),
        "loader, 1 worker": feed(pixels, 1),
        "loader, 1 worker, float": feed(transform, 1),
        "loader, 1 worker, normalized": normalized,
        "webdataset, 1 worker": webdataset,
    }


def source_items(spec: str) -> Iterator[Any]:
    return (item for _, item in open_source(spec).items())


def measure(feeds: dict[str, Feed], options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Samples, wall seconds and CPU seconds of each feed in each repetition; the feeds take turns."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in feeds}
    names = list(feeds)
    for repeat in range(options.repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            rows[name].append(once(feeds[name], options.samples))
    return rows


def once(feed: Feed, samples: int) -> dict[str, float]:
    wall, cpu, seen = time.perf_counter(), cpu_seconds(), 0
    stream = feed()
    for count in stream:
        seen += count
        if seen >= samples:
            break
    stream.close()  # type: ignore[attr-defined]  # ends the workers, whose time then counts
    del stream
    return {"samples": seen, "wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def summary(measured: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    report = {}
    for name, rows in measured.items():
        report[name] = {"samples": rows[0]["samples"]}
        for clock in ("wall", "cpu"):
            rates = [row["samples"] / row[clock] for row in rows]
            peers = [row["samples"] / row[clock] for row in measured["decode"]]
            report[name][f"{clock} samples/s"] = statistics.median(rates)
            report[name][f"{clock} ratio"] = statistics.median(map(float.__truediv__, rates, peers))
            report[name][f"{clock} best ratio"] = max(rates) / max(peers)
    return report


def draw_shards(folder: Path, options: argparse.Namespace) -> str:
    """Shards of JPEG pictures: smooth shapes with some noise, of about the size of photographs' files."""
    random = np.random.default_rng(0)
    width, height = options.picture
    per_shard = 200
    for shard in range(-(-options.samples // per_shard)):
        with tarfile.open(folder / f"{shard:06d}.tar", "w") as tar:
            for number in range(shard * per_shard, min((shard + 1) * per_shard, options.samples)):
                coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
                smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
                noisy = smooth + random.integers(-12, 13, (height, width, 3), dtype=np.int16)
                picture = io.BytesIO()
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(picture, "JPEG", quality=90)
                caption = f"a drawn picture of {number} shapes in many colours on a smooth ground"
                for ending, content in (("jpg", picture.getvalue()), ("txt", caption.encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(folder / "*.tar")


def machine(options: argparse.Namespace) -> str:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision", "pillow", "webdataset"))
    data = options.data or f"drawn JPEG pictures of {options.picture[0]} x {options.picture[1]}"
    return (
        f"{platform.machine()}, {os.cpu_count()} cores{load}, Python {platform.python_version()}, {versions}\n"
        f"{data}, {options.size} pixels, batch {options.batch_size}, {options.repeats} repetitions"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="shards with JPEG pictures and txt; without it pictures are drawn")
    parser.add_argument("--picture", type=int, nargs=2, default=(500, 375), help="width and height of drawn pictures [500 375]")
    parser.add_argument("--samples", type=int, default=1280, help="samples of a repetition [1280]")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="of the transformed pictures [224]")
    parser.add_argument("--shuffle-buffer", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--feeds", nargs="+", default=FEEDS, choices=FEEDS, metavar="FEED", help=f"of {', '.join(FEEDS)}")
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
