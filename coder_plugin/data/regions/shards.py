"""Region shards: WebDataset tar files with ``npz`` (:mod:`coder_plugin.data.regions.arrays`) and ``json`` for each image.

``json`` has ``image_id``, the image's name, and ``captions`` where they are known. A folder holds its splits side by side
as ``{split}-000000.tar``, ``{split}-000001.tar`` … of 1,000 images, and ``sizes.json`` says how many each has. The reader
``webdataset`` trains on such shards as a stream; here single images are found by name.
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

from coder_plugin.data.regions.arrays import decode_npz, encode_npz
from coder_plugin.data.regions.base import Record, RegionFormat, Regions
from coder_plugin.data.regions.keyed import KeyedRegions, naming
from coder_plugin.data.regions.npy import read_at
from coder_plugin.errors import CoderError

SHARD_SIZE = 1000
SIZES = "sizes.json"


class ShardFile(KeyedRegions):
    """The images of region shards by name. See :data:`~coder_plugin.data.regions.base.RegionFile`.

    ``captions`` maps names to captions, of the images that have some.

    Args:
        path: a folder, or local shards as the reader ``webdataset`` takes them: braces, ``*``, ``::``.
        split: which of a folder's splits; shards named one by one are of one split.
    """

    def __init__(self, path: str, *, split: str = "train") -> None:
        self._shards = _shards(path, split)
        places: dict[str, tuple[int, int, int]] = {}  # shard, first byte, bytes
        self.captions: dict[str, tuple[str, ...]] = {}
        for number, shard in enumerate(self._shards):
            for name, captions, member in _index(shard):
                if name in places:
                    other = self._shards[places[name][0]]
                    raise CoderError(
                        f"{shard}: image {name!r} is in {'it twice' if other == shard else f'{other}, too'}"
                    )
                places[name] = number, member.offset_data, member.size
                if captions:
                    self.captions[name] = captions
        if not places:
            raise CoderError(f"{path}: no regions (field npz) in {len(self._shards)} shards")
        super().__init__(path, places)

    def _read(self, name: str, where: tuple[int, int, int]) -> Regions:
        number, offset, size = where
        with naming(self._shards[number], name):
            return decode_npz(read_at(self._shards[number], offset, size), self._shards[number])


def write(path: str, records: Iterable[Record], *, split: str = "train", shard_size: int = SHARD_SIZE) -> int:
    """Write ``records`` as shards of a split into the folder ``path``; returns their number. All shards are written
    aside before the first gets its name.

    Raises:
        CoderError: ``path`` names tar files instead of a folder, or has the split already; no records, or a name twice.
    """
    if not _may_be_folder(path):
        raise CoderError(
            f"{path}: region shards are written into a folder, as {split}-000000.tar …: give the folder's name"
        )
    if there := _of_split(path, split):
        raise CoderError(
            f"{path}: already has {os.path.basename(there[0])}; remove split {split!r} there or choose another"
        )
    aside = os.path.join(path, f".{split}.{os.getpid()}.part")
    os.makedirs(aside)
    sizes: dict[str, int] = {}
    try:
        remaining = _each_once(path, records)
        for first in remaining:
            name = f"{split}-{len(sizes):06d}.tar"
            sizes[name] = write_shard(os.path.join(aside, name), chain([first], islice(remaining, shard_size - 1)))
        if not sizes:
            raise CoderError(f"{path}: no images to write as split {split!r}")
        for name in sizes:
            os.replace(os.path.join(aside, name), os.path.join(path, name))
        _note(path, sizes)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return sum(sizes.values())


def write_shard(path: str, records: Iterable[Record]) -> int:
    """Write one shard, aside first; the same records give the same bytes. Returns their number."""
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.part")
    count = 0
    try:
        with tarfile.open(aside, "w", format=tarfile.PAX_FORMAT) as tar:
            for count, record in enumerate(records, 1):
                about: dict[str, Any] = {"image_id": record.name}
                if record.captions:
                    about["captions"] = record.captions
                text = json.dumps(about, ensure_ascii=False).encode("utf-8", "surrogatepass")
                for field, data in (("json", text), ("npz", encode_npz(record.regions))):
                    member = tarfile.TarInfo(f"r{count - 1:06d}.{field}")  # no bare number, which would pass for COCO's
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.remove(aside)
    return count


def matches(path: str) -> bool:
    """Tar files, or a folder with some; of a folder that is yet to be made, one whose name ends in "shards"."""
    if os.path.isdir(path) and os.listdir(path):
        return any(name.endswith(".tar") for name in os.listdir(path))
    return not _may_be_folder(path) or os.path.basename(os.path.normpath(path)).endswith("shards")


def _may_be_folder(path: str) -> bool:
    return os.path.isdir(path) or not (path.endswith(".tar") or "::" in path or "{" in path or glob.has_magic(path))


def _of_split(folder: str, split: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(split)}-[0-9]*.tar")))


def _shards(path: str, split: str) -> list[str]:
    from coder_plugin.data.shards import expand  # imports torch, which writing does not need
    from coder_plugin.data.tars import is_local, local_path

    if not os.path.isdir(path):
        shards = expand(path)
        if not all(map(is_local, shards)):
            raise CoderError(f"{path}: single images are found in local shards alone; copy them here")
        return list(map(local_path, shards))
    if found := _of_split(path, split):
        return found
    tars = sorted(name for name in os.listdir(path) if name.endswith(".tar"))
    splits = sorted({name.rpartition("-")[0] for name in tars} - {""})
    hint = f"splits present: {', '.join(splits)}" if splits else f"tar files there: {', '.join(tars[:3]) or 'none'}"
    raise CoderError(f"{path}: no {split}-*.tar; {hint}")


def _index(shard: str) -> Iterator[tuple[str, tuple[str, ...], tarfile.TarInfo]]:
    """(name, captions, header of the npz field) of each image that has one."""
    from coder_plugin.data.tars import members

    last, name = "", ""
    captions: tuple[str, ...] = ()
    found: tarfile.TarInfo | None = None
    for tar, stem, field, member in members(shard):
        if stem != last:
            if found is not None:
                yield name, captions, found
            last, name, captions, found = stem, stem, (), None
        if field == "npz":
            found = member
        elif field == "json":
            name, captions = _about(f"{shard}: sample {stem!r}", stem, tar.extractfile(member).read())  # type: ignore[union-attr]
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header
    if found is not None:
        yield name, captions, found


def _about(where: str, stem: str, data: bytes) -> tuple[str, tuple[str, ...]]:
    try:
        about = json.loads(data)
    except ValueError as exc:
        raise CoderError(f"{where}: its json field is not JSON: {exc}") from exc
    about = about if isinstance(about, dict) else {}
    captions = about.get("captions") or []
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise CoderError(f"{where}: 'captions' in its json field is not a list of texts")
    return str(stem if about.get("image_id") is None else about["image_id"]), tuple(captions)


def _each_once(path: str, records: Iterable[Record]) -> Iterator[Record]:
    names: set[str] = set()
    for record in records:
        if record.name in names:
            raise CoderError(f"{path}: image {record.name!r} comes twice")
        names.add(record.name)
        yield record


def _note(folder: str, sizes: dict[str, int]) -> None:
    """Add to ``sizes.json``, which may have other splits."""
    path = os.path.join(folder, SIZES)
    known: Any = {}
    if os.path.exists(path):
        with suppress(ValueError), open(path, encoding="utf-8") as file:
            known = json.load(file)
    # What is noted of files that are gone, or was damaged, goes.
    noted = known.items() if isinstance(known, dict) else ()
    known = {name: size for name, size in noted if os.path.exists(os.path.join(folder, name))}
    aside = os.path.join(folder, f".{SIZES}.{os.getpid()}.part")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(known | sizes, file, indent=1)
    os.replace(aside, path)


SHARDS = RegionFormat(open=ShardFile, write=write, matches=matches)
