"""WebDataset shards: samples of local tar files by number, remote and compressed ones as a stream.

Fields are those of open_clip and img2dataset: an image in ``jpg;png;jpeg;webp`` and a caption in ``txt``, or a list
``captions`` in ``json``. ``npz`` holds regions instead of a picture (:mod:`coder_plugin.data.regions.shards`); it is not
read where there are pictures or other arrays.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from PIL.Image import Image

from coder_plugin.data.bad_samples import BadSample, shorten
from coder_plugin.data.decode import decode_image
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import decode_npz
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.remote import check_remote, is_command
from coder_plugin.data.shard_lists import NSHARDS, benchmark_shards, beside, expand, recorded_size, shard_labels
from coder_plugin.data.source import check_captions, check_mode, check_negatives
from coder_plugin.data.streams import Stream
from coder_plugin.data.tables import other_names
from coder_plugin.data.tar_index import Place, TarIndex, read_sample, scan, scan_all, state_of
from coder_plugin.data.tars import (
    IMAGE_FIELDS,
    REGIONS,
    Files,
    ImageField,
    has_features,
    local_path,
    stream,
    unreadable,
)
from coder_plugin.errors import CoderError
from coder_plugin.locations import is_local

CAPTION_KEY = "captions"
_LONGEST_ID = 4096
_APART = ", and files of one sample are not next to each other in its shard ({!r}): sort it (tar --sort=name)"
log = logging.getLogger(__name__)


def open_shards(
    spec: str,
    *,
    split: str = "train",
    resampled: bool = False,
    caption_key: str = CAPTION_KEY,
    newline_captions: bool | None = None,
    negatives_key: str | None = None,
    metadata: Sequence[str] = (),
) -> LocalShards | ShardStream:
    """The reader ``webdataset``.

    Args:
        spec: shards, with braces, ``*`` (of local ones), ``::`` between several, ``pipe:COMMAND`` or URLs (``https://``,
            ``hf://``, ``s3://``, ``gs://``, and what fsspec can open); or a folder in CLIP_benchmark's layout, with
            ``nshards.txt`` in it or in its subfolder ``split``.
        split: used for CLIP_benchmark's folders only.
        resampled: draw shards with replacement, endlessly.
        caption_key: key of a caption or list of captions in ``json``; another than ``captions`` must be in every sample.
        newline_captions: each line of ``txt`` is a caption, as in CLIP_benchmark. Default: if all shards are local and have an
            ``nshards.txt`` in their folder.
        negatives_key: key of a list of hard negatives in ``json``, which samples may lack. None: they are not read.
        metadata: further keys of ``json`` whose values an item keeps; samples may lack them.

    Raises:
        CoderError: an empty pattern, missing shards, a faulty ``nshards.txt``, or a scheme that nothing installed reads.
    """
    shards = benchmark_shards(spec, split) if os.path.isdir(spec) else expand(spec)
    check_remote(shard for shard in shards if not is_local(shard))
    if newline_captions is None:
        newline_captions = all(is_local(each) and os.path.exists(beside(each, NSHARDS)) for each in shards)
    options = Options(caption_key, newline_captions, negatives_key, tuple(metadata))
    return make_source(shards, spec, options, resampled=resampled)


@dataclass(frozen=True)
class Options:
    """How the samples of shards are read; as of :func:`open_shards`."""

    caption_key: str = CAPTION_KEY
    newline_captions: bool = False
    negatives_key: str | None = None
    metadata: tuple[str, ...] = ()


def make_source(
    shards: Sequence[str], name: str = "shards", options: Options | None = None, *, resampled: bool = False
) -> LocalShards | ShardStream:
    """The source of these shards: any sample at any time of local tar files, else a stream."""
    if resampled or not all(is_local(shard) and local_path(shard).endswith(".tar") for shard in shards):
        return ShardStream(shards, name, options or Options(), resampled=resampled)
    return LocalShards(shards, name, options or Options())


class ShardSource:
    """Tar shards: :class:`LocalShards` or a :class:`ShardStream`.

    Args:
        shards: their locations.
        name: for messages.
        options: how their samples are read.
        labels: the shards' names in the images' keys.
    """

    def __init__(
        self, shards: Sequence[str], name: str, options: Options, *, labels: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.options = name, options
        self._shards, self._labels = list(shards), labels or shard_labels(shards)
        self.num_shards = len(self._shards)
        self._unread_logged = False

    @property
    def shards(self) -> list[str]:
        """The tar files in the order of the argument."""
        return list(self._shards)

    def _log_unread(self, files: Files) -> None:
        """Log, once, the files that are not read."""
        if not self._unread_logged and (unread := str(files)):
            self._unread_logged = True
            level = logging.WARNING if files.lose_samples else logging.INFO
            log.log(level, "%s: files that are not read: %s", self.name, unread)

    def _stream(self, shard: str) -> Iterator[Item]:
        """The items of a shard that is read from its start to its end."""
        image, files, stems = ImageField(shard), Files(), set[str]()
        try:
            for sample in stream(shard, lambda field: field == REGIONS and image.regions is False, files):
                apart = sample["__key__"] if sample["__key__"] in stems else ""
                stems.add(sample["__key__"])
                yield self.make_item(shard, sample, select_image(image, sample), apart=apart)
        except CoderError:
            raise
        except Exception as exc:
            unreadable(shard, exc)
        self._log_unread(files)

    def make_item(self, shard: str, sample: dict[str, Any], field: str, *, apart: str = "") -> Item:
        """An item of a shard, a bad sample where its files or captions cannot be used.

        Args:
            shard: its location.
            sample: of :func:`~coder_plugin.data.tars.stream`.
            field: the image's field; "" if it has none.
            apart: a sample of the shard whose files are not next to each other, for messages.
        """
        location = f"{self._labels[shard]}/{sample['__key__']}"
        try:
            for name in ("json", "txt", field):
                if isinstance(fault := sample.get(name), BadSample):
                    raise fault
            extra = _metadata(sample.get("json"))
            captions = self._captions(sample, extra)
            if apart and not captions:
                raise BadSample("caption", f"it has no captions{_APART.format(apart)}")
            captions = list(check_captions(captions))
            listed = None if self.options.negatives_key is None else extra.get(self.options.negatives_key)
            negatives = () if listed is None else check_negatives(listed)
        except BadSample as fault:
            return bad_item(location, fault.with_traceback(None), other_names(sample["__key__"], None, None))
        key = str(extra["image_id"]) if extra.get("image_id") is not None else location
        names = other_names(sample["__key__"], extra.get("key"), extra.get("uid"))  # the last two: img2dataset, DataComp
        load = partial(_load, field, sample.get(field), shard, apart)
        paths = () if is_command(shard) else (local_path(shard),)
        member = sample.get("__names__", {}).get(field, f"{sample['__key__']}.{field}") if field else None
        kept = {name: extra.get(name) for name in self.options.metadata}
        return Item(key, tuple(captions), load, names, negatives=negatives, paths=paths, member=member, metadata=kept)

    def _captions(self, sample: dict[str, Any], extra: dict[str, Any]) -> list[Any]:
        captions = extra.get(self.options.caption_key)
        if isinstance(captions, str):
            return [captions]
        if captions is not None and not isinstance(captions, list):
            raise BadSample("caption", f"{self.options.caption_key!r} in its json field is not a list or a text")
        if captions is not None:
            return captions
        if self.options.caption_key != CAPTION_KEY:  # named explicitly: do not fall back to txt
            keys = ", ".join(map(repr, extra)) or "none"
            raise BadSample(
                "caption", f"no {self.options.caption_key!r} in its json field (caption_key); its keys are: {shorten(keys)}"
            )
        if "txt" not in sample:
            return []
        try:
            text = sample["txt"].decode("utf-8")
        except UnicodeDecodeError:
            raise BadSample("caption", "its txt field is not UTF-8 text") from None
        lines = text.removesuffix("\n").split("\n") if self.options.newline_captions else [text]
        return [line.strip() for line in lines]


class LocalShards(ShardSource):
    """Tar files on this machine: any sample at any time, at places that are found from headers alone.

    Raises:
        CoderError: when the first sample or their number is asked for: a damaged tar file.

    Example:
        >>> import io, os, tarfile, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tarfile.open(os.path.join(folder, "a.tar"), "w") as tar:
        ...         for name in ("x.txt", "x.jpg", "y.txt", "y.jpg"):
        ...             info = tarfile.TarInfo(name)
        ...             info.size = 5
        ...             tar.addfile(info, io.BytesIO(b"a dog"))
        ...     source = open_shards(os.path.join(folder, "*.tar"))
        ...     source.num_images, source.item(1).key, source.item(1).captions
        (2, 'a/y', ('a dog',))
    """

    @cached_property
    def indexes(self) -> list[TarIndex]:
        """Where the samples of each shard are."""
        indexes, files = scan_all(self._shards), Files()
        for index in indexes:
            files.update(index.files)
        self._log_unread(files)
        return indexes

    @property
    def groups(self) -> list[int]:
        """The number of images of each shard."""
        return [len(index) for index in self.indexes]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.groups))

    @property
    def num_images(self) -> int:
        return self._ends[-1]

    @cached_property
    def caption_counts(self) -> list[int]:
        """The number of captions of each image, at least 1."""
        return [max(1, len(item.captions)) for _, item in self.items()]

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        if not num_samples and not any(index.images for index in self.indexes):
            counts: Counter[str] = sum((index.files.counts for index in self.indexes), Counter())
            present = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common(8)) or "none"
            raise CoderError(
                f"{self.name}: no images ({', '.join(IMAGE_FIELDS)}) in {len(self._shards)} shards; their files are: {present}"
            )
        total = self.num_images if check_mode(captions) == "draw" else sum(self.caption_counts)
        return min(total, num_samples or total)

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        """As of :class:`~coder_plugin.data.source.Source`; pictures are read when they are loaded."""
        for start in range(rank * block, self.num_images, world_size * block):
            for number in range(start, min(start + block, self.num_images)):
                yield number, self.item(number)

    def item(self, index: int) -> Item:
        """The image at a position in all shards; its picture is read when it is loaded."""
        shard = bisect_right(self._ends, index)
        return self._item(shard, self.indexes[shard], index - self._ends[shard] + len(self.indexes[shard]))

    def _item(self, number: int, index: TarIndex, sample: int) -> Item:
        shard = self._shards[number]
        read = read_sample(shard, index, sample)
        field = select_image(ImageField(shard, regions=index.regions), read)
        return self.make_item(shard, read, field, apart=index.apart)

    def read_shard(self, number: int) -> Iterator[Item]:
        """All items of a shard, in order."""
        every = self.__dict__.get("indexes")  # where only some shards are read, those of the others are not needed
        index = scan(self._shards[number]) if every is None else every[number]
        self._log_unread(index.files)
        return (self._item(number, index, sample) for sample in range(len(index)))

    def digest(self) -> dict[str, Any]:
        """As of :class:`~coder_plugin.data.source.Source`."""
        states = [(self._labels[shard], *state_of(shard)[1:]) for shard in self._shards]
        return {"images": self.num_images, "files": hashlib.sha256(repr(states).encode()).hexdigest()}


class ShardStream(ShardSource, Stream):
    """Shards that are read from their start to their end: remote ones, those compressed as a whole, and resampled ones."""

    _sizes = ", or a sizes.json beside the shards"

    def __init__(
        self, shards: Sequence[str], name: str, options: Options, *, labels: Mapping[str, str] | None = None,
        resampled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(shards, name, options, labels=labels)
        self.resampled = resampled

    @cached_property
    def num_images(self) -> int | None:  # type: ignore[override]
        """From ``sizes.json`` beside the shards; else local shards are read for it. None if it is not known."""
        size = recorded_size(self._shards)
        if size is None and all(map(is_local, self._shards)):
            return sum(sum(1 for _ in self.read_shard(number)) for number in range(self.num_shards))
        return size

    def read_shard(self, number: int) -> Iterator[Item]:
        """All items of a shard, in order."""
        return self._stream(self._shards[number])

    def digest(self) -> dict[str, Any]:
        return {"files": hashlib.sha256(repr([self._labels[shard] for shard in self._shards]).encode()).hexdigest()}


def select_image(image: ImageField, sample: dict[str, Any]) -> str:
    """The image's field in a sample of which ``npz`` has been read, or is a place."""
    content, has_regions = sample.get(REGIONS), None
    if image.regions is None and isinstance(content, bytes | Place):
        has_regions = has_features(io.BytesIO(content if isinstance(content, bytes) else content.read()))
    return image.select(sample, has_regions)


def _metadata(text: bytes | None) -> dict[str, Any]:
    """The object in a sample's json field; empty without the field, or where it holds another value."""
    try:
        content = {} if text is None else parse_json(text)
    except ValueError as exc:
        raise BadSample("caption", f"its json field is not JSON: {exc}") from None
    if not isinstance(content, dict):
        return {}
    image_id = content.get("image_id")
    if isinstance(image_id, list | dict) or isinstance(image_id, str) and len(image_id) > _LONGEST_ID:
        raise BadSample("caption", f"its image_id is not a number or a text of at most {_LONGEST_ID:,} characters")
    return content


def _load(field: str, image: Any, shard: str, apart: str = "") -> Image | Regions:
    if not field:
        raise BadSample("file", f"no field {', '.join(IMAGE_FIELDS)}{_APART.format(apart) if apart else ''}")
    if isinstance(image, Place):
        image = image.read()
    return decode_npz(image, shard) if field == REGIONS else decode_image(image)
