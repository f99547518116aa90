"""Segments: the folders that an index consists of, each written once from some units of an embeddings folder.

A segment is written to a temporary folder and renamed, so a segment that exists is complete. A note in it says what it was made
from: a build that was stopped keeps the segments that it finds whole.

Shape letters: n images, t captions, D dimensions, V embeddings of an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coder_plugin import files
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_folder, sha256_json
from coder_plugin.index import manifest, records_file, vectors_file
from coder_plugin.index.arrays import largest_shape
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.unit_file import damaged, image_vectors, text_vectors

NOTE = "segment.json"
#: Images of a segment of a flat index, whose vectors are written as they are read.
FLAT_SIZE = 1_000_000
#: Vectors of one kind in a segment of another index, which is built in memory: at least so many bytes.
_BYTES = 128 << 20
#: And an index that is built at once has at most about so many segments.
_SEGMENTS = 64
#: Rows that are read at once.
_ROWS = 4096


class Piece(NamedTuple):
    """Consecutive units of an embeddings folder, with the numbers of their images and captions."""

    units: tuple[int, ...]
    images: int
    captions: int


def pieces(embeddings: Embeddings, kinds: Sequence[str], factory: str, size: int | None = None) -> list[Piece]:
    """Which units each segment is made from.

    Args:
        embeddings: the folder.
        kinds: of vectors that are kept.
        factory: FAISS index factory string.
        size: images of a segment, about: it ends with the unit before the one that would make it larger. None: 1,000,000 of a
            flat index; of others so many that a segment has 128 MiB of vectors, or 64 segments hold all.

    Raises:
        CoderError: a size below 1; no image in any unit.
    """
    if size is not None and size < 1:
        raise CoderError(f"the size of a segment must be at least 1 image, got {size}")
    counts = [(unit, *embeddings.summary(unit)[1:3]) for unit in embeddings.present]
    each = {"images": 4 * embeddings.dimensions * embeddings.views, "captions": 4 * embeddings.dimensions}
    most = max(_BYTES, *(each[kind] * sum(count[1 + (kind == "captions")] for count in counts) // _SEGMENTS for kind in kinds))

    def fits(images: int, captions: int) -> bool:
        if size is not None or factory == "Flat":
            return images <= (size or FLAT_SIZE)
        sizes = {"images": images * each["images"], "captions": captions * each["captions"]}
        return all(sizes[kind] <= most for kind in kinds)

    found: list[Piece] = []
    piece = Piece((), 0, 0)
    for unit, images, captions in counts:
        if piece.images and not fits(piece.images + images, piece.captions + captions):
            found.append(piece)
            piece = Piece((), 0, 0)
        if images:
            piece = Piece((*piece.units, unit), piece.images + images, piece.captions + captions)
    if piece.images:
        found.append(piece)
    if not found:
        raise CoderError(f"{embeddings.folder} holds no image: see the warnings of the command that embedded the data")
    return found


def write_segment(
    folder: Path,
    embeddings: Embeddings,
    piece: Piece,
    *,
    source: Mapping[str, Any],
    empty: Mapping[str, Callable[[], Any]],
    rerank: bool,
    columns: Mapping[str, str],
) -> dict[str, Any]:
    """Write a segment, or keep the one that is there if it is whole and was made from the same.

    Args:
        folder: the segment's.
        embeddings: the folder that it is made from.
        piece: its units.
        source: what the segment was made from, as JSON values.
        empty: for each kind of vectors, makes the trained, empty index that they are added to, or None for a flat one.
        rerank: keep what re-ranking needs.
        columns: the metadata columns that are kept, and their types.

    Returns:
        The segment's note: its counts, and the sizes and checksums of its files.

    Raises:
        CoderError: embeddings that are damaged or not as their notes say; vectors that FAISS cannot add.
    """
    source = json.loads(json.dumps({**source, "units": piece.units}))
    if (note := read_note(folder)) is not None and note["source"] == source:
        return note
    with atomic_folder(folder) as temporary:
        connection = records_file.create(temporary / manifest.RECORDS, columns)
        for rows in _records(embeddings, piece, columns):
            records_file.add(connection, *rows, columns=len(columns))
        records_file.finish(connection)
        counts = {"images": piece.images, "captions": piece.captions}
        for kind, make in empty.items():
            if counts[kind]:
                batches = vectors_of(embeddings, piece.units, kind)
                vectors_file.write(temporary / f"{kind}.faiss", batches, make())
        if rerank:
            (temporary / manifest.RERANK).mkdir()
            _write_arrays(temporary / manifest.RERANK, embeddings, piece)
        made = sorted(path for path in temporary.rglob("*") if path.is_file())
        content = {"source": source, **counts, "files": manifest.sums(temporary, made)}
        (temporary / NOTE).write_text(json.dumps({**content, "sha256": sha256_json(content)}))
    return content


def read_note(folder: Path) -> dict[str, Any] | None:
    """The note of a segment whose files all have the checksums that it says; None where the segment is not whole."""
    try:
        note = files.read_json(folder / NOTE)
        digest = note.pop("sha256")
        whole = digest == sha256_json(note) and note["files"] == manifest.sums(folder, map(folder.joinpath, note["files"]))
    except (CoderError, OSError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return note if whole else None


def vectors_of(embeddings: Embeddings, units: Sequence[int], kind: str) -> Iterator[np.ndarray]:
    """The vectors [m, D] float32 of units, a few thousand at a time; those of an image's views one after the other."""
    header = embeddings.header
    for unit in units:
        if kind == "images":
            for batch in embeddings.batches(unit, ["image_vector"], rows=_ROWS):
                yield image_vectors(batch, header).reshape(-1, header.dimensions)
        else:
            for batch in embeddings.batches(unit, ["captions", "text_vectors"], rows=_ROWS):
                yield text_vectors(batch, header)


def sample(embeddings: Embeddings, kind: str, rows: np.ndarray) -> np.ndarray:
    """Some vectors of all units [n, D] float32.

    Args:
        embeddings: the folder.
        kind: "images" or "captions".
        rows: which, ascending, counted over all units; an image with several views counts as several.
    """
    out = np.empty((len(rows), embeddings.dimensions), dtype=np.float32)
    start = 0
    for batch in vectors_of(embeddings, embeddings.present, kind):
        first, end = np.searchsorted(rows, (start, start + len(batch)))
        out[first:end] = batch[rows[first:end] - start]
        start += len(batch)
    return out


def _records(embeddings: Embeddings, piece: Piece, columns: Mapping[str, str]) -> Iterator[tuple[list, list, list]]:
    """Rows of the tables of images, thumbnails and captions, a few thousand images at a time."""
    image = caption = 0
    names = ["key", "image_id", "captions", "path", "member", "thumbnail", *columns]
    for unit in piece.units:
        for batch in embeddings.batches(unit, names, rows=_ROWS):
            values = {name: column.to_pylist() for name, column in zip(names, batch.columns, strict=True)}
            rows = range(image, image + len(batch))
            texts = [(row, text) for row, texts in zip(rows, values["captions"], strict=True) for text in texts]
            yield (
                list(zip(rows, *(values[name] for name in names if name not in ("captions", "thumbnail")), strict=True)),
                [(row, file) for row, file in zip(rows, values["thumbnail"], strict=True) if file],
                [(number, row, text) for number, (row, text) in enumerate(texts, caption)],
            )
            image, caption = image + len(batch), caption + len(texts)
    if (image, caption) != (piece.images, piece.captions):
        expected = f"{piece.images} images and {piece.captions} captions"
        raise CoderError(f"{embeddings.folder} has {image} images and {caption} captions in these files, not {expected}")


def _write_arrays(folder: Path, embeddings: Embeddings, piece: Piece) -> None:
    """What re-ranking needs, one array a file; units with shorter items are padded with zeros."""
    kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for unit in piece.units:
        for name, value in embeddings.tokens(unit).items():
            dtype, shape = kinds.get(name, (value.dtype, value.shape[1:]))
            if len(shape) != value.ndim - 1:
                path = embeddings.folder / embeddings.header.tokens_file(unit)
                raise damaged(path, f"{name} has {value.ndim} axes, and {len(shape) + 1} in other files")
            kinds[name] = np.promote_types(dtype, value.dtype), largest_shape([shape, value.shape[1:]])
    counts = {"image": piece.images, "text": piece.captions}
    arrays = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (counts[name.partition("_")[0]], *shape))
        for name, (dtype, shape) in kinds.items()
        if counts[name.partition("_")[0]]
    }
    first = dict.fromkeys(counts, 0)
    for unit in piece.units:
        _, images, captions = embeddings.summary(unit)[:3]
        tokens = embeddings.tokens(unit)
        for name, array in arrays.items():
            kind = name.partition("_")[0]
            count = images if kind == "image" else captions
            if count:
                if name not in tokens:
                    raise damaged(embeddings.folder / embeddings.header.tokens_file(unit), f"it has no {name}, as others have")
                target: Any = (slice(first[kind], first[kind] + count), *map(slice, tokens[name].shape[1:]))
                array[target] = tokens[name]
        first = {"image": first["image"] + images, "text": first["text"] + captions}
    for array in arrays.values():
        array.flush()
