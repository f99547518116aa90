"""Building an index from Parquet files, and changing it.

What is precious is the Parquet in ``INDEX/embeddings``. All else is derived: it is written under new names, and the note,
renamed at the end, makes it the index. Until then the old one opens; a build that was killed leaves files that no note names.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coder_plugin import distributed
from coder_plugin.data.units import differences
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_path, atomic_write, fsync_path, locked, remove_leftovers, sha256_file
from coder_plugin.search.embed import EmbedJob, embedded
from coder_plugin.search.index import EMBEDDINGS, FORMAT, NOTE, PATH, Index, is_index, read_note
from coder_plugin.search.parquet import KINDS, TOKENS, Table, read_header, read_npy, storable, write_tables
from coder_plugin.search.vectors import build, check_factory

#: Folder of the images that ``index add`` embeds, until they are in the index.
ADDING = "adding"


class Added(NamedTuple):
    """What :func:`add` did: images and captions added, and images of the same keys that were removed for them."""

    images: int
    captions: int
    replaced: int


class Removed(NamedTuple):
    """What :func:`remove` did: images removed, and the keys that the index does not have."""

    images: int
    missing: list[str]


def build_index(
    folder: str | Path,
    embeddings: str | Path | EmbedJob,
    *,
    what: str = "both",
    factory: str = "Flat",
    rerank: bool = True,
) -> dict[str, Any]:
    """Build an index from what ``coder-plugin embed`` wrote, or embed the data first.

    The Parquet files become part of the index: they are linked where the file system can, else copied. A build that was
    stopped continues when it is called again. Under a launcher each rank embeds its share, and the first one builds.

    Args:
        folder: the index: a new or an empty folder, or one where a build of the same data was begun. A finished index of the
            same data is built again if ``what``, ``factory`` or ``rerank`` differ.
        embeddings: their folder, or an index that has them; or a job whose ``output`` is ``folder / EMBEDDINGS``.
        what: whose vectors are searched: "images", "captions", or "both" as far as the embeddings have them.
        factory: FAISS index factory string; "Flat" is exact, others are HNSW32, IVF1024,Flat or PQ64.
        rerank: keep what re-ranking needs, if the embeddings have it.

    Returns:
        The note of the index.

    Raises:
        CoderError: the folder holds something else or is being written; an unknown factory; embeddings that are damaged or not
            complete.

    Example:
        >>> import tempfile
        >>> from coder_plugin.search.parquet import Rows, schema_of, write_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> vectors = np.eye(2, dtype=np.float32)
        >>> rows = Rows(["a.jpg", "b.jpg"], [["a dog"], []], vectors, None, [None] * 2, [None] * 2)
        >>> header = {"model": {"fingerprint": "f"}, "plan": {}, "units": 1, "unit": 0, "bad": []}
        >>> _ = write_file(folder / "00000000.parquet", schema_of(2, what="images"), header, [rows])
        >>> build_index(folder / "index", folder)["images"]
        2
        >>> Index(folder / "index").search(vectors[1:], k=1)[1].tolist()
        [[1]]
    """
    folder, rank = Path(folder), distributed.rank()
    job = embeddings if isinstance(embeddings, EmbedJob) else None
    options = {"what": what, "factory": factory, "rerank": rerank}
    if what not in ("both", *KINDS):
        raise CoderError(f"what must be both, images or captions, got {what!r}")
    distributed.on_every_rank(lambda: check_factory(factory))  # before the model is opened
    if job is not None:
        distributed.on_every_rank(lambda: job.opened)  # what it cannot open leaves no folder
    with write_lock(folder):
        before = read_note(folder, derived=False) if is_index(folder) else None
        table = None if isinstance(embeddings, EmbedJob) else _table(Path(embeddings))
        dimensions = job.dimensions if job is not None else next(iter(table.vector_sizes.values()))["dimensions"]  # type: ignore[union-attr]
        distributed.on_every_rank(lambda: check_factory(factory, dimensions))
        plan = job.header()["plan"] if job is not None else table.headers[0].get("plan", {})  # type: ignore[union-attr]
        if before is not None and (other := differences(before["plan"], plan)):
            raise CoderError(f"{folder} is an index of other data or options ({other}): choose another folder")
        if before is None:
            distributed.on_every_rank(lambda: _check_begun(folder, plan) if rank == 0 else None)
        if job is not None and before is None:
            distributed.on_every_rank(lambda: job.run(index=rank, count=distributed.world_size(), shown=rank == 0))

        def assemble() -> None:
            if before is not None:
                _tidy(folder, before)
                if before["options"] != options or not _is_whole(folder, before):
                    _derive(folder, [folder / name for name in before["embeddings"]], before, options)
                return
            if table is not None:
                _derive(folder, _take(folder, table.paths, first=0), None, options)
            else:
                _derive(folder, embedded(folder / EMBEDDINGS).paths, None, options)

        distributed.on_every_rank(assemble if rank == 0 else lambda: None)
        return read_note(folder)


def add(
    folder: str | Path,
    embeddings: str | Path | Mapping[str, Any],
    *,
    replace: bool = False,
) -> Added:
    """Add images to an index: embed them, if they are not, and build again.

    Args:
        folder: the index.
        embeddings: a folder of ``coder-plugin embed`` by the same model, with the same kinds of vectors and metadata columns;
            or arguments of :class:`~coder_plugin.search.embed.EmbedJob`, such as ``data``, to embed with the index's model.
        replace: remove images of the index that have the same keys; else such keys are an error.

    Raises:
        CoderError: an index or embeddings that are damaged; another model; other kinds of vectors or columns; keys that the
            index has already.
    """
    folder = Path(folder)
    read_note(folder)
    with write_lock(folder):
        index = Index(folder, gpu=False)
        _tidy(folder, index.note)
        if isinstance(embeddings, Mapping):
            job = _adding_job(index, embeddings)
            index.check_model(job.opened.model)
            if not (data := job.opened.source).is_stream:  # whose keys are known before anything is encoded
                _existing(index, [item.image_id for _, item in data.items()], replace)
            job.run()
            source = Path(job.output)
        else:
            source = Path(embeddings)
        table = embedded(source)
        captions = int(_starts(table)[-1])
        _check_same(index, table, source)
        existing = _existing(index, table.image_ids(), replace)
        old = _without(index, existing)
        first = 1 + max(int(path.stem) for path in (folder / EMBEDDINGS).glob("*.parquet"))
        new = _take(folder, table.paths, first=first)
        note = _derive(folder, [*old, *new], index.note, index.note["options"], headers=table.headers)
        if isinstance(embeddings, Mapping):
            shutil.rmtree(source)
    kept = index.note["images"] - len(existing)
    return Added(note["images"] - kept, captions, len(existing))


def remove(folder: str | Path, keys: Iterable[str]) -> Removed:
    """Remove images and their captions: their rows are deleted from the Parquet files, and the index is built again.

    Args:
        folder: the index.
        keys: of the images; all images of a key are removed.

    Raises:
        CoderError: an index that is damaged or being written; no keys; no image would be left.
    """
    folder, keys = Path(folder), list(dict.fromkeys(map(storable, keys)))
    if not keys:
        raise CoderError("no keys of images to remove were given")
    read_note(folder)
    with write_lock(folder):
        index = Index(folder, gpu=False)
        _tidy(folder, index.note)
        found = {key: rows for key in keys if (rows := index.records.rows_of(key))}
        rows = sorted(row for each in found.values() for row in each)
        if len(rows) == index.note["images"]:
            raise CoderError(f"{folder} has no other images: delete the folder to remove all")
        if rows:
            _derive(folder, _without(index, rows), index.note, index.note["options"])
    return Removed(len(rows), [key for key in keys if key not in found])


def _adding_job(index: Index, options: Mapping[str, Any]) -> EmbedJob:
    """A job that embeds further images as those of the index were."""
    from coder_plugin.pretrained.saved_model import check_saved_reranker
    from coder_plugin.search.searcher import checked_options

    model, plan = index.note["model"], index.note["plan"]
    if model["spec"] is None and not isinstance(model["options"].get("model"), str) and "model" not in options:
        raise CoderError(f"{index.folder} does not say where its model is: embed the images with coder-plugin embed")
    checked = checked_options(model, options.get("model"))
    if model["reranker"] and "reranker" not in options:
        check_saved_reranker(model["reranker"], f"its {NOTE}")
    named = {"model": model["spec"], "export": model["export"], **options}
    named["options"] = {**checked, **options.get("options", {})}
    same = {"what": plan.get("what", "both"), "dtype": plan.get("dtype", "float32"), "thumbnails": plan.get("thumbnails", 128)}
    return EmbedJob(
        output=str(index.folder / ADDING), tokens=bool(index.note["tokens"]), reranker=model["reranker"] or None,
        columns=index.note["columns"], **same, **named,
    )  # fmt: skip


def _table(source: Path) -> Table:
    """What ``embed`` wrote to a folder; of an index, or its folder of embeddings, the files that its note names."""
    for folder in (source, source.parent):
        if is_index(folder) and source in (folder, folder / EMBEDDINGS):
            return Table([folder / name for name in read_note(folder, derived=False)["embeddings"]])
    return embedded(source)


def _is_whole(folder: Path, note: Mapping[str, Any]) -> bool:
    """Whether the files that were built from the Parquet files are there."""
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in note["sizes"].items())


def _check_begun(folder: Path, plan: Mapping[str, Any]) -> None:
    """The folder holds nothing else: neither other files nor embeddings of other data that a build has begun."""
    names = sorted(path.name for path in folder.iterdir() if path.name[:1] != "." and path.name not in (EMBEDDINGS, ADDING))
    if others := [name for name in names if not PATH.fullmatch(name)]:
        raise CoderError(f"{folder} holds no index and is not empty ({', '.join(others[:3])}): choose another folder")
    for path in sorted((folder / EMBEDDINGS).glob("*.parquet"))[:1]:
        try:
            begun = read_header(path).get("plan", {})
        except CoderError:  # damaged: it is embedded again
            continue
        if other := differences(begun, plan):
            raise CoderError(f"{folder} was begun with other options ({other}): choose another folder, or remove this one")


def _check_same(index: Index, table: Table, source: Path) -> None:
    """The embeddings are those of the index's model, kinds and columns."""
    note, folder = index.note, index.folder
    if table.model["fingerprint"] != note["model"]["fingerprint"]:
        names = [str(each.get("name") or "an unnamed model")[:200] for each in (table.model, note["model"])]
        raise CoderError(
            f"{source} was embedded with another model ({names[0]}) than {folder} ({names[1]}), so their vectors "
            "cannot be compared: embed the data with the index's model"
        )
    if table.columns != note["columns"]:
        theirs, ours = (" ".join(f"{name}:{kind}" for name, kind in each.items()) for each in (table.columns, note["columns"]))
        todo = f"embed the data with --columns {ours}" if ours else "embed the data without --columns"
        raise CoderError(f"{source} has other metadata columns ({theirs or 'none'}) than {folder}: {todo}")
    if table.vector_sizes != note["all_vectors"]:
        sizes = [_shown(each) for each in (table, index.table)]
        raise CoderError(f"{source} has other vectors ({sizes[0]}) than {folder} ({sizes[1]}): see embed --what")
    if table.tokens != note["tokens"]:
        named = note["model"].get("reranker")
        flag = f"with --reranker {named!r}" if named else "with --tokens" if note["tokens"] else "without tokens"
        raise CoderError(f"{source} has other tokens for re-ranking than {folder}: embed the data {flag}")


def _shown(table: Table) -> str:
    return ", ".join(f"{kind} of {size['views']} x {size['dimensions']}" for kind, size in table.vector_sizes.items())


def _existing(index: Index, image_ids: Any, replace: bool) -> list[int]:
    """Rows of the index's images of these ids, ascending; an error if there are some and they are not to be replaced."""
    rows = np.flatnonzero(np.isin(index.records.image_ids, image_ids)).tolist()
    if rows and not replace:
        key = index.records.images(rows[:1])[0].key
        raise CoderError(
            f"{index.folder} has {len(rows):,} of these images already (the first: {key!r}): --replace removes the old ones"
        )
    return rows


def _take(folder: Path, paths: Sequence[Path], *, first: int) -> list[Path]:
    """Files as the index's own, numbered from ``first``: links where the file system can, else copies."""
    target = folder / EMBEDDINGS
    target.mkdir(parents=True, exist_ok=True)
    taken = []
    for number, path in enumerate(paths, first):
        taken.append(target / f"{number:08d}.parquet")
        with atomic_path(taken[-1]) as temporary:
            try:
                os.link(os.path.realpath(path), temporary)
            except OSError:
                shutil.copyfile(path, temporary)
    return taken


def _without(index: Index, rows: Sequence[int]) -> list[Path]:
    """The index's files, those that hold ``rows`` written again without them under new names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, removed = index.table, np.asarray(rows, dtype=np.int64)
    paths = []
    number = 1 + max(int(path.stem) for path in (index.folder / EMBEDDINGS).glob("*.parquet"))
    for path, first, last in zip(table.paths, table.first, table.first[1:], strict=False):
        here = removed[(removed >= first) & (removed < last)] - first
        if not len(here):
            paths.append(path)
            continue
        if len(here) == last - first:
            continue
        whole = pq.read_table(path, page_checksum_verification=True, memory_map=False)
        keep = np.ones(len(whole), bool)
        keep[here] = False
        left = whole.filter(pa.array(keep))
        paths.append(path.with_name(f"{number:08d}.parquet"))
        number += 1
        with atomic_path(paths[-1]) as temporary:
            write_tables(temporary, left.schema, read_header(path), [left])
    return paths


def _derive(
    folder: Path,
    paths: Sequence[Path],
    before: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    *,
    headers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Build everything that is derived from files of the index, and the note at last.

    Args:
        folder: the index. paths: its files in their order. before: its note until now; None: there was none.
        options: ``what``, ``factory``, ``rerank``. headers: of files that were added, for the samples that were left out.
    """
    table = Table(paths)
    number = 1 if before is None else before["build"] + 1
    what, factory = options["what"], options["factory"]
    kinds = [kind for kind in KINDS if what in ("both", kind) and kind in table.vector_sizes]
    if not kinds:
        raise CoderError(f"{paths[0].parent} has no vectors of {what}: embed the data with --what {what} or both")
    starts = _starts(table)
    counts = {"images": len(table), "captions": int(starts[-1])}
    written: list[Path] = []
    with atomic_path(path := folder / f"starts-{number:05d}.npy") as temporary, open(temporary, "wb") as file:
        np.save(file, starts)
    written.append(path)
    kinds = [kind for kind in kinds if counts[kind]]
    for kind in kinds:
        size = table.vector_sizes[kind]
        with atomic_path(path := folder / f"{kind}-{number:05d}.faiss") as temporary:
            total = counts[kind] * size["views"]
            seen = build(temporary, factory, size["dimensions"], total, partial(table.vector_batches, kind))
            if seen != total:
                raise CoderError(f"{paths[0].parent} has {seen:,} vectors of {kind}, not {total:,}: embed the data again")
        written.append(path)
    tokens = [name for name in table.tokens if options["rerank"]]
    for name in tokens:
        with atomic_path(path := folder / f"{name}-{number:05d}.npy") as temporary:
            _write_tokens(temporary, table, name, counts["images" if name.startswith(TOKENS["images"]) else "captions"])
        written.append(path)
    bad = Counter(before["bad"] if before is not None else {})
    for header in table.headers if before is None else headers:
        bad.update(kind for kind, _ in header.get("bad", ()))
    note = {
        "format": FORMAT,
        "build": number,
        "built": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "model": dict(table.model),
        "plan": table.headers[0].get("plan", {}) if before is None else before["plan"],
        "options": dict(options),
        "factory": factory,
        "reranks": bool(tokens),
        **counts,
        "vectors": {kind: table.vector_sizes[kind] for kind in kinds},
        "all_vectors": table.vector_sizes,
        "columns": table.columns,
        "tokens": table.tokens,
        "bad": dict(bad),
        "embeddings": {
            path.relative_to(folder).as_posix(): [path.stat().st_size, header["rows"]]
            for path, header in zip(paths, table.headers, strict=True)
        },
        "sizes": {path.name: path.stat().st_size for path in written},
        "checksums": {path.name: sha256_file(path) for path in written},
    }
    fsync_path(folder / EMBEDDINGS)
    with atomic_write(folder / NOTE, "w") as note_file:
        note_file.write(json.dumps(note, indent=1) + "\n")
    _tidy(folder, note)
    return note


def _starts(table: Table) -> np.ndarray:
    """Of each image the row of its first caption, and at the end the number of captions; an image without a key is refused."""
    import pyarrow.compute as pc

    counts = [pc.list_value_length(batch.column(0)).fill_null(0).to_numpy(zero_copy_only=False)
              for _, batch in table.batches(["captions", "key", "image_id"], rows=16384)]  # fmt: skip
    return np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)


def _write_tokens(path: Path, table: Table, name: str, count: int) -> None:
    """The tokens of all images or captions as one array, padded with zeros to the longest."""

    def cells() -> Iterator[np.ndarray]:
        for _, batch in table.batches([name], rows=64):
            column = batch.column(0)
            for content in (column.flatten() if name.startswith(TOKENS["captions"]) else column).to_pylist():
                yield read_npy(content or b"")

    if not count:  # no captions
        with open(path, "wb") as file:
            np.save(file, np.zeros((0, 1), np.float16))
        return
    try:
        shapes, dtypes = set(), set()
        for cell in cells():
            shapes.add(cell.shape)
            dtypes.add(cell.dtype)
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        array = np.lib.format.open_memmap(path, "w+", np.result_type(*dtypes), (count, *shape))
        number = -1
        for number, cell in enumerate(cells()):
            place: Any = (number, *map(slice, cell.shape))
            array[place] = cell
        if number + 1 != count:
            raise ValueError(f"{number + 1:,} of {count:,} cells")
        array.flush()
    except (ValueError, TypeError, IndexError) as error:
        reason = str(error)[:100]
        raise CoderError(f"{table.paths[0].parent}: its column {name} has no tokens ({reason}): embed again") from error


def _tidy(folder: Path, note: Mapping[str, Any]) -> None:
    """Remove what the note does not name: files of older builds, and of changes that were killed."""
    for each in (folder, folder / EMBEDDINGS):
        remove_leftovers(each)
    for path in [*folder.glob("*.faiss"), *folder.glob("*.npy"), *(folder / EMBEDDINGS).glob("*.parquet")]:
        name = path.relative_to(folder).as_posix()
        if PATH.fullmatch(name) and name not in note["sizes"] and name not in note["embeddings"]:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """The folder's lock (:func:`coder_plugin.files.locked`), which the first rank holds for all."""
    with contextlib.ExitStack() as held:
        distributed.on_every_rank(lambda: held.enter_context(locked(folder)) if distributed.rank() == 0 else None)
        yield
