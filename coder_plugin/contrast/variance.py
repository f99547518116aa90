"""Population variances over the negatives of anchors, tile by tile; without a gradient.

Shapes: n pairs, a anchors, q candidates, d dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast.autograd import Visitor, result_dtype, visit
from coder_plugin.contrast.negatives import Block, Direction, excluded
from coder_plugin.contrast.products import chunks, full_precision, matmul, matmul_inputs, tiles
from coder_plugin.tensors import is_on_cpu

#: The Gram form takes out same-image pairs one by one, if an image has at most this many texts in a batch.
MAX_SAME_IMAGE = 16


def counts(block: Block, anchors: Tensor, *, ring: bool = False) -> Tensor:
    """The number of each anchor's negatives in a block: int64 [a]."""
    result = torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device)

    def run(visitor: Visitor) -> list[Tensor]:
        ids, valid = visitor.get("ids"), visitor.get("valid")
        number = len(visitor["rows"])
        valid = torch.ones(number, dtype=torch.int64, device=anchors.device) if valid is None else valid.long()
        if ids is None or block.anchor_ids is None:
            result.add_(valid.sum())
            return []
        ordered, order = ids.sort()
        before = torch.nn.functional.pad(valid[order].cumsum(0), (1, 0))  # valid ones before each place
        end, start = (torch.searchsorted(ordered, block.anchor_ids, right=right) for right in (True, False))
        result.add_(before[-1] - before[end] + before[start])
        return []

    # of the rows only their number is needed
    visit(block._replace(rows=block.rows[:, :1]) if block.visits else block, run, ring=ring)
    return result


@torch.no_grad()
def candidate_variance(direction: Direction, number: Tensor, *, ring: bool = False) -> Tensor:
    """Variance of each anchor's similarities to its negatives [a], about the mean of all candidates.

    Args:
        number: of the negatives of each anchor, int64 [a].
    """
    anchors, blocks, _ = direction
    dtype = result_dtype(anchors, blocks)
    with full_precision(anchors):
        pivot = _mean(blocks, dtype, ring=ring)
        first, second = anchors.new_zeros(2, len(anchors), dtype=dtype)
        for block in blocks:

            def run(visitor: Visitor, anchor_ids: Tensor | None = block.anchor_ids) -> list[Tensor]:
                rows, ids, valid = visitor["rows"], visitor.get("ids"), visitor.get("valid")
                for part, tile in tiles(anchors, rows):
                    centred = anchors[part].to(dtype) @ (rows[tile].to(dtype) - pivot).T
                    mask = excluded(
                        None if ids is None else ids[tile],
                        None if anchor_ids is None else anchor_ids[part],
                        None if valid is None else valid[tile],
                    )
                    if mask is not None:
                        centred.masked_fill_(mask, 0)
                    first[part] += centred.sum(1)
                    second[part] += torch.linalg.vecdot(centred, centred)
                return []

            visit(block, run, ring=ring)
        number = number.clamp(min=1)
        return (second / number - (first / number).square()).clamp_(min=0)


@torch.no_grad()
def pair_variance(images: Tensor, block: Block, number: Tensor, *, ring: bool = False) -> Tensor:
    """Variances of images and of the block's texts as anchors, each with the other side as candidates: [2, n].

    Args:
        number: of the negatives of each pair, int64 [n].
    """
    texts, number, dtype = block.rows, number.clamp(min=1), result_dtype(images, [block])
    with full_precision(images):
        if not ring and len(images) >= 2 * images.shape[1]:
            repeats = _repeats(block.ids, images)
            if repeats is not None:
                sides = (images, texts), (texts, images)
                return torch.stack([_gram_variance(*each, number, repeats, dtype) for each in sides])
        means = torch.stack([images.mean(0, dtype=dtype), texts.mean(0, dtype=dtype)])
        means = distributed.all_mean(means) if ring else means
        pivots, first, second = torch.zeros(3, 2, len(images), dtype=dtype, device=images.device)
        for part in chunks(images):  # near the mean of each row and column, so that nothing cancels
            pivots[0, part], pivots[1, part] = images[part].to(dtype) @ means[1], texts[part].to(dtype) @ means[0]

        def run(visitor: Visitor) -> list[Tensor]:
            rows, ids, pivot = visitor["rows"], visitor["ids"], visitor["pivot"]
            of_rows = torch.zeros(2, len(rows), dtype=dtype, device=rows.device)
            for part, tile in tiles(images, rows, whole_rows=True):
                live, candidates = matmul_inputs(images[part], rows[tile], dtype=dtype)
                similarity = matmul(live, candidates.T)
                same = block.anchor_ids[part, None] == ids[tile]  # type: ignore[index]
                centred = (similarity - pivots[0][part, None]).masked_fill_(same, 0)
                first[0, part] += centred.sum(1)
                second[0, part] += torch.linalg.vecdot(centred, centred)
                torch.sub(similarity, pivot[tile], out=centred).masked_fill_(same, 0)
                of_rows[0, tile] += centred.sum(0)
                of_rows[1, tile] += centred.square_().sum(0)
            return [of_rows]

        (of_texts,) = visit(block, run, ring=ring, more={"pivot": pivots[1]})
        first[1], second[1] = of_texts
        return (second / number - (first / number).square()).clamp_(min=0)


def tile_variance(similarity: Tensor, number: Tensor | int) -> Tensor:
    """:func:`pair_variance` of one tile of similarities [n, n], about their mean, and 0 where there is no negative."""
    squares = similarity.square()
    sums = [each.sum(dim) for each in (similarity, squares) for dim in (1, 0)]
    mean, square = torch.stack(sums).div_(number).split(2)
    return square.sub_(mean.square()).clamp_(min=0)  # a fused product could round to -0


def _mean(blocks: Sequence[Block], dtype: torch.dtype, *, ring: bool) -> Tensor:
    """The mean of the valid candidates [d], in ``dtype`` one tile at a time."""
    rows = blocks[0].rows
    totals = rows.new_zeros(2, rows.shape[1] + 1, dtype=dtype)  # sum and number, of rows that visit and of rows that do not
    for block in blocks:
        for _, tile in tiles(rows[:1], block.rows):
            part = block.rows[tile].to(dtype)
            valid = part.new_ones(len(part)) if block.valid is None else block.valid[tile].to(dtype)
            totals[int(not block.visits), :-1] += valid @ part
            totals[int(not block.visits), -1] += valid.sum()
    if ring:
        totals[0] = distributed.all_sum(totals[0])
    total = totals.sum(0)
    return total[:-1] / total[-1].clamp(min=1)


def _gram_variance(
    anchors: Tensor, candidates: Tensor, number: Tensor, repeats: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Variance from the second moment of the centred candidates [d, d]; same-image pairs are taken out one by one."""
    mean = candidates.mean(0, dtype=dtype)
    moment = torch.zeros_like(mean).expand(len(mean), -1).clone()
    for part in chunks(candidates):
        centred = candidates[part].to(dtype) - mean
        moment.addmm_(centred.T, centred)
    order, start, size = repeats
    first, second = anchors.new_zeros(2, len(anchors), dtype=dtype)
    for part in chunks(anchors):
        rows = anchors[part].to(dtype)
        second[part] = torch.linalg.vecdot(rows @ moment, rows)
        for rank in range(int(size[part].max())):
            one = candidates[order[(start[part] + rank).clamp(max=len(order) - 1)]].to(dtype).sub_(mean)
            similarity = torch.where(rank < size[part], torch.linalg.vecdot(rows, one), 0)
            first[part] -= similarity
            second[part] -= similarity.square()
    return (second / number - (first / number).square()).clamp_(min=0)


def _repeats(ids: Tensor | None, features: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where each anchor's image is in the batch: an order by image, the first position there and the number, [n] each.

    None if an image is repeated often, or if reading that would synchronise.
    """
    if ids is None or type(features) is not Tensor or not is_on_cpu(features):
        return None
    ordered, order = ids.sort()
    start = torch.searchsorted(ordered, ids)
    size = torch.searchsorted(ordered, ids, right=True) - start
    return (order, start, size) if int(size.max()) <= MAX_SAME_IMAGE else None
