"""The interface of data sets: samples in chunks for training, every image once for evaluation.

A chunk is a batch before decoding. Which chunks a logical worker gets depends on the plan alone, so an epoch can be resumed at
any chunk without decoding the ones before, and workers need not communicate.
"""

from __future__ import annotations

import io
import logging
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import default_collate

from coder_plugin.data.item import Item, stable_hash
from coder_plugin.errors import CoderError

CAPTIONS = ("draw", "all")
#: Endings of picture files, and of the fields of shards that hold one.
PICTURES = ("jpg", "png", "jpeg", "webp")
#: The key of a picture's ``info`` for the mode of its file, such as CMYK.
STORED = "stored mode"
_SHOWN = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which chunks of an epoch one worker of one rank yields.

    Args:
        captions: ``draw`` uses each image once an epoch with one of its captions, so that no two captions in a batch share
            an image; ``all`` makes every caption a sample.
        skip: number of this worker's chunks to skip without decoding.
    """

    seed: int
    epoch: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1
    skip: int = 0
    captions: str = "draw"
    shuffle_buffer: int = 2000


class Source(Protocol):
    """A data set for :class:`~coder_plugin.data.loader.TrainLoader` and ``evaluation_batches``."""

    name: str

    @property
    def num_images(self) -> int | None:
        """The number of images, or None where counting would need reading all data."""

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        """Samples of an epoch over all ranks; ``num_samples`` is the user's option."""

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """Chunks of ``plan.batch_size`` items with one caption each (:func:`one_caption`); the last may be smaller."""

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        """Every image once over all ranks, with its position in the data set; blocks of images are dealt to ranks in turn."""


class ItemSource:
    """A data set whose items (not their pictures) fit in memory: tables, the built-in scenes, any list.

    Raises:
        CoderError: no items, an image without captions, or an empty caption.

    Example:
        >>> from coder_plugin.data.item import Item
        >>> source = ItemSource([Item(f"{n}.jpg", ("a dog", "a cat"), lambda: None) for n in range(3)])
        >>> source.samples("draw"), source.samples("all")
        (3, 6)
        >>> [[item.key for item in chunk] for chunk in source.chunks(Plan(seed=0, epoch=0, batch_size=2))]
        [['2.jpg', '1.jpg'], ['0.jpg']]
    """

    def __init__(self, items: Sequence[Item], *, name: str = "items") -> None:
        self.name = name
        self._items = items
        if not len(items):
            raise CoderError(f"{name}: no images")
        for item in items:
            check_captions(name, item.key, item.captions)
        self._ends = list(accumulate(len(item.captions) for item in items))

    @property
    def num_images(self) -> int:
        return len(self._items)

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        total = len(self._items) if check_mode(captions) == "draw" else self._ends[-1]
        return min(total, num_samples or total)

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """One permutation an epoch, dealt sample by sample to ranks and chunk by chunk to workers.

        A rank's batches do not depend on the number of workers.
        """
        rng = torch.Generator().manual_seed(stable_hash("order", plan.seed, plan.epoch))
        order = torch.randperm(self.samples(plan.captions), generator=rng)[plan.rank :: plan.world_size].tolist()
        size = plan.batch_size
        for start in range((plan.worker + plan.skip * plan.workers) * size, len(order), plan.workers * size):
            yield [self._sample(index, plan) for index in order[start : start + size]]

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        for start in range(rank * block, len(self._items), world_size * block):
            for index in range(start, min(start + block, len(self._items))):
                yield index, self._items[index]

    def _sample(self, index: int, plan: Plan) -> Item:
        if plan.captions == "draw":
            return draw_caption(self._items[index], seed=plan.seed, epoch=plan.epoch)
        image = bisect_right(self._ends, index)
        item = self._items[image]
        return one_caption(item, index - self._ends[image] + len(item.captions))


def draw_caption(item: Item, *, seed: int, epoch: int) -> Item:
    """The item with the caption drawn for an epoch: a function of seed, epoch and key, not of the reading order."""
    return one_caption(item, stable_hash("caption", seed, epoch, item.key) % len(item.captions))


def one_caption(item: Item, index: int) -> Item:
    others = item.captions[:index] + item.captions[index + 1 :]
    return replace(item, captions=(item.captions[index],), others=others, caption_names=())


def check_mode(captions: str) -> str:
    if captions not in CAPTIONS:
        raise CoderError(f"captions is {captions!r}; it must be one of {', '.join(CAPTIONS)}")
    return captions


def check_captions(name: str, key: str, captions: Sequence[str]) -> tuple[str, ...]:
    """Refuse images without captions and empty captions, which would silently train on nothing."""
    if not len(captions):
        raise CoderError(f"{name}: image {key!r} has no captions")
    for number, caption in enumerate(captions):
        if not isinstance(caption, str) or not caption.strip():
            which = f" (number {number + 1} of {len(captions)})" if len(captions) > 1 else ""
            what = "an empty caption" if isinstance(caption, str) else "a caption that is not text"
            raise CoderError(f"{name}: image {key!r} has {what}{which}")
    return tuple(captions)


def decode_image(data: bytes | str) -> Image.Image:
    """A file's content or path as an RGB picture.

    Raises:
        OSError, ValueError: a damaged file, whatever Pillow raises; the image is then skipped.
    """
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            converted = picture.convert("RGB")
            converted.info[STORED] = picture.mode
            return converted
    except UnidentifiedImageError:  # its message shows the address of a buffer
        raise ValueError("not an image that Pillow can read") from None
    except OSError:
        raise
    except Exception as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc


@contextmanager
def isolated_rng(*parts: object) -> Iterator[None]:
    """Seed torch's, Python's and NumPy's CPU generators from ``parts`` and restore their states afterwards.

    So augmentation does not depend on the number of workers, nor change training's random state.
    (``torch.manual_seed`` would also reseed CUDA.)
    """
    seed = stable_hash(*parts)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class Unusable(ValueError):
    """Raised by a transform for an image that was read but cannot be used; it is left out and counted."""


def map_tensors(function: Callable[..., Any], *values: Any) -> Any:
    """``function`` of tensors, or of each entry of dicts of tensors; an image may be either."""
    if isinstance(values[0], dict):
        return {name: map_tensors(function, *(value[name] for value in values)) for name in values[0]}
    return function(*values)


@dataclass(frozen=True)
class Chunk:
    """A decoded chunk: its rows and its undecodable images. Without rows there are no tensors."""

    worker: int
    bad: list[tuple[str, str]] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)  # image (or a dict), image_id, text (and text_positive) or index
    good: list[int] = field(default_factory=list)  # which items the rows were made of, by their place in the chunk
    captions: list[tuple[str, ...]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    positives: Counter[str] = field(default_factory=Counter)  # rows by the kind of their positive
    learned: Any = None  # what tagging computed (loader.TagWords.take), if captions are tagged

    def __len__(self) -> int:
        return len(self.tensors["image_id"]) if self.tensors else 0

    def rows(self, start: int, stop: int | None = None) -> Chunk:
        return replace(self, tensors=map_tensors(lambda each: each[start:stop], self.tensors))

    def after(self, rows: dict[str, Any]) -> Chunk:
        """This chunk with ``rows`` before its own."""
        if not len(self):
            return replace(self, tensors=rows)
        return replace(self, tensors=map_tensors(lambda *both: torch.cat(both), rows, self.tensors))

    def pin_memory(self) -> Chunk:  # the DataLoader's pinning thread calls this by name
        return replace(self, tensors=map_tensors(torch.Tensor.pin_memory, self.tensors))


def decode(
    items: list[Item], transform: Callable[[Any], Any], *, seed: int = 0, epoch: int = 0, worker: int = 0
) -> tuple[Chunk, list[int]]:
    """The images of ``items`` as tensors (or dicts of them), and the indices of these items.

    Images that do not decode or that the transform finds :class:`Unusable` are left out and listed in ``bad``. Any other
    exception of a transform is a bug and is not caught.
    """
    good, images, bad = [], [], []
    for number, item in enumerate(items):
        try:
            picture = item.load()
        except (OSError, ValueError) as exc:
            bad.append((item.key, " ".join(str(exc).split()) or type(exc).__name__))
            continue
        try:
            with isolated_rng("image", seed, epoch, item.image_id, *item.captions):
                images.append(transform(picture))
        except Unusable as exc:
            bad.append((item.key, str(exc)))
            continue
        good.append(number)
    if not good:
        return Chunk(worker, bad), good
    ids = torch.tensor([items[number].image_id for number in good])
    # default_collate, because inside a worker it stacks straight into shared memory
    return Chunk(worker, bad, {"image": default_collate(images), "image_id": ids}, good), good


class BadImages:
    """Counts undecodable images, each once; more than ``limit`` raise a ``CoderError``."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self.keys: list[str] = []
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, reason: str) -> None:
        if key in self._seen:
            return
        self.restore([key])
        if len(self) > self.limit:
            raise CoderError(
                f"{self.name}: {len(self)} images cannot be decoded, more than max_bad={self.limit}; "
                f"the last one: {key!r}: {reason}"
            )
        if len(self) <= _SHOWN:
            more = "; further ones are only counted" if len(self) == _SHOWN else ""
            log.warning("%s: skipped image %r: %s%s", self.name, key, reason, more)

    def restore(self, keys: list[str]) -> None:
        for key in keys:
            if key not in self._seen:
                self._seen.add(key)
                self.keys.append(key)
