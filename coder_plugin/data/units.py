"""A data set in units that can be read one by one: each shard is one, or each slice of the images of any other data.

What is in a unit does not depend on who reads it, and reading it reads nothing of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from coder_plugin.data.bad_samples import ENOUGH, Bad, describe, nothing_to_read
from coder_plugin.data.item import Item
from coder_plugin.data.shard_lists import recorded_size
from coder_plugin.errors import CoderError

#: An image before it is looked up: its position in the data set, or what has been read of it.
Handle = int | Item


class Units:
    """The units of a data set.

    Args:
        source: a :class:`~coder_plugin.data.source.Source`, or :class:`~coder_plugin.data.pictures.Pictures`.
        rows: images of a unit where the data are not in shards, from 1.

    Raises:
        CoderError: there are none, or their number is not known, so that they cannot be divided.

    Example:
        >>> from coder_plugin.data import open_source
        >>> units = Units(open_source("scenes", count=5), 2)
        >>> len(units), [units.item(handle).key for handle in units.handles(2)]
        (3, ['scenes/train/000004'])
    """

    def __init__(self, source: Any, rows: int) -> None:
        if rows < 1:
            raise CoderError(f"--rows-per-file must be at least 1, got {rows}")
        self.source, self.rows = source, rows
        self._inner = getattr(source, "captions", source)  # of regions joined to captions
        self.by_shards = hasattr(self._inner, "read_shard")
        if self.by_shards:
            self._count = self._inner.num_shards
        elif (images := source.num_images) is None:
            raise CoderError(f"{source.name}: the number of its images is not known, so they cannot be divided into files")
        else:
            self._count = -(-images // rows)
        if not self._count:
            raise CoderError(f"{source.name}: no images")
        self._begun: dict[int, tuple[list[Handle], Iterator[Handle]]] = {}  # units that :meth:`first` has read from

    def __getstate__(self) -> dict[str, Any]:
        """Without what :meth:`first` has begun to read: generators cannot be sent to another process."""
        return {**self.__dict__, "_begun": {}}

    def __len__(self) -> int:
        return self._count

    @property
    def images(self) -> int | None:
        """How many images there are, if that is known without reading the shards."""
        if not self.by_shards:
            return self.source.num_images
        shards = getattr(self._inner, "shards", None)
        return getattr(self._inner, "num_images", None) if shards is None else recorded_size(shards, remote=False)

    def handles(self, unit: int) -> Iterator[Handle]:
        """The images of a unit, in the data's order. A shard is read from its start to its end, once."""
        read, rest = self._begun.pop(unit) if unit in self._begun else ([], self._handles(unit))
        yield from read
        yield from rest

    def first(self, unit: int, *, reads_regions: bool = False) -> Any:
        """The first image of the data, from a unit on, that can be read. What is read for it is not read again.

        Raises:
            CoderError: none of the first 1,000 can be read.
        """
        failed: list[Bad] = []
        for number in [*range(unit, self._count), *range(unit)]:
            read, rest = self._begun[number] = [], self._handles(number)
            for handle in rest:
                read.append(handle)
                item = self.item(handle)
                try:
                    return item.load()
                except (OSError, ValueError) as error:
                    failed.append(describe(item.key, error))
                if len(failed) == ENOUGH:
                    break
            if len(failed) == ENOUGH:
                break
        raise nothing_to_read(self.source.name, failed, regions=reads_regions)

    def _handles(self, unit: int) -> Iterator[Handle]:
        if self.by_shards:
            yield from self._inner.read_shard(unit)
        elif hasattr(self._inner, "item"):
            yield from range(unit * self.rows, min((unit + 1) * self.rows, self.source.num_images))
        else:  # a reader of another package: the only block of its rank
            items = self._inner.items(unit, self._count, block=self.rows)
            yield from (item for _, item in islice(items, self.rows))

    def item(self, handle: Handle) -> Item:
        """The image of a handle, in whichever process."""
        item = self._inner.item(handle) if isinstance(handle, int) else handle
        return item if self._inner is self.source else self.source.with_regions(item)

    def picture(self, handle: Handle) -> Item:
        """As :meth:`item`, without regions."""
        return self._inner.item(handle) if isinstance(handle, int) else handle
