"""A folder with a file of arrays for each image, ``NAME.npz`` or ``NAME.npy``, in folders of its own if need be.

``NAME.npz`` holds what :mod:`~coder_plugin.data.regions.arrays` lists, bottom-up-attention.pytorch's and OpenVQA's files
among others; it is what we write. ``NAME.npy`` holds features [L, R] alone; ``NAME_box.npy`` or ``NAME_boxes.npy`` beside it,
boxes [L, 4] as fractions. MMF's ``NAME_info.npy`` is a pickle, which is never unpickled: it is passed over, with a warning.

Names count from the folder, with ``/``, without the ending: ``val/42.npz`` is ``val/42``. Their order is the alphabet's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from coder_plugin.data.regions.arrays import from_arrays, npz_bytes, read_npy, read_npz, to_arrays
from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.keyed import KeyedRegions, absent, naming, replacing, unique, warn_once
from coder_plugin.errors import CoderError

_BOXES = ("_box", "_boxes")
_INFO = "_info"
_ROUNDING = 1e-2  # fractions may be this much above one


class FolderRegions(KeyedRegions):
    """Regions of the files under ``path``, listed once; each is opened when it is read."""

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            raise CoderError(f"{path}: not a folder") if os.path.exists(path) else absent(path)
        endings: dict[str, list[str]] = {}
        for name in _files(path):
            stem, ending = os.path.splitext(name)
            endings.setdefault(stem, []).append(ending)
        index: dict[str, tuple[str, str | None]] = {}
        for stem in sorted(endings):
            if _owner(stem, endings) is not None:
                continue
            if len(endings[stem]) > 1:
                raise CoderError(f"{path}: image {stem!r} is there both as .npz and as .npy; remove one")
            beside = [stem + suffix + ".npy" for suffix in _BOXES if ".npy" in endings.get(stem + suffix, ())]
            if endings[stem] == [".npz"]:
                beside = []
            index[stem] = (stem + endings[stem][0], beside[0] if beside else None)
        if not index:
            raise CoderError(f"{path}: no .npz or .npy file in it, nor in its folders")
        if any(_owner(stem, endings) and stem.endswith(_INFO) for stem in endings):
            warn_once(path, f"NAME{_INFO}.npy are pickles, which are never unpickled; what they say of boxes is left out")
        super().__init__(path, index)

    def _read(self, name: str, where: Any) -> Regions:
        features, boxes = (each and os.path.join(self.path, each) for each in where)
        if features.endswith(".npz"):
            with open(features, "rb") as file:
                return from_arrays(read_npz(file), self.path)
        fractions = None
        if boxes:
            fractions = read_npy(boxes).astype(np.float32)
            if fractions.size and np.nanmax(fractions) > 1 + _ROUNDING:
                raise ValueError(
                    f"{where[1]} holds {np.nanmax(fractions):g}: boxes beside .npy files are fractions; to have pixels, save "
                    ".npz files with image_w and image_h"
                )
        return Regions(features=read_npy(features), boxes=fractions)


def open_folder(path: str, *, split: str = "train") -> FolderRegions:
    """All images in the folder, whatever the split."""
    return FolderRegions(path)


def write_folder(path: str, records: Iterable[Record], *, split: str = "train") -> int:
    """A new folder of ``.npz`` files. It gets its name when it is whole; a folder with something in it is refused."""
    count = 0
    with replacing(path) as temporary:
        for name, regions in unique(path, records):
            with naming(path, name):
                parts = name.split("/")
                if "\0" in name or os.path.isabs(name) or not all(parts) or {".", ".."} & set(parts):
                    raise ValueError("not a name that a file in this folder can have")
                target = os.path.join(temporary, *parts) + ".npz"
                os.makedirs(os.path.dirname(target), exist_ok=True)
                data = npz_bytes(to_arrays(regions))
            with open(target, "xb") as file:  # x: on some disks two names are one
                file.write(data)
            count += 1
    return count


def matches(path: str) -> bool:
    """A folder with ``.npz`` or ``.npy`` files, other than ``SPLIT_ims.npy`` and whatever else lies beside captions."""
    if not os.path.isdir(path):
        return False
    if any(name.endswith(("_ims.npy", "_caps.txt")) for name in os.listdir(path)):
        return False
    return next(_files(path), None) is not None


def _files(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        inside = os.path.relpath(folder, path).replace(os.sep, "/")
        for name in names:
            if name.endswith((".npz", ".npy")):
                yield name if inside == "." else f"{inside}/{name}"


def _owner(stem: str, endings: dict[str, list[str]]) -> str | None:
    """The image that ``stem.npy`` has boxes or information of, if it is such a file."""
    if endings[stem] != [".npy"]:
        return None
    for suffix in (*_BOXES, _INFO):
        owner = stem.removesuffix(suffix)
        if owner != stem and ".npy" in endings.get(owner, ()):
            return owner
    return None


FOLDER = RegionFormat(open=open_folder, write=write_folder, matches=matches, keeps=("whole", "extras"))
