"""Reading and decoding units for embedding: blocks of images in order, from data loading processes that serve all units."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from PIL.Image import Image, Resampling
from torch.utils.data import DataLoader, Dataset

from coder_plugin.data.bad_samples import Bad, describe
from coder_plugin.data.item import Item
from coder_plugin.data.prefetch import Prefetch
from coder_plugin.data.source import decode
from coder_plugin.data.units import Handle, Units
from coder_plugin.data.workers import start_worker
from coder_plugin.errors import CoderError

#: A unit, and the handles of a block of its images; None after the last block of the unit.
_Request = tuple[int, list[Handle] | None]
_FAILED = -1  # in place of a unit: the next one could not be read


class Record(NamedTuple):
    """What is kept of an image besides its vectors."""

    key: str
    captions: tuple[str, ...]
    path: str | None
    member: str | None
    metadata: dict[str, Any]


class Block(NamedTuple):
    """Some images of a unit, decoded."""

    unit: int
    last: bool  # the unit has no more, and this block has no images
    read: int  # images, bad ones included
    records: list[Record]  # b
    image: Any  # tensor [b, ...] or a dict of them; None without images
    thumbnails: list[bytes]  # b JPEG files, empty where there is none
    bad: list[Bad]


def read_blocks(
    units: Units,
    numbers: Iterable[int],
    *,
    size: int,
    transform: Callable[[Any], Any] | None,
    thumbnails: int = 0,
    pictures: Units | None = None,
    workers: int = 0,
) -> Generator[Block, None, None]:
    """The blocks of units, one unit after the other, each followed by a block that is ``last``.

    This process reads the shards, each once and in order; ``workers`` processes decode the images. They are started once for
    all units. A block's content depends on the unit alone.

    Args:
        units: the data.
        numbers: which units, asked for when they are read.
        size: images of a block.
        transform: of what an image loads; None: images are not loaded.
        thumbnails: longer side of thumbnails in pixels; 0: none.
        pictures: for thumbnails of images that are read as regions: their pictures, in the same units.
        workers: decoding processes; 0: this process decodes.

    Raises:
        CoderError: a shard that cannot be read, or samples of a reader that cannot be sent to processes.
    """
    decoder = _Decoder(units, transform, thumbnails, pictures)
    requests = _requests(units, numbers, size, check=workers > 0)
    if not workers or transform is None:
        with contextlib.closing(requests):
            for request in requests:
                yield _raised(decoder[request])
        return
    failures: list[Exception] = []

    def to_send() -> Generator[_Request, None, None]:
        """An exception would reach the DataLoader while it starts its processes: it is raised where its block would come."""
        with contextlib.closing(requests):
            try:
                yield from requests
            except Exception as error:
                failures.append(error)
                yield _FAILED, None

    with contextlib.closing(Prefetch(to_send(), 2)) as ahead:
        loader: DataLoader[Block] = DataLoader(
            decoder,
            sampler=ahead,  # type: ignore[arg-type]  # what it yields is sent to a worker: here images, not numbers of them
            batch_size=None,
            num_workers=workers,
            collate_fn=_identity,
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=start_worker,
        )
        loaded = iter(loader)
        try:
            while (block := next(loaded, None)) is not None:
                block = _raised(block)
                if block.unit == _FAILED:
                    raise failures[0]
                yield block
        finally:
            ahead.close()
            with contextlib.suppress(Exception):
                for _ in loaded:  # to its end, at which the processes end: an iterator that is dropped may leave them
                    pass


def _requests(units: Units, numbers: Iterable[int], size: int, *, check: bool) -> Generator[_Request, None, None]:
    for unit in numbers:
        handles = units.handles(unit)
        while block := list(islice(handles, size)):
            if check and isinstance(block[0], Item):
                check = False
                try:
                    pickle.dumps(block[0])
                except Exception as error:  # of many kinds; in the queue's own thread it would be lost
                    name = units.source.name
                    raise CoderError(f"{name}: its samples cannot be sent to processes: use --workers 0") from error
            yield unit, block
        yield unit, None


def _raised(block: Block | CoderError) -> Block:
    if isinstance(block, CoderError):
        raise block
    return block


def _identity(block: Any) -> Any:
    return block


class _Decoder(Dataset):
    """Decodes a block. A ``CoderError`` is returned for the main process to raise, without a worker's traceback."""

    def __init__(self, units: Units, transform: Any, thumbnails: int, pictures: Units | None) -> None:
        self.units, self.thumbnails, self.pictures = units, thumbnails, pictures
        self.transform = transform
        if thumbnails and transform is not None and pictures is None:
            self.transform = partial(_with_thumbnail, transform, thumbnails)

    def __getitem__(self, request: _Request) -> Block | CoderError:
        try:
            return self._decode(*request)
        except CoderError as error:
            return CoderError(str(error))

    def _decode(self, unit: int, handles: list[Handle] | None) -> Block:
        if handles is None:
            return Block(unit, True, 0, [], None, [], [])
        items = [self.units.item(handle) for handle in handles]
        if self.transform is None:
            bad = [describe(item.key, item.fault) for item in items if item.fault is not None]
            good = [number for number, item in enumerate(items) if item.fault is None]
            return Block(unit, False, len(items), [_record(items[n]) for n in good], None, [b""] * len(good), bad)
        chunk, good = decode(items, self.transform)
        image: Any = chunk.tensors.get("image")
        files = [b""] * len(good)
        if good and self.pictures is not None:
            files = [self._thumbnail(handles[number], items[number].key) for number in good]
        elif good and self.thumbnails:
            image, files = image["image"], image["thumbnail"]
        return Block(unit, False, len(items), [_record(items[n]) for n in good], image, files, chunk.bad)

    def _thumbnail(self, handle: Handle, key: str) -> bytes:
        assert self.pictures is not None
        try:
            item = self.pictures.picture(handle)
            return thumbnail(item.load(), side=self.thumbnails) if item.key == key else b""
        except (OSError, ValueError, IndexError):  # the last one: fewer pictures
            return b""


def _record(item: Item) -> Record:
    return Record(item.key, item.captions, item.path, item.member, dict(item.metadata))


def _with_thumbnail(transform: Callable[[Any], Any], side: int, loaded: Any) -> dict[str, Any]:
    return {"image": transform(loaded), "thumbnail": thumbnail(loaded, side=side)}


def thumbnail(image: Any, *, side: int) -> bytes:
    """A JPEG file of an image, its longer side at most ``side`` pixels; empty if ``image`` is not a picture (but regions)."""
    if not isinstance(image, Image):
        return b""
    small = image.convert("RGB")
    small.thumbnail((side, side), Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
