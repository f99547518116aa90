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
def pair_variance(
    images: Tensor, block: Block, number: Tensor, *, kept: Tensor | None = None, ring: bool = False
) -> Tensor:
    """Variances of images and of the block's texts as anchors, each with the other side as candidates: [2, n].

    Args:
        number: of the negatives of each pair, int64 [n].
        kept: the similarities [n, n], of any value where a row is not a negative. None: made here, tile by tile.
    """
    texts, number, dtype = block.rows, number.clamp(min=1), result_dtype(images, [block])
    with full_precision(images):
        means = torch.stack([images.mean(0, dtype=dtype), texts.mean(0, dtype=dtype)])
        means = distributed.all_mean(means) if ring else means
        pivots, first, second = torch.zeros(3, 2, len(images), dtype=dtype, device=images.device)
        for part in chunks(images):  # near the mean of each row and column, so that nothing cancels
            pivots[0, part], pivots[1, part] = images[part].to(dtype) @ means[1], texts[part].to(dtype) @ means[0]

        def run(visitor: Visitor) -> list[Tensor]:
            rows, ids, pivot = visitor["rows"], visitor["ids"], visitor["pivot"]
            of_rows = torch.zeros(2, len(rows), dtype=dtype, device=rows.device)
            for part, tile in tiles(images, rows, whole_rows=True):
                if kept is None:
                    live, candidates = matmul_inputs(images[part], rows[tile], dtype=dtype)
                    similarity = matmul(live, candidates.T)
                else:
                    similarity = kept[part, tile]
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
