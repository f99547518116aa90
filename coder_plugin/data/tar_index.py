"""Samples of local shards by number: their places are found from headers alone, and each is read without those before it."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tarfile
import threading
import time
import zipfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from coder_plugin.data.tars import (
    IMAGE_FIELDS,
    REGIONS,
    CheckedTarInfo,
    Files,
    ImageField,
    add_file,
    has_features,
    headers,
    local_path,
    open_local,
    too_large,
    unreadable,
)
from coder_plugin.data.workers import start_worker
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write

log = logging.getLogger(__name__)
#: Tar files that a process keeps open.
MOST_OPEN = 64
#: Places that took longer to find than so many seconds are kept for the next run.
_WORTH_KEEPING = 1.0
#: Shards from which on several processes read the headers, and how many.
_MANY, _PROCESSES = 200, 8
_FORMAT = 1  # of the file of places


@dataclass
class TarIndex:
    """Where the samples of a shard are, in 8 bytes a sample.

    Args:
        starts: the place of each sample's first file, and at last where the samples end; in bytes.
        images: number of samples with an image.
        regions: whether ``npz`` files are regions; None where it could not be determined.
        changed: when the shard was changed last, in nanoseconds.
        apart: a sample whose files are not next to each other; "" if there is none.
        files: the shard's files.
    """

    starts: np.ndarray[Any, np.dtype[np.uint64]]
    images: int = 0
    regions: bool | None = None
    changed: int = 0
    apart: str = ""
    files: Files = field(default_factory=Files)

    def __len__(self) -> int:
        return len(self.starts) - 1


def scan(shard: str) -> TarIndex:
    """The index of a local shard that is not compressed, whose headers are read, and at most a few of its ``npz`` files.

    Raises:
        CoderError: the tar file is damaged.
    """
    image, files, starts = ImageField(shard), Files(), array("Q")
    stem, fields, has_regions, end, images, apart = None, set[str](), None, 0, 0, ""
    changed = state_of(shard)[2]
    stems: set[str] = set()
    for tar, member in headers(shard):
        if not isinstance(tar.fileobj, io.BufferedReader):
            unreadable(shard, ValueError("it is compressed as a whole: name it .tar.gz, or unpack it"))
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header
        name = files.add(member)
        if name is None or (name[1] == REGIONS and image.regions is False):
            continue
        if name[0] != stem:
            if stem is not None:
                images += bool(image.select(fields, has_regions))
            if name[1] == REGIONS and image.regions is False:
                stem = None
                continue
            stem, fields, has_regions = name[0], set(), None
            apart = apart or (stem if stem in stems else "")
            stems.add(stem)
            starts.append(member.offset)
        fields.add(name[1])
        if name[1] == REGIONS and image.regions is None and too_large(REGIONS, member.size) is None:
            has_regions = has_features(tar.extractfile(member))  # type: ignore[arg-type]  # of a regular file never None
        end = tar.offset  # type: ignore[attr-defined]
    if stem is not None:
        images += bool(image.select(fields, has_regions))
    starts.append(end)
    return TarIndex(np.array(starts, np.uint64), images, image.regions, changed, apart, files)


def scan_all(shards: Sequence[str]) -> list[TarIndex]:
    """The indexes of local shards. Those that took over a second to make are kept in the user's folder of caches
    (``$XDG_CACHE_HOME/coder_plugin``, by default in ``~/.cache``), for shards of the same paths, sizes and times.

    Raises:
        CoderError: a tar file is damaged.
    """
    states = hashlib.sha256(repr([_FORMAT, *map(state_of, shards)]).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base, "coder_plugin", f"tars-{states}.npz")
    if (kept := _load(path, len(shards))) is not None:
        return kept
    start, processes = time.monotonic(), 0
    if len(shards) >= _MANY:
        processes = min(_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        log.info("reading the headers of %s shards", f"{len(shards):,}")
    tasks: DataLoader[Any] = DataLoader(
        list(shards),  # type: ignore[arg-type]  # a list is a data set
        batch_size=None,
        collate_fn=_scan,  # type: ignore[arg-type]  # without batch_size it receives single items
        num_workers=processes if processes > 1 else 0,
        generator=torch.Generator().manual_seed(0),  # else it would draw from the global one
        worker_init_fn=start_worker,
    )
    indexes = []
    for index in tasks:
        if isinstance(index, CoderError):
            raise index
        indexes.append(index)
    if time.monotonic() - start > _WORTH_KEEPING:
        _save(path, indexes)
    return indexes


def _scan(shard: str) -> TarIndex | CoderError:
    try:
        return scan(shard)
    except CoderError as error:  # as an object, so that a worker's traceback does not hide its message
        return CoderError(str(error))


def state_of(shard: str) -> tuple[str, int, int]:
    """What tells whether a shard is still the same: its path, size and time."""
    path = os.path.realpath(local_path(shard))
    try:
        status = os.stat(path)
    except OSError as error:
        unreadable(shard, error)
    return path, status.st_size, status.st_mtime_ns


def _save(path: Path, indexes: Sequence[TarIndex]) -> None:
    notes = [
        {"images": each.images, "regions": each.regions, "changed": each.changed, "apart": each.apart}
        | {"counts": each.files.counts, "examples": each.files.examples}
        for each in indexes
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            lengths = [len(each.starts) for each in indexes]
            starts = np.concatenate([each.starts for each in indexes])
            np.savez(file, notes=np.frombuffer(json.dumps(notes).encode(), np.uint8), lengths=lengths, starts=starts)
    except OSError as error:  # a folder that may not be written, a full disk: the next run reads the headers again
        log.info("%s: places of samples are not kept: %s", path, error)


def _load(path: Path, count: int) -> list[TarIndex] | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            notes, lengths, starts = json.loads(arrays["notes"].tobytes()), arrays["lengths"], arrays["starts"]
        if not (len(notes) == len(lengths) == count and lengths.sum() == len(starts) and starts.dtype == np.uint64):
            return None
        indexes = []
        for note, part in zip(notes, np.split(starts, np.cumsum(lengths)[:-1]), strict=True):
            files = Files()
            files.counts, files.examples = Counter(note["counts"]), dict(note["examples"])
            indexes.append(TarIndex(part, note["images"], note["regions"], note["changed"], note["apart"], files))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return indexes


class _Tar(tarfile.TarFile):
    """A tar file that is closed when it is no longer used."""

    def __del__(self) -> None:
        if self.fileobj is not None:
            self.fileobj.close()


@lru_cache(maxsize=MOST_OPEN)
def _open(shard: str, changed: int, process: int, thread: int) -> _Tar:
    """An open shard. Forked processes and threads, which would share the place in the file, have their own."""
    file = open_local(shard)
    tar = _Tar.taropen("", fileobj=file, tarinfo=CheckedTarInfo)  # type: ignore[call-arg,arg-type]
    tar.firstmember = None  # type: ignore[attr-defined]  # it was read to recognise a tar file
    return tar


def _current(shard: str, changed: int) -> _Tar:
    tar = _open(shard, changed, os.getpid(), threading.get_ident())
    if os.fstat(tar.fileobj.fileno()).st_mtime_ns != changed:  # type: ignore[union-attr,attr-defined]
        raise tarfile.ReadError("it has changed since its headers were read")
    return tar


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
        try:
            file: Any = _current(self.shard, self.changed).fileobj
            file.seek(self.offset)
            content: bytes = file.read(self.size)
            if len(content) < self.size:
                raise tarfile.ReadError(f"it ends before byte {self.offset + self.size}: it has changed")
        except Exception as exc:
            unreadable(self.shard, exc)
        return content


def read_sample(shard: str, index: TarIndex, number: int) -> dict[str, Any]:
    """A sample of a local shard as of :func:`~coder_plugin.data.tars.stream`, but with a :class:`Place` for each image.

    Args:
        shard: its location.
        index: of it.
        number: the sample's position in it.

    Raises:
        CoderError: the shard is no longer what it was.
    """
    try:
        return _read(shard, index, number)
    except CoderError:
        raise
    except Exception as exc:
        unreadable(shard, exc)


def _read(shard: str, index: TarIndex, number: int) -> dict[str, Any]:
    tar: Any = _current(shard, index.changed)
    start, end = index.starts[number : number + 2].tolist()
    tar.offset = start
    tar.fileobj.seek(start)  # next() seeks too, but not to the file's start
    files, sample = Files(), dict[str, Any]()
    while tar.offset < end:
        member = tar.next()
        tar.members = []
        if member is None or member.offset >= end:
            raise tarfile.ReadError(f"no sample is at byte {start}: it has changed")
        if (name := files.add(member)) is None:
            continue
        stem, name_field = name
        if sample.setdefault("__key__", stem) != stem:
            if name_field == REGIONS and index.regions is False:
                continue  # an archive that is not read, of a sample that has nothing else
            raise tarfile.ReadError(f"two samples are at byte {start}: it has changed")
        if name_field == REGIONS and index.regions is False:
            continue
        if name_field in IMAGE_FIELDS:
            content: Any = Place(shard, member.offset_data, member.size, index.changed)
        else:
            content = tar.extractfile(member).read() if too_large(name_field, member.size) is None else b""
        add_file(sample, name_field, member, partial(_same, content))
    return sample


def _same(content: Any) -> Any:
    return content
