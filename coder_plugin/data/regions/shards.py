"""Region shards: WebDataset tar files with ``npz`` (:mod:`coder_plugin.data.regions.arrays`) and ``json`` for each image.

``json`` holds ``image_id``, the image's name, and ``captions`` if there are any. A folder holds its splits side by side as
``{split}-000000.tar``, ``{split}-000001.tar`` … of 1,000 images, and ``sizes.json`` their numbers of images. The reader
``webdataset`` reads such shards for training; here single images are looked up by name.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import decode_npz, encode_npz
from coder_plugin.data.regions.base import Record, RegionFormat, Regions, entry_errors, log, staged_split
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, open_regular

SHARD_SIZE = 1000
SIZES = "sizes.json"
_NAME = re.compile(r"(.+)-\d+\.tar")


class ShardFile(Mapping[str, Regions]):
    """The images of region shards by name (a :data:`~coder_plugin.data.regions.base.RegionFile`).

    ``captions`` maps the names of captioned images to their captions, ``damaged`` the samples that cannot be found by name to
    the reason.

    Args:
        path: folders, or local shards as the reader ``webdataset`` takes them (braces, ``*``), joined by ``::``.
        split: which of a folder's splits (for ``val`` also ``dev``); not used for a list of shards.

    Raises:
        CoderError: no such shards, damaged tar files, no regions in them, or an image that occurs twice.
    """

    def __init__(self, path: str, *, split: str = "train") -> None:
        self.path = path
        self._shards = _shards(path, split)
        self.files = tuple(self._shards)
        self._places: dict[str, Any] = {}
        self.captions: dict[str, tuple[str, ...]] = {}
        self.damaged: dict[str, str] = {}
        for shard in self._shards:
            self._index(shard)
        if self.damaged:
            first = next(iter(self.damaged.values()))
            log.warning("%s: left out %d samples; the first: %s", path, len(self.damaged), first)
        if not self._places:
            raise CoderError(f"{path}: no regions (field npz) in {len(self._shards)} shards")

    def __getitem__(self, name: str) -> Regions:
        place = self._places[name]
        with entry_errors(place.shard, name):
            return decode_npz(place.read(), place.shard)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the image
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _index(self, shard: str) -> None:
        from coder_plugin.data.shards import read_metadata
        from coder_plugin.data.tar_index import samples
        from coder_plugin.data.tars import Files

        files = Files()
        for sample in samples(shard, files):
            name, captions = sample.key, tuple[str, ...]()
            regions, note = (sample.contents.get(field) for field in ("npz", "json"))
            try:
                if fault := next((each for each in (regions, note) if isinstance(each, BadSample)), None):
                    raise fault
                name, captions = _named(sample.key, read_metadata(note))
                if regions is None:
                    raise BadSample("regions", "it has no regions (field npz)")
            except BadSample as fault:
                self.damaged[name] = f"{shard}: sample {sample.key!r}: {fault}"
                continue
            if name in self._places:
                other = self._places[name].shard
                raise CoderError(f"{shard}: image {name!r} occurs {'twice' if other == shard else f'in {other}, too'}")
            self._places[name] = regions
            if captions:
                self.captions[name] = captions
        if files.lose_samples:
            log.warning("%s: files that are not read: %s", shard, files)


def write(path: str, records: Iterable[Record], *, split: str = "train", shard_size: int = SHARD_SIZE) -> int:
    """Write ``records`` as shards of a split into the folder ``path``; returns their number.

    Raises:
        CoderError: ``path`` names tar files instead of a folder or already has the split, or there are no records.
    """
    if _is_pattern(path):
        raise CoderError(
            f"{path}: region shards are written into a folder, as {split}-000000.tar …: give the folder's name"
        )
    if existing := _of_split(path, split):
        raise CoderError(
            f"{path}: already has {os.path.basename(existing[0])}; remove split {split!r} there or choose another"
        )
    sizes: dict[str, int] = {}
    with staged_split(path, split) as temporary:
        remaining = iter(records)
        for first in remaining:
            name = f"{split}-{len(sizes):06d}.tar"
            sizes[name] = write_shard(os.path.join(temporary, name), chain([first], islice(remaining, shard_size - 1)))
        if not sizes:
            raise CoderError(f"{path}: no images to write as split {split!r}")
    add_sizes(path, sizes)
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


def add_sizes(folder: str, sizes: Mapping[str, int]) -> None:
    """Update ``sizes.json``, which may list other splits; entries of files that no longer exist are dropped."""
    path = os.path.join(folder, SIZES)
    entries: Any = {}
    with suppress(FileNotFoundError, ValueError), open_regular(path, encoding="utf-8") as file:
        entries = parse_json(file.read())
    items = entries.items() if isinstance(entries, dict) else ()
    existing = {name: size for name, size in items if os.path.exists(os.path.join(folder, name))}
    with atomic_write(path, "w") as file:
        json.dump(existing | dict(sizes), file, indent=1)


def matches(path: str) -> bool:
    """Tar files, a folder with some, or a folder that does not exist yet and whose name ends in "shards"."""
    if os.path.isdir(path) and os.listdir(path):
        return any(name.endswith(".tar") for name in os.listdir(path))
    return _is_pattern(path) or os.path.basename(os.path.normpath(path)).endswith("shards")


def splits(path: str) -> list[str]:
    """The splits of a folder; none of a list of shards."""
    if not os.path.isdir(path):
        return []
    return sorted({match[1] for match in map(_NAME.fullmatch, os.listdir(path)) if match})


def _is_pattern(path: str) -> bool:
    return not os.path.isdir(path) and (path.endswith(".tar") or "::" in path or "{" in path or glob.has_magic(path))


def _of_split(folder: str, split: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(split)}-[0-9]*.tar")))


def _shards(path: str, split: str) -> list[str]:
    from coder_plugin.data.shard_lists import expand  # imports torch, which writing does not need
    from coder_plugin.data.tars import local_path
    from coder_plugin.locations import is_local

    shards: list[str] = []
    for part in path.split("::"):
        if not os.path.isdir(part):
            found = expand(part)
        elif not (found := _of_split(part, split) or (_of_split(part, "dev") if split == "val" else [])):
            tars = sorted(name for name in os.listdir(part) if name.endswith(".tar"))
            hint = f"splits present: {', '.join(splits(part)) or 'none'}"
            advice = f"; for the images of all of them give '{os.path.join(part, '*.tar')}'" if tars else ""
            raise CoderError(f"{part}: no {split}-*.tar; {hint}{advice}")
        shards += found
    if not all(map(is_local, shards)):
        raise CoderError(f"{path}: images can be looked up by name in local shards only; copy the shards here")
    return list(map(local_path, shards))


def _named(stem: str, metadata: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    captions = metadata.get("captions") or []
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise BadSample("caption", "'captions' in its json field is not a list of texts")
    return str(stem if metadata.get("image_id") is None else metadata["image_id"]), tuple(captions)


SHARDS = RegionFormat(open=ShardFile, write=write, matches=matches, splits=splits)
