"""Which pictures are one picture.

Two are the same where their sizes and RGB values are. They are copies (another JPEG quality, size or brightness, a few pixels
cut off) where their difference hashes differ in few bits and small versions of them correlate. Of Flickr8k's 1,000 validation
pictures that finds 999 at JPEG quality 30, 998 at less than half the size, and 913 of which 3 of 224 pixels are cut off on each
side; and among its 6,000 training pictures no pair but one, which is the same pixel for pixel. Mirrored pictures and other
parts of one photograph are not found.

N pictures, M others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from coder_plugin.doctor.pictures import Look

BITS = 8  # of 64, in which the hashes of copies may differ
CORRELATION = 0.98
_AT_ONCE = 256
_COLUMNS = 4096  # products of so many at a time: 4 MiB
_PLAIN = 2.0  # of 255: standard deviation

Pair = tuple[Look, Look]


def textured(look: Look) -> bool:
    """Pictures of one colour, or nearly, have no hash to speak of, and are told of elsewhere."""
    return float(look.small.std((0, 1)).max()) > _PLAIN


def copies(ours: Sequence[Look], theirs: Sequence[Look] | None = None) -> tuple[list[Pair], list[Pair]]:
    """Pairs of the same pixels, and pairs of copies, of two lists of pictures or within one, where they are of two keys.

    Of many that have the same pixels each is paired with the first alone, and the first alone is held against others; of
    copies, too, each is paired with the first that it is one of: a series of pictures gives as many pairs as it has pictures.
    """
    first = _first(ours)
    if theirs is None:
        repeated = ((first[look.pixels], look) for look in ours)
        same = [(look, other) for look, other in repeated if look.key != other.key]
    else:
        same = [(first[look.pixels], look) for look in theirs if look.pixels in first]
    known = list(first.values())
    if theirs is None:
        return same, list(_close(known, known, lambda look: look.key, within=True))
    return same, list(_close(known, list(_first(theirs).values()), lambda look: look.pixels, within=False))


def _first(looks: Sequence[Look]) -> dict[bytes, Look]:
    """The first picture of each pixels."""
    first: dict[bytes, Look] = {}
    for look in looks:
        first.setdefault(look.pixels, look)
    return first


def alike(ours: Look, theirs: Look) -> bool:
    """Whether two pictures are copies."""
    return any(_close([ours], [theirs], id, within=False))


def _close(
    ours: Sequence[Look], theirs: Sequence[Look], differ: Callable[[Look], object], *, within: bool
) -> Iterator[Pair]:
    """Each of ``theirs`` that is a copy, with the first of ``ours`` that it is one of and from which it ``differ``s; ``within``
    one list only those before it are looked at."""
    import faiss

    if not ours or not theirs:
        return
    index = faiss.IndexBinaryFlat(64)
    index.add(_hashes(ours))
    hashes, small, other_small = _hashes(theirs), _small(ours), _small(theirs)
    numbers: dict[object, int] = {}
    marks, other_marks = (
        np.array([numbers.setdefault(differ(look), len(numbers)) for look in looks]) for looks in (ours, theirs)
    )
    for start in range(0, len(theirs), _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, len(theirs)))
        limits, _, found = index.range_search(hashes[rows], BITS + 1)
        bounds = limits.astype(np.int64)
        places = np.repeat(rows, bounds[1:] - bounds[:-1])
        fit = (marks[found] != other_marks[places]) & (found < places if within else True)
        places, found = places[fit], found[fit]
        hit = np.zeros(len(ours), bool)
        hit[found] = True
        columns = np.flatnonzero(hit)
        hashed = np.zeros((len(rows), len(columns)), bool)
        hashed[places - start, (np.cumsum(hit) - 1)[found]] = True
        for at in range(0, len(columns), _COLUMNS):  # in their order: the first stays
            part = slice(at, at + _COLUMNS)
            left = np.flatnonzero(hashed[:, part].any(1))
            if not len(left):
                continue
            near = hashed[left, part] & (other_small[rows[left]] @ small[columns[part]].T >= CORRELATION)
            for row, column in zip(left[near.any(1)], near[near.any(1)].argmax(1), strict=True):
                yield ours[columns[at + column]], theirs[rows[row]]
                hashed[row] = False


def _hashes(looks: Sequence[Look]) -> np.ndarray:
    """[N, 8] uint8."""
    return np.array([look.dhash for look in looks], np.uint64).view(np.uint8).reshape(len(looks), 8)


def _small(looks: Sequence[Look]) -> np.ndarray:
    """Small versions [N, 768] float32 of mean 0 a channel and norm 1: their product is a correlation."""
    rows = np.stack([look.small for look in looks]).astype(np.float32)
    rows -= rows.mean((1, 2), keepdims=True)
    rows = rows.reshape(len(looks), -1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
