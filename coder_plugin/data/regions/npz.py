"""Regions as the bytes of a ``.npz`` file: ``features``, ``boxes``, ``size``, ``whole``, and extras as ``x_NAME``."""

from __future__ import annotations

import io
import zipfile
import zlib

import numpy as np

from coder_plugin.data.regions.base import Regions

_EXTRA = "x_"


def encode_npz(regions: Regions) -> bytes:
    """The same bytes for the same regions, uncompressed: features of a network hardly shrink."""
    arrays = {"features": regions.features, **{_EXTRA + name: extra for name, extra in regions.extras.items()}}
    if regions.boxes is not None:
        arrays |= {"boxes": regions.boxes, "size": np.asarray(regions.size, np.float64)}
    if regions.whole is not None:
        arrays["whole"] = regions.whole
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def decode_npz(data: bytes) -> Regions:
    """What :func:`encode_npz` wrote, or anyone with these names; ValueError where it is damaged or holds objects."""
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with found as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, ValueError) as exc:
        raise ValueError(f"not a .npz file of numbers: {' '.join(str(exc).split()) or type(exc).__name__}") from exc
    if "features" not in arrays:
        raise ValueError(f"no array 'features' in its npz field, only: {', '.join(sorted(arrays)) or 'none'}")
    boxes, size = arrays.get("boxes"), arrays.get("size", np.ones(2))
    if boxes is not None and (boxes.dtype.kind not in "iuf" or size.dtype.kind not in "iuf" or size.shape != (2,)):
        raise ValueError("boxes and size must be numbers, the size being width and height")
    return Regions(
        arrays["features"],
        None if boxes is None else boxes.astype(np.float32),
        (float(size[0]), float(size[1])) if boxes is not None else (1.0, 1.0),
        arrays.get("whole"),
        {name.removeprefix(_EXTRA): array for name, array in arrays.items() if name.startswith(_EXTRA)},
    )
