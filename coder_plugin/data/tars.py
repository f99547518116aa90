"""Tar files of WebDataset: their members, their integrity, and which fields are images."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Collection, Iterator
from itertools import groupby
from operator import itemgetter
from typing import IO, NoReturn

import webdataset as wds

from coder_plugin.data.regions.base import warn_once
from coder_plugin.data.source import PICTURES
from coder_plugin.errors import CoderError

REGIONS = "npz"
IMAGE_FIELDS = (*PICTURES, REGIONS)


class ImageField:
    """Which field of a shard's samples is the image: a picture, or regions in ``npz`` for samples without a picture.

    Other tools store other arrays in ``npz``. They are no regions if the shard's first sample has a picture, or an archive
    without ``features``; the shard's archives are then not read.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self.regions: bool | None = None  # None: not yet determined

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
    except (zipfile.BadZipFile, tarfile.TarError, OSError, ValueError, NotImplementedError):
        return None


def is_local(shard: str) -> bool:
    return shard.startswith("file:") or not (shard.startswith("pipe:") or "://" in shard)


def local_path(shard: str) -> str:
    return shard.removeprefix("file://").removeprefix("file:")


def scan(shard: str) -> int:
    """The number of samples with an image, from headers alone; ``CoderError`` where the tar file is damaged.

    (Reading alone would not notice: tarfile treats a broken header or a file truncated between members as its end.)
    """
    image, count = ImageField(shard), 0
    for _, files in groupby(members(shard), key=itemgetter(1)):
        has_regions: bool | None = None
        fields = set()
        for tar, _, field, member in files:
            fields.add(field)
            if field == REGIONS and image.regions is None:
                has_regions = has_features(tar.extractfile(member))  # type: ignore[arg-type]  # of a regular file never None
        count += bool(image.select(fields, has_regions))
    return count


def members(shard: str) -> Iterator[tuple[tarfile.TarFile, str, str, tarfile.TarInfo]]:
    """The files in a shard as (tar file, sample, field, header); ``CoderError`` where it is damaged, as in :func:`scan`."""
    try:
        with tarfile.open(local_path(shard)) as tar:
            for member in tar:
                stem, field = wds.tariterators.base_plus_ext(member.name)
                if member.isreg() and stem is not None:
                    yield tar, stem, field.lower(), member
            tar.fileobj.seek(tar.offset)  # type: ignore[union-attr]
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # type: ignore[union-attr]
                raise tarfile.ReadError(f"truncated or damaged at byte {tar.offset}")
    except CoderError:
        raise
    except Exception as exc:
        unreadable(shard, exc)


def unreadable(shard: str, exc: Exception) -> NoReturn:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc.args[0] if exc.args else exc)
    reason = " ".join(reason.split()) or type(exc).__name__
    raise CoderError(f"shard {shard!r} cannot be read: {reason}") from exc
