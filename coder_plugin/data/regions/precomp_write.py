"""Writing a split of a precomp folder, image by image."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.npy import NpyRows, NpyWriter
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)
ENDINGS = ("ims.npy", "boxes.npy", "img_sizes.npy", "counts.npy", "whole.npy", "ids.txt", "caps.txt")


def write(path: str, records: Iterable[Record], *, split: str = "train") -> int:
    """Write ``records`` as the split ``split`` of the folder ``path``; returns their number.

    Images with fewer regions than others are filled up with zeros, and then ``counts.npy`` says how many each has.
    All images must have equally many captions.

    Raises:
        CoderError: the split is there already, there are no records, or one does not fit the others (dtype, channels,
            number of captions, with or without boxes): names it.
    """
    for ending in ENDINGS:
        if os.path.exists(os.path.join(path, f"{split}_{ending}")):
            broken = ending != "ims.npy"  # which is the first to be looked for
            why = f" without {split}_ims.npy, as a writing that was killed leaves it" if broken else ""
            raise CoderError(
                f"{path}: already has {split}_{ending}{why}; remove split {split!r} there or choose another folder"
            )
    os.makedirs(path, exist_ok=True)
    split_ = _Split(path, split)
    try:
        for record in records:
            split_.append(record)
        split_.finish()
    finally:
        split_.clean()
    return split_.number


class _Split:
    """The files of a split under names that no reader looks at, until all are whole."""

    def __init__(self, folder: str, split: str) -> None:
        self.folder, self.split = folder, split
        self.number = 0
        self._counts: list[int] = []
        self._names: set[str] = set()
        self._first: Record | None = None
        self._arrays: dict[str, NpyWriter] = {}
        self._dropped: set[str] = set()
        self._ids = open(self._aside("ids.txt"), "wb")
        self._caps = open(self._aside("caps.txt"), "wb")
        self._each = 0
        self._padded: NpyWriter | None = None
        self._named: list[str] = []

    def append(self, record: Record) -> None:
        name, regions = record.name, record.regions
        if self._first is None:
            self._start(record)
        first = self._first
        assert first is not None
        captions = self._captions(record)
        if len(captions) != self._each:
            raise CoderError(
                f"{self.folder}: image {name!r} has {len(captions)} captions and {first.name!r} {self._each}; precomp "
                "files need equally many for all images: convert with captions_per_image"
            )
        for what in ("boxes", "whole"):
            if (getattr(regions, what) is None) != (getattr(first.regions, what) is None):
                with_, without = (name, first.name) if getattr(regions, what) is not None else (first.name, name)
                raise CoderError(
                    f"{self.folder}: image {with_!r} has {what} and {without!r} has none: all or no image must"
                )
        self._dropped |= set(regions.extras)
        self._put("ims.npy", regions.features, name)  # one below the other, until the end tells how many an image has
        if regions.boxes is not None:
            self._put("boxes.npy", regions.boxes.astype(np.float32), name)
            self._put("img_sizes.npy", np.asarray([regions.size], np.float64), name)
        if regions.whole is not None:
            self._put("whole.npy", regions.whole[None], name)
        if name in self._names or name != _line(name, "name", name):
            why = "comes twice" if name in self._names else "has line breaks or outer blanks, which ids.txt cannot hold"
            raise CoderError(f"{self.folder}: image name {name!r} {why}")
        self._names.add(name)
        self._ids.write(f"{name}\n".encode())
        for caption in captions:
            self._caps.write(f"{caption}\n".encode())
        self._counts.append(len(regions))
        self.number += 1

    def finish(self) -> None:
        if not self.number:
            raise CoderError(f"{self.folder}: no images to write as split {self.split!r}")
        same = len(set(self._counts)) == 1
        for ending, array in self._arrays.items():
            by_region = ending in ("ims.npy", "boxes.npy")
            array.close((self.number, self._counts[0], *array.shape) if by_region and same else None)
        self._ids.close()
        self._caps.close()
        if not same:
            for ending in ("ims.npy", "boxes.npy"):
                if ending in self._arrays:
                    self._pad(ending)
            with open(self._aside("counts.npy"), "wb") as file:
                np.save(file, np.asarray(self._counts, np.int32), allow_pickle=False)
        if not self._each:
            os.remove(self._aside("caps.txt"))
        if self._dropped:
            log.warning(
                "%s: precomp files have no place for %s: left out", self.folder, ", ".join(sorted(self._dropped))
            )
        # The features last: without them the others are no split.
        for ending in reversed(ENDINGS):
            if os.path.exists(self._aside(ending)):
                os.replace(self._aside(ending), self._final(ending))
                self._named.append(ending)

    def clean(self) -> None:
        for file in (self._ids, self._caps, *self._arrays.values(), self._padded):
            if file is not None:
                file.close()
        for ending in [*ENDINGS, "padded"]:
            with suppress(FileNotFoundError):
                os.remove(self._aside(ending))
        if not os.path.exists(self._final("ims.npy")):  # broken off between two names
            for ending in self._named:
                os.remove(self._final(ending))

    def _start(self, record: Record) -> None:
        self._first = record
        self._each = len(self._captions(record))

    def _captions(self, record: Record) -> list[str]:
        return [_line(caption, "caption", record.name) for caption in record.captions]

    def _aside(self, ending: str) -> str:
        return os.path.join(self.folder, f".{self.split}_{ending}.{os.getpid()}.part")

    def _final(self, ending: str) -> str:
        return os.path.join(self.folder, f"{self.split}_{ending}")

    def _put(self, ending: str, rows: np.ndarray, name: str) -> None:
        array = self._arrays.get(ending)
        if array is None:
            array = self._arrays[ending] = NpyWriter(self._aside(ending), rows.dtype, rows.shape[1:])
        if (rows.dtype, rows.shape[1:]) != (array.dtype, array.shape):
            assert self._first is not None
            raise CoderError(
                f"{self.folder}: image {name!r} has {rows.dtype} x {rows.shape[-1]} for {ending} where "
                f"{self._first.name!r} has {array.dtype} x {array.shape[-1]}; one file holds one kind"
            )
        array.extend(rows)

    def _pad(self, ending: str) -> None:
        """Give every image as many rows as the one with most."""
        most = max(self._counts)
        rows = NpyRows(self._aside(ending), kinds="f", ndim=2)
        padded = self._padded = NpyWriter(self._aside("padded"), rows.dtype, (most, rows.shape[1]))
        start = 0
        for count in self._counts:
            image = np.zeros(padded.shape, rows.dtype)
            image[:count] = rows.read(start, count)
            padded.extend(image[None])
            start += count
        padded.close()
        os.replace(padded.path, self._aside(ending))


def _line(text: str, what: str, name: str) -> str:
    line = re.sub(r"\s*[\r\n]+\s*", " ", text).strip()
    if not line:
        raise CoderError(f"image {name!r} has an empty {what}")
    return line
