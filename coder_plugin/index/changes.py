"""Changes of a finished index: images added from an embeddings folder, and images removed by key.

Files of an index are never changed. A change writes new files and then a new manifest, atomically: before it the index is the
old one, whole, and after it the new one.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coder_plugin import files
from coder_plugin.errors import CoderError
from coder_plugin.index import assembly, manifest
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.lock import write_lock
from coder_plugin.index.manifest import KINDS
from coder_plugin.index.records import storable
from coder_plugin.index.removed import write_removed
from coder_plugin.index.search import Index

#: Keys that are looked up at once.
_KEYS = 4096


class Added(NamedTuple):
    """What :func:`add` did: images and captions added, and images of the same keys that were removed for them."""

    images: int
    captions: int
    replaced: int


class Removed(NamedTuple):
    """What :func:`remove` did: images removed, and the keys that the index does not have."""

    images: int
    missing: list[str]


def add(
    folder: str | Path, embeddings: str | Path | Embeddings, *, replace: bool = False, segment_size: int | None = None
) -> Added:
    """Append the images of an embeddings folder to an index; nothing is encoded, and nothing that is there is written again.

    Args:
        folder: the index.
        embeddings: of the same model, with the same kinds of vectors and metadata columns, opened or their folder.
        replace: remove images of the index that have the same keys; else such keys are an error.
        segment_size: images of a segment; see :func:`~coder_plugin.index.build.build_from_embeddings`.

    Raises:
        CoderError: an index or embeddings that are damaged; another model; other kinds of vectors or columns; keys that the
            index has already.
    """
    folder = Path(folder)
    manifest.read_manifest(folder)
    with write_lock(folder):
        index = Index(folder, gpu=False)
        try:
            _remove_leftovers(index)
            embeddings = embeddings if isinstance(embeddings, Embeddings) else Embeddings(embeddings)
            return _add(index, embeddings, replace, segment_size)
        finally:
            index.close()


def _add(index: Index, embeddings: Embeddings, replace: bool, segment_size: int | None) -> Added:
    before, folder = index.manifest, index.folder
    _check_same(index, embeddings)
    existing = _existing(index, embeddings)
    if len(existing) and not replace:
        [first] = index.records.images(existing[:1].tolist())
        raise CoderError(
            f"{folder} has {len(existing):,} of these images already (the first: {first.key!r}): --replace removes the old ones"
        )
    kinds, first_number = list(before["vectors"]), 1 + max(int(each["name"]) for each in before["segments"])
    notes = assembly.write_segments(
        folder,
        embeddings,
        kinds=kinds,
        factory=before["factory"],
        size=segment_size,
        rerank=before["plan"]["re-ranking"],
        columns=before["columns"],
        first=first_number,
    )
    new = assembly.fields(embeddings, notes, kinds)
    content = manifest.content_of(before)
    for name in ("images", "captions", "unreadable"):
        content[name] += new[name]
    content["unreadable_keys"] = (before["unreadable_keys"] + new["unreadable_keys"])[: assembly.LISTED]
    for kind, count in new["unreadable_kinds"].items():
        content["unreadable_kinds"][kind] = content["unreadable_kinds"].get(kind, 0) + count
    for kind in kinds:
        content["vectors"][kind]["items"] += new["vectors"][kind]["items"]
    content["segments"] += new["segments"]
    content["files"] |= new["files"]
    _commit(index, content, existing)
    return Added(new["images"], new["captions"], len(existing))


def remove(folder: str | Path, keys: Iterable[str]) -> Removed:
    """Remove images and their captions from what searches find.

    The files of the index are not changed: vectors, captions and thumbnails of removed images stay in them.

    Args:
        folder: the index.
        keys: of the images; all images of a key are removed.

    Raises:
        CoderError: an index that is damaged or being written; no keys.
    """
    folder, keys = Path(folder), list(dict.fromkeys(map(storable, keys)))
    if not keys:
        raise CoderError("no keys of images to remove were given")
    manifest.read_manifest(folder)
    with write_lock(folder):
        index = Index(folder, gpu=False)
        try:
            _remove_leftovers(index)
            found = index.records.rows_of(keys)
            rows = np.unique(np.array([row for each in found.values() for row in each], dtype=np.int64))
            if len(rows):
                _commit(index, manifest.content_of(index.manifest), rows)
            return Removed(len(rows), [key for key in keys if key not in found])
        finally:
            index.close()


def _remove_leftovers(index: Index) -> None:
    """Remove what a change that was killed has left: temporary files, and segments that the manifest does not name."""
    segments = index.folder / manifest.SEGMENTS
    for each in (index.folder, segments):
        files.remove_all_leftovers(each)
    names = {each["name"] for each in index.manifest["segments"]}
    for path in segments.iterdir():
        if path.name not in names and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _commit(index: Index, content: dict[str, Any], removed: np.ndarray) -> None:
    """Write the rows that are removed now, then the manifest; what no manifest names is deleted first."""
    folder, before = index.folder, index.manifest
    for path in folder.glob("removed-*.npy"):
        if path.name not in manifest.removed_files(before).values():  # of an older change, or of one that was killed
            path.unlink()
    if len(removed):
        new = {"images": removed, "captions": index.records.caption_rows(removed)}
        rows = {kind: np.union1d(index.removed[kind], new[kind]) for kind in KINDS}
        content["removed"], paths = write_removed(folder, rows, before["removed"].get("number", 0) + 1)
        for name in manifest.removed_files(before).values():
            del content["files"][name]
        content["files"] |= manifest.sums(folder, paths)
    content["changed"] = assembly.today()
    manifest.write_manifest(folder, content)


def _check_same(index: Index, embeddings: Embeddings) -> None:
    """The embeddings are those of the index's model, kinds and columns."""
    before, folder = index.manifest, index.folder
    if embeddings.model["fingerprint"] != before["model"]["fingerprint"]:
        names = [str(each.get("name") or "an unnamed model")[:200] for each in (embeddings.model, before["model"])]
        raise CoderError(
            f"{embeddings.folder} was embedded with another model ({names[0]}) than {folder} ({names[1]}), so their vectors "
            "cannot be compared: embed the data with the index's model"
        )
    for kind, sizes in before["vectors"].items():
        if embeddings.header.what not in ("both", kind):
            raise CoderError(f"{folder} has vectors of {kind}, and {embeddings.folder} has none: embed them with --what both")
        views = embeddings.views if kind == "images" else 1
        if (sizes["dimensions"], sizes["views"]) != (embeddings.dimensions, views):
            raise CoderError(f"{embeddings.folder} has vectors of other sizes than {folder}")
    if dict(embeddings.columns) != dict(before["columns"]):
        both = (embeddings.columns, before["columns"])
        theirs, ours = (shlex.join(f"{name}:{kind}" for name, kind in each.items()) for each in both)
        todo = f"embed the data with --columns {ours}" if ours else "embed the data without --columns"
        raise CoderError(f"{embeddings.folder} has other metadata columns ({theirs or 'none'}) than {folder}: {todo}")
    if before["plan"]["re-ranking"] and not assembly.has_tokens(embeddings):
        named = before["model"].get("reranker")
        flag = f"--reranker {named!r}" if named else "--tokens"
        raise CoderError(f"{folder} re-ranks, and {embeddings.folder} has no tokens for it: embed the data with {flag}")


def _existing(index: Index, embeddings: Embeddings) -> np.ndarray:
    """Rows of the index's images whose keys the embeddings have, ascending."""
    rows: list[int] = []
    for unit in embeddings.present:
        for batch in embeddings.batches(unit, ["key"], rows=_KEYS):
            keys = batch.column("key").to_pylist()
            rows += [row for each in index.records.rows_of(keys).values() for row in each]
    return np.unique(np.array(rows, dtype=np.int64))


