"""The command ``coder-plugin``. Subcommands import what they need, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coder_plugin import __version__
from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.training.config import TrainConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on standard error for a person's mistake."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return arguments.run(arguments)
    except CoderError as error:
        print(f"coder-plugin: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("coder-plugin: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coder-plugin", description="Losses beyond InfoNCE for OpenCLIP-style image-text retrieval training."
    )
    parser.add_argument("--version", action="version", version=f"coder-plugin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_report(commands)
    _add_index(commands)
    _add_search(commands)
    _add_concepts(commands)
    _add_regions(commands)
    _add_share(commands)
    _add_plugins(commands)
    _add_doctor(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.training.config import add_flags

    parser = commands.add_parser(
        "train",
        help="train a model; with no data named, on the built-in scenes",
        description="Train on the data named, or on the built-in scenes. Flags have open_clip's names wherever open_clip "
        "has the flag. Several processes: accelerate launch -m coder_plugin.cli train ...",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from coder_plugin.retrieval import format_table
    from coder_plugin.training.config import read_config
    from coder_plugin.training.loop import Trainer

    trainer = Trainer(read_config(arguments))
    if trainer.config.dry_run:
        trainer.print_plan()
        return 0
    result = trainer.run()
    if trainer.log.main and result["last"]:
        rows = {f"last (epoch {result['last']['epoch']})": result["last"]}
        if result["best"]:
            rows[f"best (epoch {result['best']['epoch']})"] = result["best"]
        print(f"\n{format_table(rows)}")
        print(f"chance R@1: {100 / result['last']['images']:.2f} %   images: {result['last']['images']}")
    if trainer.log.main:
        print(f"checkpoints, exports and metrics: {result['folder']}")
    return 0


def _add_eval(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.training.config import OPENING, READING, add_flags
    from coder_plugin.training.eval_flags import add_flags as add_further_flags

    parser = commands.add_parser(
        "eval",
        help="recall of a model on a data set",
        description="Bidirectional recall (METHODS 10) of a run's checkpoint, an export, or any open_clip model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run_folder", nargs="*", help="a training run's folder: its model, options and best export; several: an ensemble too"
    )
    parser.add_argument("--export", choices=("best", "last"), default="best", help="which export of the run [best]")
    parser.add_argument("--folds", type=int, default=0, help="also the mean over so many folds (COCO 1K: 5)")
    parser.add_argument(
        "--beta",
        type=float,
        nargs="+",
        metavar="B",
        help="weights of the instance level against the concept level, instead of the recipe's: a row for each",
    )
    parser.add_argument(
        "--context-weight",
        type=float,
        nargs="+",
        metavar="W",
        help="weights of SelfAlign's context level, instead of the recipe's: a row for each; 0 leaves it out (of one run, "
        "without pictures)",
    )
    parser.add_argument(
        "--analyses",
        metavar="FOLDER",
        help="also alignment, uniformity and recall by the length of queries (AsCL section III): a table, and numbers and "
        "plots in FOLDER",
    )
    parser.add_argument(
        "--pictures",
        metavar="FOLDER",
        help="also figures in FOLDER: which region or patch each word finds, the context map, and t-SNE of words and regions "
        "(SelfAlign figures 4 and 5)",
    )
    parser.add_argument("--pictures-count", type=int, metavar="N", help="figures of the first N images [8]")
    parser.add_argument(
        "--pictures-concepts", metavar="WORDS", help="words of t-SNE, such as dog,water,snow [the ten most frequent]"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE ('-': standard output)")
    parser.add_argument("--split", default="val", help="split of Karpathy files, precomp folders and scenes [val]")
    add_further_flags(parser)
    only = [*OPENING, *READING, "val_data", "max_bad_images", "workers", "batch_size", "rerank"]
    add_flags(parser, only=only)
    parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from coder_plugin.retrieval import format_analyses, format_table
    from coder_plugin.training.evaluate import analyses_of, evaluate_command
    from coder_plugin.training.evaluation_sets import format_further

    results = evaluate_command(arguments)
    if not results:
        return 0  # another rank prints
    if arguments.json:
        named = [{"name": name, **result} for name, result in results.items()]
        text = json.dumps(named[0] if len(named) == 1 and not (arguments.beta or arguments.context_weight) else named, indent=2)
        if arguments.json == "-":
            print(text)
            return 0
        with open(arguments.json, "w") as file:
            file.write(text + "\n")
    rows = {}
    for name, result in results.items():
        first = f"{name}, re-ranked {result['rerank']}" if "rerank" in result else name
        for label, figures in ((first, result), (f"{name}, shortlist", result.get("shortlist"))):
            if figures is not None:
                rows[label] = figures
                if "folds" in figures:
                    rows[f"{label}, mean of {arguments.folds} folds"] = figures["folds"]
    print(format_table(rows))
    if tables := format_further(results):
        print(f"\n{tables}")
    if analyses := analyses_of(results):
        print(f"\n{format_analyses(analyses)}")
    if arguments.pictures:
        from coder_plugin.report.pictures import format_measured

        measured = {name: result["concept_words"] for name, result in results.items() if "concept_words" in result}
        print("\n".join(["", *format_measured(measured), f"pictures: {arguments.pictures}"]))
    return 0


def _add_index(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.training.config import OPENING, READING, add_flags

    parser = commands.add_parser(
        "index",
        help="encode images and captions into an index to search",
        description="Encode a folder of pictures, shards, a CSV or any other data set, or region features, into one folder: "
        "FAISS index, keys, captions, thumbnails. A command that was stopped goes on where it was. Several processes: "
        "accelerate launch -m coder_plugin.cli index ...",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", nargs="?", metavar="RUN", help="a run's folder, or an export's; else --model")
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
    from coder_plugin.retrieval.command import index_command

    if told := index_command(arguments):
        print(told)
    return 0


def _add_search(commands: argparse._SubParsersAction) -> None:
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
        "--among", choices=("images", "captions"), help="what to find [images for a text, captions for an image]"
    )
    parser.add_argument(
        "--rerank", metavar="K", help="candidates that a fusion score puts in order, or all; 0: none [32, if the model has one]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    parser.add_argument("--model", dest="model_folder", metavar="RUN", help="run or export, where the index's model has moved")
    parser.add_argument("--search-parameters", metavar="P", help="FAISS's, such as nprobe=16 or efSearch=64")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="compare the files' checksums first [True]"
    )
    parser.set_defaults(run=_search)


def _search(arguments: argparse.Namespace) -> int:
    from coder_plugin.retrieval.command import search_command

    print(search_command(arguments))
    return 0


def _add_report(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.training.config import READING, add_flags

    parser = commands.add_parser(
        "report",
        help="one HTML file of a training run: curves, recall, results, state",
        description="Write what a run's folder, its model and its validation data tell into one HTML file that loads nothing: "
        "options, curves, recall, best and worst queries, a map, concepts, banks. What is missing says why, and the rest is there.",
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
    from coder_plugin.report.run import report_command

    print(report_command(arguments))
    return 0


def _add_concepts(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.training.config import READING, add_flags

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
    from coder_plugin.concepts.command import concepts_command

    print(concepts_command(arguments))
    return 0


def _add_regions(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "regions",
        help="region features: extract them from pictures, convert their files",
        description="Region features for --model region-bert and its like: from pictures, or from one file layout to another.",
    )
    kinds = parser.add_subparsers(required=True, metavar="extract|convert")
    _add_extract(kinds)
    _add_convert(kinds)


def _add_extract(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.detectors.command import add_flags as add_detector_flags
    from coder_plugin.training.config import add_flags

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
    from coder_plugin.data.pictures import is_pictures
    from coder_plugin.detectors.command import extract_command
    from coder_plugin.training.sources import reading_options

    config = _reading_config(arguments)
    bare = config.dataset_type == "auto" and is_pictures(arguments.images)
    reading = {} if bare else reading_options(config, arguments.images)
    print(extract_command(arguments, **reading))
    return 0


def _add_convert(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.training.config import add_flags

    parser = commands.add_parser(
        "convert",
        help="any file of region features to any other layout",
        description="Copy region features from one layout to another, number for number, with captions joined in where "
        "--captions-data names some: then these say which images are written, in their order.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="file or folder of region features")
    parser.add_argument("destination", metavar="DESTINATION", help="what to write; nothing is overwritten")
    kinds = "tsv, lxmert, hdf5, lmdb, folder, precomp, shards, or a plugin's"
    parser.add_argument("--from", dest="from_kind", default="auto", metavar="LAYOUT", help=f"SOURCE's: {kinds} [by its name]")
    parser.add_argument("--to", dest="to_kind", default="auto", metavar="LAYOUT", help="DESTINATION's, likewise [by its name]")
    parser.add_argument("--split", default="train", help="split of SOURCE and of the captions [train]")
    parser.add_argument("--to-split", metavar="SPLIT", help="what it is called in DESTINATION [--split]")
    parser.add_argument("--captions-data", metavar="DATA", help="captions: a .json, _caps.txt, .csv, shards …")
    parser.add_argument("--captions-per-image", type=int, metavar="N", help="keep the first N captions of each image [all]")
    parser.add_argument("--missing-ok", action="store_true", help="leave out images without or with damaged regions")
    parser.add_argument("--without-extras", action="store_true", help="leave out further arrays, such as LXMERT's labels")
    add_flags(parser, only=_reading())
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from coder_plugin.data.regions.convert import convert
    from coder_plugin.training.sources import make_captions

    captions = None
    if arguments.captions_data is not None:
        captions = make_captions(_reading_config(arguments), arguments.captions_data, split=arguments.split)
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
    from coder_plugin.training.config import READING

    return [name for name in READING if not name.startswith("regions")]


def _reading_config(arguments: argparse.Namespace) -> TrainConfig:
    from coder_plugin.training.config import TrainConfig, read_flags

    given = read_flags(arguments)
    return TrainConfig.from_dict({name: given[name] for name in _reading() if name in given})


def _add_share(commands: argparse._SubParsersAction) -> None:
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
    parser.add_argument("--card-datasets", dest="datasets", nargs="+", default=[], metavar="NAME", help="what it was trained on")
    parser.set_defaults(run=_share)


def _share(arguments: argparse.Namespace) -> int:
    from coder_plugin.integrations.hub import share_command

    print(share_command(arguments))
    return 0


def _add_plugins(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plugins", help="list losses, heads, recipes … and where they come from")
    parser.add_argument("group", nargs="?", help="one group: losses, heads, readers, recipes …")
    parser.add_argument("--check", action="store_true", help="import each of them and report what fails")
    parser.set_defaults(run=_plugins)


def _plugins(arguments: argparse.Namespace) -> int:
    from coder_plugin.registry import format_plugins, list_plugins

    plugins = list_plugins(arguments.group, check=arguments.check)
    print(format_plugins(plugins))
    return 1 if any(plugin.error for plugin in plugins) else 0


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.doctor.command import flags
    from coder_plugin.training.config import add_flags

    parser = commands.add_parser(
        "doctor",
        help="check installation, machine, data, recipe or a trained run, and say what to do",
        description="Check the installation and the machine; with data, a model or a recipe named as for train, these too; "
        "with a folder, the run, export or index in it. Nothing is downloaded or written. Status 1 where there is a problem.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="*", help="a run's folder, an export's or an index's")
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
    from coder_plugin.doctor.command import doctor_command

    return doctor_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
