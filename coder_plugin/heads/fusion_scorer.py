"""Fusion scores of a data set: of all its pairs, or of those that a shortlist has found (AsCL; METHODS 8, 10).

Shapes: N images, M texts, S positions (regions or words), D joint dimension, G groups of a images x b texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from coder_plugin.functional.fusion import Side
from coder_plugin.functional.masked_sets import lengths

#: Items of which sides are made at once.
_BATCH = 16
#: Images whose sides are held while all pairs are scored.
_IMAGES = 512
#: Kept sides are padded to the longest of so many parts of the data, by length: captions differ much.
_PARTS = 8


class FusionScorer:
    """Scores pairs of a data set's images and texts on the head's device, without a gradient.

    What items bring to all their pairs is made once and kept, if it fits into ``memory``, for the side of which a group has
    several; a shortlist's query is in one group alone. Tiles are cut to the longest items in them, which changes no score
    beyond rounding.

    Args:
        images, texts: what the head's ``image_item`` and ``text_item`` returned, of all N and M, on any device and of any
            float type. A mask may be longer than the longest of its items.
        image_side, text_side: an item on ``device`` -> its :class:`Side`. pairs: sides [G, a, ...], [G, b, ...] -> [G, a, b].
        pairs_per_tile: how many pairs are scored at once, which bounds the memory at work.
        memory: bytes of what may be kept. Where it does not suffice, each call makes it again.
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
        """Of images [G, a] and texts [G, b], int64: [G, a, b] on the head's device. A group's pairs are scored at once."""
        for items, index in ((self.images, image_index), (self.texts, text_index)):
            if index.shape[1] > 1:
                self.memory -= items.keep(self.memory)
        image_index, text_index = image_index.cpu(), text_index.cpu()
        order = self.texts.lengths[text_index].amax(1).argsort()  # like lengths together: less padding
        # what a group's items bring is copied for it, so that half as many pairs take the memory of a tile
        groups = max(1, self.pairs_per_tile // (2 * image_index.shape[1] * text_index.shape[1]))
        tiles = [self.pairs(self.images(image_index[g]), self.texts(text_index[g])) for g in order.split(groups)]
        scores = torch.cat(tiles)
        return torch.empty_like(scores).index_copy_(0, order.to(scores.device), scores)

    @torch.no_grad()
    def all_pairs(self) -> Tensor:
        """[N, M] on the CPU. What is held beside it does not grow with N and M."""
        scores = torch.empty(len(self.images), len(self.texts), dtype=self.images.dtype)
        edge = math.isqrt(self.pairs_per_tile)
        by_length = self.texts.lengths.argsort(descending=True)
        for block in self.images.lengths.argsort(descending=True).split(_IMAGES):
            tiles = [(rows, self.images.made(rows).map(lambda field: field[None])) for rows in block.split(edge)]
            for columns in by_length.split(edge):
                texts = self.texts.made(columns).map(lambda field: field[None])
                for rows, images in tiles:
                    scores[rows[:, None], columns] = self.pairs(images, texts)[0].cpu()
        return scores


class Items:
    """The items of one side, and what they bring to their pairs."""

    def __init__(
        self, item: Mapping[str, Tensor], make: Callable[[Mapping[str, Tensor]], Side], device: torch.device
    ) -> None:
        self.item, self.make, self.device = item, make, device
        self.lengths = lengths(item["mask"]).cpu()
        self.dtype = torch.promote_types(item["tokens"].dtype, torch.float32)
        self.kept: list[Side] | None = None
        self.tried = False
        self.part = self.place = torch.empty(0, dtype=torch.int64)  # where in kept each item is

    def __len__(self) -> int:
        return len(self.lengths)

    def made(self, index: Tensor) -> Side:
        """The sides of some items [n], cut to the longest of them."""
        length = int(self.lengths[index].max())
        rows = {name: field[index.to(field.device)] for name, field in self.item.items()}
        rows.update(tokens=rows["tokens"][:, :length], mask=rows["mask"][:, :length])
        return self.make({name: field.to(self.device) for name, field in rows.items()})

    def keep(self, memory: int) -> int:
        """Keep the sides of all items, once, if they fit into so many bytes -> how many these take."""
        if self.tried:
            return 0
        self.tried = True
        ordered = self.lengths.sort().values
        longest = ordered[[len(self) * part // _PARTS - 1 for part in range(1, _PARTS + 1)]].unique()
        self.part = torch.searchsorted(longest, self.lengths)
        parts = [(self.part == number).nonzero().squeeze(1) for number in range(len(longest))]
        taken = sum(_bytes(self.made(part[self.lengths[part].argmax()][None])) * len(part) for part in parts)
        if taken > memory:
            return 0
        self.place = torch.empty_like(self.part)
        self.kept = []
        for part in parts:
            self.place[part] = torch.arange(len(part))
            batches = torch.arange(len(part)).split(_BATCH)
            self.kept.append(_joined([self.made(part[rows]) for rows in batches], batches))
        return taken

    def __call__(self, index: Tensor) -> Side:
        """The sides of items [G, n], cut to the longest of them, with leading dimensions [G, n]."""
        flat = index.flatten()
        if self.kept is None:
            unique, inverse = flat.unique(return_inverse=True)
            side = _rows(self.made(unique), inverse)
        else:
            length, parts = int(self.lengths[flat].max()), self.part[flat]
            used = [(number, (parts == number).nonzero().squeeze(1)) for number in parts.unique().tolist()]
            sides = [_rows(self.kept[number].truncate(length), self.place[flat[rows]]) for number, rows in used]
            side = _joined(sides, [rows for _, rows in used])
        return side.map(lambda field: field.unflatten(0, index.shape))


def _rows(side: Side, index: Tensor) -> Side:
    index = index.to(side.mask.device)
    return side.map(lambda field: field.index_select(0, index))  # many times faster than field[index]


def _joined(sides: Sequence[Side], rows: Sequence[Tensor]) -> Side:
    """Sides of several lengths as one: each has these rows of it, padded to the longest."""
    if len(sides) == 1:
        return sides[0]
    if any(side.gram is None for side in sides):  # some are too long for Gamma
        sides = [side._replace(gram=None) for side in sides]
    longest = max(sides, key=lambda side: side.mask.shape[1])
    count = sum(map(len, rows))
    joined = longest.map(lambda field: field.new_zeros(count, *field.shape[1:]))
    for side, place in zip(sides, rows, strict=True):
        place = place.to(side.mask.device)
        for target, field in zip(joined.truncate(side.mask.shape[1]), side, strict=True):
            if target is not None and field is not None:
                target.index_copy_(0, place, field)
    return joined


def _bytes(side: Side) -> int:
    return sum(field.nbytes for field in side if field is not None)
