"""``coder-plugin regions``: extract region features, and convert their files."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from coder_plugin.terminal import echo, plural

if TYPE_CHECKING:
    from coder_plugin.config import TrainConfig

_DETECTOR = {  # option of a detector: its flag's type and help
    "model": (str, "the detector's model: a Faster R-CNN of torchvision, or any timm model"),
    "weights": (str, "a .pth or .safetensors file, or default: the model's weights, downloaded"),
    "regions": (int, "maximum number of regions per image [36]"),
    "nms": (float, "overlap above which the lower-scoring of two boxes of a class is dropped [0.3]"),
    "min_score": (float, "leave out regions with a lower score, but keep the best --min-regions [0]"),
    "min_regions": (int, "minimum number of regions per image, whatever their score [10]"),
    "proposals": (int, "c4: proposals per image [300]"),
    "grid": (int, "timm: cells per side of the grid [the model's feature map]"),
    "image_size": (int, "timm: side of the square that images are resized to; c4: their short side, in pixels"),
}


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
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "extract",
        help="regions of pictures, by a detector or a grid",
        description="Run a detector over a folder of pictures, shards or a captioned data set; write region shards, one for "
        "each shard or slice. An interrupted run continues where it stopped; the ranks of torchrun or accelerate launch and "
        "the tasks of a SLURM array share the work.",
    )
    add_extract_flags(parser)
    add_flags(parser, only=[*_reading(), "max_image_pixels"])
    parser.set_defaults(run=_extract)


def add_extract_flags(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; ``--dataset-type`` and other reading flags are the caller's to add."""
    parser.add_argument("images", metavar="IMAGES", help="a folder of pictures, shards, or a data set with captions")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write; an interrupted run continues there")
    parser.add_argument("--detector", default="torchvision", help="torchvision, timm, c4 or a plugin's [torchvision]")
    for option, (kind, text) in _DETECTOR.items():
        flag = "--detector-model" if option == "model" else f"--{option.replace('_', '-')}"
        parser.add_argument(flag, dest=option, type=kind, help=text)
    for option in ("image_mean", "image_std"):
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(
            flag, type=float, nargs=3, metavar=("R", "G", "B"), help="timm: normalisation, for inputs in [0, 1]"
        )
    parser.add_argument("--allow-random", action="store_true", help="allow random weights if none are given")
    parser.add_argument(
        "--global-features", metavar="timm:MODEL", help="also extract one feature of the whole image with this timm model"
    )
    parser.add_argument(
        "--global-weights", metavar="FILE", help="weights of the --global-features model: a file, or default (a download)"
    )
    parser.add_argument("--split", default="train", help="split of the data set [train]")
    parser.add_argument("--to-split", metavar="SPLIT", help="name of the split in OUTPUT [the same as --split]")
    parser.add_argument("--workers", type=int, default=2, help="decoding processes per detector process [2]")
    parser.add_argument("--batch-size", type=int, default=8, help="images per call of the detector [8]")
    parser.add_argument(
        "--shard-size", type=int, default=1000, help="images per shard where IMAGES are not in shards [1000]"
    )
    parser.add_argument(
        "--task-index", type=int, metavar="N", help="number of this task, from 0 [in a SLURM array, its own]"
    )
    parser.add_argument("--task-count", type=int, metavar="N", help="number of tasks [in a SLURM array, its own]")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … [cuda if there is a GPU]")
    parser.add_argument(
        "--max-bad-samples",
        type=float,
        default=0.01,
        help="stop above this fraction of images that cannot be used, judged once 1,000 are read [0.01]",
    )


def _extract(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_exists

    check_exists(arguments.images, flag="IMAGES")
    from coder_plugin.data.decode import set_max_pixels
    from coder_plugin.data.from_config import reading_options
    from coder_plugin.data.pictures import is_pictures

    config = _reading_config(arguments)
    bare = config.data.dataset_type == "auto" and is_pictures(arguments.images)
    set_max_pixels(config.data.max_image_pixels)
    reading = {} if bare else reading_options(config.data, arguments.images)
    try:
        echo(extract_command(arguments, **reading))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was extracted is kept in {arguments.output}; the same command continues") from None
    return 0


def extract_command(arguments: argparse.Namespace, **reading: Any) -> str:
    """Extract what the arguments ask for; returns a summary.

    ``reading`` are options of :func:`coder_plugin.data.open_source`: ``kind``, ``image_root`` …
    """
    from coder_plugin.cli.embed import share_of
    from coder_plugin.data.pictures import open_images
    from coder_plugin.detectors.extract import regions_job

    index, count = share_of(arguments.task_index, arguments.task_count)
    options = {name: getattr(arguments, name) for name in (*_DETECTOR, "image_mean", "image_std")}
    job = regions_job(
        open_images(arguments.images, split=arguments.split, **reading),
        arguments.output,
        detector=arguments.detector,
        options={**options, "allow_random": arguments.allow_random or None},
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
    kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(done.bad.items()))
    lost = f"; {plural(done.bad.total(), 'sample')} skipped ({kinds}), which {job.path(0).parent} names" if done.bad else ""
    missing = done.units - done.files
    rest = f"; {plural(missing, 'shard')} of other tasks are missing" if missing else f": train with --regions {job.folder}"
    made = f"{plural(done.made, 'shard')} made here in {time.perf_counter() - start:.0f} s"
    return f"regions {job.folder}: {plural(done.files, 'shard')}, {plural(done.images, 'image')}; {made}{lost}{rest}"


def _add_convert(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "convert",
        help="any file of region features to region shards or precomp files, which are trained on",
        description="Copy region features unchanged, in their order, to region shards or precomp files. --captions-data joins "
        "captions in: then these say which images are written, and under which names.",
    )
    parser.add_argument("source", metavar="SOURCE", help="file or folder of region features, or files joined by ::")
    parser.add_argument("destination", metavar="DESTINATION", help="what to write; nothing is overwritten")
    kinds = "tsv, lxmert, hdf5, lmdb, folder, precomp, shards, or a plugin's"
    parser.add_argument(
        "--from", dest="from_kind", default="auto", metavar="LAYOUT", help=f"layout of SOURCE: {kinds} [from its name]"
    )
    to_help = "shards, precomp, or a plugin's [by its name]"
    parser.add_argument("--to", dest="to_kind", default="auto", metavar="LAYOUT", help=to_help)
    parser.add_argument("--split", default="train", help="split of SOURCE and of the captions [train]")
    parser.add_argument("--to-split", metavar="SPLIT", help="name of the split in DESTINATION [the same as --split]")
    parser.add_argument("--captions-data", metavar="DATA", help="captions: a .json, _caps.txt, .csv, shards …")
    parser.add_argument("--captions-per-image", type=int, metavar="N", help="keep the first N captions per image [all]")
    parser.add_argument("--missing-ok", action="store_true", help="leave out images whose regions are missing or damaged")
    parser.add_argument("--without-extras", action="store_true", help="leave out additional arrays, such as LXMERT's labels")
    add_flags(parser, only=_reading())
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_exists

    check_exists(arguments.source, flag="SOURCE")
    from coder_plugin.data.from_config import make_captions
    from coder_plugin.data.regions.convert import convert

    captions = None
    if arguments.captions_data is not None:
        captions = make_captions(_reading_config(arguments).data, arguments.captions_data, split=arguments.split)
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


def _reading() -> list[str]:
    """The flags that say how captions and pictures are read."""
    from coder_plugin.config import READING

    return [name for name in READING if not name.startswith("regions")]


def _reading_config(arguments: argparse.Namespace) -> TrainConfig:
    from coder_plugin.cli.flags import read_options
    from coder_plugin.config import resolve

    return resolve([("flag", read_options(arguments))])
