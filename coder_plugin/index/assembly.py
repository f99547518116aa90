"""From an embeddings folder to the files of an index: trained FAISS indexes, segments, and the fields of the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_path, sha256_json
from coder_plugin.index import manifest, segments, training, vectors_file
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.manifest import KINDS
from coder_plugin.progress import Progress

#: Keys of unreadable samples that a manifest lists.
LISTED = 100


def source_digest(embeddings: Embeddings) -> str:
    """A digest of what an embeddings folder holds: its model, its plan, and its units, by their sizes and checksums."""
    units = [embeddings.summary(unit) for unit in embeddings.present]
    return sha256_json([embeddings.model["fingerprint"], embeddings.header.plan_sha256, units])


def kinds_of(embeddings: Embeddings, what: str = "both") -> list[str]:
    """The kinds of vectors that an index of an embeddings folder has.

    Raises:
        CoderError: it has none of those that are asked for.
    """
    stored = {"both": KINDS, "images": ("images",), "captions": ("captions",)}
    asked = [kind for kind in stored[embeddings.header.what] if kind in stored[what]]
    if "captions" in asked and not any(embeddings.summary(unit).captions for unit in embeddings.present):
        asked.remove("captions")
        if not asked:
            raise CoderError("the data have no captions, and only captions were to be indexed: there is nothing to embed")
    if not asked:
        raise CoderError(f"{embeddings.folder} has vectors of {embeddings.header.what} only, not of {what}: embed them again")
    return asked


def has_tokens(embeddings: Embeddings) -> bool:
    """Whether the folder has what re-ranking needs.

    Raises:
        CoderError: some units have it and others not.
    """
    tokens = {embeddings.summary(unit).tokens is not None for unit in embeddings.present if embeddings.summary(unit).rows}
    if len(tokens) > 1:
        raise CoderError(f"{embeddings.folder} has tokens for re-ranking in some of its files only: embed the data again")
    return True in tokens


def trained_name(kind: str) -> str:
    """The file of the trained, empty FAISS index of a kind of vectors."""
    return f"trained-{kind}.faiss"


def train(folder: Path, embeddings: Embeddings, kind: str, factory: str) -> None:
    """Train a factory on a sample of the vectors, and write the empty index; nothing for one that needs no training."""
    if training.sample_size(factory, embeddings.dimensions) == 0:
        return
    views = embeddings.views if kind == "images" else 1
    summaries = map(embeddings.summary, embeddings.present)
    total = views * sum(each.rows if kind == "images" else each.captions for each in summaries)

    def sample(size: int) -> np.ndarray:
        return segments.sample(embeddings, kind, training.sample_rows(total, size))

    index = training.train(factory, embeddings.dimensions, sample)
    with atomic_path(folder / trained_name(kind)) as temporary:
        vectors_file.import_faiss().write_index(index, str(temporary))


def empty_index(folder: Path, kind: str, factory: str, dimensions: int) -> Callable[[], Any]:
    """What makes the empty index that a segment's vectors are added to: trained where the factory needs it, None for Flat.

    Raises:
        CoderError: the trained file is missing, or is not an empty index of so many dimensions.
    """
    if training.sample_size(factory, dimensions) == 0:
        return lambda: training.train(factory, dimensions, lambda size: np.zeros((size, dimensions), dtype=np.float32))
    path = folder / trained_name(kind)

    def make() -> Any:
        faiss = vectors_file.import_faiss()
        if not path.is_file():
            raise CoderError(f"{path} is missing: nothing can be added to this index without it; build it again")
        index = vectors_file.read(path, mapped=False)
        if (index.ntotal, index.d, index.is_trained, index.metric_type) != (0, dimensions, True, faiss.METRIC_INNER_PRODUCT):
            raise CoderError(f"{path} is not an empty, trained index of {dimensions} dimensions: build the index again")
        return index

    return make


def write_segments(
    folder: Path,
    embeddings: Embeddings,
    *,
    kinds: Sequence[str],
    factory: str,
    size: int | None,
    rerank: bool,
    columns: Mapping[str, str],
    first: int = 0,
) -> list[tuple[str, dict[str, Any]]]:
    """Write the segments of an embeddings folder, or keep those that are whole; their names and notes.

    Args:
        folder: of the index.
        embeddings: what they are made from.
        kinds: of vectors that are kept.
        factory: FAISS index factory string.
        size: images of a segment; see :func:`~coder_plugin.index.segments.pieces`.
        rerank: keep what re-ranking needs.
        columns: the metadata columns that are kept, and their types.
        first: number of the first segment.
    """
    planned = segments.pieces(embeddings, kinds, factory, size)
    trained = [folder / trained_name(kind) for kind in kinds]
    source = {
        "embeddings": source_digest(embeddings),
        "kinds": kinds,
        "factory": factory,
        "rerank": rerank,
        "columns": columns,
        "trained": manifest.sums(folder, filter(Path.is_file, trained)),
    }
    empty = {kind: empty_index(folder, kind, factory, embeddings.dimensions) for kind in kinds}
    (folder / manifest.SEGMENTS).mkdir(exist_ok=True)
    written = []
    with Progress(sum(piece.images for piece in planned), what="images indexed") as progress:
        for number, piece in enumerate(planned, first):
            name = f"{number:05d}"
            path = folder / manifest.SEGMENTS / name
            write = partial(segments.write_segment, source=source, empty=empty, rerank=rerank, columns=columns)
            written.append((name, write(path, embeddings, piece)))
            progress.update(piece.images)
    return written


def fields(
    embeddings: Embeddings, notes: Iterable[tuple[str, Mapping[str, Any]]], kinds: Sequence[str]
) -> dict[str, Any]:
    """The fields of the manifest of an index that has these segments alone, without its model and plan."""
    notes = list(notes)
    counts = {kind: sum(note[kind] for _, note in notes) for kind in KINDS}
    bad = [pair for unit in embeddings.present for pair in embeddings.summary(unit).bad]
    sizes = {
        kind: {"items": counts[kind], "views": embeddings.views if kind == "images" else 1, "dimensions": embeddings.dimensions}
        for kind in kinds
    }
    return {
        **counts,
        "unreadable": len(bad),
        "unreadable_kinds": Counter(kind for kind, _ in bad),
        "unreadable_keys": [key for _, key in bad[:LISTED]],
        "vectors": sizes,
        "columns": dict(embeddings.columns),
        "segments": [{"name": name, **{kind: note[kind] for kind in KINDS}} for name, note in notes],
        "files": {
            f"{manifest.SEGMENTS}/{name}/{file}": sums for name, note in notes for file, sums in note["files"].items()
        },
    }


def today() -> str:
    """The time, for a manifest."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
