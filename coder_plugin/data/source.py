"""What a trainer asks of a data set: samples in chunks for training, every image once for evaluation.

A chunk is a batch before decoding. Sources deal chunks to *logical* workers by a rule that depends on the plan alone,
so an epoch can be entered again at any chunk without decoding what came before, and no worker needs to know of another.
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
#: Under which name a picture's ``info`` says the mode that its file has, such as CMYK.
STORED = "stored mode"
_SHOWN = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which chunks of which epoch one worker of one rank is to give.

    ``captions="draw"`` shows each image once an epoch with one of its captions, so that a batch holds no siblings;
    ``"all"`` makes every caption a sample. ``skip`` chunks of this worker are passed over without decoding.
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
    """A data set that a :class:`~coder_plugin.data.loader.TrainLoader` can train on and evaluation can walk through."""

    name: str

    @property
    def num_images(self) -> int | None:
        """How many images there are, or None where only reading everything would tell."""

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        """Samples in an epoch of all ranks, ``num_samples`` being what the user asked for."""

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """Chunks of ``plan.batch_size`` items as :func:`one_caption` makes them; only the last may be smaller."""

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        """Every image once over all ranks, with its position in the data set; ranks take turns block by block."""


class ItemSource:
    """A data set whose items fit in memory (not their pictures): tables, the built-in scenes, anyone's list."""

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
        there = len(self._items) if check_mode(captions) == "draw" else self._ends[-1]
        return min(there, num_samples or there)

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """One permutation an epoch, dealt sample by sample to ranks and chunk by chunk to workers: the batches of a
        rank are the same for every number of workers."""
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
    """The caption an image shows in an epoch: a function of its key, so that no order of reading can change it."""
    return one_caption(item, stable_hash("caption", seed, epoch, item.key) % len(item.captions))


def one_caption(item: Item, index: int) -> Item:
    others = item.captions[:index] + item.captions[index + 1 :]
    return replace(item, captions=(item.captions[index],), others=others, caption_names=())


def check_mode(captions: str) -> str:
    if captions not in CAPTIONS:
        raise CoderError(f"captions is {captions!r}; it must be one of {', '.join(CAPTIONS)}")
    return captions


def check_captions(name: str, key: str, captions: Sequence[str]) -> tuple[str, ...]:
    """Refuse an image without captions and a caption without text: both would train on nothing, unseen."""
    if not len(captions):
        raise CoderError(f"{name}: image {key!r} has no captions")
    for number, caption in enumerate(captions):
        if not isinstance(caption, str) or not caption.strip():
            which = f" (number {number + 1} of {len(captions)})" if len(captions) > 1 else ""
            what = "an empty caption" if isinstance(caption, str) else "a caption that is not text"
            raise CoderError(f"{name}: image {key!r} has {what}{which}")
    return tuple(captions)


def decode_image(data: bytes | str) -> Image.Image:
    """A file's content, or its path, as an RGB picture. Pillow's decoders raise nearly anything on damaged input; here
    it becomes the one ``ValueError`` that means: skip this image."""
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            converted = picture.convert("RGB")
            converted.info[STORED] = picture.mode
            return converted
    except UnidentifiedImageError:  # its own message shows the address of a buffer
        raise ValueError("not an image that Pillow knows") from None
    except OSError:
        raise
    except Exception as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc


@contextmanager
def isolated_rng(*parts: object) -> Iterator[None]:
    """Randomness inside depends on ``parts`` alone and leaves no trace outside: augmentation must not change with the
    number of workers, nor disturb training when there are none. (``torch.manual_seed`` would reseed CUDA as well.)"""
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
    """What a transform raises of an image that could be read and cannot be used: it is left out and counted."""


def map_tensors(function: Callable[..., Any], *values: Any) -> Any:
    """``function`` of a tensor, or of each tensor of a dict: an image may be one or the other."""
    if isinstance(values[0], dict):
        return {name: map_tensors(function, *(value[name] for value in values)) for name in values[0]}
    return function(*values)


@dataclass(frozen=True)
class Chunk:
    """A chunk decoded: its rows, and the images that could not be. Without a row there are no tensors."""

    worker: int
    bad: list[tuple[str, str]] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)  # image (or a dict), image_id, text (and text_positive) or index
    captions: list[tuple[str, ...]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    positives: Counter[str] = field(default_factory=Counter)  # how many of its rows have which kind
    learned: Any = None  # what tagging has found (data/tags.py), where captions are tagged

    def __len__(self) -> int:
        return len(self.tensors["image_id"]) if self.tensors else 0

    def rows(self, start: int, stop: int | None = None) -> Chunk:
        return replace(self, tensors=map_tensors(lambda each: each[start:stop], self.tensors))

    def after(self, rows: dict[str, Any]) -> Chunk:
        """This chunk with ``rows`` put before its own."""
        if not len(self):
            return replace(self, tensors=rows)
        return replace(self, tensors=map_tensors(lambda *both: torch.cat(both), rows, self.tensors))

    def pin_memory(self) -> Chunk:  # the DataLoader's pinning thread calls this by name
        return replace(self, tensors=map_tensors(torch.Tensor.pin_memory, self.tensors))


def decode(
    items: list[Item], transform: Callable[[Any], Any], *, seed: int = 0, epoch: int = 0, worker: int = 0
) -> tuple[Chunk, list[int]]:
    """The images of ``items`` as tensors (or dicts of them), and which of the items these are: an image that does not
    decode, or that the transform finds :class:`Unusable`, is left out and told of in ``bad``. Any other exception of a
    transform is a bug, and goes its way."""
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
    return Chunk(worker, bad, {"image": default_collate(images), "image_id": ids}), good


class BadImages:
    """Images that did not decode: each counted once, however often it is met, and too many of them end the run."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self.keys: list[str] = []
        self._known: set[str] = set()

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, reason: str) -> None:
        if key in self._known:
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
            if key not in self._known:
                self._known.add(key)
                self.keys.append(key)
