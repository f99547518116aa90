"""Read HDF5 files of bottom-up-attention-vqa, BAN and their like.

====================  =============================================================================================
``image_features``    [N, L, R], the same number of regions for all images; or [S, R], all images one after another
``image_bb``          [N, L, 4] or [S, 4]: left, top, right, bottom
``pos_boxes``         [N, 2], for [S, R]: an image's first row and the one after its last
``spatial_features``  [N, L, 6] or [S, 6]: the boxes as fractions, then their widths and heights
``image_ids``         [N] names or numbers, also called ``ids`` or ``image_id``
====================  =============================================================================================

N images, L regions of an image, S regions of all images, R channels.

The field's files keep the images' names in pickles (``NAME_imgid2idx.pkl``), which are never unpickled: save their content as
``NAME_ids.json`` (names to rows, or a list of names) in the folder of ``NAME.hdf5``.

Boxes are those of ``spatial_features``. Without them they are left out with a warning, since ``image_bb`` is in pixels, and
the sizes of the images are not in the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from coder_plugin.data.regions.arrays import LARGEST_ARRAYS, native
from coder_plugin.data.regions.base import Entry, RegionFormat, Regions, optional_package, warn_once
from coder_plugin.errors import CoderError
from coder_plugin.files import read_json

_IDS = ("image_ids", "ids", "image_id")
_DATASETS = ("image_features", "image_bb", "pos_boxes", "spatial_features", *_IDS)


def read(path: str) -> Iterator[Entry]:
    """The images of a file, in the order of its rows.

    Raises:
        CoderError: no such file, datasets of other shapes or in other files, or rows without a name.
    """
    h5py = optional_package("h5py")
    if not os.path.isfile(path):
        raise CoderError(f"{path}: no such file")
    try:
        with h5py.File(path, "r") as file:
            data = {name: _dataset(path, file, name) for name in _DATASETS if name in file.keys()}  # noqa: SIM118
            places = _places(path, data)
            names = _names(path, data, len(places))
            if "image_bb" in data and "spatial_features" not in data:
                warn_once(path, "boxes are left out: without spatial_features or the images' sizes their unit is unknown")
            for place, name in zip(places, names, strict=True):
                yield Entry(name, partial(_load, data, place))
    except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as exc:
        raise CoderError(f"{path}: cannot be read as HDF5 (truncated, or another kind of file): {exc}") from exc


def _dataset(path: str, file: Any, name: str) -> Any:
    """A dataset; CoderError where its numbers are in other files, which are never opened."""
    h5py = optional_package("h5py")
    linked = isinstance(file.get(name, getlink=True), h5py.ExternalLink)
    if linked or file[name].file.filename != file.filename or file[name].external or file[name].is_virtual:
        raise CoderError(f"{path}: {name} is stored in another file; copy its numbers into this one")
    return file[name]


def _places(path: str, data: dict[str, Any]) -> list[Any]:
    """The rows of ``image_features`` of each image; checks the shapes of all datasets."""
    if "image_features" not in data:
        raise CoderError(f"{path}: no dataset 'image_features'; of those read it has: {', '.join(data) or 'none'}")
    shape = data["image_features"].shape
    if len(shape) == 3:
        places: list[Any] = list(range(shape[0]))
    elif len(shape) != 2:
        raise CoderError(f"{path}: image_features has shape {list(shape)}, not [images, regions, R] or [regions, R]")
    elif "pos_boxes" not in data:
        raise CoderError(f"{path}: image_features is flat, {list(shape)}, and pos_boxes, the rows of each image, is missing")
    else:
        ends = _all(path, data, "pos_boxes")
        if ends.ndim != 2 or ends.shape[1] != 2 or ends.dtype.kind not in "iu":
            raise CoderError(f"{path}: pos_boxes is {ends.dtype} of shape {list(ends.shape)}, not integers [images, 2]")
        ends = ends.astype(np.int64)
        wrong = np.flatnonzero((ends[:, 0] < 0) | (ends[:, 1] < ends[:, 0]) | (ends[:, 1] > shape[0]))
        if len(wrong):
            row = wrong[0]
            raise CoderError(f"{path}: row {row} of pos_boxes is {ends[row].tolist()}, but there are {shape[0]} regions")
        if (listed := int(np.diff(ends).sum())) != shape[0]:
            raise CoderError(f"{path}: pos_boxes lists {listed} regions, but image_features has {shape[0]}")
        places = [slice(*each) for each in ends.tolist()]
    for name, width in (("image_bb", 4), ("spatial_features", 6)):
        if name in data and data[name].shape != (*shape[:-1], width):
            raise CoderError(f"{path}: {name} has shape {list(data[name].shape)}, not {[*shape[:-1], width]}")
    return places


def _all(path: str, data: dict[str, Any], name: str) -> np.ndarray:
    """All of a dataset, unless it declares far more numbers than the file stores."""
    if data[name].nbytes > (1 << 20) + 100 * data[name].id.get_storage_size():
        raise CoderError(f"{path}: {name} has shape {list(data[name].shape)}, but the file stores almost none of it")
    return data[name][()]  # type: ignore[no-any-return]


def _names(path: str, data: dict[str, Any], count: int) -> list[str]:
    source = next((name for name in _IDS if name in data), "")
    if source:
        if data[source].dtype.kind not in "iuSO":
            raise CoderError(f"{path}: {source} is {data[source].dtype}; it must be names or whole numbers")
        listed: Any = [each.decode() if isinstance(each, bytes) else each for each in _all(path, data, source).reshape(-1)]
    elif not os.path.exists(source := f"{os.path.splitext(path)[0]}_ids.json"):
        raise CoderError(
            f"{path}: no names of images: add a dataset image_ids, or save names to rows, or a list of names, as {source} "
            "(a pickle of them is never opened)"
        )
    else:
        listed = read_json(source)
    if isinstance(listed, dict):  # as in BAN's pickles
        rows = {row: name for name, row in listed.items() if type(row) is int}
        if lost := sorted(set(range(count)) - set(rows)):
            raise CoderError(f"{path}: {source} names no image for row {lost[0]} ({len(lost)} such rows of {count})")
        listed = [rows[row] for row in range(count)] if len(rows) == len(listed) else listed
    if not isinstance(listed, (list, dict)) or len(listed) != count:
        found = len(listed) if isinstance(listed, (list, dict)) else "no list of"
        raise CoderError(f"{path}: {source} has {found} names for {count} images")
    return list(map(str, listed))


def _load(data: dict[str, Any], place: Any) -> Regions:
    features = data["image_features"]
    length = features.shape[1] if features.ndim == 3 else place.stop - place.start
    if (size := length * features.shape[-1] * features.dtype.itemsize) > LARGEST_ARRAYS:
        raise ValueError(f"its features have {size:,} bytes, more than {LARGEST_ARRAYS:,}")
    try:
        boxes = data["spatial_features"][place][:, :4].astype(np.float32) if "spatial_features" in data else None
        return Regions(native(features[place]), boxes)
    except (OSError, RuntimeError, KeyError, TypeError) as exc:
        raise ValueError(f"HDF5 cannot read it: {exc}") from exc


def matches(path: str) -> bool:
    return path.lower().endswith((".hdf5", ".h5"))


HDF5 = RegionFormat(matches=matches, read=read)
