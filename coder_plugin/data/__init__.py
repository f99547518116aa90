"""Open any data set that a reader is registered for."""

from __future__ import annotations

import glob
import importlib
import inspect
import os
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coder_plugin.data.collator import ImageTextCollator
    from coder_plugin.data.pixels import to_device
    from coder_plugin.data.source import Source

__all__ = ["ImageTextCollator", "check_location", "guess_kind", "open_source", "to_device"]

#: Endings of picture files: those that Pillow registers for the formats that are read.
PICTURES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff")
#: How data sets of the Hugging Face hub begin; shards on it begin with ``hf://``.
HUB = ("hf:", "hf-streaming:")
_TABLES = {"_caps.txt": "caps", ".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "hf"}
#: What a folder of each layout has, in the order in which they are looked for.
_FOLDERS = {
    "webdataset": ("nshards.txt", "*/nshards.txt", "[0-9]*.tar"),  # CLIP_benchmark's, and img2dataset's
    "precomp": ("*_ims.npy", "precomp/*_ims.npy"),
    "img2dataset": ("[0-9]*/[0-9]*.json", "[0-9]*/[0-9]*.txt"),
    "hf": ("state.json", "dataset_dict.json", "metadata.csv", "metadata.jsonl", "*.parquet", "*/*.parquet"),
}
_PATTERN = "{*?["
_PEEK = 65536  # bytes: COCO's files have tens of megabytes


def open_source(spec: Any, kind: str = "auto", *, split: str = "train", **options: Any) -> Source:
    """Open the data set ``spec`` by the reader ``kind``, one of the entry points ``coder_plugin.readers``.

    Args:
        spec: a file, folder, shard pattern, name on the hub (``hf:OWNER/NAME``), or ``scenes``; or a ``Dataset`` or
            ``IterableDataset`` of Hugging Face's ``datasets``.
        kind: the reader; ``auto`` tells it from the spec (:func:`guess_kind`).
        split: which split, where a data set holds several.
        options: of the reader; those that are None are ignored. Several readers have ``image_root``, the folder that paths of
            pictures are relative to; ``pictures``, False if only the captions are needed, for features from other files;
            ``metadata``, names of further columns or fields whose values an item keeps; and ``negatives_key``, the column or
            field of lists of hard negatives, which an image, and the data, may lack.

    Raises:
        CoderError: an unknown reader or option, or data that are missing or faulty.

    Example:
        >>> source = open_source("scenes", count=3)
        >>> [len(item.captions) for _, item in source.items()]
        [5, 5, 5]
    """
    from coder_plugin.data.source import ItemSource
    from coder_plugin.errors import CoderError
    from coder_plugin.registry import load

    if kind == "auto":
        kind = guess_kind(spec) if isinstance(spec, str) else "hf"
    options = {name: value for name, value in options.items() if value is not None}
    allowed = reader_options(kind)
    for name in options:
        if allowed is not None and name not in allowed:
            raise CoderError(f"reader {kind!r} has no option {name!r}; it has: {', '.join(allowed) or 'none'}")
    if kind == "webdataset" and os.path.isdir(spec) and not _has(spec, "nshards.txt") and _has(spec, "*.tar"):
        spec = os.path.join(glob.escape(spec), "*.tar")
    reader: Any = load("readers", kind)
    source = reader(split, **options) if kind == "scenes" else reader(spec, split=split, **options)
    if isinstance(source, Sequence):
        return ItemSource(source, name=f"scenes ({split})" if kind == "scenes" else spec)
    return source


def reader_options(kind: str) -> tuple[str, ...] | None:
    """The options of a reader, which are its keyword-only arguments; None: it takes any.

    Example:
        >>> reader_options("img2dataset")
        ('metadata',)
    """
    from coder_plugin.registry import load

    reader: Any = load("readers", kind)
    parameters = inspect.signature(reader).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "split")


def guess_kind(spec: str) -> str:
    """The reader for a data set, chosen by its name or, for JSON files and folders, from their content.

    Raises:
        CoderError: no reader fits, or nothing exists there.

    Example:
        >>> guess_kind("train-{000000..000005}.tar"), guess_kind("captions.csv")
        ('webdataset', 'csv')
    """
    from coder_plugin.errors import CoderError

    name = spec.lower()
    if spec == "scenes":
        return "scenes"
    if spec.startswith(HUB) and not spec.startswith("hf://"):
        return spec.partition(":")[0]
    if spec.startswith("pipe:") or "::" in spec:
        return "webdataset"
    if os.path.isdir(spec):
        return _folder_kind(spec)
    for ending, kind in _TABLES.items():
        if name.endswith(ending):
            return kind
    if name.endswith(".json"):
        return _json_kind(spec)
    if ".tar" in name or any(sign in spec for sign in _PATTERN):
        return "webdataset"
    check_location(spec)
    if name.endswith(PICTURES):
        raise CoderError(f"{spec} is one picture: give the folder that it is in, or a .csv of pictures and captions")
    raise CoderError(
        f"cannot tell what kind of data {spec!r} is: give .tar shards, a .csv, .tsv or .txt table, a _caps.txt, "
        "Karpathy's or COCO's .json, a folder of SCAN's precomp, img2dataset, CLIP_benchmark or Hugging Face datasets, "
        "hf:OWNER/NAME of the hub, .parquet files, or 'scenes', or set the kind (--dataset-type)"
    )


def check_location(spec: str) -> None:
    """Check that a data set exists, if its name is one path on this machine.

    Args:
        spec: as in :func:`open_source`; patterns, addresses, commands and ``scenes`` are not looked up.

    Raises:
        CoderError: no such file or folder; names the most similar one beside it.
    """
    from coder_plugin.errors import CoderError, did_you_mean

    if not is_path(spec) or os.path.exists(spec):
        return
    folder, name = os.path.split(os.path.abspath(spec))
    if not os.path.isdir(folder):
        raise CoderError(f"{spec}: no such file or folder; there is no folder {folder} either")
    hint = did_you_mean(name, sorted(os.listdir(folder))[:10_000], folder=os.path.dirname(spec.rstrip(os.sep)))
    raise CoderError(f"{spec}: no such file or folder{hint}")


def is_path(spec: str) -> bool:
    """Whether a data set's name is one path on this machine: no pattern, address, command or built-in data set."""
    marks = ("<", "pipe:", "file:", *HUB)
    patterned = any(sign in spec for sign in ("::", "://", *_PATTERN))
    return spec != "scenes" and not spec.startswith(marks) and not patterned


def _json_kind(spec: str) -> str:
    """``coco`` or ``karpathy``, from the keys in the first entries of the file."""
    try:
        with open(spec, "rb") as file:
            start = file.read(_PEEK)
    except OSError:
        return "karpathy"  # the reader reports what is wrong with the file
    coco = any(sign in start for sign in (b'"annotations"', b'"file_name"', b'"image_id"'))
    return "coco" if coco and b'"sentences"' not in start else "karpathy"


def _has(folder: str, pattern: str) -> bool:
    return next(glob.iglob(os.path.join(glob.escape(folder), pattern)), None) is not None


def _folder_kind(spec: str) -> str:
    from coder_plugin.errors import CoderError

    kind = next((kind for kind, patterns in _FOLDERS.items() if any(_has(spec, pattern) for pattern in patterns)), None)
    if kind and kind != "hf":
        return kind
    for shards in ("*.tar", "*/*.tar"):  # Parquet files beside them only list what they hold
        if _has(spec, shards):
            raise CoderError(f"{spec}: a folder of shards: give those of this split, such as '{spec}/{shards}'")
    if kind and _has(spec, "*.tfrecord"):
        raise CoderError(f"{spec}: tfrecord files are not read: write shards (img2dataset --output_format webdataset)")
    if kind:
        return kind
    inside = islice(os.walk(spec), 20)  # also in subfolders, but not all of a large tree
    if any(name.lower().endswith(PICTURES) for _, _, names in inside for name in names):
        raise CoderError(
            f"{spec}: a folder of pictures without captions: give the table of their captions, a .csv with the columns "
            f"filepath and title, or Karpathy's or COCO's .json with --image-root {spec}, or shards of pictures and captions; "
            "pictures alone can be searched (coder-plugin index)"
        )
    raise CoderError(
        f"cannot tell what kind of data the folder {spec!r} holds: neither SCAN's (train_ims.npy), CLIP_benchmark's "
        "(nshards.txt), img2dataset's (00000.tar or 00000/000000000.txt) nor Hugging Face datasets' files (state.json, "
        f".parquet); for shards, give '{spec}/*.tar'"
    )


def __getattr__(name: str) -> Any:
    """Load what needs torch where it is first used."""
    if name in (lazy := {"ImageTextCollator": "collator", "to_device": "pixels"}):
        return getattr(importlib.import_module(f"{__name__}.{lazy[name]}"), name)
    raise AttributeError(f"module 'coder_plugin.data' has no attribute {name!r}")
