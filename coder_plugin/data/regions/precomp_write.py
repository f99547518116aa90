"""Write a split of a precomp folder, image by image."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from coder_plugin.data.regions.base import Record, staged_split
from coder_plugin.errors import CoderError

_ARRAYS, _TEXTS = ("ims", "boxes", "img_sizes"), ("ids", "caps")


def write(path: str, records: Iterable[Record], *, split: str = "train") -> int:
    """Write ``records`` as the split ``split`` of the folder ``path``; returns their number.

    Raises:
        CoderError: the split exists, there are no records, or one has what these files cannot hold: further arrays, a feature
            of the whole image, or other numbers of regions, channels or captions than the first.
    """
    for ending in (*(f"{name}.npy" for name in _ARRAYS), *(f"{name}.txt" for name in _TEXTS)):
        if os.path.exists(os.path.join(path, f"{split}_{ending}")):
            incomplete = "" if ending == "ims.npy" else f" without {split}_ims.npy, left by a killed process"
            raise CoderError(
                f"{path}: already has {split}_{ending}{incomplete}; remove split {split!r} there or choose another folder"
            )
    with staged_split(path, split, last=f"{split}_ims.npy") as temporary, ExitStack() as files:  # readers look for it first
        arrays = {name: files.enter_context(_Rows(os.path.join(temporary, f"{split}_{name}.npy"))) for name in _ARRAYS}
        texts = {name: open(os.path.join(temporary, f"{split}_{name}.txt"), "wb") for name in _TEXTS}
        for text in texts.values():
            files.callback(text.close)
        first: Record | None = None
        number = 0
        for record in records:
            name, regions = record.name, record.regions
            first = first or record
            _check(path, record, first)
            if name != _line(name, "name", name):
                raise CoderError(f"{path}: image name {name!r} has line breaks or outer blanks, which ids.txt cannot hold")
            number += 1
            arrays["ims"].append(regions.features)
            if regions.boxes is not None:
                arrays["boxes"].append(regions.boxes.astype(np.float32))
                arrays["img_sizes"].append(np.array(regions.size, np.float64))
            texts["ids"].write(f"{name}\n".encode())
            texts["caps"].writelines(f"{_line(caption, 'caption', name)}\n".encode() for caption in record.captions)
        if first is None:
            raise CoderError(f"{path}: no images to write as split {split!r}")
        if not first.captions:
            os.remove(texts["caps"].name)
    return number


def _check(folder: str, record: Record, first: Record) -> None:
    if extras := ", ".join(sorted(record.regions.extras)):
        raise CoderError(
            f"{folder}: image {record.name!r} has further arrays ({extras}), which precomp files cannot store: drop them with "
            "--without-extras, or write shards"
        )
    if record.regions.global_feature is not None:
        raise CoderError(
            f"{folder}: image {record.name!r} has a feature of the whole image, which precomp files cannot store: write shards"
        )
    theirs = _layout(first)
    for what, ours in _layout(record).items():
        if ours != theirs[what]:
            hint = ": convert with --captions-per-image" if what == "captions" else ": write shards"
            raise CoderError(
                f"{folder}: image {record.name!r} has {ours} {what} and {first.name!r} {theirs[what]}; precomp files need the "
                f"same for all images{hint}"
            )


def _layout(record: Record) -> dict[str, Any]:
    features = record.regions.features
    return {
        "captions": len(record.captions),
        "regions": len(features),
        "channels": f"{features.dtype} x {features.shape[1]}",
        "boxes": "no" if record.regions.boxes is None else len(features),
    }


class _Rows:
    """An ``.npy`` file that is written row by row; their number is known at the end. Without rows there is no file."""

    def __init__(self, path: str) -> None:
        self._path, self._count = path, 0
        self._file: Any = None

    def __enter__(self) -> _Rows:
        return self

    def append(self, row: np.ndarray) -> None:
        if self._file is None:
            self._file, self._shape, self._dtype = open(self._path, "wb"), row.shape, row.dtype
            self._header()
        self._file.write(row.tobytes())
        self._count += 1

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._header()
            self._file.close()

    def _header(self) -> None:
        shape = (self._count, *self._shape)
        content = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, content)
        assert self._file.tell() == 128  # NumPy leaves room for more rows


def _line(text: str, what: str, name: str) -> str:
    line = re.sub(r"\s*[\r\n]+\s*", " ", text).strip()
    if not line:
        raise CoderError(f"image {name!r} has an empty {what}")
    return line
