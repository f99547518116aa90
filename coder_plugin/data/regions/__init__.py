"""Region features of images, and the files that hold them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coder_plugin.data.regions.base import RegionFile

__all__ = ["guess_format", "open_regions"]


def open_regions(path: str, kind: str = "auto", *, split: str = "train") -> RegionFile:
    """Open a file of regions as a mapping of image names to :class:`~coder_plugin.data.regions.base.Regions`.

    Args:
        path: a precomp folder, region shards, or a plugin's layout.
        kind: its layout, one of the entry points ``coder_plugin.regions``; ``auto`` tells it from the path.
        split: which split, where one path holds several. If it holds a single one, that is read, since images are looked up
            by their names.

    Raises:
        CoderError: ``auto`` and no layout or several fit the path, the layout can only be converted, or the file is faulty.
    """
    from coder_plugin.errors import CoderError
    from coder_plugin.registry import load

    kind = guess_format(path) if kind == "auto" else kind
    layout: Any = load("regions", kind)
    if layout.open is None:
        first = path.partition("::")[0].rstrip("/")
        target = f"{os.path.splitext(first)[0]}-shards"
        raise CoderError(
            f"{path}: files of the layout {kind} are not trained on: convert them once (coder-plugin regions convert "
            f"'{path}' {target} --from {kind}), then give --regions {target}"
        )
    present = [] if layout.splits is None else layout.splits(path)
    return layout.open(path, split=present[0] if len(present) == 1 else split)


def guess_format(path: str) -> str:
    """The one layout that fits a path (of several joined by ``::`` the first), whether it exists or is still to be written.

    Raises:
        CoderError: none fits, or several do.

    Example:
        >>> guess_format("trainval_36.tsv"), guess_format("train-{000000..000005}.tar")
        ('tsv', 'shards')
    """
    from coder_plugin.errors import CoderError
    from coder_plugin.registry import load, names

    fitting = []
    for name in names("regions"):
        try:
            layout: Any = load("regions", name)
        except CoderError:
            continue  # a plugin that cannot be imported is reported when it is requested by name
        if layout.matches(path.partition("::")[0]):
            fitting.append(name)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CoderError(f"{path}: may be of the layouts {', '.join(fitting)}: name the right one")
    choices = ", ".join(names("regions")) or "none"
    raise CoderError(f"{path}: its layout cannot be inferred from its name; choose one of: {choices}")
