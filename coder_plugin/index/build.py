"""Building an index: a data set in, a folder out. A build that was killed continues when the same command runs again.

A data set is first embedded, into a folder that is removed at the end; segments are made from the embeddings, and the manifest,
written last, makes the folder an index. One writer at a time; with several ranks each embeds its share, and the first builds.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coder_plugin import distributed
from coder_plugin.data.units import Units
from coder_plugin.errors import CoderError
from coder_plugin.index import assembly, manifest, vectors_file
from coder_plugin.index.embed import Embedding, begin, differences, embed_all, plan_of
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.job import EmbedJob, content_digest
from coder_plugin.index.lock import LOCK, write_lock
from coder_plugin.terminal import echo

#: Folder of the embeddings that an index is built from, until it is finished.
EMBEDDINGS = "embeddings"
#: Images of a file of these, outside shards: after a kill at most so many are encoded again.
ROWS_PER_FILE = 512
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
        pictures: for thumbnails of images that are read as regions: a source of their pictures, in the same order. Of regions
            that are joined to shards: those shards.
        data: further options that a continued build must share, as JSON values: how the data are read, the precision.

    Returns:
        The manifest.

    Raises:
        CoderError: the folder holds something else or is being written; a build with other options was started there; an
            unknown factory; no image could be read.
    """
    _check_what(what)
    folder, rank = Path(folder), distributed.rank()
    units = Units(source, ROWS_PER_FILE)
    if pictures is not None and units.by_shards and not hasattr(source, "with_regions"):
        raise CoderError(f"{source.name}: thumbnails need the pictures in the same shards: join the regions to them")
    embedding = Embedding(
        encoder=encoder,
        units=units,
        thumbnails=thumbnails,
        tokens=rerank and encoder.reranking is not None,
        pictures=None if pictures is None else Units(pictures, ROWS_PER_FILE),
    )
    vectors_file.check_factory(factory, embedding.dimensions)
    images = None if units.by_shards else units.images
    plan = {"data": source.name, **(data or {}), "images": images, "content": content_digest(source)}
    described: dict[str, Any] = {"model": model, "plan": plan, "what": what}

    def embed() -> None:
        output = folder / EMBEDDINGS
        header = begin(output, embedding, **described, first=rank)
        embed_all(output, embedding, header, index=rank, count=distributed.world_size(), wait=True, shown=rank == 0)

    whole_plan = {**plan_of(embedding, **described), "segment size": None}
    return _build(folder, whole_plan, factory, lambda: Embeddings(folder / EMBEDDINGS), embed=embed)


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

    Memory: for a flat index a few thousand vectors, for others up to twice the vectors of a segment.

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
    opened = embeddings if isinstance(embeddings, Embeddings) else Embeddings(embeddings)
    vectors_file.check_factory(factory, opened.dimensions)
    kinds = assembly.kinds_of(opened, what)
    plan = {
        **opened.header.plan,
        "embeddings": assembly.source_digest(opened),
        "what": kinds[0] if len(kinds) == 1 else "both",
        "re-ranking": rerank and assembly.has_tokens(opened),
        "segment size": segment_size,
    }
    return _build(Path(folder), plan, factory, lambda: opened, what=what, rerank=rerank)


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
    _run_on_all_ranks(lambda: vectors_file.check_factory(factory, job.dimensions))

    def embed() -> None:
        job.run(index=rank, count=ranks, wait=True, shown=rank == 0)

    plan = {**job.plan(), "segment size": segment_size}
    return _build(folder, plan, factory, lambda: Embeddings(folder / EMBEDDINGS), embed=embed)


def _nothing() -> None:
    """In place of a function that embeds, where the embeddings are there."""


def _build(
    folder: Path,
    plan: Mapping[str, Any],
    factory: str,
    embeddings: Callable[[], Embeddings],
    *,
    embed: Callable[[], None] = _nothing,
    what: str = "both",
    rerank: bool = True,
) -> dict[str, Any]:
    """Build an index, or continue, or say that it is finished.

    Args:
        folder: the index.
        plan: all options that decide what is in it, but for the factory.
        factory: FAISS index factory string.
        embeddings: opens what it is built from, on the first rank.
        embed: makes that, on all ranks together.
        what: whose vectors are kept.
        rerank: keep what re-ranking needs, if the embeddings have it.
    """

    def assemble() -> None:
        if distributed.rank() == 0:
            _assemble(folder, embeddings(), plan, factory, what=what, rerank=rerank)

    with write_lock(folder):
        if (folder / manifest.MANIFEST).is_file():
            return _read_finished(folder, plan, factory)
        _start(folder, {**plan, "factory": factory})
        _run_on_all_ranks(embed)
        _run_on_all_ranks(assemble)
        return manifest.read_manifest(folder)


def _assemble(
    folder: Path, embeddings: Embeddings, plan: Mapping[str, Any], factory: str, *, what: str, rerank: bool
) -> None:
    """Train, write the segments, and the manifest last."""
    kinds, rerank = assembly.kinds_of(embeddings, what), rerank and assembly.has_tokens(embeddings)
    note = folder / manifest.BUILDING
    begun = manifest.read_json(note)
    for kind in kinds:
        name = assembly.trained_name(kind)
        if not (folder / name).is_file() or begun.get(name) != manifest.sums(folder, [folder / name]):
            assembly.train(folder, embeddings, kind, factory)
    trained = [path for kind in kinds if (path := folder / assembly.trained_name(kind)).is_file()]
    manifest.write_json(note, {"plan": begun["plan"], **{path.name: manifest.sums(folder, [path]) for path in trained}})
    options = {"kinds": kinds, "factory": factory, "size": plan["segment size"], "rerank": rerank}
    notes = assembly.write_segments(folder, embeddings, columns=embeddings.columns, **options)
    plan = {**plan, "re-ranking": rerank}
    content: dict[str, Any] = {"model": dict(embeddings.model), "plan": plan, "factory": factory, "removed": {}}
    content |= {"made": assembly.today(), **assembly.fields(embeddings, notes, kinds)}
    content["files"] |= manifest.sums(folder, trained)
    manifest.write_manifest(folder, content)
    _remove_leftovers(folder, content)


def _remove_leftovers(folder: Path, content: Mapping[str, Any]) -> None:
    """Remove what is needed only while the index is being built, and what kills have left; the note that it is, at the end."""
    names = {segment["name"] for segment in content["segments"]}
    for path in (*folder.glob(".*.writing"), *(folder / manifest.SEGMENTS).iterdir()):
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder / EMBEDDINGS, ignore_errors=True)
    (folder / manifest.BUILDING).unlink(missing_ok=True)


def _check_what(what: str) -> None:
    if what not in WHAT:
        raise CoderError(f"what must be one of {', '.join(WHAT)}, got {what!r}")


def _run_on_all_ranks(work: Callable[[], object]) -> None:
    """Run ``work`` on each rank and wait for all; if one fails, all raise, because the others would wait for it for ever."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    distributed.raise_on_all_ranks(failure, prefix="another process failed: ")


def _read_finished(folder: Path, plan: Mapping[str, Any], factory: str) -> dict[str, Any]:
    content = manifest.read_manifest(folder)
    other = differences({**content["plan"], "factory": content["factory"]}, {**plan, "factory": factory})
    if other:
        raise CoderError(f"{folder} is a finished index with other options ({other}): choose another folder, or remove it")
    if distributed.rank() == 0:
        echo(f"{folder} is already finished ({content.get('made', '')}): nothing to do", file=sys.stderr)
        if (folder / manifest.BUILDING).exists():  # killed after its manifest
            _remove_leftovers(folder, content)
    return content


def _start(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write ``building.json``, or check that the build started there has the same plan."""
    note, problem = folder / manifest.BUILDING, None
    if distributed.rank() == 0:
        if note.is_file():
            begun = manifest.read_json(note).get("plan")
            other = differences(begun, plan) if isinstance(begun, dict) else "its building.json has no plan"
            if other:
                todo = "use the same options, choose another folder, or remove this one"
                problem = f"{folder} was begun with other options ({other}): {todo}"
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
