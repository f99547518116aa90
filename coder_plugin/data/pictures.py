"""A folder of pictures as a source without captions, for region extraction and search indexes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.data import PICTURES
from coder_plugin.data.decode import check_max_pixels, decode_image
from coder_plugin.data.item import Item
from coder_plugin.errors import CoderError


def is_pictures(spec: str) -> bool:
    """Whether ``spec`` is a folder that no reader of data sets recognises."""
    from coder_plugin.data import guess_kind

    if not os.path.isdir(spec):
        return False
    try:
        guess_kind(spec)
    except CoderError:
        return True
    return False


def open_images(spec: str, *, split: str = "train", **reading: Any) -> Any:
    """A folder of pictures, or any data set of :func:`coder_plugin.data.open_source` with its options ``reading``."""
    from coder_plugin.data import open_source

    if os.path.isdir(spec) and all(value in (None, "auto") for name, value in reading.items() if name != "max_pixels"):
        return Pictures(spec, max_pixels=reading.get("max_pixels"))
    return open_source(spec, split=split, **reading)


class Pictures:
    """All pictures in a folder and its subfolders, ordered by path; a picture's key is its path from the folder.

    Args:
        folder: its files with the endings in ``PICTURES``, in upper or lower case, are the pictures.
        max_pixels: as in :func:`~coder_plugin.data.decode.decode_image`.

    Raises:
        CoderError: there are none.
    """

    def __init__(self, folder: str, *, max_pixels: int | None = None) -> None:
        self.name = folder
        self._max_pixels = check_max_pixels(max_pixels)
        root = Path(folder)
        files = (path for path in root.rglob("*") if path.suffix.lower() in PICTURES and path.is_file())
        self._keys = sorted(path.relative_to(root).as_posix() for path in files)
        if not self._keys:
            raise CoderError(f"{folder}: no pictures ({', '.join(PICTURES)})")

    @property
    def num_images(self) -> int:
        return len(self._keys)

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        for start in range(rank * block, len(self._keys), world_size * block):
            for index in range(start, min(start + block, len(self._keys))):
                yield index, self.item(index)

    def item(self, index: int) -> Item:
        """The picture at a position."""
        path = os.path.join(self.name, self._keys[index])
        return Item(self._keys[index], (), partial(decode_image, path, max_pixels=self._max_pixels), paths=(path,))
