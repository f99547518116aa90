"""``coder-plugin regions``: extract region features, and convert their files."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coder_plugin.cli.encoding import skipped
from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, READING, TrainConfig, option, resolve
from coder_plugin.terminal import echo, plural

#: The options that say how captions and pictures are read.
_READING = [name for name in READING if not name.startswith("regions")]
#: Options of a detector.
_DETECTOR = (
    *("model", "weights", "regions", "nms", "min_score", "min_regions", "proposals", "grid", "image_size"),
    *("image_mean", "image_std"),
)  # fmt: skip
_KINDS = "tsv, lxmert, hdf5, lmdb, folder, precomp, shards, or a plugin's"


@dataclass(frozen=True, kw_only=True)
class Extract:
    """The flags of ``coder-plugin regions extract``."""

    images: str = option(
        MISSING, "a folder of pictures, shards, or a data set with captions", metavar="IMAGES", positional=True
    )
    output: str = option(MISSING, "folder to write; an interrupted run continues there", metavar="OUTPUT", positional=True)
    detector: str = option("torchvision", "torchvision, timm, c4 or a plugin's")
    model: str | None = option(
        None, "the detector's model: a Faster R-CNN of torchvision, or any timm model", flag="detector_model"
    )
    weights: str | None = option(
        None, "a .pth or .safetensors file, or default: the model's weights, downloaded", metavar="WEIGHTS"
    )
    regions: int | None = option(None, "maximum number of regions per image [36]")
    nms: float | None = option(None, "overlap above which the lower-scoring of two boxes of a class is dropped [0.3]")
    min_score: float | None = option(None, "leave out regions with a lower score, but keep the best --min-regions [0]")
    min_regions: int | None = option(None, "minimum number of regions per image, whatever their score [10]")
    proposals: int | None = option(None, "c4: proposals per image [300]")
    grid: int | None = option(None, "timm: cells per side of the grid [the model's feature map]")
    image_size: int | None = option(
        None, "timm: side of the square that images are resized to; c4: their short side, in pixels"
    )
    image_mean: list[float] | None = option(
        None, "timm: normalisation, for inputs in [0, 1]", metavar=("R", "G", "B")
    )
    image_std: list[float] | None = option(None, "timm: normalisation, for inputs in [0, 1]", metavar=("R", "G", "B"))
    allow_random: bool = option(False, "allow random weights if none are given")
    global_features: str | None = option(
        None, "also extract one feature of the whole image with this timm model", metavar="timm:MODEL"
    )
    global_weights: str | None = option(
        None, "weights of the --global-features model: a file, or default (a download)", metavar="FILE"
    )
    split: str = option("train", "split of the data set")
    to_split: str | None = option(None, "name of the split in OUTPUT [the same as --split]", metavar="SPLIT")
    workers: int = option(2, "decoding processes per detector process", at_least=0)
    batch_size: int = option(8, "images per call of the detector", at_least=1)
    shard_size: int = option(1000, "images per shard where IMAGES are not in shards", at_least=1)
    task_index: int | None = option(None, "number of this task, from 0 [in a SLURM array, its own]")
    task_count: int | None = option(None, "number of tasks [in a SLURM array, its own]")
    device: str | None = option(None, "cpu, cuda, cuda:1 … [cuda if there is a GPU]")
    max_bad_samples: float = option(
        0.01, "stop above this fraction of images that cannot be used; fewer than 1,000 count as 1,000", at_least=0, below=1
    )


@dataclass(frozen=True, kw_only=True)
class Convert:
    """The flags of ``coder-plugin regions convert``."""

    source: str = option(
        MISSING, "file or folder of region features, or files joined by ::", metavar="SOURCE", positional=True
    )
    destination: str = option(MISSING, "what to write; nothing is overwritten", metavar="DESTINATION", positional=True)
    from_kind: str = option("auto", f"layout of SOURCE: {_KINDS} [from its name]", flag="from", metavar="LAYOUT")
    to_kind: str = option("auto", "shards, precomp, or a plugin's [by its name]", flag="to", metavar="LAYOUT")
    split: str = option("train", "split of SOURCE and of the captions")
    to_split: str | None = option(None, "name of the split in DESTINATION [the same as --split]", metavar="SPLIT")
    captions_data: str | None = option(None, "captions: a .json, _caps.txt, .csv, shards …", metavar="DATA")
    captions_per_image: int | None = option(None, "keep the first N captions per image [all]")
    missing_ok: bool = option(False, "leave out images whose regions are missing or damaged")
    without_extras: bool = option(False, "leave out additional arrays, such as LXMERT's labels")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "regions",
        help="region features: extract them from pictures, convert their files",
        description="Region features for --model region-bert and its like: from pictures, or from one file layout to another.",
    )
    kinds = parser.add_subparsers(required=True, metavar="extract|convert")
    _add_extract(kinds)
    _add_convert(kinds)


def _add_extract(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "extract",
        help="regions of pictures, by a detector or a grid",
        description="Run a detector over a folder of pictures, shards or a captioned data set; write region shards, one for "
        "each shard or slice. An interrupted run continues where it stopped; the ranks of torchrun or accelerate launch and "
        "the tasks of a SLURM array share the work.",
    )
    add_command(parser, Extract, _extract, options=[*_READING, "max_image_pixels"])


def _extract(arguments: Extract, options: Mapping[str, Any]) -> int:
    from coder_plugin.cli.checks import check_exists

    check_exists(arguments.images, flag="IMAGES")
    try:
        echo(extract_command(arguments, options))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was extracted is kept in {arguments.output}; the same command continues") from None
    return 0


def extract_command(arguments: Extract, options: Mapping[str, Any]) -> str:
    """Extract what the arguments ask for, from pictures read by ``options``; returns a summary."""
    from coder_plugin.cli.embed import share_of
    from coder_plugin.data import open_source
    from coder_plugin.data.decode import set_max_pixels
    from coder_plugin.data.from_config import reading_options
    from coder_plugin.data.pictures import Pictures, is_pictures
    from coder_plugin.detectors.extract import regions_job

    index, count = share_of(arguments.task_index, arguments.task_count)
    data, images = _reading_config(options).data, arguments.images
    set_max_pixels(data.max_image_pixels)
    bare = data.dataset_type == "auto" and is_pictures(images)
    source = Pictures(images) if bare else open_source(images, split=arguments.split, **reading_options(data, images))
    detector_options = {name: getattr(arguments, name) for name in _DETECTOR}
    job = regions_job(
        source,
        arguments.output,
        detector=arguments.detector,
        options={**detector_options, "allow_random": arguments.allow_random or None},
        global_model=arguments.global_features,
        global_weights=arguments.global_weights,
        device=arguments.device,
        split=arguments.to_split or arguments.split,
        shard_size=arguments.shard_size,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        max_bad_samples=arguments.max_bad_samples,
    )
    start = time.perf_counter()
    done = job.run(index=index, count=count, shown=os.environ.get("RANK", "0") == "0")
    lost = f"{skipped(done.bad)}, which {job.path(0).parent} names" if done.bad else ""
    missing = done.units - done.files
    rest = f"; {plural(missing, 'shard')} of other tasks are missing" if missing else f": train with --regions {job.folder}"
    made = f"{plural(done.made, 'shard')} made here in {time.perf_counter() - start:.0f} s"
    return f"regions {job.folder}: {plural(done.files, 'shard')}, {plural(done.images, 'image')}; {made}{lost}{rest}"


def _add_convert(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert",
        help="any file of region features to region shards or precomp files, which are trained on",
        description="Copy region features unchanged, in their order, to region shards or precomp files. --captions-data joins "
        "captions in: then these say which images are written, and under which names.",
    )
    add_command(parser, Convert, _convert, options=_READING)


def _convert(arguments: Convert, options: Mapping[str, Any]) -> int:
    from coder_plugin.cli.checks import check_exists

    check_exists(arguments.source, flag="SOURCE")
    from coder_plugin.data.from_config import make_captions
    from coder_plugin.data.regions.convert import convert

    captions = None
    if arguments.captions_data is not None:
        captions = make_captions(_reading_config(options).data, arguments.captions_data, split=arguments.split)
    report = convert(
        arguments.source,
        arguments.destination,
        from_kind=arguments.from_kind,
        to_kind=arguments.to_kind,
        split=arguments.split,
        to_split=arguments.to_split,
        captions=captions,
        captions_per_image=arguments.captions_per_image,
        extras=not arguments.without_extras,
        missing_ok=arguments.missing_ok,
    )
    echo(report)
    return 0


def _reading_config(options: Mapping[str, Any]) -> TrainConfig:
    own = {name: value for name, value in options.items() if name in (*_READING, "max_image_pixels")}
    return resolve([("flag", own)])
