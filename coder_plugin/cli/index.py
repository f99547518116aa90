"""``coder-plugin index``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular
from coder_plugin.terminal import echo, plural

#: The other ranks wait that long, at most, while the first builds the index.
BUILD_TIMEOUT = timedelta(days=7)


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.encoding import add_encoding, add_reading

    parser = commands.add_parser(
        "index",
        help="encode images and captions into an index to search",
        description="Encode a folder of pictures, shards, a CSV or any other data set, or region features, into one folder: "
        "FAISS index, keys, captions, thumbnails. An interrupted command continues where it stopped. Several processes: "
        "accelerate launch -m coder_plugin.cli index ... To change a finished index: coder-plugin index add INDEX EMBEDDINGS, "
        "coder-plugin index remove INDEX --key KEY.",
    )
    add_encoding(parser, output="INDEX", data_required=False)
    parser.add_argument(
        "--embeddings", metavar="DIR", help="instead of RUN and --data: what coder-plugin embed wrote; nothing is encoded"
    )
    parser.add_argument(
        "--factory", default="Flat", help="FAISS index factory string: Flat (exact), HNSW32, IVF1024,Flat, PQ64 … [Flat]"
    )
    parser.add_argument(
        "--rerank-items",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what re-ranking needs, with --reranker or a model that has a fusion head [True]",
    )
    _add_segment_size(parser)
    add_reading(parser)
    parser.set_defaults(run=run)
    _add_changes(parser)


def _add_segment_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--segment-size", type=int, metavar="N",
        help="images of a segment; an index is built and searched segment by segment, and building a larger one needs more "
        "memory, except with --factory Flat [1,000,000 with Flat, else 128 MiB of vectors]",
    )  # fmt: skip


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """``index add`` and ``index remove``: the first argument of ``index`` is else a run's folder, so they are no subparsers."""
    changes = {}
    for name, change, description in (
        ("add", run_add, "Append the images of an embeddings folder to an index. Nothing is encoded, and no file is changed."),
        ("remove", run_remove, "Remove images from what searches find. Their data stay in the index's files."),
    ):
        changes[name] = type(parser)(prog=f"{parser.prog} {name}", description=description)
        changes[name].add_argument("index", metavar="INDEX", help="a folder written by coder-plugin index")
        changes[name].set_defaults(run=change)
    changes["add"].add_argument("embeddings", metavar="EMBEDDINGS", help="a folder written by coder-plugin embed, by one model")
    changes["add"].add_argument("--replace", action="store_true", help="remove images of the index that have the same keys")
    _add_segment_size(changes["add"])
    changes["remove"].add_argument("--key", nargs="+", metavar="KEY", help="keys of images")
    changes["remove"].add_argument("--keys-file", metavar="FILE", help="a text file with a key in each line")
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        if args and args[0] in changes:
            return changes[args[0]].parse_known_args(args[1:], namespace)
        return parse(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run_add(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_folder

    check_folder(arguments.index, "an index", command="coder-plugin index")
    check_folder(arguments.embeddings, "embeddings", command="coder-plugin embed")
    _check_segment_size(arguments)
    from coder_plugin.index.changes import add

    added = add(arguments.index, arguments.embeddings, replace=arguments.replace, segment_size=arguments.segment_size)
    replaced = f"; {added.replaced:,} of the same keys were removed" if added.replaced else ""
    images, captions = plural(added.images, "image"), plural(added.captions, "caption")
    echo(f"index {arguments.index}: {images} and {captions} added{replaced}")
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_exists, check_folder

    check_folder(arguments.index, "an index", command="coder-plugin index")
    keys = list(arguments.key or [])
    if arguments.keys_file is not None:
        check_exists(arguments.keys_file, flag="--keys-file")
        try:
            with open_regular(arguments.keys_file, encoding="utf-8") as file:
                keys += [key for line in file if (key := line.rstrip("\r\n"))]
        except (OSError, UnicodeError) as error:
            raise CoderError(f"--keys-file {arguments.keys_file} cannot be read: {error}") from error
    if not keys:
        raise CoderError("no images to remove: give --key or --keys-file")
    from coder_plugin.index.changes import remove

    removed = remove(arguments.index, keys)
    missing = removed.missing
    absent = f"; not in the index: {plural(len(missing), 'key')}, the first: {missing[0]!r}" if missing else ""
    echo(f"index {arguments.index}: {plural(removed.images, 'image')} removed{absent}")
    return 0


def _check_segment_size(arguments: argparse.Namespace) -> None:
    if arguments.segment_size is not None and arguments.segment_size < 1:
        raise CoderError(f"--segment-size must be at least 1 image, got {arguments.segment_size}")


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.encoding import check_encoding
    from coder_plugin.cli.flags import read_options

    options = read_options(arguments)
    _check_segment_size(arguments)
    if arguments.embeddings is not None:
        return _run_embeddings(arguments, options)
    if arguments.data is None:
        raise CoderError("say what to index: --data and the model that encodes it, or --embeddings")
    check_encoding(arguments, options)
    try:
        if summary := index_command(arguments, options):
            echo(summary)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was encoded is kept in {arguments.output}; the same command continues") from None
    return 0


def _run_embeddings(arguments: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Build an index from an embeddings folder."""
    from coder_plugin.cli.checks import check_folder, check_output

    if arguments.run_folder is not None or arguments.data is not None or options or arguments.reranker:
        raise CoderError("--embeddings are encoded already: leave out the model, --data and how they are read")
    check_folder(arguments.embeddings, "embeddings", command="coder-plugin embed")
    check_output(arguments.output)
    from coder_plugin import distributed
    from coder_plugin.index.build import build_from_embeddings
    from coder_plugin.pretrained.device import default_device

    default_device(timeout=BUILD_TIMEOUT)
    manifest = build_from_embeddings(
        arguments.output,
        arguments.embeddings,
        what=arguments.what,
        factory=arguments.factory,
        rerank=arguments.rerank_items,
        segment_size=arguments.segment_size,
    )
    if distributed.rank() == 0:
        echo(_summary(arguments.output, manifest))
    return 0


def index_command(arguments: argparse.Namespace, options: Mapping[str, Any]) -> str:
    """Build the index that the flags describe; returns a summary."""
    from coder_plugin import distributed
    from coder_plugin.index.build import EMBEDDINGS, ROWS_PER_FILE, build_from_job
    from coder_plugin.index.job import EmbedJob
    from coder_plugin.pretrained.device import default_device

    default_device(timeout=BUILD_TIMEOUT)
    folder = Path(arguments.output)
    job = EmbedJob(
        model=arguments.run_folder,
        data=arguments.data,
        output=str(folder / EMBEDDINGS),
        options=options,
        export=arguments.export,
        split=arguments.split,
        what=arguments.what,
        thumbnails=arguments.thumbnails,
        tokens=None if arguments.rerank_items else False,
        reranker=arguments.reranker if arguments.rerank_items else None,
        rows_per_file=ROWS_PER_FILE,
    )
    manifest = build_from_job(folder, job, factory=arguments.factory, segment_size=arguments.segment_size)
    return _summary(arguments.output, manifest) if distributed.rank() == 0 else ""


def _summary(folder: str, manifest: Mapping[str, Any]) -> str:
    vectors = ", ".join(
        f"{kind}: {each['items']:,}{' x ' + str(each['views']) if each['views'] > 1 else ''} of {each['dimensions']} dimensions"
        for kind, each in manifest["vectors"].items()
    )
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in manifest["unreadable_kinds"].items())
    lost = f"; {plural(manifest['unreadable'], 'sample')} skipped ({kinds})" if manifest["unreadable"] else ""
    sizes_text = f"{plural(manifest['images'], 'image')}, {plural(manifest['captions'], 'caption')}"
    return f"index {folder}: {sizes_text}; vectors of {vectors}{lost}"
