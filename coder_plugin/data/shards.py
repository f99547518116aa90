"""Stream WebDataset shards through the webdataset library.

Fields are those of open_clip and img2dataset: an image in ``jpg;png;jpeg;webp`` and a caption in ``txt``, or a list
``captions`` in ``json``. ``npz`` holds regions instead of a picture (:mod:`coder_plugin.data.regions.shards`); it is not
read where there are pictures or other arrays.
"""

from __future__ import annotations

import io
import logging
import os
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import webdataset as wds
from PIL.Image import Image

from coder_plugin.data.bad_samples import BadSample, shorten
from coder_plugin.data.dealing import Sample, deal_slices, deal_whole
from coder_plugin.data.decode import decode_image
from coder_plugin.data.item import Item, bad_item, stable_hash
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import decode_npz
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.remote import check_remote, is_command
from coder_plugin.data.shard_lists import NSHARDS, benchmark_shards, beside, expand, recorded_size, shard_labels
from coder_plugin.data.source import Plan, check_captions, check_mode, check_negatives
from coder_plugin.data.tables import other_names
from coder_plugin.data.tar_index import Place, TarIndex, TarReader, scan
from coder_plugin.data.tars import IMAGE_FIELDS, REGIONS, ImageField, has_features, local_path, stream, unreadable
from coder_plugin.errors import CoderError
from coder_plugin.locations import is_local

CAPTION_KEY = "captions"
_LONGEST_ID = 4096
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
) -> ShardSource:
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
    return ShardSource(
        shards,
        name=spec,
        resampled=resampled,
        caption_key=caption_key,
        newline_captions=newline_captions,
        negatives_key=negatives_key,
        metadata=metadata,
    )


class ShardSource:
    """Tar shards divided equally between ranks and workers, whatever the number of shards (:mod:`coder_plugin.data.dealing`).

    Of local shards a part reads the tar headers, from which it knows the places of samples, and else only its own samples. Of
    remote shards, and of those compressed as a whole, it reads all of each shard from which it has a slice.

    For evaluation, blocks of the samples of local shards are dealt in turn. If any shard is remote, whole shards are
    (:meth:`items`).
    """

    def __init__(
        self,
        shards: list[str],
        *,
        name: str = "shards",
        resampled: bool = False,
        caption_key: str = CAPTION_KEY,
        newline_captions: bool = False,
        negatives_key: str | None = None,
            metadata: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._caption_key = caption_key
        self._newline_captions = newline_captions
        self._negatives_key = negatives_key
        self._metadata = tuple(metadata)
        self._shards = shards
        self._resampled = resampled
        self.fetches = True  # whether the number of samples may be read from beside remote shards
        self._indexes: dict[str, TarIndex] = {}  # of the local shards that have been scanned
        self._labels = shard_labels(shards)

    @property
    def shards(self) -> list[str]:
        """The tar files in the order of the argument."""
        return list(self._shards)

    def local(self) -> ShardSource:
        """The same source with the local shards only: reading downloads nothing and runs no command."""
        source = ShardSource(
            list(filter(is_local, self._shards)),
            name=self.name,
            resampled=self._resampled,
            caption_key=self._caption_key,
            newline_captions=self._newline_captions,
            negatives_key=self._negatives_key,
            metadata=self._metadata,
        )
        source._labels = self._labels  # keys must not change
        return source

    @cached_property
    def num_images(self) -> int | None:
        return self._count("draw")

    @cached_property
    def _num_captions(self) -> int | None:
        return self._count("all")

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        check_mode(captions)
        count = num_samples or (self.num_images if captions == "draw" else self._num_captions)
        if count is None:
            beside = ", or a sizes.json beside the shards" if captions == "draw" else ""
            raise CoderError(
                f"{self.name}: the number of samples of remote shards is unknown; give --train-num-samples{beside}"
            )
        return count

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """Shuffle shards, then samples in a buffer of compressed pictures; reproducible by seed and epoch.

        Samples are read in the order of their shards, when they come into the buffer. Of local shards those of skipped chunks
        are not read.
        """
        waiting: dict[int, Sample] | None = {} if plan.skip else None  # those in the buffer while chunks are skipped

        def entering() -> Iterator[Sample]:
            for sample in self._samples(plan):
                if waiting is None:
                    sample()
                else:
                    waiting[id(sample)] = sample
                yield sample

        for number, chunk in enumerate(_shuffled(entering(), plan)):
            if waiting is not None:
                if number < plan.skip:
                    for sample in chunk:
                        del waiting[id(sample)]
                    continue
                for sample in waiting.values():
                    sample()
                waiting = None
            yield [sample() for sample in chunk]

    def lazy_chunks(self, plan: Plan) -> Iterator[list[Callable[[], Item]]]:
        """As :meth:`chunks`, of functions that return the items: of local shards nothing but headers is read before."""
        for number, chunk in enumerate(_shuffled(self._samples(plan), plan)):
            if number >= plan.skip:
                yield list(chunk)

    def prepare(self) -> None:
        """Scan the local shards, so that processes that are started afterwards need not do it."""
        for shard in filter(is_local, self._shards):
            self._index(shard)

    @property
    def by_shards(self) -> bool:
        """Whether :meth:`items` deals whole shards: if any is remote."""
        return not all(map(is_local, self._shards))

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        """Of local shards a rank reads its own blocks, and pictures when they are loaded.

        If any shard is remote, shard n belongs to rank n modulo ``world_size``, so that each is fetched once over all ranks.
        With fewer shards than ranks, the ranks that share a shard all fetch it and take its blocks in turn.
        """
        if self.by_shards:
            yield from deal_whole(self._shards, self._read, rank, world_size, block)
            return
        index = 0
        for shard in self._shards:
            for item in self._read(shard):
                if index // block % world_size == rank:
                    yield index, item() if callable(item) else item
                index += 1

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._shards)

    def read_shard(self, number: int) -> Iterator[Item]:
        """All items of a shard, in order. Of a local one the pictures are read when they are loaded."""
        shard = self._shards[number]
        for item in self._read(shard):
            yield item() if callable(item) else item
        self._indexes.pop(shard, None)  # of 100,000 shards they would fill the memory

    def _read(self, shard: str) -> Iterable[Item | Callable[[], Item]]:
        return self._items_by_number(shard) or self._stream(shard)

    def _items_by_number(self, shard: str) -> list[Callable[[], Item]] | None:
        index = self._index(shard) if is_local(shard) else None
        if index is None or not index.seekable:
            return None
        reader = _ItemReader(self, shard, index)
        return [partial(reader.item, number, images=False) for number in range(len(index))]

    def _samples(self, plan: Plan) -> Iterator[Sample]:
        for shard, slices, of in self._resample(plan) if self._resampled else deal_slices(self._shards, plan):
            index = self._index(shard) if is_local(shard) else None
            if index is None or not index.seekable:
                for position, item in enumerate(self._stream(shard)):
                    if position % of in slices:
                        captions = 1 if plan.captions == "draw" or item.fault is not None else len(item.captions)
                        yield from (Sample(lambda item=item: item, plan, n) for n in range(captions))  # type: ignore[misc]
                continue
            reader = _ItemReader(self, shard, index)
            for position in range(len(index)):
                if position % of in slices:
                    captions = 1 if plan.captions == "draw" else reader.captions(position)
                    yield from (Sample(partial(reader.item, position), plan, n) for n in range(captions))

    def _resample(self, plan: Plan) -> Iterator[tuple[str, range, int]]:
        rng = random.Random(stable_hash("resample", plan.seed, plan.epoch, plan.rank, plan.worker, plan.workers))
        while True:
            yield rng.choice(self._shards), range(1), 1

    def _index(self, shard: str) -> TarIndex:
        """The index of a local shard; making it takes about 1 % of the decoding time."""
        if shard not in self._indexes:
            self._indexes[shard] = scan(shard)
        return self._indexes[shard]

    def _stream(self, shard: str) -> Iterator[Item]:
        """The items of a shard that is read from its start to its end."""
        if is_local(shard):
            self._index(shard)  # which finds damage
        image = ImageField(shard)

        try:
            for sample in stream(shard, lambda field: field == REGIONS and image.regions is False):
                yield self.item(shard, sample, select_image(image, sample))
        except CoderError:
            raise
        except Exception as exc:
            unreadable(shard, exc)

    def item(self, shard: str, sample: dict[str, Any], field: str) -> Item:
        """An item of a shard from a sample of :func:`~coder_plugin.data.tars.stream`; ``field`` is the image's field.

        A bad sample where its files or captions cannot be used.
        """
        location = f"{self._labels[shard]}/{sample['__key__']}"
        try:
            for name in ("json", "txt", field):
                if isinstance(fault := sample.get(name), BadSample):
                    raise fault
            extra = _metadata(sample.get("json"))
            captions = check_captions(self._captions(sample, extra))
            listed = None if self._negatives_key is None else extra.get(self._negatives_key)
            negatives = () if listed is None else check_negatives(listed)
        except BadSample as fault:
            return bad_item(location, fault.with_traceback(None), other_names(sample["__key__"], None, None))
        key = str(extra["image_id"]) if extra.get("image_id") is not None else location
        names = other_names(sample["__key__"], extra.get("key"), extra.get("uid"))  # the last two: img2dataset, DataComp
        load = partial(_load, field, sample.get(field), shard)
        paths = () if is_command(shard) else (local_path(shard),)
        member = sample.get("__names__", {}).get(field, f"{sample['__key__']}.{field}") if field else None
        kept = {name: extra.get(name) for name in self._metadata}
        return Item(key, captions, load, names, negatives=negatives, paths=paths, member=member, metadata=kept)

    def _captions(self, sample: dict[str, Any], extra: dict[str, Any]) -> list[Any]:
        captions = extra.get(self._caption_key)
        if isinstance(captions, str):
            return [captions]
        if captions is not None and not isinstance(captions, list):
            raise BadSample("caption", f"{self._caption_key!r} in its json field is not a list or a text")
        if captions is not None:
            return captions
        if self._caption_key != CAPTION_KEY:  # named explicitly: do not fall back to txt
            keys = ", ".join(map(repr, extra)) or "none"
            raise BadSample(
                "caption", f"no {self._caption_key!r} in its json field (caption_key); its keys are: {shorten(keys)}"
            )
        if "txt" not in sample:
            return []
        try:
            text = sample["txt"].decode("utf-8")
        except UnicodeDecodeError:
            raise BadSample("caption", "its txt field is not UTF-8 text") from None
        lines = text.removesuffix("\n").split("\n") if self._newline_captions else [text]
        return [line.strip() for line in lines]

    def _count(self, captions: str) -> int | None:
        """From open_clip's ``sizes.json``, else by scanning the tar files; None for remote shards without it."""
        if captions == "draw" and (size := recorded_size(self._shards, remote=self.fetches)) is not None:
            return size
        if not all(map(is_local, self._shards)):
            return None
        if len(self._shards) > 100:
            log.info("counting the samples of %d shards; a sizes.json in their folder avoids this", len(self._shards))
        if captions == "draw":
            count = sum(self._index(shard).images for shard in self._shards)
        else:
            count = sum(map(self._count_captions, self._shards))
        if not count:
            raise CoderError(f"{self.name}: no images ({', '.join(IMAGE_FIELDS)}) in {len(self._shards)} shards")
        return count

    def _count_captions(self, shard: str) -> int:
        index = self._index(shard)
        items = (item() for item in self._items_by_number(shard) or ()) if index.seekable else self._stream(shard)
        index.captions = array("I", (max(1, len(item.captions)) for item in items))
        return sum(index.captions)


def select_image(image: ImageField, sample: dict[str, Any]) -> str:
    """The image's field in a sample of which ``npz`` has been read, or is a place."""
    content, has_regions = sample.get(REGIONS), None
    if image.regions is None and isinstance(content, bytes | Place):
        has_regions = has_features(io.BytesIO(content if isinstance(content, bytes) else content.read()))
    return image.select(sample, has_regions)


def _shuffled(samples: Iterator[Sample], plan: Plan) -> Iterator[list[Sample]]:
    """Chunks of samples, shuffled in a buffer."""
    check_mode(plan.captions)
    salt = stable_hash("buffer", plan.seed, plan.epoch, plan.rank, plan.world_size, plan.worker, plan.workers)
    shuffle = wds.detshuffle(bufsize=plan.shuffle_buffer, initial=plan.shuffle_buffer // 4, seed=salt)
    chunk: list[Sample] = []
    for sample in shuffle.run(samples) if plan.shuffle_buffer > 1 else samples:
        chunk.append(sample)
        if len(chunk) == plan.batch_size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class _ItemReader:
    """The items of a local shard by number. The last one is kept: its captions follow each other as samples."""

    def __init__(self, source: ShardSource, shard: str, index: TarIndex) -> None:
        self._source, self._shard, self._index = source, shard, index
        self._tar = TarReader(shard, index)
        self._last: tuple[int, bool, Item] | None = None

    def item(self, number: int, *, images: bool = True) -> Item:
        if self._last is None or self._last[:2] != (number, images):
            sample = self._tar.read(number, images=images)
            image = ImageField(self._shard)
            image.regions = self._index.regions_before(number)
            self._last = number, images, self._source.item(self._shard, sample, select_image(image, sample))
        return self._last[2]

    def captions(self, number: int) -> int:
        if self._index.captions is not None:
            return self._index.captions[number]
        return max(1, len(self.item(number, images=False).captions))


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


def _load(field: str, image: Any, shard: str) -> Image | Regions:
    if not field:
        raise BadSample("file", f"no field {', '.join(IMAGE_FIELDS)}")
    if isinstance(image, Place):
        image = image.read()
    return decode_npz(image, shard) if field == REGIONS else decode_image(image)
