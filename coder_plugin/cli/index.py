"""``coder-plugin index``."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from coder_plugin.cli.encoding import OPENING_AND_READING, EncodingFlags, check_encoding, skipped
from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, option
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular
from coder_plugin.terminal import echo, plural

#: The other ranks wait that long, at most, while the first builds the index.
BUILD_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True, kw_only=True)
class Command(EncodingFlags):
    """The flags of ``coder-plugin index``."""

    output: str = option(MISSING, "the folder to write", metavar="INDEX")
    embeddings: str | None = option(
        None, "instead of RUN and --data: what coder-plugin embed wrote; nothing is encoded", metavar="DIR"
    )
    factory: str = option("Flat", "FAISS index factory string: Flat (exact), HNSW32, IVF1024,Flat, PQ64 …")
    rerank_items: bool = option(True, "keep what re-ranking needs, with --reranker or a model that has a fusion head")


@dataclass(frozen=True, kw_only=True)
class AddCommand:
    """The flags of ``coder-plugin index add``."""

    index: str = option(MISSING, "a folder written by coder-plugin index", metavar="INDEX", positional=True)
    embeddings: str | None = option(
        None, "a folder written by coder-plugin embed, by the index's model", metavar="EMBEDDINGS", positional=True
    )
    data: str | None = option(None, "instead of EMBEDDINGS: the images, which are embedded first", metavar="DATA")
    split: str = option("val", "split of Karpathy files, precomp folders and scenes")
    replace: bool = option(False, "remove images of the index that have the same keys")


@dataclass(frozen=True, kw_only=True)
class RemoveCommand:
    """The flags of ``coder-plugin index remove``."""

    index: str = option(MISSING, "a folder written by coder-plugin index", metavar="INDEX", positional=True)
    key: list[str] = option([], "keys of images", metavar="KEY")
    keys_file: str | None = option(None, "a text file with a key in each line", metavar="FILE")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "index",
        help="encode images and captions into an index to search",
        description="Encode a folder of pictures, shards, a CSV or any other data set, or region features, into one folder: "
        "Parquet files with keys, captions, vectors, thumbnails, and a FAISS index of them. An interrupted command continues "
        "where it stopped. With another --factory a finished index is built again; nothing is encoded again. Several "
        "processes: accelerate launch -m coder_plugin.cli index ... To change a finished index: coder-plugin index add INDEX "
        "--data DATA, coder-plugin index remove INDEX --key KEY.",
    )
    add_command(parser, Command, run, options=OPENING_AND_READING)
    _add_changes(parser)


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """``index add`` and ``index remove``: the first argument of ``index`` is else a run's folder, so they are no subparsers."""
    changes = {}
    for name, description in (
        (
            "add",
            "Add images to an index: a folder of coder-plugin embed, or data that the index's model encodes. If that model has "
            "moved, name it by --model.",
        ),
        ("remove", "Remove images from an index. Their rows are deleted from its Parquet files."),
    ):
        changes[name] = type(parser)(prog=f"{parser.prog} {name}", description=description)
    add_command(changes["add"], AddCommand, run_add, options=OPENING_AND_READING)
    add_command(changes["remove"], RemoveCommand, run_remove)
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        if args and args[0] in changes:
            return changes[args[0]].parse_known_args(args[1:], namespace)
        return parse(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run_add(arguments: AddCommand, options: dict[str, Any]) -> int:
    from coder_plugin.backbones.names import TRANSFORMERS
    from coder_plugin.cli.checks import check_data, check_folder
    from coder_plugin.pretrained.hub_cache import is_on_hub

    check_folder(arguments.index, "an index", command="coder-plugin index")
    if (arguments.embeddings is None) == (arguments.data is None):
        raise CoderError("say what to add: a folder of coder-plugin embed, or --data")
    new: Any = arguments.embeddings
    if new is not None:
        if options:
            raise CoderError("EMBEDDINGS are encoded already: leave out the flags of reading data")
        check_folder(new, "embeddings", command="coder-plugin embed")
    else:
        assert arguments.data is not None
        kind = "pictures" if Path(arguments.data).is_dir() else options.get("dataset_type", "auto")
        check_data(arguments.data, flag="--data", kind=kind)
        new = {"data": arguments.data, "split": arguments.split, "options": options}
        model = str(options.get("model", ""))
        if os.path.isdir(model) or is_on_hub(model) or model.startswith(TRANSFORMERS):  # where the index's model is now
            new["model"] = options.pop("model")
    from coder_plugin.search.build import add

    added = add(arguments.index, new, replace=arguments.replace)
    replaced = f"; {added.replaced:,} of the same keys were removed" if added.replaced else ""
    images, captions = plural(added.images, "image"), plural(added.captions, "caption")
    echo(f"index {arguments.index}: {images} and {captions} added{replaced}")
    return 0


def run_remove(arguments: RemoveCommand) -> int:
    from coder_plugin.cli.checks import check_exists, check_folder

    check_folder(arguments.index, "an index", command="coder-plugin index")
    keys = list(arguments.key)
    if arguments.keys_file is not None:
        check_exists(arguments.keys_file, flag="--keys-file")
        try:
            with open_regular(arguments.keys_file, encoding="utf-8") as file:
                keys += [key for line in file if (key := line.rstrip("\r\n"))]
        except (OSError, UnicodeError) as error:
            raise CoderError(f"--keys-file {arguments.keys_file} cannot be read: {error}") from error
    if not keys:
        raise CoderError("no images to remove: give --key or --keys-file")
    from coder_plugin.search.build import remove

    removed = remove(arguments.index, keys)
    missing = removed.missing
    absent = f"; not in the index: {plural(len(missing), 'key')}, the first: {missing[0]!r}" if missing else ""
    echo(f"index {arguments.index}: {plural(removed.images, 'image')} removed{absent}")
    return 0


def run(arguments: Command, options: dict[str, Any]) -> int:
    from coder_plugin.cli.checks import check_folder, check_output

    if arguments.embeddings is not None:
        if arguments.run_folder is not None or arguments.data is not None or options or arguments.reranker:
            raise CoderError("--embeddings are encoded already: leave out the model, --data and how they are read")
        check_folder(arguments.embeddings, "embeddings", command="coder-plugin embed")
        check_output(arguments.output)
    elif arguments.data is None:
        raise CoderError("say what to index: --data and the model that encodes it, or --embeddings")
    else:
        check_encoding(arguments, options)
    from coder_plugin import distributed
    from coder_plugin.pretrained.device import default_device
    from coder_plugin.search.build import build_index
    from coder_plugin.search.embed import EmbedJob
    from coder_plugin.search.index import EMBEDDINGS

    default_device(timeout=BUILD_TIMEOUT)
    source: Any = arguments.embeddings
    if arguments.data is not None:
        source = EmbedJob(
            model=arguments.run_folder,
            output=str(Path(arguments.output) / EMBEDDINGS),
            options=options,
            tokens=None if arguments.rerank_items else False,
            reranker=arguments.reranker if arguments.rerank_items else None,
            **{name: getattr(arguments, name) for name in ("data", "export", "split", "what", "thumbnails")},
        )
    try:
        note = build_index(
            arguments.output, source, what=arguments.what, factory=arguments.factory, rerank=arguments.rerank_items
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was encoded is kept in {arguments.output}; the same command continues") from None
    if distributed.rank() == 0:
        echo(_summary(arguments.output, note))
        if "images" in note["vectors"]:
            words = search_words(arguments.output, on_scenes=arguments.data == "scenes")
            echo(f"next: {shlex.join(['coder-plugin', *words])}")
    return 0


def search_words(index: str, *, on_scenes: bool) -> list[str]:
    """The command that searches an index for something that its pictures may show."""
    text = "a large pink striped cross on a beige background" if on_scenes else "a dog"
    return ["search", index, "--text", text]


def _summary(folder: str, note: Mapping[str, Any]) -> str:
    vectors = ", ".join(
        f"{kind}: {note[kind]:,}{' x ' + str(each['views']) if each['views'] > 1 else ''} of {each['dimensions']} dimensions"
        for kind, each in note["vectors"].items()
    )
    sizes = f"{plural(note['images'], 'image')}, {plural(note['captions'], 'caption')}"
    return f"index {folder}: {sizes}; vectors of {vectors}{skipped(note['bad'])}"
