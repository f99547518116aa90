r"""TSV files as bottom-up-attention writes them, and LXMERT's: an image a line, arrays in base64, no header.

===================  ===============================================================================================
bottom-up-attention  ``image_id image_w image_h num_boxes boxes features``
LXMERT               ``img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features``
===================  ===============================================================================================

LXMERT has the height first. Arrays are little-endian float32, ``objects_id`` and ``attrs_id`` int64; boxes are in pixels.
L regions of an image, R channels.

The first opening reads the file through once and leaves the lines' places beside it, in ``NAME.index``, where that
folder can be written. Reading an image then reads its line and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.keyed import KeyedRegions, absent, exactly, naming, replacing, unique
from coder_plugin.errors import CoderError

_BLOCK = 1 << 20
_VERSION = 1  # of the index file
_OTHERS = {6: "bottom-up-attention's (format tsv)", 10: "LXMERT's (format lxmert)"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """The fields of a line in their order, and the dtypes of those that become ``Regions.extras``."""

    name: str
    fields: tuple[str, ...]
    extras: dict[str, str]

    def parse(self, line: bytes) -> tuple[str, Regions]:
        """A whole line as the image's name and regions; ``ValueError`` says which field is wrong."""
        values = line.rstrip(b"\r\n").split(b"\t")
        if len(values) != len(self.fields):
            raise ValueError(f"{len(values)} fields, not {len(self.fields)}")
        row = dict(zip(self.fields, values, strict=True))
        number = _number(row, "num_boxes")
        if number < 1 or number % 1:
            raise ValueError(f"num_boxes is {number:g}, not a whole number from one")
        count = int(number)
        boxes = _array(row, "boxes", "<f4", count, 4)  # first: it shows best where num_boxes is wrong
        regions = Regions(
            features=_array(row, "features", "<f4", count),
            boxes=boxes,
            size=(_number(row, "width"), _number(row, "height")),
            extras={name: _array(row, name, dtype, count, 1)[:, 0] for name, dtype in self.extras.items()},
        )
        return _unquote(row["id"]), regions

    def line(self, name: str, regions: Regions) -> bytes:
        """What :meth:`parse` reads; ``ValueError`` where the layout cannot hold it unchanged."""
        if any(character in name for character in "\t\r\n"):
            raise ValueError("a name with a tab or a line break cannot be written to a TSV file")
        if regions.boxes is None or regions.whole is not None:
            raise ValueError(f"a {self.name} TSV file needs boxes and holds no feature of the whole image")
        if set(regions.extras) != set(self.extras):
            needed, there = (", ".join(sorted(each)) or "none" for each in (self.extras, regions.extras))
            raise ValueError(f"further arrays in a {self.name} TSV file: {needed}; here: {there}")
        row = {
            # The csv module's readers take quotes for theirs
            "id": (f'"{name}"'.replace('"', '""')[1:-1] if '"' in name else name).encode(),
            "width": _text(regions.size[0]),
            "height": _text(regions.size[1]),
            "num_boxes": _text(len(regions)),
            "boxes": _encode("boxes", regions.boxes, "<f4"),
            "features": _encode("features", regions.features, "<f4"),
        }
        for extra, dtype in self.extras.items():
            array = regions.extras[extra]
            if array.ndim != 1:
                raise ValueError(f"{extra} has shape {list(array.shape)}, not [{len(regions)}]")
            row[extra] = _encode(extra, array, dtype)
        return b"\t".join(row[field] for field in self.fields) + b"\n"


class TsvRegions(KeyedRegions):
    """Regions of a TSV file that is opened for each reading: no handle to share between processes, nothing kept."""

    def __init__(self, path: str, layout: _Layout) -> None:
        self._layout = layout
        try:
            self._stamp = _stamp(os.stat(path))
            index = _cached(path, layout, self._stamp)
            if index is None:
                index = _scan(path, layout)
                if index:
                    _keep(path, layout, self._stamp, index)
        except FileNotFoundError:
            raise absent(path) from None
        except OSError as exc:
            raise CoderError(f"{path}: cannot be read as a TSV file: {exc.strerror or exc}") from exc
        super().__init__(path, index)

    def _read(self, name: str, where: Any) -> Regions:
        offset, length, number = where
        with open(self.path, "rb", buffering=0) as file:
            if _stamp(os.fstat(file.fileno())) != self._stamp:
                raise ValueError("the file has changed since it was opened; open it again")
            line = os.pread(file.fileno(), length, offset)
        try:
            found, regions = self._layout.parse(line)
        except ValueError as exc:
            raise ValueError(f"line {number}: {exc}") from exc
        if found != name:
            raise ValueError(f"line {number} is that of {found!r}; delete {_index_path(self.path)}")
        return regions


def _scan(path: str, layout: _Layout) -> dict[str, tuple[int, int, int]]:
    """Names to (offset, length, line number), in blocks of at most a MB; CoderError where lines make the file doubtful."""
    from tqdm import tqdm

    log.info("%s: looking for its lines; once, if the folder can be written", path)
    index: dict[str, tuple[int, int, int]] = {}
    wrong: list[tuple[int, int]] = []  # (line, fields)
    twice: list[tuple[int, str]] = []
    number = offset = 0
    bar = tqdm(total=os.path.getsize(path), desc=f"index of {os.path.basename(path)}", unit="B", unit_scale=True, disable=None)
    with open(path, "rb", buffering=_BLOCK) as file, bar:
        while block := file.readline(_BLOCK):
            number += 1
            head, tabs, length = block, block.count(b"\t"), len(block)
            while not block.endswith(b"\n") and (block := file.readline(_BLOCK)):
                tabs, length = tabs + block.count(b"\t"), length + len(block)
            where, offset = (offset, length, number), offset + length
            bar.update(length)
            if not head.strip(b"\r\n"):
                continue  # as the csv module does
            if not block and not _complete(path, layout, where, next(iter(index.values()), None)):
                raise CoderError(
                    f"{path}: line {number}, the last, is cut off after {length} bytes: copy or download the file again, "
                    "or remove that line"
                )
            if tabs + 1 != len(layout.fields):
                wrong.append((number, tabs + 1))
                if number == 1:  # another kind of file: no need to read it all
                    break
                continue
            try:
                name = _unquote(head.partition(b"\t")[0])
            except UnicodeDecodeError:
                raise CoderError(f"{path}: line {number}: the image's name is not UTF-8 text: not such a TSV file") from None
            if name in index:
                twice.append((number, name))
            else:
                index[name] = where
    if wrong:
        line, fields = wrong[0]
        many = "" if number == 1 else f" ({len(wrong)} such lines of {number})"
        hint = f"; {fields} fields are {_OTHERS[fields]}" if fields in _OTHERS else ""
        raise CoderError(
            f"{path}: line {line} has {fields} fields, not the {len(layout.fields)} of {layout.name}{many}{hint}; "
            "remove such lines, or name the format that it is"
        )
    if twice:
        line, name = twice[0]
        raise CoderError(
            f"{path}: line {line} is image {name!r} again, first on line {index[name][2]} ({len(twice)} such lines of "
            f"{number}); remove one of each"
        )
    return index


def _complete(path: str, layout: _Layout, where: tuple[int, int, int], first: tuple[int, int, int] | None) -> bool:
    """Whether a last line without its end is whole: it parses, and its regions are as wide as the first line's."""

    def channels(place: tuple[int, int, int]) -> int | None:
        with open(path, "rb", buffering=0) as file, suppress(ValueError):
            return layout.parse(os.pread(file.fileno(), place[1], place[0]))[1].features.shape[1]
        return None

    last = channels(where)
    return last is not None and (first is None or channels(first) in (None, last))


def _cached(path: str, layout: _Layout, stamp: list[int]) -> dict[str, tuple[int, int, int]] | None:
    """The index kept beside the file; None unless it is whole and was made of this very file in this layout."""
    try:
        with open(_index_path(path), "rb") as file:
            digest, payload = file.read().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    if digest.decode("latin-1") != hashlib.blake2b(payload).hexdigest():
        return None
    content = json.loads(payload)
    if content["of"] != [_VERSION, layout.name, *stamp]:
        return None
    return dict(zip(content["names"], zip(*content["places"], strict=True), strict=True))


def _keep(path: str, layout: _Layout, stamp: list[int], index: dict[str, tuple[int, int, int]]) -> None:
    places = list(zip(*index.values(), strict=True))
    content = {"of": [_VERSION, layout.name, *stamp], "names": list(index), "places": places}
    payload = json.dumps(content).encode()
    try:
        with replacing(_index_path(path)) as temporary, open(temporary, "wb") as file:
            file.write(hashlib.blake2b(payload).hexdigest().encode() + b"\n" + payload)
    except OSError as exc:  # a folder that is read only costs a pass at each opening, nothing else
        log.info("%s: its index is not kept: %s", path, exc)


def _index_path(path: str) -> str:
    return f"{path}.index"


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


def _unquote(field: bytes) -> str:
    """A field as the csv module reads it: quotes around it go, doubled ones inside become one."""
    text = field.decode()
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def _number(row: dict[str, bytes], field: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(row[field])):
            return number
    raise ValueError(f"{field} is {row[field][:20]!r}, not a number")


def _text(number: float) -> bytes:
    """Whole numbers without a point: the field's own readers want integers."""
    return repr(int(number) if float(number).is_integer() else float(number)).encode()


def _encode(what: str, array: np.ndarray, dtype: str) -> bytes:
    return base64.b64encode(exactly(what, array, dtype).tobytes())


def _array(row: dict[str, bytes], field: str, dtype: str, count: int, columns: int | None = None) -> np.ndarray:
    """[count, columns], of one's own; without ``columns`` as many as there are."""
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
    def write(path: str, records: Iterable[Record], *, split: str = "train") -> int:
        count = 0
        with replacing(path) as temporary, open(temporary, "wb") as file:
            for name, regions in unique(path, records):
                with naming(path, name):
                    file.write(layout.line(name, regions))
                count += 1
        return count

    def open_tsv(path: str, *, split: str = "train") -> TsvRegions:
        return TsvRegions(path, layout)

    def matches(path: str) -> bool:
        """``….tsv``, also in numbered pieces; LXMERT's say ``obj`` in their names, as ``train2014_obj36.tsv``."""
        stem, dot, piece = os.path.basename(path).lower().rpartition(".tsv")
        return bool(dot) and (not piece or piece[1:].isdigit()) and ("obj" in stem) == objects

    keeps = ("extras",) if layout.extras else ()
    return RegionFormat(open=open_tsv, write=write, matches=matches, keeps=keeps)


BUA = _format(
    _Layout("bottom-up-attention", ("id", "width", "height", "num_boxes", "boxes", "features"), {}),
    objects=False,
)
LXMERT = _format(
    _Layout(
        "LXMERT",
        ("id", "height", "width", "objects_id", "objects_conf", "attrs_id", "attrs_conf", "num_boxes", "boxes", "features"),
        {"objects_id": "<i8", "objects_conf": "<f4", "attrs_id": "<i8", "attrs_conf": "<f4"},
    ),
    objects=True,
)
