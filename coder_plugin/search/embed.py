"""Embedding a data set: each shard, or slice of other data, becomes one Parquet file. Any scheduler may call a job."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin import locations
from coder_plugin.backbones.names import model_names
from coder_plugin.config import OPENING, READING, DataConfig
from coder_plugin.data.bad_samples import BadSamples, shorten
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures, is_pictures
from coder_plugin.data.units import Block, Job, Slices, content_digest, region_files
from coder_plugin.distributed import rank
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.build import check_data
from coder_plugin.pretrained.device import local_device
from coder_plugin.pretrained.open import default_export, open_pretrained, saved_data_config
from coder_plugin.progress import Progress
from coder_plugin.search.parquet import TOKENS, Rows, Table, check_columns, read_header, schema_of, storable, write_file

log = logging.getLogger(__name__)
#: Images of a file where the data are not in shards.
ROWS_PER_FILE = 4096
_FILE = re.compile(r"\d{8}\.parquet")


@dataclass(frozen=True, kw_only=True)
class EmbedJob(Job):
    """What ``coder-plugin embed`` does, for one process or for the tasks of Ray, Spark and the like. It can be pickled.

    Args:
        model: a run's or an export's folder, or ``hf-hub:OWNER/NAME``; None: ``options`` name an open_clip model.
        data: shards, a table, a folder of pictures, or any other data that training reads.
        output: the folder to write, which all processes see.
        options: of opening the model and reading the data, by flat name, such as ``batch_size``.
        export: which export of a run: "best" or "last"; None: best, or last if no validation was run.
        split: of data that have several.
        what: whose vectors: "both", "images" or "captions".
        dtype: of the vectors: "float32" or "float16".
        thumbnails: longer side in pixels; 0: none.
        tokens: also write what re-ranking needs, with ``reranker`` or a model that has a head for it; None: if it has one.
        reranker: as in :func:`~coder_plugin.pretrained.open.open_pretrained`; its tokens are written in any case.
        columns: further columns or fields of the data to keep, and the type of each: "string", "int64", "float64" or "bool".
        rows_per_file: images of a file where the data are not in shards.

    Example:
        >>> import tempfile, coder_plugin
        >>> from coder_plugin.pretrained.export import export_model
        >>> folder = tempfile.mkdtemp()
        >>> path = export_model(coder_plugin.create_model("coder-tiny", loss="dcl"), folder + "/model")
        >>> job = EmbedJob(model=folder + "/model", data="scenes", output=folder + "/found", options={"workers": 0})
        >>> job.units
        1
        >>> job(0)["rows"]
        500
    """

    model: str | None
    data: str
    output: str
    options: Mapping[str, Any] = field(default_factory=dict)
    export: str | None = None
    split: str = "val"
    what: str = "both"
    dtype: str = "float32"
    thumbnails: int = 128
    tokens: bool | None = False
    reranker: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    rows_per_file: int = ROWS_PER_FILE

    @property
    def dimensions(self) -> int:
        """Of the vectors."""
        return self.opened.dimensions

    @property
    def opened(self) -> _Opened:
        """Model and data, which a process opens once."""
        return _opened(json.dumps(asdict(self), sort_keys=True))

    def path(self, unit: int) -> Path:
        """A unit's file."""
        return Path(self.output) / f"{unit:08d}.parquet"

    def read(self, unit: int) -> dict[str, Any]:
        """The header of a unit's file; ``CoderError``: a damaged one."""
        return read_header(self.path(unit))

    def check_folder(self, names: Sequence[str]) -> None:
        """Refuse a folder with files of these names that are not this job's."""
        if others := [name for name in names if not _FILE.fullmatch(name)]:
            raise CoderError(f"{self.output} holds other files ({', '.join(others[:3])}): choose another folder")


class _Opened:
    """Model and data of a job."""

    def __init__(self, job: EmbedJob) -> None:
        check_columns(job.columns)
        if job.thumbnails < 0:
            raise CoderError(f"thumbnails must be 0 (none) or more pixels, got {job.thumbnails}")
        data = saved_data_config(job.model, {**job.options, "train_data": job.data, "val_data": job.data})
        self.source, pictures = open_data(data, job.data, job.split, metadata=list(job.columns))
        self.slices = Slices(self.source, job.rows_per_file, pictures=pictures)
        self.model = open_pretrained(
            job.model, job.options, export=job.export, name=job.model, device=local_device(), reranker=job.reranker
        )
        if job.model is None:
            _warn_of_random_weights(job.options)
        self.encoder = self.model.encoder()
        self.encoder.model.eval()
        if job.tokens and self.encoder.reranking is None:
            raise CoderError(
                f"--tokens: {self.model.name} has no head that re-ranks: add --reranker maxsim, or leave out --tokens"
            )
        tokens = self.encoder.reranking is not None if job.tokens is None else job.tokens or job.reranker is not None
        self.head = self.encoder.reranking if tokens and job.what != "captions" else None
        opening = {name: value for name, value in job.options.items() if name in OPENING}
        plan = {
            "model": self.model.fingerprint(),
            "data": absolute_data(job.data),
            "split": job.split,
            "content": content_digest(self.source),
            "regions files": region_files(self.source),
            "precision": self.model.config.precision,
            **{name: absolute(getattr(data, name)) for name in READING},
            "what": job.what,
            "dtype": job.dtype,
            "columns": dict(job.columns),
            "batch size": self.encoder.batch_size,
            "thumbnails": job.thumbnails,
            "tokens": self.head is not None,
            "re-ranker": self.model.reranker if self.head is not None else None,
            "rows per file": None if self.slices.by_shards else job.rows_per_file,
        }
        record = model_record(self.model, job.model, export=job.export or default_export(job.model), options=opening)
        #: As JSON gives it back, so that it can be compared.
        self.header: dict[str, Any] = json.loads(json.dumps({"model": record, "plan": plan, "units": len(self.slices)}))

    def bad(self) -> BadSamples:
        """A new count of bad samples."""
        return BadSamples(self.source.name, self.encoder.max_bad_samples)

    def write(
        self, job: EmbedJob, units: Sequence[int], bad: BadSamples, progress: Progress | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Write the files of units, and give the header of each."""
        transform = None if job.what == "captions" else self.encoder.transform
        reading: dict[str, Any] = {"workers": self.encoder.workers, "thumbnails": job.thumbnails}
        reading["check"] = None if transform is None else self._check
        decoded = self.slices.blocks(units, transform, self.encoder.batch_size, **reading)
        for unit, blocks in groupby(decoded, key=lambda block: block.unit):
            header: dict[str, Any] = {**self.header, "unit": unit, "bad": []}
            batches = self._batches(job, blocks, header, bad, progress)
            first = next(batches, None)
            columns: dict[str, Any] = {"dtype": job.dtype, "what": job.what, "columns": job.columns}
            if first is not None:
                columns["views"] = first.images.shape[1] if first.images is not None and first.images.ndim == 3 else 1
                columns["tokens"] = [TOKENS["images"] + name for name in first.image_tokens]
                columns["tokens"] += [TOKENS["captions"] + name for name in first.text_tokens]
            rows = chain([] if first is None else [first], batches)
            yield unit, write_file(job.path(unit), schema_of(self.dimensions, **columns), header, rows)

    @functools.cached_property
    def dimensions(self) -> int:
        return self.encoder.text(["a picture"])[0].shape[1]

    @functools.cached_property
    def _text_tokens(self) -> list[str]:
        return list((self.encoder.text(["a picture"], self.head)[1] or {}).keys())

    def _check(self, loaded: Any) -> None:
        """Check with an image that the model can read the data."""
        check_data(self.model.model, loaded, name=self.source.name, max_regions=self.model.config.max_regions)

    def _batches(
        self, job: EmbedJob, blocks: Iterable[Block], header: dict[str, Any], bad: BadSamples, progress: Progress | None
    ) -> Iterator[Rows]:
        """The rows of a unit's blocks; what was left out is listed in the header."""
        for block in blocks:
            bad.add(len(block.items) + len(block.bad), block.bad)
            header["bad"] += [(kind, shorten(storable(key))) for kind, key, _ in block.bad]
            if block.items:
                yield self._rows(job, block)
            if progress is not None:
                progress.update(len(block.items) + len(block.bad))

    def _rows(self, job: EmbedJob, block: Block) -> Rows:
        """A block's vectors."""
        captions = [caption for record in block.items for caption in record.captions]
        images, item, texts = None, None, None
        text_tokens: dict[str, list[np.ndarray]] = {}
        if job.what != "captions":
            vectors, item = self.encoder.transformed(block.image, self.head)
            images = vectors.numpy()
        if job.what != "images":
            texts = np.zeros((0, self.dimensions), np.float32)
            text_tokens = {name: [] for name in self._text_tokens} if self.head is not None else {}
            for start in range(0, len(captions), self.encoder.batch_size):
                vectors, items = self.encoder.text(captions[start : start + self.encoder.batch_size], self.head)
                texts = np.concatenate([texts, vectors.numpy()])
                for name, value in (items or {}).items():
                    text_tokens[name] += list(value.numpy())
        return Rows(
            keys=[record.key for record in block.items],
            captions=[record.captions for record in block.items],
            images=images,
            texts=texts,
            paths=[record.path for record in block.items],
            members=[record.member for record in block.items],
            thumbnails=block.thumbnails,
            columns=_columns(block.items, job.columns),
            image_tokens={name: value.numpy() for name, value in (item or {}).items()},
            text_tokens=text_tokens,
        )


@functools.lru_cache(maxsize=1)
def _opened(job: str) -> _Opened:
    return _Opened(EmbedJob(**json.loads(job)))


_warned: set[str] = set()


def _columns(records: Sequence[Item], columns: Mapping[str, str]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for record in records:
        for name, kind in columns.items():
            value = record.metadata.get(name)
            typed = as_type(value, kind)
            if typed is None and value not in (None, "") and name not in _warned:
                _warned.add(name)
                log.warning("column %s: %r of %r is not %s; such values are left out", name, str(value)[:60], record.key, kind)
            values[name].append(typed)
    return values


def as_type(value: Any, kind: str) -> Any:
    """A value of a table or of JSON as one of a column's type; None where it is none.

    Args:
        value: text, a number, a bool, or anything.
        kind: "string", "int64", "float64" or "bool".

    Example:
        >>> as_type("1999", "int64"), as_type(True, "string"), as_type("many", "float64"), as_type("", "string")
        (1999, 'true', None, None)
    """
    if value is None or value == "":
        return None
    try:
        if kind == "string":
            return storable(value if isinstance(value, str) else json.dumps(value))
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
        if kind == "int64":
            number = int(value)
            return number if -(2**63) <= number < 2**63 and (isinstance(value, str) or number == value) else None
        number_ = float(value)
        return number_ if math.isfinite(number_) else None
    except (TypeError, ValueError, OverflowError):
        return None


def embedded(folder: str | Path) -> Table:
    """The finished embeddings in a folder.

    Raises:
        CoderError: no embeddings there, files that are missing or damaged, or of different jobs.
    """
    folder = Path(folder)
    try:
        paths = sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    except OSError as error:
        raise CoderError(f"{folder} cannot be read: {error.strerror}") from error
    if not paths:
        raise CoderError(f"{folder} holds no embeddings: coder-plugin embed writes them")
    table = Table(paths)
    units = table.headers[0].get("units")
    if any((header.get("units"), header.get("plan")) != (units, table.headers[0].get("plan")) for header in table.headers):
        raise CoderError(f"{folder} holds files of different data or options: embed them again")
    numbers = [header.get("unit") for header in table.headers]
    if not isinstance(units, int) or numbers != [int(path.stem) for path in paths] or numbers[-1] >= units:
        raise CoderError(f"{folder} holds files that were not written by one coder-plugin embed: embed the data again")
    if len(paths) < units:
        raise CoderError(
            f"{folder} is not finished: {units - len(paths):,} of {units:,} files are missing: run its coder-plugin embed "
            "command again"
        )
    return table


def _warn_of_random_weights(options: Mapping[str, Any]) -> None:
    """Warn where a model is named without weights: the vectors of such a model mean nothing."""
    name = str(options.get("model"))
    if options.get("pretrained") is None and (name.endswith(".json") or name in model_names()) and rank() == 0:
        log.warning("%s has random weights, so its vectors mean nothing: name trained ones with --pretrained", name)


def open_data(data: DataConfig, location: str, split: str, *, metadata: Sequence[str] = ()) -> tuple[Any, Any]:
    """A data set to embed, and where it is read as regions its pictures, else None.

    Args:
        data: how it is read.
        location: its name or path; a folder of pictures needs no captions.
        split: of data that have several.
        metadata: further columns or fields to keep.
    """
    if data.dataset_type == "auto" and data.regions is None and is_pictures(location):
        if metadata:
            raise CoderError(f"--columns {metadata[0]}: {location} is a folder of pictures, which has no columns")
        set_max_pixels(data.max_image_pixels)
        return Pictures(location), None
    data = replace(data, dataset_resampled=False, hard_negatives=0)  # each image once, with its captions alone
    return make_source(data, split=split, metadata=metadata), pictures_under_regions(data, split)


def model_record(
    model: Any, spec: str | None, *, export: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fields about a model, from which a search opens it again.

    Args:
        model: :class:`~coder_plugin.pretrained.open.PretrainedModel`.
        spec: what it was opened from; None: ``options`` name it.
        export: which export of a run.
        options: that it was opened with, by flat name.
    """
    return {
        "name": model.name,
        "spec": absolute(spec),
        "export": export,
        "options": {name: absolute(value) for name, value in (options or {}).items()},
        "objective": model.objective,
        "fingerprint": model.fingerprint(),
        "reranker": model.reranker,
    }


def absolute(value: Any) -> Any:
    """The absolute path, if ``value`` is one that exists; else ``value``."""
    return os.path.abspath(value) if isinstance(value, str) and value and os.path.exists(value) else value


def absolute_data(data: str) -> str:
    """The data's name, the same from whichever working directory; commands, addresses and names of readers stay."""
    return data if data == "scenes" else str(absolute(locations.absolute(data)))
