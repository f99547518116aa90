"""Tar files of WebDataset: which of their files belong to which sample, read in order, and their integrity."""

from __future__ import annotations

import math
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import webdataset as wds

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.decode import PICTURES
from coder_plugin.data.remote import open_remote
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular
from coder_plugin.locations import is_local

REGIONS = "npz"
#: Fields of a sample that may be its image, in the order in which they are looked for.
IMAGE_FIELDS = (*PICTURES, REGIONS)
#: Largest files of a sample in bytes: texts, and anything else that is read.
LARGEST_TEXT, LARGEST_FILE = 16 << 20, 256 << 20
_TEXTS = ("txt", "json")
#: Fields of a sample that are read.
FIELDS = frozenset((*IMAGE_FIELDS, *_TEXTS))
#: Members that hold no file but properties of the next ones, read as a whole, and their largest size in bytes.
_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_LARGEST_HEADER = 1 << 20
_NOTE = re.compile(r"__[^/]*__($|/)")  # webdataset's notes on a shard
_EXPANSION = 100, 1 << 30  # a compressed shard may expand so many times, and by so many bytes in any case
_PACKED = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"  # how files of gzip, bzip2 and xz begin
#: Kinds of files that are not read because of what they are or how they are called, and what to do about each.
_LINKS, _DOTS = "links", "with a further dot in the name"
_ADVICE = {
    _LINKS: "write the files themselves: tar --dereference --hard-dereference",
    _DOTS: "webdataset ends a sample's name at the first dot",
}
_MOST_KINDS = 20


class CheckedTarInfo(tarfile.TarInfo):
    """A header that is refused where its size would lead back in the file or fill the memory.

    ``tarfile`` trusts sizes: a negative one makes some versions of it read the same header for ever.
    """

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> CheckedTarInfo:  # type: ignore[override]
        """The next header. ``tarfile`` takes a damaged one, and a file that is cut off between members, for the end."""
        try:
            return super().fromtarfile(tarfile_)  # type: ignore[return-value]
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # zeros: the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"truncated or damaged at byte {tarfile_.offset}: {error}") from None  # type: ignore[attr-defined]

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError(f"a header with the size {count}")
        return super()._block(count)  # type: ignore[misc, no-any-return]

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


@dataclass
class Files:
    """Counts the files of shards by field, and those that are not read by the reason, with an example of each.

    Example:
        >>> files = Files()
        >>> for name in ("a.jpg", "a.npy", "v1.5.jpg"):
        ...     _ = files.add(tarfile.TarInfo(name))
        >>> str(files)
        "1 with a further dot in the name, such as 'v1.5.jpg' (webdataset ends a sample's name at the first dot); 1 .npy"
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of the kinds that are not read

    def add(self, member: tarfile.TarInfo) -> tuple[str, str] | None:
        """Count a file. Returns the sample and the field (in lower case) that it is; None if it is not read."""
        if member.isdir() or _NOTE.match(member.name):
            return None
        stem, name = wds.tariterators.base_plus_ext(member.name)
        ending = (name or "").lower()
        last = ending.rpartition(".")[2]
        if not member.isreg():
            kind = _LINKS if member.islnk() or member.issym() else "special files"
        elif stem is None:
            kind = "without an ending"
        elif ending in FIELDS:
            self.counts[f".{ending}"] += 1
            return stem, ending
        else:
            kind = _DOTS if last in FIELDS else f".{last}"
        self.leave_out(kind, member.name)
        return None

    def leave_out(self, kind: str, name: str) -> None:
        """Count a file that is not read."""
        if kind not in self.counts and len(self.counts) >= _MOST_KINDS:
            kind = "other files"
        self.counts[kind] += 1
        self.examples.setdefault(kind, name)

    def add_sample(self, sample: Sample) -> None:
        """Count an archive beside a picture, where other tools store other arrays."""
        if REGIONS in sample.contents and sample.image != REGIONS:
            self.leave_out(f".{REGIONS} beside pictures", sample.names[REGIONS])

    def update(self, other: Files) -> None:
        """Add what another has counted."""
        self.counts.update(other.counts)
        self.examples = {**other.examples, **self.examples}

    @property
    def lose_samples(self) -> bool:
        """Whether files are not read that were probably meant to be."""
        return any(self.counts[kind] for kind in _ADVICE)

    def __str__(self) -> str:
        shown = []
        for kind in sorted(self.examples, key=lambda kind: (kind not in _ADVICE, kind)):
            example = "" if kind.startswith(".") else f", such as {self.examples[kind]!r}"
            advice = f" ({_ADVICE[kind]})" if kind in _ADVICE else ""
            shown.append(f"{self.counts[kind]:,} {kind}{example}{advice}")
        return "; ".join(shown)


@dataclass
class Sample:
    """The files of one sample of a shard.

    Args:
        key: its name.
        start, end: where its files are in the shard, in bytes.
        contents: of its files by field; a ``BadSample`` where a file is too large or occurs twice.
        names: of its files by field.
    """

    key: str
    start: int
    end: int = 0
    contents: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def image(self) -> str:
        """The image's field: a picture or, for samples without one, regions; "" if it has none."""
        return next((name for name in IMAGE_FIELDS if name in self.contents), "")


def samples_of(
    tar: tarfile.TarFile,
    files: Files,
    read: Callable[[str, tarfile.TarInfo], Any],
    *,
    end: float = math.inf,
    limit: float = math.inf,
) -> Iterator[Sample]:
    """The samples from a tar file's position on, as webdataset divides its files.

    Args:
        tar: open for reading.
        files: counts the files.
        read: ``read(field, header)`` -> the content of a file; called for those that are not too large.
        end: where to stop, in bytes.
        limit: bytes that it may have, unpacked.
    """
    sample: Sample | None = None
    archive: Any = tar  # with attributes that are not in the types
    while archive.offset < end and (member := tar.next()) is not None:
        archive.members = []  # tarfile keeps every header
        if member.offset_data + member.size > limit:
            raise tarfile.ReadError(f"it expands to over {limit:,} bytes: a decompression bomb")
        if (place := files.add(member)) is None:
            continue
        stem, name = place
        if sample is not None and sample.key != stem:
            yield sample
            sample = None
        if sample is None:
            sample = Sample(stem, member.offset)
        most = LARGEST_TEXT if name in _TEXTS else LARGEST_FILE
        if name in sample.contents:
            sample.contents[name] = BadSample("file", f"two files .{name}")
        elif member.size > most:
            sample.contents[name] = BadSample("file", f"its {name} has {member.size:,} bytes, more than {most:,}")
        else:
            sample.contents[name] = read(name, member)
        sample.names[name], sample.end = member.name, archive.offset
    if sample is not None:
        yield sample


def stream(shard: str, files: Files) -> Iterator[Sample]:
    """The samples of a shard, local or not, compressed or not, read from its start to its end, with their contents.

    Raises:
        CoderError: it cannot be read, or is damaged.
    """
    limit = max(_EXPANSION[0] * os.path.getsize(local_path(shard)), _EXPANSION[1]) if is_local(shard) else math.inf
    opening: Callable[[str], AbstractContextManager[IO[bytes]]] = open_local if is_local(shard) else open_remote
    with shard_errors(shard), opening(shard) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=CheckedTarInfo) as tar:
        for sample in samples_of(tar, files, lambda _, member: tar.extractfile(member).read(), limit=limit):  # type: ignore[union-attr]
            files.add_sample(sample)
            yield sample


@contextmanager
def open_tar(shard: str) -> Iterator[tarfile.TarFile]:
    """A local shard that is not compressed.

    Raises:
        CoderError: it is compressed or damaged; any error of the block is one of the shard.
    """
    with shard_errors(shard), open_local(shard) as file:
        if file.read(5).startswith(_PACKED):
            raise tarfile.ReadError("it is compressed as a whole: name it .tar.gz, or unpack it")
        file.seek(0)
        yield tarfile.TarFile(fileobj=file, tarinfo=CheckedTarInfo)


def members(shard: str) -> Iterator[tarfile.TarInfo]:
    """The headers of the files in a local shard; errors as of :func:`open_tar`."""
    with open_tar(shard) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]
            if member.isreg():
                yield member


def local_path(shard: str) -> str:
    return shard.removeprefix("file://").removeprefix("file:")


def open_local(shard: str) -> IO[bytes]:
    """Open a shard that :func:`~coder_plugin.locations.is_local`, by its path alone; ``OSError`` if it is no regular file."""
    return open_regular(local_path(shard), "rb")


@contextmanager
def shard_errors(shard: str) -> Iterator[None]:
    """Turn any error into a ``CoderError`` that names the shard."""
    try:
        yield
    except CoderError:
        raise
    except Exception as exc:  # tarfile and the decompressors raise many kinds
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc.args[0] if exc.args else exc)
        reason = " ".join(reason.split()) or type(exc).__name__
        raise CoderError(f"shard {shard!r} cannot be read: {reason}") from exc
