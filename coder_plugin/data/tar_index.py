"""Samples of local shards by their places: found from headers alone, and each read without those before it."""

from __future__ import annotations

import io
import tarfile
import weakref
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from coder_plugin.data.tars import (
    FIELDS,
    IMAGE_FIELDS,
    REGIONS,
    CheckedTarInfo,
    ImageField,
    add_file,
    has_features,
    members,
    open_local,
    sample_file,
    too_large,
    unreadable,
)
from coder_plugin.errors import CoderError


@dataclass
class TarIndex:
    """Where the samples of a shard are, in 8 bytes a sample.

    Args:
        starts: the place of each sample's first file, and at last where the samples end; in bytes.
        images: number of samples with an image.
        regions: whether ``npz`` files are regions; None where it could not be determined.
        undecided: number of samples at the start that were needed to determine this.
        seekable: whether samples can be read by their places: not so in a tar file that is compressed as a whole.
        pax_headers: properties of all files.
        captions: number of captions of each sample, at least 1, where they have been counted.
    """

    starts: array[int] = field(default_factory=lambda: array("Q"))
    images: int = 0
    regions: bool | None = None
    undecided: int = 0
    seekable: bool = True
    pax_headers: dict[str, str] = field(default_factory=dict)
    captions: array[int] | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def regions_before(self, number: int) -> bool | None:
        """What is known of :attr:`regions` before a sample is read."""
        return None if number < self.undecided else self.regions


def scan(shard: str) -> TarIndex:
    """The index of a local shard, whose headers are read, and at most a few of its ``npz`` files.

    Args:
        shard: its path.

    Raises:
        CoderError: the tar file is damaged.
    """
    index, image = TarIndex(), ImageField(shard)
    stem, found, has_regions, end = None, set[str](), None, 0

    def finish() -> None:
        index.undecided += image.regions is None
        index.images += bool(image.select(found, has_regions))

    for tar, _, _, member in members(shard):
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header
        name = sample_file(member)
        if name is None or name[1] not in FIELDS:
            continue
        if name[0] != stem:
            if stem is not None:
                finish()
            if name[1] == REGIONS and image.regions is False:
                stem = None
                continue
            stem, found, has_regions = name[0], set(), None
            index.starts.append(member.offset)
        elif name[1] == REGIONS and image.regions is False:
            continue
        found.add(name[1])
        if name[1] == REGIONS and image.regions is None and too_large(REGIONS, member.size) is None:
            has_regions = has_features(tar.extractfile(member))  # type: ignore[arg-type]  # of a regular file never None
        end = tar.offset  # type: ignore[attr-defined]
        index.seekable = isinstance(tar.fileobj, io.BufferedReader)
        index.pax_headers = dict(tar.pax_headers)
    if stem is not None:
        finish()
    index.starts.append(end)
    index.regions = image.regions
    return index


@dataclass(frozen=True)
class Place:
    """The content of a file in a local shard, read when it is needed.

    Args:
        shard: the path of the tar file.
        offset: where the content begins, in bytes.
        size: its length in bytes.
    """

    shard: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The content; ``CoderError`` if the shard is no longer what it was."""
        try:
            with open_local(self.shard) as file:
                file.seek(self.offset)
                content = file.read(self.size)
            if len(content) < self.size:
                raise tarfile.ReadError(f"it ends before byte {self.offset + self.size}: it has changed")
        except Exception as exc:
            unreadable(self.shard, exc)
        return content


#: Shards that readers of a process keep open.
MOST_OPEN = 64
_opened: OrderedDict[int, weakref.ref[TarReader]] = OrderedDict()


class TarReader:
    """Reads samples of a local shard by their places. Within a shard's order it reads on; else it seeks.

    Args:
        shard: the path of the tar file.
        index: of it (:func:`scan`).
    """

    def __init__(self, shard: str, index: TarIndex) -> None:
        self._tar: tarfile.TarFile | None = None
        self._shard, self._index = shard, index

    def read(self, number: int, *, images: bool = True) -> dict[str, Any]:
        """A sample as of :func:`~coder_plugin.data.tars.stream`.

        Args:
            number: its position in the shard.
            images: whether to read its images too; else they are a :class:`Place` each.

        Raises:
            CoderError: the shard is no longer what it was.
        """
        try:
            return self._read(number, images)
        except CoderError:
            raise
        except Exception as exc:
            unreadable(self._shard, exc)

    def _read(self, number: int, images: bool) -> dict[str, Any]:
        tar = self._open()
        start, end = self._index.starts[number : number + 2]
        tar.offset = start  # type: ignore[attr-defined]
        tar.fileobj.seek(start)  # type: ignore[union-attr]  # next() seeks too, but not to the file's start
        left_out = {REGIONS} if self._index.regions_before(number) is False else set()
        sample: dict[str, Any] = {}
        while tar.offset < end:  # type: ignore[attr-defined]
            member = tar.next()
            tar.members = []  # type: ignore[attr-defined]
            if member is None or member.offset >= end:
                raise tarfile.ReadError(f"no sample is at byte {start}: it has changed")
            name = sample_file(member)
            if name is None or name[1] not in FIELDS or name[1] in left_out:
                continue
            if sample.setdefault("__key__", name[0]) != name[0]:
                if name[1] == REGIONS and self._index.regions is False:
                    continue  # left out once this sample has determined it
                raise tarfile.ReadError(f"two samples are at byte {start}: it has changed")
            if images or name[1] not in IMAGE_FIELDS:
                content: Any = lambda member=member: tar.extractfile(member).read()  # type: ignore[union-attr,misc]  # noqa: E731
            else:
                content = lambda member=member: Place(self._shard, member.offset_data, member.size)  # noqa: E731
            add_file(sample, name[1], member, content)
        return sample

    def _open(self) -> tarfile.TarFile:
        _opened.pop(id(self), None)
        _opened[id(self)] = weakref.ref(self)  # the last one used
        if self._tar is None:
            while len(_opened) > MOST_OPEN:
                _, oldest = _opened.popitem(last=False)
                if (reader := oldest()) is not None:
                    reader.close()
            self._tar = tarfile.open(fileobj=open_local(self._shard), mode="r:", tarinfo=CheckedTarInfo)
            self._tar.firstmember = None  # type: ignore[attr-defined]  # it was read to recognise a tar file
            self._tar.pax_headers = dict(self._index.pax_headers)
        return self._tar

    def close(self) -> None:
        """Close the file. Another :meth:`read` opens it again."""
        if self._tar is not None:
            self._tar.fileobj.close()  # type: ignore[union-attr]
            self._tar = None

    def __del__(self) -> None:
        self.close()
