"""Read a folder with one file of arrays an image, ``NAME.npz`` or ``NAME.npy``, in subfolders if need be.

``NAME.npz`` holds the arrays that :mod:`~coder_plugin.data.regions.arrays` lists: bottom-up-attention.pytorch's and OpenVQA's
files among others. ``NAME.npy`` holds features [L, R] alone, and ``NAME_box.npy`` or ``NAME_boxes.npy`` its boxes [L, 4] as
fractions. MMF's ``NAME_info.npy`` is a pickle, which is never unpickled: it is skipped with a warning.

Names are paths from the folder with ``/``, without the ending: ``val/42.npz`` is ``val/42``. Their order is alphabetical.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from coder_plugin.data.regions.arrays import from_arrays, read_npy, read_npz
from coder_plugin.data.regions.base import IndexedRegions, RegionFormat, Regions, missing_file, warn_once
from coder_plugin.errors import CoderError

_BOXES = ("_box", "_boxes")
_INFO = "_info"
_ROUNDING = 1e-2  # fractions may exceed one by this much


class FolderRegions(IndexedRegions):
    """The files under ``path`` are listed once; each is opened when it is read."""

    def __init__(self, path: str, *, split: str = "train") -> None:
        if not os.path.isdir(path):
            raise CoderError(f"{path}: not a folder") if os.path.exists(path) else missing_file(path)
        endings: dict[str, list[str]] = {}
        for name in _files(path):
            stem, ending = os.path.splitext(name)
            endings.setdefault(stem, []).append(ending)
        index: dict[str, tuple[str, str | None]] = {}
        for stem in sorted(endings):
            if _is_side_file(stem, endings):
                continue
            if len(endings[stem]) > 1:
                raise CoderError(f"{path}: image {stem!r} has both an .npz and an .npy file; remove one")
            boxes = [stem + suffix + ".npy" for suffix in _BOXES if ".npy" in endings.get(stem + suffix, ())]
            index[stem] = stem + endings[stem][0], boxes[0] if boxes and endings[stem] == [".npy"] else None
        if not index:
            raise CoderError(f"{path}: no .npz or .npy file in it or its subfolders")
        if any(stem.endswith(_INFO) and _is_side_file(stem, endings) for stem in endings):
            warn_once(path, f"NAME{_INFO}.npy are pickles, which are never unpickled; their boxes are left out")
        super().__init__(path, index)

    def _read(self, name: str, place: Any) -> Regions:
        features, boxes = (each and os.path.join(self.path, each) for each in place)
        if features.endswith(".npz"):
            with open(features, "rb") as file:
                return from_arrays(read_npz(file), self.path)
        fractions = None
        if boxes:
            fractions = read_npy(boxes).astype(np.float32)
            if fractions.size and np.nanmax(fractions) > 1 + _ROUNDING:
                raise ValueError(
                    f"{place[1]} holds {np.nanmax(fractions):g}: boxes next to .npy files must be fractions; for pixels, save "
                    ".npz files with image_w and image_h"
                )
        return Regions(features=read_npy(features), boxes=fractions)


def matches(path: str) -> bool:
    """A folder with ``.npz`` or ``.npy`` files, but without ``SPLIT_ims.npy`` or ``SPLIT_caps.txt``."""
    if not os.path.isdir(path) or any(name.endswith(("_ims.npy", "_caps.txt")) for name in os.listdir(path)):
        return False
    return next(_files(path), None) is not None


def _files(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        inside = os.path.relpath(folder, path).replace(os.sep, "/")
        for name in names:
            if name.endswith((".npz", ".npy")):
                yield name if inside == "." else f"{inside}/{name}"


def _is_side_file(stem: str, endings: dict[str, list[str]]) -> bool:
    """Whether ``stem.npy`` holds the boxes or information of another image in the folder."""
    owners = [stem.removesuffix(suffix) for suffix in (*_BOXES, _INFO) if stem.endswith(suffix)]
    return endings[stem] == [".npy"] and any(".npy" in endings.get(owner, ()) for owner in owners)


FOLDER = RegionFormat(open=FolderRegions, matches=matches)
