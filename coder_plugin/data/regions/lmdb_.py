"""Read LMDB files with an image's arrays under its name, as ``.npz`` files or msgpack.

Both are UNITER's layouts (``…_compressed`` and plain). msgpack values are those of msgpack-numpy, whose dictionaries are
decoded here: ``nd``, ``type``, ``shape``, ``data``; dictionaries of ``dtype``, ``shape`` and ``data`` are read too. The
arrays' names are those of :mod:`~coder_plugin.data.regions.arrays`. ViLBERT's values are pickles, which are never unpickled.
The JSON list under the key ``__keys__``, if present, must name exactly the images of the file.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import from_arrays, read_npz
from coder_plugin.data.regions.base import Entry, RegionFormat, Regions, optional_package, warn_once
from coder_plugin.errors import CoderError

_ORDER = b"__keys__"


def read(path: str) -> Iterator[Entry]:
    """The images of a folder with ``data.mdb``, or of that file itself, in the order of their keys' bytes.

    Raises:
        CoderError: no such file, a truncated one, keys that are no names, or another list of names than the file's.
    """
    lmdb = optional_package("lmdb")
    data = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
    if not os.path.isfile(data):
        raise CoderError(f"{data}: no such file")
    try:
        with lmdb.open(data, subdir=False, readonly=True, create=False, lock=False) as environment:
            expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            if os.path.getsize(data) < expected:  # reading a mapped page beyond the file's end would kill the process (SIGBUS)
                raise CoderError(
                    f"{data}: truncated: {os.path.getsize(data)} bytes of {expected}; copy or download the file again (if it "
                    "is complete, mdb_copy -c writes one of the right length)"
                )
            with environment.begin() as transaction:
                listed = _listed(data, transaction.get(_ORDER))
                names: set[str] = set()
                for key, value in transaction.cursor():
                    if key != _ORDER:
                        names.add(name := key.decode())
                        yield Entry(name, partial(_load, value, path))
                if listed is not None and (other := sorted(listed ^ names)):
                    where = "the file" if other[0] in listed else _ORDER.decode()
                    raise CoderError(f"{data}: {where} lacks image {other[0]!r} ({len(other)} names differ)")
    except UnicodeDecodeError as exc:
        raise CoderError(f"{data}: key {exc.object[:40]!r} is not UTF-8 text, so it is not an image's name") from None
    except (OSError, lmdb.Error) as exc:
        raise CoderError(f"{path}: cannot be read as LMDB: {exc}") from exc


def _listed(data: str, order: bytes | None) -> set[str] | None:
    if order is None:
        return None
    try:
        names = parse_json(order)
    except ValueError as exc:
        raise CoderError(f"{data}: the value of {_ORDER.decode()} is not JSON: {exc}") from exc
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CoderError(f"{data}: the value of {_ORDER.decode()} must be a JSON list of names")
    return set(names)


def _load(value: bytes, path: str) -> Regions:
    if value[:2] == b"PK":
        return from_arrays(read_npz(io.BytesIO(value)), path)
    if value[:1] == b"\x80" and len(value) > 1 or value[:1] in b"(c]}" and value[-1:] == b".":
        raise ValueError(
            "its value is a pickle, as in ViLBERT's files, never unpickled; rewrite the file with .npz or msgpack values"
        )
    if not value or not (0x80 <= value[0] <= 0x8F or value[0] in (0xDE, 0xDF)):
        raise ValueError(f"its value is neither .npz nor msgpack: it begins with {value[:4]!r}")
    # Not msgpack.unpackb: after msgpack_numpy.patch() it unpickles arrays of objects
    msgpack = optional_package("msgpack.fallback")
    try:
        content = msgpack.unpackb(value, raw=True)  # older writers do not distinguish text from bytes
    except Exception as exc:  # damaged content raises many kinds of errors
        raise ValueError(f"damaged msgpack: {type(exc).__name__}: {exc}") from exc
    arrays = {}
    for key, each in content.items():
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        if isinstance(each, dict):
            arrays[name] = _array(name, each)
        elif isinstance(each, (int, float)):
            arrays[name] = np.asarray(each)
        elif not isinstance(each, bytes):
            warn_once(path, f"{name} is left out: it is a {type(each).__name__}, not an array")
    return from_arrays(arrays, path)


def _array(name: str, packed: Mapping[Any, Any]) -> np.ndarray:
    """An array from msgpack-numpy's dictionary: numbers only, and exactly as many bytes as its shape needs."""
    packed = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in packed.items()}
    kind, shape, data = packed.get("type", packed.get("dtype")), packed.get("shape", []), packed.get("data")
    if not isinstance(kind, bytes) or not isinstance(data, bytes) or packed.get("kind", b"") not in (b"", None):
        raise ValueError(f"{name} is not an array of numbers: msgpack-numpy's dictionary has {', '.join(map(str, packed))}")
    try:
        dtype = np.dtype(kind.decode("latin-1"))
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"{name} has the unknown dtype {kind[:20]!r}") from None
    if dtype.kind not in "biuf":
        raise ValueError(f"{name} has dtype {dtype}; only numbers are read, never pickles")
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError(f"{name} has the shape {shape!r}, not a list of sizes")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{name} holds {len(data)} bytes, which is not {dtype} of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)


def matches(path: str) -> bool:
    """A folder with ``data.mdb``, or a name that ends in ``.lmdb`` or ``.mdb``."""
    return os.path.isfile(os.path.join(path, "data.mdb")) or path.rstrip(os.sep).lower().endswith((".lmdb", ".mdb"))


LMDB = RegionFormat(matches=matches, read=read)
