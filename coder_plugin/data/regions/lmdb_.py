"""Read LMDB files with an image's arrays under its name, as ``.npz`` files or msgpack.

Both are UNITER's layouts (``…_compressed`` and plain). msgpack values are those of msgpack-numpy, whose dictionaries are
decoded here: ``nd``, ``type``, ``shape``, ``data``; dictionaries of ``dtype``, ``shape`` and ``data`` and LZ4 frames around
msgpack are read too. The arrays' names are those of :mod:`~coder_plugin.data.regions.arrays`. ViLBERT's values are pickles,
which are never unpickled.

The order of images is that of the JSON list under the key ``__keys__``, if present, else that of the keys' bytes.

LMDB maps its file, and mapped pages count as memory of the process. The file is therefore opened for each reading (about
50 microseconds) and closed after it: nothing stays mapped, and nothing is shared with forked processes.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import LARGEST_ARRAYS, from_arrays, read_npz
from coder_plugin.data.regions.base import IndexedRegions, RegionFormat, Regions, missing_file, warn_once
from coder_plugin.errors import CoderError

_ORDER = b"__keys__"
_LZ4 = b"\x04\x22\x4d\x18"
_BATCH = 10_000  # keys; small values are stored with their keys and mapped with them

# LMDB may open a file only once in a process and its forks, so no fork may happen while one is open.
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class LmdbRegions(IndexedRegions):
    """Regions of an LMDB file: a folder with ``data.mdb``, or that file itself."""

    def __init__(self, path: str, *, split: str = "train") -> None:
        self._data = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
        try:
            self._stamp = _stamp(self._data)
        except FileNotFoundError:
            raise missing_file(self._data) from None
        try:
            _check_length(self._data)
            names = _read_names(self._data)
        except (OSError, _lmdb().Error) as exc:
            raise CoderError(f"{path}: cannot be read as LMDB: {exc}") from exc
        index = dict.fromkeys(names)
        if len(index) < len(names):
            raise CoderError(f"{path}: {_ORDER.decode()} lists {len(names) - len(index)} names more than once")
        super().__init__(path, index)
        name = next(iter(index))
        try:
            _kind(self._value(name))
        except ValueError as exc:
            raise CoderError(f"{path}: image {name!r}: {exc}") from exc

    def _value(self, name: str) -> bytes:
        if _stamp(self._data) != self._stamp:
            raise ValueError("the file has changed since it was opened; open it again")
        try:
            with _reading(self._data) as transaction:
                value = transaction.get(name.encode())
        except _lmdb().Error as exc:
            raise ValueError(f"LMDB: {exc}") from exc
        if value is None:
            raise ValueError(f"{_ORDER.decode()} lists it, but the file has no such key")
        return value

    def _read(self, name: str, place: Any) -> Regions:
        return from_arrays(_decode(self._value(name), self.path), self.path)


@contextmanager
def _environment(data: str) -> Iterator[Any]:
    with _lock:
        environment = _lmdb().open(data, subdir=False, readonly=True, create=False, lock=False, readahead=False)
        try:
            yield environment
        finally:
            environment.close()


@contextmanager
def _reading(data: str) -> Iterator[Any]:
    with _environment(data) as environment, environment.begin() as transaction:
        yield transaction


def _check_length(data: str) -> None:
    """Refuse a truncated file: reading a mapped page beyond its end would kill the process (SIGBUS)."""
    with _environment(data) as environment:
        expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    length = os.path.getsize(data)
    if length < expected:
        raise CoderError(
            f"{data}: truncated: {length} bytes of {expected}; copy or download the file again (if it is complete, mdb_copy -c "
            "writes one of the right length)"
        )


def _read_names(data: str) -> list[str]:
    """The images' names in order; CoderError where the file's list of them has another length."""
    with _reading(data) as transaction:
        order = transaction.get(_ORDER)
        entries = transaction.stat()["entries"]
    if order is None:
        return list(_keys(data))
    try:
        names = parse_json(bytes(order))
    except ValueError as exc:
        raise CoderError(f"{data}: the value of {_ORDER.decode()} is not JSON: {exc}") from exc
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CoderError(f"{data}: the value of {_ORDER.decode()} must be a JSON list of names")
    if len(names) != entries - 1:
        raise CoderError(f"{data}: {_ORDER.decode()} lists {len(names)} names, but there are {entries - 1} images")
    return names


def _keys(data: str) -> Iterator[str]:
    last = b""
    while True:
        with _reading(data) as transaction, transaction.cursor() as cursor:
            more = cursor.set_range(last + b"\0" if last else b"\0")
            batch: list[bytes] = []
            while more and len(batch) < _BATCH:
                batch.append(cursor.key())
                more = cursor.next()
        for key in batch:
            try:
                yield key.decode()
            except UnicodeDecodeError:
                raise CoderError(f"{data}: key {key[:40]!r} is not UTF-8 text, so it is not an image's name") from None
        if not more:
            return
        last = batch[-1]


def _kind(value: bytes) -> str:
    """``npz``, ``lz4`` or ``msgpack``, by the first bytes."""
    if value[:2] == b"PK":
        return "npz"
    if value[:4] == _LZ4:
        return "lz4"
    if value[:1] == b"\x80" and len(value) > 1 or value[:1] in b"(c]}" and value[-1:] == b".":
        raise ValueError(
            "its value is a pickle, as in ViLBERT's files, never unpickled; rewrite the file with .npz or msgpack values"
        )
    if value and (0x80 <= value[0] <= 0x8F or value[0] in (0xDE, 0xDF)):
        return "msgpack"
    raise ValueError(f"its value is neither .npz nor msgpack: it begins with {value[:4]!r}")


def _decode(value: bytes, path: str) -> dict[str, np.ndarray]:
    kind = _kind(value)
    if kind == "lz4":
        value = _decompress(value)
        kind = _kind(value)
    if kind == "npz":
        return read_npz(io.BytesIO(value))
    # Not msgpack.unpackb: after msgpack_numpy.patch() it unpickles arrays of objects
    msgpack = _import("msgpack.fallback")
    try:
        content = msgpack.unpackb(value, raw=True)  # older writers do not distinguish text from bytes
    except Exception as exc:  # damaged content raises many kinds of errors
        raise ValueError(f"damaged msgpack: {type(exc).__name__}: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError("its msgpack value is not a dictionary of arrays")
    arrays = {}
    for key, each in content.items():
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
        if isinstance(each, dict):
            arrays[name] = _array(name, each)
        elif isinstance(each, (int, float)):
            arrays[name] = np.asarray(each)
        elif not isinstance(each, bytes):
            warn_once(path, f"{name} is left out: it is a {type(each).__name__}, not an array")
    return arrays


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
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _decompress(value: bytes) -> bytes:
    frame = _import("lz4.frame")
    try:
        decompressor = frame.LZ4FrameDecompressor()
        content = decompressor.decompress(value, max_length=LARGEST_ARRAYS)
    except (RuntimeError, EOFError) as exc:
        raise ValueError(f"damaged LZ4 frame: {exc}") from exc
    if not decompressor.eof:
        if len(content) >= LARGEST_ARRAYS:
            raise BadSample("regions", f"it expands to over {LARGEST_ARRAYS:,} bytes")
        raise ValueError("damaged LZ4 frame: it ends early")
    return content  # type: ignore[no-any-return]


def matches(path: str) -> bool:
    """A folder with ``data.mdb``, or a name that ends in ``.lmdb`` or ``.mdb``."""
    return os.path.isfile(os.path.join(path, "data.mdb")) or path.rstrip(os.sep).lower().endswith((".lmdb", ".mdb"))


def _stamp(data: str) -> tuple[int, int]:
    status = os.stat(data)
    return status.st_size, status.st_mtime_ns


def _lmdb() -> Any:
    return _import("lmdb")


def _import(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        raise CoderError(f'this LMDB file needs the package {package}: pip install "coder-plugin[regions]"') from exc


LMDB = RegionFormat(open=LmdbRegions, matches=matches)
