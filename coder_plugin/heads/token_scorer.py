"""Scores of a data set's pairs by the tokens of both: of all pairs, or of a shortlist's.

Shapes: N images, M texts, S positions (patches, regions or words), D joint dimension, G groups of a images x b texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from coder_plugin.masked import lengths

#: Number of items whose sides are computed at once.
_BATCH = 16
#: Number of images whose sides are held while all pairs are scored.
_IMAGES = 512
#: Stored sides are sorted by length into so many parts and padded within a part, because captions differ much in
#: length.
_PARTS = 8


class TokenSide(Protocol):
    """What items contribute to all their pairs: a named tuple of tensors, or None, with equal leading dimensions.

    ``mask`` is bool [..., S]. :class:`~coder_plugin.heads.fusion_scores.Side` is one.
    """

    @property
    def mask(self) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor | None]: ...

    def map(self: Side, function: Callable[[Tensor], Tensor]) -> Side:
        """The function applied to every tensor."""
        ...

    def truncate(self: Side, length: int) -> Side:
        """The first ``length`` positions only."""
        ...


Side = TypeVar("Side", bound=TokenSide)


def default_tile(device: torch.device) -> int:
    """Pairs that a device scores at once, unless an option sets their number."""
    return 256 if device.type == "cpu" else 4096


class TokenScorer(Generic[Side]):
    """Scores pairs of a data set's images and texts on a device, without a gradient: the
    :class:`~coder_plugin.heads.capabilities.PairScorer` of re-rankers that compare tokens.

    A *side* is what an item contributes to all its pairs (:class:`TokenSide`). The sides of images or texts that come
    in groups of several are computed once and stored, if they fit into ``memory``; a shortlist's query is in one group
    only. Tiles are cut to their longest items, which changes scores by rounding only.

    Args:
        images, texts: the outputs of ``image_item`` and ``text_item`` for all N images and M texts, on any device and
            in any float type, with ``tokens`` [N or M, S, D] and ``mask`` [N or M, S]. A mask may be longer than its
            longest item.
        image_side, text_side: items on ``device`` -> their side. pairs: sides [G, a, ...], [G, b, ...] -> [G, a, b].
        device: where pairs are scored.
        pairs_per_tile: number of pairs that are scored at once; bounds the working memory.
        memory: bytes for stored sides. If it does not suffice, each call computes them again.
    """

    def __init__(
        self,
        images: Mapping[str, Tensor],
        texts: Mapping[str, Tensor],
        *,
        image_side: Callable[[Mapping[str, Tensor]], Side],
        text_side: Callable[[Mapping[str, Tensor]], Side],
        pairs: Callable[[Side, Side], Tensor],
        device: torch.device,
        pairs_per_tile: int,
        memory: int,
    ) -> None:
        self.images, self.texts = Items(images, image_side, device), Items(texts, text_side, device)
        self.pairs, self.pairs_per_tile, self.memory = pairs, pairs_per_tile, memory

    @torch.no_grad()
    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        """Numbers of images [G, a] and texts [G, b], int64 -> scores [G, a, b] on the device."""
        for items, index in ((self.images, image_index), (self.texts, text_index)):
            if index.shape[1] > 1:
                self.memory -= items.store(self.memory)
        image_index, text_index = image_index.cpu(), text_index.cpu()
        order = self.texts.lengths[text_index].amax(1).argsort()  # similar lengths share a tile: less padding
        # the sides are copied for each group, so a tile has room for half as many pairs
        groups = max(1, self.pairs_per_tile // (2 * image_index.shape[1] * text_index.shape[1]))
        tiles = [self.pairs(self.images(image_index[g]), self.texts(text_index[g])) for g in order.split(groups)]
        scores = torch.cat(tiles)
        return torch.empty_like(scores).index_copy_(0, order.to(scores.device), scores)

    @torch.no_grad()
    def all_pairs(self) -> Tensor:
        """Scores [N, M] on the CPU. The working memory does not grow with N and M."""
        scores = torch.empty(len(self.images), len(self.texts), dtype=self.images.dtype)
        edge = math.isqrt(self.pairs_per_tile)
        by_length = self.texts.lengths.argsort(descending=True)
        for block in self.images.lengths.argsort(descending=True).split(_IMAGES):
            tiles = [(rows, self.images.compute(rows).map(lambda field: field[None])) for rows in block.split(edge)]
            for columns in by_length.split(edge):
                texts = self.texts.compute(columns).map(lambda field: field[None])
                for rows, images in tiles:
                    scores[rows[:, None], columns] = self.pairs(images, texts)[0].cpu()
        return scores


class Items(Generic[Side]):
    """The items of one modality, and their sides."""

    def __init__(
        self, item: Mapping[str, Tensor], make: Callable[[Mapping[str, Tensor]], Side], device: torch.device
    ) -> None:
        self.item, self.make, self.device = item, make, device
        self.lengths = lengths(item["mask"]).cpu()
        self.dtype = torch.promote_types(item["tokens"].dtype, torch.float32)
        self.stored: list[Side] | None = None
        self.tried = False
        self.part = self.row = torch.empty(0, dtype=torch.int64)  # part and row of each item in ``stored``

    def __len__(self) -> int:
        return len(self.lengths)

    def compute(self, index: Tensor) -> Side:
        """Computes the sides of some items, int64 [n], cut to the longest of them."""
        length = int(self.lengths[index].max())
        rows = {name: field[index.to(field.device)] for name, field in self.item.items()}
        rows.update(tokens=rows["tokens"][:, :length], mask=rows["mask"][:, :length])
        return self.make({name: field.to(self.device) for name, field in rows.items()})

    def store(self, memory: int) -> int:
        """Stores the sides of all items, once, if they fit into ``memory`` bytes. Returns the bytes taken."""
        if self.tried:
            return 0
        self.tried = True
        ordered = self.lengths.sort().values
        longest = ordered[[len(self) * part // _PARTS - 1 for part in range(1, _PARTS + 1)]].unique()
        self.part = torch.searchsorted(longest, self.lengths)
        parts = [(self.part == number).nonzero().squeeze(1) for number in range(len(longest))]
        taken = sum(_bytes(self.compute(part[self.lengths[part].argmax()][None])) * len(part) for part in parts)
        if taken > memory:
            return 0
        self.row = torch.empty_like(self.part)
        self.stored = []
        for part in parts:
            self.row[part] = torch.arange(len(part))
            batches = torch.arange(len(part)).split(_BATCH)
            self.stored.append(_joined([self.compute(part[rows]) for rows in batches], batches))
        return taken

    def __call__(self, index: Tensor) -> Side:
        """The sides of items int64 [G, n], cut to the longest of them, with leading dimensions [G, n]."""
        flat = index.flatten()
        if self.stored is None:
            unique, inverse = flat.unique(return_inverse=True)
            side = _rows(self.compute(unique), inverse)
        else:
            length, parts = int(self.lengths[flat].max()), self.part[flat]
            used = [(number, (parts == number).nonzero().squeeze(1)) for number in parts.unique().tolist()]
            sides = [_rows(self.stored[number].truncate(length), self.row[flat[rows]]) for number, rows in used]
            side = _joined(sides, [rows for _, rows in used])
        return side.map(lambda field: field.unflatten(0, index.shape))


def _rows(side: Side, index: Tensor) -> Side:
    index = index.to(side.mask.device)
    return side.map(lambda field: field.index_select(0, index))  # many times faster than field[index]


def _joined(sides: Sequence[Side], rows: Sequence[Tensor]) -> Side:
    """Joins sides of several lengths, padded to the longest; ``rows`` are the rows of each in the result.

    A field that the longest side lacks, such as the Gram matrix of long items, the result lacks too.
    """
    if len(sides) == 1:
        return sides[0]
    longest = max(sides, key=lambda side: side.mask.shape[1])
    count = sum(map(len, rows))
    joined = longest.map(lambda field: field.new_zeros(count, *field.shape[1:]))
    for side, row in zip(sides, rows, strict=True):
        row = row.to(side.mask.device)
        for target, field in zip(joined.truncate(side.mask.shape[1]), side, strict=True):
            if target is not None and field is not None:
                target.index_copy_(0, row, field)
    return joined


def _bytes(side: Side) -> int:
    return sum(field.nbytes for field in side if field is not None)
