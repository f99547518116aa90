"""Parquet: the vectors of an index as a folder of embeddings, which ``coder-plugin embed`` writes too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_folder
from coder_plugin.index.embeddings_header import NOTE, Header
from coder_plugin.index.unit_file import Rows, write_unit
from coder_plugin.integrations.vector_stores.sources import EmbeddingsSource, Source

#: In place of a store's name.
PARQUET = "parquet"
_BATCHES = 16  # of a file


def write_embeddings(
    source: Source, folder: str | Path, what: str, kinds: Sequence[str], rows: Iterator[Rows], *, overwrite: bool
) -> None:
    """Write a folder of embeddings as a whole.

    Args:
        source: the index that ``rows`` were read from.
        folder: a new one, or an empty one.
        what: "images", "captions" or "both".
        kinds: of vectors that ``what`` names.
        rows: of all images, with the vectors of ``what``.
        overwrite: replace a folder of embeddings.

    Raises:
        CoderError: there is something in the folder; the source is a folder of embeddings already.
    """
    if isinstance(source, EmbeddingsSource):
        raise CoderError(f"{source.embeddings.folder} is a folder of Parquet files already: copy it")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / NOTE).is_file():
            raise CoderError(f"{folder} holds something else than embeddings: name another --output")
        if others := sorted(each.name for each in folder.iterdir() if not _is_ours(each)):
            raise CoderError(f"{folder} holds also {', '.join(others[:3])}, so it is not replaced: name another --output")
        if not overwrite:
            raise CoderError(f"{folder} exists: name another --output, or replace it with --overwrite")
    sizes = [source.size(kind) for kind in kinds]
    header = Header(
        model=dict(source.model),
        plan={"from": "coder-plugin export", "what": what},
        units=1,
        dimensions=sizes[0][2],
        views=sizes[0][1],
        what=what,
        columns=dict(source.metadata),
    )
    with atomic_folder(folder) as temporary:
        unit = 0
        for first in rows:
            write_unit(temporary / header.file(unit), header, unit, chain([first], islice(rows, _BATCHES - 1)))
            unit += 1
        if unit == 0:
            write_unit(temporary / header.file(0), header, 0, [])
        replace(header, units=max(1, unit)).write(temporary)


def _is_ours(path: Path) -> bool:
    """A file of a folder of embeddings, which may be removed with it."""
    return path.name == NOTE or (path.suffix in (".parquet", ".safetensors", ".lock") and not path.is_dir())
