"""What can be checked of a command's arguments before torch is imported, which takes seconds."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from coder_plugin.backbones.names import check_model_name
from coder_plugin.config import merge
from coder_plugin.data import HUB, check_location, guess_kind
from coder_plugin.errors import CoderError, did_you_mean
from coder_plugin.locations import MOST_SHARDS
from coder_plugin.objective import check_names
from coder_plugin.registry import list_plugins, names

#: Options that name files or folders which must exist.
FILES = (
    "train_data", "val_data", "image_root", "concepts", "negatives_file", "pretrained_image_path", "zeroshot", "classnames"
)
#: Files of weights; anything else that ``--pretrained`` names may be a tag of open_clip.
_WEIGHTS = re.compile(r"\.(pt|pth|bin|safetensors|npz)$")

log = logging.getLogger(__name__)


def check_options(
    flags: Mapping[str, Any],
    *,
    file: Mapping[str, Any] | None = None,
    file_name: str = "file",
    reads: Collection[str] = FILES,
) -> None:
    """Check the options of a command as far as that is possible without torch.

    Args:
        flags: options by flat name.
        file: those of ``--config``, if they are not among ``flags``; None: none.
        file_name: what messages call it.
        reads: those of :data:`FILES` that the command opens; a run's configuration names others too.

    Raises:
        CoderError: an option of the wrong type, a name that does not exist, a loss that is not of the grammar, or a file that
            is missing.
    """
    options, _ = merge([(file_name, file or {}), ("flag", flags)])
    for name, value in options.items():
        if value == "" and name not in ("report_to",):
            raise CoderError(f"--{name.replace('_', '-')} is empty")
    kind = options.get("dataset_type", "auto")
    if kind not in ("auto", *names("readers")):
        raise CoderError(f"--dataset-type {kind}: unknown reader{did_you_mean(kind, names('readers')) or ';'} "
                         f"known: {', '.join(names('readers'))}")
    if "loss" in options:
        check_names(options["loss"])
    if "model" in options:
        check_model_name(options["model"])
    for name in FILES:
        if name in options and name in reads:
            flag = f"--{name.replace('_', '-')}"
            if name.endswith("_data"):
                check_data(options[name], flag=flag, kind=kind)
            else:
                check_exists(options[name], flag=flag)
    if {"train_data", "val_data"} <= {*options} & {*reads}:
        _warn_of_shared_files(options["train_data"], options["val_data"], kind)
    weights = options.get("pretrained")
    if weights is not None and (os.sep in weights or _WEIGHTS.search(weights)):
        check_exists(weights, flag="--pretrained")


def check_data(spec: str, *, flag: str, kind: str = "auto") -> None:
    """Raise a ``CoderError`` with the flag for data that do not exist on this machine, or that no reader knows."""
    try:
        ours = [each.name for each in list_plugins("readers") if each.distribution == "coder-plugin"]
        if kind in ("auto", *ours):  # what a reader of another package calls a data set may be any text
            check_location(spec)
        if kind == "auto" and not spec.startswith("<"):
            guess_kind(spec)
    except CoderError as error:
        raise CoderError(f"{flag} {error}") from error


def _warn_of_shared_files(train: str, val: str, kind: str) -> None:
    """Warn where validation data are training data, by whatever name or link."""
    training, validation = (_files(each, guess_kind(each) if kind == "auto" else kind) for each in (train, val))
    if shared := [name for file, name in validation.items() if file in training]:
        log.warning(
            "--val-data %s: %d of %d files are also in --train-data, such as %s: recall on them is not that on new images",
            val, len(shared), len(validation), shared[0],
        )


def _files(spec: str, kind: str) -> dict[Any, str]:
    """The files of data that have one split: names by device and number, which links share, or of remote ones by name."""
    if kind not in ("caps", "coco", "csv", "hf", "hf-streaming", "img2dataset", "webdataset"):
        return {}
    if spec.startswith(HUB) and not spec.startswith("hf://"):
        return {spec: spec} if spec.count(":") > 1 else {}  # with its split
    files: dict[Any, str] = {}
    for part in spec.split("::"):
        try:
            patterns = list(islice(braceexpand(part), MOST_SHARDS))
        except ValueError:  # unbalanced braces, which the reader reports
            patterns = [part]
        for pattern in patterns:
            path = re.sub("^file:(//)?", "", pattern)
            for name in sorted(glob.glob(path)) or [pattern]:
                inside = os.path.isdir(name) and kind != "img2dataset"  # of others only shards have one split
                for each in glob.glob(os.path.join(glob.escape(name), "*.tar")) if inside else [name]:
                    status = os.stat(each) if os.path.exists(each) else None
                    files[each if status is None else (status.st_dev, status.st_ino)] = each
    return files


def check_exists(path: str, *, flag: str) -> None:
    """Raise a ``CoderError`` with the flag, and the most similar name, for a file or folder that does not exist."""
    try:
        check_location(path)
    except CoderError as error:
        raise CoderError(f"{flag} {error}") from error


def check_model(spec: str | None) -> None:
    """Raise a ``CoderError`` if a run's, export's or shared model's folder does not exist; one of the hub is not looked up."""
    if spec is not None and not spec.startswith("hf-hub:"):
        check_folder(spec, "a run or an export", command="coder-plugin train")


def check_parent(path: str | None, flag: str) -> None:
    """Raise a ``CoderError`` if the folder of a file to write does not exist; None: nothing is written."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise CoderError(f"{flag} {path}: the folder {Path(path).parent} does not exist")


def check_output(folder: str) -> None:
    """Raise a ``CoderError`` if a folder to write is a file."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise CoderError(f"--output {folder} is a file: name a folder")


@contextmanager
def writing(path: str | Path, flag: str) -> Iterator[None]:
    """Raise a ``CoderError`` that names the flag and its file in place of an ``OSError`` while it is written."""
    try:
        yield
    except OSError as error:
        raise CoderError(f"{flag} {path} cannot be written: {error.strerror or error}") from error


def check_folder(folder: str, what: str, *, command: str) -> None:
    """Raise a ``CoderError`` if the folder of ``what``, such as "a run", does not exist; ``command`` makes one."""
    path = Path(folder)
    if path.is_dir():
        return
    if path.exists():
        raise CoderError(f"{folder} is a file: give the folder of {what}")
    beside = sorted(each.name for each in path.absolute().parent.glob("*/")) if path.absolute().parent.is_dir() else []
    hint = did_you_mean(path.name, beside, folder=os.path.dirname(folder.rstrip(os.sep)))
    hint = hint or f": give the folder of {what}, which {command} makes"
    raise CoderError(f"{folder}: no such folder{hint}")
