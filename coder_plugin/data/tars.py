"""Tar files of WebDataset: their members, their integrity, and which fields are images."""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any, NoReturn

import webdataset as wds

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.decode import PICTURES
from coder_plugin.data.regions.base import warn_once
from coder_plugin.data.remote import open_remote
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular
from coder_plugin.locations import is_local

REGIONS = "npz"
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
_NOT_OCTAL = re.compile(rb"[89]")
_EXPANSION = 100, 1 << 30  # a compressed shard may expand so many times, and by so many bytes in any case
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
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> CheckedTarInfo:
        """A header of 512 bytes. The usual one of a file is read here, in a third of the time, without owner, rights and date;
        ``tarfile`` reads all others."""
        digits, checksum = buf[124:135], buf[148:154]
        plain = (
            len(buf) == tarfile.BLOCKSIZE
            and buf[156:157] == tarfile.REGTYPE
            and not buf[345]  # no prefix of the name
            and digits.isdigit()
            and not buf[135]
            and checksum.isdigit()
            and buf[154:156] == b"\0 "
            and not _NOT_OCTAL.search(digits + checksum)
        )
        if not plain or sum(buf) - sum(buf[148:156]) + 8 * 0x20 != int(checksum, 8):
            return super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        header = cls(bytes(buf[:100]).partition(b"\0")[0].decode(encoding, errors))
        header.size = int(digits, 8)
        return header

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


class Files:
    """Counts the files of shards by field, and those that belong to no sample by the reason, with an example of each.

    Example:
        >>> files = Files()
        >>> for name in ("a.jpg", "a.npy", "v1.5.jpg"):
        ...     _ = files.add(tarfile.TarInfo(name))
        >>> str(files)
        "1 with a further dot in the name, such as 'v1.5.jpg' (webdataset ends a sample's name at the first dot); 1 .npy"
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, member: tarfile.TarInfo) -> tuple[str, str] | None:
        """Count a file. Returns the sample and the field (in lower case) that it is; None if it is not read."""
        if not member.isreg():
            if not member.isdir() and not _NOTE.match(member.name):
                self._count(_LINKS if member.islnk() or member.issym() else "special files", member.name)
            return None
        if _NOTE.match(member.name):
            return None
        stem, field = wds.tariterators.base_plus_ext(member.name)
        if stem is None:
            self._count("without an ending", member.name)
            return None
        field = field.lower()
        if field in FIELDS:
            self.counts[f".{field}"] += 1
            return stem, field
        ending = field.rpartition(".")[2]
        self._count(_DOTS if ending in FIELDS else f".{ending}", member.name)
        return None

    def _count(self, kind: str, name: str) -> None:
        if kind not in self.counts and len(self.counts) >= _MOST_KINDS:
            kind = "other files"
        self.counts[kind] += 1
        self.examples.setdefault(kind, name)

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
        for kind in (*_ADVICE, *sorted(self.examples.keys() - _ADVICE.keys())):
            if self.counts[kind]:
                example = "" if kind.startswith(".") else f", such as {self.examples[kind]!r}"
                advice = f" ({_ADVICE[kind]})" if kind in _ADVICE else ""
                shown.append(f"{self.counts[kind]:,} {kind}{example}{advice}")
        return "; ".join(shown)


def too_large(field: str, size: int) -> BadSample | None:
    """The fault of a sample's file of so many bytes; None if it may be read."""
    most = LARGEST_TEXT if field in _TEXTS else LARGEST_FILE
    return BadSample("file", f"its {field} has {size:,} bytes, more than {most:,}") if size > most else None


def stream(shard: str, left_out: Callable[[str], bool], files: Files) -> Iterator[dict[str, Any]]:
    """The samples of a shard, local or not, as webdataset yields them: ``__key__``, and contents by field in lower case.

    A field that is too large (:func:`too_large`) or occurs twice has a ``BadSample`` in place of its content.

    Args:
        shard: path, URL or ``pipe:``.
        left_out: whether a field is not read after all; it is asked after the samples before have been yielded.
        files: counts the shard's files.
    """
    sample: dict[str, Any] = {}
    most = max(_EXPANSION[0] * os.path.getsize(local_path(shard)), _EXPANSION[1]) if is_local(shard) else None
    with open_shard(shard) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=CheckedTarInfo) as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header
            if most is not None and member.offset_data + member.size > most:
                raise tarfile.ReadError(f"it expands to over {most:,} bytes: a decompression bomb")
            name = files.add(member)
            if name is None:
                continue
            stem, field = name
            if sample and stem != sample["__key__"]:
                yield sample
                sample = {}
            if left_out(field):
                continue
            sample.setdefault("__key__", stem)
            add_file(sample, field, member, lambda member=member: tar.extractfile(member).read())  # type: ignore[union-attr,misc]
    if sample:
        yield sample


def add_file(sample: dict[str, Any], field: str, member: tarfile.TarInfo, read: Callable[[], Any]) -> None:
    """Add a file's content to a sample, or a ``BadSample`` in its place."""
    if member.name != f"{sample.get('__key__')}.{field}":  # in capitals
        sample.setdefault("__names__", {})[field] = member.name
    if field in sample:
        sample[field] = BadSample("file", f"two files .{field}")
    else:
        sample[field] = too_large(field, member.size) or read()


class ImageField:
    """Which field of a shard's samples is the image: a picture, or regions in ``npz`` for samples without a picture.

    Other tools store other arrays in ``npz``. They are no regions if the shard's first sample has a picture, or an archive
    without ``features``; the shard's archives are then not read.
    """

    def __init__(self, shard: str, regions: bool | None = None) -> None:
        self._shard = shard
        self.regions = regions  # None: not yet determined

    def select(self, fields: Collection[str], has_regions: bool | None) -> str:
        """The image's field in the next sample, "" if it has none.

        While :attr:`regions` is None, ``has_regions`` is the result of :func:`has_features` for the sample's archive.
        """
        picture = next((field for field in PICTURES if field in fields), "")
        if self.regions is None:
            if picture and has_regions:
                warn_once(self._shard, f"its samples have pictures and regions ({REGIONS}): the pictures are used")
            self.regions = False if picture else has_regions
        return picture or (REGIONS if REGIONS in fields and self.regions is not False else "")


def has_features(file: IO[bytes]) -> bool | None:
    """Whether an ``npz`` archive has an array ``features``, from its table of contents; None where it is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            return "features.npy" in archive.namelist()
    except Exception:  # zipfile raises many kinds of errors on damaged files
        return None


def local_path(shard: str) -> str:
    return shard.removeprefix("file://").removeprefix("file:")


def open_local(shard: str) -> IO[bytes]:
    """Open a shard that :func:`~coder_plugin.locations.is_local`, by its path alone; ``OSError`` if it is no regular file."""
    return open_regular(local_path(shard), "rb")


def headers(shard: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The headers in a local shard, which may be compressed, each with the open tar file.

    Raises:
        CoderError: the tar file is damaged.
    """
    try:
        with open_local(shard) as file, tarfile.open(fileobj=file, tarinfo=CheckedTarInfo) as tar:
            length = os.path.getsize(local_path(shard))
            compressed = not isinstance(tar.fileobj, io.BufferedReader)
            for member in tar:
                end = member.offset_data + member.size
                if compressed and end > _EXPANSION[1] and end > _EXPANSION[0] * length:
                    raise tarfile.ReadError(f"{length:,} bytes expand to over {end:,}: a decompression bomb")
                yield tar, member
    except CoderError:
        raise
    except Exception as exc:
        unreadable(shard, exc)


def members(shard: str) -> Iterator[tuple[tarfile.TarFile, str, str, tarfile.TarInfo]]:
    """The files in a local shard as (tar file, sample, field, header), from headers alone; errors as of :func:`headers`."""
    for tar, member in headers(shard):
        stem, field = wds.tariterators.base_plus_ext(member.name)
        if member.isreg() and stem is not None:
            yield tar, stem, field.lower(), member


def open_shard(shard: str) -> AbstractContextManager[IO[bytes]]:
    """A context with the content of a shard, local or not, readable from its start to its end."""
    return open_local(shard) if is_local(shard) else open_remote(shard)


def unreadable(shard: str, exc: Exception) -> NoReturn:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc.args[0] if exc.args else exc)
    reason = " ".join(reason.split()) or type(exc).__name__
    raise CoderError(f"shard {shard!r} cannot be read: {reason}") from exc
