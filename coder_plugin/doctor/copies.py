"""Which pictures are one picture.

Two are the same where their sizes and RGB values are. They are copies (another JPEG quality, size or brightness, a few pixels
cut off) where their difference hashes differ in few bits and small versions of them correlate. Of Flickr8k's 1,000 validation
pictures that finds 999 at JPEG quality 30, 998 at less than half the size, and 913 of which 3 of 224 pixels are cut off on each
side; and among its 6,000 training pictures no pair but one, which is the same pixel for pixel. Mirrored pictures and other
parts of one photograph are not found.

N pictures, M others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from coder_plugin.doctor.pictures import Look

BITS = 8  # of 64, in which the hashes of copies may differ
CORRELATION = 0.98
_AT_ONCE = 256
_PLAIN = 2.0  # of 255: standard deviation

Pair = tuple[Look, Look]


def textured(look: Look) -> bool:
    """Pictures of one colour, or nearly, have no hash to speak of, and are told of elsewhere."""
    return float(look.small.std((0, 1)).max()) > _PLAIN


def copies(ours: Sequence[Look], theirs: Sequence[Look] | None = None) -> tuple[list[Pair], list[Pair]]:
    """Pairs of the same pixels, and pairs of copies, of two lists of pictures or within one, where they are of two keys.

    Of many that have the same pixels each is paired with the first alone, and the first alone is held against others.
    """
    first: dict[bytes, Look] = {}
    for look in ours:
        first.setdefault(look.pixels, look)
    if theirs is None:
        repeated = ((first[look.pixels], look) for look in ours)
        same = [(look, other) for look, other in repeated if look.key != other.key]
    else:
        same = [(first[look.pixels], look) for look in theirs if look.pixels in first]
    known = list(first.values())
    others = known if theirs is None else list({look.pixels: look for look in reversed(theirs)}.values())
    near = [
        (known[i], others[j])
        for i, j in _close(known, others, within=theirs is None)
        if known[i].pixels != others[j].pixels and (theirs is not None or known[i].key != others[j].key)
    ]
    return same, near


def alike(ours: Look, theirs: Look) -> bool:
    """Whether two pictures are copies."""
    return next(_close([ours], [theirs], within=False), None) is not None


def _close(ours: Sequence[Look], theirs: Sequence[Look], *, within: bool) -> Iterator[tuple[int, int]]:
    """Places of copies; ``within``: of one list, each pair once."""
    import faiss

    if not ours or not theirs:
        return
    index = faiss.IndexBinaryFlat(64)
    index.add(_hashes(theirs))
    hashes, small, other_small = _hashes(ours), _small(ours), _small(theirs)
    for start in range(0, len(ours), _AT_ONCE):
        limits, _, found = index.range_search(hashes[start : start + _AT_ONCE], BITS + 1)
        found_each = limits[1:].astype(np.int64) - limits[:-1].astype(np.int64)
        places = start + np.repeat(np.arange(len(found_each)), found_each)
        if within:
            places, found = places[places < found], found[places < found]
        for at in range(0, len(places), 1 << 16):
            i, j = places[at : at + (1 << 16)], found[at : at + (1 << 16)]
            near = np.einsum("nd,nd->n", small[i], other_small[j]) >= CORRELATION
            yield from zip(i[near].tolist(), j[near].tolist(), strict=True)


def _hashes(looks: Sequence[Look]) -> np.ndarray:
    """[N, 8] uint8."""
    return np.array([look.dhash for look in looks], np.uint64).view(np.uint8).reshape(len(looks), 8)


def _small(looks: Sequence[Look]) -> np.ndarray:
    """Small versions [N, 768] float32 of mean 0 a channel and norm 1: their product is a correlation."""
    rows = np.stack([look.small for look in looks]).astype(np.float32)
    rows -= rows.mean((1, 2), keepdims=True)
    rows = rows.reshape(len(looks), -1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
