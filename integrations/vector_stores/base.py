"""What a vector store is given, and what it must do: a table that is written as a whole or not at all.

Shape letters: n rows of a batch, D dimensions, V vectors of an image.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError


@dataclass(frozen=True)
class Table:
    """A table, or collection, to write: a row is an image, or a caption.

    Args:
        name: letters, digits and underscores.
        kind: "images" or "captions".
        count: rows; None: not known before they are read.
        views: V, 1 but for images of which the model gives several vectors.
        schema: of the batches: ``id`` (of an image, the hash of its key; of a caption, of that and its number; below 2**63),
            ``key``, ``image_id``, ``captions`` or ``caption``, ``path``, ``member``, columns of metadata (string, int64,
            float64 or bool), and ``vector`` (float32).
        batches: of a few megabytes each, in the order of the data. They can be read once.
    """

    name: str
    kind: str
    count: int | None
    views: int
    schema: pa.Schema
    batches: Iterable[pa.RecordBatch]

    @property
    def dimensions(self) -> int:
        """D."""
        kind = self.schema.field("vector").type
        return (kind.value_type if self.views > 1 else kind).list_size

    def by_view(self) -> Table:
        """The table with a row for each vector, for stores whose rows have one. Where an image has several, each row has an id
        of its own, and a column ``view`` counts the image's vectors from 0."""
        if self.views == 1:
            return self
        schema = vector_schema(self.schema, self.dimensions).insert(len(self.schema) - 1, pa.field("view", pa.int64()))

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in self.batches:
                views = np.tile(np.arange(self.views), len(batch))
                repeated = batch.take(pa.array(np.repeat(np.arange(len(batch)), self.views)))
                ids = [stable_hash(*pair) for pair in zip(repeated["id"].to_pylist(), views.tolist(), strict=True)]
                values: dict[str, Any] = {name: repeated[name] for name in repeated.schema.names}
                values |= {"id": ids, "view": views}
                values["vector"] = vector_array(vectors_of(batch).reshape(len(views), 1, -1))
                yield record_batch(values, schema)

        count = None if self.count is None else self.count * self.views
        return replace(self, count=count, views=1, schema=schema, batches=rows())


class VectorStore(ABC):
    """A place for tables of vectors that are compared by their inner product.

    A store of another package is a subclass, under an entry point of the group ``coder_plugin.vector_stores``. What its methods
    raise is reported as an error of one line.

    Args:
        where: a folder, a file, an address, or what else opens it.
    """

    @abstractmethod
    def __init__(self, where: str) -> None: ...

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a table of this name. What a :meth:`write` has left that was stopped is none."""

    @abstractmethod
    def write(self, table: Table) -> int:
        """Write a table, in place of one that exists, and return the rows that it has then.

        Wherever it is stopped, there is the old table, or none; and it can be called again.
        """

    def close(self) -> None:
        """Close the connection."""
        return


def require(module: str, *, extra: str) -> Any:
    """Import a store's library.

    Raises:
        CoderError: it is not installed; names the command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CoderError(f"{module} cannot be imported ({error}): pip install 'coder-plugin[{extra}]'") from error


def check_no_file(where: str) -> None:
    """Check the place of a store that is a folder.

    Raises:
        CoderError: it is a file.
    """
    if Path(where).is_file():
        raise CoderError(f"--output {where} is a file: name a folder")


def vectors_of(batch: pa.RecordBatch) -> np.ndarray:
    """The vectors [n, V, D] float32 of a batch."""
    column = batch.column("vector")
    shape = []
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False).reshape(len(batch), *([1] * (2 - len(shape))), *shape)


def vector_array(vectors: np.ndarray) -> pa.Array:
    """Vectors [n, V, D] as an Arrow array of float32; without the list of V, if that is 1."""
    array = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    array = pa.FixedSizeListArray.from_arrays(array, vectors.shape[2])
    return array if vectors.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(array, vectors.shape[1])


def vector_schema(schema: pa.Schema, dimensions: int, views: int = 1) -> pa.Schema:
    """The schema with ``vector`` as its last column, in place of one that it may have."""
    fields = [each for each in schema if each.name != "vector"]
    kind = pa.list_(pa.float32(), dimensions)
    return pa.schema([*fields, pa.field("vector", kind if views == 1 else pa.list_(kind, views))])


def record_batch(columns: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """A batch from Arrow arrays, NumPy arrays or lists by name."""
    values = ((columns[each.name], each.type) for each in schema)
    arrays = [value.cast(kind) if isinstance(value, pa.Array) else pa.array(value, kind) for value, kind in values]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
