"""Making an index: data in, a folder out, that can be stopped at any instruction and gone on with.

Encoded data are written in parts; when all are there they are put together, and the manifest, written last, makes the folder
an index. One writer at a time; with several ranks each encodes its share, and the first puts them together.

Shape letters: N images, T captions, D dimensions, V embeddings of an image.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.source import BadImages, ItemSource
from coder_plugin.data.tars import is_local, local_path
from coder_plugin.errors import CoderError
from coder_plugin.index import manifest, parts, vectors
from coder_plugin.index.assemble import assemble
from coder_plugin.index.thumbnails import Beside, thumbnail

PARTS = "parts"
LOCK = ".lock"
#: Images of a part, about: so many are encoded anew after a stop, at most.
PART = 512
WHAT = ("both", "images", "captions")


def build_index(
    folder: str | Path,
    encoder: Any,
    source: Any,
    *,
    model: Mapping[str, Any],
    what: str = "both",
    factory: str = "Flat",
    thumbnails: int = 128,
    rerank: bool = True,
    pictures: Any = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Encode a data set into an index, or go on with one that was stopped; the same files come out either way.

    Args:
        folder: the index: a new or an empty folder, or one that this was begun in with the same model, data and options.
        encoder: :class:`~coder_plugin.pretrained.encode.Encoder` of the model, which is put into eval mode.
        source: whose :meth:`items` are taken: a :class:`~coder_plugin.data.source.Source` or pictures without captions.
        model: what the manifest says of the model: at least ``fingerprint``, which a search compares.
        what: whose vectors are kept: images, captions or both. Keys and captions are there as text in any case.
        factory: FAISS index factory string: Flat is exact; HNSW32, IVF1024,Flat, PQ64 …
        thumbnails: pixels of the longer side of the small pictures, 0: none.
        rerank: keep what the model's fusion score needs, if it has one.
        pictures: a source of the pictures of images that are read as regions, in the same order: for thumbnails.
        data: what else must be as it was where an index is gone on with: how the data are read, arithmetic, for JSON.

    Returns:
        The manifest.

    Raises:
        CoderError: the folder holds something else, or is being written; the options are not those it was begun with; an
            unknown factory; no image could be read.
    """
    if what not in WHAT:
        raise CoderError(f"what an index keeps must be one of {', '.join(WHAT)}, got {what!r}")
    if thumbnails < 0:
        raise CoderError(f"thumbnails have a side of 0 (none) or more pixels, got {thumbnails}")
    folder = Path(folder)
    head = encoder.reranking if rerank and what != "captions" else None
    encoder.model.eval()
    vectors.check_factory(factory, encoder.text(["a picture"])[0].shape[1])
    plan = {
        "model": model["fingerprint"],
        "data": source.name,
        **json.loads(json.dumps(data or {})),
        "images": source.num_images,
        "content": _content(source),
        "what": what,
        "batch size": encoder.batch_size,
        "ranks": distributed.world_size(),
        "thumbnails": thumbnails,
        "re-ranking": head is not None,
    }
    with _only_writer(folder):
        if (folder / manifest.MANIFEST).is_file():
            return _finished(folder, plan, factory)
        _begin(folder, plan)
        job = _Job(encoder, source, what, head, thumbnails, pictures)
        _on_all_ranks(lambda: _encode(folder / PARTS, job))
        content = {"model": dict(model), "plan": plan, "factory": factory}
        paths = sorted((folder / PARTS).glob("part-*.safetensors"))
        _on_all_ranks(lambda: assemble(folder, paths, content, factory=factory) if distributed.rank() == 0 else None)
        if distributed.rank() == 0:
            _tidy(folder)
        distributed.barrier()
    return manifest.read_manifest(folder, verify=False)


def _content(source: Any) -> str | None:
    """A digest of which images and captions a source holds, where telling costs little: of those in memory their keys and
    texts, of local shards the files' sizes; else None."""
    inner = getattr(source, "captions", source)  # of regions joined to captions, these
    digest = hashlib.sha256()
    if isinstance(inner, (ItemSource, Pictures)):
        for _, item in inner.items():
            digest.update(json.dumps([item.key, *item.captions]).encode())
    elif all(map(is_local, getattr(inner, "shards", ["pipe:"]))):
        for shard in inner.shards:
            digest.update(json.dumps([os.path.basename(shard), os.path.getsize(local_path(shard))]).encode())
    else:
        return None
    return digest.hexdigest()[:32]


def _on_all_ranks(work: Callable[[], None]) -> None:
    """Do it on each rank, and go on when all are done; where one fails all do, for the others would wait for it."""
    fault: Exception | None = None
    try:
        work()
    except Exception as error:
        fault = error
    told = distributed.gather_objects(None if fault is None else str(fault))
    if fault is not None:
        raise fault
    if problem := next((each for each in told if each is not None), None):
        raise CoderError(f"another process failed: {problem}")


def _tidy(folder: Path) -> None:
    """What an index is made of goes when it is made."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    (folder / manifest.BUILDING).unlink(missing_ok=True)


class _Job(NamedTuple):
    encoder: Any
    source: Any
    what: str
    head: Any
    thumbnails: int
    pictures: Any


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """The first rank's lock for all of them; the system gives it up when the process ends, however it does."""
    from filelock import FileLock, Timeout

    problem, lock = None, None
    if distributed.rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            problem = f"{folder} is being written by another process: wait for it, or choose another folder"
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    problem = distributed.gather_objects(problem)[0]
    if problem is not None:
        raise CoderError(problem)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _finished(folder: Path, plan: Mapping[str, Any], factory: str) -> dict[str, Any]:
    found = manifest.read_manifest(folder)
    other = _differences({**found["plan"], "factory": found["factory"]}, {**plan, "factory": factory})
    if other:
        raise CoderError(f"{folder} is a finished index of other options ({other}): choose another folder, or remove it")
    if distributed.rank() == 0:
        print(f"{folder} is finished already, made {found.get('made', '')}: nothing to do", file=sys.stderr)
        _tidy(folder)
    return found


def _begin(folder: Path, plan: Mapping[str, Any]) -> None:
    """Note what is made, or see that it is the same as was begun."""
    note, problem = folder / manifest.BUILDING, None
    if distributed.rank() == 0:
        if note.is_file():
            other = _differences(manifest.read_json(note)["plan"], plan)
            if other:
                problem = f"{folder} was begun with other options ({other}): give the same, choose another folder, or remove it"
        elif others := sorted(each.name for each in folder.iterdir() if each.name not in (LOCK, f".{note.name}.writing")):
            problem = f"{folder} is no index and not empty ({', '.join(others[:3])}): choose another folder"
        else:
            manifest.write_json(note, {"plan": dict(plan)})
        if problem is None:
            (folder / PARTS).mkdir(exist_ok=True)
    problem = distributed.gather_objects(problem)[0]
    if problem is not None:
        raise CoderError(problem)


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    def shown(name: str, value: Any) -> Any:
        return f"{value[:12]}…" if name == "model" else value

    different = [name for name in now if then.get(name) != now[name]]
    return ", ".join(f"{name} was {shown(name, then.get(name))}, is {shown(name, now[name])}" for name in different)


def _encode(folder: Path, job: _Job) -> None:
    """Write this rank's parts that are not there yet, in order."""
    rank, ranks = distributed.rank(), distributed.world_size()
    size = job.encoder.batch_size
    batches = max(1, PART // size)  # of a part
    there = _unbroken(folder, rank)
    bad = BadImages(job.source.name, job.encoder.max_bad)
    for path in there:
        bad.restore(parts.outline(path).bad)
    known = len(bad)
    rest = _Rest(job.source, len(there) * batches, ranks)
    number = len(there)
    beside = Beside(job.pictures) if job.pictures is not None and job.thumbnails else None
    gathered: list[tuple[Any, list[bytes]]] = []
    progress = _Progress(job.source.num_images, number * batches * size * ranks, shown=rank == 0)

    def write() -> None:
        nonlocal number, known
        parts.write(folder / f"part-{rank:04d}-{number:08d}.safetensors", _part(gathered, bad.keys[known:], job.what))
        number, known = number + 1, len(bad)
        gathered.clear()

    with contextlib.closing(progress):
        for batch in _batches(job, rest, bad):
            block = int(batch.positions[0]) // size // ranks
            while block >= (number + 1) * batches:  # a part whose images could none be read is there all the same
                write()
            small = batch.beside or [b""] * len(batch.positions)
            if beside is not None:
                small = beside.thumbnails(batch.positions.tolist(), batch.keys, job.thumbnails)
            gathered.append((batch, small))
            progress.to((block + 1) * size * ranks)
        if gathered or len(bad) > known or not number:
            write()


class _Progress:
    """How many images have been met: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, total: int | None, done: int, *, shown: bool) -> None:
        from tqdm import tqdm

        self.total, self.lines = total, shown and not sys.stderr.isatty()
        self.done = min(done, total or done)
        self.bar = tqdm(total=total, initial=self.done, unit="img", disable=not shown or self.lines)
        self.told = time.monotonic()
        if done and self.lines:
            self._say("going on after ")

    def to(self, done: int) -> None:
        before, self.done = self.done, min(done, self.total or done)
        self.bar.update(self.done - before)
        if self.lines and time.monotonic() - self.told > 10:
            self._say("")

    def _say(self, start: str) -> None:
        self.told = time.monotonic()
        of = f" of {self.total:,}" if self.total else ""
        print(f"{start}{self.done:,}{of} images", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.bar.close()


def _unbroken(folder: Path, rank: int) -> list[Path]:
    """A rank's parts from the first to the last before a gap; what is behind a gap goes, for it is made anew."""
    there = sorted(folder.glob(f"part-{rank:04d}-*.safetensors"))
    found = [path for number, path in enumerate(there) if path.stem == f"part-{rank:04d}-{number:08d}"]
    for path in there[len(found) :]:
        path.unlink()
    return found


def _batches(job: _Job, rest: _Rest, bad: BadImages) -> Iterator[Any]:
    encoder = job.encoder
    if job.what == "captions":
        yield from encoder.texts_alone(rest)
        return
    small: Callable[[Any], bytes] | None = None
    if job.thumbnails and job.pictures is None:
        small = partial(thumbnail, side=job.thumbnails)
    yield from encoder.batches(rest, job.head, texts=job.what == "both", bad=bad, beside=small)


class _Rest:
    """What is left of a source after a rank's first blocks; workers take turns as if the data began there."""

    def __init__(self, source: Any, done: int, ranks: int) -> None:
        self.name, self.source, self.done, self.ranks = source.name, source, done, ranks

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        worker, own = divmod(rank, self.ranks)
        workers = world_size // self.ranks
        part = (worker + self.done) % workers * self.ranks + own
        for position, item in self.source.items(part, world_size, block=block):
            if position // block // self.ranks >= self.done:
                yield position, item


def _part(gathered: list[tuple[Any, list[bytes]]], bad: list[str], what: str) -> parts.Part:
    batches = [batch for batch, _ in gathered]

    def stacked(values: list[Tensor]) -> Tensor | None:
        return torch.cat(values) if values else None

    none = torch.zeros(0, dtype=torch.int64)
    return parts.Part(
        torch.cat([none, *(batch.positions for batch in batches)]),
        torch.cat([none, *(batch.image_ids for batch in batches)]),
        [key for batch in batches for key in batch.keys],
        [own for batch in batches for own in batch.captions],
        [each for _, small in gathered for each in small],
        stacked([batch.images for batch in batches]) if what != "captions" else None,
        stacked([piece for batch in batches for piece in batch.texts]) if what != "images" else None,
        parts.joined([batch.image_item for batch in batches if batch.image_item is not None]),
        parts.joined([item for batch in batches for item in batch.text_items]),
        bad,
    )
