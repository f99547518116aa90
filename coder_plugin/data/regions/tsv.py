r"""Read TSV files as bottom-up-attention and LXMERT write them: an image a line, arrays in base64, no header.

===================  ===============================================================================================
bottom-up-attention  ``image_id image_w image_h num_boxes boxes features``
LXMERT               ``img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features``
===================  ===============================================================================================

LXMERT has the height first. Arrays are little-endian float32, ``objects_id`` and ``attrs_id`` int64; boxes are in pixels.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from coder_plugin.data.regions.arrays import LARGEST_ARRAYS
from coder_plugin.data.regions.base import Entry, RegionFormat, Regions
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular

_BUA = ("id", "width", "height", "num_boxes", "boxes", "features")
_LXMERT = ("id", "height", "width", "objects_id", "objects_conf", "attrs_id", "attrs_conf", "num_boxes", "boxes", "features")
_LAYOUT_OF_COUNT = {6: "bottom-up-attention's layout (tsv)", 10: "LXMERT's layout (lxmert)"}
_EXTRAS = {"objects_id": "<i8", "objects_conf": "<f4", "attrs_id": "<i8", "attrs_conf": "<f4"}
_LONGEST = 2 * LARGEST_ARRAYS  # bytes of a line


def read(path: str, fields: tuple[str, ...]) -> Iterator[Entry]:
    """The images of a file, line by line.

    Raises:
        CoderError: no such file, or a line without these fields.
    """
    channels: list[int] = []  # of the first image
    try:
        with open_regular(path, "rb") as file:
            number = 0
            while line := file.readline(_LONGEST):
                number += 1
                values = line.rstrip(b"\r\n").split(b"\t")
                if values == [b""]:
                    continue  # blank lines are skipped, as in the csv module
                if len(values) != len(fields) or len(line) == _LONGEST:
                    found = _LAYOUT_OF_COUNT.get(len(values), "" if line.endswith(b"\n") else "truncated")
                    hint = f" ({found})" if found else ""
                    raise CoderError(f"{path}: line {number} has {len(values)} fields, not {len(fields)}{hint}")
                row = dict(zip(fields, values, strict=True))
                try:
                    name = _unquote(row["id"])
                except UnicodeDecodeError:
                    raise CoderError(f"{path}: line {number}: the image's name is not UTF-8: not a region file") from None
                yield Entry(name, partial(_parse, row, f"line {number}", channels))
    except OSError as exc:
        raise CoderError(f"{path}: cannot be read as a TSV file: {exc.strerror or exc}") from exc


def _parse(row: dict[str, bytes], where: str, channels: list[int]) -> Regions:
    """The regions of a line; ``ValueError`` names a wrong field."""
    try:
        number = _number(row, "num_boxes")
        if number < 1 or number % 1:
            raise ValueError(f"num_boxes is {number:g}, not a whole number from one")
        count = int(number)
        boxes = _array(row, "boxes", "<f4", count, 4)  # first: its message is clearest where num_boxes is wrong
        features = _array(row, "features", "<f4", count)
        channels.append(features.shape[1])
        if channels[-1] != channels[0]:
            raise ValueError(f"features have {channels.pop()} channels, those of the first image {channels[0]}: truncated?")
        extras = {name: _array(row, name, dtype, count, 1)[:, 0] for name, dtype in _EXTRAS.items() if name in row}
        return Regions(features, boxes, (_number(row, "width"), _number(row, "height")), extras=extras)
    except ValueError as exc:
        raise ValueError(f"{where}: {exc}") from exc


def _unquote(field: bytes) -> str:
    """A field as the csv module reads it: without surrounding quotes, doubled quotes inside reduced to single ones."""
    text = field.decode()
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def _number(row: dict[str, bytes], field: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(row[field])):
            return number
    raise ValueError(f"{field} is {row[field][:20]!r}, not a number")


def _array(row: dict[str, bytes], field: str, dtype: str, count: int, columns: int | None = None) -> np.ndarray:
    """An array [count, columns]; without ``columns`` as many as the data have."""
    try:
        data = base64.b64decode(row[field], validate=True)
    except binascii.Error as exc:
        raise ValueError(f"{field} is not base64: {exc}") from None
    size = np.dtype(dtype).itemsize
    if not data or len(data) % (count * size) or len(data) != count * size * (columns or len(data) // (count * size)):
        shape = f"{count} x {columns}" if columns else f"{count} rows"
        raise ValueError(f"{field} holds {len(data)} bytes, which is not {shape} of {np.dtype(dtype).name} (num_boxes {count})")
    return np.frombuffer(data, dtype).reshape(count, -1)


def _matches(path: str, *, objects: bool) -> bool:
    """``….tsv``, also numbered parts; LXMERT's have ``obj`` in their names, such as ``train2014_obj36.tsv``."""
    stem, dot, part = os.path.basename(path).lower().rpartition(".tsv")
    return bool(dot) and (not part or part[1:].isdigit()) and ("obj" in stem) == objects


BUA = RegionFormat(matches=partial(_matches, objects=False), read=partial(read, fields=_BUA))
LXMERT = RegionFormat(matches=partial(_matches, objects=True), read=partial(read, fields=_LXMERT))
