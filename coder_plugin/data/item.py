"""What every reader gives: an image, its captions, and an id that outlives epochs, workers and ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

    from coder_plugin.data.regions.base import Regions


def stable_hash(*parts: object) -> int:
    """A 63-bit integer that depends on the text of ``parts`` alone: the same in every process, version and machine."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & (2**63 - 1)


@dataclass(frozen=True)
class Item:
    """One image of a data set with all its captions.

    ``key`` names the image within its data set (a file name, a WebDataset key); ``load()`` gives its RGB picture or its
    regions, and raises ``OSError`` or ``ValueError`` where that is impossible. ``names`` are others that it is known by,
    such as its number in COCO: a file of regions may have it under any of them. A place in ``names`` holds the same kind of
    name for all images of a data set, and None where an image has none. ``caption_names`` are those of the captions, such as
    their numbers in COCO, one each, or empty where the data set has none. A sample of training has one caption, without its
    name, and the image's ``others`` beside it, in their order.
    """

    key: str
    captions: tuple[str, ...]
    load: Callable[[], Image | Regions]
    names: tuple[str | None, ...] = ()
    others: tuple[str, ...] = ()
    caption_names: tuple[str | None, ...] = ()

    @property
    def image_id(self) -> int:
        """Stable id in [0, 2**63): all captions of one image share it (DESIGN, data flow)."""
        return stable_hash(self.key)
