"""A Parquet file of embeddings: how it is written, and the checks of one that somebody else may have written.

Shape letters: n images, t captions, D dimensions, V vectors of an image.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coder_plugin.data.bad_samples import shorten
from coder_plugin.data.item import stable_hash
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_path, open_regular, sha256_file
from coder_plugin.index.embeddings_header import FORMAT, NOTE, VERSION, Header
from coder_plugin.index.parquet_footer import Footer, read_footer
from coder_plugin.index.parquet_pages import check_pages
from coder_plugin.index.records import storable

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_SHA256 = re.compile(r"[0-9a-f]{64}")
_METADATA = b"coder_plugin"  # the key of our JSON among a file's metadata
_GROUP_ROWS, _GROUP_BYTES = 1024, 1 << 25  # a row group is written when it has so many rows or bytes
_JPEG = b"\xff\xd8\xff"


class Rows(NamedTuple):
    """Images of a unit with their captions, in the data's order, for :func:`write_unit`."""

    keys: Sequence[str]  # n
    captions: Sequence[Sequence[str]]  # n
    images: np.ndarray | None  # [n, D] or [n, V, D]; None with what="captions"
    texts: np.ndarray | None  # [t, D], the captions of all images one after the other; None with what="images"
    paths: Sequence[str | None]  # n
    members: Sequence[str | None]  # n
    thumbnails: Sequence[bytes] = ()  # n JPEG files, empty where there is none; or none at all
    columns: Mapping[str, Sequence[Any]] = {}  # n values each, of the column's type, or None
    image_tokens: Mapping[str, np.ndarray] = {}  # [n, ...] each, for re-ranking
    text_tokens: Mapping[str, np.ndarray] = {}  # [t, ...] each


class UnitSummary(NamedTuple):
    """A unit's file without its rows."""

    unit: int
    rows: int  # n
    captions: int  # t
    bad: list[tuple[str, str]]  # kind of fault and key of each sample that was left out
    tokens: dict[str, Any] | None  # ``bytes`` and ``sha256`` of the file of tokens; None without one
    content: str  # SHA-256 of the rows


def write_unit(
    path: str | Path, header: Header, unit: int, rows: Iterable[Rows], *, bad: Sequence[tuple[str, str]] = ()
) -> UnitSummary:
    """Write a unit's file, batch by batch, and rename it when it is complete.

    Args:
        path: of the file, such as ``FOLDER/00000000.parquet``; its tokens, if ``rows`` have any, are written next to it first.
        header: of the folder.
        unit: number of the unit.
        rows: batches of its images.
        bad: kind of fault and key of samples that were left out; it is read after the last batch.

    Returns:
        What was written.

    Raises:
        CoderError: vectors that are not finite in the header's dtype, or of other shapes than the header says.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> header = Header(model={"fingerprint": "f" * 64}, plan={}, units=1, dimensions=2, what="images")
        >>> header.write(folder)
        >>> batch = Rows(["a.jpg"], [["a dog"]], np.ones((1, 2)), None, ["/pictures/a.jpg"], [None])
        >>> write_unit(folder / header.file(0), header, 0, [batch]).rows
        1
        >>> from coder_plugin.index.embeddings import Embeddings
        >>> Embeddings(folder).read(0).column("image_vector").to_pylist()
        [[1.0, 1.0]]
    """
    import pyarrow.parquet as pq

    path, schema, digest = Path(path), header.schema(), hashlib.sha256()
    images = texts = 0
    image_tokens: list[Mapping[str, np.ndarray]] = []
    text_tokens: list[Mapping[str, np.ndarray]] = []

    def counted(batches: Iterable[Rows]) -> Iterator[pa.Table]:
        nonlocal images, texts
        for batch in batches:
            images, texts = images + len(batch.keys), texts + sum(map(len, batch.captions))
            if batch.image_tokens or batch.text_tokens:
                image_tokens.append(batch.image_tokens)
                text_tokens.append(batch.text_tokens)
            yield _table(batch, header, schema)

    with atomic_path(path) as temporary:
        with pq.ParquetWriter(
            temporary,
            schema,
            compression="none",  # vectors and pictures do not get smaller; and a file cannot expand in a reader's memory
            use_dictionary=False,
            write_statistics=[name for name in schema.names if name in ("key", "image_id", *header.columns)],
            write_page_checksum=True,
        ) as writer:
            for table in _groups(counted(rows)):
                writer.write_table(table, row_group_size=_GROUP_ROWS)
                for batch in table.to_batches():
                    digest.update(batch.serialize())
            tokens = _write_tokens(path.with_name(header.tokens_file(unit)), image_tokens, text_tokens)
            own_bad = [(kind, shorten(storable(key))) for kind, key in bad]
            summary = UnitSummary(unit, images, texts, own_bad, tokens, digest.hexdigest())
            content = {**_expected(header, unit), **summary._asdict()}
            writer.add_key_value_metadata({_METADATA.decode(): json.dumps(content)})
    return summary


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables that are large enough for a row group."""
    import pyarrow as pa

    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        if sum(each.num_rows for each in pending) >= _GROUP_ROWS or sum(each.nbytes for each in pending) >= _GROUP_BYTES:
            yield pa.concat_tables(pending).combine_chunks()
            pending = []
    if pending:
        yield pa.concat_tables(pending).combine_chunks()


def _expected(header: Header, unit: int) -> dict[str, Any]:
    """The fields of a file's metadata that follow from the folder's header."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": header.model["fingerprint"],
        "plan": header.plan_sha256,
        "unit": unit,
        "dtype": header.dtype,
        "dimensions": header.dimensions,
        "views": header.views,
        "what": header.what,
    }


def _table(batch: Rows, header: Header, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    count, texts = len(batch.keys), sum(map(len, batch.captions))
    values: dict[str, Any] = {
        "key": [storable(key) for key in batch.keys],
        "image_id": [stable_hash(key) for key in batch.keys],
        "captions": [list(map(storable, each)) for each in batch.captions],
        "path": [_text_or_none(each) for each in batch.paths],
        "member": [_text_or_none(each) for each in batch.members],
        "thumbnail": [each or None for each in batch.thumbnails or [b""] * count],
        **{name: batch.columns[name] for name in header.columns},
    }
    vector = (header.dimensions,) if header.views == 1 else (header.views, header.dimensions)
    if header.what != "captions":
        values["image_vector"] = _fixed(_checked(batch.images, (count, *vector), header.dtype, "images"))
    if header.what != "images":
        offsets = np.cumsum([0, *map(len, batch.captions)], dtype=np.int32)
        inner = _fixed(_checked(batch.texts, (texts, header.dimensions), header.dtype, "captions"))
        values["text_vectors"] = pa.ListArray.from_arrays(pa.array(offsets), inner)
    arrays = [
        value if isinstance(value, pa.Array) else pa.array(value, each.type)
        for each, value in ((each, values[each.name]) for each in schema)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _text_or_none(text: str | None) -> str | None:
    """None also for a path that is not valid UTF-8: written in another way it would not open."""
    return text if text is not None and storable(text) == text else None


def _checked(value: np.ndarray | None, shape: tuple[int, ...], dtype: str, kind: str) -> np.ndarray:
    if value is None or value.shape != shape:
        raise CoderError(f"vectors of {kind} are {None if value is None else list(value.shape)}, expected {list(shape)}")
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(value, dtype=dtype)
    if not np.isfinite(cast).all():
        hint = " as float16: use --dtype float32" if np.isfinite(value).all() else ", so they cannot be searched"
        raise CoderError(f"the model's vectors of {kind} are not finite{hint}")
    return cast


def _fixed(values: np.ndarray) -> pa.Array:
    """An array [n, ...] as nested lists of fixed sizes."""
    import pyarrow as pa

    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _write_tokens(
    path: Path, images: Sequence[Mapping[str, np.ndarray]], texts: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, Any] | None:
    """The tokens of a unit's images and captions in one file, padded with zeros to the longest; None if there are none."""
    from safetensors.numpy import save_file

    tensors = {f"image_{name}": value for name, value in join_padded(images).items()}
    tensors |= {f"text_{name}": value for name, value in join_padded(texts).items()}
    if not tensors:
        path.unlink(missing_ok=True)
        return None
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
        return {"bytes": temporary.stat().st_size, "sha256": sha256_file(temporary)}


def join_padded(batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays of several batches as one by name, padded with zeros to the longest; batches without arrays are left out."""
    batches, joined = [batch for batch in batches if batch], {}
    for name in batches[0] if batches else ():
        values = [batch[name] for batch in batches]
        shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
        joined[name] = np.zeros((sum(map(len, values)), *shape), functools.reduce(np.promote_types, (v.dtype for v in values)))
        start = 0
        for value in values:
            target: Any = (slice(start, start + len(value)), *map(slice, value.shape[1:]))
            joined[name][target] = value
            start += len(value)
    return joined


def is_complete(path: str | Path, header: Header, unit: int) -> UnitSummary | None:
    """What a unit's file holds, if it and that of its tokens are complete and have the header's plan; reads its end only."""
    path = Path(path)
    if not path.exists():
        return None
    try:
        with open_unit(path, header, unit) as (_, _, summary):
            pass
        if summary.tokens and os.path.getsize(path.with_name(header.tokens_file(unit))) != summary.tokens["bytes"]:
            return None
        return summary
    except (OSError, ValueError):
        return None


@contextmanager
def open_unit(path: Path, header: Header, unit: int) -> Iterator[tuple[IO[bytes], Footer, UnitSummary]]:
    """A unit's file, with what its footer and our metadata in it say.

    Raises:
        OSError: no regular file.
        ValueError: they are not as :func:`write_unit` writes them.
    """
    with open_regular(path, "rb") as opened:
        footer = read_footer(opened, header.schema())
        try:
            content = json.loads(footer.metadata[_METADATA])
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError("its metadata are not those of coder-plugin embed") from error
        summary = _summary(content, header, unit)
        if summary.rows != footer.rows:
            raise ValueError(f"it has {footer.rows:,} rows, not {summary.rows:,}")
        yield opened, footer, summary


@contextmanager
def open_rows(opened: IO[bytes], footer: Footer) -> Iterator[pq.ParquetFile]:
    """The rows of a unit's file from :func:`open_unit`, after its pages have been checked; their checksums will be verified.

    Raises:
        ValueError: pages that are others than the footer says.
        pyarrow.ArrowException: a file that Arrow refuses.
    """
    import pyarrow.parquet as pq

    for chunk in footer.chunks:
        try:
            check_pages(opened, chunk.start, chunk.length, chunk.values)
        except ValueError as error:
            raise ValueError(f"{chunk.column}: {error}") from error
    opened.seek(0)
    with pq.ParquetFile(opened, page_checksum_verification=True, pre_buffer=False) as file:
        yield file


def _summary(content: Any, header: Header, unit: int) -> UnitSummary:
    """ValueError unless our metadata have the types and values that the header says."""
    expected = _expected(header, unit)
    if not isinstance(content, dict) or {*content} != {*expected, *UnitSummary._fields}:
        raise ValueError("its metadata are not those of coder-plugin embed")
    for name, value in expected.items():
        if content[name] != value or type(content[name]) is not type(value):
            raise ValueError(f"it has another {name} than {NOTE}")
    _, rows, captions, bad, tokens, digest = (content[name] for name in UnitSummary._fields)
    if any(type(each) is not int or each < 0 for each in (rows, captions)) or not isinstance(bad, list):
        raise ValueError("its metadata have other types")
    if not all(isinstance(each, list) and len(each) == 2 and all(isinstance(text, str) for text in each) for each in bad):
        raise ValueError("its bad samples are no pairs of texts")
    if tokens is not None and (
        not isinstance(tokens, dict)
        or {*tokens} != {"bytes", "sha256"}
        or type(tokens["bytes"]) is not int
        or not isinstance(tokens["sha256"], str)
        or not _SHA256.fullmatch(tokens["sha256"])
    ):
        raise ValueError("its tokens are named without their size and checksum")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError("its rows have no checksum")
    return UnitSummary(unit, rows, captions, [(kind, key) for kind, key in bad], tokens, digest)


def check_values(batch: pa.RecordBatch, header: Header) -> None:
    """ValueError unless each value is one that :func:`write_unit` writes."""
    batch.validate(full=True)  # lengths, offsets, and UTF-8
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, column in columns.items():
        nullable = name in ("path", "member", "thumbnail", *header.columns)
        inner = column.flatten() if name in ("captions", "text_vectors") else column
        if not nullable and (column.null_count or inner.null_count):
            raise ValueError(f"{name} has rows without a value")
    for name, shape in (("image_vector", (header.views, header.dimensions)), ("text_vectors", (header.dimensions,))):
        if name in columns:
            values = _numbers(columns[name])
            if values.null_count or len(values) % math.prod(shape):
                raise ValueError(f"{name} has vectors without numbers")
            if not np.isfinite(values.to_numpy(zero_copy_only=False)).all():
                raise ValueError(f"{name} has numbers that are not finite")
    if "captions" in columns and "text_vectors" in columns:
        lengths = (columns[name].value_lengths() for name in ("captions", "text_vectors"))
        if not next(lengths).equals(next(lengths)):
            raise ValueError("an image has another number of captions than of their vectors")
    if "image_id" in columns and len(batch) and columns["image_id"].to_numpy().min() < 0:
        raise ValueError("image_id is negative")
    if "thumbnail" in columns and any(file.is_valid and file.as_py()[:3] != _JPEG for file in columns["thumbnail"]):
        raise ValueError("a thumbnail is not a JPEG file")


def _numbers(column: pa.Array) -> pa.Array:
    """The values of nested lists, one after the other."""
    import pyarrow.types as types

    while types.is_list(column.type) or types.is_fixed_size_list(column.type):
        column = column.flatten()
    return column


def image_vectors(batch: pa.RecordBatch, header: Header) -> np.ndarray:
    """The vectors [n, V, D] float32 of a batch's images."""
    values = _numbers(batch.column("image_vector")).to_numpy(zero_copy_only=False)
    return values.astype(np.float32, copy=False).reshape(-1, header.views, header.dimensions)


def text_vectors(batch: pa.RecordBatch, header: Header) -> np.ndarray:
    """The vectors [t, D] float32 of a batch's captions, image by image."""
    values = _numbers(batch.column("text_vectors")).to_numpy(zero_copy_only=False)
    return values.astype(np.float32, copy=False).reshape(-1, header.dimensions)


def damaged(path: Path, reason: object) -> CoderError:
    """The error for a file that is not as it was written; says what to do."""
    text = shorten(" ".join(str(reason).split()))
    return CoderError(f"{path} is damaged ({text}): remove it, and run its coder-plugin embed command again")
