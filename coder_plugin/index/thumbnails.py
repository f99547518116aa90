"""Small pictures, as JPEG files in memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from PIL.Image import Image, Resampling


def thumbnail(loaded: Any, *, side: int) -> bytes:
    """A picture's JPEG file, its longer side at most ``side`` pixels; of what is no picture, nothing."""
    if not isinstance(loaded, Image):
        return b""
    small = loaded.convert("RGB")
    small.thumbnail((side, side), Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


class Beside:
    """The pictures of images that are read as regions, met in the same order.

    Args:
        source: of the same images, with their pictures.
    """

    def __init__(self, source: Any) -> None:
        self._items: Iterator[tuple[int, Any]] = source.items()
        self._at: tuple[int, Any] | None = next(self._items, None)

    def thumbnails(self, positions: Sequence[int], keys: Sequence[str], side: int) -> list[bytes]:
        """Of images at rising positions; nothing where the picture is another image's or cannot be read."""
        found = []
        for position, key in zip(positions, keys, strict=True):
            while self._at is not None and self._at[0] < position:
                self._at = next(self._items, None)
            found.append(self._one(position, key, side))
        return found

    def _one(self, position: int, key: str, side: int) -> bytes:
        if self._at is None or self._at[0] != position or self._at[1].key != key:
            return b""
        try:
            return thumbnail(self._at[1].load(), side=side)
        except (OSError, ValueError):
            return b""
