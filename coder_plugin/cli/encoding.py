"""Flags that several commands have, and checks of those that encode a data set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coder_plugin.config import MISSING, OPENING, READING, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import plural

#: Options of training with which a model is opened and data are read.
OPENING_AND_READING = (*OPENING, *READING, "batch_size", "workers", "max_bad_samples", "max_image_pixels")


@dataclass(frozen=True, kw_only=True)
class ExportFlag:
    """Which export of a run is opened."""

    export: str | None = option(None, "which export of the run [best; last if no validation was run]", choices=("best", "last"))


@dataclass(frozen=True, kw_only=True)
class RerankerFlag:
    """What re-ranks."""

    reranker: str | None = option(
        None, "re-rank without a trained head: maxsim, by the tokens of images and texts, or a name from another package [the "
        "model's fusion head, if it has one]"
    )

    def __post_init__(self) -> None:
        from coder_plugin.heads.rerankers import parse_reranker

        if self.reranker is not None:
            parse_reranker(self.reranker)  # it raises for an unknown one


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ExportFlag):
    """The model that is opened."""

    run_folder: str | None = option(
        None, "folder of a run, an export or a shared model; else --model and --pretrained", metavar="RUN", positional=True
    )


@dataclass(frozen=True, kw_only=True)
class EncodingFlags(ModelFlags, RerankerFlag):
    """What is encoded, by which model, and where to."""

    data: str | None = option(None, "a folder of pictures, shards, a .csv, .json, scenes …", metavar="DATA")
    output: str = option(MISSING, "the folder to write", metavar="DIR")
    split: str = option("val", "split of Karpathy files, precomp folders and scenes")
    what: str = option(
        "both", "which vectors to keep; the captions' texts are kept in any case", choices=("both", "images", "captions")
    )
    thumbnails: int = option(128, "longer side of the thumbnails; 0: no thumbnails", metavar="PIXELS", at_least=0)


@dataclass(frozen=True, kw_only=True)
class IndexFlags:
    """An index that is opened."""

    index: str = option(MISSING, "a folder written by coder-plugin index", metavar="INDEX", positional=True)
    search_parameters: str | None = option(None, "FAISS search parameters, such as nprobe=16 or efSearch=64", metavar="P")
    gpu: bool = option(True, "search on a GPU, if FAISS sees one")
    verify: bool = option(False, "verify the files' checksums first")


@dataclass(frozen=True, kw_only=True)
class SearchFlags(IndexFlags, RerankerFlag):
    """How an index is searched."""

    model_folder: str | None = option(
        None,
        "the index's model, if it has moved or is on the hub: a run, an export, hf-hub:OWNER/NAME or transformers:OWNER/NAME",
        flag="model",
        metavar="RUN",
    )
    rerank: str | None = option(
        None,
        "candidates that are re-ranked, or all; 0: none [32, all if only the fusion was trained, 0 if the index lacks what "
        "it needs]",
        metavar="K",
    )


def check_encoding(arguments: EncodingFlags, options: Mapping[str, Any]) -> None:
    """Check, before torch is imported, what is encoded by which model.

    Args:
        arguments: all flags.
        options: those of the configuration, by flat name.

    Raises:
        CoderError: no model, or a model, data or an option that does not exist or is out of range.
    """
    from coder_plugin.cli.checks import check_data, check_model, check_options, check_output

    check_model(arguments.run_folder)
    check_options(options, reads=["image_root"])
    if arguments.run_folder is None and "model" not in options:
        raise CoderError("name the encoding model: a run's or export's folder, hf-hub:OWNER/NAME, or --model with --pretrained")
    check_output(arguments.output)
    assert arguments.data is not None
    kind = "pictures" if os.path.isdir(arguments.data) else options.get("dataset_type", "auto")
    check_data(arguments.data, flag="--data", kind=kind)


def skipped(bad: Mapping[str, int]) -> str:
    """The end of a summary: how many samples could not be used, by kind; empty if there are none.

    Example:
        >>> skipped({"missing": 2, "damaged": 1}), skipped({})
        ('; 3 samples skipped (damaged 1, missing 2)', '')
    """
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(bad.items()))
    return f"; {plural(sum(bad.values()), 'sample')} skipped ({kinds})" if bad else ""
