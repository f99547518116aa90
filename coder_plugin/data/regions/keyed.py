"""What the files that find an image by its name have in common: an index of names, and a safe way to write."""

from __future__ import annotations

import logging
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import numpy as np

from coder_plugin.data.regions.base import Record, Regions
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()


class KeyedRegions(Mapping[str, Regions]):
    """A file of regions whose names are known when it is opened, each with the place that ``_read`` finds it by."""

    def __init__(self, path: str, index: dict[str, Any]) -> None:
        if not index:
            raise CoderError(f"{path}: no images")
        self.path = path
        self._index = index

    @abstractmethod
    def _read(self, name: str, where: Any) -> Regions:
        """One image; a ``ValueError`` need name neither the file nor the image."""

    def __getitem__(self, name: str) -> Regions:
        where = self._index[name]
        with naming(self.path, name):
            return self._read(name, where)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the image
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


@contextmanager
def naming(path: str, name: str) -> Iterator[None]:
    """Put file and image before what a ``ValueError`` says."""
    try:
        yield
    except CoderError:
        raise
    except ValueError as exc:
        raise ValueError(f"{path}: image {name!r}: {exc}") from exc


def absent(path: str) -> CoderError:
    return CoderError(f"{path}: no such file or folder")


def warn_once(path: str, text: str) -> None:
    """Say something about a file once in a process, however many of its images show it."""
    if (path, text) not in _warned:
        _warned.add((path, text))
        log.warning("%s: %s", path, text)


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """A name beside ``path`` to write a file or folder under: it takes the place of ``path`` when the block ends well and
    vanishes when it does not. A file may be written over, a folder with something in it may not."""
    path = path.rstrip(os.sep)
    if os.path.isdir(path) and os.listdir(path):
        raise CoderError(f"{path}: this folder is not empty; name a new one, or delete it first")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{uuid4().hex[:12]}.tmp"  # machines that share a disk may share process numbers
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            os.unlink(temporary)
        raise


def unique(path: str, records: Iterable[Record]) -> Iterator[tuple[str, Regions]]:
    """The names and regions to be written to ``path``; captions have no place in these files.

    Raises:
        CoderError: there is no record.
        ValueError: a name comes twice, or is empty.
    """
    seen: set[str] = set()
    for record in records:
        if not record.name:
            raise ValueError(f"{path}: record {len(seen) + 1} has no name")
        if record.name in seen:
            raise ValueError(f"{path}: image {record.name!r} comes twice")
        seen.add(record.name)
        yield record.name, record.regions
    if not seen:
        raise CoderError(f"{path}: no images to write")


def exactly(what: str, array: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """``array`` as ``dtype``, C-contiguous; ``ValueError`` where numbers could change."""
    if not np.can_cast(array.dtype, dtype, "safe"):
        raise ValueError(f"{what}: {array.dtype} would be rounded to {np.dtype(dtype)} in this layout; convert it yourself")
    return np.ascontiguousarray(array, dtype)
