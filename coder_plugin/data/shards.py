"""WebDataset shards: samples of local tar files by number, remote and compressed ones as a stream.

Fields are those of open_clip and img2dataset: an image in ``jpg;png;jpeg;webp`` and a caption in ``txt``, or a list
``captions`` in ``json``. In samples without a picture ``npz`` holds regions (:mod:`coder_plugin.data.regions.shards`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from PIL.Image import Image

from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.decode import decode_image
from coder_plugin.data.item import Item, bad_item
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import decode_npz
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.remote import check_remote, is_command
from coder_plugin.data.shard_lists import NSHARDS, benchmark_shards, beside, expand, recorded_size, shard_labels
from coder_plugin.data.source import Source, check_captions, check_negatives
from coder_plugin.data.streams import Stream
from coder_plugin.data.tables import other_names
from coder_plugin.data.tar_index import Place, TarIndex, read_sample, samples, scan_all, state_of
from coder_plugin.data.tars import IMAGE_FIELDS, REGIONS, Files, Sample, local_path, stream
from coder_plugin.errors import CoderError
from coder_plugin.locations import is_local

_LONGEST_ID = 4096
_TOGETHER = " (if the files of a sample are apart in the shard, sort it: tar --sort=name)"
log = logging.getLogger(__name__)


def open_shards(
    spec: str,
    *,
    split: str = "train",
    resampled: bool = False,
    negatives_key: str | None = None,
    metadata: Sequence[str] = (),
) -> LocalShards | ShardStream:
    """The reader ``webdataset``.

    Args:
        spec: shards, with braces, ``*`` (of local ones), ``::`` between several, ``pipe:COMMAND`` or URLs (``https://``,
            ``hf://``, ``s3://``, ``gs://``, and what fsspec can open); or a folder in CLIP_benchmark's layout, with
            ``nshards.txt`` in it or in its subfolder ``split``: there each line of ``txt`` is a caption.
        split: used for CLIP_benchmark's folders only.
        resampled: draw shards with replacement, endlessly.
        negatives_key: key of a list of hard negatives in ``json``, which samples may lack. None: they are not read.
        metadata: further keys of ``json`` whose values an item keeps; samples may lack them.

    Raises:
        CoderError: an empty pattern, missing shards, a faulty ``nshards.txt``, or a scheme that nothing installed reads.
    """
    shards = benchmark_shards(spec, split) if os.path.isdir(spec) else expand(spec)
    check_remote(shard for shard in shards if not is_local(shard))
    if resampled or not all(is_local(shard) and local_path(shard).endswith(".tar") for shard in shards):
        return ShardStream(shards, spec, negatives_key, metadata, resampled=resampled)
    return LocalShards(shards, spec, negatives_key, metadata)


class ShardSource:
    """Tar shards: :class:`LocalShards` or a :class:`ShardStream`.

    Args:
        shards: their locations.
        name: for messages.
        negatives_key, metadata: as of :func:`open_shards`.
    """

    _samples: Callable[[str, Files], Iterator[Sample]] = staticmethod(samples)

    def __init__(self, shards: Sequence[str], name: str, negatives_key: str | None, metadata: Sequence[str]) -> None:
        self.name, self._negatives_key, self._metadata = name, negatives_key, metadata
        self._newline_captions = all(is_local(each) and os.path.exists(beside(each, NSHARDS)) for each in shards)
        self.shards, self.num_shards = list(shards), len(shards)
        self._labels = shard_labels(shards)
        self._unread_logged = False

    def log_unread(self, files: Files) -> None:
        """Log, once, the files that are not read."""
        if not self._unread_logged and (unread := str(files)):
            self._unread_logged = True
            level = logging.WARNING if files.lose_samples else logging.INFO
            log.log(level, "%s: files that are not read: %s", self.name, unread)

    def read_shard(self, number: int) -> Iterator[Item]:
        """All items of a shard, in order."""
        shard, files = self.shards[number], Files()
        for sample in self._samples(shard, files):
            yield self.make_item(shard, sample)
        self.log_unread(files)

    def make_item(self, shard: str, sample: Sample) -> Item:
        """The item of a sample, a bad one where its files or captions cannot be used.

        Args:
            shard: its location.
            sample: with its contents; an image may be a place.
        """
        location, contents = f"{self._labels[shard]}/{sample.key}", sample.contents
        field = sample.image
        try:
            for name in ("json", "txt", field):
                if isinstance(fault := contents.get(name), BadSample):
                    raise fault
            extra = read_metadata(contents.get("json"))
            captions = self._captions(contents, extra)
            if not captions:
                raise BadSample("caption", f"it has no captions{_TOGETHER}")
            captions = list(check_captions(captions))
            listed = None if self._negatives_key is None else extra.get(self._negatives_key)
            negatives = () if listed is None else check_negatives(listed)
        except BadSample as fault:
            return bad_item(location, fault.with_traceback(None), other_names(sample.key, None, None))
        key = str(extra["image_id"]) if extra.get("image_id") is not None else location
        names = other_names(sample.key, extra.get("key"), extra.get("uid"))  # the last two: img2dataset, DataComp
        load = partial(_load, field, contents.get(field), shard)
        paths = () if is_command(shard) else (local_path(shard),)
        kept = {name: extra.get(name) for name in self._metadata}
        member = sample.names.get(field)
        return Item(key, tuple(captions), load, names, negatives=negatives, paths=paths, member=member, metadata=kept)

    def _captions(self, contents: dict[str, Any], extra: dict[str, Any]) -> list[Any]:
        captions = extra.get("captions")
        if isinstance(captions, str | list):
            return [captions] if isinstance(captions, str) else captions
        if captions is not None:
            raise BadSample("caption", "'captions' in its json field is not a list or a text")
        if "txt" not in contents:
            return []
        try:
            text = contents["txt"].decode("utf-8")
        except UnicodeDecodeError:
            raise BadSample("caption", "its txt field is not UTF-8 text") from None
        lines = text.removesuffix("\n").split("\n") if self._newline_captions else [text]
        return [line.strip() for line in lines]


class LocalShards(ShardSource, Source):
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
        indexes, files = scan_all(self.shards), Files()
        for index in indexes:
            files.update(index.files)
        self.log_unread(files)
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
        counts = sum((index.files.counts for index in self.indexes), Counter[str]())
        if not num_samples and not any(counts[f".{field}"] for field in IMAGE_FIELDS):
            present = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common(8)) or "none"
            raise CoderError(
                f"{self.name}: no images ({', '.join(IMAGE_FIELDS)}) in {self.num_shards} shards; their files are: {present}"
            )
        return super().samples(captions, num_samples)

    def item(self, index: int) -> Item:
        """The image at a position in all shards; its picture is read when it is loaded."""
        number = bisect_right(self._ends, index)
        places = self.indexes[number]
        sample = read_sample(self.shards[number], places, index - self._ends[number] + len(places))
        return self.make_item(self.shards[number], sample)

    def digest(self) -> dict[str, Any]:
        """As of :class:`~coder_plugin.data.source.Source`."""
        states = [(self._labels[shard], *state_of(shard)[1:]) for shard in self.shards]
        return {"images": self.num_images, "files": hashlib.sha256(repr(states).encode()).hexdigest()}


class ShardStream(ShardSource, Stream):
    """Shards that are read from their start to their end: remote ones, those compressed as a whole, and resampled ones."""

    _samples = staticmethod(stream)
    _sizes = ", or a sizes.json beside the shards"

    def __init__(self, *args: Any, resampled: bool = False) -> None:
        super().__init__(*args)
        self.resampled = resampled

    @cached_property
    def num_images(self) -> int | None:  # type: ignore[override]
        """From ``sizes.json`` beside the shards; else local shards are read for it. None if it is not known."""
        size = recorded_size(self.shards)
        if size is None and all(map(is_local, self.shards)):
            return sum(sum(1 for _ in self.read_shard(number)) for number in range(self.num_shards))
        return size

    def digest(self) -> dict[str, Any]:
        """As of :class:`~coder_plugin.data.source.Source`: names alone."""
        return {"files": hashlib.sha256(repr(list(self._labels.values())).encode()).hexdigest()}


def read_metadata(text: bytes | None) -> dict[str, Any]:
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


def _load(field: str, image: Any, shard: str) -> Image | Regions:
    if not field:
        raise BadSample("file", f"no field {', '.join(IMAGE_FIELDS)}{_TOGETHER}")
    if isinstance(image, Place):
        image = image.read()
    return decode_npz(image, shard) if field == REGIONS else decode_image(image)
