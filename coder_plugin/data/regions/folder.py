"""Read a folder with one ``NAME.npz`` or ``NAME.npy`` an image, in subfolders if need be.

``NAME.npz`` holds the arrays that :mod:`~coder_plugin.data.regions.arrays` lists: bottom-up-attention.pytorch's and OpenVQA's
files among others. ``NAME.npy`` holds features [L, R] alone.

Names are paths from the folder with ``/``, without the ending: ``val/42.npz`` is ``val/42``. Their order is alphabetical.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from coder_plugin.data.regions.arrays import LARGEST_ARRAYS, from_arrays, read_npz
from coder_plugin.data.regions.base import Entry, RegionFormat, Regions
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular


def read(path: str) -> Iterator[Entry]:
    """The images of a folder.

    Raises:
        CoderError: no such folder, no files in it, files of one name, or boxes in files of their own.
    """
    if not os.path.isdir(path):
        raise CoderError(f"{path}: {'not a' if os.path.exists(path) else 'no such'} folder")
    files = sorted(_files(path))
    stems = {name[:-4]: name for name in files}
    if not files:
        raise CoderError(f"{path}: no .npz or .npy file in it or its subfolders")
    if len(stems) < len(files):
        both = next(stem for stem, number in Counter(name[:-4] for name in files).items() if number > 1)
        raise CoderError(f"{path}: image {both!r} has both an .npz and an .npy file; remove one")
    for stem in stems:
        owner, _, what = stem.rpartition("_")
        if owner in stems and what in ("box", "boxes", "info"):
            raise CoderError(
                f"{path}: {stems[stem]} belongs to {stems[owner]}: save both as {owner}.npz (x, bbox, image_w, image_h)"
            )
    for stem, name in stems.items():
        yield Entry(stem, partial(_load, os.path.join(path, name), path))


def matches(path: str) -> bool:
    """A folder with ``.npz`` or ``.npy`` files, but without ``SPLIT_ims.npy`` or ``SPLIT_caps.txt``."""
    if not os.path.isdir(path) or any(name.endswith(("_ims.npy", "_caps.txt")) for name in os.listdir(path)):
        return False
    return next(_files(path), None) is not None


def _load(path: str, folder: str) -> Regions:
    with open_regular(path, "rb") as file:
        if path.endswith(".npz"):
            return from_arrays(read_npz(file), folder)
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_ARRAYS:
            raise ValueError(f"it has {size:,} bytes, more than {LARGEST_ARRAYS:,}")
        if file.read(6) != b"\x93NUMPY":  # NumPy reads anything else as an archive or a pickle
            raise ValueError("it is not an .npy file")
        file.seek(0)
        try:
            return Regions(np.load(file, allow_pickle=False))
        except (ValueError, OSError):
            raise
        except Exception as exc:  # NumPy parses headers as Python
            raise ValueError(f"damaged .npy file: {type(exc).__name__}: {exc}") from exc


def _files(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        inside = os.path.relpath(folder, path).replace(os.sep, "/")
        for name in names:
            if name.endswith((".npz", ".npy")):
                yield name if inside == "." else f"{inside}/{name}"


FOLDER = RegionFormat(matches=matches, read=read)
