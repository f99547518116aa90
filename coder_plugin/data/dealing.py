"""How shards are dealt to ranks and workers, in training and in evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from coder_plugin.data.item import Item, stable_hash
from coder_plugin.data.source import SHARD, Plan, draw_caption, one_caption

_Shard = TypeVar("_Shard")


def deal_slices(shards: Sequence[_Shard], plan: Plan) -> Iterator[tuple[_Shard, range, int]]:
    """A worker's part of an epoch, as (shard, its slices, number of slices a shard).

    With P parts (ranks × workers), each shard has P slices; sample j is in slice j mod P. The epoch's shuffled sequence of
    slices is cut into P equal runs. So a part shares at most the shards at the two ends of its run with others, none where P
    divides the number of shards, and no part is idle when shards are fewer than parts.

    Example:
        >>> plan = Plan(seed=0, epoch=0, batch_size=2, workers=2)
        >>> list(deal_slices(["a", "b", "c"], plan))
        [('a', range(0, 2), 2), ('b', range(0, 1), 2)]
    """
    order = list(shards)
    random.Random(stable_hash("shards", plan.seed, plan.epoch)).shuffle(order)
    parts = plan.world_size * plan.workers
    # A run has as many slices as there are shards. Runs are ordered by rank, then by worker.
    start = (plan.rank * plan.workers + plan.worker) * len(order)
    for number in range(start // parts, len(order)):
        first, last = max(start - number * parts, 0), min(start + len(order) - number * parts, parts)
        if first >= last:
            return
        yield order[number], range(first, last), parts


def deal_whole(
    shards: Sequence[_Shard],
    read: Callable[[_Shard], Iterable[Item | Callable[[], Item]]],
    rank: int,
    world_size: int,
    block: int,
) -> Iterator[tuple[int, Item]]:
    """A rank's items where whole shards are dealt (:func:`~coder_plugin.data.source.by_shards`), with their positions.

    Shard n belongs to rank n modulo ``world_size``. With fewer shards than ranks, the ranks that share a shard all read it and
    take its blocks in turn.

    Args:
        shards: all of them.
        read: the items of a shard in order, or functions that return them.
        rank, world_size, block: as in :meth:`coder_plugin.data.source.Source.items`.
    """
    turn, first = divmod(rank, len(shards))
    for number in range(first, len(shards), world_size):
        ranks = len(range(number, world_size, len(shards)))  # that share this shard
        ranks = max(1, min(ranks, SHARD // block))
        if turn >= ranks:
            continue
        for position, item in enumerate(read(shards[number])):
            if position // block % ranks == turn:
                yield number * SHARD + position, item() if callable(item) else item


class Sample:
    """A training sample in its place in the epoch's order, which is read when it is called."""

    __slots__ = ("_item", "_number", "_plan", "_read")

    def __init__(self, read: Callable[[], Item], plan: Plan, number: int) -> None:
        self._read, self._plan, self._number = read, plan, number
        self._item: Item | None = None

    def __call__(self) -> Item:
        """The item with one caption: the one drawn, or caption ``number`` where every caption is a sample."""
        if self._item is None:
            item, plan = self._read(), self._plan
            if plan.captions == "draw" or item.fault is not None:
                self._item = draw_caption(item, seed=plan.seed, epoch=plan.epoch)
            else:
                self._item = one_caption(item, self._number)
        return self._item
