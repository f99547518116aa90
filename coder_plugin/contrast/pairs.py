"""The pairs of a step, which of them are this process's anchors, and the form in which their negatives are compared.

Shapes: n pairs (of all processes, or in a ring of this one), a anchors, m hard negatives, d dimensions, v features of one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast.negatives import Block, Dense, Direction, Negatives
from coder_plugin.contrast.tiles import Ring, Tiles
from coder_plugin.errors import CoderError
from coder_plugin.tensors import Gather, check_range

#: How the similarities are computed: ``reference``, all at once (:class:`~coder_plugin.contrast.Dense`); ``tiled``
#: (:class:`~coder_plugin.contrast.Tiles`), equal up to rounding; ``auto``, whichever suits the size and the options.
Implementation = Literal["auto", "reference", "tiled"]
#: A matrix of at most this many similarities is small.
SMALL_MATRIX = 1 << 22


class Pairs:
    """Image and text features of a step, row i of both a pair.

    Args:
        images: float [n, d], L2-normalised, or [n, v, d] if an image has several features. texts: [n, d].
        ids: the image of each pair, integers [n]; pairs of one image are not each other's negatives. None: all distinct.
        hard: hard negatives: texts that are further negatives of the images, except of their own; ``anchor_ids`` [n].
        anchors: the pairs that are anchors, where several processes share the work. None: all.
        gather: collects a value of each process, with ``anchors``. None: this process is the only one.
        ring: the rows are this rank's, and visit the other ranks.
        implementation: how similarities are computed.

    Raises:
        ValueError: shapes that do not fit, an empty batch, an unknown implementation. CoderError: values that would overflow,
            or a form that does not support what is asked for.

    Example:
        >>> pairs = Pairs(torch.eye(3), torch.eye(3), torch.tensor([7, 7, 8]))
        >>> pairs.negatives().count()  # of images, then of texts
        tensor([[1, 1, 2],
                [1, 1, 2]])
    """

    def __init__(
        self,
        images: Tensor,
        texts: Tensor,
        ids: Tensor | None = None,
        *,
        hard: Block | None = None,
        anchors: slice | None = None,
        gather: Gather | None = None,
        ring: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        if implementation not in get_args(Implementation):
            raise ValueError(f"implementation must be {_listed(get_args(Implementation))}, got {implementation!r}")
        check_pair_shapes(images, texts)
        check_ids(ids, len(images))
        check_range(image_features=images, text_features=texts)
        self.images, self.texts, self.hard = images, texts, hard
        self.anchors = consecutive(anchors, len(images))
        self.gather, self.ring, self.implementation = gather, ring, implementation
        #: Whether the ids were given. Without them every pair is its own image, on all ranks.
        self.has_ids = ids is not None
        n = len(images)
        first = distributed.rank() * n if ring else 0
        self.ids = torch.arange(first, first + n, device=images.device) if ids is None else ids

    @property
    def weighed(self) -> slice | None:
        """The anchors whose diversity this process computes: its own, or all in a small batch, which costs less than a
        collective for the largest weights. None: all of :attr:`images`."""
        return None if self.gather is not None and len(self.images) ** 2 <= SMALL_MATRIX else self.anchors

    def own(self, weighed: Tensor) -> Tensor:
        """The values of this process's anchors [..., a] among those of :attr:`weighed` anchors."""
        return weighed if self.anchors is None or self.weighed is not None else weighed[..., self.anchors]

    def largest(self, values: Tensor) -> Tensor:
        """The element-wise maximum over all processes with anchors of their own."""
        if self.ring:
            return distributed.all_max(values)
        if self.gather is None or self.weighed is None:
            return values
        return self.gather(values.reshape(1, -1)).amax(0).view_as(values)

    def rows(self, side: Tensor, anchors: slice | None) -> Tensor:
        """The rows of a side that are anchors; None: all."""
        return side if anchors is None else side[anchors]

    def first(self, anchors: slice | None) -> int:
        """The place of the first anchor among the pairs of all ranks."""
        if self.ring:
            return distributed.rank() * len(self.images)
        return 0 if anchors is None else anchors.start

    def block(self, rows: Tensor, anchors: slice | None) -> Block:
        """The rows of the batch's other side [n, d] as candidates."""
        return Block(rows, self.ids, self.ids[slice(None) if anchors is None else anchors], visits=self.ring)

    def negatives(self, anchors: slice | None = None, *, dense: str | None = None, small: bool = True) -> Negatives:
        """The negatives of images and texts among the other side of the batch, and the images' hard negatives.

        Args:
            anchors: some of the pairs; None: all. dense, small: as of :meth:`form`.
        """
        mirrored = anchors is None and self.hard is None
        return self.choose(self.directions(anchors), mirrored=mirrored, dense=dense, small=small)

    def directions(self, anchors: slice | None) -> list[Direction]:
        """Images against the texts and their hard negatives, and texts against the images."""
        directions: list[Direction] = []
        for live, others in ((self.images, self.texts), (self.texts, self.images)):
            blocks = [self.block(others, anchors)]
            if self.hard is not None and not directions:
                blocks.append(self.hard_block(self.hard, anchors))
            first = 0 if anchors is None else anchors.start
            directions.append(Direction(self.rows(live, anchors), tuple(blocks), first))
        return directions

    def hard_block(self, hard: Block, anchors: slice | None) -> Block:
        """Hard negatives of all images as candidates of the anchors."""
        ids = None if hard.anchor_ids is None else self.rows(hard.anchor_ids, anchors)
        return hard._replace(anchor_ids=ids, visits=self.ring)

    def choose(
        self, directions: Sequence[Direction], *, mirrored: bool = False, dense: str | None = None, small: bool = True
    ) -> Negatives:
        """The negatives of other directions than the batch's own, in the form of :meth:`form`."""
        return self.form(directions, dense=dense, small=small)(directions, mirrored=mirrored)

    def form(
        self, directions: Sequence[Direction], *, dense: str | None = None, small: bool = True
    ) -> type[Dense] | type[Tiles]:
        """The form in which negatives are compared.

        Args:
            dense: the option that only ``Dense`` supports, as the user writes it; None: there is none.
            small: whether tiles save time for a small matrix too; else ``auto`` takes ``Dense`` for it. ``torch.compile`` fuses
                the operations of ``Dense``.
        """
        if dense is None and any(x.ndim == 3 for each in directions for x in (each.anchors, *(b.rows for b in each.blocks))):
            dense = "several features of one item"
        if dense and self.ring:
            raise CoderError(f"gather='ring' does not support {dense}: take gather='all'")
        if dense and self.implementation == "tiled":
            raise ValueError(f"implementation='tiled' does not support {dense}: take 'auto'")
        if self.ring:
            return Ring
        size = max(len(each.anchors) * sum(len(block.rows) for block in each.blocks) for each in directions)
        tiled = size > SMALL_MATRIX or (small and not torch.compiler.is_compiling())
        if dense or self.implementation == "reference" or (self.implementation == "auto" and not tiled):
            return Dense
        return Tiles


def scored_pairs(
    similarity: Tensor, text_to_image: Tensor | None, image_ids: Tensor | None, anchors: slice | None
) -> Dense:
    """The negatives of a batch whose scores are computed already, in both directions.

    Args:
        similarity: images x texts [n, n] with the pairs on the diagonal; with ``anchors`` the rows of these images alone.
        text_to_image: with ``anchors``, texts x images, the rows of these texts.
        image_ids: integers [n]; pairs of one image are not each other's negatives. None: all distinct.

    Raises:
        ValueError: shapes that do not fit, an empty batch.
    """
    if similarity.ndim != 2 or (anchors is None and similarity.shape[0] != similarity.shape[1]):
        raise ValueError(f"similarity must be square [n, n], got {tuple(similarity.shape)}; or pass anchors and text_to_image")
    if not similarity.numel():
        raise ValueError("similarity holds no pair")
    if anchors is None:
        text_to_image = similarity.T
    elif text_to_image is None or text_to_image.shape != similarity.shape:
        raise ValueError(f"with anchors, text_to_image must have similarity's shape {tuple(similarity.shape)}")
    check_range(similarity=similarity, text_to_image=text_to_image)
    n = similarity.shape[1]
    check_ids(image_ids, n)
    anchors = consecutive(anchors, n)
    ids = torch.arange(n, device=similarity.device) if image_ids is None else image_ids
    mask = (ids if anchors is None else ids[anchors])[:, None] != ids
    return Dense.of_scores([similarity, text_to_image], [mask, mask], 0 if anchors is None else anchors.start)


def hard_negatives(
    rows: Tensor | None, ids: Tensor | None, valid: Tensor | None, image_ids: Tensor | None, *, dim: int
) -> Block | None:
    """The arguments ``negatives``, ``negative_ids`` and ``negative_valid`` of a loss as one block; None without negatives.

    Raises:
        ValueError: other shapes than [m, dim], [m] and bool [m].
    """
    if rows is None:
        if ids is not None or valid is not None:
            raise ValueError("negative_ids and negative_valid need negatives")
        return None
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"negatives must have shape [m, {dim}], got {tuple(rows.shape)}")
    check_hard_ids(ids, valid, len(rows))
    check_range(negatives=rows)
    return Block(rows, ids, image_ids, valid)


def consecutive(anchors: slice | None, n: int) -> slice | None:
    """The anchors among n pairs, from a start to a stop.

    Raises:
        ValueError: rows that are not consecutive, or none.
    """
    if anchors is None:
        return None
    start, stop, step = anchors.indices(n)
    if step != 1 or start >= stop:
        raise ValueError(f"anchors must be a slice of consecutive rows of the {n} pairs, got {anchors}")
    return slice(start, stop)


def check_hard_ids(ids: Tensor | None, valid: Tensor | None, count: int) -> None:
    """:class:`ValueError` unless ids are [count] and valid is bool [count], where they are given."""
    for name, value in (("negative_ids", ids), ("negative_valid", valid)):
        if value is not None and value.shape != (count,):
            raise ValueError(f"{name} must have shape ({count},), got {tuple(value.shape)}")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"negative_valid must be bool, got {valid.dtype}")


def check_pair_shapes(image_features: Tensor, text_features: Tensor) -> None:
    """:class:`ValueError` unless both are [n, d], or [n, v, d] where an item has several features, of at least one pair."""
    shapes = [(len(x), x.shape[-1]) if x.ndim in (2, 3) else None for x in (image_features, text_features)]
    if shapes[0] is None or shapes[0] != shapes[1]:
        raise ValueError(
            "image_features and text_features must have one shape [n, d], got "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if not len(image_features):
        raise ValueError("image_features and text_features hold no pair")


def check_ids(image_ids: Tensor | None, n: int) -> None:
    """:class:`ValueError` unless the ids are None or have shape [n]."""
    if image_ids is not None and image_ids.shape != (n,):
        raise ValueError(f"image_ids must have shape ({n},), got {tuple(image_ids.shape)}")


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
