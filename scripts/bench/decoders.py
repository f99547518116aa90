#!/usr/bin/env python3
"""Ways to decode training pictures, alone and with the training transform, against Pillow's, which the readers use.

    python scripts/bench/decoders.py --clock cpu                                    drawn JPEG pictures of 500 x 375
    python scripts/bench/decoders.py --clock cpu --data 'train-{000000..000005}.tar' --size 224

pillow       what the readers do: open, check format and number of pixels, decode
torchvision  its decoder of JPEG, after the same checks, as the Pillow picture that transforms take
tensor       the same without the checks and without the picture: what the decoder alone would save
draft        Pillow's, which scales to 1/2, 1/4 or 1/8 while decoding where no side gets shorter than the transform's

The feeds decode, augment to 8-bit pixels and take the same random numbers. One thread; seconds are those of a picture, and a
ratio below 1 is faster than Pillow's.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Results, Step, add_options, measure
from data_feed import draw_shards, source_items
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from coder_plugin.data.decode import decode_image
from coder_plugin.data.pixels import eight_bit
from coder_plugin.data.source import preserved_rng, seed_rng


def main() -> None:
    options = arguments()
    results = Results("decoders", options, ["open_clip_torch", "torchvision", "pillow"])
    with tempfile.TemporaryDirectory() as folder:
        spec = options.data or draw_shards(Path(folder), options)
        files = [item.load.args[1].read() for _, item in zip(range(options.samples), source_items(spec), strict=False)]
    transform = eight_bit(image_transform_v2(PreprocessCfg(size=options.size), is_train=True))
    decoders: dict[str, Callable[[bytes], Any]] = {
        "pillow": decode_image,
        "torchvision": torchvision_checked,
        "tensor": torchvision_tensor,
        "draft": lambda content: draft(content, options.size),
    }
    for name, decode in decoders.items():
        found = np.asarray(decode(files[0]) if name != "tensor" else decode(files[0]).permute(1, 2, 0))
        same = found.shape == np.asarray(decode_image(files[0])).shape and np.array_equal(found, decode_image(files[0]))
        print(f"{name}: {found.shape[1]} x {found.shape[0]} pixels, {'equal' if same else 'not equal'} to Pillow's")
    data = options.data or f"drawn JPEG pictures of {options.picture[0]} x {options.picture[1]}"
    for what, applied in (("decoding", None), (f"feed of {options.size} px", transform)):
        steps = {name: step(decode, applied, files) for name, decode in decoders.items() if applied is None or name != "tensor"}
        times = measure(steps, options.device, options.repeats, warm_up=1, clock=options.clock, limit=options.limit)
        per_picture = {name: [seconds / len(files) for seconds in row] for name, row in times.items()}
        results.compare(f"{what}, {len(files)} pictures of {data}", per_picture, peer="pillow")


def torchvision_tensor(content: bytes) -> torch.Tensor:
    return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)


def torchvision_checked(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content)) as header:  # format and number of pixels, before decoding
        assert header.format == "JPEG" and header.width * header.height > 0
    return Image.fromarray(torchvision_tensor(content).permute(1, 2, 0).numpy())


def draft(content: bytes, size: int) -> Image.Image:
    picture = Image.open(io.BytesIO(content))
    picture.draft("RGB", (size, size))
    picture.load()
    return picture


def step(decode: Callable[[bytes], Any], transform: Callable[[Any], Any] | None, files: list[bytes]) -> Step:
    def take() -> None:
        with preserved_rng():
            for number, content in enumerate(files):
                picture = decode(content)
                if transform is not None:
                    seed_rng("image", number)
                    transform(picture)

    return take


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="shards with JPEG pictures; without it pictures are drawn")
    parser.add_argument("--picture", type=int, nargs=2, default=(500, 375), help="width and height of drawn pictures [500 375]")
    parser.add_argument("--samples", type=int, default=200, help="pictures of a repetition [200]")
    parser.add_argument("--size", type=int, default=224, help="of the transformed pictures [224]")
    add_options(parser, repeats=7, threads=1, without=("device",))
    return parser.parse_args()


if __name__ == "__main__":
    main()
