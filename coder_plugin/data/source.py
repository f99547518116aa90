"""The interface of data sets, what all readers check of texts, and how images are decoded."""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from coder_plugin.data.bad_samples import Bad, BadSample, describe
from coder_plugin.data.item import Item, bad_item, stable_hash
from coder_plugin.errors import CoderError

CAPTIONS = ("draw", "all")
#: Longest caption, and longest word in one, in characters: the time of CLIP's tokenizer grows with the square of a word.
LONGEST_CAPTION, LONGEST_WORD = 20_000, 2_000


class Source:
    """Base of the data sets for :class:`~coder_plugin.data.loader.TrainLoader` and ``evaluation_batches``.

    It gives any image at any time, or it is a :class:`~coder_plugin.data.streams.Stream`. Subclasses have ``name``,
    ``num_images``, ``caption_counts``, ``item`` and ``digest``.
    """

    name: str
    #: Whether it is read in order, and so has no ``item``.
    is_stream = False

    @property
    def num_images(self) -> Any:
        """The number of images; of a stream None where counting would need reading all data."""
        raise NotImplementedError

    @property
    def groups(self) -> Sequence[int]:
        """How many of the images in their order lie together on the disk, such as those of each shard."""
        return [self.num_images]

    @property
    def caption_counts(self) -> Sequence[int]:
        """The number of captions of each image, at least 1."""
        raise NotImplementedError

    def item(self, index: int) -> Item:
        """The image at a position in the data set, from 0."""
        raise NotImplementedError

    def items(self) -> Iterator[tuple[int, Item]]:
        """Every image once, with its position in the data set, ascending; pictures are read when they are loaded."""
        yield from ((index, self.item(index)) for index in range(self.num_images))

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        """Samples of an epoch over all ranks; ``num_samples`` is the user's option, the most that are used."""
        total = self.num_images if check_mode(captions) == "draw" else sum(self.caption_counts)
        return min(total, num_samples or total)

    def digest(self) -> dict[str, Any]:
        """What tells whether the data are still the same, as JSON values: the keys are those of
        :data:`~coder_plugin.data.loader.CHANGES`. Pictures are not read."""
        raise NotImplementedError


class ItemSource(Source):
    """A data set whose items (not their pictures) fit in memory: tables, the built-in scenes, any list.

    Items without captions, or with an empty one, become bad samples, which are counted where they would be used; so do items
    with an empty hard negative.

    Args:
        items: all of them.
        name: of the data, for messages.
        columns: those of the table that the items come from, for messages.
        files: that hold the items' contents.

    Raises:
        CoderError: no items, or only bad ones.

    Example:
        >>> from coder_plugin.data.item import Item
        >>> source = ItemSource([Item(f"{n}.jpg", ("a dog", "a cat"), lambda: None) for n in range(3)])
        >>> source.samples("draw"), source.samples("all")
        (3, 6)
        >>> source.item(2).key
        '2.jpg'
    """

    def __init__(
        self, items: Sequence[Item], *, name: str = "items", columns: Sequence[str] = (), files: Sequence[str] = ()
    ) -> None:
        self.name, self.columns, self.files = name, tuple(columns), tuple(files)
        self._items = checked_items(items)
        if not len(items):
            raise CoderError(f"{name}: no images")
        if all(item.fault is not None for item in self._items):
            first = self._items[0]
            raise CoderError(f"{name}: none of {len(items)} images can be used; image {first.key!r}: {first.fault}")

    @property
    def num_images(self) -> int:
        return len(self._items)

    @cached_property
    def caption_counts(self) -> list[int]:
        return [max(1, len(item.captions)) for item in self._items]

    def item(self, index: int) -> Item:
        return self._items[index]

    def digest(self) -> dict[str, Any]:
        names, texts, files = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        files.update(repr(list(map(file_state, self.files))).encode())
        every = 1 + len(self._items) // MOST_FILES
        for number, item in enumerate(self._items):
            names.update(repr(item.key).encode())
            texts.update(repr((item.captions, item.negatives, str(item.fault))).encode())
            if number % every == 0:
                files.update(repr(next(filter(None, map(file_state, item.paths)), None)).encode())
        return {
            "images": len(self._items), "names": names.hexdigest(), "captions": texts.hexdigest(), "files": files.hexdigest()
        }


#: Most files whose size and time are looked up; of more, evenly spaced ones.
MOST_FILES = 100_000


def file_state(path: str) -> tuple[int, int] | None:
    """Size and time of a file; None where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def draw_caption(item: Item, *, seed: int, epoch: int) -> Item:
    """The item with the caption drawn for an epoch: a function of seed, epoch and key, not of the reading order."""
    if item.fault is not None:
        return item
    return one_caption(item, stable_hash("caption", seed, epoch, item.key) % len(item.captions))


def one_caption(item: Item, index: int) -> Item:
    others = item.captions[:index] + item.captions[index + 1 :]
    return replace(item, captions=(item.captions[index],), others=others, caption_names=())


def check_mode(captions: str) -> str:
    if captions not in CAPTIONS:
        raise CoderError(f"captions is {captions!r}; it must be one of {', '.join(CAPTIONS)}")
    return captions


def checked_items(items: Sequence[Item]) -> Sequence[Item]:
    """The items, bad ones (:func:`check_captions`, :func:`check_negatives`) as bad samples. The same object if none is bad."""
    faults: dict[int, BadSample] = {}
    for number, item in enumerate(items):
        try:
            if item.fault is None:
                check_captions(item.captions)
                if item.negatives or item.negative_ids:
                    check_negatives(item.negatives, item.negative_ids)
        except BadSample as fault:
            faults[number] = fault.with_traceback(None)
    if not faults:
        return items
    return [bad_item(item.key, faults[number], item.names) if number in faults else item for number, item in enumerate(items)]


def check_captions(captions: Sequence[Any]) -> tuple[str, ...]:
    """An image's captions, which must be texts that can be trained on.

    Raises:
        BadSample: no captions, or one that is not text, empty, far too long, or half of a surrogate pair.
    """
    if not len(captions):
        raise BadSample("caption", "it has no captions")
    for number, caption in enumerate(captions):
        if fault := text_fault(caption):
            which = f" (number {number + 1} of {len(captions)})" if len(captions) > 1 else ""
            raise BadSample("caption", f"it has {fault}{which}")
    return tuple(captions)


def check_negatives(negatives: Any, ids: Sequence[int] = ()) -> tuple[str, ...]:
    """An image's hard negatives, which must be texts that can be trained on.

    Raises:
        BadSample: no list, one of its values is no such text, or another number of ids.
    """
    if not isinstance(negatives, (list, tuple)):
        raise BadSample("caption", "its negatives are not a list of texts")
    for number, negative in enumerate(negatives):
        if fault := text_fault(negative, "negative"):
            raise BadSample("caption", f"it has {fault} (number {number + 1} of {len(negatives)})")
    if ids and len(ids) != len(negatives):
        raise BadSample("caption", f"it has {len(negatives)} negatives, and {len(ids)} ids of their images")
    return tuple(negatives)


def text_fault(text: Any, what: str = "caption") -> str:
    """Why a text cannot be trained on; empty if it can."""
    if not isinstance(text, str):
        return f"a {what} that is not text"
    if not text.strip():
        return f"an empty {what}"
    if len(text) > LONGEST_WORD and (len(text) > LONGEST_CAPTION or max(map(len, text.split())) > LONGEST_WORD):
        return f"a {what} of over {LONGEST_CAPTION:,} characters, or of a word of over {LONGEST_WORD:,}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"a {what} that is not valid Unicode"
    return ""


@contextmanager
def isolated_rng(*parts: object) -> Iterator[None]:
    """Seed the CPU generators from ``parts`` (:func:`seed_rng`) and restore their states afterwards.

    So augmentation does not depend on the number of workers, nor change training's random state.
    """
    with preserved_rng():
        seed_rng(*parts)
        yield


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the states of torch's, Python's and NumPy's CPU generators afterwards.

    Saving and restoring takes 0.1 ms, seeding a tenth of that: so it is done once for the samples of a chunk.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def rng_states() -> tuple[Any, ...]:
    """The states of torch's, Python's and NumPy's CPU generators, to compare."""
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), rest


def seed_rng(*parts: object) -> None:
    """Seed torch's, Python's and NumPy's CPU generators from ``parts``. (``torch.manual_seed`` would also reseed CUDA.)"""
    seed = stable_hash(*parts)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def map_tensors(function: Callable[..., Any], *values: Any) -> Any:
    """``function`` of tensors, or of each entry of dicts of tensors; an image may be either."""
    if isinstance(values[0], dict):
        return {name: map_tensors(function, *(value[name] for value in values)) for name in values[0]}
    return function(*values)


@dataclass(frozen=True)
class Chunk:
    """Samples that were decoded together: their rows, and the bad ones. Without rows there are no tensors."""

    worker: int  # of a stream; else 0
    bad: list[Bad] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)  # image (or a dict), image_id, text (and further ones) or index
    good: list[int] = field(default_factory=list)  # which samples the rows were made of, by their place in the chunk
    captions: list[tuple[str, ...]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    positives: Counter[str] = field(default_factory=Counter)  # rows by the kind of their positive
    negatives: Counter[str] = field(default_factory=Counter)  # places of hard negatives, "filled" and "empty"
    learned: Any = None  # what tagging computed (concepts.tags.Tags.take), if captions are tagged

    def __len__(self) -> int:
        return len(self.tensors["image_id"]) if self.tensors else 0

    @property
    def count(self) -> int:
        """How many samples it is made of."""
        return len(self.good) + len(self.bad)

    def rows(self, start: int, stop: int | None = None) -> Chunk:
        return replace(self, tensors=map_tensors(lambda each: each[start:stop], self.tensors))

    def after(self, rows: dict[str, Any]) -> Chunk:
        """This chunk with ``rows`` before its own."""
        if not len(self):
            return replace(self, tensors=rows)
        return replace(self, tensors=map_tensors(lambda *both: torch.cat(both), rows, self.tensors))

    def pin_memory(self) -> Chunk:  # the DataLoader's pinning thread calls this by name
        return replace(self, tensors=map_tensors(torch.Tensor.pin_memory, self.tensors))


def transformed(
    items: Sequence[Item], transform: Callable[[Any], Any] | None, bad: list[Bad], *, seed: int = 0, epoch: int = 0
) -> Iterator[tuple[int, Any, Any]]:
    """The number, picture and transformed picture of each item that can be used. None: pictures are not loaded.

    Bad samples are left out and added to ``bad``: those of which the reader says so, and images that do not load or that the
    transform refuses with :class:`~coder_plugin.data.bad_samples.BadSample`. Any other exception of a transform is a bug and
    is not caught.
    """
    for number, item in enumerate(items):
        # by sample: whatever its neighbours, worker and chunk, it has the same augmentation
        seed_rng("image", seed, epoch, item.image_id, *item.captions)
        try:
            if item.fault is not None:
                raise BadSample(*item.fault.args)  # a new one, since each raising adds to an exception's traceback
            picture = None if transform is None else item.load()
        except CoderError:
            raise
        except (OSError, ValueError) as exc:
            bad.append(describe(item.key, exc))
            continue
        try:
            image = None if transform is None else transform(picture)
        except BadSample as exc:
            bad.append(describe(item.key, exc))
            continue
        yield number, picture, image


def decode(
    items: list[Item], transform: Callable[[Any], Any], *, seed: int = 0, epoch: int = 0, worker: int = 0
) -> tuple[Chunk, list[int]]:
    """The images of ``items`` as tensors (or dicts of them), and the indices of these items; others in the chunk's ``bad``."""
    bad: list[Bad] = []
    with preserved_rng():
        images = {number: image for number, _, image in transformed(items, transform, bad, seed=seed, epoch=epoch)}
    good = list(images)
    if not good:
        return Chunk(worker, bad), good
    ids = torch.tensor([items[number].image_id for number in good])
    return Chunk(worker, bad, {"image": _stack(list(images.values())), "image_id": ids}, good), good


def _stack(images: list[Any]) -> Any:
    """One batch of images. Inside a worker ``default_collate`` stacks straight into shared memory.

    Pictures that are stored pixel by pixel (channels last) stay so: stacking is then a copy of whole rows.
    """
    first = images[0]
    if isinstance(first, torch.Tensor) and first.ndim == 3 and first.permute(1, 2, 0).is_contiguous():
        return default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return default_collate(images)
