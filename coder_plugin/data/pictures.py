"""A folder of pictures as a source without captions, for extraction and for an index."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from coder_plugin.data.item import Item
from coder_plugin.data.source import decode_image
from coder_plugin.errors import CoderError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def is_pictures(spec: str) -> bool:
    """Whether a name is that of a plain folder, none of a layout that a reader knows."""
    from coder_plugin.data import guess_kind

    if not os.path.isdir(spec):
        return False
    try:
        guess_kind(spec)
    except CoderError:
        return True
    return False


class Pictures:
    """Every picture below a folder, in the order of their paths; a picture's key is its path from the folder.

    Args:
        folder: whose files with the endings in ``ENDINGS`` are taken, in any case of letters.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        root = Path(folder)
        found = (path for path in root.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
        self._keys = sorted(path.relative_to(root).as_posix() for path in found)
        if not self._keys:
            raise CoderError(f"{folder}: no pictures ({', '.join(ENDINGS)})")

    @property
    def num_images(self) -> int:
        return len(self._keys)

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        for start in range(rank * block, len(self._keys), world_size * block):
            for index in range(start, min(start + block, len(self._keys))):
                key = self._keys[index]
                yield index, Item(key, (), partial(decode_image, os.path.join(self.name, key)))
