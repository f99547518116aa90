"""Building an index: a data set in, a folder out. A build that was killed continues when the same command runs again.

Encoded data are written in parts. When all parts exist they are assembled, and the manifest, written last, makes the folder an
index. One writer at a time; with several ranks each encodes its share, and the first assembles them.

Shape letters: N images, T captions, D dimensions, V embeddings of an image.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.data.bad_samples import BadSamples
from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures
from coder_plugin.data.source import ItemSource, block_of, by_shards, prepare
from coder_plugin.data.tars import local_path
from coder_plugin.errors import CoderError
from coder_plugin.index import assembly, manifest, parts, vectors_file
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.job import EmbedJob
from coder_plugin.index.lock import LOCK, write_lock
from coder_plugin.locations import is_local
from coder_plugin.progress import Progress
from coder_plugin.terminal import echo

PARTS = "parts"
#: Folder of the embeddings that an index is built from, while :func:`build_from_job` makes them.
EMBEDDINGS = "embeddings"
#: Images of a part, about; after a kill at most so many are encoded again.
PART_SIZE = 512
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
    """Encode a data set into an index, or continue a build that was stopped; the same files result either way.

    Args:
        folder: the index: a new or an empty folder, or one where a build with the same model, data and options was started.
        encoder: :class:`~coder_plugin.pretrained.encode.Encoder` of the model, which is put into eval mode.
        source: a :class:`~coder_plugin.data.source.Source`, or :class:`~coder_plugin.data.pictures.Pictures` without captions.
        model: fields of the manifest about the model; ``fingerprint`` is required, because a search compares it.
        what: whose vectors are kept: "images", "captions" or "both". Keys and captions are kept as text in any case.
        factory: FAISS index factory string; "Flat" is exact, others are HNSW32, IVF1024,Flat or PQ64.
        thumbnails: longer side in pixels; 0: no thumbnails.
        rerank: keep what the encoder's re-ranker needs, if it has one.
        pictures: for thumbnails of images that are read as regions: a source of their pictures, in the same order.
        data: further options that a continued build must share, as JSON values: how the data are read, the precision.

    Returns:
        The manifest.

    Raises:
        CoderError: the folder holds something else or is being written; a build with other options was started there; an
            unknown factory; no image could be read.
    """
    _check_what(what)
    if thumbnails < 0:
        raise CoderError(f"thumbnails must be 0 (none) or more pixels, got {thumbnails}")
    folder = Path(folder)
    head = encoder.reranking if rerank and what != "captions" else None
    encoder.model.eval()
    vectors_file.check_factory(factory, encoder.text(["a picture"])[0].shape[1])
    plan = {
        "model": model["fingerprint"],
        "data": source.name,
        **json.loads(json.dumps(data or {})),
        "images": source.num_images,
        "content": content_digest(source),
        "what": what,
        "batch size": encoder.batch_size,
        "ranks": distributed.world_size(),
        "thumbnails": thumbnails,
        "re-ranking": head is not None,
        "re-ranker": model.get("reranker") if head is not None else None,
    }
    if by_shards(source):  # which rank reads a shard may depend on them
        plan["workers"] = encoder.workers
    with write_lock(folder):
        if (folder / manifest.MANIFEST).is_file():
            return _read_finished(folder, plan, factory)
        _start(folder, plan)
        (folder / PARTS).mkdir(exist_ok=True)
        job = _Job(encoder, source, what, head, thumbnails, pictures)
        _run_on_all_ranks(lambda: _encode(folder / PARTS, job))
        content = {"model": dict(model), "plan": plan, "factory": factory, "columns": {}, "removed": {}}
        paths = sorted((folder / PARTS).glob("part-*.safetensors"))
        first = distributed.rank() == 0
        _run_on_all_ranks(lambda: parts.assemble(folder, paths, content, factory=factory) if first else None)
        if first:
            _remove_parts(folder)
        distributed.barrier()
    return manifest.read_manifest(folder)


def build_from_embeddings(
    folder: str | Path,
    embeddings: str | Path | Embeddings,
    *,
    what: str = "both",
    factory: str = "Flat",
    rerank: bool = True,
    segment_size: int | None = None,
) -> dict[str, Any]:
    """Build an index from what ``coder-plugin embed`` wrote, or continue a build that was stopped; the same files result.

    Memory: of a flat index some thousand vectors, of others a segment's vectors, up to twice.

    Args:
        folder: the index: a new or an empty folder, or one where a build with the same embeddings and options was started.
        embeddings: the embeddings, opened or their folder.
        what: whose vectors are kept: "images", "captions", or "both" as far as the embeddings have them.
        factory: FAISS index factory string; "Flat" is exact, others are HNSW32, IVF1024,Flat or PQ64. One that needs training
            is trained once, on 64 to 256 vectors for each of its lists.
        rerank: keep what the model's fusion score needs, if the embeddings have it.
        segment_size: images of a segment; None: 1,000,000 of a flat index, else so many that a segment has 128 MiB of vectors
            (more where there would be over 64 segments).

    Returns:
        The manifest.

    Raises:
        CoderError: the folder holds something else or is being written; a build with other options was started there; an
            unknown factory; embeddings that are damaged or not complete.

    Example:
        >>> import tempfile
        >>> from coder_plugin.index.embeddings_header import Header
        >>> from coder_plugin.index.unit_file import Rows, write_unit
        >>> from coder_plugin.index.search import Index
        >>> folder = Path(tempfile.mkdtemp())
        >>> header = Header(model={"fingerprint": "f" * 64}, plan={}, units=1, dimensions=2, what="images")
        >>> header.write(folder)
        >>> vectors = np.eye(2, dtype=np.float32)
        >>> rows = Rows(["a.jpg", "b.jpg"], [["a dog"], []], vectors, None, [None] * 2, [None] * 2)
        >>> _ = write_unit(folder / header.file(0), header, 0, [rows])
        >>> build_from_embeddings(folder / "index", folder)["images"]
        2
        >>> Index(folder / "index").search(vectors[1:], k=1)[1].tolist()
        [[1]]
    """
    _check_what(what)
    folder = Path(folder)
    embeddings = embeddings if isinstance(embeddings, Embeddings) else Embeddings(embeddings)
    vectors_file.check_factory(factory, embeddings.dimensions)
    kinds = assembly.kinds_of(embeddings, what)
    rerank = rerank and assembly.has_tokens(embeddings)
    plan = {
        **embeddings.header.plan,
        "embeddings": assembly.source_digest(embeddings),
        "what": kinds[0] if len(kinds) == 1 else "both",
        "re-ranking": rerank,
        "segment size": segment_size,
    }
    with write_lock(folder):
        if (folder / manifest.MANIFEST).is_file():
            return _read_finished(folder, plan, factory)
        _start(folder, {**plan, "factory": factory})
        _run_on_all_ranks(lambda: _assemble(folder, embeddings, kinds, plan, factory) if distributed.rank() == 0 else None)
    return manifest.read_manifest(folder)


def build_from_job(
    folder: str | Path, job: EmbedJob, *, factory: str = "Flat", segment_size: int | None = None
) -> dict[str, Any]:
    """Embed a data set and build an index from the embeddings, which are removed at the end; or continue.

    Each process embeds its share; the first builds. Arguments and errors as of :func:`build_from_embeddings`.

    Args:
        folder: the index.
        job: model, data and options; its ``output`` must be ``folder / EMBEDDINGS``.
        factory: FAISS index factory string.
        segment_size: images of a segment.

    Returns:
        The manifest.
    """
    folder, rank, ranks = Path(folder), distributed.rank(), distributed.world_size()
    vectors_file.check_factory(factory, job.dimensions)
    with write_lock(folder):
        if (folder / manifest.MANIFEST).is_file():
            content = _read_finished(folder, {**job.plan(), "segment size": segment_size}, factory)
        else:
            _start(folder, {"factory": factory, "segment size": segment_size})
            _run_on_all_ranks(lambda: job.run(index=rank, count=ranks, wait=True, shown=rank == 0))
            work: Callable[[], None] = _nothing
            if rank == 0:
                embeddings = Embeddings(folder / EMBEDDINGS)
                rerank = assembly.has_tokens(embeddings)
                plan = {**embeddings.header.plan, "re-ranking": rerank, "segment size": segment_size}
                work = partial(_assemble, folder, embeddings, assembly.kinds_of(embeddings), plan, factory)
            _run_on_all_ranks(work)
            content = manifest.read_manifest(folder)
        if rank == 0:
            shutil.rmtree(folder / EMBEDDINGS, ignore_errors=True)
        distributed.barrier()
    return content


def _nothing() -> None:
    """What the other processes do while the first builds."""


def _assemble(folder: Path, embeddings: Embeddings, kinds: list[str], plan: Mapping[str, Any], factory: str) -> None:
    """Train, write the segments, and the manifest last."""
    note = folder / manifest.BUILDING
    begun = manifest.read_json(note)
    for kind in kinds:
        name = assembly.trained_name(kind)
        if not (folder / name).is_file() or begun.get(name) != manifest.sums(folder, [folder / name]):
            assembly.train(folder, embeddings, kind, factory)
    trained = [path for kind in kinds if (path := folder / assembly.trained_name(kind)).is_file()]
    manifest.write_json(note, {"plan": begun["plan"], **{path.name: manifest.sums(folder, [path]) for path in trained}})
    options = {"kinds": kinds, "factory": factory, "size": plan["segment size"], "rerank": plan["re-ranking"]}
    notes = assembly.write_segments(folder, embeddings, columns=embeddings.columns, **options)
    model, plan = dict(embeddings.model), dict(plan)
    content: dict[str, Any] = {"model": model, "plan": plan, "factory": factory, "removed": {}, "made": assembly.today()}
    content |= assembly.fields(embeddings, notes, kinds)
    content["files"] |= manifest.sums(folder, trained)
    manifest.write_manifest(folder, content)
    _remove_leftovers(folder, content)


def _remove_leftovers(folder: Path, content: Mapping[str, Any]) -> None:
    """Remove what is needed only while the index is being built, and what kills have left."""
    (folder / manifest.BUILDING).unlink(missing_ok=True)
    names = {segment["name"] for segment in content["segments"]}
    for path in (*folder.glob(".*.writing"), *(folder / manifest.SEGMENTS).iterdir()):
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_what(what: str) -> None:
    if what not in WHAT:
        raise CoderError(f"what must be one of {', '.join(WHAT)}, got {what!r}")


def model_record(
    model: Any, spec: str | None, *, export: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The manifest's fields about a model, from which a search opens it again.

    Args:
        model: :class:`~coder_plugin.pretrained.open.PretrainedModel`.
        spec: what it was opened from; None: ``options`` name it.
        export: which export of a run.
        options: that it was opened with, by flat name.
    """
    return {
        "name": model.name,
        "spec": absolute(spec),
        "export": export,
        "options": {name: absolute(value) for name, value in (options or {}).items()},
        "objective": model.objective,
        "fingerprint": model.fingerprint(),
        "reranker": model.reranker,
    }


def absolute(value: Any) -> Any:
    """The absolute path, if ``value`` is one that exists; else ``value``."""
    return os.path.abspath(value) if isinstance(value, str) and value and os.path.exists(value) else value


def content_digest(source: Any) -> str | None:
    """A digest of a source's images and captions where it is cheap: from keys and texts in memory, or from the sizes of local
    shards; else None."""
    inner = getattr(source, "captions", source)  # regions joined to captions: the captions
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


def _run_on_all_ranks(work: Callable[[], object]) -> None:
    """Run ``work`` on each rank and wait for all; if one fails, all raise, because the others would wait for it for ever."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    distributed.raise_on_all_ranks(failure, prefix="another process failed: ")


def _remove_parts(folder: Path) -> None:
    """Remove what is needed only while the index is being built."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    (folder / manifest.BUILDING).unlink(missing_ok=True)
    for temporary in folder.glob(".*.writing"):  # left by a kill
        temporary.unlink()


class _Job(NamedTuple):
    encoder: Any
    source: Any
    what: str
    head: Any
    thumbnails: int
    pictures: Any


def _read_finished(folder: Path, plan: Mapping[str, Any], factory: str) -> dict[str, Any]:
    content = manifest.read_manifest(folder, verify=True)
    other = _differences({**content["plan"], "factory": content["factory"]}, {**plan, "factory": factory})
    if other:
        raise CoderError(f"{folder} is a finished index with other options ({other}): choose another folder, or remove it")
    if distributed.rank() == 0:
        echo(f"{folder} is already finished ({content.get('made', '')}): nothing to do", file=sys.stderr)
        _remove_parts(folder)
    return content


def _start(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write ``building.json``, or check that the build started there has the same plan."""
    note, problem = folder / manifest.BUILDING, None
    if distributed.rank() == 0:
        if note.is_file():
            begun = manifest.read_json(note).get("plan")
            other = _differences(begun, plan) if isinstance(begun, dict) else "its building.json has no plan"
            if other:
                problem = f"{folder} was begun with other options ({other}): use the same options, or choose another folder"
        elif others := sorted(each.name for each in folder.iterdir() if not _is_ours(each.name)):
            problem = f"{folder} is not an index and not empty ({', '.join(others[:3])}): choose another folder"
        else:
            manifest.write_json(note, {"plan": dict(plan)})
    problem = distributed.gather_objects(problem)[0]
    if problem is not None:
        raise CoderError(problem)


def _is_ours(name: str) -> bool:
    """The lock, or a temporary file that a kill has left."""
    return name == LOCK or (name.startswith(f".{manifest.BUILDING}.") and name.endswith(".writing"))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    def shown(name: str, value: Any) -> Any:
        return f"{str(value)[:12]}…" if name == "model" else str(value)[:200]

    different = [name for name in now if before.get(name) != now[name]]
    return ", ".join(f"{name} was {shown(name, before.get(name))}, is {shown(name, now[name])}" for name in different)


def _encode(folder: Path, job: _Job) -> None:
    """Write this rank's missing parts, in order."""
    rank, ranks = distributed.rank(), distributed.world_size()
    size = job.encoder.batch_size
    batches_per_part = max(1, PART_SIZE // size)
    existing = _consecutive_parts(folder, rank)
    bad = BadSamples(job.source.name, job.encoder.max_bad_samples, keep=True)
    kept = bad.kept
    assert kept is not None
    blocks: set[int] = set()
    finished = False
    for path in existing:
        done = parts.summary(path)
        bad.read += len(done.positions) + len(done.bad)
        bad.kinds.update(kind for kind, _ in done.bad)
        blocks.update(done.blocks.tolist())
        finished = done.last
    if finished:
        bad.finish()
        return
    number, reported, counted = len(existing), 0, 0
    remaining = _RemainingItems(job.source, blocks, ranks)
    pictures = None
    if job.pictures is not None and job.thumbnails:
        pictures = PictureThumbnails(job.pictures.items(rank, ranks, block=size))
    pending: list[tuple[Any, list[bytes]]] = []
    pending_blocks: list[int] = []
    progress = Progress(job.source.num_images, bad.read * ranks, what="images", shown=rank == 0)

    def write(*, last: bool) -> None:
        nonlocal number, reported
        part = _make_part(pending, kept[reported:counted], pending_blocks, job.what, last=last)
        parts.write(folder / f"part-{rank:04d}-{number:08d}.safetensors", part)
        number, reported = number + 1, counted
        pending.clear()
        pending_blocks.clear()

    with progress:
        for batch in _batches(job, remaining, bad):
            if len(pending_blocks) >= batches_per_part:
                write(last=False)
            thumbnails = batch.extra or [b""] * len(batch.positions)
            if pictures is not None:
                thumbnails = pictures.thumbnails(batch.positions.tolist(), batch.keys, job.thumbnails)
            pending.append((batch, thumbnails))
            pending_blocks += batch.blocks
            counted = len(kept)  # those of the blocks so far
            progress.advance(bad.read * ranks)
        counted = len(kept)
        write(last=True)
    bad.finish()


def _consecutive_parts(folder: Path, rank: int) -> list[Path]:
    """A rank's parts up to the first gap; those after a gap are removed and encoded again."""
    existing = sorted(folder.glob(f"part-{rank:04d}-*.safetensors"))
    usable = [path for number, path in enumerate(existing) if path.stem == f"part-{rank:04d}-{number:08d}"]
    for path in existing[len(usable) :]:
        path.unlink()
    return usable


def _batches(job: _Job, items: _RemainingItems, bad: BadSamples) -> Iterator[Any]:
    if job.what == "captions":
        yield from job.encoder.caption_batches(items, bad=bad)
        return
    from_image: Callable[[Any], bytes] | None = None
    if job.thumbnails and job.pictures is None:
        from_image = partial(thumbnail, side=job.thumbnails)
    # thumbnails of other pictures are made in the order of the data, which several workers do not keep where they read shards
    workers = min(1, job.encoder.workers) if job.pictures is not None and by_shards(job.source) else None
    yield from job.encoder.batches(items, job.head, texts=job.what == "both", bad=bad, extra=from_image, workers=workers)


class _RemainingItems:
    """A source without the blocks ``done`` of a rank; data loading workers take turns as if the data began after these."""

    def __init__(self, source: Any, done: Collection[int], ranks: int) -> None:
        self.name, self.source, self.done, self.ranks = source.name, source, done, ranks

    def prepare(self) -> None:
        """As of the source, if it has one."""
        prepare(self.source)

    def items(self, rank: int = 0, world_size: int = 1, *, block: int = 1) -> Iterator[tuple[int, Item]]:
        worker, own_rank = divmod(rank, self.ranks)
        workers = world_size // self.ranks
        shifted = (worker + len(self.done)) % workers * self.ranks + own_rank
        for position, item in self.source.items(shifted, world_size, block=block):
            if block_of(position, block) not in self.done:
                yield position, item


def _make_part(
    pending: list[tuple[Any, list[bytes]]], bad: list[tuple[str, str]], blocks: list[int], what: str, *, last: bool
) -> parts.Part:
    batches = [batch for batch, _ in pending]

    def concatenate(values: list[Tensor]) -> Tensor | None:
        return torch.cat(values) if values else None

    none = torch.zeros(0, dtype=torch.int64)
    return parts.Part(
        positions=torch.cat([none, *(batch.positions for batch in batches)]),
        image_ids=torch.cat([none, *(batch.image_ids for batch in batches)]),
        keys=[key for batch in batches for key in batch.keys],
        captions=[captions for batch in batches for captions in batch.captions],
        thumbnails=[file for _, thumbnails in pending for file in thumbnails],
        images=concatenate([batch.images for batch in batches]) if what != "captions" else None,
        texts=concatenate([piece for batch in batches for piece in batch.texts]) if what != "images" else None,
        image_item=parts.pad_and_concatenate([batch.image_item for batch in batches if batch.image_item is not None]),
        text_item=parts.pad_and_concatenate([item for batch in batches for item in batch.text_items]),
        bad=bad,
        blocks=torch.tensor(blocks, dtype=torch.int64),
        last=torch.tensor([last]),
    )


def thumbnail(image: Any, *, side: int) -> bytes:
    """A JPEG file of an image, its longer side at most ``side`` pixels; empty if ``image`` is not a picture (but regions)."""
    if not isinstance(image, Image):
        return b""
    small = image.convert("RGB")
    small.thumbnail((side, side), Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


class PictureThumbnails:
    """Thumbnails of images that are read as regions, from the items of their pictures, by position and in the same order."""

    def __init__(self, items: Iterator[tuple[int, Any]]) -> None:
        self._items = items
        self._next: tuple[int, Any] | None = next(self._items, None)

    def thumbnails(self, positions: Sequence[int], keys: Sequence[str], side: int) -> list[bytes]:
        """JPEG files of images at ascending positions; empty where the picture has another key or cannot be read."""
        files = []
        for position, key in zip(positions, keys, strict=True):
            while self._next is not None and self._next[0] < position:
                self._next = next(self._items, None)
            files.append(self._thumbnail(position, key, side))
        return files

    def _thumbnail(self, position: int, key: str, side: int) -> bytes:
        if self._next is None or self._next[0] != position or self._next[1].key != key:
            return b""
        try:
            return thumbnail(self._next[1].load(), side=side)
        except (OSError, ValueError):
            return b""
