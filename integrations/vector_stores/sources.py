"""What is exported: an index, or a folder of embeddings, image by image; and its tables of images and of captions.

Shape letters: n images of a batch, t captions of them, D dimensions, V vectors of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.index.embeddings import Embeddings
from coder_plugin.index.embeddings_header import NOTE
from coder_plugin.index.search import Index
from coder_plugin.index.unit_file import Rows, image_vectors, text_vectors
from coder_plugin.index.vectors_file import is_lossless
from coder_plugin.integrations.vector_stores.base import Table, record_batch, vector_array, vector_schema

KINDS = ("images", "captions")
#: Bytes of vectors, and rows, of a batch.
_BYTES, _ROWS = 1 << 22, 1024
#: Names of columns of a table; a metadata column of such a name gets an underscore.
_TAKEN = {"id", "caption", "vector", "view"}
_TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}


class Source(Protocol):
    """An index, or a folder of embeddings."""

    model: Mapping[str, Any]  # fields about it, with its fingerprint
    metadata: Mapping[str, str]  # types of the columns of metadata
    note: str | None  # why the vectors are not those that the model gave

    def size(self, kind: str) -> tuple[int | None, int, int]:
        """How many items of a kind there are (None: unknown), V and D.

        Raises:
            CoderError: there are no vectors of this kind.
        """

    def rows(self, kinds: Sequence[str], size: int, *, thumbnails: bool = False) -> Iterator[Rows]:
        """All images with the vectors of these kinds, at most so many at once."""


def open_source(folder: str | Path, *, verify: bool = False) -> Source:
    """Open an index or a folder of embeddings.

    Args:
        folder: written by ``coder-plugin index`` or ``embed``.
        verify: compare the checksums of an index's files.

    Raises:
        CoderError: it is neither; it is damaged or not finished.
    """
    folder = Path(folder)
    return EmbeddingsSource(folder) if (folder / NOTE).exists() else IndexSource(folder, verify=verify)


def batch_size(views: int, dimensions: int) -> int:
    """Rows of a batch of a few megabytes."""
    return max(1, min(_ROWS, _BYTES // (4 * views * dimensions)))


def table_of(source: Source, kind: str, name: str) -> Table:
    """A source's table of images or of captions.

    Raises:
        CoderError: the source has no such vectors; two columns of metadata would have one name.
    """
    count, views, dimensions = source.size(kind)
    size = batch_size(views, dimensions)
    texts = ("captions", pa.list_(pa.string())) if kind == "images" else ("caption", pa.string())
    names = {each: f"{each}_" if each in _TAKEN else each for each in source.metadata}
    if twice := [each for each, name in names.items() if name != each and name in names]:
        raise CoderError(f"the columns {twice[0]} and {twice[0]}_ would both be {twice[0]}_ in the table: rename one of them")
    metadata = {name: _TYPES[source.metadata[each]] for each, name in names.items()}
    columns = {"id": pa.int64(), "key": pa.string(), "image_id": pa.int64(), texts[0]: texts[1]}
    columns |= {"path": pa.string(), "member": pa.string(), **metadata}
    schema = vector_schema(pa.schema(columns), dimensions, views)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows in source.rows([kind], size):
            rows = rows._replace(columns={names[each]: values for each, values in rows.columns.items()})
            for values in [_images(rows, dimensions)] if kind == "images" else _captions(rows, size):
                yield record_batch(values, schema)

    return Table(name, kind, count, views, schema, batches())


def _images(rows: Rows, dimensions: int) -> dict[str, Any]:
    ids = [stable_hash(key) for key in rows.keys]
    values = {"id": ids, "key": rows.keys, "image_id": ids, "captions": rows.captions, "path": rows.paths}
    assert rows.images is not None
    vectors = vector_array(rows.images.reshape(len(ids), -1, dimensions))
    return {**values, "member": rows.members, **rows.columns, "vector": vectors}


def _captions(rows: Rows, size: int) -> Iterator[dict[str, Any]]:
    """The captions of images, one a row."""
    assert rows.texts is not None
    owners = [(row, number) for row, texts in enumerate(rows.captions) for number in range(len(texts))]
    for start in range(0, len(owners), size):
        some = owners[start : start + size]
        values = {
            "id": [stable_hash(rows.keys[row], number) for row, number in some],
            "image_id": [stable_hash(rows.keys[row]) for row, _ in some],
            "caption": [rows.captions[row][number] for row, number in some],
            "vector": vector_array(rows.texts[start : start + size, None]),
        }
        repeated = {"key": rows.keys, "path": rows.paths, "member": rows.members, **rows.columns}
        yield {**values, **{name: [column[row] for row, _ in some] for name, column in repeated.items()}}


class EmbeddingsSource:
    """A folder of embeddings."""

    def __init__(self, folder: Path) -> None:
        self.embeddings = Embeddings(folder)
        self.model, self.metadata = self.embeddings.model, self.embeddings.columns
        self.note: str | None = None

    def size(self, kind: str) -> tuple[int | None, int, int]:
        header = self.embeddings.header
        if header.what not in (kind, "both"):
            raise CoderError(f"{self.embeddings.folder} has no vectors of {kind}, only of {header.what}")
        units = map(self.embeddings.summary, self.embeddings.present)
        return sum(each.rows if kind == "images" else each.captions for each in units), self._views(kind), header.dimensions

    def _views(self, kind: str) -> int:
        return self.embeddings.views if kind == "images" else 1

    def rows(self, kinds: Sequence[str], size: int, *, thumbnails: bool = False) -> Iterator[Rows]:
        header = self.embeddings.header
        vectors = {"images": ("image_vector", image_vectors), "captions": ("text_vectors", text_vectors)}
        names = ["key", "captions", "path", "member", *(vectors[kind][0] for kind in kinds), *self.metadata]
        for unit in self.embeddings.present:
            for batch in self.embeddings.batches(unit, names, rows=size):
                found = {kind: vectors[kind][1](batch, header) if kind in kinds else None for kind in KINDS}
                key, captions, path, member = (batch[name].to_pylist() for name in names[:4])
                columns = {name: batch[name].to_pylist() for name in self.metadata}
                yield Rows(key, captions, found["images"], found["captions"], path, member, columns=columns)


class IndexSource:
    """An index whose vectors can be read back."""

    def __init__(self, folder: Path, *, verify: bool) -> None:
        self.index = Index(folder, verify=verify, gpu=False)
        self.model: Mapping[str, Any] = self.index.manifest["model"]
        self.metadata: Mapping[str, str] = self.index.manifest["columns"]
        factory = self.index.manifest["factory"]
        self.note: str | None = None
        if not is_lossless(factory):
            self.note = f"an index {factory} stores compressed vectors: scores are approximate"

    def size(self, kind: str) -> tuple[int | None, int, int]:
        vectors = self.index.vectors.get(kind)
        if vectors is None:
            raise CoderError(f"{self.index.folder} has no vectors of {kind}, only of {' and '.join(self.index.vectors)}")
        return vectors.items - len(self.index.removed[kind]), vectors.views, vectors.dimensions

    def rows(self, kinds: Sequence[str], size: int, *, thumbnails: bool = False) -> Iterator[Rows]:
        images = np.setdiff1d(np.arange(self.index.manifest["images"]), self.index.removed["images"])
        for start in range(0, len(images), size):
            yield self._rows(kinds, images[start : start + size], thumbnails)

    def _rows(self, kinds: Sequence[str], rows: np.ndarray, thumbnails: bool) -> Rows:
        index, records = self.index, self.index.records
        images = records.images(rows.tolist())
        caption_rows = records.caption_rows(rows)
        captions = records.captions(caption_rows.tolist())
        owners = np.array([each.image for each in captions], dtype=np.int64)
        order = np.argsort(owners, kind="stable")  # by image, as the texts are given
        texts: dict[int, list[str]] = {row: [] for row in rows.tolist()}
        for place in order.tolist():
            texts[captions[place].image].append(captions[place].text)
        metadata = [records.metadata(row) for row in rows.tolist()] if self.metadata else []
        return Rows(
            [each.key for each in images],
            list(texts.values()),
            self._image_vectors(rows) if "images" in kinds else None,
            index.vectors["captions"].gather(caption_rows[order])[:, 0] if "captions" in kinds else None,
            [each.path for each in images],
            [each.member for each in images],
            [records.thumbnail(row) or b"" for row in rows.tolist()] if thumbnails else (),
            columns={name: [each[name] for each in metadata] for name in self.metadata},
        )

    def _image_vectors(self, rows: np.ndarray) -> np.ndarray:
        """[n, D], or [n, V, D]."""
        vectors = self.index.vectors["images"].gather(rows)
        return vectors[:, 0] if vectors.shape[1] == 1 else vectors
