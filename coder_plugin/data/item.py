"""An image with its captions, as every reader yields it, and its stable id."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from coder_plugin.data.bad_samples import BadSample

if TYPE_CHECKING:
    from PIL.Image import Image

    from coder_plugin.data.regions.base import Regions


def stable_hash(*parts: object) -> int:
    """A 63-bit integer from the text of ``parts``: the same in every process, version and machine.

    Example:
        >>> stable_hash("COCO_val2014_000000000042.jpg")
        3731315159786330287
        >>> stable_hash("a", 1) == stable_hash("a", "1") != stable_hash("a1")
        True
    """
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & (2**63 - 1)


#: The kind of a positive caption where no generator could make one: the caption itself.
NO_POSITIVE = "none"
#: The kind of a positive whose tokens equal the caption's, since the context length cut what was added. Where a tokenizer
#: drops words at random, equal texts rarely have equal tokens, so only few of these are counted.
SAME_TOKENS = "same tokens"
#: In place of the id of a hard negative's image: the image is not known; there is no text in this place.
UNKNOWN_IMAGE, NO_TEXT = -1, -2


@dataclass(frozen=True)
class Item:
    """One image of a data set with all its captions.

    Args:
        key: the image's name in its data set: a file name or a WebDataset key.
        captions: all captions; in a training sample the one that was drawn.
        load: ``load()`` returns the RGB picture or the regions; it raises ``OSError`` or ``ValueError`` where it cannot.
        names: other names, such as the image's number in COCO, by which a file of regions may list it. A position holds the
            same kind of name for all images of a data set, None where an image has none.
        others: in a training sample, the image's other captions in their order.
        caption_names: the captions' names, such as their numbers in COCO, one each; or empty.
        negatives: hard negatives, texts that are wrong for the image.
        negative_ids: the ids of the images that the negatives are captions of, one each, -1 where that is not known; or empty.
        fault: why the sample cannot be used, found by its reader (:func:`bad_item`); None for all others.
        paths: where the picture is, or the shard that holds it: a path or a URL; of several, the first that exists. Empty where
            that is not known.
        member: the picture's name in the shard; None where it is a file of its own.
        metadata: further values by name, those that the reader was asked for.

    Example:
        >>> Item("a.jpg", ("a dog", "a brown dog"), lambda: None).image_id == stable_hash("a.jpg")
        True
    """

    key: str
    captions: tuple[str, ...]
    load: Callable[[], Image | Regions]
    names: tuple[str | None, ...] = ()
    others: tuple[str, ...] = ()
    caption_names: tuple[str | None, ...] = ()
    negatives: tuple[str, ...] = ()
    negative_ids: tuple[int, ...] = ()
    fault: BadSample | None = None
    paths: tuple[str, ...] = ()
    member: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def path(self) -> str | None:
        """Absolute path or URL of the picture, or of the shard that holds it; None where that is not known."""
        if not self.paths or "://" in self.paths[-1]:
            return self.paths[-1] if self.paths else None
        return os.path.abspath(next(filter(os.path.exists, self.paths[:-1]), self.paths[-1]))

    @property
    def image_id(self) -> int:
        """Stable id in [0, 2**63), shared by all captions of the image."""
        return stable_hash(self.key)


def bad_item(key: str, fault: BadSample, names: tuple[str | None, ...] = ()) -> Item:
    """A sample that cannot be used, in its place among the others. It has no captions, and loading it raises ``fault``.

    Example:
        >>> bad_item("a.jpg", BadSample("caption", "it has no captions")).load()
        Traceback (most recent call last):
            ...
        coder_plugin.data.bad_samples.BadSample: it has no captions
    """
    return Item(key, (), partial(_refuse, fault), names, fault=fault)


def without_image(item: Item) -> Item:
    """The item without its picture or regions, whose bytes items of shards hold in memory."""
    return replace(item, load=partial(_refuse, BadSample("file", "the image was left out")))


def _refuse(fault: BadSample) -> NoReturn:
    raise BadSample(*fault.args)  # a new one, since each raising adds to an exception's traceback
