"""Embedding a data set: units in, Parquet files out. Processes share the units through the folder alone.

Shape letters: N images, D dimensions, V vectors of an image.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.data.units import Units
from coder_plugin.errors import CoderError
from coder_plugin.files import remove_all_leftovers
from coder_plugin.index.claims import Claims, lock_file
from coder_plugin.index.embeddings_header import NOTE, Header, check_columns
from coder_plugin.index.records import storable
from coder_plugin.index.unit_blocks import Block, Record, read_blocks
from coder_plugin.index.unit_file import Rows, UnitSummary, join_padded, write_unit
from coder_plugin.progress import Progress

log = logging.getLogger(__name__)
LOCK = ".lock"
_LIST_SECONDS = 5.0  # between two looks at how many files the folder has


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """How a data set is embedded.

    Args:
        encoder: :class:`~coder_plugin.pretrained.encode.Encoder` of the model, which is put into eval mode.
        units: the data.
        thumbnails: longer side in pixels; 0: no thumbnails.
        tokens: write what the model needs to re-rank, if it has a score for that.
        pictures: for thumbnails of images that are read as regions: their pictures, in the same units; None: none.
    """

    encoder: Any
    units: Units
    thumbnails: int = 128
    tokens: bool = False
    pictures: Units | None = None

    def __post_init__(self) -> None:
        if self.thumbnails < 0:
            raise CoderError(f"thumbnails must be 0 (none) or more pixels, got {self.thumbnails}")
        self.encoder.model.eval()

    @functools.cached_property
    def dimensions(self) -> int:
        """D."""
        return self.encoder.text(["a picture"])[0].shape[1]

    def blocks(self, numbers: Iterable[int], header: Header) -> Generator[Block, None, None]:
        """The decoded blocks of units."""
        return read_blocks(
            self.units,
            numbers,
            size=self.encoder.batch_size,
            transform=None if header.what == "captions" else self.encoder.transform,
            thumbnails=self.thumbnails,
            pictures=self.pictures,
            workers=self.encoder.workers,
        )

    def rows(self, block: Block, header: Header) -> Rows:
        """A block's vectors."""
        encoder, head = self.encoder, self.encoder.reranking if self.tokens and header.what != "captions" else None
        captions = [caption for record in block.records for caption in record.captions]
        images, image_item, texts, text_items = None, None, None, []
        if header.what != "captions":
            vectors, image_item = encoder.transformed(block.image, head)
            images = vectors.numpy()
        if header.what != "images":
            size = encoder.batch_size
            pieces = [encoder.text(captions[start : start + size], head) for start in range(0, len(captions), size)]
            texts = _stacked([vectors.numpy() for vectors, _ in pieces], header.dimensions)
            text_items = [item for _, item in pieces if item is not None]
        return Rows(
            keys=[record.key for record in block.records],
            captions=[record.captions for record in block.records],
            images=images,
            texts=texts,
            paths=[record.path for record in block.records],
            members=[record.member for record in block.records],
            thumbnails=block.thumbnails,
            columns=_columns(block.records, header.columns),
            image_tokens=_arrays(image_item or {}),
            text_tokens=join_padded(map(_arrays, text_items)),
        )


def embed_unit(embedding: Embedding, unit: int, path: str | Path, header: Header) -> UnitSummary:
    """One shard, or one slice of other data, in; one Parquet file out. Any scheduler may call it.

    The file is the same whoever makes it, on the same kind of machine.

    Args:
        embedding: model and data.
        unit: which, from 0 to ``len(embedding.units) - 1``.
        path: of the file to write, such as ``FOLDER/00000000.parquet``; it is written to a temporary name and renamed.
        header: of the folder.

    Raises:
        CoderError: too many bad samples in the unit, or a shard that cannot be read.
    """
    encoder = embedding.encoder
    bad = BadSamples(embedding.units.source.name, encoder.max_bad_samples, reads_regions=encoder.reads_regions)
    with contextlib.closing(embedding.blocks([unit], header)) as blocks:
        summary = _write(embedding, next(blocks), blocks, Path(path), header, bad, lambda count: None)
    bad.finish()
    return summary


def _write(
    embedding: Embedding,
    first: Block,
    blocks: Iterator[Block],
    path: Path,
    header: Header,
    bad: BadSamples,
    advance: Callable[[int], None],
) -> UnitSummary:
    """Write the unit that begins with the block ``first``."""
    own_bad: list[tuple[str, str]] = []

    def rows() -> Iterator[Rows]:
        for block in chain([first], blocks):
            assert block.unit == first.unit
            if block.last:
                return
            own_bad.extend((kind, key) for kind, key, _ in block.bad)
            bad.add(block.read, block.bad)
            if block.records:
                yield embedding.rows(block, header)
            advance(block.read)

    return write_unit(path, header, first.unit, rows(), bad=own_bad)


class Finished(NamedTuple):
    """What :func:`embed_all` leaves."""

    header: Header
    files: int  # complete ones
    made: int  # by this process
    others: int  # that other processes were still making
    images: int  # of those that this process made or found complete
    captions: int
    bad: Counter[str]  # samples of these that were left out, by kind


def begin(
    folder: str | Path,
    embedding: Embedding,
    *,
    model: Mapping[str, Any],
    plan: Mapping[str, Any],
    what: str = "both",
    dtype: str = "float32",
    columns: Mapping[str, str] | None = None,
    check: Callable[[Any], None] = lambda example: None,
    first: int = 0,
) -> Header:
    """The header of a folder of embeddings, which is begun if it was not.

    Args:
        folder: a new or an empty folder, or one that was begun with the same model, data and options.
        embedding: model and data.
        model: fields about the model; ``fingerprint`` is required.
        plan: all options that decide what is in the files, as JSON values, besides those of this function and ``embedding``.
        what: whose vectors: "both", "images" or "captions".
        dtype: of the vectors: "float32" or "float16".
        columns: further columns, which the reader of the data keeps, and the type of each.
        check: called by the process that begins the folder, with the first image; raises if the model cannot read it.
        first: the unit whose first image is read for it: the one that this process embeds first, which is then not read twice.

    Raises:
        CoderError: the folder holds something else or was begun with other options; no image can be read.
    """
    columns, units = dict(columns or {}), embedding.units
    check_columns(columns)
    whole_plan = plan_of(embedding, model=model, plan=plan, what=what, dtype=dtype, columns=columns)

    def make_header() -> Header:
        views = 1
        if what != "captions":
            example = units.first(first % len(units), reads_regions=embedding.encoder.reads_regions)
            check(example)
            vectors, _ = embedding.encoder.image([example])
            views = vectors.shape[1] if vectors.ndim == 3 else 1
        sizes = {"units": len(units), "dimensions": embedding.dimensions, "views": views}
        return Header(model=dict(model), plan=whole_plan, **sizes, dtype=dtype, what=what, columns=columns)

    return open_folder(Path(folder), whole_plan, make_header)


def plan_of(
    embedding: Embedding,
    *,
    model: Mapping[str, Any],
    plan: Mapping[str, Any],
    what: str = "both",
    dtype: str = "float32",
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything that decides what is in the files, as JSON values; arguments as of :func:`begin`."""
    units = embedding.units
    return {
        "model": model["fingerprint"],
        **json.loads(json.dumps(plan)),
        "what": what,
        "dtype": dtype,
        "columns": dict(columns or {}),
        "batch size": embedding.encoder.batch_size,
        "thumbnails": embedding.thumbnails,
        "tokens": embedding.tokens,
        "re-ranker": model.get("reranker") if embedding.tokens else None,
        "rows per file": None if units.by_shards else units.rows,
        "files": len(units),
    }


def embed_all(
    folder: str | Path,
    embedding: Embedding,
    header: Header,
    *,
    index: int = 0,
    count: int = 1,
    wait: bool = False,
    shown: bool = True,
) -> Finished:
    """Write the units that a folder lacks. Several processes may do so at once, started together or not.

    Args:
        folder: that :func:`begin` has begun.
        embedding: model and data.
        header: of the folder.
        index: number of this process, from 0.
        count: of processes that begin at the same time, each with its own stripe of the units.
        wait: wait for units that other processes are making, and take them over if these processes end.
        shown: whether to show progress.

    Returns:
        What is in the folder.

    Raises:
        CoderError: too many bad samples; a shard that cannot be read; no image could be embedded.
    """
    folder, units = Path(folder), embedding.units
    remove_all_leftovers(folder)
    claims = Claims(folder, header, index=index, count=count, wait=wait)
    bad = BadSamples(units.source.name, embedding.encoder.max_bad_samples, reads_regions=embedding.encoder.reads_regions)
    made: dict[int, UnitSummary] = {}
    with contextlib.closing(claims), _Progress(folder, header, units.images, shown=shown) as progress:
        with contextlib.closing(embedding.blocks(claims, header)) as blocks:
            for block in blocks:
                path = folder / header.file(block.unit)
                made[block.unit] = _write(embedding, block, blocks, path, header, bad, progress.advance)
                claims.release(block.unit)
                progress.finish(made[block.unit])
    claims.look_again()
    for summary in claims.complete.values():
        bad.restore({"read": summary.rows + len(summary.bad), "kinds": Counter(kind for kind, _ in summary.bad)})
    bad.finish()
    summaries = {**claims.complete, **made}
    rows, captions = (sum(getattr(each, name) for each in summaries.values()) for name in ("rows", "captions"))
    if not rows and len(summaries) == header.units:
        raise CoderError(f"{units.source.name}: no image could be embedded: {bad}")
    return Finished(header, len(summaries), len(made), len(claims.busy), rows, captions, bad.kinds)


def open_folder(folder: Path, plan: Mapping[str, Any], begin: Callable[[], Header]) -> Header:
    """The header of a folder that was begun with ``plan``; else begin it, while other processes wait.

    Raises:
        CoderError: it holds something else, or was begun with another plan.
    """
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK):
        if (folder / NOTE).exists():
            header = Header.read(folder)
            if other := differences(header.plan, plan):
                raise CoderError(
                    f"{folder} was begun with other options ({other}): use the same options, choose another folder, or remove "
                    "this one"
                )
            return header
        with _writable(folder):
            others = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
        if others:
            names = ", ".join(others[:3])
            raise CoderError(f"{folder} holds no embeddings and is not empty ({names}): choose another folder")
        header = begin()
        with _writable(folder):
            header.write(folder)
        return header


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Name the folder where it cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise CoderError(f"{folder} cannot be written: {error}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock where the file system has locks: without, the first ones to begin write the same note."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = lock_file(path, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


#: Fields of which only a digest is known, and what a message calls another one.
_DIGESTS = {"model": "another model", "content": "the data's content has changed", "embeddings": "other embeddings"}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields of ``now`` that had other values ``before``, for a message; empty if there are none.

    Example:
        >>> differences({"what": "both", "dtype": "float32"}, {"what": "images", "dtype": "float32"})
        'what was both, is images'
    """

    different = [name for name in now if before.get(name) != now[name]]
    return ", ".join(
        _DIGESTS.get(name) or f"{name} was {str(before.get(name))[:200]}, is {str(now[name])[:200]}" for name in different
    )


class _Progress:
    """Images of all processes: those of the files in the folder, and what this process has read of the file that it makes."""

    def __init__(self, folder: Path, header: Header, images: int | None, *, shown: bool) -> None:
        self.folder, self.units, self.images = folder, header.units, images
        self.files, self.looked = self._count(), time.monotonic()
        self.begun, self.own, self.made, self.reading = self.files, 0, 0, 0
        done = 0 if images is None else round(self.files / self.units * images)
        self.bar = Progress(images, done, what="images", shown=shown)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def advance(self, count: int) -> None:
        """Count images that this process has read."""
        self.reading += count
        if self.images is None:
            self.bar.update(count)
            return
        if time.monotonic() - self.looked > _LIST_SECONDS:
            self.files, self.looked = self._count(), time.monotonic()
        self.bar.advance(max(self.bar.done, round(self.files / self.units * self.images) + self.reading))

    def finish(self, summary: UnitSummary) -> None:
        """Count a file that this process has finished."""
        self.own, self.made = self.own + summary.rows + len(summary.bad), self.made + 1
        self.files, self.looked, self.reading = self._count(), time.monotonic(), 0
        if self.bar.total is None and self.own:  # of shards nothing was known before the first one was read
            self.images = math.ceil(self.own / self.made * self.units)
            self.bar.estimate(self.images, round(self.begun / self.units * self.images))

    def _count(self) -> int:
        return sum(each.name.endswith(".parquet") for each in os.scandir(self.folder))


def _stacked(pieces: list[Any], dimensions: int) -> Any:
    import numpy as np

    return np.concatenate(pieces) if pieces else np.zeros((0, dimensions), np.float32)


def _arrays(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in item.items()}


_warned: set[str] = set()


def _columns(records: list[Record], columns: Mapping[str, str]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for record in records:
        for name, kind in columns.items():
            value = record.metadata.get(name)
            typed = as_type(value, kind)
            if typed is None and value not in (None, "") and name not in _warned:
                _warned.add(name)
                log.warning("column %s: %r of %r is no %s; such values are left out", name, str(value)[:60], record.key, kind)
            values[name].append(typed)
    return values


def as_type(value: Any, kind: str) -> Any:
    """A value of a table or of JSON as one of a column's type; None where it is none.

    Args:
        value: text, a number, a bool, or anything.
        kind: "string", "int64", "float64" or "bool".

    Example:
        >>> as_type("1999", "int64"), as_type(True, "string"), as_type("many", "float64"), as_type("", "string")
        (1999, 'true', None, None)
    """
    if value is None or value == "":
        return None
    try:
        if kind == "string":
            return storable(value if isinstance(value, str) else json.dumps(value))
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
        if kind == "int64":
            number = int(value)
            return number if -(2**63) <= number < 2**63 and (isinstance(value, str) or number == value) else None
        number_ = float(value)
        return number_ if math.isfinite(number_) else None
    except (TypeError, ValueError, OverflowError):
        return None
