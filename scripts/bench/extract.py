#!/usr/bin/env python3
"""Does `regions extract` keep the detector busy: images a second, beside the detector alone?

    python scripts/bench/extract.py --images 100

Extraction reads JPEG files, detects, and writes region shards, with one process that decodes. The peer is `detect` on
preprocessed batches in memory: the network and the selection of regions. The detector has random weights.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from common import Results, parser
from PIL import Image

from coder_plugin.data.decode import decode_image
from coder_plugin.data.pictures import Pictures
from coder_plugin.detectors.extract import RegionsJob
from coder_plugin.detectors.torchvision_ import TorchVision

BATCH = 8


def main() -> None:
    made = parser(__doc__, repeats=5, wall=True)
    made.add_argument("--images", type=int, default=100, help="JPEG files [100]")
    made.add_argument("--model", default="fasterrcnn_mobilenet_v3_large_320_fpn", help="torchvision's detector")
    options = made.parse_args()
    results = Results("extract", options, ["torchvision"])
    detector = TorchVision(model=options.model, allow_random=True, device=options.device)
    with tempfile.TemporaryDirectory() as name:
        pictures, shards = Path(name) / "pictures", Path(name) / "shards"
        make_pictures(pictures, options.images)
        source = Pictures(str(pictures))
        prepared = [detector.preprocess(decode_image(str(pictures / item.key))) for _, item in source.items()]
        job = partial(RegionsJob, source=source, folder=shards, shard_size=24, batch_size=BATCH, workers=1)

        def alone() -> None:
            for start in range(0, len(prepared), BATCH):
                detector.detect(prepared[start : start + BATCH])

        def extraction() -> None:
            job(detector=lambda device: detector, device=options.device).run()
            shutil.rmtree(shards)

        case = f"{options.model}, {options.images} JPEG files, batches of {BATCH}"
        ratio = results.compare(case, {"detector alone": alone, "extraction": extraction})
        print(f"extraction: {1 / ratio['extraction']:.2f} of the detector's images per second")


def make_pictures(folder: Path, number: int) -> None:
    """Write JPEG files of smooth noise, with the width, height and file size of photographs."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        width, height = ((500, 375), (375, 500), (640, 480))[index % 3]
        noise = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{index:05d}.jpg")


if __name__ == "__main__":
    main()
