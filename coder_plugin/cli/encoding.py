"""Flags and checks that the commands which encode a data set have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from coder_plugin.errors import CoderError


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``RUN`` and ``--export``."""
    parser.add_argument(
        "run_folder", nargs="?", metavar="RUN", help="folder of a run, an export or a shared model; or name one with --model"
    )
    parser.add_argument(
        "--export", choices=("best", "last"), help="which export of the run [best; last if no validation was run]"
    )


def add_encoding(parser: argparse.ArgumentParser, *, output: str, data_required: bool) -> None:
    """Add the flags of what is encoded, by which model, and where to; ``output`` is what the help calls the folder."""
    from coder_plugin.cli.flags import add_reranker

    add_model(parser)
    parser.add_argument(
        "--data", required=data_required, metavar="DATA", help="a folder of pictures, shards, a .csv, .json, scenes …"
    )
    parser.add_argument("--output", required=True, metavar=output, help="the folder to write")
    parser.add_argument("--split", default="val", help="split of Karpathy files, precomp folders and scenes [val]")
    parser.add_argument(
        "--what", choices=("both", "images", "captions"), default="both",
        help="which vectors to keep; the captions' texts are kept in any case [both]"
    )
    parser.add_argument(
        "--thumbnails", type=int, default=128, metavar="PIXELS", help="longer side of the thumbnails; 0: no thumbnails [128]"
    )
    add_reranker(parser)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and the flags of opening a model and reading data."""
    from coder_plugin.cli.flags import add_flags
    from coder_plugin.config import OPENING, READING

    add_flags(parser, only=[*OPENING, *READING, "batch_size", "workers", "max_bad_samples", "max_image_pixels"])


def check_encoding(arguments: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Check, before torch is imported, what :func:`add_encoding` and :func:`add_reading` have read.

    Args:
        arguments: all flags.
        options: those of the configuration, by flat name.

    Raises:
        CoderError: no model, or a model, data, an option or a re-ranker that does not exist or is out of range.
    """
    from coder_plugin.cli.checks import check_data, check_model, check_options, check_output, check_reranker

    check_model(arguments.run_folder)
    check_options(options, reads=["image_root"])
    if arguments.run_folder is None and "model" not in options:
        raise CoderError("say which model encodes: a run's or export's folder, hf-hub:OWNER/NAME, or --model with --pretrained")
    check_output(arguments.output)
    if arguments.thumbnails < 0:
        raise CoderError(f"--thumbnails must be at least 0, got {arguments.thumbnails}")
    check_reranker(arguments.reranker)
    kind = "pictures" if os.path.isdir(arguments.data) else options.get("dataset_type", "auto")
    check_data(arguments.data, flag="--data", kind=kind)
