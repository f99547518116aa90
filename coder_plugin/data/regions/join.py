"""Captions from one place and regions from another, joined by the images' names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import RegionFile, Regions, names_of
from coder_plugin.data.source import ItemSource, Plan, Source
from coder_plugin.errors import CoderError

_SHOWN = 3
_Rule = tuple[int, int]  # which of an item's names, and which of the names made of it
log = logging.getLogger(__name__)


class RegionSource:
    """A :class:`~coder_plugin.data.source.Source` that gives another one's items with regions instead of pictures: the
    same keys and captions in the same batches.

    An image without regions fails to load, and is skipped and counted like one that cannot be decoded.

    Args:
        captions: the source of the items. Where it holds them in memory, the missing ones are told of at once.
        regions: their regions, under the items' keys, their other names or what :func:`names_of` makes of these.
        max_missing: how many images may lack regions; None: any number but all.

    Raises:
        CoderError: no image has regions, or more than ``max_missing`` have none.
    """

    def __init__(self, captions: Source, regions: RegionFile, *, max_missing: int | None = None) -> None:
        self.name = captions.name
        self._captions, self._regions = captions, regions
        self._found: dict[str, str] | None = None
        if isinstance(captions, ItemSource):
            self._found = self._match(max_missing)

    @property
    def num_images(self) -> int | None:
        return self._captions.num_images

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        return self._captions.samples(captions, num_samples)

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        for chunk in self._captions.chunks(plan):
            yield [self._with_regions(item) for item in chunk]

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        for index, item in self._captions.items(rank, world_size, block=block):
            yield index, self._with_regions(item)

    def _with_regions(self, item: Item) -> Item:
        if self._found is not None:
            name = self._found.get(item.key)
        else:
            name = next((name for _, name in candidates(item) if name in self._regions), None)
        return replace(
            item, load=partial(_read, self._regions, name) if name is not None else partial(_absent, item.key)
        )

    def _match(self, max_missing: int | None) -> dict[str, str]:
        items = [item for _, item in self._captions.items()]
        found = match(items, self._regions, where=self.name)
        missing = [item.key for item in items if item.key not in found]
        if missing:
            text = f"{len(missing)} of {len(items)} images have no regions, such as {examples(missing)}"
            if max_missing is not None and len(missing) > max_missing:
                raise CoderError(f"{self.name}: {text}; at most {max_missing} may lack them")
            log.warning("%s: %s: they are left out", self.name, text)
        return found


def match(items: Sequence[Item], regions: RegionFile, *, where: str) -> dict[str, str]:
    """The keys of items to the names that their regions have, for those that have some.

    One rule names all images, the one that finds most: COCO's number of one image may be Karpathy's number of another,
    and looking for each image in every way would give those that are missing the regions of others.

    Raises:
        CoderError: no item has regions, or two have the same.
    """
    counts = Counter(rule for item in items for rule, name in candidates(item) if name in regions)
    if not counts:
        theirs = ", ".join(map(repr, islice(regions, 2)))
        ours = items[0].key if items else "none"
        others = f", also {', '.join(map(repr, items[0].names))}" if items and items[0].names else ""
        raise CoderError(
            f"{where}: none of {len(items)} images has regions: here an image is called {ours!r}{others}, and in the file "
            f"of regions {theirs}: are both of one data set and split?"
        )
    rule = min(counts, key=lambda rule: (-counts[rule], rule))
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    for item in items:
        name = dict(candidates(item)).get(rule)
        if name is None or name not in regions:
            continue
        if owners.setdefault(name, item.key) != item.key:
            raise CoderError(
                f"{where}: images {owners[name]!r} and {item.key!r} are both {name!r} in the file of regions"
            )
        found[item.key] = name
    return found


def candidates(item: Item) -> Iterable[tuple[_Rule, str]]:
    """The names to look for, with the rule that makes each, from the most exact: the item's, then what they may mean."""
    names = (item.key, *item.names)
    yield from (((number, 0), name) for number, name in enumerate(names))
    for number, name in enumerate(names):
        yield from (((number, place), other) for place, other in enumerate(names_of(name)) if place)


def examples(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _read(regions: RegionFile, name: str) -> Regions:
    return regions[name]


def _absent(key: str) -> Regions:
    raise ValueError(f"image {key!r} is not in the file of regions")
