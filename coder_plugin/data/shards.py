"""Stream WebDataset shards through the webdataset library.

Fields are those of open_clip and img2dataset: an image in ``jpg;png;jpeg;webp`` and a caption in ``txt``, or a list
``captions`` in ``json``. ``npz`` holds regions instead of a picture (:mod:`coder_plugin.data.regions.shards`); it is not
read where there are pictures or other arrays.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import random
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import webdataset as wds
from PIL.Image import Image

from coder_plugin.data.bad_samples import BadSample, shorten
from coder_plugin.data.decode import check_max_pixels, decode_image
from coder_plugin.data.item import Item, bad_item, stable_hash
from coder_plugin.data.json_text import parse_json
from coder_plugin.data.regions.arrays import decode_npz
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import Plan, check_captions, check_mode, draw_caption, one_caption
from coder_plugin.data.tables import other_names
from coder_plugin.data.tars import (
    IMAGE_FIELDS,
    REGIONS,
    ImageField,
    has_features,
    is_local,
    local_path,
    scan,
    stream,
    unreadable,
)
from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular, read_json

_FIELDS = {*IMAGE_FIELDS, "txt", "json"}
CAPTION_KEY = "captions"
NSHARDS = "nshards.txt"
_LONGEST_ID = 4096
log = logging.getLogger(__name__)


def open_shards(
    spec: str,
    *,
    split: str = "train",
    resampled: bool = False,
    caption_key: str = CAPTION_KEY,
    newline_captions: bool | None = None,
    max_pixels: int | None = None,
) -> ShardSource:
    """The reader ``webdataset``.

    Args:
        spec: shards, with braces, ``*``, ``::`` between several, ``pipe:`` or URLs; or a folder in CLIP_benchmark's layout,
            with ``nshards.txt`` in it or in its subfolder ``split``.
        split: used for CLIP_benchmark's folders only.
        resampled: draw shards with replacement, endlessly.
        caption_key: key of a caption or list of captions in ``json``; another than ``captions`` must be in every sample.
        newline_captions: each line of ``txt`` is a caption, as in CLIP_benchmark. Default: if all shards are local and have an
            ``nshards.txt`` in their folder.
        max_pixels: as in :func:`~coder_plugin.data.decode.decode_image`.

    Raises:
        CoderError: an empty pattern, missing shards, or a faulty ``nshards.txt``.
    """
    shards = _benchmark(spec, split) if os.path.isdir(spec) else expand(spec)
    if newline_captions is None:
        newline_captions = all(is_local(each) and os.path.exists(_beside(each, NSHARDS)) for each in shards)
    return ShardSource(
        shards,
        name=spec,
        resampled=resampled,
        caption_key=caption_key,
        newline_captions=newline_captions,
        max_pixels=max_pixels,
    )


class ShardSource:
    """Tar shards divided equally between ranks and workers, whatever the number of shards.

    With P parts (ranks × workers), each shard has P slices; sample j is in slice j mod P. The epoch's shuffled sequence of
    slices is cut into P equal runs. So a part shares at most the shards at the two ends of its run with others, and no part is
    idle when shards do not divide evenly or are fewer than workers.
    """

    def __init__(
        self,
        shards: list[str],
        *,
        name: str = "shards",
        resampled: bool = False,
        caption_key: str = CAPTION_KEY,
        newline_captions: bool = False,
        max_pixels: int | None = None,
    ) -> None:
        self.name = name
        self._caption_key = caption_key
        self._newline_captions = newline_captions
        self.max_pixels = check_max_pixels(max_pixels)
        self._shards = shards
        self._resampled = resampled
        self._sound: set[str] = set()  # already scanned; a scan takes about 2 % of the decoding time
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
            max_pixels=self.max_pixels,
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
            raise CoderError(f"{self.name}: the number of samples of remote shards is unknown; give --train-num-samples")
        return count

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """Shuffle shards, then samples in a buffer of compressed pictures; reproducible by seed and epoch."""
        check_mode(plan.captions)
        salt = stable_hash("buffer", plan.seed, plan.epoch, plan.rank, plan.world_size, plan.worker, plan.workers)
        shuffle = wds.detshuffle(bufsize=plan.shuffle_buffer, initial=plan.shuffle_buffer // 4, seed=salt)
        chunk: list[Item] = []
        skip = plan.skip
        for item in shuffle.run(self._samples(plan)) if plan.shuffle_buffer > 1 else self._samples(plan):
            chunk.append(item)
            if len(chunk) == plan.batch_size:
                if skip:
                    skip -= 1
                else:
                    yield chunk
                chunk = []
        if chunk and not skip:
            yield chunk

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        """Every rank reads all shards and yields its own blocks, because a sample's position is known only after reading.

        This is cheap compared with decoding.
        """
        index = 0
        for shard in self._shards:
            for item in self._read(shard):
                if index // block % world_size == rank:
                    yield index, item
                index += 1

    def _samples(self, plan: Plan) -> Iterator[Item]:
        for shard, slices, of in self._resample(plan) if self._resampled else self._part(plan):
            for position, item in enumerate(self._read(shard)):
                if position % of in slices:
                    if plan.captions == "draw" or item.fault is not None:
                        yield draw_caption(item, seed=plan.seed, epoch=plan.epoch)
                    else:
                        yield from (one_caption(item, number) for number in range(len(item.captions)))

    def _part(self, plan: Plan) -> Iterator[tuple[str, range, int]]:
        """The plan's run of slices, as (shard, its slices, number of slices a shard)."""
        shards = list(self._shards)
        random.Random(stable_hash("shards", plan.seed, plan.epoch)).shuffle(shards)
        parts = plan.world_size * plan.workers
        # A run has as many slices as there are shards. Runs are ordered by rank, then by worker.
        start = (plan.rank * plan.workers + plan.worker) * len(shards)
        for number in range(start // parts, len(shards)):
            first, last = max(start - number * parts, 0), min(start + len(shards) - number * parts, parts)
            if first >= last:
                return
            yield shards[number], range(first, last), parts

    def _resample(self, plan: Plan) -> Iterator[tuple[str, range, int]]:
        rng = random.Random(stable_hash("resample", plan.seed, plan.epoch, plan.rank, plan.worker, plan.workers))
        while True:
            yield rng.choice(self._shards), range(1), 1

    def _read(self, shard: str) -> Iterator[Item]:
        if is_local(shard) and shard not in self._sound:
            scan(shard)
            self._sound.add(shard)
        image = ImageField(shard)

        def is_read(name: str) -> bool:
            field = (wds.tariterators.base_plus_ext(name)[1] or "").lower()
            return field in _FIELDS and not (field == REGIONS and image.regions is False)

        try:
            for sample in stream(shard, is_read):  # which keeps other members (arrays, videos) out of memory
                unknown = image.regions is None and isinstance(sample.get(REGIONS), bytes)
                has_regions = has_features(io.BytesIO(sample[REGIONS])) if unknown else None
                yield self.item(shard, sample, image.select(sample, has_regions))
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
        except BadSample as fault:
            return bad_item(location, fault.with_traceback(None), other_names(sample["__key__"], None, None))
        key = str(extra["image_id"]) if extra.get("image_id") is not None else location
        names = other_names(sample["__key__"], extra.get("key"), extra.get("uid"))  # the last two: img2dataset, DataComp
        return Item(key, captions, partial(_load, field, sample.get(field), shard, self.max_pixels), names)

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
        """From open_clip's ``sizes.json``, else by scanning the tar files; None for remote shards."""
        if captions == "draw" and (size := _recorded_size(self._shards)) is not None:
            return size
        if not all(map(is_local, self._shards)):
            return None
        if len(self._shards) > 100:
            log.info("counting the samples of %d shards; a sizes.json in their folder avoids this", len(self._shards))
        if captions == "draw":
            count = sum(map(scan, self._shards))
            self._sound.update(self._shards)
        else:
            count = sum(max(1, len(item.captions)) for shard in self._shards for item in self._read(shard))
        if not count:
            raise CoderError(f"{self.name}: no images ({', '.join(IMAGE_FIELDS)}) in {len(self._shards)} shards")
        return count


def shard_labels(shards: Sequence[str]) -> dict[str, str]:
    """The names of shards in their images' keys: the stem, so that keys survive moving the data, unless stems are not
    unique."""
    stems = {shard: os.path.basename(shard).split(".tar")[0] for shard in shards}
    unique = len(set(stems.values())) == len(stems)
    return stems if unique else {shard: shard.split(".tar")[0] for shard in shards}


def expand(spec: str) -> list[str]:
    """A shard pattern as a list. Local files must exist, so that missing ones are reported before training."""
    if not spec.strip() or not all(part.strip() for part in spec.split("::")):
        raise CoderError(f"shards: empty pattern {spec!r}; give tar files such as 'train-{{000000..000005}}.tar'")
    try:
        patterns = wds.SimpleShardList(spec).urls
    except (AssertionError, ValueError, IndexError) as exc:  # an unset ${variable}, unbalanced braces
        raise CoderError(f"shards: cannot expand {spec!r}: {exc}") from exc
    shards: list[str] = []
    for pattern in patterns:
        if not is_local(pattern) or os.path.exists(path := local_path(pattern)):
            shards.append(pattern)
        elif matching := sorted(glob.glob(path)):
            shards += matching
        elif glob.has_magic(path):
            raise CoderError(f"shards: no file matches {pattern!r}")
        else:
            raise CoderError(f"shards: missing shard {pattern!r}" + (f" (of {spec!r})" if pattern != spec else ""))
    return shards


def _benchmark(folder: str, split: str) -> list[str]:
    """CLIP_benchmark's shards of a split: ``0.tar``, ``1.tar`` …, their number in ``nshards.txt``."""
    notes = [os.path.join(folder, *part, NSHARDS) for part in ([split], [])]
    note = next(filter(os.path.exists, notes), None)
    if note is None:
        splits = sorted(os.path.basename(os.path.dirname(each)) for each in glob.glob(f"{glob.escape(folder)}/*/{NSHARDS}"))
        hint = f"splits present: {', '.join(splits)}" if splits else f"give its shards, such as '{folder}/*.tar'"
        raise CoderError(f"{folder}: no {NSHARDS} for split {split!r}; {hint}")
    try:
        with open_regular(note, encoding="utf-8") as file:
            count = int(file.read(20))
    except (OSError, ValueError) as exc:
        raise CoderError(f"{note}: cannot be read as a number: {exc}") from exc
    if count < 1:
        raise CoderError(f"{note}: says {count} shards; it must be > 0")
    present = sum(name.endswith(".tar") for name in os.listdir(os.path.dirname(note)))
    shards = [_beside(note, f"{number}.tar") for number in range(min(count, present + 1))]
    missing = [shard for shard in shards if not os.path.exists(shard)]
    if missing:
        lacking = count - len(shards) + len(missing)
        raise CoderError(f"{note}: lists {count} shards, of which {lacking} are missing, the first: {missing[0]}")
    return shards


def _beside(shard: str, name: str) -> str:
    return os.path.join(os.path.dirname(local_path(shard)), name)


def _recorded_size(shards: list[str]) -> int | None:
    """The number of samples from ``sizes.json`` (by shard) or ``__len__`` (of the folder); None for remote shards."""
    if not all(map(is_local, shards)):
        return None
    paths = [local_path(shard) for shard in shards]
    folders = sorted({os.path.dirname(path) for path in paths})
    sizes: dict[str, int] = {}
    for folder in folders:
        entries = _read_json(os.path.join(folder, "sizes.json"), dict) or {}
        sizes |= {os.path.join(folder, name): size for name, size in entries.items() if is_size(size)}
    if all(path in sizes for path in paths):
        return sum(sizes[path] for path in paths)
    size = _read_json(os.path.join(folders[0], "__len__"), int) if len(folders) == 1 and not sizes else None
    return size if is_size(size) else None


def is_size(value: object) -> bool:
    """Whether a recorded number of samples can be one; where it cannot, samples are counted."""
    return type(value) is int and value >= 0


def _read_json(path: str, kind: type) -> Any:
    if not os.path.exists(path):
        return None
    content = read_json(path)
    if not isinstance(content, kind):
        raise CoderError(f"{path}: expected {kind.__name__}, as open_clip writes it, got {type(content).__name__}")
    return content


def _metadata(text: bytes | None) -> dict[str, Any]:
    """The object in a sample's json field; empty without the field, or where it holds another value."""
    try:
        content = {} if text is None else parse_json(text)
    except ValueError as exc:
        raise BadSample("json", f"its json field is not JSON: {exc}") from None
    if not isinstance(content, dict):
        return {}
    image_id = content.get("image_id")
    if isinstance(image_id, list | dict) or isinstance(image_id, str) and len(image_id) > _LONGEST_ID:
        raise BadSample("json", f"its image_id is not a number or a text of at most {_LONGEST_ID:,} characters")
    return content


def _load(field: str, image: Any, shard: str, max_pixels: int | None) -> Image | Regions:
    if not field:
        raise BadSample("file", f"no field {', '.join(IMAGE_FIELDS)}")
    return decode_npz(image, shard) if field == REGIONS else decode_image(image, max_pixels=max_pixels)
