"""Train from a stream of shards that is read in order, and resume inside a shard with the same batches.

A streamed data set of Hugging Face's ``datasets`` saves its place (``state_dict``) and continues there (``load_state_dict``),
but what its own shuffle buffer holds is then lost. So the buffer is ours. Sample n of a worker is delayed by a number of places
below ``shuffle_buffer``, a hash of the seed and n: its place in the order does not depend on what was read before. After a
restart the buffer is filled again from a state at most one and a quarter buffers old.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coder_plugin.data.dealing import Sample, deal_slices, deal_whole
from coder_plugin.data.item import Item, stable_hash
from coder_plugin.data.source import Plan, check_mode
from coder_plugin.errors import CoderError

#: A place in a worker's part of an epoch: ``shard`` and ``sample`` (their numbers in the part), ``position`` in the shard, and
#: the state of the ``dataset``, which is None at the start of a shard.
Mark = dict[str, Any]
#: What ``datasets.interleave_datasets`` reads with.
_INTERLEAVING = ("CyclingMultiSourcesExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable")


class StreamSource:
    """A streamed data set of Hugging Face's ``datasets``, divided between ranks and workers as tar shards are.

    A shard is read by one worker, or by two where a run of shards ends inside it (:mod:`coder_plugin.data.dealing`); with fewer
    shards than workers, those that share one all read it. For evaluation whole shards are dealt.

    Args:
        dataset: a ``datasets.IterableDataset`` that is neither shuffled nor interleaved.
        make_item: ``make_item(row, key)`` -> the item of a row; ``key`` is its key unless the row has one.
        name: for messages.
        num_images: how many rows there are; None: unknown.

    Raises:
        CoderError: the data set is shuffled or interleaved.
    """

    by_shards = True

    def __init__(
        self,
        dataset: Any,
        make_item: Callable[[Mapping[str, Any], str], Item],
        *,
        name: str = "stream",
        num_images: int | None = None,
    ) -> None:
        if _passes_through(getattr(dataset, "_ex_iterable", None), "BufferShuffledExamplesIterable"):
            raise CoderError(
                f"{name}: a stream with a shuffle buffer of its own cannot be resumed exactly: pass it without .shuffle(); "
                "shards and samples are shuffled by --seed"
            )
        if _passes_through(getattr(dataset, "_ex_iterable", None), *_INTERLEAVING):
            raise CoderError(
                f"{name}: a stream of interleave_datasets can hang or lose samples when its files are divided between "
                "processes: pass datasets.concatenate_datasets([...]); shards and samples are shuffled by --seed"
            )
        self.name, self.num_images = name, num_images
        self._dataset, self._make_item = dataset, make_item
        self._shards = range(dataset.num_shards)

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        count = num_samples or (self.num_images if check_mode(captions) == "draw" else None)
        if count is None:
            raise CoderError(
                f"{self.name}: the number of samples of a stream is unknown: give it (--train-num-samples), or read the data "
                "set whole (hf:NAME, or load_dataset without streaming=True)"
            )
        return count

    def chunks(self, plan: Plan) -> Chunks:
        return Chunks(self._shuffled(plan))

    def lazy_chunks(self, plan: Plan) -> Iterator[list[Sample]]:
        """As :meth:`chunks`, of functions that return the items."""
        for samples, _ in self._shuffled(plan):
            yield samples

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        yield from deal_whole(self._shards, self._read, rank, world_size, block)

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._shards)

    def read_shard(self, number: int) -> Iterator[Item]:
        """All items of a shard, in order."""
        return self._read(number)

    def _read(self, shard: int) -> Iterator[Item]:
        for position, row in enumerate(_rows(self._shard(shard))):
            yield self._item(row, shard, position)

    def _shard(self, shard: int) -> Any:
        return self._dataset.shard(num_shards=len(self._shards), index=shard, contiguous=True)

    def _item(self, row: Mapping[str, Any], shard: int, position: int) -> Item:
        return self._make_item(row, f"{shard}/{position}")

    def _samples(self, plan: Plan, start: Mark) -> Iterator[tuple[int, Sample, Mark | None]]:
        """The samples of a worker's part from ``start`` on, with their numbers in it; at times with the place before one."""
        number, marked = start["sample"], start["sample"]
        for place, (shard, slices, of) in enumerate(deal_slices(self._shards, plan)):
            if place < start["shard"]:
                continue
            dataset, position = self._shard(shard), 0
            if place == start["shard"] and start["dataset"] is not None:
                dataset.load_state_dict(start["dataset"])
                position = start["position"]
            rows, mark = _rows(dataset), None
            while True:
                if number >= marked + plan.shuffle_buffer // 4:
                    state = dataset.state_dict() if position else None
                    mark = {"shard": place, "position": position, "sample": number, "dataset": state}
                    marked = number
                if (row := next(rows, None)) is None:
                    break
                if position % of in slices:
                    item = self._item(row, shard, position)
                    captions = 1 if plan.captions == "draw" or item.fault is not None else len(item.captions)
                    for caption in range(captions):
                        yield number, Sample(lambda item=item: item, plan, caption), mark  # type: ignore[misc]
                        number, mark = number + 1, None
                position += 1

    def _shuffled(self, plan: Plan) -> Iterator[tuple[list[Sample], dict[str, Any]]]:
        """Chunks from ``plan.skip`` on, each with the state from which it can be made again."""
        check_mode(plan.captions)
        start = _checked(plan.start, self.name)
        if start is None or start["chunk"] > plan.skip:
            start = {"chunk": 0, "last": [-1, -1], "mark": {"shard": 0, "position": 0, "sample": 0, "dataset": None}}
        salt = stable_hash("buffer", plan.seed, plan.epoch, plan.rank, plan.world_size, plan.worker, plan.workers)
        buffer: list[tuple[int, int, Sample]] = []  # a heap, by the place that a sample moves to
        marks, number, last, chunk = deque([start["mark"]]), start["chunk"], tuple(start["last"]), []
        state = start

        def leaving(before: float) -> Iterator[Sample]:
            nonlocal last
            while buffer and buffer[0][0] <= before:
                *place, sample = heapq.heappop(buffer)
                if tuple(place) > last:  # else it left before the state was saved
                    last = tuple(place)
                    yield sample

        def arriving() -> Iterator[Sample]:
            for index, sample, mark in self._samples(plan, start["mark"]):
                if mark is not None:
                    marks.append(mark)
                delay = stable_hash("delay", salt, index) % max(1, plan.shuffle_buffer)
                heapq.heappush(buffer, (index + delay, index, sample))
                yield from leaving(index)
            yield from leaving(float("inf"))

        for sample in arriving():
            chunk.append(sample)
            if len(chunk) == plan.batch_size:
                if number >= plan.skip:
                    yield chunk, state
                number, chunk = number + 1, []
                # what has not left has a later place, and no sample moves by a whole buffer
                while len(marks) > 1 and marks[1]["sample"] <= last[0] - plan.shuffle_buffer + 1:
                    marks.popleft()
                state = {"chunk": number, "last": list(last), "mark": marks[0]}
        if chunk and number >= plan.skip:
            yield chunk, state


class Chunks(Iterator[list[Item]]):
    """Chunks of items. ``state`` is that of the last one: a plan that starts with it reads on from there."""

    def __init__(self, chunks: Iterator[tuple[list[Sample], dict[str, Any]]]) -> None:
        self._chunks = chunks
        self.state: dict[str, Any] | None = None

    def __next__(self) -> list[Item]:
        samples, self.state = next(self._chunks)
        return [sample() for sample in samples]


def _rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of one shard. (Iterating over the data set itself would divide it between a loader's workers.)"""
    for batch in dataset.iter(batch_size=1):
        yield {name: values[0] for name, values in batch.items()}


def _passes_through(examples: Any, *names: str) -> bool:
    """Whether a data set's examples pass through a class of one of these names."""
    if type(examples).__name__ in names:
        return True
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(_passes_through(each, *names) for each in inner if each is not None)


def _checked(start: Any, name: str) -> dict[str, Any] | None:
    """The state of a checkpoint, if it has the form of those that are made here."""
    if start is None:
        return None
    try:
        mark = start["mark"]
        counts = [start["chunk"], mark["shard"], mark["position"], mark["sample"], *(count + 1 for count in start["last"])]
        if len(start["last"]) == 2 and all(type(count) is int and count >= 0 for count in counts) and "dataset" in mark:
            return start
    except (KeyError, TypeError):
        pass
    raise CoderError(f"{name}: the checkpoint's place in the stream does not have the form that this version saves")
