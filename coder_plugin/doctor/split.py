"""A split's images and captions, read to the end in spite of errors and without decoding pictures.

Shards are read file by file, and errors and bad samples of all are collected. Other data sets are read when they are opened, so
of an error in their format only the first is known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from coder_plugin.config import TrainConfig
from coder_plugin.data.from_config import join_regions, make_source, reading_options
from coder_plugin.data.item import Item
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.data.shards import ShardSource
from coder_plugin.data.source import is_stream
from coder_plugin.errors import CoderError

#: Most images of a split that are read without --all.
MOST = 200_000
#: Most images of shards that are compressed as a whole: they are kept in memory.
MOST_COMPRESSED = 2_000


@dataclass
class Split:
    """The content of a split.

    Args:
        name: ``train`` or ``val``.
        source: the data on this machine. full_source: the data as training reads them, with remote shards; None: ``source``.
        reader: the kind of data set.
        items: images in the data's order. Those of shards read their file when they are loaded.
        shards: errors of shards that cannot be read or are truncated.
        samples: the bad samples that the reader found, with the reasons.
        pictureless: keys of samples without a picture or regions.
        remote: number of shards that are not on this machine.
        left: number of shards left out after :data:`MOST` images.
    """

    name: str
    source: Any
    reader: str = ""
    items: list[Item] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    pictureless: list[str] = field(default_factory=list)
    full_source: Any = None
    remote: int = 0
    left: int = 0

    @property
    def threads(self) -> bool:
        """Whether several threads may load the images."""
        return not isinstance(self.source, RegionSource)

    def sample(self, size: int, seed: int) -> list[Item]:
        """``size`` images spread over the data: one drawn from each of ``size`` consecutive parts of equal length."""
        if size >= len(self.items):
            return self.items
        rng = random.Random(seed)
        bounds = [number * len(self.items) // size for number in range(size + 1)]
        return [self.items[rng.randrange(low, high)] for low, high in zip(bounds, bounds[1:], strict=False)]


def read_split(name: str, config: TrainConfig, *, most: int | None = MOST) -> Split:
    """Open and read a split as configured, without the shards that are not on this machine."""
    source: Any = make_source(config.data, split=name, join=False)
    full_source, remote = source, 0
    if isinstance(full_source, ShardSource):
        full_source.fetches = False
        source = full_source.local()
        remote = len(full_source.shards) - len(source.shards)
    if config.data.regions is not None and not (remote and not source.shards):
        source = join_regions(source, config.data, split=name)
    reader = reading_options(config.data, getattr(config.data, name))["kind"]
    return replace(read_source(name, source, reader, most=most), full_source=full_source, remote=remote)


def read_source(name: str, source: Any, reader: str = "", *, most: int | None = MOST) -> Split:
    """Read a split, at most ``most`` images (None: all)."""
    split = Split(name, source, reader)
    captions = source.captions if isinstance(source, RegionSource) else source
    if isinstance(captions, ShardSource):
        _read_shards(split, captions, most)
    else:
        items = (item for _, item in captions.items())
        listed = list(islice(items, most))
        split.items = [item for item in listed if item.fault is None]
        split.samples += [f"image {item.key!r}: {item.fault}" for item in listed if item.fault is not None]
        split.left = int(most is not None and next(items, None) is not None)
    if isinstance(source, RegionSource):
        split.items = [source.with_regions(item) for item in split.items]
        split.pictureless = []
    return split


def _read_shards(split: Split, source: Any, most: int | None) -> None:
    """Read shards in shuffled order, so that ``most`` images come from all parts of the data; keep the data's order."""
    if is_stream(source):
        most = MOST_COMPRESSED if most is None else min(most, MOST_COMPRESSED)
    numbers = list(range(source.num_shards))
    random.Random(0).shuffle(numbers)
    read: dict[int, list[Item]] = {}
    for number in numbers:
        if most is not None and sum(map(len, read.values())) >= most:
            split.left += 1
            continue
        items = read.setdefault(number, [])
        try:
            for item in source.read_shard(number):
                if item.fault is not None:
                    split.samples.append(f"{source.shards[number]}: image {item.key!r}: {item.fault}")
                    continue
                if item.member is None:
                    split.pictureless.append(item.key)
                items.append(item)
        except CoderError as error:
            split.shards.append(str(error))
    split.items = [item for number in sorted(read) for item in read[number]]
