"""FAISS factories: what they need to be trained on, and the trained index that every segment begins with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.index.vectors_file import check_factory, import_faiss, short

log = logging.getLogger(__name__)
#: Vectors for each centroid that FAISS advises.
_ADVISED = 39
#: Vectors for each list of an inverted file: at least, and at most.
LEAST, MOST = 64, 256
#: Lists that an index without lists counts as: PQ and others learn from 65,536 to 262,144 vectors.
_LISTS = 1024
#: Between both as many vectors as this memory holds.
_BYTES = 256 << 20


def sample_size(factory: str, dimensions: int) -> int:
    """How many vectors a factory is trained on, if there are so many; 0 if it needs no training.

    Example:
        >>> [sample_size(factory, 256) for factory in ("Flat", "PQ32", "IVF4096,Flat", "IVF65536,Flat")]
        [0, 262144, 262144, 4194304]
        >>> sample_size("PQ4", 8)
        262144
    """
    index = check_factory(factory, dimensions)
    if index.is_trained:
        return 0
    inverted = import_faiss().try_extract_index_ivf(index)
    lists = max(_LISTS, 0 if inverted is None else inverted.nlist)
    return min(MOST * lists, max(LEAST * lists, _BYTES // (4 * dimensions)))


def sample_rows(total: int, size: int) -> np.ndarray:
    """Rows of ``size`` of ``total`` vectors; ascending int64.

    One of each of ``size`` equal stretches, at a random place: at equal distances, all could be of one view of their images.
    The same arguments give the same rows.

    Example:
        >>> sample_rows(100, 4) // 25, sample_rows(3, 4)
        (array([0, 1, 2, 3]), array([0, 1, 2]))
    """
    size = min(size, total)
    starts = np.arange(size + 1, dtype=np.int64) * total // max(1, size)
    return np.random.default_rng(0).integers(starts[:-1], starts[1:])


def train(factory: str, dimensions: int, sample: Callable[[int], np.ndarray]) -> Any:
    """An empty inner-product index of a factory, trained; None for ``Flat``.

    Args:
        factory: FAISS index factory string.
        dimensions: D.
        sample: gives at most so many of the vectors, [n, D] float32; called if training is needed.

    Raises:
        CoderError: FAISS does not know the factory, or cannot train it on so few vectors.
    """
    if factory == "Flat":
        return None
    index = check_factory(factory, dimensions)
    if (size := sample_size(factory, dimensions)) == 0:
        return index
    vectors = sample(size)
    try:
        with _one_warning(index, factory, len(vectors)):
            index.train(vectors)
    except RuntimeError as error:
        raise CoderError(
            f"FAISS cannot train {factory!r} on {len(vectors)} vectors: use fewer lists, or Flat: {short(error)}"
        ) from error
    return index


@contextmanager
def _one_warning(index: Any, factory: str, vectors: int) -> Iterator[None]:
    """While an index is trained on few vectors: one warning, where FAISS prints a line for each of its clusterings."""
    faiss = import_faiss()
    inner = faiss.downcast_index(index)
    quantizers, rotations = [], []
    while isinstance(inner, (faiss.IndexPreTransform, faiss.IndexRefine)):
        if isinstance(inner, faiss.IndexPreTransform):
            transforms = (faiss.downcast_VectorTransform(inner.chain.at(number)) for number in range(inner.chain.size()))
            rotations += [each for each in transforms if isinstance(each, faiss.OPQMatrix)]
            inner = faiss.downcast_index(inner.index)
        else:
            inner = faiss.downcast_index(inner.base_index)
    for each in rotations:
        each.pq = quantizer = faiss.ProductQuantizer(each.d_out, each.M, 8)  # as FAISS itself makes, but for the warnings
        quantizers.append(quantizer)
    quantizers += [inner.pq] if hasattr(inner, "pq") else []
    centroids = [each.ksub for each in quantizers]
    parameters = [each.cp for each in quantizers]
    if isinstance(inner, faiss.IndexIVF):
        centroids.append(inner.nlist)
        parameters.append(inner.cp)
    for each in parameters:
        each.min_points_per_centroid = 1
    if vectors < (advised := _ADVISED * max(centroids, default=0)):
        log.warning("%s is trained on %s vectors, where FAISS advises %s or more: Flat may be better", factory,
                    f"{vectors:,}", f"{advised:,}")
    try:
        yield
    finally:
        for each in rotations:
            each.pq = None
