"""Batches for training and evaluation, decoded in workers, with a position from which training resumes bit for bit.

A worker yields chunks: batches without their bad samples. The main process yields full chunks unchanged and fills
others with rows of the next chunk, so a batch always has its size. Workers keep no state: a position lists how many chunks of
each worker were used, which is enough to continue after them. An epoch may also be continued by another number of workers or
ranks: then what is left of it is dealt anew (:mod:`coder_plugin.data.remainder`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from coder_plugin.data.bad_samples import DEFAULT_RATE, BadSamples
from coder_plugin.data.hard_negatives import HardNegatives
from coder_plugin.data.item import NO_POSITIVE, NO_TEXT, SAME_TOKENS, Item
from coder_plugin.data.remainder import Chunked, Remainder
from coder_plugin.data.source import (
    Chunk,
    Plan,
    Source,
    block_of,
    decode,
    isolated_rng,
    map_tensors,
    prepare,
    preserved_rng,
    seed_rng,
)
from coder_plugin.data.workers import start_worker
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Settings that may change within an epoch: what is left of it is then dealt anew.
DEALT_ANEW = ("ranks", "workers", "batch size")

#: ``positives(caption, others)`` -> a positive caption and its kind; see :class:`coder_plugin.noise.positives.Positives`.
MakePositive = Callable[[str, tuple[str, ...]], tuple[str, str]]


class TagWords(Protocol):
    """Adds word classes to token ids, such as :class:`coder_plugin.concepts.tags.Tags`."""

    tagger: str

    def __call__(self, captions: list[str], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and classes, both int64 [B, T]."""

    def check(self, tokenizer: Any) -> None:
        """Raise ``CoderError`` if the tokenizer cannot be used."""

    def take(self) -> Any:
        """What this process has computed since the last call: ``counts`` and the ``classes`` of captions."""

    def add(self, classes: Any) -> None:
        """Cache the classes that another process has computed."""


@dataclass(kw_only=True)
class _Position:
    """What decides which batch comes next. ``leftover`` counts the unused rows at the end of the last chunk, which worker
    ``last`` made; a batch is never larger than a chunk, so there are none before it. ``offset`` is the place in that chunk of
    the first of them. ``before`` counts the samples of all ranks that other settings have used, whose positions ``rest`` holds:
    everything else counts from there. ``states`` holds for each worker that of its last chunk, where the source has states."""

    epoch: int
    batches: int = 0
    consumed: list[int] = field(default_factory=list)
    last: int = -1
    leftover: int = 0
    offset: int = 0
    before: int = 0
    rest: list[dict[str, Any]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)


_POSITION = tuple(each.name for each in fields(_Position))


def count_steps(name: str, samples: int, batch_size: int, world_size: int) -> int:
    """Batches of an epoch on each rank.

    Raises:
        CoderError: there is none, because a batch is larger than the data.
    """
    steps = samples // (batch_size * world_size)
    if not steps:
        ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
        raise CoderError(
            f"{name}: --batch-size {batch_size}{ranks} is larger than the data ({samples} samples): "
            "use a smaller --batch-size, or more data"
        )
    return steps


class TrainLoader:
    """Batches of exactly ``batch_size`` rows on one rank of ``world_size``; equal arguments give equal batches.

    A batch is a dict of ``image`` (a tensor or a dict of them), ``image_id`` int64 [B] and ``text`` int64 [B, T].

    Bad samples are left out. ``bad``, a :class:`~coder_plugin.data.bad_samples.BadSamples`, counts the epoch's on this rank.

    Each rank has its own position (bad samples fall on one rank), to be saved and restored by rank. A rank may end an
    epoch before ``steps_per_epoch`` if shards are unequal or samples bad, so ranks must agree on each step.

    Args:
        source: the data.
        batch_size: B, rows of a batch on this rank, from 1.
        transform: from a picture or regions to a tensor or a dict of tensors.
        tokenizer: from n captions to int64 ids [n, T].
        seed: of order, drawn captions and augmentation.
        workers: decoding processes; 0 decodes in this process.
        captions: ``draw`` (each image once an epoch with one caption) or ``all`` (every caption is a sample).
        max_bad_samples: allowed fraction of bad samples of an epoch on this rank, judged once 1,000 are read.
        num_samples: samples of an epoch over all ranks, for data that cannot be counted.
        pin_memory: copy batches to pinned memory if CUDA is available.
        shuffle_buffer: samples from which a stream of shards is shuffled.
        positives: adds ``text_positive`` [B, T] int64, the tokens of a positive caption for each row; everything else stays
            the same. ``positives_made`` counts the rows by the kind of their positive.
        negatives: adds ``text_negatives`` [B, n, T] int64, the tokens of n hard negatives for each row, and
            ``text_negative_ids`` [B, n] int64, the ids of the images that they are captions of: -1 where that is not known, -2
            where there is no text (its tokens are those of an empty one). ``negatives_drawn`` counts filled and empty places.
        tags: adds ``text_tags`` [B, T] int64, the class of each token's word; ids stay the same. ``tagged`` counts tokens by
            class, captions, and ``unmatched`` captions.

    Raises:
        CoderError: a value out of range, a batch larger than the data, or a tokenizer that ``tags`` cannot use.

    Example:
        >>> import torch
        >>> from coder_plugin.data import open_source
        >>> def tokenizer(captions):
        ...     return torch.tensor([[len(caption)] for caption in captions])
        >>> loader = TrainLoader(
        ...     open_source("scenes"), batch_size=4, transform=lambda picture: torch.zeros(3), tokenizer=tokenizer
        ... )
        >>> batch = next(loader.epoch(0))
        >>> sorted(batch), batch["image_id"].shape
        (['image', 'image_id', 'text'], torch.Size([4]))
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
        max_bad_samples: float = DEFAULT_RATE,
        num_samples: int | None = None,
        pin_memory: bool = False,
        shuffle_buffer: int = 2000,
        positives: MakePositive | None = None,
        negatives: HardNegatives | None = None,
        tags: TagWords | None = None,
    ) -> None:
        for name, number, least in (("batch size", batch_size, 1), ("workers", workers, 0)):
            if number < least:
                raise CoderError(f"{name} is {number}; it must be {least} or more")
        self.source = source
        self.samples_per_epoch = source.samples(captions, num_samples)
        self.steps_per_epoch = count_steps(source.name, self.samples_per_epoch, batch_size, world_size)
        self.bad = BadSamples(source.name, max_bad_samples)
        self._workers, self._pin_memory = workers, pin_memory and torch.cuda.is_available()
        self._transform, self._tokenizer = transform, tokenizer
        self._positives, self._negatives = positives, negatives
        if tags is not None:
            tags.check(tokenizer)
        self._tags = tags
        self.positives_made: Counter[str] = Counter()
        self.negatives_drawn: Counter[str] = Counter()
        self._key = ""  # of an image that was read
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
        self._again: dict[str, Any] = {"read": 0, "kinds": {}}

    def epoch(self, epoch: int, position: dict[str, Any] | Sequence[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
        """The batches of an epoch, or those after ``position`` in it.

        Args:
            epoch: its number, which the order depends on.
            position: of this rank; or, in the order of ranks, those of all the ranks that began the epoch, whose number may
                be another. With another number of workers every rank continues with the same samples in the same batches;
                with another number of ranks or another batch size, what all ranks have left is dealt anew.

        Raises:
            CoderError: a position of another epoch or, within an epoch, of another order of samples; too many bad samples.
        """
        start = _Position(epoch=epoch, consumed=[0] * self._plan.workers)
        self.bad.restart()
        if position is not None:
            positions = [position] if isinstance(position, dict) else list(position)
            start = self._resume(epoch, positions)
            for each in positions[self._plan.rank :: self._plan.world_size] if len(positions) > 1 else positions:
                if each["batches"] or each["before"]:
                    self.bad.restore(each["bad"])
                    if start.rest:  # the unused rows of the last chunk are counted when they are read again
                        self.bad.forget(each["again"])
        self._at = start
        return self._batches(start)

    def position(self) -> dict[str, Any]:
        """The position after the last batch, as JSON values, from which :meth:`epoch` continues.

        ``batches`` of ``of`` have been used: of this epoch or, if it was continued by other ranks or workers, since then.
        """
        at = self._at
        return {
            **{name: getattr(at, name) for name in _POSITION},
            "consumed": list(at.consumed),  # the only lists that change while batches are made
            "states": list(at.states) if any(at.states) else [],
            "of": self._batches_of(self._at),
            "setting": self._setting(),
            "rank": self._plan.rank,
            "bad": self.bad.state(),
            "again": self._again,
        }

    def _batches_of(self, position: _Position) -> int:
        return (self.samples_per_epoch - position.before) // (self._plan.batch_size * self._plan.world_size)

    def _batches(self, start: _Position) -> Iterator[dict[str, Any]]:
        skips, first = list(start.consumed), (start.last + 1) % self._plan.workers
        if start.leftover:
            first = start.last
            skips[first] -= 1
        plan = replace(self._plan, epoch=start.epoch)
        source: Chunked = Remainder(self.source, start.rest) if start.rest else self.source
        states = list(start.states) or [None] * plan.workers
        starts = tuple([None] * plan.workers if start.rest else states)
        make_texts = self._tokenizer, self._positives, self._negatives, self._tags
        stream = _TrainStream(source, plan, tuple(skips), starts, first, self._transform, *make_texts)
        left: dict[str, Any] = {}
        at, again, size, of = start, start.leftover, plan.batch_size, self._batches_of(start)
        consumed, at.consumed, at.states = skips, list(start.consumed), list(states)
        if at.batches >= of:
            return
        for chunk in _load(stream, self._workers, self._pin_memory):
            if not again:  # else it was counted before
                self.bad.add(len(chunk) + len(chunk.bad), chunk.bad)
            self.positives_made.update(chunk.positives)
            self._count_negatives(chunk)
            if self._tags is not None and chunk.learned is not None:
                self.tagged.update(chunk.learned.counts)
                self._tags.add(chunk.learned.classes)
            consumed[chunk.worker] += 1
            states[chunk.worker] = chunk.state
            if again:
                if len(chunk) < again:
                    raise CoderError(f"{self.source.name}: images that were readable before can no longer be read")
                chunk, again = chunk.rows(len(chunk) - again), 0
            if left:
                chunk = chunk.after(left)
                chunk = chunk.pin_memory() if self._pin_memory else chunk
            rest = len(chunk) - size
            if rest >= 0:
                at.batches += 1
                at.consumed[:], at.states[:] = consumed, states  # with the chunks that had too few rows for a batch
                at.last, at.leftover, at.offset = chunk.worker, rest, chunk.good[-rest] if rest else 0
                self._again = _read_again(chunk, rest)
                # Cloned, so that it does not keep the whole batch in memory.
                left = map_tensors(torch.Tensor.clone, chunk.rows(size).tensors) if rest else {}
                yield (chunk.rows(0, size) if rest else chunk).tensors
                if at.batches == of:
                    self.bad.finish()
                    return
            else:
                left = chunk.tensors
        self.bad.finish()
        log.warning(
            "%s: rank %d ended epoch %d after %d of %d batches (unequal shards, bad samples or a larger num_samples)",
            self.source.name,
            self._plan.rank,
            start.epoch,
            at.batches,
            of,
        )

    def _count_negatives(self, chunk: Chunk) -> None:
        """Count the places, and warn once 1,000 rows had no hard negative (a small data set is checked before training)."""
        before, drawn = self.negatives_drawn.total(), self.negatives_drawn
        drawn.update(chunk.negatives)
        self._key = next(iter(chunk.keys), self._key)
        if self._negatives is not None and not drawn["filled"] and before < 1000 * self._negatives.count <= drawn.total():
            why = self.few_negatives(drawn)
            log.warning("%s: none of the first 1,000 samples has a hard negative%s", self.source.name, why)

    def few_negatives(self, drawn: Counter[str]) -> str:
        """What is likely the matter where below 10 % of the places ``drawn`` are filled, for a message; else ``""``."""
        if self._negatives is None or 10 * drawn["filled"] >= drawn.total():
            return ""
        return f": {self._negatives.where(self._key)}"

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

    def _resume(self, epoch: int, positions: list[dict[str, Any]]) -> _Position:
        rank, now = self._plan.rank, self._setting()
        for position in positions:
            if position["epoch"] != epoch:
                raise CoderError(f"the position to resume from is in epoch {position['epoch'] + 1}, not in epoch {epoch + 1}")
        if not any(position["batches"] or position.get("rest") for position in positions):
            return _Position(epoch=epoch, consumed=[0] * self._plan.workers)  # at the start any setting may be used
        then = positions[0]["setting"]
        wrong = [
            f"{name} was {then.get(name)} and is {now[name]}"
            for name in now
            if name not in DEALT_ANEW and then.get(name) != now[name]
        ]
        if wrong:
            raise CoderError(
                f"cannot resume in the middle of epoch {epoch + 1}: {'; '.join(wrong)}; use the old value, "
                "or resume from the start of an epoch"
            )
        own = next((each for each in positions if each["rank"] == rank), None)
        same_batches = own is not None and all(then[name] == now[name] for name in ("ranks", "batch size"))
        if not same_batches and len(positions) != then["ranks"]:
            changes = [f"{name} was {then[name]} and is {now[name]}" for name in DEALT_ANEW if then[name] != now[name]]
            why = "; ".join(changes) or f"the position is not of rank {rank}"
            raise CoderError(
                f"cannot resume in the middle of epoch {epoch + 1} ({why}) "
                f"without the positions of all {then['ranks']} ranks"
            )
        if own is not None and same_batches and then["workers"] == now["workers"]:
            return _Position(**{name: own[name] for name in _POSITION if name in own})
        rest = [own] if own is not None and same_batches else positions
        # ranks take their steps together: all have used as many samples as this one
        before = rest[0]["before"] + rest[0]["batches"] * then["batch size"] * then["ranks"]
        rest = [{name: value for name, value in each.items() if name not in ("bad", "again")} for each in rest]
        return _Position(epoch=epoch, consumed=[0] * self._plan.workers, before=before, rest=rest)


def _read_again(chunk: Chunk, rows: int) -> dict[str, Any]:
    """What of a chunk another setting reads again if the last ``rows`` rows are unused: its samples, the bad ones by kind."""
    if not rows:
        return {"read": 0, "kinds": {}}
    read = len(chunk.good) + len(chunk.bad) - chunk.good[-rows]
    bad = chunk.bad[len(chunk.bad) - (read - rows) :]
    return {"read": read, "kinds": dict(Counter(kind for kind, _, _ in bad))}


def evaluation_batches(
    source: Source,
    *,
    batch_size: int,
    transform: Callable[[Any], Any],
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    bad: BadSamples | None = None,
) -> Iterator[dict[str, Any]]:
    """Batches of every image once over all ranks, in order on each rank (but where its workers read different shards:
    :func:`~coder_plugin.data.source.by_shards`).

    A batch has ``image``, ``image_id``, ``index`` int64 [B] (positions in the data set), ``keys`` and ``captions`` (lists).
    Bad samples are left out and counted in ``bad``, whose rate is judged while reading; the caller judges the whole pass
    (:meth:`~coder_plugin.data.bad_samples.BadSamples.finish`). None: they are counted by the default rate, and judged here.

    Raises:
        CoderError: too many bad samples.
    """
    counted = BadSamples(source.name) if bad is None else bad
    if workers > 1:
        prepare(source)
    stream = _EvaluationStream(source, rank, world_size, batch_size, transform)
    for chunk in _load(stream, workers, False):
        counted.add(len(chunk) + len(chunk.bad), chunk.bad)
        if len(chunk):
            yield {**chunk.tensors, "captions": chunk.captions, "keys": chunk.keys}
    if bad is None:
        counted.finish()
        if len(counted):
            log.warning("%s: %s", source.name, counted)


class _Stream(IterableDataset):
    """Runs in a worker. A ``CoderError`` is sent as an object for the main process to raise, without a worker's traceback."""

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
    """Physical worker 0 acts as logical worker ``first``, since a DataLoader always starts with worker 0."""

    source: Chunked
    plan: Plan
    skips: tuple[int, ...]
    starts: tuple[Any, ...]
    first: int
    transform: Callable[[Any], Any]
    tokenizer: Callable[[list[str]], torch.Tensor]
    positives: MakePositive | None = None
    negatives: HardNegatives | None = None
    tags: TagWords | None = None

    def chunks(self, worker: int, workers: int) -> Iterator[Chunk]:
        worker = (worker + self.first) % workers
        plan = replace(self.plan, worker=worker, skip=self.skips[worker], start=self.starts[worker])
        chunks = self.source.chunks(plan)
        for items in chunks:
            chunk, good = decode(items, self.transform, seed=plan.seed, epoch=plan.epoch, worker=worker)
            chunk = replace(chunk, state=getattr(chunks, "state", None))
            if good:
                texts = [items[number].captions[0] for number in good]
                with isolated_rng("text", plan.seed, plan.epoch, *texts):  # some tokenizers drop words at random
                    if self.tags is None:
                        chunk.tensors["text"] = self.tokenizer(texts)
                    else:
                        chunk.tensors["text"], chunk.tensors["text_tags"] = self.tags(texts, self.tokenizer)
                if self.positives is not None:
                    self._add_positives(chunk, [items[number] for number in good], plan, self.positives)
                if self.negatives is not None:
                    self._add_negatives(chunk, [items[number] for number in good], plan, self.negatives)
                if self.tags is not None:
                    chunk = replace(chunk, learned=self.tags.take())
            yield chunk

    def _add_positives(self, chunk: Chunk, items: list[Item], plan: Plan, positives: MakePositive) -> None:
        texts, kinds = [], []
        with preserved_rng():
            for item in items:
                caption = item.captions[0]
                # seeded by sample, independent of neighbours and workers
                seed_rng("positive", plan.seed, plan.epoch, item.image_id, caption)
                text, kind = positives(caption, item.others)
                texts.append(text)
                kinds.append(kind)
        # a separate call, so that word dropout of the captions stays the same
        with isolated_rng("positive text", plan.seed, plan.epoch, *texts):
            tokens = self.tokenizer(texts)
        for ids, positive_ids, kind in zip(chunk.tensors["text"], tokens, kinds, strict=True):
            chunk.positives[SAME_TOKENS if kind != NO_POSITIVE and torch.equal(ids, positive_ids) else kind] += 1
        chunk.tensors["text_positive"] = tokens

    def _add_negatives(self, chunk: Chunk, items: list[Item], plan: Plan, negatives: HardNegatives) -> None:
        drawn = [pair for item in items for pair in negatives.draw(item, seed=plan.seed, epoch=plan.epoch)]
        texts, ids = [text for text, _ in drawn], torch.tensor([image for _, image in drawn])
        with isolated_rng("negative text", plan.seed, plan.epoch, *texts):  # a separate call, as of positives
            tokens = self.tokenizer(texts)
        shape = len(items), negatives.count
        chunk.tensors["text_negatives"], chunk.tensors["text_negative_ids"] = tokens.unflatten(0, shape), ids.view(shape)
        empty = int((ids == NO_TEXT).sum())
        chunk.negatives.update(filled=len(drawn) - empty, empty=empty)
        chunk.keys.append(items[0].key)


@dataclass
class _EvaluationStream(_Stream):
    """Blocks of images in the order of the data set, dealt to ranks and, within a rank, to workers."""

    source: Source
    rank: int
    world_size: int
    batch_size: int
    transform: Callable[[Any], Any]

    def chunks(self, worker: int, workers: int) -> Iterator[Chunk]:
        part, parts = worker * self.world_size + self.rank, self.world_size * workers
        indexed = self.source.items(part, parts, block=self.batch_size)
        for _, pairs in groupby(indexed, key=lambda pair: block_of(pair[0], self.batch_size)):
            index, items = zip(*pairs, strict=True)
            chunk, good = decode(list(items), self.transform, worker=worker)
            if good:
                chunk.tensors["index"] = torch.tensor([index[number] for number in good])
                chunk.captions.extend(items[number].captions for number in good)
                chunk.keys.extend(items[number].key for number in good)
            yield chunk


def _load(stream: _Stream, workers: int, pin_memory: bool) -> Iterator[Chunk]:
    """The chunks of a DataLoader that does not use the global random generator."""
    loader: DataLoader[Any] = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),
        worker_init_fn=start_worker,
    )
    for chunk in loader:
        if isinstance(chunk, CoderError):
            raise chunk
        yield chunk


def _identity(chunk: _T) -> _T:
    return chunk
