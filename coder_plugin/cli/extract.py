"""``coder-plugin regions extract``: its flags, and what it does with them."""

from __future__ import annotations

import argparse
from typing import Any

_DETECTOR = {  # option of a detector: its flag's type and help
    "model": (str, "the detector's model: a Faster-RCNN of torchvision, any model of timm"),
    "weights": (str, "a .pth or .safetensors file, or default: the model's own, downloaded"),
    "regions": (int, "regions of an image at most [36]"),
    "nms": (float, "overlap above which the lower of two boxes of a class is dropped [0.3]"),
    "min_score": (float, "leave out regions below it, but the best --min-regions [0]"),
    "min_regions": (int, "[10]"),
    "proposals": (int, "c4: proposals of an image [300]"),
    "grid": (int, "timm: cells a side [the model's map as it is]"),
    "image_size": (int, "timm: side of the square that images are squashed to; c4: their short side"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; ``--dataset-type`` and other reading flags are the caller's to add."""
    parser.add_argument("images", metavar="IMAGES", help="a folder of pictures, shards, or a data set with captions")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write; a run that was stopped goes on there")
    parser.add_argument("--detector", default="torchvision", help="torchvision, timm, c4 or a plugin's [torchvision]")
    for option, (kind, text) in _DETECTOR.items():
        flag = "--detector-model" if option == "model" else f"--{option.replace('_', '-')}"
        parser.add_argument(flag, dest=option, type=kind, help=text)
    for option in ("image_mean", "image_std"):
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(flag, type=float, nargs=3, metavar=("R", "G", "B"), help="timm: of inputs in [0, 1]")
    parser.add_argument("--allow-random", action="store_true", help="untrained weights where none are given")
    parser.add_argument("--whole", metavar="timm:MODEL", help="also a feature of the whole image, by a model of timm")
    parser.add_argument("--whole-weights", metavar="FILE", help="its weights, or default")
    parser.add_argument("--to", choices=("shards", "precomp"), default="shards", help="what to write [shards]")
    parser.add_argument(
        "--captions-per-image", type=int, metavar="N", help="precomp: keep the first N captions of each image [all]"
    )
    parser.add_argument("--split", default="train", help="split of the data set [train]")
    parser.add_argument("--to-split", metavar="SPLIT", help="what the split is called in OUTPUT [--split]")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that detect, a GPU each where there are [1]"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that decode, for each of these [2]")
    parser.add_argument("--batch-size", type=int, default=8, help="images a call of the detector [8]")
    parser.add_argument("--shard-size", type=int, default=1000, help="images a shard, and between restarts [1000]")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … [cuda where there is one]")
    parser.add_argument("--max-bad-images", type=int, default=100, help="images that may be undecodable [100]")


def extract_command(arguments: argparse.Namespace, **reading: Any) -> str:
    """Extract what the arguments ask for; returns the report.

    ``reading`` are options of :func:`coder_plugin.data.open_source`: ``kind``, ``images`` …
    """
    from coder_plugin.data.pictures import open_images
    from coder_plugin.detectors.extract import extract_regions

    options = {name: getattr(arguments, name) for name in (*_DETECTOR, "image_mean", "image_std")}
    report = extract_regions(
        open_images(arguments.images, split=arguments.split, **reading),
        arguments.output,
        detector=arguments.detector,
        options={**options, "allow_random": arguments.allow_random or None},
        global_model=arguments.whole,
        global_weights=arguments.whole_weights,
        device=arguments.device,
        processes=arguments.processes,
        to=arguments.to,
        split=arguments.to_split or arguments.split,
        shard_size=arguments.shard_size,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        max_bad=arguments.max_bad_images,
        captions_per_image=arguments.captions_per_image,
    )
    return str(report)
