"""What an interrupted epoch has left, for other numbers of workers, ranks and samples a batch.

The order of an epoch's samples follows from the seed, the epoch and the plan that began it. So the samples that are left follow
from the positions of its ranks: each is read again as that rank's workers would have read it, without decoding, and the samples
are dealt to the new ranks and workers. Whatever the new numbers are, no sample is left out and none is used twice, except that
the last ones may not fill a batch. Until the epoch ends every worker goes through the order of all that is left for its
ranks: of tables and local shards it reads its own samples alone, of remote shards it has to read all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

from coder_plugin.data.item import Item
from coder_plugin.data.source import Plan, Source, lazy_chunks

_Read = Callable[[], Item]


class Chunked(Protocol):
    """What gives chunks by a plan: a source, or what is left of its epoch."""

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """As of :class:`~coder_plugin.data.source.Source`."""


class Remainder:
    """The chunks of the samples that are left, as of a source.

    Args:
        source: the data set.
        positions: of all ranks of the interrupted loader; or one, whose samples this rank alone takes over.

    Example:
        >>> from coder_plugin.data.source import ItemSource
        >>> source = ItemSource([Item(str(n), ("a dog",), lambda: None) for n in range(8)])
        >>> [[item.key for item in chunk] for chunk in source.chunks(Plan(seed=0, epoch=0, batch_size=2))]
        [['1', '6'], ['4', '0'], ['5', '3'], ['2', '7']]
        >>> setting = {"ranks": 1, "workers": 1, "batch size": 2, "seed": 0, "captions": "draw", "shuffle buffer": 0}
        >>> position = {"epoch": 0, "rank": 0, "consumed": [1], "last": 0, "leftover": 0, "setting": setting}
        >>> plan = Plan(seed=0, epoch=0, batch_size=3)
        >>> [[item.key for item in chunk] for chunk in Remainder(source, [position]).chunks(plan)]
        [['4', '0', '5'], ['3', '2', '7']]
    """

    def __init__(self, source: Source, positions: Sequence[dict[str, Any]]) -> None:
        self._source, self._positions = source, positions

    def chunks(self, plan: Plan) -> Iterator[list[Item]]:
        """Chunks of ``plan.batch_size`` items for a worker of a rank; the last may be smaller."""
        for chunk in self.lazy_chunks(plan):
            yield [read() for read in chunk]

    def lazy_chunks(self, plan: Plan) -> Iterator[list[Callable[[], Item]]]:
        """As :meth:`chunks`, of functions that return the items."""
        left = [_left(self._source, position) for position in self._positions]
        mine = left[0] if len(left) == 1 and _ranks(self._positions[0]) == plan.world_size else _dealt(left, plan)
        number = 0
        while chunk := list(islice(mine, plan.batch_size)):
            if number % plan.workers == plan.worker and number // plan.workers >= plan.skip:
                yield chunk
            number += 1


def _ranks(position: dict[str, Any]) -> int:
    return position["setting"]["ranks"]


def _dealt(left: list[Iterator[_Read]], plan: Plan) -> Iterator[_Read]:
    """A rank's samples of those that all ranks have left, taken from each in turn: the order in which they were dealt."""
    return islice(_in_turn(left), plan.rank, None, plan.world_size)


def _left(source: Source, position: dict[str, Any]) -> Iterator[_Read]:
    """The samples that a rank would have used after its position, in order."""
    setting, consumed, workers = position["setting"], list(position["consumed"]), position["setting"]["workers"]
    states = position.get("states") or [None] * workers
    reader: Chunked = Remainder(source, position["rest"]) if position.get("rest") else source
    first = (position["last"] + 1) % workers
    if position["leftover"]:  # the last chunk again, from its first unused row
        first = position["last"]
        consumed[first] -= 1
    plans = [
        Plan(
            seed=setting["seed"],
            epoch=position["epoch"],
            batch_size=setting["batch size"],
            rank=position["rank"],
            world_size=setting["ranks"],
            worker=worker,
            workers=workers,
            skip=consumed[worker],
            captions=setting["captions"],
            shuffle_buffer=setting["shuffle buffer"],
            start=states[worker],
        )
        for worker in [*range(first, workers), *range(first)]
    ]
    samples = chain.from_iterable(_in_turn([lazy_chunks(reader, plan) for plan in plans]))
    return islice(samples, position["offset"] if position["leftover"] else 0, None)


def _in_turn(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """One of each in turn, as a DataLoader does with its workers, until all have ended."""
    while streams:
        ended = []
        for stream in streams:
            try:
                yield next(stream)
            except StopIteration:
                ended.append(stream)
        streams = [stream for stream in streams if stream not in ended]
