"""A folder of pictures as a source without captions, for region extraction and search indexes."""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NoReturn

from coder_plugin.data import PICTURES, guess_kind
from coder_plugin.data.decode import FORMATS, decode_image, is_picture
from coder_plugin.data.item import Item
from coder_plugin.data.source import Source
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)


def is_pictures(spec: str) -> bool:
    """Whether ``spec`` is a folder that no reader of data sets recognises."""
    try:
        return os.path.isdir(spec) and not guess_kind(spec)
    except CoderError:
        return True


class Pictures(Source):
    """All pictures in a folder and its subfolders, ordered by path; a picture's key is its path from the folder.

    A file is a picture if its name has one of the endings ``PICTURES``, in upper or lower case, or if its content is a JPEG,
    PNG, WebP or GIF. All others, and links to folders, are counted in a warning.

    Args:
        folder: where they are.

    Raises:
        CoderError: there are none, or a subfolder cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._keys: list[str] = []
        others: list[str] = []
        for parent, folders, names in os.walk(folder, onerror=_refuse):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in (*names, *links):
                path = os.path.join(parent, name)
                readable = os.path.isfile(path) and (name.lower().endswith(PICTURES) or is_picture(path))
                (self._keys if readable else others).append(Path(path).relative_to(folder).as_posix())
        self._keys.sort()
        counts = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in others)
        listed = ", ".join(f"{ending} {count:,}" for ending, count in counts.most_common(5))
        listed += f"; the first: {min(others)!r}" if others else "nothing"
        if not self._keys:
            hint = f"; for shards, give '{folder}/*.tar'" if ".tar" in counts else ""
            raise CoderError(f"{folder}: no pictures ({', '.join(FORMATS)}); it holds {listed}{hint}")
        if others:
            log.warning("%s: left out %d files that are no %s: %s", folder, len(others), ", ".join(FORMATS), listed)

    @property
    def num_images(self) -> int:
        return len(self._keys)

    def item(self, index: int) -> Item:
        """The picture at a position."""
        path = os.path.join(self.name, self._keys[index])
        return Item(self._keys[index], (), partial(decode_image, path), paths=(path,))


def _refuse(error: OSError) -> NoReturn:
    raise CoderError(f"{error.filename}: cannot be read as a folder: {error.strerror}") from error
