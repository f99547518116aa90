#!/usr/bin/env python3
"""Samples a second of the training loader, against a loop that only decodes and transforms the same pictures.

    python scripts/bench/data_feed.py                                   1,280 drawn JPEG pictures of 500 x 375
    python scripts/bench/data_feed.py --data 'train-{000000..000005}.tar' --clock cpu --json data_feed.jsonl

Peers, in the same run and in rotating order, so that other load on the machine slows all alike:

decode         Pillow and the loader's own 8-bit transform, one thread: nothing else is done
decode, float  Pillow and open_clip's training transform: the peer of feeds of float32 batches
webdataset     open_clip's own pipeline (shuffle, decode, tokenize, batch) of the webdataset library, one worker

The ratio of a feed is its time over that of the decoding loop with the same transform; ``rate_ratio`` is the same of samples
per second, so 1 means that feeding costs nothing beside decoding. A feed's time includes opening the data, starting its worker
and tokenizing.
``--clock cpu`` counts this process and its workers, and is what to read on a busy machine. ``normalized`` adds what the
trainer does with a batch of 8-bit pictures, here on the CPU instead of on the GPU.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import webdataset as wds
from common import Results, Step, add_options, measure, ratio
from open_clip import get_tokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch.utils.data import DataLoader

from coder_plugin.data import open_source
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.pixels import eight_bit
from coder_plugin.data.shard_lists import expand

Feed = Callable[[], Iterator[int]]
#: Loops that only decode: with the transform of the 8-bit feeds, and with that of the others.
DECODE = ("decode", "decode, float")
FLOATS = ("loader, 1 worker, float", "loader, 1 worker, normalized", "webdataset, 1 worker")
FEEDS = (
    "loader, 0 workers",
    "loader, 1 worker",
    "loader, 1 worker, float",
    "loader, 1 worker, normalized",
    "webdataset, 1 worker",
)


def main() -> None:
    options = arguments()
    results = Results("data_feed", options, ["open_clip_torch", "torchvision", "pillow", "webdataset"])
    with tempfile.TemporaryDirectory() as folder:
        spec = options.data or draw_shards(Path(folder), options)
        samples = min(options.samples, open_source(spec).samples("draw")) // options.batch_size * options.batch_size
        options.samples = samples
        feeds = {name: feed for name, feed in make_feeds(spec, options).items() if name in (*DECODE, *options.feeds)}
        steps = {name: step(name, feed, samples) for name, feed in feeds.items()}
        times = measure(steps, options.device, options.repeats, warm_up=0, clock=options.clock, limit=options.limit)
    data = options.data or f"drawn JPEG pictures of {options.picture[0]} x {options.picture[1]}"
    case = f"{samples} samples of {data}, {options.size} pixels, batch {options.batch_size}"
    rates = {name: samples / median(seconds) for name, seconds in times.items()}
    peers = {name: DECODE[1] if name in FLOATS else DECODE[0] for name in times if name not in DECODE}
    ratios = {name: ratio(times, peer, name) for name, peer in peers.items()}
    results.compare(case, times, peer=DECODE[0], second=DECODE[1], samples=samples, samples_per_second=rates, rate_ratio=ratios)
    for name, value in ratios.items():
        print(f"{name:<28} {rates[name]:8.0f} samples/s, {value:.3f} of {peers[name]}")


def make_feeds(spec: str, options: argparse.Namespace) -> dict[str, Feed]:
    """Functions that yield the numbers of samples of batches, without end or up to one epoch."""
    transform = image_transform_v2(PreprocessCfg(size=options.size), is_train=True)
    pixels = eight_bit(transform)
    tokenizer = get_tokenizer("ViT-B-32")
    files = [item.load.args[1].read() for _, item in zip(range(options.samples), source_items(spec), strict=False)]

    def decode(transform: Any) -> Iterator[int]:
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
        DECODE[0]: lambda: decode(pixels),
        DECODE[1]: lambda: decode(transform),
        "loader, 0 workers": feed(pixels, 0),
        "loader, 1 worker": feed(pixels, 1),
        "loader, 1 worker, float": feed(transform, 1),
        "loader, 1 worker, normalized": normalized,
        "webdataset, 1 worker": webdataset,
    }


def source_items(spec: str) -> Iterator[Any]:
    return (item for _, item in open_source(spec).items())


def step(name: str, feed: Feed, samples: int) -> Step:
    """A call that takes so many samples from a feed."""

    def take() -> None:
        seen, stream = 0, feed()
        for count in stream:
            seen += count
            if seen >= samples:
                break
        stream.close()  # type: ignore[attr-defined]  # ends the workers, whose time then counts
        if seen != samples:
            raise SystemExit(f"{name} gave {seen} samples, not {samples}")

    return take


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="shards with JPEG pictures and txt; without it pictures are drawn")
    parser.add_argument("--picture", type=int, nargs=2, default=(500, 375), help="width and height of drawn pictures [500 375]")
    parser.add_argument("--samples", type=int, default=1280, help="samples of a repetition [1280]")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="of the transformed pictures [224]")
    parser.add_argument("--shuffle-buffer", type=int, default=200)
    parser.add_argument("--feeds", nargs="+", default=FEEDS, choices=FEEDS, metavar="FEED", help=f"of {', '.join(FEEDS)}")
    add_options(parser, repeats=5, threads=1, without=("device",))
    return parser.parse_args()


if __name__ == "__main__":
    main()
