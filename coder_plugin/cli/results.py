"""The commands that use what was trained: ``report``, ``index``, ``search``, ``share``."""

from __future__ import annotations

import argparse


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
