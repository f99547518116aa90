#!/usr/bin/env python3
"""Throughput of ``regions extract`` against its detector alone, and whether a killed run ends as one left alone.

    python scripts/bench/extract.py --images 100

The detector alone is fed prepared batches from memory; extraction reads JPEG files, detects, and writes region shards.
Both use the same detector object and threads, turn by turn; each turn's two rates are of neighbouring minutes, and the
figure is the median of the turns' ratios. "Busy" is the share of extraction's time that the detector was at work: there,
what other programs on the machine do to both cancels. Then a run is killed (SIGKILL) after its first shard and begun
again, and the files are compared with those of a run that was not.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image

from coder_plugin.data.regions.base import Regions
from coder_plugin.data.regions.extract import Job, extract
from coder_plugin.data.regions.pictures import Pictures
from coder_plugin.detectors.base import Detector, Prepared
from coder_plugin.detectors.torchvision_ import TorchVision


def make_pictures(folder: Path, number: int) -> None:
    """JPEG files of the sizes and weight of photographs: smooth noise."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        width, height = ((500, 375), (375, 500), (640, 480))[index % 3]
        noise = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{index:05d}.jpg")


def alone(detector: Detector, batches: list[list[Prepared]]) -> float:
    """Pictures a second of the detector, fed from memory."""
    start = time.perf_counter()
    for batch in batches:
        detector.detect(batch)
    return sum(map(len, batches)) / (time.perf_counter() - start)


class Timed(Detector):
    """A detector that adds up the seconds that it works."""

    def __init__(self, detector: Detector) -> None:
        self.detector, self.seconds = detector, 0.0
        self.width, self.preprocess = detector.width, detector.preprocess

    @property
    def modules(self) -> list[torch.nn.Module]:
        return self.detector.modules

    def detect(self, pictures: Sequence[Prepared]) -> list[Regions]:
        start = time.perf_counter()
        regions = self.detector.detect(pictures)
        self.seconds += time.perf_counter() - start
        return regions


def one_run(work: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    extract(work)


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(
        b"".join(f"{path.relative_to(folder)}".encode() + path.read_bytes() for path in files)
    ).hexdigest()


def restart(work: Job, threads: int) -> tuple[int, str]:
    """Kill ``work`` once a shard is done and begin it again: the shards there at the kill, and the files' digest."""
    process = multiprocessing.get_context("spawn").Process(target=one_run, args=[work, threads])
    process.start()
    while process.is_alive() and not list(work.notes.glob("0*.json")):
        time.sleep(0.01)
    process.kill()
    process.join()
    shards = len(list(work.notes.glob("0*.json")))
    extract(work)
    return shards, digest(work.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--model", default="fasterrcnn_mobilenet_v3_large_320_fpn", help="of torchvision, random weights"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--shard-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of the detector")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    make = partial(TorchVision, model=args.model, allow_random=True)
    detector = make(device=args.device)
    print(
        f"{args.model}, {args.images} JPEG files, batches of {args.batch_size}, {args.threads} threads, {args.workers} "
        f"decoding workers, {args.device}; {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
        f"torchvision {torchvision.__version__}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_pictures(folder / "pictures", args.images)
        source = Pictures(str(folder / "pictures"))
        ready = [detector.preprocess(item.load()) for _, item in source.items()]
        batches = [ready[start : start + args.batch_size] for start in range(0, len(ready), args.batch_size)]
        job = partial(
            Job,
            source=source,
            shard_size=args.shard_size,
            batch_size=args.batch_size,
            workers=args.workers,
            device=args.device,
        )
        detector.detect(batches[0])
        ratios = []
        for turn in range(args.rounds):
            before = alone(detector, batches)
            timed = Timed(detector)
            report = extract(job(detector=lambda device, timed=timed: timed, folder=folder / "out"))
            after = alone(detector, batches)
            own, whole = (before + after) / 2, report.new / report.seconds
            ratios.append(whole / own)
            print(
                f"turn {turn + 1}: detector alone {own:.2f} images/s, extraction {whole:.2f}: ratio {ratios[-1]:.3f}, "
                f"busy {timed.seconds / report.seconds:.3f}",
                flush=True,
            )
            uninterrupted = digest(folder / "out")
            shutil.rmtree(folder / "out")
        print(f"median ratio {statistics.median(ratios):.3f} (lowest {min(ratios):.3f}, highest {max(ratios):.3f})")
        shards, found = restart(job(detector=make, folder=folder / "out"), args.threads)
        same = "equal, byte for byte" if found == uninterrupted else "DIFFERENT"
        print(f"killed after {shards} of {-(-args.images // args.shard_size)} shards and begun again: files {same}")


if __name__ == "__main__":
    main()
