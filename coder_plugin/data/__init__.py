"""Data in: one call opens any data set that a reader is registered for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coder_plugin.data.source import Source

__all__ = ["guess_kind", "open_source"]

_TABLES = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".json": "karpathy"}


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
    """The reader that a data set's name calls for."""
    from coder_plugin.errors import CoderError

    if spec == "scenes":
        return "scenes"
    if spec.startswith("pipe:") or "::" in spec:
        return "webdataset"
    for extension, kind in _TABLES.items():
        if spec.lower().endswith(extension):
            return kind
    if ".tar" in spec.lower() or any(sign in spec for sign in "{*?["):
        return "webdataset"
    raise CoderError(
        f"cannot tell what kind of data {spec!r} is: give .tar shards, a .csv, .tsv or .txt table, "
        "a Karpathy .json or 'scenes', or name the kind"
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
