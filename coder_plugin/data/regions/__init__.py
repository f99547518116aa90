"""Region features of images: what they are, and the files that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coder_plugin.data.regions.base import RegionFile

__all__ = ["guess_format", "open_regions"]


def open_regions(path: str, kind: str = "auto", *, split: str = "train") -> RegionFile:
    """The file of regions at ``path``, in the format ``kind``: ours or a plugin's (``coder_plugin.regions``).

    ``split`` is looked at where a layout keeps several in one place.

    Raises:
        CoderError: ``auto`` and no format or several fit the path; or the file is not what it should be.
    """
    from coder_plugin.registry import load

    layout: Any = load("regions", guess_format(path) if kind == "auto" else kind)
    return layout.open(path, split=split)


def guess_format(path: str) -> str:
    """The one format that the path, or what is there, looks like."""
    from coder_plugin.errors import CoderError
    from coder_plugin.registry import load, names

    fitting = []
    for name in names("regions"):
        try:
            layout: Any = load("regions", name)
        except CoderError:
            continue  # a plugin that cannot be imported: its trouble is for whoever asks for it by name
        if layout.matches(path):
            fitting.append(name)
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(names("regions")) or "none"
    if fitting:
        raise CoderError(f"{path}: may be of the formats {', '.join(fitting)}: name the one it is")
    raise CoderError(f"{path}: cannot tell its format from its name; name it, one of: {known}")
