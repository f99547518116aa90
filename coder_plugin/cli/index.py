"""``coder-plugin index``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags, add_reranker
    from coder_plugin.config import OPENING, READING

    parser = commands.add_parser(
        "index",
        help="encode images and captions into an index to search",
        description="Encode a folder of pictures, shards, a CSV or any other data set, or region features, into one folder: "
        "FAISS index, keys, captions, thumbnails. An interrupted command continues where it stopped. Several processes: "
        "accelerate launch -m coder_plugin.cli index ...",
    )
    parser.add_argument(
        "run_folder", nargs="?", metavar="RUN", help="folder of a run, an export or a shared model; or name one with --model"
    )
    parser.add_argument("--data", required=True, metavar="DATA", help="a folder of pictures, shards, a .csv, .json, scenes …")
    parser.add_argument("--output", required=True, metavar="INDEX", help="the folder to write")
    parser.add_argument(
        "--export", choices=("best", "last"), help="which export of the run [best; last if no validation was run]"
    )
    parser.add_argument("--split", default="val", help="split of Karpathy files, precomp folders and scenes [val]")
    parser.add_argument(
        "--what", choices=("both", "images", "captions"), default="both",
        help="which vectors to keep; the captions' texts are kept in any case [both]"
    )
    parser.add_argument(
        "--factory", default="Flat", help="FAISS index factory string: Flat (exact), HNSW32, IVF1024,Flat, PQ64 … [Flat]"
    )
    parser.add_argument(
        "--thumbnails", type=int, default=128, metavar="PIXELS", help="longer side of the thumbnails; 0: no thumbnails [128]"
    )
    parser.add_argument(
        "--rerank-items",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what re-ranking needs, with --reranker or a model that has a fusion head [True]",
    )
    add_reranker(parser)
    add_flags(parser, only=[*OPENING, *READING, "batch_size", "workers", "max_bad_samples", "max_image_pixels"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_data, check_model, check_options, check_reranker
    from coder_plugin.cli.flags import read_options

    options = read_options(arguments)
    check_model(arguments.run_folder)
    check_options(options, reads=["image_root"])
    check_reranker(arguments.reranker)
    if arguments.run_folder is None and "model" not in options:
        raise CoderError("say which model encodes: a run's or export's folder, hf-hub:OWNER/NAME, or --model with --pretrained")
    kind = options.get("dataset_type", "auto")
    check_data(arguments.data, flag="--data", kind="pictures" if os.path.isdir(arguments.data) else kind)
    try:
        if summary := index_command(arguments):
            echo(summary)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was encoded is kept in {arguments.output}; the same command continues") from None
    return 0


def index_command(arguments: argparse.Namespace) -> str:
    """Build the index that the flags describe; returns a summary."""
    from coder_plugin import distributed
    from coder_plugin.cli.flags import read_options
    from coder_plugin.data.from_config import make_source, pictures_under_regions
    from coder_plugin.data.pictures import Pictures, is_pictures
    from coder_plugin.pretrained.open import default_export, open_pretrained, saved_data_config

    options = read_options(arguments)
    spec = arguments.run_folder
    data = saved_data_config(spec, {**options, "train_data": arguments.data, "val_data": arguments.data})
    if data.dataset_type == "auto" and data.regions is None and is_pictures(arguments.data):
        source: Any = Pictures(arguments.data, max_pixels=data.max_image_pixels)
        pictures = None
    else:
        source, pictures = make_source(data, split=arguments.split), pictures_under_regions(data, arguments.split)
    export = arguments.export or default_export(spec)
    manifest = write_index(
        arguments.output,
        open_pretrained(spec, options, export=export, name=spec, reranker=arguments.reranker),
        source,
        model_from={"spec": spec, "export": export, "options": options},
        data=data,
        location=arguments.data,
        split=arguments.split,
        what=arguments.what,
        factory=arguments.factory,
        thumbnails=arguments.thumbnails,
        rerank=arguments.rerank_items,
        pictures=pictures,
    )
    if distributed.rank() != 0:
        return ""
    vectors = ", ".join(
        f"{kind}: {each['items']:,}{' x ' + str(each['views']) if each['views'] > 1 else ''} of {each['dimensions']} dimensions"
        for kind, each in manifest["vectors"].items()
    )
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in manifest.get("unreadable_kinds", {}).items())
    lost = f"; {manifest['unreadable']:,} samples skipped ({kinds})" if manifest["unreadable"] else ""
    sizes_text = f"{manifest['images']:,} images, {manifest['captions']:,} captions"
    return f"index {arguments.output}: {sizes_text}; vectors of {vectors}{lost}"


def write_index(
    folder: str | Path,
    model: Any,
    source: Any,
    *,
    model_from: Mapping[str, Any],
    data: Any,
    location: str,
    split: str,
    **options: Any,
) -> dict[str, Any]:
    """Encode a data set into an index, after a check that the model reads it.

    Args:
        folder: to write.
        model: :class:`~coder_plugin.pretrained.open.PretrainedModel`.
        source: the data.
        model_from: what the model was opened with: ``spec``, ``export``, and ``options`` by flat name.
        data: how the data are read, a :class:`~coder_plugin.config.DataConfig`.
        location: their name or path.
        split: of them.
        **options: of :func:`~coder_plugin.index.build.build_index`.

    Returns:
        The manifest.
    """
    from coder_plugin.backbones.base import Backbone
    from coder_plugin.config import OPENING, READING
    from coder_plugin.index.build import absolute, build_index, model_record
    from coder_plugin.pretrained.build import check_data, first_image

    if options.get("what") != "captions":
        example = first_image(source, reads_regions=isinstance(model.model, Backbone))
        check_data(model.model, example, source.name, max_regions=model.config.max_regions)
    opened = {name: value for name, value in model_from["options"].items() if name in OPENING}
    return build_index(
        folder,
        model.encoder(),
        source,
        model=model_record(model, model_from["spec"], export=model_from["export"], options=opened),
        data={
            "data": absolute_data(location),
            "split": split,
            "precision": model.config.precision,
            **{name: absolute(getattr(data, name)) for name in READING},
        },
        **options,
    )


def absolute_data(data: str) -> str:
    """The data's name, the same from whichever working directory; commands and addresses stay as they are."""
    from coder_plugin.data import HUB

    unchanged = data == "scenes" or "::" in data or "://" in data or data.startswith(("pipe:", *HUB))
    return data if unchanged else os.path.abspath(data)
