"""A data set in units, each of which becomes one file: in one process, or in the tasks of any scheduler.

A unit is a shard, or a slice of other data. Its file appears when it is complete; what is complete is not made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image, Resampling
from torch.utils.data import default_collate

from coder_plugin.data.bad_samples import Bad, BadSample
from coder_plugin.data.item import Item, without_image
from coder_plugin.data.loader import load
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.shard_lists import recorded_size
from coder_plugin.data.source import MOST_FILES, ItemSource, file_state, preserved_rng, transformed
from coder_plugin.data.tars import local_path
from coder_plugin.errors import CoderError
from coder_plugin.files import remove_leftovers
from coder_plugin.locations import is_local
from coder_plugin.progress import Progress

log = logging.getLogger(__name__)


class Finished(NamedTuple):
    """What :meth:`Job.run` leaves in the folder."""

    units: int
    files: int  # complete ones
    made: int  # by this process
    images: int  # of the complete ones
    captions: int
    bad: Counter[str]  # samples that were left out, by kind


class Job(ABC):
    """Makes the files of a data set's units. Subclasses can be pickled."""

    @property
    @abstractmethod
    def opened(self) -> Any:
        """The data and the model, which a process opens once: an object with

        - ``slices``, the data's :class:`Slices`,
        - ``header``, what all files say of data, model and options, as JSON gives it back; its ``plan`` names the options,
        - ``bad()``, a new :class:`~coder_plugin.data.bad_samples.BadSamples`,
        - ``write(job, units, bad, progress=None)``, which writes units' files and yields each unit's number and header:
          ``unit``, ``rows``, ``captions`` and ``bad`` besides.
        """

    @abstractmethod
    def path(self, unit: int) -> Path:
        """A unit's file."""

    @abstractmethod
    def read(self, unit: int) -> dict[str, Any]:
        """The header of a unit's file; ``CoderError``: a damaged one."""

    @abstractmethod
    def check_folder(self, names: Sequence[str]) -> None:
        """Refuse a folder of :meth:`path` with files of these names that are not this job's."""

    @property
    def units(self) -> int:
        """Shards or slices of the data, and files of the finished folder."""
        return len(self.opened.slices)

    def header(self) -> dict[str, Any]:
        """What all files say of model, data and options."""
        return self.opened.header  # type: ignore[no-any-return]

    def __call__(self, unit: int) -> dict[str, Any]:
        """Make a unit's file, unless it is complete: a pure function of the job and the number.

        Args:
            unit: from 0 to ``units - 1``.

        Returns:
            ``unit``, ``path``, and the numbers of ``rows``, ``captions`` and ``bad`` samples.

        Raises:
            CoderError: data that cannot be read, too many bad samples, or a file that was made with other options.
        """
        self._prepare()
        bad = self.opened.bad()
        header = self._complete(unit)
        if header is None:
            [(_, header)] = self.opened.write(self, [unit], bad)
            bad.finish()
        sizes = {"rows": header["rows"], "captions": header["captions"], "bad": len(header["bad"])}
        return {"unit": unit, "path": str(self.path(unit)), **sizes}

    def run(self, *, index: int = 0, count: int = 1, shown: bool = True) -> Finished:
        """Make what the folder lacks of every ``count``-th unit, from number ``index`` on.

        Args:
            index: number of this process or task, from 0.
            count: of processes and tasks.
            shown: whether to show progress.

        Raises:
            CoderError: as of a call; no image could be used.
        """
        self._prepare()
        opened, bad = self.opened, self.opened.bad()
        headers = {unit: header for unit in range(index, self.units, count) if (header := self._complete(unit)) is not None}
        for header in headers.values():
            bad.restore({"read": header["rows"] + len(header["bad"]), "kinds": _kinds([header])})
        missing = [unit for unit in range(index, self.units, count) if unit not in headers]
        total = opened.slices.num_images if count == 1 else None
        with Progress(total, sum(each["rows"] for each in headers.values()), what="images", shown=shown) as progress:
            headers.update(opened.write(self, missing, bad, progress))
        bad.finish()
        headers.update((unit, header) for unit in range(self.units) if unit not in headers and (header := self._complete(unit)))
        images, captions = (sum(each[name] for each in headers.values()) for name in ("rows", "captions"))
        if not images and len(headers) == self.units:
            raise CoderError(f"{bad.name}: no image could be used: {bad}")
        return Finished(self.units, len(headers), len(missing), images, captions, _kinds(headers.values()))

    def _prepare(self) -> None:
        """Make the folder. One that holds something else is refused before a model computes."""
        _ = self.opened  # what cannot be opened leaves no folder
        folder = self.path(0).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        except OSError as error:
            raise CoderError(f"{folder} cannot be written: {error}") from error
        self.check_folder(names)
        for unit in [unit for unit in range(self.units) if self.path(unit).exists()][:1]:
            self._complete(unit)

    def _complete(self, unit: int) -> dict[str, Any] | None:
        """The header of a unit's file; None if there is none, or a damaged one."""
        if not self.path(unit).exists():
            return None
        try:
            header = self.read(unit)
        except CoderError as error:
            log.warning("%s", error)
            return None
        now = {**self.header(), "unit": unit}
        if header != {**header, **now}:
            before, plan = {**header.get("plan", {}), "unit": header.get("unit")}, {**now["plan"], "unit": unit}
            raise CoderError(
                f"{self.path(unit).parent} was begun with other options ({differences(before, plan) or 'another model'}): use "
                "the same options, choose another folder, or remove this one"
            )
        return header


def _kinds(headers: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """The samples that were left out, by kind."""
    return Counter(kind for header in headers for kind, *_ in header["bad"])


#: Fields of which only a digest is known, and what a message calls another one.
_DIGESTS = {
    "model": "another model",
    "content": "the data's content has changed",
    "regions files": "the files of regions have changed (copy them with cp -p or rsync -a, which keep their times)",
    "embeddings": "other embeddings",
}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields of ``now`` that had other values ``before``, for a message; empty if there are none.

    Example:
        >>> differences({"what": "both", "dtype": "float32"}, {"what": "images", "dtype": "float32"})
        'what was both, is images'
    """
    different = [name for name in now if before.get(name) != now[name]]
    return ", ".join(
        _DIGESTS.get(name) or f"{name} was {str(before.get(name))[:200]}, is {str(now[name])[:200]}" for name in different
    )


def content_digest(source: Any) -> str | None:
    """A digest of a source's images and captions where it is cheap: from keys, texts and the sizes of local pictures (of
    evenly spaced ones, where they are many), or from the sizes of local shards; else None. A copy of the data has the same."""
    inner = getattr(source, "captions", source)  # regions joined to captions: the captions
    digest = hashlib.sha256()
    if isinstance(inner, (ItemSource, Pictures)):
        every = 1 + inner.num_images // MOST_FILES
        for number, item in inner.items():
            size = _size(item.path) if number % every == 0 else None
            digest.update(json.dumps([item.key, *item.captions, size]).encode())
    elif all(map(is_local, getattr(inner, "shards", ["pipe:"]))):
        for shard in inner.shards:
            digest.update(json.dumps([os.path.basename(shard), os.path.getsize(local_path(shard))]).encode())
    else:
        return None
    return digest.hexdigest()[:32]


def _size(path: str | None) -> int | None:
    state = None if path is None or "://" in path else file_state(path)
    return None if state is None else state[0]


def region_files(source: Any) -> list[tuple[int, int] | None]:
    """Sizes and times of the files that hold a source's regions; empty where it reads none, or not from files."""
    files: Any = getattr(source, "files", None) or getattr(getattr(source, "regions", None), "files", ())
    return [file_state(path) for path in files]


class Slices:
    """A data set in units: each shard is one, or each slice of the images of any other data.

    Args:
        source: a :class:`~coder_plugin.data.source.Source`.
        rows: images of a slice, from 1.
        pictures: for thumbnails of images that are read as regions: a source of their pictures; None: none.

    Raises:
        CoderError: there are none.

    Example:
        >>> import torch
        >>> from coder_plugin.data import open_source
        >>> slices = Slices(open_source("scenes", count=5), 2)
        >>> blocks = slices.blocks([2], lambda picture: torch.zeros(1), 4, workers=0)
        >>> len(slices), [item.key for block in blocks for item in block.items]
        (3, ['scenes/train/000004'])
    """

    def __init__(self, source: Any, rows: int, *, pictures: Any = None) -> None:
        if rows < 1:
            raise CoderError(f"--rows-per-file must be at least 1, got {rows}")
        self.source, self.rows, self.pictures = source, rows, pictures
        self.by_shards = hasattr(source, "read_shard")
        self._count = source.num_shards if self.by_shards else -(-source.num_images // rows)
        if not self._count:
            raise CoderError(f"{source.name}: no images")

    def __len__(self) -> int:
        return self._count

    @property
    def num_images(self) -> int | None:
        """The number of images, where shards need not be read for it; else None."""
        shards = getattr(self.source, "shards", None) if self.source.is_stream else None
        return self.source.num_images if shards is None else recorded_size(shards)  # type: ignore[no-any-return]

    def blocks(
        self,
        units: Iterable[int],
        transform: Callable[[Any], Any] | None,
        size: int,
        *,
        workers: int,
        thumbnails: int = 0,
        collate: Callable[..., Any] = default_collate,
        check: Callable[[Any], None] | None = None,
    ) -> Iterator[Block]:
        """The images of units in order, decoded in blocks; each unit begins with a block of no images.

        Args:
            units: their numbers.
            transform: of the images; None: they are not loaded.
            size: the most images of a block.
            workers: processes, which serve all units; 0: this one decodes.
            thumbnails: longer side of thumbnails in pixels; 0: none.
            collate: from a list of transformed images to the block's ``image``.
            check: gets the first image.
        """
        make = partial(self._block, transform, thumbnails, collate)
        workers = 0 if transform is None else workers
        return load(make, self._requests(units, size, check, sent=workers > 0), workers)

    def _requests(
        self, units: Iterable[int], size: int, check: Callable[[Any], None] | None, *, sent: bool
    ) -> Iterator[tuple[int, Sequence[Any]]]:
        """The images of blocks, by position, or read from a shard: this process reads each once."""
        for unit in units:
            yield unit, []
            images: Iterator[Any] = iter(range(unit * self.rows, min((unit + 1) * self.rows, self.source.num_images or 0)))
            if self.by_shards:
                images = self.source.read_shard(unit)
            while block := list(islice(images, size)):
                if sent and isinstance(block[0], Item):
                    sent = False
                    self._check_pickles(block[0])
                if check is not None and (loaded := self._first(block)) is not None:
                    check(loaded)
                    check = None
                yield unit, block

    def _check_pickles(self, item: Item) -> None:
        try:
            pickle.dumps(item)
        except Exception as error:  # of many kinds; in the queue's own thread it would be lost
            raise CoderError(f"{self.source.name}: its samples cannot be sent to processes: use --workers 0") from error

    def _first(self, images: Sequence[int | Item]) -> Any:
        """The first image that can be read; None without any."""
        for image in images:
            with contextlib.suppress(OSError, BadSample):
                return self._item(image).load()
        return None

    def _item(self, image: int | Item) -> Item:
        """The image of a request, in whichever process; one of a shard without its regions."""
        if isinstance(image, Item):
            return getattr(self.source, "with_regions", lambda item: item)(image)  # type: ignore[no-any-return]
        return self.source.item(image)  # type: ignore[no-any-return]

    def _block(
        self, transform: Callable[[Any], Any] | None, thumbnails: int, collate: Callable[..., Any],
        request: tuple[int, Sequence[int | Item]],
    ) -> Block:  # fmt: skip
        unit, requested = request
        items, block = [self._item(each) for each in requested], Block(unit, [], None, [], [])
        images = []
        with preserved_rng():
            for number, picture, image in transformed(items, transform, block.bad):
                item = items[number]
                block.items.append(without_image(item))
                images.append(image)
                if thumbnails and not isinstance(picture, Image) and self.pictures is not None:
                    picture = self._picture(requested[number], item.key)
                shown = thumbnails and isinstance(picture, Image)
                block.thumbnails.append(thumbnail(picture, side=thumbnails) if shown else b"")
        return block._replace(image=collate(images) if images and transform is not None else None)

    def _picture(self, image: int | Item, key: str) -> Any:
        """The picture of an image that is read as regions; None where it is not known, or broken."""
        try:
            item = image if isinstance(image, Item) else self.pictures.item(image)
            return item.load() if item.key == key else None
        except (OSError, ValueError, IndexError):  # the last one: fewer pictures
            return None


class Block(NamedTuple):
    """Some images of a unit, decoded."""

    unit: int
    items: list[Item]  # b, without their images
    image: Any  # tensor [b, ...] or a dict of them
    thumbnails: list[bytes]  # b JPEG files, empty where there is none
    bad: list[Bad]


def thumbnail(image: Image, *, side: int) -> bytes:
    """A JPEG file of a picture, its longer side at most ``side`` pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side), Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
