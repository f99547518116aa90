"""The commands for data: ``concepts``, ``regions``, ``doctor``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coder_plugin.config import TrainConfig


def add_concepts(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import READING

    parser = commands.add_parser(
        "concepts",
        help="make the concept vocabulary that CODER trains with, from captions",
        description="The most frequent nouns, verbs and adjectives of the training captions, how often they meet, and "
        "their word vectors (METHODS 4), for --loss coder --concepts FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the .safetensors to write, a .json beside it")
    parser.add_argument(
        "--vectors", required=True, metavar="FILE", help="GloVe or word2vec text file (.gz, .zip too), or none: random"
    )
    parser.add_argument("--size", type=int, default=400, help="number of concepts [400]")
    parser.add_argument(
        "--ratio",
        type=float,
        nargs=3,
        default=[7, 2, 1],
        metavar=("OBJECT", "MOTION", "PROPERTY"),
        help="shares of nouns, verbs and adjectives [7 2 1]",
    )
    parser.add_argument(
        "--lemmas",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count dog and dogs as one concept, instead of every form by itself [True]",
    )
    parser.add_argument(
        "--stop-words",
        default="default",
        metavar="WORDS",
        help="default (be, have, other and the like), none, or a file of words that are no concepts [default]",
    )
    parser.add_argument(
        "--tagger",
        metavar="NAME",
        help="spaCy pipeline by name or folder, or scenes: the built-in scenes' words [en_core_web_sm; scenes for scenes]",
    )
    parser.add_argument("--processes", type=int, default=1, help="spaCy's processes [1]")
    parser.add_argument("--max-captions", type=int, metavar="N", help="read the first N captions only")
    parser.add_argument("--split", default="train", help="split of Karpathy files and scenes [train]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the vectors that are drawn [0]")
    add_flags(parser, only=["train_data", *READING])
    parser.set_defaults(run=_concepts)


def _concepts(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.concepts import concepts_command

    print(concepts_command(arguments))
    return 0


def add_regions(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "regions",
        help="region features: extract them from pictures, convert their files",
        description="Region features for --model region-bert and its like: from pictures, or from one file layout to another.",
    )
    kinds = parser.add_subparsers(required=True, metavar="extract|convert")
    _add_extract(kinds)
    _add_convert(kinds)


def _add_extract(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.extract import add_flags as add_detector_flags
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "extract",
        help="regions of pictures, by a detector or a grid",
        description="Run a detector over a folder of pictures, shards or a captioned data set; write region shards or SCAN's "
        "precomp files. A run that was stopped goes on where it was.",
        allow_abbrev=False,
    )
    add_detector_flags(parser)
    add_flags(parser, only=_reading())
    parser.set_defaults(run=_extract)


def _extract(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.extract import extract_command
    from coder_plugin.data.from_config import reading_options
    from coder_plugin.data.pictures import is_pictures

    config = _reading_config(arguments)
    bare = config.data.dataset_type == "auto" and is_pictures(arguments.images)
    reading = {} if bare else reading_options(config.data, arguments.images)
    print(extract_command(arguments, **reading))
    return 0


def _add_convert(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "convert",
        help="any file of region features to region shards or precomp files",
        description="Copy region features unchanged to region shards or precomp files, with captions joined in if "
        "--captions-data names some: then these say which images are written, in their order.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="file or folder of region features")
    parser.add_argument("destination", metavar="DESTINATION", help="what to write; nothing is overwritten")
    kinds = "tsv, lxmert, hdf5, lmdb, folder, precomp, shards, or a plugin's"
    parser.add_argument("--from", dest="from_kind", default="auto", metavar="LAYOUT", help=f"SOURCE's: {kinds} [by its name]")
    to_help = "shards, precomp, or a plugin's [by its name]"
    parser.add_argument("--to", dest="to_kind", default="auto", metavar="LAYOUT", help=to_help)
    parser.add_argument("--split", default="train", help="split of SOURCE and of the captions [train]")
    parser.add_argument("--to-split", metavar="SPLIT", help="what it is called in DESTINATION [--split]")
    parser.add_argument("--captions-data", metavar="DATA", help="captions: a .json, _caps.txt, .csv, shards …")
    parser.add_argument("--captions-per-image", type=int, metavar="N", help="keep the first N captions of each image [all]")
    parser.add_argument("--missing-ok", action="store_true", help="leave out images without or with damaged regions")
    parser.add_argument("--without-extras", action="store_true", help="leave out further arrays, such as LXMERT's labels")
    add_flags(parser, only=_reading())
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
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
    print(report)
    return 0


def _reading() -> list[str]:
    """The flags that say how captions and pictures are read."""
    from coder_plugin.config import READING

    return [name for name in READING if not name.startswith("regions")]


def _reading_config(arguments: argparse.Namespace) -> TrainConfig:
    from coder_plugin.cli.flags import read_options
    from coder_plugin.config import resolve

    return resolve([("flag", read_options(arguments))])


def add_doctor(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.doctor import flags
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "doctor",
        help="check installation, machine, data, objective or a trained run, and say what to do",
        description="Check the installation and the machine; with data, a model or an objective named as for train, these too; "
        "with a folder, the run, export or index in it. Nothing is downloaded or written. Status 1 where there is a problem.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="*", help="a run's folder, an export's or an index's; hf-hub:OWNER/NAME, if cached")
    parser.add_argument("--vectors", metavar="FILE", help="word vectors, against the captions' words")
    parser.add_argument(
        "--samples", type=int, default=256, metavar="N", help="pictures decoded of a split of more than 10,000 images [256]"
    )
    parser.add_argument("--all", action="store_true", help="decode every picture, and read every shard")
    parser.add_argument("--strict", action="store_true", help="status 1 where there is a warning, too")
    parser.add_argument("--json", metavar="FILE", help="write the findings to FILE ('-': standard output)")
    add_flags(parser, only=flags())
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.doctor import doctor_command

    return doctor_command(arguments)
