"""Images held out from training, drawn at random, to choose settings on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from coder_plugin.data.item import Item, stable_hash
from coder_plugin.data.source import Source
from coder_plugin.errors import CoderError


class Part(Source):
    """Some images of a data set, in its order.

    Args:
        source: the data set, which gives any image at any time.
        rows: positions of the images in it, ascending.

    Example:
        >>> from coder_plugin.data.source import ItemSource
        >>> source = ItemSource([Item(f"{n}.jpg", ("a dog",), lambda: None) for n in range(3)])
        >>> part = Part(source, [0, 2])
        >>> part.num_images, part.item(1).key
        (2, '2.jpg')
    """

    def __init__(self, source: Any, rows: Sequence[int]) -> None:
        self.name, self._source, self._rows = source.name, source, np.asarray(rows, np.int64)

    @property
    def num_images(self) -> int:
        return len(self._rows)

    @cached_property
    def caption_counts(self) -> list[int]:
        return np.asarray(self._source.caption_counts)[self._rows].tolist()  # type: ignore[no-any-return]

    @cached_property
    def groups(self) -> list[int]:
        ends = np.searchsorted(self._rows, np.cumsum(self._source.groups))
        return [count for count in np.diff(ends, prepend=0).tolist() if count]

    def item(self, index: int) -> Item:
        return self._source.item(int(self._rows[index]))  # type: ignore[no-any-return]

    def digest(self) -> dict[str, Any]:
        names = f"{self._source.digest().get('names')} {hashlib.sha256(self._rows.tobytes()).hexdigest()}"
        return {**self._source.digest(), "images": self.num_images, "names": names}


def split_aside(source: Any, count: int, seed: int = 0) -> tuple[Part, Part]:
    """The rest of a data set, and ``count`` images of it drawn at random. Rows that share an image stay together.

    Which images are drawn depends on their names and the seed, not on their order.

    Raises:
        CoderError: a stream, or fewer than two images for each that is held out.
    """
    if source.is_stream or not source.num_images:
        raise CoderError(
            f"--hold-aside {count}: {source.name} is read as a stream, from which no images can be drawn: hold some aside as a "
            "data set of their own, and name it with --val-data"
        )
    ids = [source.item(row).image_id for row in range(source.num_images)]
    order = sorted(set(ids), key=lambda each: stable_hash("aside", seed, each))
    if 2 * count > len(order):
        most = f"hold aside at most {len(order) // 2:,}"
        raise CoderError(f"--hold-aside {count}: {source.name} has {len(order):,} images: {most}")
    drawn = set(order[:count])
    aside = [row for row, each in enumerate(ids) if each in drawn]
    return Part(source, [row for row, each in enumerate(ids) if each not in drawn]), Part(source, aside)
