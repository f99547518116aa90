"""Reader of the folder of embeddings that ``coder-plugin embed`` writes: a note, ``embed.json``, and a Parquet file a unit.

A unit is one shard of the data, or a slice of any other data. Its file has one row an image: key, captions, where the picture
is, and the vectors. Any Parquet reader opens it. A file is written to a temporary name and renamed, so one that has its name is
complete. Somebody else may have written the files: what :class:`Embeddings` returns has been checked.

Shape letters: n images, t captions, D dimensions, V vectors of an image.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular
from coder_plugin.index.embeddings_header import NAME, Header
from coder_plugin.index.unit_file import UnitSummary, check_values, damaged, open_rows, open_unit

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from coder_plugin.index.parquet_footer import Footer

_TOKEN_DTYPES = ("F16", "F32", "F64", "I64", "I32", "BOOL")


class Embeddings:
    """Reads a folder of embeddings.

    Args:
        folder: what ``coder-plugin embed`` wrote.
        allow_missing: open a folder that is not finished; :attr:`present` says which units it has.

    Raises:
        CoderError: no embeddings there, files that are missing or damaged, or that hold something else. All methods raise it
            for a file that is not as the header says; the message names the file.

    Example:
        >>> Embeddings("nowhere")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: nowhere holds no embeddings: it has no embed.json (coder-plugin embed writes one)
    """

    def __init__(self, folder: str | Path, *, allow_missing: bool = False) -> None:
        self.folder = Path(folder)
        self.header = Header.read(self.folder)
        names = {each.name for each in os.scandir(self.folder)}
        files_named = (name for name in names if re.fullmatch(r"\d{8,10}\.parquet", name))
        numbers = sorted(int(name.removesuffix(".parquet")) for name in files_named)
        #: Numbers of the units whose files exist, in their order.
        self.present = [unit for unit in numbers if unit < self.header.units and self.header.file(unit) in names]
        if len(self.present) < self.header.units and not allow_missing:
            missing = next(unit for unit, have in enumerate([*self.present, -1]) if unit != have)
            count = self.header.units - len(self.present)
            raise CoderError(
                f"{self.folder} is not finished: {count:,} of {self.header.units:,} files are missing, the first: "
                f"{self.header.file(missing)}: run its coder-plugin embed command again"
            )
        self._summaries: dict[int, UnitSummary] = {}

    @property
    def model(self) -> Mapping[str, Any]:
        """Fields about the model, from which it is opened again."""
        return self.header.model

    @property
    def units(self) -> int:
        """Number of files of the finished folder."""
        return self.header.units

    @property
    def dimensions(self) -> int:
        """D."""
        return self.header.dimensions

    @property
    def views(self) -> int:
        """V, vectors of an image."""
        return self.header.views

    @property
    def dtype(self) -> str:
        """Of the vectors: "float32" or "float16"."""
        return self.header.dtype

    @property
    def columns(self) -> Mapping[str, str]:
        """Further columns, and the type of each: "string", "int64", "float64" or "bool"."""
        return self.header.columns

    @property
    def rows(self) -> int:
        """Images of all units that exist; reads the end of each file once."""
        return sum(self.summary(unit).rows for unit in self.present)

    def path(self, unit: int) -> Path:
        """A unit's file."""
        return self.folder / self.header.file(unit)

    def summary(self, unit: int) -> UnitSummary:
        """A unit's sizes and bad samples, from the end of its file, after the layout of the file has been checked."""
        if unit not in self._summaries:
            with self._open(unit):
                pass
        return self._summaries[unit]

    def read(self, unit: int, columns: Sequence[str] | None = None) -> pa.Table:
        """A unit's rows as a table. Prefer :meth:`batches` where a unit may be large."""
        import pyarrow as pa

        chosen = self._chosen(columns)
        schema = self.header.schema()
        return pa.Table.from_batches(self.batches(unit, columns), pa.schema([schema.field(name) for name in chosen]))

    def batches(self, unit: int, columns: Sequence[str] | None = None, *, rows: int = 1024) -> Iterator[pa.RecordBatch]:
        """A unit's rows, a few at a time.

        Args:
            unit: its number.
            columns: which; None: all.
            rows: at most so many in a batch.
        """
        chosen = self._chosen(columns)
        with self._open(unit) as (opened, footer), open_rows(opened, footer) as file:
            left = file.metadata.num_rows
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(rows, row_groups=[group], columns=chosen, use_threads=False):
                    batch = batch.select(chosen)
                    check_values(batch, self.header)
                    left -= len(batch)
                    yield batch
            if left:  # a damaged footer may make Arrow find no rows in a group
                raise ValueError(f"{left:,} of its rows are missing")

    def tokens(self, unit: int) -> dict[str, np.ndarray]:
        """What re-ranking needs of a unit's images [n, ...] and captions [t, ...]; names begin with ``image_`` and ``text_``.
        Empty without tokens."""
        from safetensors import SafetensorError, safe_open

        summary = self.summary(unit)
        if summary.tokens is None:
            return {}
        path = self.folder / self.header.tokens_file(unit)
        try:
            with open_regular(path, "rb") as opened:
                size, digest = os.fstat(opened.fileno()).st_size, hashlib.sha256()
                while size == summary.tokens["bytes"] and (block := opened.read(1 << 20)):
                    digest.update(block)
            if digest.hexdigest() != summary.tokens["sha256"]:
                raise damaged(path, "its size or checksum is another")
            with safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    expected = {"image": summary.rows, "text": summary.captions}.get(name.partition("_")[0])
                    if part.get_dtype() not in _TOKEN_DTYPES or not NAME.fullmatch(name) or part.get_shape()[:1] != [expected]:
                        raise damaged(path, f"{name[:60]!r} is {part.get_dtype()} of {part.get_shape()}")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise damaged(path, error) from error

    def _chosen(self, columns: Sequence[str] | None) -> list[str]:
        names = self.header.schema().names
        if unknown := [name for name in columns or () if name not in names]:
            raise CoderError(f"{self.folder} has no column {unknown[0]!r}; it has {', '.join(names)}")
        return names if columns is None else list(columns)

    @contextmanager
    def _open(self, unit: int) -> Iterator[tuple[IO[bytes], Footer]]:
        """A unit's file, after its footer has been checked. Errors of Arrow within the context become ours."""
        import pyarrow as pa

        path = self.path(unit)
        try:
            with open_unit(path, self.header, unit) as (opened, footer, self._summaries[unit]):
                yield opened, footer
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise damaged(path, error) from error
