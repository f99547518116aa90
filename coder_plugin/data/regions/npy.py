"""Read and write large ``.npy`` files row by row, without holding them in memory or mapping their pages."""

from __future__ import annotations

import os
import struct
import tokenize
import warnings
from math import prod
from typing import IO

import numpy as np

from coder_plugin.data.regions.base import read_at
from coder_plugin.errors import CoderError

_HEADER = 128  # bytes, in files written here; NumPy requires a multiple of 64


class NpyRows:
    """The rows of a ``.npy`` file: ``rows[3]`` is a writable array of shape ``shape[1:]`` and the file's dtype.

    Args:
        kinds: allowed dtypes, as letters of ``dtype.kind``.
        ndim: how many dimensions the array must have.

    Raises:
        CoderError: not a ``.npy`` file, another dtype or number of dimensions, Fortran order, or a truncated file.
    """

    def __init__(self, path: str, *, kinds: str, ndim: int) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.shape, fortran, dtype = _header(file)
                self._start = file.tell()
                size = os.fstat(file.fileno()).st_size
        except OSError as exc:
            raise CoderError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
        except ValueError as exc:
            raise CoderError(f"{path}: not a .npy file: {' '.join(str(exc).split())}") from exc
        if any(length < 0 for length in self.shape):
            raise CoderError(f"{path}: has shape {list(self.shape)}; lengths must not be negative")
        self.dtype = np.dtype(dtype)
        allowed = {"f": "floating point", "iu": "whole numbers", "iuf": "numbers"}[kinds]
        if self.dtype.kind not in kinds:
            raise CoderError(f"{path}: holds {self.dtype}; it must be {allowed}")
        if len(self.shape) != ndim:
            raise CoderError(f"{path}: has shape {list(self.shape)}; it must have {ndim} dimensions")
        if fortran and ndim > 1:
            raise CoderError(f"{path}: is in Fortran order; save it again with numpy.ascontiguousarray")
        needed = self._start + prod(self.shape) * self.dtype.itemsize
        if size < needed:
            raise CoderError(
                f"{path}: has {size:,} bytes, but its header requires {needed:,}: truncated; copy or write it again"
            )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.read(row, 1)[0]

    def all(self) -> np.ndarray:
        """All rows, for small files."""
        return self.read(0, len(self))

    def read(self, first: int, rows: int) -> np.ndarray:
        """``rows`` rows, starting with row ``first``."""
        length = prod(self.shape[1:]) * self.dtype.itemsize
        data = read_at(self.path, self._start + first * length, rows * length)
        array = np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])
        return array.astype(self.dtype.newbyteorder("="), copy=True)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its version is {version[0]}.{version[1]}; 1.0 and 2.0 can be read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # files written by Python 2, as many released ones are, have shapes like (36L,)
        try:
            return readers[version](file)  # type: ignore[no-untyped-call, no-any-return]
        except (SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as exc:  # numpy parses it as Python
            raise ValueError("its header is damaged") from exc


class NpyWriter:
    """Write a ``.npy`` file row by row, without knowing the number of rows before :meth:`close`."""

    def __init__(self, path: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.shape, self.rows = path, np.dtype(dtype), shape, 0
        self._file = open(path, "wb")
        self._file.write(bytes(_HEADER))

    def extend(self, rows: np.ndarray) -> None:
        """Add rows, [n, *shape]."""
        assert rows.dtype == self.dtype and rows.shape[1:] == self.shape
        self._file.write(rows.tobytes())
        self.rows += len(rows)

    def close(self, shape: tuple[int, ...] | None = None) -> None:
        """Finish the file, as an array [rows, *shape] or of another shape of the same size."""
        if not self._file.closed:
            self._file.seek(0)
            self._file.write(header(self.dtype, shape or (self.rows, *self.shape)))
            self._file.close()


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The first 128 bytes of a ``.npy`` file, version 1.0."""
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": shape})
    assert len(text) < _HEADER - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", _HEADER - 10) + text.ljust(_HEADER - 11).encode("latin1") + b"\n"
