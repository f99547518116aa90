"""Samples of local shards by number: their places are found from headers alone, and each is read without those before it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tarfile
import time
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.data.tars import (
    IMAGE_FIELDS,
    CheckedTarInfo,
    Files,
    Sample,
    local_path,
    open_local,
    open_tar,
    samples_of,
    shard_errors,
)
from coder_plugin.data.workers import start_worker
from coder_plugin.files import atomic_write

log = logging.getLogger(__name__)
#: Tar files that a process keeps open.
MOST_OPEN = 64
#: Places that took longer to find than so many seconds are kept for the next run.
_WORTH_KEEPING = 1.0
#: Shards from which on several processes read the headers, and how many.
_MANY, _PROCESSES = 200, 8
_FORMAT = 3  # of the file of places
#: Files of places that are kept, those that were used last.
_MOST_KEPT = 32


@dataclass
class TarIndex:
    """Where the samples of a shard are, in 8 bytes a sample.

    Args:
        starts: the place of each sample's first file, and at last where the samples end; in bytes.
        changed: when the shard was changed last, in nanoseconds.
        files: the shard's files.
    """

    starts: np.ndarray[Any, np.dtype[np.uint64]]
    changed: int = 0
    files: Files = field(default_factory=Files)

    def __len__(self) -> int:
        return len(self.starts) - 1


def scan(shard: str) -> TarIndex:
    """The index of a local shard that is not compressed, of which only headers are read.

    Raises:
        CoderError: the tar file is damaged.
    """
    files, starts, end = Files(), array("Q"), 0
    changed = state_of(shard)[2]
    for sample in samples(shard, files, texts=False):
        starts.append(sample.start)
        end = sample.end
    starts.append(end)
    return TarIndex(np.array(starts, np.uint64), changed, files)


def scan_all(shards: Sequence[str]) -> list[TarIndex]:
    """The indexes of local shards. Those that took over a second to make are kept in the user's folder of caches
    (``$XDG_CACHE_HOME/coder_plugin``, by default in ``~/.cache``), for shards of the same paths, sizes and times, for
    the 32 sets of shards that were opened last.

    Raises:
        CoderError: a tar file is damaged.
    """
    states = hashlib.sha256(repr([_FORMAT, *map(state_of, shards)]).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base, "coder_plugin", f"tars-{states}.npz")
    if (kept := _load(path, len(shards))) is not None:
        return kept
    start = time.monotonic()
    if len(shards) >= _MANY:
        log.info("reading the headers of %s shards", f"{len(shards):,}")
        processes = min(_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        with ProcessPoolExecutor(processes, initializer=start_worker, initargs=(0,)) as pool:
            indexes = list(pool.map(scan, shards, chunksize=8))
    else:
        indexes = list(map(scan, shards))
    if time.monotonic() - start > _WORTH_KEEPING:
        _save(path, indexes)
    return indexes


def state_of(shard: str) -> tuple[str, int, int]:
    """What tells whether a shard is still the same: its path, size and time."""
    path = os.path.realpath(local_path(shard))
    with shard_errors(shard):
        status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _save(path: Path, indexes: Sequence[TarIndex]) -> None:
    notes = json.dumps([[each.changed, each.files.counts, each.files.examples] for each in indexes])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            ends = np.cumsum([len(each.starts) for each in indexes])
            starts = np.concatenate([each.starts for each in indexes])
            np.savez(file, notes=np.frombuffer(notes.encode(), np.uint8), ends=ends, starts=starts)
        kept = sorted(path.parent.glob("tars-*.npz"), key=lambda each: each.stat().st_mtime_ns, reverse=True)
        for old in kept[_MOST_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as error:  # a folder that may not be written, a full disk: the next run reads the headers again
        log.info("%s: places of samples are not kept: %s", path, error)


def _load(path: Path, count: int) -> list[TarIndex] | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            notes, ends, starts = json.loads(arrays["notes"].tobytes()), arrays["ends"], arrays["starts"]
        if not (len(notes) == len(ends) == count and ends[-1] == len(starts) and starts.dtype == np.uint64):
            return None
        with suppress(OSError):  # a folder that may not be written
            os.utime(path)  # it was used last
        return [
            TarIndex(part, changed, Files(Counter(counts), examples))
            for (changed, counts, examples), part in zip(notes, np.split(starts, ends[:-1]), strict=True)
        ]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


class _File:
    """A shard that is open until it is no longer used."""

    def __init__(self, shard: str) -> None:
        self.file = open_local(shard)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


@lru_cache(maxsize=MOST_OPEN)
def _open(shard: str, changed: int) -> _File:
    return _File(shard)


class _Reader:
    """Reads a local shard from a position on, which is its own: processes and threads share the open file.

    Raises:
        ReadError: the shard has changed since ``changed``.
    """

    def __init__(self, shard: str, changed: int, position: int) -> None:
        self._opened, self._position = _open(shard, changed), position
        self._number = self._opened.file.fileno()
        if os.fstat(self._number).st_mtime_ns != changed:
            raise tarfile.ReadError("it has changed since its headers were read")

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        content = os.pread(self._number, size, self._position)
        self._position += len(content)
        return content


@dataclass(frozen=True)
class Place:
    """The content of a file in a local shard, read when it is needed.

    Args:
        shard: the path of the tar file.
        offset: where the content begins, in bytes.
        size: its length in bytes.
        changed: when the shard was changed last, in nanoseconds.
    """

    shard: str
    offset: int
    size: int
    changed: int

    def read(self) -> bytes:
        """The content; ``CoderError`` if the shard is no longer what it was."""
        with shard_errors(self.shard):
            content = _Reader(self.shard, self.changed, self.offset).read(self.size)
            if len(content) < self.size:
                raise tarfile.ReadError(f"it ends before byte {self.offset + self.size}: it has changed")
        return content


def samples(shard: str, files: Files, *, texts: bool = True) -> Iterator[Sample]:
    """The samples of a local shard in order, of which at most texts are read; the content of an image is a :class:`Place`.

    Raises:
        CoderError: the tar file is damaged.
    """
    changed = state_of(shard)[2]
    with open_tar(shard) as tar:
        for sample in samples_of(tar, files, partial(_content, tar if texts else None, shard, changed)):
            files.add_sample(sample)
            yield sample


def read_sample(shard: str, index: TarIndex, number: int) -> Sample:
    """A sample of a local shard by its position, as of :func:`samples`.

    Raises:
        CoderError: the shard is no longer what it was.
    """
    start, end = index.starts[number : number + 2].tolist()
    with shard_errors(shard):
        reader: Any = _Reader(shard, index.changed, start)
        tar: Any = tarfile.TarFile(fileobj=reader, tarinfo=CheckedTarInfo)
        tar.firstmember, tar.offset = None, start  # it has read one header, to recognise a tar file
        reader.seek(start)  # next() seeks too, but not to the file's start
        here = list(samples_of(tar, Files(), partial(_content, tar, shard, index.changed), end=end))
        if len(here) != 1:
            raise tarfile.ReadError(f"{len(here)} samples are at byte {start}: it has changed")
    return here[0]


def _content(tar: Any, shard: str, changed: int, name: str, member: tarfile.TarInfo) -> Any:
    if name in IMAGE_FIELDS:
        return Place(shard, member.offset_data, member.size, changed)
    return None if tar is None else tar.extractfile(member).read()
