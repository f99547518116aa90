"""A small set of rows in which every allowed pair of values of two axes occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
Pairs = frozenset[tuple[tuple[str, str], ...]]


def pairs(row: Mapping[str, str]) -> Pairs:
    """The pairs of (axis, value) in a row."""
    return frozenset(itertools.combinations(row.items(), 2))


def every(axes: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[Row]:
    """All rows of values that may meet."""
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [row for row in rows if allowed(row)]


def covering(rows: Sequence[Row], shown: Callable[[Row], Pairs] = pairs, *, seed: int = 0) -> list[Row]:
    """Of these rows, those first that add most pairs, until no pair that one of them has is missing.

    ``shown``: the pairs that a row counts for.
    """
    found = [(shown(row), row) for row in rows]
    random.Random(seed).shuffle(found)
    missing = Pairs().union(*(held for held, _ in found))
    chosen = []
    while missing:
        held, row = max(found, key=lambda each: len(each[0] & missing))
        chosen.append(row)
        missing -= held
    return chosen
