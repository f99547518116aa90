"""Data that are read in order: remote and compressed shards, and streamed data sets of Hugging Face's ``datasets``.

A worker reads its part of the shards through webdataset's pipeline, which shuffles samples in a buffer. In the middle of an
epoch a run continues exactly, on as many ranks and workers: each reads its part again, without decoding what was used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import webdataset as wds

from coder_plugin.data.item import Item, stable_hash
from coder_plugin.data.source import Source, check_mode, draw_caption, one_caption
from coder_plugin.errors import CoderError

#: Positions from one shard to the next; no shard has so many samples.
STRIDE = 1 << 32
#: Samples from which the next one is drawn.
BUFFER = 2000
#: What ``datasets.interleave_datasets`` reads with.
_INTERLEAVING = ("CyclingMultiSourcesExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable")


def deal(shards: Sequence[int], part: int, parts: int) -> Iterator[tuple[int, range]]:
    """A worker's part of shards in an epoch's order, as (shard, slices); sample n of a shard is in slice n modulo ``parts``.

    The sequence of all slices is cut into equal runs. So a part shares at most the shards at the two ends of its run with
    others, none where the parts divide the shards evenly, and no part is idle where there are fewer shards than parts.

    Example:
        >>> list(deal([0, 1, 2], 0, 2)), list(deal([0, 1, 2], 1, 2))
        ([(0, range(0, 2)), (1, range(0, 1))], [(1, range(1, 2)), (2, range(0, 2))])
    """
    start = part * len(shards)  # a run has as many slices as there are shards
    for number in range(start // parts, len(shards)):
        first, last = max(start - number * parts, 0), min(start + len(shards) - number * parts, parts)
        if first >= last:
            return
        yield shards[number], range(first, last)


class Stream(Source):
    """A data set in shards, each read from its start to its end. Subclasses have ``num_shards`` and ``read_shard``."""

    name = "stream"
    is_stream = True
    num_shards: int
    num_images: int | None = None  # type: ignore[assignment]
    buffer = BUFFER
    #: Whether shards are drawn with replacement, endlessly.
    resampled = False
    #: Where the number of samples may come from, for a message.
    _sizes = ""

    def read_shard(self, number: int) -> Iterator[Item]:
        """All items of a shard, in order."""
        raise NotImplementedError

    def samples(self, captions: str, num_samples: int | None = None) -> int:
        count = num_samples or (self.num_images if check_mode(captions) == "draw" else None)
        if count is None:
            raise CoderError(f"{self.name}: the number of samples is unknown: give --train-num-samples{self._sizes}")
        return count

    def items(self, part: int = 0, parts: int = 1) -> Iterator[tuple[int, Item]]:
        """Every image once over all parts: shard n belongs to part n modulo ``parts``, and the positions of its items begin at
        n times :data:`STRIDE`."""
        for shard in range(part, self.num_shards, parts):
            for number, item in enumerate(self.read_shard(shard)):
                yield shard * STRIDE + number, item

    def part(self, part: int, parts: int, *, seed: int, epoch: int, captions: str, skip: int = 0) -> Iterator[Item]:
        """The training samples of an epoch for one of ``parts`` workers of all ranks, shuffled, each with one caption.

        Args:
            part, parts: which worker, and how many all ranks have.
            seed, epoch: of the order and of drawn captions.
            captions: as of :class:`~coder_plugin.data.loader.TrainLoader`.
            skip: samples to leave out at the start.
        """
        check_mode(captions)

        def samples() -> Iterator[Item]:
            for shard, slices in self._dealt(part, parts, seed, epoch):
                for number, item in enumerate(self.read_shard(shard)):
                    if number % parts in slices:
                        if captions == "draw" or item.fault is not None:
                            yield draw_caption(item, seed=seed, epoch=epoch)
                        else:
                            yield from (one_caption(item, which) for which in range(len(item.captions)))

        salt = stable_hash("buffer", seed, epoch, part, parts)
        shuffle = wds.detshuffle(bufsize=self.buffer, initial=max(1, self.buffer // 4), seed=salt)
        return iter(wds.DataPipeline(samples, shuffle, wds.slice(skip, None)))

    def _dealt(self, part: int, parts: int, seed: int, epoch: int) -> Iterator[tuple[int, range]]:
        if self.resampled:
            rng = random.Random(stable_hash("resample", seed, epoch, part, parts))
            while True:
                yield rng.randrange(self.num_shards), range(parts)
        order = list(range(self.num_shards))
        random.Random(stable_hash("shards", seed, epoch)).shuffle(order)
        yield from deal(order, part, parts)

    def digest(self) -> dict[str, Any]:
        """As of :class:`~coder_plugin.data.source.Source`: of a stream no more than the number of shards is known."""
        return {"shards": self.num_shards}


class StreamSource(Stream):
    """A streamed data set of Hugging Face's ``datasets``.

    Args:
        dataset: a ``datasets.IterableDataset`` that is neither shuffled nor interleaved.
        make_item: ``make_item(row, key)`` -> the item of a row; ``key`` is its key unless the row has one.
        name: for messages.
        num_images: how many rows there are; None: unknown.

    Raises:
        CoderError: the data set is shuffled or interleaved.
    """

    _sizes = ", or read the data set whole (hf:NAME, or load_dataset without streaming=True)"

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
        self.num_shards = dataset.num_shards

    def read_shard(self, number: int) -> Iterator[Item]:
        shard = self._dataset.shard(num_shards=self.num_shards, index=number, contiguous=True)
        rows = shard.iter(batch_size=1)  # iterating over the data set itself would divide it between a loader's workers
        for position, batch in enumerate(rows):
            yield self._make_item({name: values[0] for name, values in batch.items()}, f"{number}/{position}")


def _passes_through(examples: Any, *names: str) -> bool:
    """Whether a data set's examples pass through a class of one of these names."""
    if type(examples).__name__ in names:
        return True
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(_passes_through(each, *names) for each in inner if each is not None)
