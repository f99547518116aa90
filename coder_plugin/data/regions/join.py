"""Captions from one place and regions from another, joined by the images' names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import DERIVATIONS, RegionFile, Regions, names_of
from coder_plugin.data.source import ItemSource, Plan, Source
from coder_plugin.errors import CoderError

#: So many images at the start of a stream decide what its images are called in a file of regions.
FIRST = 200
_SHOWN = 3
log = logging.getLogger(__name__)


class Rule(NamedTuple):
    """What images are called in a file of regions; the smaller the more exact.

    ``derivation`` is a place in what :func:`names_of` makes, and ``name`` says of what: 0 the item's key, else a place in
    its other names, from 1.
    """

    derivation: int
    name: int

    def of(self, item: Item) -> str | None:
        names = (item.key, *item.names)
        name = names[self.name] if self.name < len(names) else None
        return names_of(name)[self.derivation] if name else None

    def __str__(self) -> str:
        what = f"other name {self.name}" if self.name else "key"
        return f"its {what}, {DERIVATIONS[self.derivation]}"


class RegionSource:
    """A :class:`~coder_plugin.data.source.Source` that gives another one's items with regions instead of pictures: the
    same keys and captions in the same batches.

    An image without regions fails to load, and is skipped and counted like one that cannot be decoded.

    Args:
        captions: the source of the items. Where it holds them in memory, all are looked for at once, and the missing ones
            told of; of a stream the first :data:`FIRST` are read, and the rule that finds these is kept to.
        regions: their regions, under the items' keys, their other names or what :func:`names_of` makes of these.
        max_missing: how many of the images looked for may lack regions; None: any number but all.

    Raises:
        CoderError: none of the images looked for has regions, or more than ``max_missing`` have none.
    """

    def __init__(self, captions: Source, regions: RegionFile, *, max_missing: int | None = None) -> None:
        self.name = captions.name
        self.captions, self._regions = captions, regions
        whole = isinstance(captions, ItemSource)
        # without pictures, which items of shards hold
        items = [_bare(item) for _, item in islice(captions.items(), None if whole else FIRST)]
        which = "images" if whole else "images at its start"
        self._rule = find_rule(items, regions, where=self.name)
        found = match(items, regions, self._rule, where=self.name)
        if missing := [item.key for item in items if item.key not in found]:
            text = f"{len(missing)} of {len(items)} {which} have no regions, such as {examples(missing)}"
            if max_missing is not None and len(missing) > max_missing:
                raise CoderError(f"{self.name}: {text}; at most {max_missing} may lack them")
            log.warning("%s: %s: they are left out", self.name, text)

    @property
    def num_images(self) -> int | None:
        return self.captions.num_images

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        return self.captions.samples(captions, num_samples)

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        for chunk in self.captions.chunks(plan):
            yield [self.with_regions(item) for item in chunk]

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        for index, item in self.captions.items(rank, world_size, block=block):
            yield index, self.with_regions(item)

    def with_regions(self, item: Item) -> Item:
        """An item of :attr:`captions` whose image is its regions."""
        name = self._rule.of(item)
        if name is None or name not in self._regions:
            return replace(item, load=partial(_absent, item.key))
        return replace(item, load=partial(_read, self._regions, name))


class Joined(Mapping[str, Regions]):
    """Several files of regions as one. See :data:`~coder_plugin.data.regions.base.RegionFile`.

    A name by which two files find an image each, such as one without folders, finds none.

    Args:
        files: each with its path, for messages.

    Raises:
        CoderError: files that list an image of the same name.
    """

    def __init__(self, files: Sequence[tuple[str, RegionFile]]) -> None:
        self._files = [file for _, file in files]
        for place, (path, file) in enumerate(files):
            for other_path, other in files[:place]:
                both = [name for name in other if name in file] or [name for name in file if name in other]
                if both:
                    raise CoderError(
                        f"{path}: has {examples(both)}, as {other_path} has: whose regions are meant? Give files of "
                        "different images, or name them differently"
                    )

    def __getitem__(self, name: str) -> Regions:
        return self._file(name)[name]

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the image
        return sum(name in file for file in self._files) == 1

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            yield from file

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def resolve(self, name: str) -> str:
        """The name that an image is listed by, given any that it is found by."""
        return _resolver(self._file(name))(name)

    def _file(self, name: str) -> RegionFile:
        there = [file for file in self._files if name in file]
        if len(there) != 1:
            raise KeyError(name)
        return there[0]


def find_rule(items: Sequence[Item], regions: RegionFile, *, where: str) -> Rule:
    """The one rule that names the images in a file of regions: that which finds most of them, of several the most exact.

    One rule names all: COCO's number of one image may be Karpathy's number of another, and looking for each image in every
    way would give those that are missing the regions of others.

    Raises:
        CoderError: no item, or none that has regions by any rule.
    """
    if not items:
        raise CoderError(f"{where}: no images")
    counts = Counter(rule for item in items for rule, name in _candidates(item) if name in regions)
    if not counts:
        theirs = ", ".join(map(repr, islice(regions, 2)))
        others = [repr(name) for name in items[0].names if name is not None]
        known = f", also {', '.join(others)}" if others else ""
        raise CoderError(
            f"{where}: none of {len(items)} images has regions: here an image is called {items[0].key!r}{known}, and in the "
            f"file of regions {theirs}: are both of one data set and split?"
        )
    rule = min(counts, key=lambda rule: (-counts[rule], rule))
    if rule != Rule(0, 0):
        pair = next((item.key, name) for item in items if (name := rule.of(item)) is not None and name in regions)
        log.info("%s: an image's regions are found by %s: those of %r are %r", where, rule, *pair)
    _warn_of_others(items, regions, rule, [other for other in sorted(counts) if counts[other] == counts[rule]], where)
    return rule


def _warn_of_others(items: Sequence[Item], regions: RegionFile, rule: Rule, others: list[Rule], where: str) -> None:
    """Warn of the first image to which a rule that finds as many gives the regions of another one."""
    resolve = _resolver(regions)
    for other in others:
        for item in items:
            names = rule.of(item), other.of(item)
            ours, theirs = (resolve(name) if name is not None and name in regions else None for name in names)
            if None not in (ours, theirs) and ours != theirs:
                text = "%s: %r has regions as %r, by %s, and others as %r, by %s; the first are taken: are they its own?"
                log.warning(text, where, item.key, ours, rule, theirs, other)
                return


def _resolver(regions: RegionFile) -> Callable[[str], str]:
    """What tells the name that an image is listed by: a file may find it by several."""
    return getattr(regions, "resolve", str)


def match(items: Iterable[Item], regions: RegionFile, rule: Rule, *, where: str) -> dict[str, str]:
    """The keys of items to the names that their regions have by a rule, for those that have some.

    Raises:
        CoderError: two items have the same regions.
    """
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    for item in items:
        name = rule.of(item)
        if name is None or name not in regions:
            continue
        if owners.setdefault(name, item.key) != item.key:
            raise CoderError(
                f"{where}: images {owners[name]!r} and {item.key!r} are both {name!r} in the file of regions"
            )
        found[item.key] = name
    return found


def _candidates(item: Item) -> Iterator[tuple[Rule, str]]:
    """The names to look for, with the rule that makes each."""
    for number, name in enumerate((item.key, *item.names)):
        for derivation, made in enumerate(names_of(name) if name else ()):
            if made is not None:
                yield Rule(derivation, number), made


def _bare(item: Item) -> Item:
    return replace(item, load=partial(_absent, item.key))


def examples(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _read(regions: RegionFile, name: str) -> Regions:
    return regions[name]


def _absent(key: str) -> Regions:
    raise ValueError(f"image {key!r} is not in the file of regions")
