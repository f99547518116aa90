"""Data in: one call opens any data set that a reader is registered for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coder_plugin.data.source import Source

__all__ = ["guess_kind", "open_source"]

_TABLES = {"_caps.txt": "caps", ".csv": "csv", ".tsv": "csv", ".txt": "csv"}
_PEEK = 65536  # bytes: COCO's files have tens of megabytes


def open_source(spec: str, kind: str = "auto", *, split: str = "train", **options: Any) -> Source:
    """The data set that ``spec`` names, read by the reader ``kind``: ours or a plugin's (``coder_plugin.readers``).

    Options that are None count as not given, so that a command line can hand over all its flags; any other option that
    the reader does not have is an error. A reader may return a plain sequence of items.
    """
    from coder_plugin.data.source import ItemSource
    from coder_plugin.registry import load

    kind = guess_kind(spec) if kind == "auto" else kind
    reader: Any = load("readers", kind)
    given = {name: value for name, value in options.items() if value is not None}
    _check_options(kind, reader, given)
    source = reader(split, **given) if kind == "scenes" else reader(spec, split=split, **given)
    if isinstance(source, Sequence):
        return ItemSource(source, name=f"scenes ({split})" if kind == "scenes" else spec)
    return source


def guess_kind(spec: str) -> str:
    """The reader that a data set's name calls for; JSON files and folders are told apart by what is in them."""
    import os

    from coder_plugin.errors import CoderError

    if spec == "scenes":
        return "scenes"
    if spec.startswith("pipe:") or "::" in spec:
        return "webdataset"
    if os.path.isdir(spec):
        return _folder_kind(spec)
    for ending, kind in _TABLES.items():
        if spec.lower().endswith(ending):
            return kind
    if spec.lower().endswith(".json"):
        return _json_kind(spec)
    if ".tar" in spec.lower() or any(sign in spec for sign in "{*?["):
        return "webdataset"
    if not os.path.exists(spec):
        raise CoderError(f"{spec!r}: no such file or folder")
    raise CoderError(
        f"cannot tell what kind of data {spec!r} is: give .tar shards, a .csv, .tsv or .txt table, a _caps.txt, "
        "Karpathy's or COCO's .json, a folder of SCAN's precomp, img2dataset or CLIP_benchmark, or 'scenes', or name the "
        "kind (--dataset-type)"
    )


def _json_kind(spec: str) -> str:
    """COCO's annotations, or Karpathy's with the sentences in each image; the signs are in every entry, so its start tells."""
    try:
        with open(spec, "rb") as file:
            start = file.read(_PEEK)
    except OSError:
        return "karpathy"  # the reader says what is wrong with the file
    coco = any(sign in start for sign in (b'"annotations"', b'"file_name"', b'"image_id"'))
    return "coco" if coco and b'"sentences"' not in start else "karpathy"


def _folder_kind(spec: str) -> str:
    import glob
    import os

    from coder_plugin.errors import CoderError

    def has(pattern: str) -> bool:
        return next(glob.iglob(os.path.join(glob.escape(spec), pattern)), None) is not None

    if has("nshards.txt") or has("*/nshards.txt"):
        return "webdataset"
    if has("*_ims.npy") or has("precomp/*_ims.npy"):
        return "precomp"
    if has("[0-9]*/[0-9]*.json") or has("[0-9]*/[0-9]*.txt"):
        return "img2dataset"
    raise CoderError(
        f"cannot tell what kind of data the folder {spec!r} holds: neither SCAN's (train_ims.npy), CLIP_benchmark's "
        f"(nshards.txt) nor img2dataset's files (00000/000000000.txt); of shards, give '{spec}/*.tar'"
    )


def _check_options(kind: str, reader: Any, given: dict[str, Any]) -> None:
    import inspect

    from coder_plugin.errors import CoderError

    parameters = inspect.signature(reader).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "split"]
    for name in given:
        if name not in known:
            raise CoderError(f"reader {kind!r} has no option {name!r}; it has: {', '.join(known) or 'none'}")
