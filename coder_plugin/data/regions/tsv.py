r"""Read TSV files as bottom-up-attention and LXMERT write them: an image a line, arrays in base64, no header.

===================  ===============================================================================================
bottom-up-attention  ``image_id image_w image_h num_boxes boxes features``
LXMERT               ``img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features``
===================  ===============================================================================================

LXMERT has the height first. Arrays are little-endian float32, ``objects_id`` and ``attrs_id`` int64; boxes are in pixels.

Opening a file for the first time reads it once and saves the positions of its lines in ``NAME.index``, if the folder can be
written. Reading an image reads its line alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.base import IndexedRegions, RegionFormat, Regions, missing_file, read_at
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write
from coder_plugin.terminal import printable

_BLOCK = 1 << 20
_VERSION = 2  # of the index file
_LAYOUT_OF_COUNT = {6: "bottom-up-attention's layout (tsv)", 10: "LXMERT's layout (lxmert)"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """The fields of a line in order, and the dtypes of those that become ``Regions.extras``."""

    name: str
    fields: tuple[str, ...]
    extras: dict[str, str]

    def parse(self, line: bytes) -> tuple[str, Regions]:
        """An image's name and regions from its line; ``ValueError`` names a wrong field."""
        values = line.rstrip(b"\r\n").split(b"\t")
        if len(values) != len(self.fields):
            raise ValueError(f"{len(values)} fields, not {len(self.fields)}")
        row = dict(zip(self.fields, values, strict=True))
        number = _number(row, "num_boxes")
        if number < 1 or number % 1:
            raise ValueError(f"num_boxes is {number:g}, not a whole number from one")
        count = int(number)
        boxes = _array(row, "boxes", "<f4", count, 4)  # first: its message is clearest where num_boxes is wrong
        regions = Regions(
            features=_array(row, "features", "<f4", count),
            boxes=boxes,
            size=(_number(row, "width"), _number(row, "height")),
            extras={name: _array(row, name, dtype, count, 1)[:, 0] for name, dtype in self.extras.items()},
        )
        return _unquote(row["id"]), regions


BUA_LAYOUT = _Layout("bottom-up-attention", ("id", "width", "height", "num_boxes", "boxes", "features"), {})
LXMERT_LAYOUT = _Layout(
    "LXMERT",
    ("id", "height", "width", "objects_id", "objects_conf", "attrs_id", "attrs_conf", "num_boxes", "boxes", "features"),
    {"objects_id": "<i8", "objects_conf": "<f4", "attrs_id": "<i8", "attrs_conf": "<f4"},
)


class TsvRegions(IndexedRegions):
    """Regions of a TSV file. The file is opened for each reading, so processes share no handle."""

    def __init__(self, path: str, layout: _Layout) -> None:
        self._layout = layout
        try:
            self._stamp = _stamp(os.stat(path))
            index = _load_index(path, layout, self._stamp)
            if index is None:
                index = _scan(path, layout)
                if index:
                    _save_index(path, layout, self._stamp, index)
        except FileNotFoundError:
            raise missing_file(path) from None
        except OSError as exc:
            raise CoderError(f"{path}: cannot be read as a TSV file: {exc.strerror or exc}") from exc
        super().__init__(path, index)

    def _read(self, name: str, place: Any) -> Regions:
        offset, length, number = place
        with open(self.path, "rb", buffering=0) as file:
            if _stamp(os.fstat(file.fileno())) != self._stamp:
                raise ValueError("the file has changed since it was opened; open it again")
            line = os.pread(file.fileno(), length, offset)
        try:
            line_name, regions = self._layout.parse(line)
        except ValueError as exc:
            raise ValueError(f"line {number}: {exc}") from exc
        if line_name != name:
            raise ValueError(f"line {number} holds image {line_name!r}: delete the stale {_index_path(self.path)}")
        return regions


def _scan(path: str, layout: _Layout) -> dict[str, tuple[int, int, int]]:
    """Names to (offset, length, line number), read in blocks of at most 1 MB; CoderError where a line does not fit."""
    from tqdm import tqdm

    log.info("%s: indexing its lines (only once, if the folder can be written)", path)
    index: dict[str, tuple[int, int, int]] = {}
    wrong: list[tuple[int, int]] = []  # (line, fields)
    duplicates: list[tuple[int, str]] = []
    number = offset = 0
    name = printable(f"index of {os.path.basename(path)}")
    bar = tqdm(total=os.path.getsize(path), desc=name, unit="B", unit_scale=True, disable=None)
    with open(path, "rb", buffering=_BLOCK) as file, bar:
        while block := file.readline(_BLOCK):
            number += 1
            head, tabs, length = block, block.count(b"\t"), len(block)
            while not block.endswith(b"\n") and (block := file.readline(_BLOCK)):
                tabs, length = tabs + block.count(b"\t"), length + len(block)
            place, offset = (offset, length, number), offset + length
            bar.update(length)
            if not head.strip(b"\r\n"):
                continue  # blank lines are skipped, as in the csv module
            if not block and not _complete(path, layout, place, next(iter(index.values()), None)):
                raise CoderError(
                    f"{path}: line {number}, the last, is truncated after {length} bytes: copy or download the file again, "
                    "or remove that line"
                )
            if tabs + 1 != len(layout.fields):
                wrong.append((number, tabs + 1))
                if number == 1:  # another kind of file: do not read all of it
                    break
                continue
            try:
                name = _unquote(head.partition(b"\t")[0])
            except UnicodeDecodeError:
                raise CoderError(f"{path}: line {number}: the image's name is not UTF-8 text: not a region file") from None
            if name in index:
                duplicates.append((number, name))
            else:
                index[name] = place
    if wrong:
        line, fields = wrong[0]
        total = "" if number == 1 else f" ({len(wrong)} such lines of {number})"
        hint = f"; {fields} fields are {_LAYOUT_OF_COUNT[fields]}" if fields in _LAYOUT_OF_COUNT else ""
        raise CoderError(
            f"{path}: line {line} has {fields} fields, not the {len(layout.fields)} of {layout.name}{total}{hint}; "
            "remove such lines, or name the right layout"
        )
    if duplicates:
        line, name = duplicates[0]
        raise CoderError(
            f"{path}: line {line} repeats image {name!r} of line {index[name][2]} ({len(duplicates)} such lines of {number}); "
            "remove one of each"
        )
    return index


def _complete(path: str, layout: _Layout, place: tuple[int, int, int], first: tuple[int, int, int] | None) -> bool:
    """Whether a last line without line end is complete: it parses, and has as many channels as the first line."""

    def channels(place: tuple[int, int, int]) -> int | None:
        with suppress(ValueError):
            return layout.parse(read_at(path, *place[:2]))[1].features.shape[1]
        return None

    last = channels(place)
    return last is not None and (first is None or channels(first) in (None, last))


def _load_index(path: str, layout: _Layout, stamp: list[int]) -> dict[str, tuple[int, int, int]] | None:
    """The saved index; None unless it is intact and belongs to this version of the file and this layout."""
    try:
        with open(_index_path(path), "rb") as file:
            digest, payload = file.read().split(b"\n", 1)
        if digest.decode("latin-1") != hashlib.blake2b(payload).hexdigest():
            return None
        content = parse_json(payload)
        if content["file"] != [_VERSION, layout.name, *stamp]:
            return None
        index = dict(zip(content["names"], zip(*content["places"], strict=True), strict=True))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = all(type(number) is int and number >= 0 for place in index.values() for number in place)
    inside = whole and all(len(place) == 3 and place[0] + place[1] <= stamp[0] for place in index.values())
    return index if inside and all(isinstance(name, str) for name in index) else None


def _save_index(path: str, layout: _Layout, stamp: list[int], index: dict[str, tuple[int, int, int]]) -> None:
    places = list(zip(*index.values(), strict=True))
    content = {"file": [_VERSION, layout.name, *stamp], "names": list(index), "places": places}
    payload = json.dumps(content).encode()
    try:
        with atomic_write(_index_path(path), "wb") as file:
            file.write(hashlib.blake2b(payload).hexdigest().encode() + b"\n" + payload)
    except OSError as exc:  # in a read-only folder each opening reads the file once
        log.info("%s: its index is not saved: %s", path, exc)


def _index_path(path: str) -> str:
    return f"{path}.index"


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


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
    """A writable array [count, columns]; without ``columns`` as many as the data have."""
    try:
        data = base64.b64decode(row[field], validate=True)
    except binascii.Error as exc:
        raise ValueError(f"{field} is not base64: {exc}") from None
    size = np.dtype(dtype).itemsize
    if not data or len(data) % (count * size) or len(data) != count * size * (columns or len(data) // (count * size)):
        shape = f"{count} x {columns}" if columns else f"{count} rows"
        raise ValueError(f"{field} holds {len(data)} bytes, which is not {shape} of {np.dtype(dtype).name} (num_boxes {count})")
    return np.frombuffer(data, dtype).reshape(count, -1).copy()


def _format(layout: _Layout, *, objects: bool) -> RegionFormat:
    def matches(path: str) -> bool:
        """``….tsv``, also numbered parts; LXMERT's have ``obj`` in their names, such as ``train2014_obj36.tsv``."""
        stem, dot, part = os.path.basename(path).lower().rpartition(".tsv")
        return bool(dot) and (not part or part[1:].isdigit()) and ("obj" in stem) == objects

    return RegionFormat(open=lambda path, *, split="train": TsvRegions(path, layout), matches=matches)


BUA = _format(BUA_LAYOUT, objects=False)
LXMERT = _format(LXMERT_LAYOUT, objects=True)
