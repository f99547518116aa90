"""Reading other people's ``.pth`` files without running anything that is in them.

``torch.load`` does not serve: with ``weights_only=True`` it refuses the ``argparse.Namespace`` that these checkpoints hold
and Python 2's pickles; with ``False`` and an unpickler of ours it still hands TorchScript archives to ``torch.jit``, reads
tar files and looks up source code by names in the file. So both of torch's formats, the zip archive and the one before it,
are read here. A pickle gets dicts, lists, numbers, strings and :class:`StoredTensor`; every other name in it means
:class:`Inert`, whatever is done to it. A forged file can still use up memory or the stack; it cannot run anything.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError

#: First and second pickle of the format before the zip archive.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_DTYPES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
#: What reading malformed bytes raises, in pickle, zipfile and torch.
_MALFORMED = (
    pickle.UnpicklingError, struct.error, zipfile.BadZipFile, EOFError, ValueError, TypeError, KeyError, IndexError,
    AttributeError, OverflowError, RuntimeError, MemoryError, RecursionError, NotImplementedError, OSError,
)  # fmt: skip


class Inert:
    """What stands for everything that is no plain data: it takes any arguments, items and state, and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Inert()

    def _ignore(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore


class _Dict(dict):
    """An ``OrderedDict``, without the attributes that a pickle would set on it."""

    def __setstate__(self, _: Any) -> None:
        pass


class _StorageType(Inert):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Storage(Inert):
    """One run of values, [n] of one dtype; in the old format they are read after the pickle that mentions them."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.dtype, self.count = dtype, count
        self.values: Tensor | None = None

    def fill(self, content: bytes) -> None:
        if len(content) != self.count * self.dtype.itemsize:
            raise ValueError(f"a tensor of {self.count} values has {len(content)} bytes")
        empty = torch.empty(0, dtype=self.dtype)
        self.values = torch.frombuffer(bytearray(content), dtype=self.dtype) if content else empty


class StoredTensor(Inert):
    """A tensor's place in the file's values; :meth:`tensor` makes it."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any) -> None:
        shaped = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride)
        if not (shaped and isinstance(storage, _Storage)):
            raise pickle.UnpicklingError("a tensor has no storage, size or stride")
        if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *size, *stride)):
            raise pickle.UnpicklingError("a tensor's size, stride or offset is no whole number")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset > storage.count or math.prod(size) > storage.count or (0 not in size and last >= storage.count):
            raise pickle.UnpicklingError(f"a tensor of size {size} reaches beyond its {storage.count} values")
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    def tensor(self) -> Tensor:
        assert self.storage.values is not None
        return self.storage.values.as_strided(self.size, self.stride, self.offset)


class _RebuildTensor(Inert):
    """``_rebuild_tensor`` and ``_rebuild_tensor_v2``: storage, offset, size, stride, and what matters to training alone."""

    def __call__(self, *arguments: Any, **_: Any) -> StoredTensor:
        return StoredTensor(*arguments[:4])


class _RebuildParameter(Inert):
    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0]


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor"): _RebuildTensor(),
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    **{(module, name): _StorageType(dtype) for module in ("torch", "torch.cuda") for name, dtype in _DTYPES.items()},
}


class _Unpickler(pickle._Unpickler):
    """Its names are those of the table above and :class:`Inert`; nothing is imported, and what it calls are these.

    The one written in Python: a forged index of a few bytes makes C's fill the memory.
    """

    def __init__(self, file: IO[bytes], storages: dict[str, _Storage]) -> None:
        super().__init__(file, encoding="latin1")  # Python 2's strings
        self.storages = storages

    def find_class(self, module: str, name: str) -> Any:
        return _NAMES.get((module, name), Inert)

    def persistent_load(self, saved: Any) -> Any:
        if not isinstance(saved, tuple) or len(saved) not in (5, 6) or saved[0] != "storage":
            return Inert()  # torch's other kind, a module with its source code
        _, kind, key, _, count, *view = saved
        if (
            not isinstance(kind, _StorageType)
            or type(count) is not int
            or count < 0
            or any(v is not None for v in view)
        ):
            raise pickle.UnpicklingError(f"storage {str(key)[:40]!r} is of no known kind")
        storage = self.storages.setdefault(str(key), _Storage(kind.dtype, count))
        if (storage.dtype, storage.count) != (kind.dtype, count):
            raise pickle.UnpicklingError(f"storage {str(key)[:40]!r} is described in two ways")
        return storage


def read_pickle(path: str | Path) -> Any:
    """What a file of ``torch.save`` holds: plain data, with :class:`StoredTensor` and :class:`Inert` in it.

    Raises:
        CoderError: the file cannot be read as such, or not whole.
    """
    try:
        with open(path, "rb") as file:
            return _read_zip(file) if zipfile.is_zipfile(file) else _read_old(file)
    except _MALFORMED as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CoderError(f"{path} cannot be read as a PyTorch checkpoint; is it whole? ({what})") from error


def _read_zip(file: IO[bytes]) -> Any:
    with zipfile.ZipFile(file) as archive:
        places = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(places) != 1:
            raise ValueError("a zip archive without a data.pkl")
        folder = places[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and _entry(archive, f"{folder}byteorder") != b"little":
            raise ValueError("its values are big-endian")
        storages: dict[str, _Storage] = {}
        content = _Unpickler(io.BytesIO(_entry(archive, places[0])), storages).load()
        for key, storage in storages.items():
            storage.fill(_entry(archive, f"{folder}data/{key}"))
        return content


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")  # torch never does, and a small file could fill the memory
    return archive.read(entry)


def _read_old(file: IO[bytes]) -> Any:
    storages: dict[str, _Storage] = {}

    def following() -> Any:
        return _Unpickler(file, storages).load()

    file.seek(0)
    if following() != _MAGIC or following() != _PROTOCOL:
        raise ValueError("it does not begin as one")
    system = following()
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise ValueError("its values are big-endian")
    content, keys = following(), following()
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise ValueError("it does not list the values that it mentions")
    for key in keys:
        storage = storages[str(key)]
        (count,) = struct.unpack("<q", file.read(8))
        if count != storage.count:
            raise ValueError(f"a tensor of {storage.count} values has {count}")
        storage.fill(file.read(count * storage.dtype.itemsize))
    return content


def tensors(mapping: Any) -> dict[str, Tensor]:
    """The tensors of a state dict that :func:`read_pickle` gave, by name.

    Raises:
        ValueError: not a dict from names to tensors.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError("it is no dict of tensors")
    for name, value in mapping.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise ValueError(f"its entry {str(name)[:60]!r} is no tensor")
    return {name: value.tensor() for name, value in mapping.items()}
