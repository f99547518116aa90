"""Batches for training and evaluation, decoded in workers, with a position from which training resumes bit for bit.

Workers decode chunks, each of as many samples as a batch has rows. The main process yields full chunks unchanged and fills
others with rows of the next chunk, so a batch always has its size. What a sample becomes depends on seed, epoch and sample
alone, so the position of a rank is the number of samples that it has read; of a stream, that of each worker.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from coder_plugin.data.bad_samples import DEFAULT_RATE, KINDS, Bad, BadSamples
from coder_plugin.data.hard_negatives import HardNegatives
from coder_plugin.data.item import NO_POSITIVE, NO_TEXT, SAME_TOKENS, Item, stable_hash
from coder_plugin.data.source import (
    Chunk,
    Source,
    decode,
    draw_caption,
    map_tensors,
    one_caption,
    preserved_rng,
    rng_states,
    seed_rng,
)
from coder_plugin.data.workers import start_worker
from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.concepts.tags import Tags

log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Samples are drawn from windows of so many shards, and of at least so many samples, so that a disk reads near itself.
WINDOW_SHARDS, WINDOW_SAMPLES = 16, 2000
#: What the values of a source's digest say, for messages.
CHANGES = {
    "images": "the number of images",
    "names": "the images' names or their order",
    "captions": "the captions",
    "files": "the files (their names, sizes or times of change; copy with cp -p or rsync -a, which keep the times)",
    "shards": "the number of shards",
    "regions": "the file of regions",
}
#: A stream that gives less than this fraction of a rank's planned samples is an error.
_FAR_SHORT = 0.5
#: Settings that may change within an epoch.
_MAY_CHANGE = ("ranks", "workers", "batch size")

#: ``positives(caption, others)`` -> a positive caption and its kind; see :class:`coder_plugin.noise.positives.Positives`.
MakePositive = Callable[[str, tuple[str, ...]], tuple[str, str]]


@dataclass(kw_only=True)
class _Position:
    """What decides which batch comes next.

    Args:
        epoch: its number.
        of: batches until the epoch ends, counted as ``batches``.
        batches: those used since the epoch began or, if it was continued by other ranks or another batch size, since then.
        before: samples of all ranks that were used before that.
        read: how many samples each worker of a stream has read; of other data a single number.
        last: the worker whose samples were the last.
        history: for each number of ranks that has worked on the epoch before, how many samples each of its ranks has read.
    """

    epoch: int
    of: int
    batches: int = 0
    before: int = 0
    read: list[int] = field(default_factory=lambda: [0])
    last: int = -1
    history: list[list[int]] = field(default_factory=list)


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

    Samples are dealt to ranks one by one, and those of a stream by slices of its shards. Each rank has its own position (bad
    samples fall on one rank), to be saved and restored by rank. A rank with bad samples may end an epoch before
    ``steps_per_epoch``, so ranks must agree on each step.

    Args:
        source: the data.
        batch_size: B, rows of a batch on this rank, from 1.
        transform: from a picture or regions to a tensor or a dict of tensors.
        tokenizer: from n captions to int64 ids [n, T].
        seed: of order, drawn captions and augmentation.
        workers: decoding processes; 0 decodes in this process.
        captions: ``draw`` (each image once an epoch with one caption) or ``all`` (every caption is a sample).
        max_bad_samples: allowed fraction of bad samples of an epoch on this rank, where fewer than 1,000 count as 1,000.
        num_samples: samples of an epoch over all ranks, for data that cannot be counted.
        pin_memory: copy batches to pinned memory if CUDA is available.
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
        positives: MakePositive | None = None,
        negatives: HardNegatives | None = None,
        tags: Tags | None = None,
    ) -> None:
        for name, number, least in (("batch size", batch_size, 1), ("workers", workers, 0)):
            if number < least:
                raise CoderError(f"{name} is {number}; it must be {least} or more")
        self.source = source
        self.samples_per_epoch = source.samples(captions, num_samples)
        self.steps_per_epoch = count_steps(source.name, self.samples_per_epoch, batch_size, world_size)
        self.bad = BadSamples(source.name, max_bad_samples)
        if tags is not None:
            tags.check(tokenizer)
        self._batch_size, self._rank, self._world_size, self._workers = batch_size, rank, world_size, workers
        self._seed, self._captions = seed, captions
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._make = _Training(source, transform, tokenizer, positives, negatives, tags, seed)
        self.positives_made: Counter[str] = Counter()
        self.negatives_drawn: Counter[str] = Counter()
        self.tagged: Counter[str] = Counter()
        self._stream = source.is_stream
        self._at = self._start(0)
        self._bad = self.bad.state()  # up to the last batch

    def epoch(self, epoch: int, position: dict[str, Any] | Sequence[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
        """The batches of an epoch, or those after ``position`` in it.

        Args:
            epoch: its number, which the order depends on.
            position: of this rank; or, in the order of ranks, those of all the ranks that began the epoch, whose number may
                be another: what all ranks have left is then dealt anew. A stream goes on only with the same numbers of ranks
                and workers; with others there is no further batch in this epoch, and a warning.

        Raises:
            CoderError: a position of another epoch or, within an epoch, of other data or another order of samples; too many bad
                samples; a stream that gives far fewer samples than planned.
        """
        self.bad.restart()
        self._at = self._start(epoch)
        if position is not None:
            positions: list[Any] = [position] if isinstance(position, dict) else list(position)
            for each in positions:
                check_position(each)
            self._at = self._resume(epoch, positions)
            for each in [position] if isinstance(position, dict) else positions[self._rank :: self._world_size]:
                self.bad.restore(each["bad"])
        self._bad = self.bad.state()
        return self._batches(self._at)

    def position(self) -> dict[str, Any]:
        """The position after the last batch, as JSON values, from which :meth:`epoch` continues."""
        at = {**vars(self._at), "read": list(self._at.read)}
        return {**at, "rank": self._rank, "bad": self._bad, "setting": self._setting(), "data": self.digest}

    @cached_property
    def digest(self) -> dict[str, Any]:
        """What tells whether the data are still the same (:meth:`~coder_plugin.data.source.Source.digest`)."""
        return self.source.digest()

    def log_changes(self, saved: Any) -> None:
        """Warn of data that have changed since an epoch before.

        Args:
            saved: the :attr:`digest` of then.
        """
        if changes := self._changes(saved):
            log.warning("%s: the data have changed since the checkpoint was written: %s", self.source.name, "; ".join(changes))

    def _changes(self, saved: Any) -> list[str]:
        now = self.digest
        then = saved if isinstance(saved, dict) else {}
        changed = [name for name in CHANGES if then.get(name) != now.get(name)] if then else []
        numbers = [name for name in changed if isinstance(now.get(name), int) and name in then]
        counts = {name: f" ({then[name]} then, {now[name]} now)" for name in numbers}
        return [f"{CHANGES[name]}{counts.get(name, '')}" for name in changed]

    def _start(self, epoch: int) -> _Position:
        return _Position(epoch=epoch, of=self.steps_per_epoch, read=[0] * (max(1, self._workers) if self._stream else 1))

    def _setting(self) -> dict[str, Any]:
        return {
            "batch size": self._batch_size,
            "ranks": self._world_size,
            "workers": max(1, self._workers),
            "seed": self._seed,
            "captions": self._captions,
            "samples per epoch": self.samples_per_epoch,
            **({} if self._make.tags is None else {"tagger": self._make.tags.tagger}),
        }

    def _resume(self, epoch: int, positions: list[dict[str, Any]]) -> _Position:
        first, now = positions[0], self._setting()
        then, middle = first["setting"], f"cannot resume in the middle of epoch {epoch + 1}"
        if wrong := [each["epoch"] for each in positions if each["epoch"] != epoch]:
            raise CoderError(f"the position to resume from is in epoch {wrong[0] + 1}, not in epoch {epoch + 1}")
        if not any(each["batches"] or each["before"] for each in positions):
            self.log_changes(first["data"])
            return self._start(epoch)  # at the start any setting may be used
        own = next((each for each in positions if each["rank"] == self._rank), None)
        if changes := self._changes((own or first)["data"]):  # ranks may read copies of their own
            raise CoderError(
                f"{self.source.name}: {middle}: the data have changed since the checkpoint was written: {'; '.join(changes)}; "
                "restore them, or begin a new run"
            )
        if wrong := [name for name in now if name not in _MAY_CHANGE and then.get(name) != now[name]]:
            changed = "; ".join(f"{name} was {then.get(name)} and is {now[name]}" for name in wrong)
            raise CoderError(f"{middle}: {changed}; use the old value, or resume from the start of an epoch")
        same = own is not None and then["ranks"] == now["ranks"]
        different = [f"{name} was {then[name]} and is {now[name]}" for name in _MAY_CHANGE if then[name] != now[name]]
        if self._stream and not (same and len(first["read"]) == now["workers"]):
            log.warning(
                "%s: a stream goes on in the middle of an epoch with the same numbers of ranks and workers only (%s): "
                "it goes on with epoch %d", self.source.name, "; ".join(different), epoch + 2,
            )  # fmt: skip
            used = first["before"] + first["batches"] * then["batch size"] * then["ranks"]
            return _Position(epoch=epoch, of=0, before=used)
        if not same and len(positions) != then["ranks"]:
            why = "; ".join(different) or f"the position is not of rank {self._rank}"
            raise CoderError(f"{middle} ({why}) without the positions of all {then['ranks']} ranks")
        start = _Position(epoch=epoch, of=0, history=first["history"])
        if same and own is not None:
            start = replace(start, read=list(own["read"]), last=own["last"], batches=own["batches"], before=own["before"])
        else:
            reads = [each["read"][0] for each in sorted(positions, key=lambda each: each["rank"])]
            start.history = [*first["history"], reads]
        if not same or then["batch size"] != now["batch size"]:
            # ranks take their steps together: all have used as many samples as the first
            start.before = first["before"] + first["batches"] * then["batch size"] * then["ranks"]
            start.batches = 0
        start.of = (self.samples_per_epoch - start.before) // (self._batch_size * self._world_size)
        return start

    def _batches(self, at: _Position) -> Iterator[dict[str, Any]]:
        size, left, read = self._batch_size, dict[str, Any](), list(at.read)
        rest: tuple[int, list[Bad]] = 0, []  # samples of the last chunk that are not used yet, and the bad ones among them
        if at.batches >= at.of:
            return
        for chunk in self._chunks(at):
            self.bad.add(*rest)
            self._count(chunk)
            if left:
                chunk = chunk.after(left)
                chunk = chunk.pin_memory() if self._pin_memory else chunk
            rows = max(0, len(chunk) - size)  # that are left for the next batch
            used = chunk.good[-rows] if rows else chunk.count  # up to the first unused row
            bad = used - (len(chunk.good) - rows)
            self.bad.add(used, chunk.bad[:bad])
            rest = chunk.count - used, chunk.bad[bad:]
            if len(chunk) < size:
                left = chunk.tensors
                read[chunk.worker] += chunk.count
                continue
            at.batches, at.last, at.read[:] = at.batches + 1, chunk.worker, read
            at.read[chunk.worker] += used
            read[chunk.worker] += chunk.count
            self._bad = self.bad.state()
            # Cloned, so that it does not keep the whole batch in memory.
            left = map_tensors(torch.Tensor.clone, chunk.rows(size).tensors) if rows else {}
            yield (chunk.rows(0, size) if rows else chunk).tensors
            if at.batches == at.of:
                break
        self.bad.add(*rest)
        self.bad.finish()
        if at.batches == at.of:
            return
        text = f"{self.source.name}: rank {self._rank} ended epoch {at.epoch} after {at.batches} of {at.of} batches"
        planned = self.samples_per_epoch // self._world_size
        if self._stream and self.bad.read < _FAR_SHORT * planned:
            raise CoderError(
                f"{text}: its shards have {self.bad.read:,} samples, and {planned:,} were planned: give the right "
                "--train-num-samples, and shards of equal size, at least as many as ranks"
            )
        log.warning("%s (bad samples, or a stream of unequal shards)", text)

    def _chunks(self, at: _Position) -> Iterator[Chunk]:
        make, size = replace(self._make, epoch=at.epoch), self._batch_size
        if self._stream:
            first = at.last if at.last >= 0 and at.read[at.last] % size else at.last + 1
            order = {"seed": self._seed, "epoch": at.epoch, "captions": self._captions}
            part = partial(_train_part, self.source, order, size, self._rank, self._world_size, tuple(at.read), first)
            return load(_Stream(make, size, part), None, self._workers, self._pin_memory)
        counts = None if self._captions == "draw" else np.asarray(self._make.source.caption_counts)
        numbers = self._order(at, counts)[self._rank :: self._world_size][at.read[0] :]
        chunks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        make = replace(make, ends=None if counts is None else np.cumsum(counts))
        return load(make.rows, chunks, self._workers, self._pin_memory)

    def _order(self, at: _Position, counts: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        """The samples of all ranks: of the epoch or, where other numbers of ranks have begun it, what these have left."""
        source: Any = self.source
        groups = np.asarray(source.groups)
        if counts is not None:
            groups = np.diff(np.cumsum([0, *counts])[np.cumsum([0, *groups])])
        order = epoch_order(groups, self._seed, at.epoch)
        for reads in at.history:
            order = _in_turn([order[rank :: len(reads)][read:] for rank, read in enumerate(reads)])
        return order

    def _count(self, chunk: Chunk) -> None:
        """Count texts that were made and drawn. Warn once 1,000 rows had no hard negative (small data are checked before)."""
        self.positives_made.update(chunk.positives)
        if self._make.tags is not None and chunk.learned is not None:
            self.tagged.update(chunk.learned.counts)
            self._make.tags.add(chunk.learned.classes)
        before, drawn, negatives = self.negatives_drawn.total(), self.negatives_drawn, self._make.negatives
        drawn.update(chunk.negatives)
        if negatives is not None and not drawn["filled"] and before < 1000 * negatives.count <= drawn.total():
            why = self.few_negatives(drawn)
            log.warning("%s: none of the first 1,000 samples has a hard negative%s", self.source.name, why)

    def few_negatives(self, drawn: Counter[str]) -> str:
        """What is likely the matter where below 10 % of the places ``drawn`` are filled, for a message; else ``""``."""
        if self._make.negatives is None or 10 * drawn["filled"] >= drawn.total():
            return ""
        return f": {self._make.negatives.where(next(iter(self.source.items()))[1].key)}"


def epoch_order(groups: Sequence[int] | np.ndarray[Any, Any], seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """The order of an epoch's samples: groups of samples, such as shards, are shuffled, then samples within windows of groups.

    Args:
        groups: numbers of samples that lie together on the disk, in the data's order.
        seed, epoch: what the order depends on besides.

    Example:
        >>> epoch_order([4], seed=0, epoch=0).tolist(), sorted(epoch_order([2, 1, 3], seed=0, epoch=1).tolist())
        ([1, 2, 0, 3], [0, 1, 2, 3, 4, 5])
    """
    generators = [torch.Generator().manual_seed(stable_hash(name, seed, epoch)) for name in ("shards", "order")]
    sizes = np.asarray(groups)
    starts = np.cumsum(sizes) - sizes
    windows: list[list[np.ndarray[Any, Any]]] = [[]]
    for group in torch.randperm(len(sizes), generator=generators[0]).tolist():
        if len(windows[-1]) >= WINDOW_SHARDS and sum(map(len, windows[-1])) >= WINDOW_SAMPLES:
            windows.append([])
        windows[-1].append(np.arange(starts[group], starts[group] + sizes[group]))
    joined = [np.concatenate(window) for window in windows]
    return np.concatenate([each[torch.randperm(len(each), generator=generators[1]).numpy()] for each in joined])


def _in_turn(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """One of each part in turn, until all have ended."""
    table = np.full((max(map(len, parts)), len(parts)), -1)
    for number, part in enumerate(parts):
        table[: len(part), number] = part
    return table[table >= 0]


def check_position(position: Any) -> None:
    """Check a position from a checkpoint: what a loader wrote, or something that only looks like it.

    Raises:
        CoderError: something else.
    """
    try:
        setting, bad = position["setting"], position["bad"]
        counts = [*(position[name] for name in ("epoch", "of", "batches", "before", "rank")), position["last"] + 1]
        lists = [position["read"], *position["history"]]
        counts += [*(read for each in lists for read in each), bad["read"], *bad["kinds"].values()]
        right = (
            all(type(each) is int and 0 <= each < 1 << 62 for each in counts)
            and all(type(setting[name]) is int and 1 <= setting[name] < 1 << 31 for name in _MAY_CHANGE)
            and all(type(each) is list and each for each in lists)
            and bad["kinds"].keys() <= KINDS.keys()
            and position["last"] < len(position["read"])
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        right = False
    if not right:
        raise CoderError("the checkpoint's position in the data does not have the form that this version saves")


def evaluation_batches(
    source: Source,
    *,
    batch_size: int,
    transform: Callable[[Any], Any],
    bad: BadSamples,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[dict[str, Any]]:
    """Batches of every image once over all ranks, in order on each rank (but for streams, whose workers read different shards).

    A batch has ``image``, ``image_id``, ``index`` int64 [B] (positions in the data set), ``keys`` and ``captions`` (lists).
    Bad samples are left out and counted in ``bad``, whose rate is judged while reading; the caller judges the whole pass
    (:meth:`~coder_plugin.data.bad_samples.BadSamples.finish`).

    Raises:
        CoderError: too many bad samples.
    """
    make = _Evaluation(source, transform)
    if source.is_stream:
        chunks = load(_Stream(make, batch_size, partial(_evaluation_part, source, rank, world_size)), None, workers)
    else:
        images = source.num_images
        starts = range(rank * batch_size, images, world_size * batch_size)
        chunks = load(make.rows, [range(start, min(start + batch_size, images)) for start in starts], workers)
    for chunk in chunks:
        bad.add(chunk.count, chunk.bad)
        if len(chunk):
            yield {**chunk.tensors, "captions": chunk.captions, "keys": chunk.keys}


@dataclass
class _Evaluation:
    """Makes chunks of images with all their captions."""

    source: Any
    transform: Callable[[Any], Any]

    def item(self, number: int) -> Item:
        """The sample of this number."""
        return self.source.item(number)  # type: ignore[no-any-return]

    def rows(self, numbers: Sequence[int]) -> Chunk:
        """The chunk of the samples of these numbers."""
        return self.chunk([(number, self.item(number)) for number in map(int, numbers)])

    def chunk(self, samples: list[tuple[int, Item]], worker: int = 0) -> Chunk:
        """The chunk of some numbered samples."""
        chunk, good = decode([item for _, item in samples], self.transform, worker=worker)
        if good:
            chunk.tensors["index"] = torch.tensor([samples[number][0] for number in good])
            chunk.captions.extend(samples[number][1].captions for number in good)
            chunk.keys.extend(samples[number][1].key for number in good)
        return chunk


@dataclass
class _Training(_Evaluation):
    """Makes chunks of training samples: images or, with ``ends``, captions, those of image n ending before ``ends[n]``."""

    tokenizer: Callable[[list[str]], torch.Tensor]
    positives: MakePositive | None
    negatives: HardNegatives | None
    tags: Tags | None
    seed: int
    epoch: int = 0
    ends: np.ndarray[Any, Any] | None = None

    def item(self, number: int) -> Item:
        """The image or caption of this number, with one caption."""
        if self.ends is None:
            return draw_caption(self.source.item(number), seed=self.seed, epoch=self.epoch)
        image = int(np.searchsorted(self.ends, number, "right"))
        item = self.source.item(image)
        return item if item.fault is not None else one_caption(item, number - int(self.ends[image]) + len(item.captions))

    def chunk(self, samples: list[tuple[int, Item]], worker: int = 0) -> Chunk:
        """The chunk of some samples with one caption each."""
        items = [item for _, item in samples]
        chunk, good = decode(items, self.transform, seed=self.seed, epoch=self.epoch, worker=worker)
        if not good:
            return chunk
        items = [items[number] for number in good]
        texts = [item.captions[0] for item in items]
        chunk.tensors["text"], *tags = self._tokenize(texts, "text", tags=self.tags)
        if tags:
            (chunk.tensors["text_tags"],) = tags
        if self.positives is not None:
            self._add_positives(chunk, items, self.positives)
        if self.negatives is not None:
            self._add_negatives(chunk, items, self.negatives)
        return chunk if self.tags is None else replace(chunk, learned=self.tags.take())

    def _tokenize(self, texts: list[str], name: str, tags: Tags | None = None) -> list[torch.Tensor]:
        """Token ids [n, T] and, with ``tags``, the classes of the words. A tokenizer that draws, such as words that it drops,
        does so for each text by itself, whatever its neighbours."""

        def call(texts: list[str]) -> tuple[torch.Tensor, ...]:
            return (self.tokenizer(texts),) if tags is None else tags(texts, self.tokenizer)

        with preserved_rng():
            seed_rng(name)
            before = rng_states()
            found = [self.tokenizer(texts)]
            if rng_states() == before:
                return found if tags is None else list(call(texts))
            rows = []
            for text in texts:
                seed_rng(name, self.seed, self.epoch, text)
                rows.append(call([text]))
            return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    def _add_positives(self, chunk: Chunk, items: list[Item], positives: MakePositive) -> None:
        texts, kinds = [], []
        with preserved_rng():
            for item in items:
                caption = item.captions[0]
                # seeded by sample, independent of neighbours and workers
                seed_rng("positive", self.seed, self.epoch, item.image_id, caption)
                text, kind = positives(caption, item.others)
                texts.append(text)
                kinds.append(kind)
        # a separate call, so that word dropout of the captions stays the same
        (tokens,) = self._tokenize(texts, "positive text")
        for ids, positive_ids, kind in zip(chunk.tensors["text"], tokens, kinds, strict=True):
            chunk.positives[SAME_TOKENS if kind != NO_POSITIVE and torch.equal(ids, positive_ids) else kind] += 1
        chunk.tensors["text_positive"] = tokens

    def _add_negatives(self, chunk: Chunk, items: list[Item], negatives: HardNegatives) -> None:
        drawn = [pair for item in items for pair in negatives.draw(item, seed=self.seed, epoch=self.epoch)]
        texts, ids = [text for text, _ in drawn], torch.tensor([image for _, image in drawn])
        (tokens,) = self._tokenize(texts, "negative text")  # a separate call, as of positives
        shape = len(items), negatives.count
        chunk.tensors["text_negatives"], chunk.tensors["text_negative_ids"] = tokens.unflatten(0, shape), ids.view(shape)
        empty = int((ids == NO_TEXT).sum())
        chunk.negatives.update(filled=len(drawn) - empty, empty=empty)


@dataclass
class _Stream(IterableDataset[Any]):
    """Chunks of a stream. ``part(worker, workers)`` -> a worker's samples, its number, and how many of a chunk were used."""

    make: Any
    size: int
    part: Callable[[int, int], tuple[Iterator[tuple[int, Item]], int, int]]

    def __iter__(self) -> Iterator[Chunk | CoderError]:
        info = get_worker_info()
        return _until_error(self._chunks(*self.part(*((info.id, info.num_workers) if info else (0, 1)))))

    def _chunks(self, samples: Iterator[tuple[int, Item]], worker: int, used: int) -> Iterator[Chunk]:
        while chunk := list(islice(samples, self.size - used)):
            yield self.make.chunk(chunk, worker)
            used = 0


def _train_part(
    source: Any, order: dict[str, Any], size: int, rank: int, ranks: int, read: tuple[int, ...], first: int,
    worker: int, workers: int,
) -> tuple[Iterator[tuple[int, Item]], int, int]:  # fmt: skip
    """Physical worker 0 acts as logical worker ``first``, since a DataLoader begins with worker 0. A chunk that was partly used
    is completed, so that workers take the same turns as without an interruption."""
    worker = (worker + first) % workers
    items = source.part(rank * workers + worker, ranks * workers, skip=read[worker], **order)
    return enumerate(items), worker, read[worker] % size


def _evaluation_part(
    source: Any, rank: int, ranks: int, worker: int, workers: int
) -> tuple[Iterator[tuple[int, Item]], int, int]:
    return source.items(worker * ranks + rank, ranks * workers), 0, 0


def _until_error(results: Iterable[_T]) -> Iterator[_T | CoderError]:
    """A ``CoderError`` is sent as an object for the main process to raise, without a worker's traceback."""
    try:
        yield from results
    except CoderError as exc:
        yield CoderError(str(exc))


@dataclass
class _Calls(Dataset[Any]):
    """``function(request)`` of what a DataLoader's batch sampler gives."""

    function: Callable[[Any], Any]

    def __getitems__(self, request: Any) -> Any:
        return request if isinstance(request, CoderError) else next(_until_error(map(self.function, [request])))


def load(data: Any, requests: Iterable[Any] | None, workers: int, pin_memory: bool = False) -> Iterator[Any]:
    """What ``data(request)`` returns for each request in turn, or what an iterable data set yields, from ``workers`` processes.

    The global random generator is not used. A ``CoderError`` of either is raised without a worker's traceback.
    """
    sampling: dict[str, Any] = {"batch_size": None}
    if requests is not None:
        data, sampling = _Calls(data), {"batch_sampler": _until_error(requests)}
    loader: DataLoader[Any] = DataLoader(
        data,
        **sampling,
        num_workers=workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),
        worker_init_fn=start_worker,
    )
    for result in loader:
        if isinstance(result, CoderError):
            raise result
        yield result


def _identity(result: _T) -> _T:
    return result
