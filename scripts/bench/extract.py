#!/usr/bin/env python3
"""Throughput of ``regions extract`` against the detector alone, and a test that a killed run resumes to the same files.

    python scripts/bench/extract.py --images 100

"Detector alone" is ``detect`` on preprocessed batches in memory: the network and the selection of regions (suppression,
choice, scaling of boxes, copies to the host), without file access. Printed first: the share of the selection in that time,
and the time of suppression and choice against torchvision's ``nms`` called class by class, at the sizes of the C4 detector
and of torchvision's detectors.

Extraction reads JPEG files, detects, and writes region shards. Extraction and detector alone take turns, with the same
detector and number of threads. The result is the median of the ratios of all turns. "Busy" is the share of extraction's time
that is spent in the detector; other load on the machine slows both parts alike. Finally a run is killed (SIGKILL) after its
first shard and started again, and its files are compared with those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import Results, add_options
from PIL import Image
from torchvision.ops import nms

from coder_plugin.data.decode import decode_image
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.regions.base import Regions
from coder_plugin.detectors.base import Detector, Prepared
from coder_plugin.detectors.extract import RegionsJob
from coder_plugin.detectors.select import Choice, select
from coder_plugin.detectors.torchvision_ import TorchVision


def make_pictures(folder: Path, number: int) -> None:
    """Write JPEG files of smooth noise, with the width, height and file size of photographs."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        width, height = ((500, 375), (375, 500), (640, 480))[index % 3]
        noise = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{index:05d}.jpg")


def detector_rate(detector: Detector, batches: list[list[Prepared]]) -> float:
    """Images per second of the detector alone, on batches in memory."""
    start = time.perf_counter()
    for batch in batches:
        detector.detect(batch)
    return sum(map(len, batches)) / (time.perf_counter() - start)


def selection_share(detector: TorchVision, batches: list[list[Prepared]]) -> float:
    """Share of the time of ``detect`` that is spent on selecting regions, with the device synchronised before and after."""
    seconds = 0.0
    select_regions = detector._regions

    def now() -> float:
        if detector.device.type == "cuda":
            torch.cuda.synchronize(detector.device)
        return time.perf_counter()

    def timed(*arguments: Any) -> Regions:
        nonlocal seconds
        start = now()
        regions = select_regions(*arguments)
        seconds += now() - start
        return regions

    with patch.object(detector, "_regions", timed):
        start = now()
        for batch in batches:
            detector.detect(batch)
        return seconds / (now() - start)


def selection_and_nms(
    proposals: int, classes: int, *, boxes_per_class: bool, device: str, rounds: int = 5
) -> tuple[float, float]:
    """Median milliseconds of ``select`` and of ``nms`` class by class. A third of the proposals have one confident class."""
    draw = torch.Generator().manual_seed(0)
    corners = torch.rand(proposals, classes if boxes_per_class else 1, 2, generator=draw) * 600
    boxes = torch.cat([corners, corners + 20 + 250 * torch.rand(corners.shape, generator=draw)], -1).to(device)
    logits = torch.randn(proposals, classes + 1, generator=draw)
    logits[:, 0] += 8  # the background
    logits[: proposals // 3].scatter_add_(
        1, torch.randint(1, 13, (proposals // 3, 1), generator=draw), torch.full((proposals // 3, 1), 10.0)
    )
    scores = logits.softmax(-1)[:, 1:].to(device)

    def nms_class_by_class() -> None:
        for number in range(classes):
            nms(boxes[:, number if boxes_per_class else 0], scores[:, number], 0.3)

    def median(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    candidates = boxes if boxes_per_class else boxes[:, 0]
    return median(lambda: select(scores, candidates, Choice())), median(nms_class_by_class)


class Timed(Detector):
    """A detector that adds up the seconds spent in ``detect``."""

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


def run_extraction(job: RegionsJob, threads: int) -> None:
    torch.set_num_threads(threads)
    job.run()


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(
        b"".join(f"{path.relative_to(folder)}".encode() + path.read_bytes() for path in files)
    ).hexdigest()


def kill_and_resume(job: RegionsJob, threads: int) -> tuple[int, str]:
    """Kill a run after its first shard and start it again.

    Returns:
        The number of shards that were complete when it was killed, and the digest of all files at the end.
    """
    process = multiprocessing.get_context("spawn").Process(target=run_extraction, args=[job, threads])
    process.start()
    while process.is_alive() and not list(job.path(0).parent.glob("0*.json")):
        time.sleep(0.01)
    process.kill()
    process.join()
    shards = len(list(job.path(0).parent.glob("0*.json")))
    job.run()
    return shards, digest(job.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100, help="JPEG files [100]")
    parser.add_argument(
        "--model", default="fasterrcnn_mobilenet_v3_large_320_fpn", help="torchvision detector, with random weights"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="batch size [8]")
    parser.add_argument("--shard-size", type=int, default=24, help="images per shard [24]")
    parser.add_argument("--workers", type=int, default=1, help="processes that decode images [1]")
    add_options(parser, repeats=5, threads=max(1, (os.cpu_count() or 2) // 2), without=("limit", "clock"))
    args = parser.parse_args()
    results = Results("extract", args, ["torchvision"])
    make_detector = partial(TorchVision, model=args.model, allow_random=True)
    detector = make_detector(device=args.device)
    case = f"{args.model}, {args.images} JPEG files, batches of {args.batch_size}, {args.workers} decoding workers"
    print(f"{case}; {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_pictures(folder / "pictures", args.images)
        source = Pictures(str(folder / "pictures"))
        prepared = [detector.preprocess(decode_image(str(folder / "pictures" / item.key))) for _, item in source.items()]
        batches = [prepared[start : start + args.batch_size] for start in range(0, len(prepared), args.batch_size)]
        make_job = partial(
            RegionsJob,
            source=source,
            shard_size=args.shard_size,
            batch_size=args.batch_size,
            workers=args.workers,
            device=args.device,
        )
        detector.detect(batches[0])
        share = selection_share(detector, batches)
        print(f"detector alone: network and selection of regions; the selection takes {share:.1%} of its time")
        for proposals, classes, per_class in ((300, 1600, False), (1000, 90, True)):
            ours, peer = selection_and_nms(proposals, classes, boxes_per_class=per_class, device=args.device)
            print(
                f"36 of {proposals} proposals, {classes} classes: suppression and choice {ours:.1f} ms, torchvision's nms "
                f"class by class {peer:.1f} ms: ratio {ours / peer:.3f}",
                flush=True,
            )
        ratios = []
        for turn in range(args.repeats):
            before = detector_rate(detector, batches)
            timed = Timed(detector)
            start = time.perf_counter()
            images = make_job(detector=lambda device, timed=timed: timed, folder=folder / "out").run().images
            seconds = time.perf_counter() - start
            alone, extraction = (before + detector_rate(detector, batches)) / 2, images / seconds
            ratios.append(extraction / alone)
            print(
                f"turn {turn + 1}: detector alone {alone:.2f} images/s, extraction {extraction:.2f}: ratio {ratios[-1]:.3f}, "
                f"busy {timed.seconds / seconds:.3f}",
                flush=True,
            )
            uninterrupted = digest(folder / "out")
            shutil.rmtree(folder / "out")
        results.write({"case": case, "peer": "detector alone", "ratio": statistics.median(ratios), "ratios": ratios})
        print(f"median ratio {statistics.median(ratios):.3f} (lowest {min(ratios):.3f}, highest {max(ratios):.3f})")
        shards, resumed = kill_and_resume(make_job(detector=make_detector, folder=folder / "out"), args.threads)
        comparison = "equal, byte for byte" if resumed == uninterrupted else "DIFFERENT"
        print(f"killed after {shards} of {-(-args.images // args.shard_size)} shards and resumed: files {comparison}")


if __name__ == "__main__":
    main()
