#!/usr/bin/env python3
"""What does feeding cost beside decoding: samples a second of the training loader, and of webdataset's own pipeline?

    python scripts/bench/data_feed.py                                            1,280 drawn JPEG pictures of 500 x 375
    python scripts/bench/data_feed.py --wall --data 'train-{000000..000005}.tar'

The peers only decode and transform the same pictures, in one thread: *decode* by the loader's 8-bit transform, *decode, float*
by open_clip's training transform, which webdataset's pipeline (as open_clip builds it) has here. Both feeds have one worker;
their time includes opening the data, starting the worker and tokenizing.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
from common import Results, Step, parser
from open_clip import get_tokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch.utils.data import DataLoader

from coder_plugin.data import open_source
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.pixels import eight_bit
from coder_plugin.data.shard_lists import expand


def main() -> None:
    made = parser(__doc__, repeats=3)
    made.add_argument("--data", help="shards with JPEG pictures and txt; without it pictures are drawn")
    made.add_argument("--samples", type=int, default=1280, help="samples of a repetition [1280]")
    made.add_argument("--batch-size", type=int, default=64, help="[64]")
    made.add_argument("--size", type=int, default=224, help="pixels of the transformed pictures [224]")
    options = made.parse_args()
    results = Results("data_feed", options, ["open_clip_torch", "torchvision", "pillow", "webdataset"])
    with tempfile.TemporaryDirectory() as folder:
        spec = options.data or draw_shards(Path(folder), options.samples)
        samples = min(options.samples, open_source(spec).samples("draw")) // options.batch_size * options.batch_size
        steps = make_steps(spec, samples, options)
        case = f"{samples} samples of {options.size} pixels, batches of {options.batch_size}"
        for peer in ("decode", "decode, float"):
            feeds = {"decode": "TrainLoader", "decode, float": "webdataset"}
            ratio = results.compare(case, {name: steps[name] for name in (peer, feeds[peer])}, samples=samples)
            print(f"{feeds[peer]}: {1 / ratio[feeds[peer]]:.3f} of the samples per second of {peer!r}")


def make_steps(spec: str, samples: int, options: argparse.Namespace) -> dict[str, Step]:
    transform = image_transform_v2(PreprocessCfg(size=options.size), is_train=True)
    pixels, tokenizer = eight_bit(transform), get_tokenizer("ViT-B-32")
    source = open_source(spec)
    files = [item.load.args[1].read() for _, (_, item) in zip(range(samples), source.items(), strict=False)]

    def decode(transform: Callable[[Any], Any]) -> None:
        for content in files:
            transform(Image.open(io.BytesIO(content)).convert("RGB"))

    def loader() -> Iterator[int]:
        feed = TrainLoader(source, batch_size=options.batch_size, transform=pixels, tokenizer=tokenizer, workers=1)
        for batch in feed.epoch(0):
            feed.position()  # as the trainer does after each step
            yield len(batch["image_id"])

    def webdataset() -> Iterator[int]:
        pipeline = wds.DataPipeline(
            wds.SimpleShardList(expand(spec)),
            wds.split_by_worker,
            wds.tarfile_to_samples(),
            wds.shuffle(200, initial=50),
            wds.decode("pilrgb"),
            wds.rename(image="jpg;png;jpeg;webp", text="txt"),
            wds.map_dict(image=transform, text=lambda text: tokenizer(text)[0]),
            wds.to_tuple("image", "text"),
            wds.batched(options.batch_size, partial=False),
        )
        # forked, since the pipeline's functions cannot be pickled
        for images, _ in DataLoader(pipeline, batch_size=None, num_workers=1, multiprocessing_context="fork"):
            yield len(images)

    def take(feed: Callable[[], Iterator[int]]) -> None:
        seen, stream = 0, feed()
        while seen < samples:
            seen += next(stream)
        stream.close()  # type: ignore[attr-defined]  # ends the worker, whose CPU time then counts

    return {
        "decode": lambda: decode(pixels),
        "TrainLoader": lambda: take(loader),
        "decode, float": lambda: decode(transform),
        "webdataset": lambda: take(webdataset),
    }


def draw_shards(folder: Path, samples: int) -> str:
    """Shards of JPEG pictures: smooth shapes with some noise, with files of about the size of photographs'."""
    random = np.random.default_rng(0)
    with wds.ShardWriter(str(folder / "%06d.tar"), maxcount=200, verbose=0) as shards:
        for number in range(samples):
            coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
            noisy = smooth + random.integers(-12, 13, smooth.shape, dtype=np.int16)
            picture = io.BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(picture, "JPEG", quality=90)
            text = f"a drawn picture of {number} shapes in many colours on a smooth ground"
            shards.write({"__key__": f"{number:09d}", "jpg": picture.getvalue(), "txt": text})
    return str(folder / "*.tar")


if __name__ == "__main__":
    main()
