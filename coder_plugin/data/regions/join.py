"""Captions from one place and regions from another, joined by the images' names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from coder_plugin.data.bad_samples import BadSample, allowed
from coder_plugin.data.item import Item, without_image
from coder_plugin.data.regions.base import DERIVATIONS, RegionFile, Regions, names_of
from coder_plugin.data.source import ItemSource, Source, file_state
from coder_plugin.errors import CoderError

#: How many images at the start of a stream decide how its images are named in a file of regions.
FIRST = 200
_SHOWN = 3
log = logging.getLogger(__name__)


class Rule(NamedTuple):
    """How images are named in a file of regions; rules are ordered by exactness.

    ``derivation`` is a position in the result of :func:`names_of`, applied to the item's key (``name`` 0) or to one of its
    other names (from 1).
    """

    derivation: int
    name: int

    def apply(self, item: Item) -> str | None:
        names = (item.key, *item.names)
        name = names[self.name] if self.name < len(names) else None
        return names_of(name)[self.derivation] if name else None

    def __str__(self) -> str:
        what = f"other name {self.name}" if self.name else "key"
        return f"{what}, {DERIVATIONS[self.derivation]}"


class RegionSource:
    """Another :class:`~coder_plugin.data.source.Source` with regions instead of pictures: same keys, captions and batches.

    An image without regions fails to load; it is skipped and counted as a bad sample.

    Args:
        captions: the source of the items. If it holds them in memory, all are looked up at once and missing ones are
            logged; of a stream the first :data:`FIRST` are looked up, and the rule that matches them is used for all.
        regions: their regions, under the items' keys, their other names, or a name that :func:`names_of` derives from one.
        max_missing: fraction of the images looked up that may lack regions, of at least 1,000; None: any number, but not all.

    Raises:
        CoderError: none of the images looked up has regions, or more than ``max_missing`` allows have none.
    """

    def __init__(self, captions: Source, regions: RegionFile, *, max_missing: float | None = None) -> None:
        self.name = captions.name
        self.captions: Any = captions
        self.regions = regions
        in_memory = isinstance(captions, ItemSource)
        items = [without_image(item) for _, item in islice(captions.items(), None if in_memory else FIRST)]
        which = "images" if in_memory else "images at its start"
        self._rule = find_rule(items, regions, where=self.name)
        matches = match(items, regions, self._rule, where=self.name)
        if missing := [item.key for item in items if item.key not in matches]:
            text = f"{len(missing)} of {len(items)} {which} have no regions, such as {examples(missing)}"
            if max_missing is not None and len(missing) > (most := allowed(max_missing, len(items))):
                hint = f"at most {int(most):,} may lack them (--max-bad-samples {max_missing:g})"
                raise CoderError(f"{self.name}: {text}; {hint}")
            log.warning("%s: %s: they are left out", self.name, text)

    def __getattr__(self, name: str) -> Any:
        if name == "captions":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.captions, name)  # numbers, order and samples of the epoch

    def item(self, index: int) -> Item:
        return self.with_regions(self.captions.item(index))

    def items(self, *part: int) -> Iterator[tuple[int, Item]]:
        yield from ((index, self.with_regions(item)) for index, item in self.captions.items(*part))

    def part(self, part: int, parts: int, **order: Any) -> Iterator[Item]:
        """As of a :class:`~coder_plugin.data.streams.Stream`, where the captions are one."""
        return map(self.with_regions, self.captions.part(part, parts, **order))

    def digest(self) -> dict[str, Any]:
        files = getattr(self.regions, "files", ())
        return {**self.captions.digest(), "regions": [file_state(path) for path in files]}

    def with_regions(self, item: Item) -> Item:
        """The item with its regions as image; a bad sample as it is."""
        if item.fault is not None:
            return item
        name = self._rule.apply(item)
        if name is None or name not in self.regions:
            return replace(item, load=partial(_no_regions, item.key))
        return replace(item, load=partial(_read, self.regions, name))


def find_rule(items: Sequence[Item], regions: RegionFile, *, where: str) -> Rule:
    """The rule that finds the most images in a file of regions; of several, the most exact.

    One rule serves all images: COCO's number of one image may be Karpathy's number of another, so trying every rule for each
    image would give missing images the regions of others.

    Raises:
        CoderError: there is no item, or no rule finds any.
    """
    if not items:
        raise CoderError(f"{where}: no images")
    counts = Counter(rule for item in items for rule, name in _candidates(item) if name in regions)
    if not counts:
        listed = ", ".join(map(repr, islice(regions, 2)))
        others = [repr(name) for name in items[0].names if name is not None]
        aliases = f" or {', '.join(others)}" if others else ""
        raise CoderError(
            f"{where}: none of {len(items)} images has regions: here an image is called {items[0].key!r}{aliases}, in the file "
            f"of regions {listed}: check that both belong to the same data set and split"
        )
    rule = min(counts, key=lambda rule: (-counts[rule], rule))
    if rule != Rule(0, 0):
        pair = next((item.key, name) for item in items if (name := rule.apply(item)) is not None and name in regions)
        log.info("%s: regions are matched by the image's %s: those of %r are %r", where, rule, *pair)
    _warn_of_others(items, regions, rule, [other for other in sorted(counts) if counts[other] == counts[rule]], where)
    return rule


def _warn_of_others(items: Sequence[Item], regions: RegionFile, rule: Rule, others: list[Rule], where: str) -> None:
    """Warn of the first image for which a rule that finds as many images finds other regions."""
    resolve = getattr(regions, "resolve", str)  # from any name that finds an image to the one the file lists it by
    for other in others:
        for item in items:
            names = rule.apply(item), other.apply(item)
            ours, theirs = (resolve(name) if name is not None and name in regions else None for name in names)
            if None not in (ours, theirs) and ours != theirs:
                text = "%s: two rules find regions for %r: %r (%s) and %r (%s); the first are used: check that they are right"
                log.warning(text, where, item.key, ours, rule, theirs, other)
                return


def match(items: Iterable[Item], regions: RegionFile, rule: Rule, *, where: str) -> dict[str, str]:
    """The keys of the items that have regions, to their names in the file of regions.

    Raises:
        CoderError: two items have the same regions.
    """
    matches: dict[str, str] = {}
    owners: dict[str, str] = {}
    for item in items:
        name = rule.apply(item)
        if name is None or name not in regions:
            continue
        if owners.setdefault(name, item.key) != item.key:
            raise CoderError(
                f"{where}: images {owners[name]!r} and {item.key!r} are both {name!r} in the file of regions"
            )
        matches[item.key] = name
    return matches


def _candidates(item: Item) -> Iterator[tuple[Rule, str]]:
    """The names an item may have in a file of regions, with the rule for each."""
    for number, name in enumerate((item.key, *item.names)):
        for derivation, derived in enumerate(names_of(name) if name else ()):
            if derived is not None:
                yield Rule(derivation, number), derived


def examples(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _read(regions: RegionFile, name: str) -> Regions:
    return regions[name]


def _no_regions(key: str) -> Regions:
    raise BadSample("regions", f"image {key!r} is not in the file of regions")
