"""What re-ranking reads of images and captions: arrays in files of each segment, as tensors.

Shape letters: n items.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.index.manifest import MANIFEST, SEGMENTS

_DTYPES = ("float16", "float32", "float64", "int64", "int32", "bool")
_PREFIXES = {"images": "image_", "captions": "text_"}


class Arrays:
    """The arrays of all segments, memory-mapped.

    Args:
        folder: of the index.
        manifest: its manifest.

    Raises:
        CoderError: a file is no array of numbers for its segment's items; segments have different arrays.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._arrays: dict[str, list[dict[str, np.ndarray]]] = {kind: [] for kind in _PREFIXES}
        self._first = {kind: np.cumsum([0, *(each[kind] for each in manifest["segments"])]) for kind in _PREFIXES}
        listed: dict[str, list[str]] = {}
        for name in manifest["files"]:
            if name.endswith(".npy") and name.startswith(f"{SEGMENTS}/"):
                listed.setdefault(name.split("/")[1], []).append(name)
        for segment in manifest["segments"]:
            for kind, prefix in _PREFIXES.items():
                files = (folder / name for name in listed.get(segment["name"], ()))
                arrays = {path.stem: open_array(path, segment[kind]) for path in files if path.stem.startswith(prefix)}
                self._arrays[kind].append({name.removeprefix(prefix): array for name, array in arrays.items()})
        #: Names of the arrays, without a prefix, by kind; empty without any.
        self.names: dict[str, list[str]] = {}
        for kind, of_segments in self._arrays.items():
            filled = [each.keys() for each, segment in zip(of_segments, manifest["segments"], strict=True) if segment[kind]]
            if any(each != filled[0] for each in filled):
                raise CoderError(f"{folder / MANIFEST} lists other files for re-ranking in one segment than in another")
            if filled and filled[0]:
                self.names[kind] = sorted(filled[0])

    def items(self, kind: str, rows: np.ndarray) -> dict[str, Tensor]:
        """Tensors [n, …] by name of images or captions; shorter ones are padded with zeros."""
        rows = np.asarray(rows)
        segments = np.searchsorted(self._first[kind], rows, side="right") - 1
        used = np.unique(segments).tolist()
        return {name: torch.from_numpy(self._joined(kind, name, rows, segments, used)) for name in self.names.get(kind, ())}

    def _joined(self, kind: str, name: str, rows: np.ndarray, segments: np.ndarray, used: list[int]) -> np.ndarray:
        pieces = [self._arrays[kind][each][name][rows[segments == each] - self._first[kind][each]] for each in used]
        if len(pieces) == 1:
            return np.ascontiguousarray(pieces[0])
        shape = largest_shape([piece.shape[1:] for piece in pieces])
        out = np.zeros((len(rows), *shape), dtype=np.result_type(*pieces) if pieces else np.float32)
        for each, piece in zip(used, pieces, strict=True):
            target: Any = (segments == each, *map(slice, piece.shape[1:]))
            out[target] = piece
        return out


def largest_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The smallest shape that all of them fit into.

    Raises:
        ValueError: they have different numbers of axes.

    Example:
        >>> largest_shape([(3, 8), (5, 8)])
        (5, 8)
    """
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True)) if shapes[1:] else shapes[0]


def open_array(path: Path, count: int) -> np.ndarray:
    """A memory map of an array of re-ranking, [count, …] of numbers or bools.

    Raises:
        CoderError: the file is something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the header is parsed as Python, so an error of any kind may come
        raise CoderError(f"{path} is not an array for re-ranking: {str(error)[:200]}") from error
    if not isinstance(array, np.ndarray) or array.dtype.newbyteorder("=").name not in _DTYPES or array.shape[:1] != (count,):
        shown = f"{array.dtype} of {array.shape}" if isinstance(array, np.ndarray) else "no array"
        raise CoderError(f"{path} is not an array of numbers for {count} items to re-rank, but {shown[:200]}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
