"""Chunks in, batches out: decoding in workers, full batches in front, and a position to continue from bit for bit.

A worker gives chunks: batches less their bad images. The main process hands a full chunk on as it is and closes the
gaps with rows of the next chunk, so a batch always has its size. Nothing in a worker remembers anything: a position
says which chunks were used up, and that is enough to begin again behind them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from coder_plugin.data.item import Item
from coder_plugin.data.source import BadImages, Chunk, Plan, Source, decode, isolated_rng, map_tensors
from coder_plugin.data.spans import locator
from coder_plugin.data.tags import Tags
from coder_plugin.errors import CoderError
from coder_plugin.negatives.positives import NONE, SAME_TOKENS, Positives

log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(kw_only=True)
class _Position:
    """All that decides which batch comes next. ``leftover`` rows are the last ones of the last chunk of worker
    ``last``: a batch is never larger than a chunk, so they cannot reach further back."""

    epoch: int
    batches: int = 0
    consumed: list[int] = field(default_factory=list)
    last: int = -1
    leftover: int = 0


class TrainLoader:
    """Batches of exactly ``batch_size`` rows, the same ones for the same arguments, on one rank of ``world_size``.

    Every rank has a position of its own (bad images fall on one rank): save and hand back each rank's. A rank may end
    an epoch before ``steps_per_epoch``, when shards are unequal or images bad, so ranks have to agree on each step.

    With ``positives`` batches also have the tokens of a positive caption for each row, ``text_positive`` [B, T] int64; all
    else in them stays as it is. ``positives_made`` counts the rows decoded so far by what made their positive: names of
    generators, and the kinds of :mod:`coder_plugin.negatives.positives` for those that have none.

    With ``tags`` they have ``text_tags`` [B, T] int64, the class of each token's word (:mod:`coder_plugin.data.tags`); the
    ids stay as they are. ``tagged`` counts the tokens so far by class, the captions, and those that are ``unmatched``.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        transform: Callable[[Any], Any],
        tokenizer: Callable[[list[str]], torch.Tensor],
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        captions: str = "draw",
        max_bad: int = 100,
        num_samples: int | None = None,
        pin_memory: bool = False,
        shuffle_buffer: int = 2000,
        positives: Positives | None = None,
        tags: Tags | None = None,
    ) -> None:
        for name, number, least in (("batch size", batch_size, 1), ("workers", workers, 0), ("max_bad", max_bad, 0)):
            if number < least:
                raise CoderError(f"{name} is {number}; it must be {least} or more")
        self.source = source
        self.samples_per_epoch = source.samples(captions, num_samples)
        self.steps_per_epoch = self.samples_per_epoch // (batch_size * world_size)
        if not self.steps_per_epoch:
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            raise CoderError(
                f"{source.name}: batch of {batch_size}{ranks} is larger than the data ({self.samples_per_epoch} "
                "samples); use a smaller --batch-size or more data"
            )
        self.bad = BadImages(source.name, max_bad)
        self._workers, self._pin_memory = workers, pin_memory and torch.cuda.is_available()
        self._transform, self._tokenizer, self._positives = transform, tokenizer, positives
        if tags is not None:
            locator(tokenizer)  # a tokenizer that will not do is told of now
        self._tags = tags
        self.positives_made: Counter[str] = Counter()
        self.tagged: Counter[str] = Counter()
        self._plan = Plan(
            seed=seed,
            epoch=0,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            workers=max(1, workers),
            captions=captions,
            shuffle_buffer=shuffle_buffer,
        )
        self._at = _Position(epoch=0, consumed=[0] * self._plan.workers)

    def epoch(self, epoch: int, position: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The batches of an epoch, or those that follow ``position`` in it."""
        start = _Position(epoch=epoch, consumed=[0] * self._plan.workers)
        if position is not None:
            start = self._checked(epoch, position)
            self.bad.restore(position["bad"])
        self._at = start
        return self._batches(start)

    def position(self) -> dict[str, Any]:
        """Where the last batch left off, for JSON; ``epoch`` of an equal loader goes on from there."""
        at = asdict(self._at)
        return {**at, "setting": self._setting(), "rank": self._plan.rank, "bad": list(self.bad.keys)}

    def _batches(self, start: _Position) -> Iterator[dict[str, Any]]:
        consumed, first = list(start.consumed), (start.last + 1) % self._plan.workers
        if start.leftover:
            first = start.last
            consumed[first] -= 1
        plan = replace(self._plan, epoch=start.epoch)
        stream = _TrainStream(
            self.source, plan, tuple(consumed), first, self._transform, self._tokenizer, self._positives, self._tags
        )
        left: dict[str, Any] = {}
        batches, again, size = start.batches, start.leftover, plan.batch_size
        if batches >= self.steps_per_epoch:
            return
        for chunk in _load(stream, self._workers, self._pin_memory):
            for key, reason in chunk.bad:
                self.bad.add(key, reason)
            self.positives_made.update(chunk.positives)
            if self._tags is not None and chunk.learned is not None:
                self.tagged.update(chunk.learned.counts)
                self._tags.add(chunk.learned.classes)
            consumed[chunk.worker] += 1
            if again:
                if len(chunk) < again:
                    raise CoderError(f"{self.source.name}: images that could be read before cannot be read now")
                chunk, again = chunk.rows(len(chunk) - again), 0
            if left:
                chunk = chunk.after(left)
                chunk = chunk.pin_memory() if self._pin_memory else chunk
            rest = len(chunk) - size
            if rest >= 0:
                batches += 1
                self._at = _Position(
                    epoch=start.epoch, batches=batches, consumed=list(consumed), last=chunk.worker, leftover=rest
                )
                # Cloned: what is left would hold on to the memory of the batch.
                left = map_tensors(torch.Tensor.clone, chunk.rows(size).tensors) if rest else {}
                yield (chunk.rows(0, size) if rest else chunk).tensors
                if batches == self.steps_per_epoch:
                    return
            else:
                left = chunk.tensors
        log.warning(
            "%s: rank %d ended epoch %d after %d of %d batches (unequal shards, bad images or a larger num_samples)",
            self.source.name,
            self._plan.rank,
            start.epoch,
            batches,
            self.steps_per_epoch,
        )

    def _setting(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "batch size": plan.batch_size,
            "ranks": plan.world_size,
            "workers": plan.workers,
            "seed": plan.seed,
            "captions": plan.captions,
            "shuffle buffer": plan.shuffle_buffer,
            "samples per epoch": self.samples_per_epoch,
            **({} if self._tags is None else {"tagger": self._tags.tagger}),
        }

    def _checked(self, epoch: int, position: dict[str, Any]) -> _Position:
        if position["epoch"] != epoch:
            raise CoderError(f"the position to resume from is in epoch {position['epoch']}, not in epoch {epoch}")
        if position["batches"]:
            now = {**self._setting(), "rank": self._plan.rank}
            then = {**position["setting"], "rank": position["rank"]}
            wrong = [f"{name} was {then.get(name)} and is {now[name]}" for name in now if then.get(name) != now[name]]
            if wrong:
                raise CoderError(
                    f"cannot resume in the middle of epoch {epoch}: {'; '.join(wrong)}; set it as it was, "
                    "or resume from the start of an epoch"
                )
        else:  # nothing used up yet: any setting may begin the epoch
            return _Position(epoch=epoch, consumed=[0] * self._plan.workers)
        names = ("epoch", "batches", "consumed", "last", "leftover")
        return _Position(**{name: position[name] for name in names})


def evaluation_batches(
    source: Source,
    *,
    batch_size: int,
    transform: Callable[[Any], Any],
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    max_bad: int = 100,
    bad: BadImages | None = None,
) -> Iterator[dict[str, Any]]:
    """Every image of the data set once over all ranks, with its key, all its captions as text and its position as ``index``.

    On one rank the batches come in order. Images that do not decode are left out and counted, in ``bad`` where given.
    """
    bad = BadImages(source.name, max_bad) if bad is None else bad
    stream = _EvaluationStream(source, rank, world_size, batch_size, transform)
    for chunk in _load(stream, workers, False):
        for key, reason in chunk.bad:
            bad.add(key, reason)
        if len(chunk):
            yield {**chunk.tensors, "captions": chunk.captions, "keys": chunk.keys}


class _Stream(IterableDataset):
    """Runs inside a worker. An exception would reach the user as two pages of traceback, so what a user can put right
    travels as an exception object that the main process raises; a bug still shows its traceback."""

    def __iter__(self) -> Iterator[Chunk | CoderError]:
        info = get_worker_info()
        try:
            yield from self.chunks(info.id if info else 0, info.num_workers if info else 1)
        except CoderError as exc:
            yield CoderError(str(exc))

    def chunks(self, worker: int, workers: int) -> Iterator[Chunk]:
        raise NotImplementedError


@dataclass
class _TrainStream(_Stream):
    """Physical worker 0 plays logical worker ``first``: the DataLoader always begins its round with worker 0."""

    source: Source
    plan: Plan
    skips: tuple[int, ...]
    first: int
    transform: Callable[[Any], Any]
    tokenizer: Callable[[list[str]], torch.Tensor]
    positives: Positives | None = None
    tags: Tags | None = None

    def chunks(self, worker: int, workers: int) -> Iterator[Chunk]:
        worker = (worker + self.first) % workers
        plan = replace(self.plan, worker=worker, skip=self.skips[worker])
        for items in self.source.chunks(plan):
            chunk, good = decode(items, self.transform, seed=plan.seed, epoch=plan.epoch, worker=worker)
            if good:
                texts = [items[number].captions[0] for number in good]
                with isolated_rng("text", plan.seed, plan.epoch, *texts):  # some tokenizers drop words at random
                    if self.tags is None:
                        chunk.tensors["text"] = self.tokenizer(texts)
                    else:
                        chunk.tensors["text"], chunk.tensors["text_tags"] = self.tags(texts, self.tokenizer)
                if self.positives is not None:
                    self._add_positives(chunk, [items[number] for number in good], plan, self.positives)
                if self.tags is not None:
                    chunk = replace(chunk, learned=self.tags.take())
            yield chunk

    def _add_positives(self, chunk: Chunk, items: list[Item], plan: Plan, positives: Positives) -> None:
        texts, kinds = [], []
        for item in items:
            caption = item.captions[0]
            # by sample, so that neighbours and workers change nothing
            with isolated_rng("positive", plan.seed, plan.epoch, item.image_id, caption):
                text, kind = positives(caption, item.others)
            texts.append(text)
            kinds.append(kind)
        # a call of its own: drawing for both at once would change what the captions' words lose
        with isolated_rng("positive text", plan.seed, plan.epoch, *texts):
            tokens = self.tokenizer(texts)
        for own, made, kind in zip(chunk.tensors["text"], tokens, kinds, strict=True):
            chunk.positives[SAME_TOKENS if kind != NONE and torch.equal(own, made) else kind] += 1
        chunk.tensors["text_positive"] = tokens


@dataclass
class _EvaluationStream(_Stream):
    """Blocks of images in the order of the data set, dealt in turn to ranks, and within a rank to workers."""

    source: Source
    rank: int
    world_size: int
    batch_size: int
    transform: Callable[[Any], Any]

    def chunks(self, worker: int, workers: int) -> Iterator[Chunk]:
        part, parts = worker * self.world_size + self.rank, self.world_size * workers
        found = self.source.items(part, parts, block=self.batch_size)
        for _, block in groupby(found, key=lambda pair: pair[0] // self.batch_size):
            index, items = zip(*block, strict=True)
            chunk, good = decode(list(items), self.transform, worker=worker)
            if good:
                chunk.tensors["index"] = torch.tensor([index[number] for number in good])
                chunk.captions.extend(items[number].captions for number in good)
                chunk.keys.extend(items[number].key for number in good)
            yield chunk


def _load(stream: _Stream, workers: int, pin_memory: bool) -> Iterator[Chunk]:
    """A DataLoader that passes chunks through and draws nothing from the global generator."""
    loader: DataLoader[Any] = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),
    )
    for chunk in loader:
        if isinstance(chunk, CoderError):
            raise chunk
        yield chunk


def _identity(chunk: _T) -> _T:
    return chunk
