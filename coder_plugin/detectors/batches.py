"""The pictures of a source in batches for a detector, decoded and prepared by a loader's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from coder_plugin.detectors.base import Prepared


class Batch(NamedTuple):
    """Pictures of one unit, ready for the detector, and those that could not be decoded."""

    unit: int
    names: list[str]
    captions: list[tuple[str, ...]]
    pictures: list[Prepared]
    bad: list[tuple[str, str]]


class Batches(IterableDataset[Batch]):
    """The batches of one process's units; loader workers take turns, so the loader gives them in the source's order."""

    def __init__(
        self,
        source: Any,
        preprocess: Callable[[Any], Prepared],
        *,
        shard_size: int,
        batch_size: int,
        skip: set[int],
        part: int,
        parts: int,
    ) -> None:
        self.source, self.shard_size, self.batch_size = source, shard_size, batch_size
        self.preprocess, self.skip, self.part, self.parts = preprocess, skip, part, parts

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number, (unit, items) in enumerate(self._chunks()):
            if number % workers == worker:
                yield self._batch(unit, items)

    def _chunks(self) -> Iterator[tuple[int, list[Any]]]:
        size, at = self.shard_size, -1
        chunk: list[Any] = []
        for index, item in self.source.items(self.part, self.parts, block=size):
            unit = index // size
            if unit in self.skip:
                continue
            if chunk and (unit != at or len(chunk) == self.batch_size):
                yield at, chunk
                chunk = []
            at = unit
            chunk.append(item)
        if chunk:
            yield at, chunk

    def _batch(self, unit: int, items: list[Any]) -> Batch:
        batch = Batch(unit, [], [], [], [])
        for item in items:
            try:
                picture = item.load()
            except (OSError, ValueError) as exc:
                batch.bad.append((item.key, " ".join(str(exc).split()) or type(exc).__name__))
                continue
            batch.pictures.append(self.preprocess(picture))
            batch.names.append(item.key)
            batch.captions.append(item.captions)
        return batch


def as_it_is(batch: Batch) -> Batch:
    """In place of the loader's own step, which would make tensors of all arrays."""
    return batch
