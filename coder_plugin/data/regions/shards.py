"""Region shards: WebDataset tar files with ``npz`` (:mod:`coder_plugin.data.regions.arrays`) and ``json`` for each image.

``json`` holds ``image_id``, the image's name, and ``captions`` if there are any. A folder holds its splits side by side as
``{split}-000000.tar``, ``{split}-000001.tar`` … of 1,000 images, and ``sizes.json`` their numbers of images. The reader
``webdataset`` streams such shards for training; here single images are looked up by name.
"""

from __future__ import annotations

import glob
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import decode_npz, encode_npz
from coder_plugin.data.regions.base import (
    IndexedRegions,
    Record,
    RegionFormat,
    Regions,
    entry_errors,
    read_at,
    warn_once,
)
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, open_regular

SHARD_SIZE = 1000
SIZES = "sizes.json"


class ShardFile(IndexedRegions):
    """The images of region shards by name (a :data:`~coder_plugin.data.regions.base.RegionFile`).

    ``captions`` maps the names of captioned images to their captions.

    Args:
        path: a folder, or local shards as the reader ``webdataset`` takes them: braces, ``*``, ``::``.
        split: which of a folder's splits; not used for a list of shards.
    """

    def __init__(self, path: str, *, split: str = "train") -> None:
        self._shards = _shards(path, split)
        places: dict[str, tuple[int, int, int]] = {}  # shard, first byte, length
        self.captions: dict[str, tuple[str, ...]] = {}
        for number, shard in enumerate(self._shards):
            for name, captions, member in _index(shard):
                if name in places:
                    other = self._shards[places[name][0]]
                    raise CoderError(
                        f"{shard}: image {name!r} occurs {'twice' if other == shard else f'in {other}, too'}"
                    )
                places[name] = number, member.offset_data, member.size
                if captions:
                    self.captions[name] = captions
        if not places:
            raise CoderError(f"{path}: no regions (field npz) in {len(self._shards)} shards")
        super().__init__(path, places)

    def _read(self, name: str, place: tuple[int, int, int]) -> Regions:
        number, offset, size = place
        with entry_errors(self._shards[number], name):
            return decode_npz(read_at(self._shards[number], offset, size), self._shards[number])


def write(path: str, records: Iterable[Record], *, split: str = "train", shard_size: int = SHARD_SIZE) -> int:
    """Write ``records`` as shards of a split into the folder ``path``; returns their number.

    All shards are written to a temporary folder before the first is renamed.

    Raises:
        CoderError: ``path`` names tar files instead of a folder or already has the split, there are no records, or a name
            occurs twice.
    """
    if not _may_be_folder(path):
        raise CoderError(
            f"{path}: region shards are written into a folder, as {split}-000000.tar …: give the folder's name"
        )
    if existing := _of_split(path, split):
        raise CoderError(
            f"{path}: already has {os.path.basename(existing[0])}; remove split {split!r} there or choose another"
        )
    temporary = os.path.join(path, f".{split}.{os.getpid()}.part")
    os.makedirs(temporary)
    sizes: dict[str, int] = {}
    try:
        remaining = _each_once(path, records)
        for first in remaining:
            name = f"{split}-{len(sizes):06d}.tar"
            sizes[name] = write_shard(os.path.join(temporary, name), chain([first], islice(remaining, shard_size - 1)))
        if not sizes:
            raise CoderError(f"{path}: no images to write as split {split!r}")
        for name in sizes:
            os.replace(os.path.join(temporary, name), os.path.join(path, name))
        _add_sizes(path, sizes)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(sizes.values())


def write_shard(path: str, records: Iterable[Record]) -> int:
    """Write one shard atomically; equal records give equal bytes. Returns their number."""
    count = 0
    with atomic_write(path, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for count, record in enumerate(records, 1):
            metadata: dict[str, Any] = {"image_id": record.name}
            if record.captions:
                metadata["captions"] = record.captions
            text = json.dumps(metadata, ensure_ascii=False).encode("utf-8", "surrogatepass")
            for field, data in (("json", text), ("npz", encode_npz(record.regions))):
                member = tarfile.TarInfo(f"r{count - 1:06d}.{field}")  # a bare number would look like one of COCO's
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return count


def matches(path: str) -> bool:
    """Tar files, a folder with some, or a folder that does not exist yet and whose name ends in "shards"."""
    if os.path.isdir(path) and os.listdir(path):
        return any(name.endswith(".tar") for name in os.listdir(path))
    return not _may_be_folder(path) or os.path.basename(os.path.normpath(path)).endswith("shards")


def _may_be_folder(path: str) -> bool:
    return os.path.isdir(path) or not (path.endswith(".tar") or "::" in path or "{" in path or glob.has_magic(path))


def _of_split(folder: str, split: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(split)}-[0-9]*.tar")))


def _shards(path: str, split: str) -> list[str]:
    from coder_plugin.data.shard_lists import expand  # imports torch, which writing does not need
    from coder_plugin.data.tars import local_path
    from coder_plugin.locations import is_local

    if not os.path.isdir(path):
        shards = expand(path)
        if not all(map(is_local, shards)):
            raise CoderError(f"{path}: images can be looked up by name in local shards only; copy the shards here")
        return list(map(local_path, shards))
    if shards := _of_split(path, split):
        return shards
    tars = sorted(name for name in os.listdir(path) if name.endswith(".tar"))
    splits = sorted({name.rpartition("-")[0] for name in tars} - {""})
    hint = f"splits present: {', '.join(splits)}" if splits else f"tar files present: {', '.join(tars[:3]) or 'none'}"
    raise CoderError(f"{path}: no {split}-*.tar; {hint}")


def _index(shard: str) -> Iterator[tuple[str, tuple[str, ...], tarfile.TarInfo]]:
    """(name, captions, header of the npz field) of each image with regions. Bad samples are left out with a warning."""
    from coder_plugin.data.tars import members, too_large

    last, name = "", ""
    captions: tuple[str, ...] = ()
    npz: tarfile.TarInfo | None = None
    refused: set[str] = set()
    for tar, stem, field, member in members(shard):
        if stem != last:
            if npz is not None and last not in refused:
                yield name, captions, npz
            last, name, captions, npz = stem, stem, (), None
        try:
            if field in ("npz", "json") and (fault := too_large(field, member.size)):
                raise fault
            if field == "npz":
                npz = member
            elif field == "json":
                name, captions = _metadata(f"{shard}: sample {stem!r}", stem, tar.extractfile(member).read())  # type: ignore[union-attr]
        except BadSample as fault:
            warn_once(shard, f"left out: {fault}")
            refused.add(stem)
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header
    if npz is not None and last not in refused:
        yield name, captions, npz


def _metadata(where: str, stem: str, data: bytes) -> tuple[str, tuple[str, ...]]:
    try:
        metadata = parse_json(data)
    except ValueError as exc:
        raise BadSample("caption", f"{where}: its json field is not JSON: {exc}") from exc
    metadata = metadata if isinstance(metadata, dict) else {}
    captions = metadata.get("captions") or []
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise BadSample("caption", f"{where}: 'captions' in its json field is not a list of texts")
    return str(stem if metadata.get("image_id") is None else metadata["image_id"]), tuple(captions)


def _each_once(path: str, records: Iterable[Record]) -> Iterator[Record]:
    names: set[str] = set()
    for record in records:
        if record.name in names:
            raise CoderError(f"{path}: image {record.name!r} occurs twice")
        names.add(record.name)
        yield record


def _add_sizes(folder: str, sizes: dict[str, int]) -> None:
    """Update ``sizes.json``, which may list other splits; entries of files that no longer exist are dropped."""
    path = os.path.join(folder, SIZES)
    entries: Any = {}
    with suppress(FileNotFoundError, ValueError), open_regular(path, encoding="utf-8") as file:
        entries = parse_json(file.read())
    items = entries.items() if isinstance(entries, dict) else ()
    existing = {name: size for name, size in items if os.path.exists(os.path.join(folder, name))}
    with atomic_write(path, "w") as file:
        json.dump(existing | sizes, file, indent=1)


SHARDS = RegionFormat(open=ShardFile, write=write, matches=matches)
