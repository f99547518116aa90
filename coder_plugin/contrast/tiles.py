"""The negatives of anchors tile by tile: no matrix of all similarities is kept (docs/equations.md#tiles).

Shapes: k directions, n pairs, a anchors of a direction, q candidates, d dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast.autograd import (
    Visitor,
    apply,
    dense_gradients,
    exclude,
    flatten,
    result_dtype,
    save,
    saved,
    unflatten,
    visit,
    wants_graph,
)
from coder_plugin.contrast.negatives import Block, Dense, Direction, Negatives
from coder_plugin.contrast.products import add_product, fp16_scale, full_precision, matmul, matmul_inputs, tiles
from coder_plugin.contrast.sums import LogSumExp, OneTile, Tile
from coder_plugin.contrast.variance import candidate_variance, counts, pair_variance, tile_variance
from coder_plugin.tensors import add_rows, cosine_of_rows, upcast

#: A mirrored batch with at most this many similarities is one tile, which is kept for the backward pass instead of computed
#: again: 64 MB of float32, and twice that for the exponentials of both directions.
ONE_TILE = 1 << 24


class Tiles(Negatives):
    """The statistics of :class:`~coder_plugin.contrast.Dense`, in memory that grows with the number of rows alone.

    Anchors and rows are [a, d] and [q, d]. A mirrored batch makes one product for both directions. Where a gradient of a
    gradient is asked for, the backward pass goes through ``Dense``.

    Example:
        >>> eye, ids = torch.eye(3), torch.arange(3)
        >>> Tiles([Direction(eye, (Block(eye, ids, ids),))]).logsumexp(torch.tensor(1.0))
        tensor([[0.6931, 0.6931, 0.6931]])
    """

    #: Whether blocks may visit from other ranks.
    ring = False

    def __init__(self, directions: Sequence[Direction], *, mirrored: bool = False) -> None:
        super().__init__(directions, mirrored=mirrored)
        self._tile: Tile | None = None
        self._positive: Tensor | None = None
        self._count: list[Tensor] | None = None
        self._variance: Tensor | None = None

    @property
    def positive(self) -> Tensor:
        if self._positive is None:
            rows = [
                cosine_of_rows(anchors, blocks[0].rows[first : first + len(anchors)])
                for anchors, blocks, first in self.directions[: 1 if self.mirrored else None]
            ]
            self._positive = rows[0] if self.mirrored else torch.stack(rows)
        return self._positive

    def count(self) -> Tensor:
        return torch.stack(self._counts()).expand(len(self.directions), -1)

    def _counts(self) -> list[Tensor]:
        """The number of negatives [a] of each direction; of mirrored ones only once."""
        if self._count is None:
            self._count = []
            for anchors, blocks, _ in self.directions[: 1 if self.mirrored else None]:
                of_blocks = [counts(block, anchors, ring=self.ring) for block in blocks]
                self._count.append(sum(of_blocks[1:], of_blocks[0]))
        return self._count

    def variance(self) -> Tensor:
        if self._variance is None:
            anchors, blocks, _ = self.directions[0]
            if self._one_tile():
                tile = self._make_tile()
                self._variance = tile_variance(tile.similarity, tile.number)
            elif self.mirrored:
                self._variance = pair_variance(anchors, blocks[0], self._counts()[0], ring=self.ring)
            else:
                pairs = zip(self.directions, self._counts(), strict=True)
                self._variance = torch.stack([candidate_variance(each, n, ring=self.ring) for each, n in pairs])
        return self._variance

    def logsumexp(self, scale: Tensor | float, offset: float = 0.0, ceiling: Tensor | None = None) -> Tensor:
        scale = torch.as_tensor(scale, device=self.directions[0].anchors.device)
        mirrored = self.mirrored and ceiling is None
        if mirrored and self._one_tile():
            anchors, (block,), _ = self.directions[0]
            tile, self._tile = self._make_tile(), None  # which is overwritten
            sums, self._positive, *_ = apply(OneTile, anchors, block.rows, scale, offset, tile, block.ids)
            return sums
        sums = []
        for k, (anchors, blocks, _) in enumerate(self.directions[: 1 if mirrored else None]):
            frozen = not any(block.rows.requires_grad for block in blocks)
            average = frozen and torch.is_grad_enabled() and (anchors.requires_grad or scale.requires_grad)
            passed = (
                scale if mirrored or not scale.ndim else scale[k],
                None if ceiling is None else ceiling[k],
                offset, mirrored, self.ring, average and not mirrored,
            )  # fmt: skip
            value, positive, *_ = apply(LogSumExp, anchors, *passed, *flatten(blocks))
            sums.append(value)
            if positive is not None:
                self._positive = positive
        return sums[0] if mirrored else torch.stack(sums)

    def hardest(self) -> Tensor:
        if self.mirrored and not self.ring:
            (images, (block,), _), (texts, _, _) = self.directions
            places = _hardest_places(images, block, both=True)
            sides = zip((images, texts), (texts, images), places, strict=True)
            return torch.stack([_similarity_at(live, others, *place) for live, others, place in sides])
        values = []
        for anchors, blocks, _ in self.directions:
            hardest = None
            for block in blocks:
                if self.ring and block.visits:
                    value = apply(_RingHardest, anchors, *block)[0]
                else:
                    (place,) = _hardest_places(anchors, block)
                    value = _similarity_at(anchors, block.rows, *place)
                hardest = value if hardest is None else torch.maximum(hardest, value)
            values.append(hardest)
        return torch.stack(values)  # type: ignore[arg-type]

    def hinge(self, margin: float) -> Tensor:
        positive = self.positive.expand(len(self.directions), -1)
        return torch.stack(
            [
                apply(_HingeSum, anchors, each, margin, self.ring, *flatten(blocks))
                for (anchors, blocks, _), each in zip(self.directions, positive, strict=True)
            ]
        )

    def _one_tile(self) -> bool:
        return self.mirrored and not self.ring and len(self.directions[0].anchors) ** 2 <= ONE_TILE

    def _make_tile(self) -> Tile:
        """All similarities without a gradient."""
        if self._tile is None:
            anchors, (block,), _ = self.directions[0]
            with full_precision(anchors):
                v, w = matmul_inputs(anchors.detach(), block.rows.detach(), dtype=result_dtype(anchors, [block]))
                assert block.ids is not None  # a mirrored batch has ids
                self._tile = Tile.of(matmul(v, w.T), block.ids)
        return self._tile


class Ring(Tiles):
    """:class:`Tiles` of this rank's anchors, where blocks of other ranks' rows visit this rank, one after the other.

    No rank holds the rows of all ranks. A product of a mirrored batch serves both directions: the sums of this rank's images
    stay, those of the visiting texts travel on with their rank's other results. It has first derivatives only.
    """

    ring = True


# -- the hardest negative --------------------------------------------------------------------------------------------


def _search(
    anchors: Tensor, anchor_ids: Tensor | None, visitor: Visitor, found: Callable[[Tensor, slice, slice], None]
) -> None:
    """Call ``found`` with each tile of similarities, -inf where there is no negative, and its place."""
    dtype = torch.promote_types(upcast(anchors).dtype, visitor["rows"].dtype)
    with full_precision(anchors):
        for part, tile in tiles(anchors, visitor["rows"], whole_rows=True):
            live, candidates = matmul_inputs(anchors[part], visitor["rows"][tile], dtype=dtype)
            found(exclude(matmul(live, candidates.T), visitor, anchor_ids, part, tile), part, tile)


@torch.no_grad()
def _hardest_places(anchors: Tensor, block: Block, *, both: bool = False) -> list[tuple[Tensor, Tensor]]:
    """For each anchor the index of its hardest negative in the block [a], and bool [a], whether there is one.

    ``both``: also those of the block's rows among the anchors.
    """
    dtype = result_dtype(anchors, [block])
    values = [anchors.new_full((len(x),), -torch.inf, dtype=dtype) for x in (anchors, block.rows)[: 1 + both]]
    places = [torch.zeros_like(each, dtype=torch.int64) for each in values]

    def found(similarity: Tensor, part: slice, tile: slice) -> None:
        for k, where, start in ((0, part, tile.start), (1, tile, part.start))[: 1 + both]:
            largest, place = similarity.max(1 - k)
            places[k][where] = torch.where(largest > values[k][where], place + start, places[k][where])
            values[k][where] = torch.maximum(values[k][where], largest)

    def run(visitor: Visitor) -> list[Tensor]:
        if len(block.rows):
            _search(anchors, block.anchor_ids, visitor, found)
        return []

    visit(block, run, ring=False)
    return [(place, value > -torch.inf) for place, value in zip(places, values, strict=True)]


def _similarity_at(anchors: Tensor, rows: Tensor, place: Tensor, exists: Tensor) -> Tensor:
    """Similarity of each anchor to the row at its place [a]; -inf where there is none. Only its gradient needs these rows."""
    if not len(rows):
        return upcast(anchors).sum(1).mul(0).masked_fill(~exists, -torch.inf)
    return apply(_RowProducts, anchors, rows, place).masked_fill(~exists, -torch.inf)


class _RowProducts(torch.autograd.Function):
    """Inner product of each anchor with the row at its place [a]. The rows are looked up again in the backward pass."""

    @staticmethod
    def forward(anchors: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        return cosine_of_rows(anchors, rows[place])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        anchors, rows, place = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if wants_graph():
            inputs = [anchors, rows]
            return *dense_gradients(lambda a, r: cosine_of_rows(a, r[place]), inputs, needed, gradient), None
        share = gradient[:, None]
        of_anchors = (rows[place].to(share.dtype) * share).to(anchors.dtype) if needed[0] else None
        of_rows = None
        if needed[1]:
            total = torch.zeros_like(rows, dtype=share.dtype)
            of_rows = add_rows(total, place, anchors.to(share.dtype) * share).to(rows.dtype)
        return of_anchors, of_rows, None


class _RingHardest(torch.autograd.Function):
    """The greatest similarity of each anchor [a] to a negative among the rows of all ranks, with its rank and place there."""

    @staticmethod
    def forward(
        anchors: Tensor, rows: Tensor, ids: Tensor | None, anchor_ids: Tensor | None, valid: Tensor | None, visits: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        block = Block(rows, ids, anchor_ids, valid, visits)
        values = anchors.new_full((len(anchors),), -torch.inf, dtype=result_dtype(anchors, [block]))
        owners, places = torch.zeros(2, len(anchors), dtype=torch.int64, device=anchors.device)

        def run(visitor: Visitor) -> list[Tensor]:
            def found(similarity: Tensor, part: slice, tile: slice) -> None:
                largest, place = similarity.max(1)
                greater = largest > values[part]
                places[part] = torch.where(greater, place + tile.start, places[part])
                owners[part] = torch.where(greater, visitor["rank"], owners[part])
                values[part] = torch.maximum(values[part], largest)

            if len(visitor["rows"]):
                _search(anchors, anchor_ids, visitor, found)
            return []

        visit(block, run, ring=True, more={"rank": _rank(anchors)})
        return values, owners, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        anchors, rows, owners, places = ctx.saved_tensors
        if wants_graph():
            dense_gradients(lambda: None, [], [], None, ring=True)
        of_anchors = torch.zeros_like(anchors, dtype=gradient.dtype)

        def run(visitor: Visitor) -> list[Tensor]:
            visiting = visitor["rows"].to(gradient.dtype)
            own = owners == visitor["rank"]
            place, share = places.masked_fill(~own, 0), gradient.masked_fill(~own, 0)[:, None]
            of_anchors.addcmul_(visiting[place], share)
            return [add_rows(torch.zeros_like(visiting), place, anchors.to(gradient.dtype) * share)]

        (of_rows,) = visit(Block(rows, visits=True), run, ring=True, more={"rank": _rank(anchors)})
        return of_anchors.to(anchors.dtype), of_rows.to(rows.dtype), None, None, None, None


def _rank(like: Tensor) -> Tensor:
    return torch.tensor([distributed.rank()], device=like.device)


# -- the sum of hinges -----------------------------------------------------------------------------------------------


class _HingeSum(torch.autograd.Function):
    """``sum_neg max(0, margin + S - S_positive)`` of anchors [a]; the backward pass makes each tile again."""

    @staticmethod
    def forward(anchors: Tensor, positive: Tensor, margin: float, ring: bool, *fields: Any) -> Tensor:
        sums = torch.zeros_like(positive)
        for block in unflatten(fields):

            def run(visitor: Visitor, anchor_ids: Tensor | None = block.anchor_ids) -> list[Tensor]:
                def found(similarity: Tensor, part: slice, tile: slice) -> None:
                    sums[part] += similarity.sub_(positive[part, None] - margin).clamp_(min=0).sum(1)

                _search(anchors, anchor_ids, visitor, found)
                return []

            visit(block, run, ring=ring)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        anchors, positive, ctx.margin, ctx.ring, *fields = inputs
        save(ctx, unflatten(fields), anchors, positive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (anchors, positive), blocks = saved(ctx, 2)
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        places = [0, 1, *range(4, len(results), len(Block._fields))]  # anchors, positive, rows
        if wants_graph():

            def statistic(anchors: Tensor, positive: Tensor, *rows: Tensor) -> Tensor:
                filled = tuple(block._replace(rows=each) for block, each in zip(blocks, rows, strict=True))
                dense = Dense([Direction(anchors, filled)])
                similarity, mask = dense.similarity[0], dense.masks[0]
                hinge = (ctx.margin + similarity - positive[:, None]).clamp(min=0)
                return torch.where(mask, hinge, 0).sum(1)

            inputs = [anchors, positive, *(block.rows for block in blocks)]
            needed = [bool(ctx.needs_input_grad[place]) for place in places]
            for place, each in zip(
                places, dense_gradients(statistic, inputs, needed, gradient, ring=ctx.ring), strict=True
            ):
                results[place] = each
            return tuple(results)
        unit = fp16_scale(gradient, anchors)
        if unit is not None and ctx.ring:
            unit = distributed.all_max(unit)
        scaled = gradient if unit is None else gradient / unit
        active = torch.zeros_like(positive)
        of_anchors = torch.zeros_like(anchors, dtype=positive.dtype)
        for k, block in enumerate(blocks):

            def run(
                visitor: Visitor, block: Block = block, wanted: bool = ctx.needs_input_grad[places[2 + k]]
            ) -> list[Tensor]:
                rows = visitor["rows"]
                of_rows = torch.zeros_like(rows, dtype=positive.dtype) if wanted else None

                def found(similarity: Tensor, part: slice, tile: slice) -> None:
                    slopes = (similarity >= positive[part, None] - ctx.margin).to(positive.dtype)
                    active[part] += slopes.sum(1)
                    slopes.mul_(scaled[part, None])
                    live, candidates = matmul_inputs(anchors[part], rows[tile], dtype=positive.dtype)
                    add_product(of_anchors[part], slopes, candidates)
                    if of_rows is not None:
                        add_product(of_rows[tile], slopes.T, live)

                _search(anchors, block.anchor_ids, visitor, found)
                return [] if of_rows is None else [of_rows]

            if returned := visit(block, run, ring=ctx.ring):
                of_rows = returned[0] if unit is None else returned[0] * unit
                results[places[2 + k]] = of_rows.to(block.rows.dtype)
        of_anchors = of_anchors if unit is None else of_anchors * unit
        results[0], results[1] = of_anchors.to(anchors.dtype), -active * gradient
        return tuple(results)
