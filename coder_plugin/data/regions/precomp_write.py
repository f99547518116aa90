"""Write a split of a precomp folder, image by image."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from typing import IO

import numpy as np

from coder_plugin.data.regions.base import Record, log, staged_split
from coder_plugin.errors import CoderError

ENDINGS = ("ims.npy", "boxes.npy", "img_sizes.npy", "counts.npy", "whole.npy", "ids.txt", "caps.txt")
_HEADER = 128  # bytes of an .npy file's header


def write(path: str, records: Iterable[Record], *, split: str = "train") -> int:
    """Write ``records`` as the split ``split`` of the folder ``path``; returns their number.

    All images get as many rows as the one with most regions, the rest zeros; ``counts.npy`` then holds their numbers of
    regions.

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
    with staged_split(path, split, last=f"{split}_ims.npy") as temporary:  # readers look for the features first
        return _write(path, os.path.join(temporary, f"{split}_"), records, split)


def _write(folder: str, prefix: str, records: Iterable[Record], split: str) -> int:
    first: Record | None = None
    names: set[str] = set()
    counts: list[int] = []
    dropped: set[str] = set()
    with ExitStack() as files:
        arrays = {ending: _Rows(prefix + ending) for ending in ENDINGS if ending.endswith(".npy")}
        for array in arrays.values():
            files.callback(array.close)
        ids, caps = (files.enter_context(open(f"{prefix}{name}.txt", "wb")) for name in ("ids", "caps"))
        for record in records:
            name, regions = record.name, record.regions
            first = record if first is None else first
            if len(record.captions) != len(first.captions):
                raise CoderError(
                    f"{folder}: image {name!r} has {len(record.captions)} captions and {first.name!r} {len(first.captions)}; "
                    "precomp files need the same number for all images: convert with --captions-per-image"
                )
            for part in ("boxes", "global_feature"):
                if (getattr(regions, part) is None) != (getattr(first.regions, part) is None):
                    owner, other = (name, first.name) if getattr(regions, part) is not None else (first.name, name)
                    raise CoderError(f"{folder}: image {owner!r} has {part} and {other!r} has none: all or no image must")
            if name in names or name != _line(name, "name", name):
                reason = "occurs twice" if name in names else "has line breaks or outer blanks, which ids.txt cannot hold"
                raise CoderError(f"{folder}: image name {name!r} {reason}")
            rows = {"ims.npy": regions.features}
            if regions.boxes is not None:
                rows |= {"boxes.npy": regions.boxes.astype(np.float32), "img_sizes.npy": np.array([regions.size], np.float64)}
            if regions.global_feature is not None:
                rows["whole.npy"] = regions.global_feature[None]
            for ending, values in rows.items():
                if difference := arrays[ending].extend(values):
                    raise CoderError(
                        f"{folder}: image {name!r} has {difference[0]} for {ending} where {first.name!r} has {difference[1]}; "
                        "all images must have the same"
                    )
            names.add(name)
            dropped |= set(regions.extras)
            ids.write(f"{name}\n".encode())
            caps.writelines(f"{_line(caption, 'caption', name)}\n".encode() for caption in record.captions)
            counts.append(len(regions))
        if first is None:
            raise CoderError(f"{folder}: no images to write as split {split!r}")
        for ending in ("ims.npy", "boxes.npy"):
            arrays[ending].divide(counts)
        if len(set(counts)) > 1:
            arrays["counts.npy"].extend(np.array(counts, np.int32))
    if not first.captions:
        os.remove(prefix + "caps.txt")
    if dropped:
        log.warning("%s: precomp files cannot store %s: left out", folder, ", ".join(sorted(dropped)))
    return len(counts)


class _Rows:
    """An ``.npy`` file that is written by rows, whose number is known only at the end. Without rows there is no file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._shape: tuple[int, ...] = (0,)

    def extend(self, rows: np.ndarray) -> tuple[str, str] | None:
        """Add rows; if their dtype or width is another than the first ones', both are returned instead."""
        if self._file is None:
            self._file, self._dtype, self._shape = open(self.path, "wb"), rows.dtype, (0, *rows.shape[1:])
            self._header(self._file)
        if (rows.dtype, rows.shape[1:]) != (self._dtype, self._shape[1:]):
            return f"{rows.dtype} x {rows.shape[-1]}", f"{self._dtype} x {self._shape[-1]}"
        self._file.write(rows.tobytes())
        self._shape = (self._shape[0] + len(rows), *self._shape[1:])
        return None

    def divide(self, counts: list[int]) -> None:
        """Turn the rows [S, …] of all images into [N, L, …], where images with fewer than L get zeros."""
        if self._file is None:
            return
        largest = max(counts)
        if min(counts) == largest:
            self._shape = (len(counts), largest, *self._shape[1:])
            return
        self.close()
        padded = _Rows(f"{self.path}.padded")
        with open(self.path, "rb") as file:
            file.seek(_HEADER)
            for count in counts:
                image = np.zeros((1, largest, *self._shape[1:]), self._dtype)
                image[0, :count] = np.fromfile(file, self._dtype, count * self._shape[1]).reshape(count, -1)
                padded.extend(image)
        padded.close()
        os.replace(padded.path, self.path)
        self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._header(self._file)
            self._file.close()
            self._file = None

    def _header(self, file: IO[bytes]) -> None:
        content = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(file, content)
        assert file.tell() == _HEADER  # NumPy leaves room for more rows


def _line(text: str, what: str, name: str) -> str:
    line = re.sub(r"\s*[\r\n]+\s*", " ", text).strip()
    if not line:
        raise CoderError(f"image {name!r} has an empty {what}")
    return line
