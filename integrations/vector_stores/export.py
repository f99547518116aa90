"""Hand the vectors of an index, or of a folder of embeddings, to a vector store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from coder_plugin.errors import CoderError
from coder_plugin.index.unit_file import Rows
from coder_plugin.integrations.vector_stores.base import Table, VectorStore
from coder_plugin.integrations.vector_stores.parquet import PARQUET, write_embeddings
from coder_plugin.integrations.vector_stores.sources import KINDS, Source, batch_size, open_source, table_of
from coder_plugin.progress import Progress
from coder_plugin.registry import load

#: What every store takes, and PostgreSQL does not cut.
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
WHAT = ("images", "captions", "both")
_T = TypeVar("_T", pa.RecordBatch, Rows)


class Written(NamedTuple):
    """A table that was written: images or captions that were read, and the rows that the store counts.

    There are V rows for an image with V vectors, in stores that have one vector a row.
    """

    name: str
    kind: str
    items: int
    rows: int


class Exported(NamedTuple):
    """The tables that were written; and why their vectors are not those that the model gave, None if they are."""

    tables: list[Written]
    note: str | None


class _Counted(Iterator[_T]):
    """Batches, counted; keeps the error that reading them raised, which a store's library may raise as one of its own."""

    def __init__(self, batches: Iterable[_T], progress: Progress) -> None:
        self._batches: Iterator[_T] = iter(batches)
        self._progress = progress
        self.items = 0
        self.error: CoderError | None = None

    def __next__(self) -> _T:
        try:
            batch = next(self._batches)
        except CoderError as error:
            self.error = error
            raise
        count = batch.num_rows if isinstance(batch, pa.RecordBatch) else len(batch.keys)
        self.items += count
        self._progress.update(count)
        return batch


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Errors of a store's library, of which each has its own, as ours."""
    try:
        yield
    except (CoderError, MemoryError):
        raise
    except Exception as error:
        raise CoderError(f"{what}: {type(error).__name__}: {error}") from error


def _place(where: str) -> str:
    """An address for a message, without the user, password and parameters that it may have; empty for what is none."""
    address = urlsplit(where)
    return f" at {address.scheme}://{address.netloc.rpartition('@')[2]}" if address.netloc else ""


def check_table(name: str) -> None:
    """Check the name of a table.

    Raises:
        CoderError: some store would refuse it.
    """
    if not _TABLE.fullmatch(name):
        raise CoderError(f"--table {name!r}: use up to 50 letters, digits and underscores, and begin with no digit")


def export(
    folder: str | Path,
    to: str,
    where: str,
    *,
    what: str = "images",
    name: str | None = None,
    overwrite: bool = False,
    verify: bool = False,
) -> Exported:
    """Write the vectors of an index, with keys, ids, captions, paths and metadata, to a vector store.

    A table appears as a whole. An export that was stopped is repeated by the same call.

    Args:
        folder: an index, or a folder of embeddings.
        to: a name of the plugin group ``vector_stores``, or "parquet": a folder of embeddings, from an index.
        where: the store's address, folder or file.
        what: "images", "captions" or "both", which writes two tables, or one folder of embeddings.
        name: of the table; None: "images" or "captions". With "both", the captions' table is this with "_captions".
        overwrite: replace a table that exists.
        verify: compare the checksums of the index's files first.

    Returns:
        What was written.

    Raises:
        CoderError: an unknown store, or one that cannot be opened; a table that exists; vectors that the index does not have.
    """
    if what not in WHAT:
        raise CoderError(f"what must be one of {', '.join(WHAT)}, got {what!r}")
    kinds = KINDS if what == "both" else (what,)
    names = {kind: name or kind for kind in kinds}
    if name is not None and what == "both":
        names["captions"] = f"{name}_captions"
    for each in names.values():
        check_table(each)
    source = open_source(folder, verify=verify)
    if to == PARQUET:
        return Exported([_write_parquet(source, where, what, kinds, overwrite)], source.note)
    tables = [table_of(source, kind, each) for kind, each in names.items()]
    opener, place = load("vector_stores", to), _place(where)
    with _one_line(f"{to}{place} cannot be opened"):
        store: VectorStore = opener(where)
    try:
        for table in tables if not overwrite else ():
            with _one_line(f"{to}{place} cannot be asked for the table {table.name}"):
                if store.exists(table.name):
                    raise CoderError(f"the table {table.name} exists: name another --table, or replace it with --overwrite")
        return Exported([_write(store, table) for table in tables], source.note)
    finally:
        store.close()


def _write(store: VectorStore, table: Table) -> Written:
    with Progress(table.count, what=table.kind) as progress:
        batches = _Counted(table.batches, progress)
        try:
            with _one_line(f"the table {table.name} cannot be written"):
                rows = store.write(replace(table, batches=batches))
        except CoderError as error:
            raise batches.error or error from error
    return Written(table.name, table.kind, batches.items, rows)


def _write_parquet(source: Source, where: str, what: str, kinds: Sequence[str], overwrite: bool) -> Written:
    size = min(batch_size(*source.size(kind)[1:]) for kind in kinds)
    with Progress(source.size(kinds[0])[0] if "images" in kinds else None, what="images") as progress:
        rows = _Counted(source.rows(kinds, size, thumbnails=True), progress)
        with _one_line(f"{where} cannot be written"):
            write_embeddings(source, where, what, kinds, rows, overwrite=overwrite)
    return Written(where, "images", rows.items, rows.items)
