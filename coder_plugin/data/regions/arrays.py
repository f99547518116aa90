"""The named arrays of one image, as ``.npz`` files and LMDB values hold them, under the field's names or ours.

==============  ===================================================================================================
features        ``x`` (bottom-up-attention.pytorch), ``features`` (UNITER, GQA), ``feat``: [L, R]; or [R, L], as in
                OpenVQA's files, where ``num_bbox`` or the boxes show that L comes last
boxes           ``bbox``, ``boxes``: [L, 4] in the units of ``image_w`` and ``image_h`` (in our files, of ``size`` [2]);
                left out with a warning where neither is present
boxes           ``norm_bb`` (UNITER): [L, 4, 6 or 7] left, top, right, bottom (, width, height (, area)) as fractions
global_feature  ``whole``: [G]
extras          every other array except scalars and ``info``; in our files ``x_NAME``
==============  ===================================================================================================

Our files are the ``npz`` fields of region shards: ``features``, ``boxes``, ``size``, ``whole``, ``x_NAME``.

L regions of an image, R channels, G channels of the whole image. Pickled arrays (dtype object) are never unpickled.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.regions.base import Regions, warn_once

_FEATURES = ("x", "features", "feat")
_BOXES = ("bbox", "boxes", "norm_bb")
_RESERVED = {*_FEATURES, *_BOXES, "num_bbox", "num_boxes", "image_w", "image_h", "whole", "info"}
_EXTRA = "x_"  # prefix of an extra's name in our files

#: Most bytes of an image's arrays. Those of 100 regions of 4,096 channels have 1.6 million.
LARGEST_ARRAYS = 256 << 20
#: Stands for an array that is a pickle.
PICKLED = np.empty(0, object)


def from_arrays(arrays: Mapping[str, np.ndarray], path: str) -> Regions:
    """Regions from named arrays of any of these tools; ``path`` is for warnings.

    Raises:
        ValueError: arrays that are missing, ambiguous, pickled, or do not fit each other.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject and (name in _RESERVED - {"info"}):
            raise ValueError(f"{name!r} is pickled (dtype object), which is never unpickled; save it as numbers")
    features_name = _one(arrays, _FEATURES)
    boxes_name = _one(arrays, _BOXES)
    ours = features_name == "features" and "size" in arrays
    if features_name is None:
        raise ValueError(f"no features: none of {', '.join(_FEATURES)} among {', '.join(arrays) or 'no arrays'}")
    features = arrays[features_name]
    boxes = arrays[boxes_name] if boxes_name else None
    count = _count(arrays, boxes)
    if features.ndim == 2 and count is not None and len(features) != count:
        if ours or features.shape[1] != count:
            raise ValueError(f"{features_name} has shape {list(features.shape)}, but there are {count} boxes")
        features = features.T
    size = None
    if boxes is not None and boxes_name == "norm_bb":
        if boxes.ndim != 2 or boxes.shape[1] not in (4, 6, 7):
            raise ValueError(f"norm_bb has shape {list(boxes.shape)}, not [regions, 4, 6 or 7]")
        boxes, size = boxes[:, :4], (1.0, 1.0)
    elif ours:
        if arrays["size"].shape != (2,) or arrays["size"].dtype.kind not in "fiu":
            raise ValueError(f"size is {arrays['size'].dtype} of shape {list(arrays['size'].shape)}, not width and height")
        size = float(arrays["size"][0]), float(arrays["size"][1])
    elif "image_w" in arrays and "image_h" in arrays:
        size = _scalar(arrays, "image_w"), _scalar(arrays, "image_h")
    elif boxes is not None:
        warn_once(path, f"boxes are left out: without image_w and image_h the unit of {boxes_name} is unknown")
        boxes = None
    if boxes is not None and boxes.dtype.kind not in "fiu":
        raise ValueError(f"{boxes_name} is {boxes.dtype}, not numbers")
    pickled = sorted(name for name, array in arrays.items() if array.dtype.hasobject)
    if pickled:
        warn_once(path, f"left out, since pickled arrays are never unpickled: {', '.join(pickled)}")
    return Regions(
        features=native(features),
        boxes=None if boxes is None else np.array(boxes, np.float32),
        size=size or (1.0, 1.0),
        global_feature=arrays.get("whole"),
        extras={
            name.removeprefix(_EXTRA) if features_name == "features" else name: array
            for name, array in arrays.items()
            if not (name in _RESERVED or ours and name == "size") and array.ndim and not array.dtype.hasobject
        },
    )


def encode_npz(regions: Regions) -> bytes:
    """The ``npz`` field of a region shard. Equal regions give equal bytes. Not compressed: features hardly shrink."""
    arrays = {"features": regions.features, **{_EXTRA + name: extra for name, extra in regions.extras.items()}}
    if regions.boxes is not None:
        arrays |= {"boxes": regions.boxes, "size": np.asarray(regions.size, np.float64)}
    if regions.global_feature is not None:
        arrays["whole"] = regions.global_feature
    return npz_bytes(arrays)


def decode_npz(data: bytes, path: str) -> Regions:
    """Regions from the bytes of an ``npz`` file, ours or another tool's; ``BadSample`` where it is damaged."""
    try:
        return from_arrays(read_npz(io.BytesIO(data)), path)
    except BadSample:
        raise
    except ValueError as exc:
        raise BadSample("regions", str(exc)) from exc


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An uncompressed ``.npz`` file. Unlike ``np.savez`` it refuses to pickle and allows an array named "file"."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    return buffer.getvalue()


def read_npz(file: BinaryIO) -> dict[str, np.ndarray]:
    """Every array of an ``.npz`` file, :data:`PICKLED` for arrays of objects; ``ValueError`` where the file is damaged."""
    if file.read(4) not in (b"PK\3\4", b"PK\5\6"):  # NumPy reads anything else as a pickle
        raise ValueError("not an .npz file (no ZIP archive)")
    file.seek(0)
    try:
        with np.load(file, allow_pickle=False) as archive:
            size = sum(member.file_size for member in archive.zip.infolist())
            if size > LARGEST_ARRAYS:
                raise BadSample("regions", f"its arrays have {size:,} bytes, more than {LARGEST_ARRAYS:,}")
            return {name: _member(archive, name) for name in archive.files}
    except (OSError, ValueError):
        raise
    except Exception as exc:  # NumPy and zipfile raise many kinds of errors on damaged files
        raise ValueError(f"damaged .npz file: {type(exc).__name__}: {exc}") from exc


def read_npy(path: str) -> np.ndarray:
    """An ``.npy`` file, with the same errors as :func:`read_npz`."""
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError(f"{os.path.basename(path)} is not an .npy file")
        file.seek(0)
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_ARRAYS:
            raise BadSample("regions", f"{os.path.basename(path)} has {size:,} bytes, more than {LARGEST_ARRAYS:,}")
        try:
            return np.load(file, allow_pickle=False)
        except OSError:
            raise
        except Exception as exc:
            if _is_pickled(exc):
                raise ValueError(
                    f"{os.path.basename(path)} is pickled (dtype object), which is never unpickled; save it as numbers"
                ) from None
            raise ValueError(f"damaged .npy file {os.path.basename(path)}: {type(exc).__name__}: {exc}") from exc


def _member(archive: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        array = archive[name]
    except ValueError as exc:
        if _is_pickled(exc):
            return PICKLED
        raise
    if not isinstance(array, np.ndarray):  # NumPy returns the bytes of members that are not .npy
        raise ValueError(f"{name!r} in the .npz file is not an array")
    return array


def _is_pickled(exc: Exception) -> bool:
    return "Object arrays cannot be loaded" in str(exc)  # NumPy has no exception type for it


def _one(arrays: Mapping[str, np.ndarray], names: tuple[str, ...]) -> str | None:
    present = [name for name in names if name in arrays]
    if len(present) > 1:
        raise ValueError(f"{' and '.join(present)} are both present; keep one")
    return present[0] if present else None


def _count(arrays: Mapping[str, np.ndarray], boxes: np.ndarray | None) -> int | None:
    """The number of regions according to ``num_bbox`` or the boxes."""
    counts = {int(_scalar(arrays, name)) for name in ("num_bbox", "num_boxes") if name in arrays}
    if boxes is not None and boxes.ndim:
        counts.add(len(boxes))
    if len(counts) > 1:
        raise ValueError(f"num_bbox and the boxes disagree: {' and '.join(map(str, sorted(counts)))} regions")
    return counts.pop() if counts else None


def _scalar(arrays: Mapping[str, np.ndarray], name: str) -> float:
    array = arrays[name]
    if array.size != 1 or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise ValueError(f"{name} is {array.dtype} of shape {list(array.shape)}, not one finite number")
    return float(array.reshape(()))


def native(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array in this machine's byte order, which PyTorch needs."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
