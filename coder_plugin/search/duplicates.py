"""Near-duplicates: groups of images of an index whose vectors have a high cosine.

Shape letters: N images, D dimensions, V embeddings of an image, b images of a block, k results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from coder_plugin.errors import CoderError
from coder_plugin.progress import Progress
from coder_plugin.search.index import Index
from coder_plugin.search.mine import chunks
from coder_plugin.search.vectors import Vectors, is_lossless

#: The cosine from which on two images count as near-duplicates.
THRESHOLD = 0.93
#: Rounding of a cosine in float32: copies of one picture may have 0.9999999.
ROUNDING = 1e-6
#: Images of a block, and those that it is compared with at once.
_BLOCK, _AGAINST = 1024, 4096
#: Results of the first search of an approximate index, and of the last.
_NEIGHBOURS, MOST_NEIGHBOURS = 32, 2048
#: Numbers of vectors in memory at once.
_FLOATS = 1 << 24
#: Images whose vectors' lengths are compared.
_SAMPLE = 1024


class Group(NamedTuple):
    """Near-duplicates.

    ``rows`` [m] int64, ascending: the first is the image that is kept. ``similarities`` [m] float32: cosines with it; that of
    an image which is only near another one of the group may be below the threshold.
    """

    rows: np.ndarray
    similarities: np.ndarray


class Duplicates(NamedTuple):
    """The groups, the largest first, and how they were found.

    ``exact``: all pairs were compared, not only the neighbours that an approximate index finds. ``lossless``: the index stores
    the vectors as they were encoded. ``crowded``: images with more near-duplicates than an approximate index was asked for, so
    that their group may be missing some.
    """

    groups: list[Group]
    images: int  # that were compared
    exact: bool
    lossless: bool
    crowded: int


def find_duplicates(
    index: Index, *, threshold: float = THRESHOLD, exact: bool | None = None, gpu: bool = True
) -> Duplicates:
    """Group the images of an index by the cosines of their vectors.

    Two images are in one group if their cosine reaches the threshold, or if a chain of such pairs joins them. Of images with
    several embeddings, the cosine is the mean over the embeddings: the first with the first, and so on. Memory does not grow
    with N but for 12 bytes an image, and the groups.

    Args:
        index: with vectors of images.
        threshold: a cosine, above 0 and at most 1.
        exact: True: compare all pairs, N²·V·D / 2 multiplications. False: compare each image with the neighbours that the index
            finds, by its inner products and with the parameters that it was opened with. None: all pairs if the index is flat,
            or if it stores vectors of other lengths unchanged: the neighbours by inner product are then not those by cosine.
        gpu: compare all pairs on the first GPU, if there is one.

    Raises:
        CoderError: a threshold out of range; an index without vectors of images, or of a kind that does not store them.
    """
    if not 0 < threshold <= 1:
        raise CoderError(f"the threshold is a cosine, above 0 and at most 1, got {threshold}")
    if "images" not in index.vectors:
        raise CoderError(f"{index.folder} has no vectors of images: make it with --what images or both")
    vectors = index.vectors["images"]
    if exact is None:
        factory = index.note["factory"]
        exact = factory == "Flat" or (is_lossless(factory) and not _equal_lengths(vectors))
    parent = np.arange(vectors.items)
    crowded = 0
    with Progress(vectors.items, what="images") as progress:
        if exact:
            device = torch.device("cuda" if gpu and torch.cuda.is_available() else "cpu")
            for count, one, other in _pairs(vectors, threshold - ROUNDING, device):
                _join(parent, one, other)
                progress.update(count)
        else:
            for count, one, other, more in _neighbours(index, threshold - ROUNDING):
                _join(parent, one, other)
                crowded += more
                progress.update(count)
    groups = [Group(each, _similarities(vectors, each)) for each in _groups(parent)]
    groups.sort(key=lambda group: (-len(group.rows), group.rows[0]))
    return Duplicates(groups, vectors.items, exact, is_lossless(index.note["factory"]), crowded)


def _unit(vectors: Vectors, rows: np.ndarray | range) -> np.ndarray:
    """Vectors [n, V * D] whose inner products are the cosines, as means over the embeddings; zeros stay zeros."""
    found = vectors.gather(rows)
    found /= np.maximum(np.linalg.norm(found, axis=2, keepdims=True), 1e-30) * np.sqrt(np.float32(vectors.views))
    return found.reshape(len(rows), -1)


def _equal_lengths(vectors: Vectors) -> bool:
    """Whether the vectors of some images, drawn evenly, have one length, but for a hundredth."""
    lengths = np.linalg.norm(vectors.gather(range(0, vectors.items, max(1, -(-vectors.items // _SAMPLE)))), axis=2)
    return bool(lengths.min(initial=np.inf) >= 0.99 * lengths.max(initial=0))


def _pairs(
    vectors: Vectors, threshold: float, device: torch.device
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """All pairs of rows whose cosine reaches the threshold, by blocks: images that are done, and the rows of the pairs."""
    against = max(1, min(_AGAINST, _FLOATS // (vectors.views * vectors.dimensions)))
    nothing = np.empty(0, np.int64)
    for block in chunks(vectors.items, _BLOCK):
        queries = torch.from_numpy(_unit(vectors, block)).to(device)
        for first in range(block.start, vectors.items, against):
            others = torch.from_numpy(_unit(vectors, range(first, min(first + against, vectors.items)))).to(device)
            one, other = (queries @ others.T >= threshold).nonzero(as_tuple=True)
            yield 0, block.start + one.cpu().numpy(), first + other.cpu().numpy()
        yield len(block), nothing, nothing


def _neighbours(index: Index, threshold: float) -> Iterator[tuple[int, np.ndarray, np.ndarray, int]]:
    """Pairs as :func:`_pairs`, of images and the neighbours that the index finds; and how many images may have more.

    Where all neighbours of an image reach the threshold, more are searched for.
    """
    vectors = index.vectors["images"]
    waiting, nothing, k = np.arange(vectors.items), np.empty(0, np.int64), min(_NEIGHBOURS, vectors.items)
    while True:
        size = max(1, _FLOATS // (k * vectors.views * vectors.views * vectors.dimensions))
        full: list[np.ndarray] = []
        for start in range(0, len(waiting), size):
            block = waiting[start : start + size]
            _, found = index.search(vectors.gather(block).reshape(-1, vectors.dimensions), k)
            found = found.reshape(len(block), -1)  # [b, V * k], -1 where there are no more
            distinct, places = np.unique(found, return_inverse=True)
            candidates = _unit(vectors, np.maximum(distinct, 0))[places.reshape(found.shape)]
            close = (np.einsum("bd,bkd->bk", _unit(vectors, block), candidates) >= threshold) & (found >= 0)
            one, other = close.nonzero()
            more = close.all(1)
            full.append(block[more])
            yield int((~more).sum()), block[one], found[one, other], 0
        waiting = np.concatenate(full)
        if not len(waiting) or k == min(MOST_NEIGHBOURS, vectors.items):
            yield len(waiting), nothing, nothing, len(waiting) if k < vectors.items else 0
            return
        k = min(4 * k, MOST_NEIGHBOURS, vectors.items)


def _roots(parent: np.ndarray, rows: np.ndarray) -> np.ndarray:
    roots = parent[rows]
    while (parent[roots] != roots).any():
        roots = parent[roots]
    parent[rows] = roots
    return roots


def _join(parent: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Union-find over many pairs at once: each root is hung below a lower one that it is paired with, until none differ.

    A parent's row is never above its child's, so there are no circles, and a group's root is its first row.
    """
    while True:
        one, other = _roots(parent, one), _roots(parent, other)
        different = one != other
        if not different.any():
            return
        one, other = one[different], other[different]
        parent[np.maximum(one, other)] = np.minimum(one, other)  # of several, one counts; the next round has the others


def _groups(parent: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of each group of two or more."""
    roots = _roots(parent, np.arange(len(parent)))
    members = np.flatnonzero(np.bincount(roots, minlength=len(parent))[roots] > 1)
    members = members[np.argsort(roots[members], kind="stable")]
    if len(members):
        yield from np.split(members, np.flatnonzero(np.diff(roots[members])) + 1)


def _similarities(vectors: Vectors, rows: np.ndarray) -> np.ndarray:
    first = _unit(vectors, rows[:1])[0]
    size = max(1, _FLOATS // first.size)
    parts = [_unit(vectors, rows[start : start + size]) @ first for start in range(0, len(rows), size)]
    return np.minimum(np.concatenate(parts), np.float32(1))
