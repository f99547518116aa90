"""A split's images and captions, read without stopping at the first fault and without decoding a picture.

The readers refuse data at the first image that is wrong, as training should. Here shards are gone through file by file, and
what is wrong with each sample is kept; other data sets are read whole when they are opened, and their reader's word stands.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from coder_plugin.config import TrainConfig
from coder_plugin.data.from_config import join_regions, make_source, reading_options
from coder_plugin.data.item import Item
from coder_plugin.data.regions.arrays import decode_npz
from coder_plugin.data.regions.join import RegionSource
from coder_plugin.data.shards import ShardSource
from coder_plugin.data.source import decode_image
from coder_plugin.data.tars import REGIONS, ImageField, has_features, local_path, members
from coder_plugin.errors import CoderError

#: So many images of a split are read at most, unless all are asked for.
MOST = 200_000
_SMALL = frozenset({"txt", "json"})


@dataclass
class Walked:
    """What was read of a split.

    Args:
        name: ``train`` or ``val``. reader: the kind of data set.
        items: its images, in the data's order; of shards they read their file when they are loaded.
        shards: that cannot be read, or stop in the middle: why. samples: that the reader refuses: why.
        pictureless: keys of samples without a picture or regions.
        whole: the source as a run has it, None: ``source``. remote: its shards that are not on this machine, which
            ``source`` lacks. left: shards beyond :data:`MOST` images.
    """

    name: str
    source: Any
    reader: str = ""
    items: list[Item] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    pictureless: list[str] = field(default_factory=list)
    whole: Any = None
    remote: int = 0
    left: int = 0

    @property
    def threads(self) -> bool:
        """Whether several threads may load its images."""
        return not isinstance(self.source, RegionSource)

    def sample(self, size: int, seed: int) -> list[Item]:
        """``size`` images, one at random of each of so many equal runs of the data, so that every shard has some."""
        if size >= len(self.items):
            return self.items
        rng = random.Random(seed)
        bounds = [number * len(self.items) // size for number in range(size + 1)]
        return [self.items[rng.randrange(low, high)] for low, high in zip(bounds, bounds[1:], strict=False)]


def walk_split(name: str, config: TrainConfig, *, most: int | None = MOST) -> Walked:
    """Open and read a split as the configuration has it, less the shards that are not on this machine."""
    source: Any = make_source(config.data, split=name, join=False)
    whole, remote = source, 0
    if isinstance(whole, ShardSource):
        source = whole.local()
        remote = len(whole.shards) - len(source.shards)
    if config.data.regions is not None and not (remote and not source.shards):
        source = join_regions(source, config.data, split=name)
    reader = reading_options(config.data, getattr(config.data, name))["kind"]
    return replace(walk(name, source, reader, most=most), whole=whole, remote=remote)


def walk(name: str, source: Any, reader: str = "", *, most: int | None = MOST) -> Walked:
    """Read a split; ``most`` images at most, None: all."""
    walked = Walked(name, source, reader)
    captions = source.captions if isinstance(source, RegionSource) else source
    if isinstance(captions, ShardSource):
        _walk_shards(walked, captions, most)
    else:
        found = (item for _, item in captions.items())
        walked.items = list(islice(found, most))
        walked.left = int(most is not None and next(found, None) is not None)
    if isinstance(source, RegionSource):
        walked.items = [source.with_regions(item) for item in walked.items]
        walked.pictureless = []
    return walked


def _walk_shards(walked: Walked, source: ShardSource, most: int | None) -> None:
    """In a shuffled order, so that what is read before ``most`` is of all parts of the data; kept in the data's."""
    shards = list(enumerate(source.shards))
    random.Random(0).shuffle(shards)
    read: dict[int, list[Item]] = {}
    for number, shard in shards:
        if most is not None and sum(map(len, read.values())) >= most:
            walked.left += 1
            continue
        items = read.setdefault(number, [])
        try:
            for item in _samples(walked, source, shard):
                items.append(item)
        except CoderError as error:
            walked.shards.append(str(error))
    walked.items = [item for number in sorted(read) for item in read[number]]


def _samples(walked: Walked, source: ShardSource, shard: str) -> Iterator[Item]:
    image = ImageField(shard)
    for stem, files in groupby(members(shard), key=itemgetter(1)):
        sample: dict[str, Any] = {"__key__": stem}
        told: bool | None = None
        places: dict[str, tuple[int, int]] = {}
        for tar, _, ending, member in files:
            if ending in places:
                walked.samples.append(f"{shard}: {stem!r} has two files .{ending}: two samples of one name")
            places[ending] = member.offset_data, member.size
            if ending in _SMALL:
                sample[ending] = _read(tar, member)
            elif ending == REGIONS and image.regions is None:
                told = has_features(io.BytesIO(_read(tar, member)))
        which = image.select(places, told)
        if not sample.keys() & _SMALL and not which:
            continue  # what somebody else keeps beside the samples
        try:
            item = source.item(shard, sample, which)
        except CoderError as error:
            walked.samples.append(str(error))
            continue
        if which:
            item = replace(item, load=partial(_load, shard, *places[which], which))
        else:
            walked.pictureless.append(item.key)
        yield item


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # members are regular files
    return file.read()


def _load(shard: str, offset: int, size: int, ending: str) -> Any:
    with tarfile.open(local_path(shard)) as tar:  # for what is compressed as a whole, too
        tar.fileobj.seek(offset)  # type: ignore[union-attr]
        data = tar.fileobj.read(size)  # type: ignore[union-attr]
    return decode_npz(data, shard) if ending == REGIONS else decode_image(data)
