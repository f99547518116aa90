"""The commands that use what was trained: ``report``, ``index``, ``search``, ``share``."""

from __future__ import annotations

import argparse


def add_report(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import READING

    parser = commands.add_parser(
        "report",
        help="one HTML file of a training run: curves, recall, results, state",
        description="Write what a run's folder, its model and its validation data tell into one HTML file that loads nothing: "
        "options, curves, recall, best and worst queries, a map, concepts, banks. What is missing says why.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", metavar="RUN", help="a training run's folder")
    parser.add_argument("--output", metavar="FILE", help="the file to write [RUN/report.html]")
    parser.add_argument("--export", choices=("best", "last"), help="which export's results are shown [best]")
    parser.add_argument("--images", type=int, default=6, metavar="N", help="queries of each kind, and sample images [6]")
    parser.add_argument("--split", default="val", help="split of Karpathy files, precomp folders and scenes [val]")
    reading = "val_data max_regions max_bad_images workers batch_size precision".split()
    add_flags(parser, only=[*reading, *READING])
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.flags import read_options
    from coder_plugin.report.run import report_run

    options = {name: getattr(arguments, name) for name in ("export", "split", "output", "images")}
    print(report_run(arguments.run_folder, read_options(arguments), **options))
    return 0


def add_index(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import OPENING, READING

    parser = commands.add_parser(
        "index",
        help="encode images and captions into an index to search",
        description="Encode a folder of pictures, shards, a CSV or any other data set, or region features, into one folder: "
        "FAISS index, keys, captions, thumbnails. A command that was stopped goes on where it was. Several processes: "
        "accelerate launch -m coder_plugin.cli index ...",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", nargs="?", metavar="RUN", help="a run's, export's or shared folder; else --model")
    parser.add_argument("--data", required=True, metavar="DATA", help="a folder of pictures, shards, a .csv, .json, scenes …")
    parser.add_argument("--output", required=True, metavar="INDEX", help="the folder to write")
    parser.add_argument("--export", choices=("best", "last"), default="best", help="which export of the run [best]")
    parser.add_argument("--split", default="val", help="split of Karpathy files, precomp folders and scenes [val]")
    parser.add_argument(
        "--what", choices=("both", "images", "captions"), default="both", help="whose vectors to keep; texts stay [both]"
    )
    parser.add_argument(
        "--factory", default="Flat", help="FAISS index factory: Flat is exact; HNSW32, IVF1024,Flat, PQ64 … [Flat]"
    )
    parser.add_argument("--thumbnails", type=int, default=128, metavar="PIXELS", help="longer side; 0: none [128]")
    parser.add_argument(
        "--rerank-items",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what a fusion score needs, if the model has one [True]",
    )
    add_flags(parser, only=[*OPENING, *READING, "batch_size", "workers", "max_bad_images"])
    parser.set_defaults(run=_index)


def _index(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.index import index_command

    if told := index_command(arguments):
        print(told)
    return 0


def add_search(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "search",
        help="find images or captions in an index",
        description="Search an index by texts, pictures or its own images: a table, JSON or a page.",
        allow_abbrev=False,
    )
    parser.add_argument("index", metavar="INDEX", help="a folder that coder-plugin index has made")
    parser.add_argument("--text", nargs="+", metavar="TEXT", help="texts; - reads one from each line of standard input")
    parser.add_argument("--image", nargs="+", metavar="FILE", help="pictures; of a model of regions, .npz files")
    parser.add_argument("--key", nargs="+", metavar="KEY", help="images of the index, by their keys")
    parser.add_argument("-k", type=int, default=10, help="results [10]")
    parser.add_argument(
        "--among", choices=("images", "captions"), help="what to find [images for a text, captions for an image, if any]"
    )
    parser.add_argument(
        "--rerank", metavar="K", help="candidates that a fusion score puts in order, or all; 0: none [32, if the model has one]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    parser.add_argument("--model", dest="model_folder", metavar="RUN", help="run or export, where the index's model has moved")
    parser.add_argument("--search-parameters", metavar="P", help="FAISS's, such as nprobe=16 or efSearch=64")
    parser.add_argument(
        "--gpu", action=argparse.BooleanOptionalAction, default=True, help="search on a GPU, where FAISS sees one [True]"
    )
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="compare the files' checksums first [True]"
    )
    parser.set_defaults(run=_search)


def _search(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.index import search_command

    print(search_command(arguments))
    return 0


def add_share(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "share",
        help="write a trained model for others, with a model card: to a folder, or to the Hugging Face Hub",
        description="Write a trained model with all that its vectors need, and a model card, to a folder or to a repository of "
        "the Hugging Face Hub, which coder_plugin.from_pretrained opens anywhere.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", metavar="RUN", help="a training run's folder, an export's, or one that was shared")
    places = parser.add_mutually_exclusive_group(required=True)
    places.add_argument("--to", metavar="FOLDER", help="a new folder, or one that was shared, which is replaced")
    places.add_argument("--repo", metavar="OWNER/NAME", help="a repository, made if there is none (log in with: hf auth login)")
    parser.add_argument("--export", choices=("best", "last"), default="best", help="which export of the run [best]")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--card-license", dest="license", metavar="ID", help="the card's licence, such as cc-by-nc-4.0")
    parser.add_argument("--card-base-model", dest="base_model", metavar="ID", help="the repository of the model it began as")
    parser.add_argument("--card-datasets", dest="datasets", nargs="+", default=[], metavar="NAME", help="training data")
    parser.set_defaults(run=_share)


def _share(arguments: argparse.Namespace) -> int:
    from coder_plugin.integrations.hub import share_command

    print(share_command(arguments))
    return 0
