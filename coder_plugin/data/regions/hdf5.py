"""Read HDF5 files of bottom-up-attention-vqa, BAN and their like.

====================  =============================================================================================
``image_features``    [N, L, R], the same number of regions for all images; or [S, R], all images one after another
``image_bb``          [N, L, 4] or [S, 4]: left, top, right, bottom
``pos_boxes``         [N, 2], for [S, R]: an image's first row and the one after its last
``spatial_features``  [N, L, 6] or [S, 6]: the boxes as fractions, then their widths and heights
``image_ids``         [N] names or numbers, also called ``ids`` or ``image_id``
``image_size``        [N, 2] width and height (an addition of ours)
``whole``             [N, G] a feature of the whole image (ours)
``extras/NAME``       [S, …] further arrays (ours)
====================  =============================================================================================

N images, L regions of an image, S regions of all images, R channels, G channels of the whole image.

The field's files keep the images' names in pickles (``NAME_imgid2idx.pkl``), which are never unpickled: put the names into
``NAME_ids.json`` (a list, or names to rows) or ``NAME_ids.txt`` (one per line) in the folder of ``NAME.hdf5``.

Boxes are in pixels where ``image_size`` is present, and fractions where ``image_bb`` has an attribute ``units`` of that value.
With neither, the fractions come from ``spatial_features``; without those the boxes are left out with a warning.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import LARGEST_ARRAYS, native
from coder_plugin.data.regions.base import IndexedRegions, RegionFormat, Regions, missing_file, warn_once
from coder_plugin.errors import CoderError

_IDS = ("image_ids", "ids", "image_id")
_DATASETS = ("image_features", "image_bb", "pos_boxes", "spatial_features", "image_size", "whole", *_IDS)


class Hdf5Regions(IndexedRegions):
    """Regions of an HDF5 file, which each process opens at its first reading."""

    def __init__(self, path: str, *, split: str = "train") -> None:
        self.path = path
        self._file: Any = None
        self._sets: dict[str, Any] = {}
        self._pid = -1
        try:
            index = self._examine()
            self._close()  # a process forked before the first reading then inherits nothing
        except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as exc:
            if not os.path.exists(path):
                raise missing_file(path) from None
            raise CoderError(f"{path}: cannot be read as HDF5 (truncated, or another kind of file): {exc}") from exc
        super().__init__(path, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_sets": {}, "_pid": -1}

    def _data(self) -> dict[str, Any]:
        """The file's datasets by name, opened by this process.

        A file inherited through a fork is closed first: parent and child would share one file position.
        """
        if self._pid != os.getpid():
            self._close()
            h5py = _h5py()
            self._file, self._pid = h5py.File(self.path, "r"), os.getpid()
            link = self._file.get("extras", getlink=True)
            extras = () if link is None or isinstance(link, h5py.ExternalLink) else self._file.get("extras", ())
            names = (*_DATASETS, *(f"extras/{key}" for key in extras if not isinstance(extras, h5py.Dataset)))
            self._sets = {name: self._file[name] for name in names if self._is_inside(h5py, name)}
        return self._sets

    def _is_inside(self, h5py: Any, name: str) -> bool:
        """Whether a dataset of this name exists. CoderError where its numbers are in other files, which are never opened."""
        parts = name.split("/")
        links = [self._file.get("/".join(parts[: end + 1]), getlink=True) for end in range(len(parts))]
        outside = any(isinstance(link, h5py.ExternalLink) for link in links)
        if not outside and not isinstance(dataset := self._file.get(name), h5py.Dataset):
            return False
        if outside or dataset.external or dataset.is_virtual or dataset.file.filename != self._file.filename:
            raise CoderError(f"{self.path}: {name} is stored in another file; copy its numbers into this one")
        return True

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._sets, self._pid = None, {}, -1

    def _examine(self) -> dict[str, int]:
        """Check the shapes, and map the names to rows."""
        data = self._data()
        if "image_features" not in data:
            present = ", ".join(sorted(self._file)[:20]) or "none"
            raise CoderError(f"{self.path}: no dataset 'image_features'; datasets present: {present}")
        shape = data["image_features"].shape
        flat = len(shape) == 2
        if len(shape) not in (2, 3):
            raise CoderError(f"{self.path}: image_features has shape {list(shape)}, not [images, regions, R] or [regions, R]")
        self._ends = self._pos_boxes(data, shape[0]) if flat else None
        count = len(self._ends) if self._ends is not None else shape[0]
        rows = shape[:-1]
        for name, expected in (
            ("image_bb", [(*rows, 4)]),
            ("spatial_features", [(*rows, 6)]),
            ("image_size", [(count, 2)]),
            ("whole", [(count, *data["whole"].shape[-1:])] if "whole" in data else []),
        ):
            if name in data and data[name].shape not in expected:
                raise CoderError(f"{self.path}: {name} has shape {list(data[name].shape)}, not {list(expected[0])}")
        for name, array in data.items():
            if name.startswith("extras/") and array.shape[: len(rows)] != rows:
                raise CoderError(f"{self.path}: {name} has shape {list(array.shape)}, not {[*rows, '…']}")
        self._boxes = self._source_of_boxes(data)
        return self._rows(data, count)

    def _pos_boxes(self, data: Any, regions: int) -> np.ndarray:
        if "pos_boxes" not in data:
            raise CoderError(
                f"{self.path}: image_features is flat, {[regions, '…']}, and pos_boxes [images, 2] is missing, which says "
                "which rows belong to an image"
            )
        ends = self._whole(data, "pos_boxes")
        if ends.ndim != 2 or ends.shape[1] != 2 or ends.dtype.kind not in "iu":
            raise CoderError(f"{self.path}: pos_boxes is {ends.dtype} of shape {list(ends.shape)}, not integers [images, 2]")
        ends = ends.astype(np.int64)
        wrong = np.flatnonzero((ends[:, 0] < 0) | (ends[:, 1] < ends[:, 0]) | (ends[:, 1] > regions))
        if len(wrong):
            raise CoderError(
                f"{self.path}: row {wrong[0]} of pos_boxes is {ends[wrong[0]].tolist()}, but there are {regions} regions "
                f"({len(wrong)} such rows of {len(ends)}): the file is damaged or incomplete"
            )
        return ends

    def _whole(self, data: Any, name: str) -> np.ndarray:
        """All of a dataset, unless it declares far more numbers than the file stores."""
        dataset = data[name]
        if dataset.nbytes > (1 << 20) + 100 * dataset.id.get_storage_size():
            raise CoderError(f"{self.path}: {name} has shape {list(dataset.shape)}, but the file stores almost none of it")
        return dataset[()]  # type: ignore[no-any-return]

    def _source_of_boxes(self, data: Any) -> str | None:
        """``pixels``, ``fractions`` or ``spatial`` (see the module's text); None where boxes cannot be used."""
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
                "boxes are left out, since their unit is unknown: add a dataset image_size [images, 2], or an attribute "
                "units = fractions to image_bb",
            )
        return None

    def _rows(self, data: Any, count: int) -> dict[str, int]:
        source = next((name for name in _IDS if name in data), "")
        if source:
            if data[source].dtype.kind not in "iuSO":
                raise CoderError(f"{self.path}: {source} is {data[source].dtype}; it must be names or whole numbers")
            names = [_name(each) for each in self._whole(data, source).reshape(-1)]
        else:
            listed, source = self._names_file()
            if isinstance(listed, dict):  # as in BAN's pickles, possibly not of every row
                wrong = [name for name, row in listed.items() if type(row) is not int or not 0 <= row < count]
                if wrong or len(set(listed.values())) < len(listed):
                    which = f"{wrong[0]!r} has {listed[wrong[0]]!r}" if wrong else "two names have the same row"
                    raise CoderError(f"{self.path}: {source}: rows must be different numbers below {count}; {which}")
                return dict(sorted(listed.items(), key=lambda item: item[1]))
            names = [str(each) for each in listed]
        if len(names) != count:
            raise CoderError(f"{self.path}: {source} has {len(names)} names for {count} images")
        index = {name: row for row, name in enumerate(names)}
        if len(index) < count:
            duplicate = next(name for row, name in enumerate(names) if index[name] != row)
            raise CoderError(f"{self.path}: {source} has {duplicate!r} more than once ({count - len(index)} names too many)")
        return index

    def _names_file(self) -> tuple[Any, str]:
        stem = os.path.splitext(self.path)[0]
        for path in (f"{stem}_ids.json", f"{stem}_ids.txt"):
            try:
                with open(path, encoding="utf-8") as file:
                    listed = parse_json(file.read()) if path.endswith(".json") else file.read().splitlines()
            except FileNotFoundError:
                continue
            except ValueError as exc:
                raise CoderError(f"{path}: cannot be read: {exc}") from exc
            if not isinstance(listed, (list, dict)):
                raise CoderError(f"{path}: must hold a list of names, or names to rows")
            return listed, os.path.basename(path)
        pickles = [each for each in (f"{stem}_imgid2idx.pkl", f"{stem}_ids.pkl") if os.path.exists(each)]
        pickled = f" ({os.path.basename(pickles[0])} is a pickle, which is never unpickled)" if pickles else ""
        name = os.path.basename(stem)
        raise CoderError(
            f"{self.path}: no names of images{pickled}: add a dataset image_ids, or put them into the file's folder in "
            f"{name}_ids.json (a list, or names to rows) or {name}_ids.txt (one a line)"
        )

    def _read(self, name: str, place: Any) -> Regions:
        rows = place if self._ends is None else slice(*self._ends[place].tolist())
        try:
            data = self._data()
            features = data["image_features"]
            length = features.shape[1] if self._ends is None else rows.stop - rows.start
            if (size := length * features.shape[-1] * features.dtype.itemsize) > LARGEST_ARRAYS:
                raise BadSample("regions", f"its features have {size:,} bytes, more than {LARGEST_ARRAYS:,}")
            boxes, size = None, (1.0, 1.0)
            if self._boxes is not None:
                boxes = data["spatial_features" if self._boxes == "spatial" else "image_bb"][rows][:, :4]
            if "image_size" in data and self._boxes != "spatial":
                width, height = data["image_size"][place].tolist()
                size = (width, height) if self._boxes != "fractions" else size
            return Regions(
                features=native(data["image_features"][rows]),
                boxes=None if boxes is None else np.ascontiguousarray(boxes, np.float32),
                size=size,
                global_feature=data["whole"][place] if "whole" in data else None,
                extras={key[7:]: array[rows] for key, array in data.items() if key.startswith("extras/")},
            )
        except (OSError, RuntimeError, KeyError, TypeError) as exc:
            raise ValueError(f"HDF5 cannot read row {place}: {exc}") from exc


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


HDF5 = RegionFormat(open=Hdf5Regions, matches=matches)
