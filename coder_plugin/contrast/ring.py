"""Candidates that stay on their ranks: one rank's rows after the other visit this one.

Shapes: a anchors of this rank, q candidates of each rank, d dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from coder_plugin import distributed


def ring_pass(
    block: Sequence[Tensor],
    visit: Callable[[Sequence[Tensor]], list[Tensor]],
    merge: Callable[[Tensor, Tensor], Tensor] = Tensor.add_,
) -> list[Tensor]:
    """Let every rank's block visit all ranks, and return what they computed about this rank's.

    The next block and the results travel while this rank computes.

    Args:
        block: this rank's tensors, which no visit changes; the same shapes and types on all ranks.
        visit: called with each rank's block, this rank's first; returns results about it, the same shapes on all ranks.
        merge: joins what was received with what a visit has returned; it may write into the first.

    Returns:
        The results about this rank's block, merged over all ranks.

    Example:
        >>> import torch
        >>> ring_pass([torch.tensor([1.0, 2.0])], lambda block: [3 * block[0]])  # one process
        [tensor([3., 6.])]
    """
    arriving: Callable[[], list[Tensor]] | None = None
    for step in range(distributed.world_size()):
        last = step == distributed.world_size() - 1
        next_block = None if last else distributed.ring_send_recv(block, channel=0)
        results = visit(block)
        if arriving is not None:
            results = [merge(one, other) for one, other in zip(arriving(), results, strict=True)]
        arriving = distributed.ring_send_recv(results, channel=1)
        if next_block is not None:
            block = next_block()
    assert arriving is not None
    return arriving()
