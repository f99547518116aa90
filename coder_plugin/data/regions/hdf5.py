"""HDF5 files as bottom-up-attention-vqa and BAN lay them out, and as we write them.

====================  =============================================================================================
``image_features``    [N, L, R], as many regions for every image; or [S, R], those of all images one after another
``image_bb``          [N, L, 4] or [S, 4]: left, top, right, bottom
``pos_boxes``         [N, 2] in the second case: an image's first row and the one after its last
``spatial_features``  [N, L, 6] or [S, 6]: the boxes as fractions, then their widths and heights
``image_ids``         [N] names or numbers, also called ``ids`` or ``image_id``
``image_size``        [N, 2] width and height (ours)
``whole``             [N, G] (ours)
``extras/NAME``       [S, …] (ours)
====================  =============================================================================================

N images, L regions of an image, S regions of all images, R channels, G of the whole image.

The field keeps the images' names in pickles (``NAME_imgid2idx.pkl``), which are never unpickled: give them in
``NAME_ids.json`` (a list, or names to rows) or ``NAME_ids.txt`` (a line each) beside ``NAME.hdf5``.

Boxes are in pixels where ``image_size`` is there, and fractions where ``image_bb`` has an attribute ``units`` of that value.
With neither, the fractions come from ``spatial_features``; without those the boxes are left out, with a warning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from coder_plugin.data.regions.arrays import native
from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.keyed import KeyedRegions, absent, exactly, naming, replacing, unique, warn_once
from coder_plugin.errors import CoderError

_IDS = ("image_ids", "ids", "image_id")
_DATASETS = ("image_features", "image_bb", "pos_boxes", "spatial_features", "image_size", "whole", *_IDS)
_CHUNK = 1 << 16  # bytes: few enough that an image of ten regions reads little else


class Hdf5Regions(KeyedRegions):
    """Regions of an HDF5 file, which each process opens for itself at its first reading."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: Any = None
        self._sets: dict[str, Any] = {}
        self._pid = -1
        try:
            index = self._examine()
            self._close()  # so that a process forked before the first reading inherits nothing
        except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as exc:
            if not os.path.exists(path):
                raise absent(path) from None
            raise CoderError(f"{path}: cannot be read as HDF5 (truncated, or another kind of file): {exc}") from exc
        super().__init__(path, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_sets": {}, "_pid": -1}

    def _data(self) -> dict[str, Any]:
        """The file's datasets by name, opened by this process. What was inherited through a fork is closed first: HDF5
        would go on reading through the descriptor that it shares with the parent, and so through one position in the file."""
        if self._pid != os.getpid():
            self._close()
            h5py = _h5py()
            self._file, self._pid = h5py.File(self.path, "r"), os.getpid()
            extras = self._file.get("extras", ())
            names = (*_DATASETS, *(f"extras/{key}" for key in extras if not isinstance(extras, h5py.Dataset)))
            self._sets = {name: self._file[name] for name in names if isinstance(self._file.get(name), h5py.Dataset)}
        return self._sets

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._sets, self._pid = None, {}, -1

    def _examine(self) -> dict[str, int]:
        """Check that the shapes fit, and find the names' rows."""
        data = self._data()
        if "image_features" not in data:
            there = ", ".join(sorted(self._file)[:20]) or "nothing"
            raise CoderError(f"{self.path}: no dataset 'image_features'; there is: {there}")
        shape = data["image_features"].shape
        flat = len(shape) == 2
        if len(shape) not in (2, 3):
            raise CoderError(f"{self.path}: image_features has shape {list(shape)}, not [images, regions, R] or [regions, R]")
        self._ends = self._pos_boxes(data, shape[0]) if flat else None
        count = len(self._ends) if self._ends is not None else shape[0]
        rows = shape[:-1]
        for name, wanted in (
            ("image_bb", [(*rows, 4)]),
            ("spatial_features", [(*rows, 6)]),
            ("image_size", [(count, 2)]),
            ("whole", [(count, *data["whole"].shape[-1:])] if "whole" in data else []),
        ):
            if name in data and data[name].shape not in wanted:
                raise CoderError(f"{self.path}: {name} has shape {list(data[name].shape)}, not {list(wanted[0])}")
        for name, array in data.items():
            if name.startswith("extras/") and array.shape[: len(rows)] != rows:
                raise CoderError(f"{self.path}: {name} has shape {list(array.shape)}, not {[*rows, '…']}")
        self._boxes = self._source_of_boxes(data)
        return self._rows(data, count)

    def _pos_boxes(self, data: Any, regions: int) -> np.ndarray:
        if "pos_boxes" not in data:
            raise CoderError(
                f"{self.path}: image_features is flat, {[regions, '…']}, and there is no pos_boxes [images, 2] to say which "
                "rows are an image's"
            )
        ends = data["pos_boxes"][()]
        if ends.ndim != 2 or ends.shape[1] != 2 or ends.dtype.kind not in "iu":
            raise CoderError(f"{self.path}: pos_boxes is {ends.dtype} of shape {list(ends.shape)}, not integers [images, 2]")
        ends = ends.astype(np.int64)
        wrong = np.flatnonzero((ends[:, 0] < 0) | (ends[:, 1] < ends[:, 0]) | (ends[:, 1] > regions))
        if len(wrong):
            raise CoderError(
                f"{self.path}: row {wrong[0]} of pos_boxes is {ends[wrong[0]].tolist()} where there are {regions} regions "
                f"({len(wrong)} such rows of {len(ends)}): the file is damaged, or its writing was broken off"
            )
        return ends

    def _source_of_boxes(self, data: Any) -> str | None:
        """``pixels``, ``fractions`` or ``spatial``, as the module says; None where boxes cannot be used."""
        if "image_bb" in data:
            units = data["image_bb"].attrs.get("units")
            units = units.decode() if isinstance(units, bytes) else units
            if units not in (None, "pixels", "fractions"):
                raise CoderError(f"{self.path}: the attribute units of image_bb is {units!r}; it may be pixels or fractions")
            if units == "fractions":
                return "fractions"
            if "image_size" in data:
                return "pixels"
        if "spatial_features" in data:
            return "spatial"
        if "image_bb" in data:
            warn_once(
                self.path,
                "boxes are left out, as their unit is not known: add a dataset image_size [images, 2], or to image_bb an "
                "attribute units = fractions",
            )
        return None

    def _rows(self, data: Any, count: int) -> dict[str, int]:
        found = next((name for name in _IDS if name in data), None)
        if found is not None:
            if data[found].dtype.kind not in "iuSO":
                raise CoderError(f"{self.path}: {found} is {data[found].dtype}; it must be names or whole numbers")
            names, source = [_name(each) for each in data[found][()].reshape(-1)], found
        else:
            listed, source = self._sidecar()
            if isinstance(listed, dict):  # as BAN's pickles have it: perhaps not of every row
                wrong = [name for name, row in listed.items() if type(row) is not int or not 0 <= row < count]
                if wrong or len(set(listed.values())) < len(listed):
                    which = f"{wrong[0]!r} has {listed[wrong[0]]!r}" if wrong else "two names have one row"
                    raise CoderError(f"{self.path}: {source}: rows must be different numbers below {count}; {which}")
                return dict(sorted(listed.items(), key=lambda item: item[1]))
            names = [str(each) for each in listed]
        if len(names) != count:
            raise CoderError(f"{self.path}: {source} has {len(names)} names for {count} images")
        index = {name: row for row, name in enumerate(names)}
        if len(index) < count:
            twice = next(name for row, name in enumerate(names) if index[name] != row)
            raise CoderError(f"{self.path}: {source} has {twice!r} more than once ({count - len(index)} names too many)")
        return index

    def _sidecar(self) -> tuple[Any, str]:
        stem = os.path.splitext(self.path)[0]
        for path in (f"{stem}_ids.json", f"{stem}_ids.txt"):
            try:
                with open(path, encoding="utf-8") as file:
                    listed = json.load(file) if path.endswith(".json") else file.read().splitlines()
            except FileNotFoundError:
                continue
            except ValueError as exc:
                raise CoderError(f"{path}: cannot be read: {exc}") from exc
            if not isinstance(listed, (list, dict)):
                raise CoderError(f"{path}: must hold a list of names, or names to rows")
            return listed, os.path.basename(path)
        pickles = [each for each in (f"{stem}_imgid2idx.pkl", f"{stem}_ids.pkl") if os.path.exists(each)]
        beside = f" ({os.path.basename(pickles[0])} is a pickle, which is never unpickled)" if pickles else ""
        name = os.path.basename(stem)
        raise CoderError(
            f"{self.path}: no names of images{beside}: give them in a dataset image_ids, or beside the file in "
            f"{name}_ids.json (a list, or names to rows) or {name}_ids.txt (a line each)"
        )

    def _read(self, name: str, where: Any) -> Regions:
        rows = where if self._ends is None else slice(*self._ends[where].tolist())
        try:
            data = self._data()
            boxes, size = None, (1.0, 1.0)
            if self._boxes is not None:
                boxes = data["spatial_features" if self._boxes == "spatial" else "image_bb"][rows][:, :4]
            if "image_size" in data and self._boxes != "spatial":
                width, height = data["image_size"][where].tolist()
                size = (width, height) if self._boxes != "fractions" else size
            return Regions(
                features=native(data["image_features"][rows]),
                boxes=None if boxes is None else np.ascontiguousarray(boxes, np.float32),
                size=size,
                whole=data["whole"][where] if "whole" in data else None,
                extras={key[7:]: array[rows] for key, array in data.items() if key.startswith("extras/")},
            )
        except (OSError, RuntimeError, KeyError) as exc:
            raise ValueError(f"HDF5 cannot read row {where}: {exc}") from exc


def open_hdf5(path: str, *, split: str = "train") -> Hdf5Regions:
    """A file holds one split, so ``split`` is not looked at."""
    return Hdf5Regions(path)


def write_hdf5(path: str, records: Iterable[Record], *, split: str = "train") -> int:
    """The flat layout with ``pos_boxes``, uncompressed. The first record decides the dtypes, the widths and what there is
    beside features; ``ValueError`` where a later one differs or would be rounded."""
    h5py = _h5py()
    text = h5py.string_dtype("utf-8")
    count = total = 0
    with replacing(path) as temporary, h5py.File(temporary, "w") as file:

        def append(key: str, rows: np.ndarray, dtype: Any) -> None:
            if key not in sets:
                chunk = max(1, _CHUNK // max(1, dtype.itemsize * int(np.prod(rows.shape[1:]))))
                sets[key] = file.create_dataset(
                    key, (0, *rows.shape[1:]), dtype, maxshape=(None, *rows.shape[1:]), chunks=(chunk, *rows.shape[1:])
                )
            data = sets[key]
            if data.shape[1:] != rows.shape[1:]:
                raise ValueError(f"{key} has rows of shape {list(rows.shape[1:])}, in earlier images {list(data.shape[1:])}")
            data.resize(len(data) + len(rows), axis=0)
            data[len(data) - len(rows) :] = rows

        sets: dict[str, Any] = {}
        arrays: set[str] = set()
        for name, regions in unique(path, records):
            with naming(path, name):
                if "\0" in name:
                    raise ValueError("HDF5 cannot hold a name with a NUL character")
                each = _arrays(regions)
                if count and set(each) != arrays:
                    raise ValueError(f"it has {', '.join(sorted(each))}; earlier images have {', '.join(sorted(arrays))}")
                arrays = set(each)
                for key, array in each.items():
                    append(key, exactly(key, array, sets[key].dtype if count else array.dtype), array.dtype)
                append("pos_boxes", np.array([[total, total + len(regions)]]), np.dtype(np.int64))
                append("image_size", np.array([regions.size], np.float64), np.dtype(np.float64))
                append("image_ids", np.array([name.encode()], object), text)
            count, total = count + 1, total + len(regions)
        if "image_bb" in sets:
            sets["image_bb"].attrs["units"] = "pixels"
    return count


def _arrays(regions: Regions) -> dict[str, np.ndarray]:
    """What the layout holds of an image, by dataset; each array has a row for each region, ``whole`` has one."""
    arrays = {"image_features": regions.features}
    if regions.boxes is not None:
        arrays["image_bb"] = exactly("boxes", regions.boxes, "<f4")
    if regions.whole is not None:
        arrays["whole"] = regions.whole[None]
    for key, array in regions.extras.items():
        if not key or "/" in key or key == "." or array.dtype.kind not in "fiub":
            raise ValueError(f"a further array {key!r} of {array.dtype} cannot be written: numbers, under a name without /")
        arrays[f"extras/{key}"] = array
    return arrays


def matches(path: str) -> bool:
    return path.lower().endswith((".hdf5", ".h5"))


def _name(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as exc:
        raise CoderError('reading HDF5 needs h5py: pip install "coder-plugin[regions]"') from exc
    return h5py


HDF5 = RegionFormat(open=open_hdf5, write=write_hdf5, matches=matches, keeps=("whole", "extras"))
