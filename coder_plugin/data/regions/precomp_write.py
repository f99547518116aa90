"""Write a split of a precomp folder, image by image."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable

import numpy as np

from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.npy import NpyRows, NpyWriter
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)
ENDINGS = ("ims.npy", "boxes.npy", "img_sizes.npy", "counts.npy", "whole.npy", "ids.txt", "caps.txt")


def write(path: str, records: Iterable[Record], *, split: str = "train") -> int:
    """Write ``records`` as the split ``split`` of the folder ``path``; returns their number.

    All images get as many rows as the one with most regions, the rest zeros; ``counts.npy`` then holds their numbers of
    regions. All files are written to a temporary folder and then renamed.

    Raises:
        CoderError: the split exists, there are no records, or a record does not fit the others (dtype, channels, number of
            captions, with or without boxes).
    """
    for ending in ENDINGS:
        if os.path.exists(os.path.join(path, f"{split}_{ending}")):
            incomplete = "" if ending == "ims.npy" else f" without {split}_ims.npy, left by a killed process"
            raise CoderError(
                f"{path}: already has {split}_{ending}{incomplete}; remove split {split!r} there or choose another folder"
            )
    temporary = os.path.join(path, f".{split}.{os.getpid()}.part")
    os.makedirs(temporary)
    writer = _SplitWriter(path, temporary)
    try:
        for record in records:
            writer.append(record)
        if not writer.counts:
            raise CoderError(f"{path}: no images to write as split {split!r}")
        writer.finish()
        _rename(temporary, path, split)
    finally:
        writer.close()
        shutil.rmtree(temporary, ignore_errors=True)
    return len(writer.counts)


def _rename(temporary: str, folder: str, split: str) -> None:
    """Rename the features last: readers look for them first. If one renaming fails, undo the others."""
    renamed: list[str] = []
    try:
        for ending in reversed(ENDINGS):
            if os.path.exists(os.path.join(temporary, ending)):
                target = os.path.join(folder, f"{split}_{ending}")
                os.replace(os.path.join(temporary, ending), target)
                renamed.append(target)
    except BaseException:
        for target in renamed:
            os.remove(target)
        raise


class _SplitWriter:
    """The files of a split in a temporary folder."""

    def __init__(self, folder: str, temporary: str) -> None:
        self.folder, self.temporary = folder, temporary
        self.counts: list[int] = []  # regions of each image
        self._names: set[str] = set()
        self._first: Record | None = None
        self._captions_per_image = 0
        self._arrays: dict[str, NpyWriter] = {}
        self._dropped: set[str] = set()
        self._ids = open(self._path("ids.txt"), "wb")
        self._caps = open(self._path("caps.txt"), "wb")

    def append(self, record: Record) -> None:
        name, regions = record.name, record.regions
        captions = [_line(caption, "caption", name) for caption in record.captions]
        if self._first is None:
            self._first, self._captions_per_image = record, len(captions)
        first = self._first
        if len(captions) != self._captions_per_image:
            raise CoderError(
                f"{self.folder}: image {name!r} has {len(captions)} captions and {first.name!r} {self._captions_per_image}; "
                "precomp files need the same number for all images: convert with captions_per_image"
            )
        for part in ("boxes", "global_feature"):
            if (getattr(regions, part) is None) != (getattr(first.regions, part) is None):
                owner, other = (name, first.name) if getattr(regions, part) is not None else (first.name, name)
                raise CoderError(f"{self.folder}: image {owner!r} has {part} and {other!r} has none: all or no image must")
        if name in self._names or name != _line(name, "name", name):
            reason = "occurs twice" if name in self._names else "has line breaks or outer blanks, which ids.txt cannot hold"
            raise CoderError(f"{self.folder}: image name {name!r} {reason}")
        self._dropped |= set(regions.extras)
        self._extend("ims.npy", regions.features, name)  # [regions of all images, R] until all images are written
        if regions.boxes is not None:
            self._extend("boxes.npy", regions.boxes.astype(np.float32), name)
            self._extend("img_sizes.npy", np.asarray([regions.size], np.float64), name)
        if regions.global_feature is not None:
            self._extend("whole.npy", regions.global_feature[None], name)
        self._names.add(name)
        self._ids.write(f"{name}\n".encode())
        self._caps.writelines(f"{caption}\n".encode() for caption in captions)
        self.counts.append(len(regions))

    def finish(self) -> None:
        same = len(set(self.counts)) == 1
        for ending, array in self._arrays.items():
            by_region = ending in ("ims.npy", "boxes.npy")
            array.close((len(self.counts), self.counts[0], *array.shape) if by_region and same else None)
            if by_region and not same:
                self._pad(ending)
        if not same:
            np.save(self._path("counts.npy"), np.asarray(self.counts, np.int32), allow_pickle=False)
        self.close()
        if not self._captions_per_image:
            os.remove(self._path("caps.txt"))
        if self._dropped:
            log.warning("%s: precomp files cannot store %s: left out", self.folder, ", ".join(sorted(self._dropped)))

    def close(self) -> None:
        self._ids.close()
        self._caps.close()
        for array in self._arrays.values():
            array.close()

    def _path(self, ending: str) -> str:
        return os.path.join(self.temporary, ending)

    def _extend(self, ending: str, rows: np.ndarray, name: str) -> None:
        array = self._arrays.get(ending)
        if array is None:
            array = self._arrays[ending] = NpyWriter(self._path(ending), rows.dtype, rows.shape[1:])
        if (rows.dtype, rows.shape[1:]) != (array.dtype, array.shape):
            assert self._first is not None
            raise CoderError(
                f"{self.folder}: image {name!r} has {rows.dtype} x {rows.shape[-1]} for {ending} where "
                f"{self._first.name!r} has {array.dtype} x {array.shape[-1]}; all images must have the same"
            )
        array.extend(rows)

    def _pad(self, ending: str) -> None:
        """Give every image as many rows as the one with most."""
        rows = NpyRows(self._path(ending), kinds="f", ndim=2)
        padded = NpyWriter(self._path("padded"), rows.dtype, (max(self.counts), rows.shape[1]))
        start = 0
        for count in self.counts:
            image = np.zeros((1, *padded.shape), rows.dtype)
            image[0, :count] = rows.read(start, count)
            padded.extend(image)
            start += count
        padded.close()
        os.replace(padded.path, self._path(ending))


def _line(text: str, what: str, name: str) -> str:
    line = re.sub(r"\s*[\r\n]+\s*", " ", text).strip()
    if not line:
        raise CoderError(f"image {name!r} has an empty {what}")
    return line
