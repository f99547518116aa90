"""Momentum keys and banks as candidates, and the stash that fills the banks (CODER section 3.2.3; docs/equations.md#m-dcl).

Shapes: N pairs of all ranks, q entries of a bank, a anchors, d dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast import Block, Direction, Pairs
from coder_plugin.losses.diversity import Diversity, needs_dense, raw_diversity, raw_diversity_of_variance

if TYPE_CHECKING:
    from coder_plugin.losses.base import Term


class Memory(NamedTuple):
    """Keys of the batch and entries of the banks; of pairs, images come first.

    Args:
        keys: momentum features of all pairs [N, d] each, without a gradient.
        banks: keys of earlier steps [q, d] each, in any float type.
        key_ids: the image of each key, integers [N].
        bank_ids: of each entry [q]. None: no entry shows an anchor's image.
        bank_valid: bool [q], True where the bank is filled. None: everywhere.
    """

    keys: tuple[Tensor, Tensor]
    banks: tuple[Tensor, Tensor]
    key_ids: Tensor
    bank_ids: Tensor | None = None
    bank_valid: Tensor | None = None

    def blocks(self, side: int, anchor_ids: Tensor) -> tuple[Block, Block]:
        """Keys and entries of a side (0: images, 1: texts) as candidates of anchors of the other one."""
        entries = Block(self.banks[side], self.bank_ids, anchor_ids, self.bank_valid)
        return Block(self.keys[side], self.key_ids, anchor_ids), entries

    def directions(self, pairs: Pairs, anchors: slice | None) -> list[Direction]:
        """Live images against keys and entries of texts, and live texts against those of images."""
        ids, first = pairs.rows(pairs.ids, anchors), pairs.first(anchors)
        sides = enumerate((pairs.images, pairs.texts))
        return [Direction(pairs.rows(live, anchors), self.blocks(1 - side, ids), first) for side, live in sides]


class Banks:
    """The current keys of all ranks and the momentum banks, for a term.

    Args:
        term: the term that reads them; the head that provides the keys holds the ``bank``.
        pairs: the live pairs. In a ring the keys of all ranks are gathered here, without a gradient: the banks store them.
        image_keys: [N, d]. text_keys: [N, d]. ids: image ids [N], which the bank stores.
        mask_same_image: whether keys and entries of an anchor's own image are excluded from its negatives.
    """

    requires: ClassVar[tuple[str, ...]] = ("coder_ids", "coder_image_keys", "coder_text_keys")

    def __init__(
        self, term: Term, pairs: Pairs, image_keys: Tensor, text_keys: Tensor, ids: Tensor, *, mask_same_image: bool
    ) -> None:
        self.head = term.provider("coder_image_keys", "bank")
        image_keys, text_keys = image_keys.detach(), text_keys.detach()
        if pairs.ring:
            image_keys, text_keys, ids = distributed.gather_together([image_keys, text_keys, ids])
        self.bank, self.pairs, self.ids = self.head.bank, pairs, ids
        self.memory = Memory(
            (image_keys, text_keys),
            (self.bank.image, self.bank.text),
            ids if pairs.has_ids else torch.arange(len(ids), device=ids.device),
            self.bank.ids if mask_same_image else None,
            self.bank.valid,
        )

    def stash(self) -> None:
        """Hand the keys to the head, which writes them to the banks after the step."""
        image_keys, text_keys = self.memory.keys
        self.head.stash(image_keys=image_keys, text_keys=text_keys, ids=self.ids)

    def diversity(self, *, kind: Diversity, epsilon: float, gradient: bool) -> tuple[Tensor, Tensor]:
        """The normalised diversity of the image and the text anchors [a] over keys and entries of the other modality.

        Without a gradient the standard deviation comes from the bank's running moments, so that no a x q matrix is needed.
        """
        pairs = self.pairs
        live = [pairs.rows(side, pairs.weighed) for side in (pairs.images, pairs.texts)]
        number = torch.promote_types(live[0].dtype, torch.float32)
        if kind == "none":
            ones = live[0].new_ones(len(pairs.rows(pairs.ids, pairs.anchors)), dtype=number)
            return ones, ones
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            if kind == "std" and not torch.is_grad_enabled():
                variances = [
                    self.bank.variance(
                        modality,
                        anchors,
                        self.memory.keys[1 - side],
                        pairs.rows(pairs.ids, pairs.weighed),
                        self.memory.key_ids,
                        mask_entries=self.memory.bank_ids is not None and pairs.has_ids,
                    )
                    for side, (modality, anchors) in enumerate(zip(("text", "image"), live, strict=True))
                ]
                raw = raw_diversity_of_variance(torch.stack(variances), epsilon).to(number)
            else:
                directions = self.memory.directions(pairs, pairs.weighed)
                negatives = pairs.choose(directions, dense=needs_dense(kind, gradient))
                raw = raw_diversity(negatives, kind=kind, epsilon=epsilon)
            images, texts = pairs.own(raw / pairs.largest(raw.amax(-1, keepdim=True)))
        return images, texts
