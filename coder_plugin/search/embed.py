"""Embedding a data set: each shard, or slice of other data, becomes one Parquet file. Any scheduler may call a job."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch.utils.data import DataLoader, Dataset, default_collate

from coder_plugin.backbones.names import model_names
from coder_plugin.config import OPENING, READING, DataConfig
from coder_plugin.data import HUB
from coder_plugin.data.bad_samples import Bad, BadSample, BadSamples, describe, shorten
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.data.item import Item
from coder_plugin.data.pictures import Pictures, is_pictures
from coder_plugin.data.source import ItemSource
from coder_plugin.data.tars import local_path
from coder_plugin.data.workers import start_worker
from coder_plugin.distributed import rank
from coder_plugin.errors import CoderError
from coder_plugin.files import remove_all_leftovers
from coder_plugin.locations import is_local
from coder_plugin.pretrained.build import check_data
from coder_plugin.pretrained.device import local_device
from coder_plugin.pretrained.open import default_export, open_pretrained, saved_data_config
from coder_plugin.progress import Progress
from coder_plugin.search.parquet import TOKENS, Rows, Table, check_columns, read_header, schema_of, storable, write_file

log = logging.getLogger(__name__)
#: Images of a file where the data are not in shards.
ROWS_PER_FILE = 4096
_FILE = re.compile(r"\d{8}\.parquet")


class Finished(NamedTuple):
    """What :meth:`EmbedJob.run` leaves in the folder."""

    units: int
    files: int  # complete ones
    made: int  # by this process
    images: int  # of the complete ones
    captions: int
    bad: Counter[str]  # samples that were left out, by kind


@dataclass(frozen=True, kw_only=True)
class EmbedJob:
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
    def units(self) -> int:
        """Shards or slices of the data, and files of the finished folder."""
        return len(self.opened.slices)

    def header(self) -> dict[str, Any]:
        """What all files say of model, data and options."""
        return self.opened.header

    @property
    def dimensions(self) -> int:
        """Of the vectors."""
        return self.opened.dimensions

    @property
    def opened(self) -> _Opened:
        """Model and data, which a process opens once."""
        return _opened(json.dumps(asdict(self), sort_keys=True))

    def __call__(self, unit: int) -> dict[str, Any]:
        """Embed a unit, unless its file is complete: a pure function of the job and the number.

        Args:
            unit: from 0 to ``units - 1``.

        Returns:
            ``unit``, ``path``, and the numbers of ``rows``, ``captions`` and ``bad`` samples.

        Raises:
            CoderError: data that the model cannot read, too many bad samples, or a file that was made with other options.
        """
        self._prepare()
        bad = BadSamples(
            self.opened.source.name, self.opened.encoder.max_bad_samples, reads_regions=self.opened.encoder.reads_regions
        )
        header = self._complete(unit)
        if header is None:
            [(_, header)] = self.opened.write(self, [unit], bad)
            bad.finish()
        sizes = {"rows": header["rows"], "captions": header["captions"], "bad": len(header["bad"])}
        return {"unit": unit, "path": str(self.path(unit)), **sizes}

    def run(self, *, index: int = 0, count: int = 1, shown: bool = True) -> Finished:
        """Embed what the folder lacks of every ``count``-th unit, from number ``index`` on.

        Args:
            index: number of this process or task, from 0.
            count: of processes and tasks.
            shown: whether to show progress.

        Raises:
            CoderError: as of a call; no image could be embedded.
        """
        self._prepare()
        opened = self.opened
        bad = BadSamples(
            opened.source.name, opened.encoder.max_bad_samples, reads_regions=opened.encoder.reads_regions
        )
        headers = {unit: header for unit in range(index, self.units, count) if (header := self._complete(unit)) is not None}
        for header in headers.values():
            bad.restore({"read": header["rows"] + len(header["bad"]), "kinds": Counter(kind for kind, _ in header["bad"])})
        missing = [unit for unit in range(index, self.units, count) if unit not in headers]
        total = getattr(opened.source, "num_images", None) if count == 1 else None
        with Progress(total, sum(each["rows"] for each in headers.values()), what="images", shown=shown) as progress:
            headers.update(opened.write(self, missing, bad, progress))
        bad.finish()
        headers.update((unit, header) for unit in range(self.units) if unit not in headers and (header := self._complete(unit)))
        images, captions = (sum(each[name] for each in headers.values()) for name in ("rows", "captions"))
        if not images and len(headers) == self.units:
            raise CoderError(f"{opened.source.name}: no image could be embedded: {bad}")
        kinds = Counter(kind for each in headers.values() for kind, _ in each["bad"])
        return Finished(self.units, len(headers), len(missing), images, captions, kinds)

    def path(self, unit: int) -> Path:
        """A unit's file."""
        return Path(self.output) / f"{unit:08d}.parquet"

    def _prepare(self) -> None:
        """Make the folder. One that holds something else is refused before a model computes."""
        folder = Path(self.output)
        _ = self.opened  # what cannot be opened leaves no folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_all_leftovers(folder)
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            raise CoderError(f"{folder} cannot be written: {error}") from error
        files = [name for name in names if _FILE.fullmatch(name)]
        if others := [name for name in names if name not in files]:
            raise CoderError(f"{folder} holds other files ({', '.join(others[:3])}): choose another folder")
        if files:
            self._complete(int(files[0].partition(".")[0]))

    def _complete(self, unit: int) -> dict[str, Any] | None:
        """The header of a unit's file; None if there is none, or a damaged one."""
        path = self.path(unit)
        if not path.exists():
            return None
        try:
            header = read_header(path)
        except CoderError as error:
            log.warning("%s", error)
            return None
        now = {**self.header(), "unit": unit}
        if header != {**header, **now}:
            before, plan = {**header.get("plan", {}), "unit": header.get("unit")}, {**now["plan"], "unit": unit}
            raise CoderError(
                f"{self.output} was begun with other options ({differences(before, plan) or 'another model'}): use the same "
                "options, choose another folder, or remove this one"
            )
        return header


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

    def write(
        self, job: EmbedJob, units: Sequence[int], bad: BadSamples, progress: Progress | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Write the files of units, and give the header of each."""
        transform = None if job.what == "captions" else self.encoder.transform
        decoder = _Decoder(self.slices, transform, self.encoder.batch_size, job.thumbnails)
        check = None if transform is None else self._check
        for unit, blocks in groupby(decoder.blocks(units, self.encoder.workers, check), key=lambda block: block.unit):
            header: dict[str, Any] = {**self.header, "unit": unit, "bad": []}
            batches = self._batches(job, blocks, header, bad, progress)
            first = next(batches, None)
            columns: dict[str, Any] = {"dtype": job.dtype, "what": job.what, "columns": job.columns}
            if first is None:
                yield unit, write_file(job.path(unit), schema_of(self.dimensions, **columns), header, [])
                continue
            images = first.images
            columns["views"] = images.shape[1] if images is not None and images.ndim == 3 else 1
            tokens = [TOKENS["images"] + name for name in first.image_tokens]
            tokens += [TOKENS["captions"] + name for name in first.text_tokens]
            schema = schema_of(self.dimensions, **columns, tokens=tokens)
            yield unit, write_file(job.path(unit), schema, header, _joined(first, batches))

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
        self, job: EmbedJob, blocks: Iterable[_Block], header: dict[str, Any], bad: BadSamples, progress: Progress | None
    ) -> Iterator[Rows]:
        """The rows of a unit's blocks; what was left out is listed in the header."""
        for block in blocks:
            bad.add(len(block.records) + len(block.bad), block.bad)
            header["bad"] += [(kind, shorten(storable(key))) for kind, key, _ in block.bad]
            if block.records:
                yield self._rows(job, block)
            if progress is not None:
                progress.update(len(block.records) + len(block.bad))

    def _rows(self, job: EmbedJob, block: _Block) -> Rows:
        """A block's vectors."""
        captions = [caption for record in block.records for caption in record.captions]
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
            keys=[record.key for record in block.records],
            captions=[record.captions for record in block.records],
            images=images,
            texts=texts,
            paths=[record.path for record in block.records],
            members=[record.member for record in block.records],
            thumbnails=block.thumbnails,
            columns=_columns(block.records, job.columns),
            image_tokens={name: value.numpy() for name, value in (item or {}).items()},
            text_tokens=text_tokens,
        )


@functools.lru_cache(maxsize=1)
def _opened(job: str) -> _Opened:
    return _Opened(EmbedJob(**json.loads(job)))


def _joined(first: Rows, others: Iterator[Rows]) -> Iterator[Rows]:
    yield first
    yield from others


class Slices:
    """A data set in units: each shard is one, or each slice of the images of any other data.

    Args:
        source: a :class:`~coder_plugin.data.source.Source`, or :class:`~coder_plugin.data.pictures.Pictures`.
        rows: images of a slice, from 1.
        pictures: for thumbnails of images that are read as regions: a source of their pictures; None: none.

    Raises:
        CoderError: there are none, or their number is not known, so that they cannot be divided.

    Example:
        >>> from coder_plugin.data import open_source
        >>> slices = Slices(open_source("scenes", count=5), 2)
        >>> len(slices), [slices.item(handle).key for handle in slices.handles(2)]
        (3, ['scenes/train/000004'])
    """

    def __init__(self, source: Any, rows: int, *, pictures: Any = None) -> None:
        if rows < 1:
            raise CoderError(f"--rows-per-file must be at least 1, got {rows}")
        self.source, self.rows, self.pictures = source, rows, pictures
        self._inner = getattr(source, "captions", source)  # of regions joined to captions
        self.by_shards = hasattr(self._inner, "read_shard")
        if self.by_shards:
            self._count = self._inner.num_shards
        elif source.num_images is None:
            raise CoderError(f"{source.name}: the number of its images is not known, so they cannot be divided into files")
        else:
            self._count = -(-source.num_images // rows)
        if not self._count:
            raise CoderError(f"{source.name}: no images")

    def __len__(self) -> int:
        return self._count

    def handles(self, unit: int) -> Iterator[int | Item]:
        """The images of a unit, by position or read from a shard, which is read from its start to its end, once."""
        if self.by_shards:
            yield from self._inner.read_shard(unit)
        elif hasattr(self._inner, "item"):
            yield from range(unit * self.rows, min((unit + 1) * self.rows, self.source.num_images))
        else:  # a reader of another package: the only block of its rank
            yield from (item for _, item in islice(self._inner.items(unit, self._count, block=self.rows), self.rows))

    def item(self, handle: int | Item) -> Item:
        """The image of a handle, in whichever process."""
        item = self._inner.item(handle) if isinstance(handle, int) else handle
        return item if self._inner is self.source else self.source.with_regions(item)

    def picture(self, handle: int | Item) -> Item:
        """As :meth:`item`, the picture of an image that is read as regions."""
        return self.pictures.item(handle) if isinstance(handle, int) else handle


class _Record(NamedTuple):
    """What is kept of an image besides its vectors."""

    key: str
    captions: tuple[str, ...]
    path: str | None
    member: str | None
    metadata: dict[str, Any]


class _Block(NamedTuple):
    """Some images of a unit, decoded."""

    unit: int
    records: list[_Record]  # b
    image: Any = None  # tensor [b, ...] or a dict of them
    thumbnails: Sequence[bytes] = ()  # b JPEG files, empty where there is none
    bad: Sequence[Bad] = ()


class _Decoder(Dataset):
    """Decodes blocks, in this process or in those of a DataLoader, which serve all units. An error is returned as an object."""

    def __init__(self, slices: Slices, transform: Any, size: int, thumbnails: int) -> None:
        self.slices, self.transform, self.size, self.thumbnails = slices, transform, size, thumbnails

    def blocks(
        self, units: Iterable[int], workers: int, check: Callable[[Any], None] | None = None
    ) -> Iterator[_Block]:
        """The blocks of units in order; each unit begins with a block of no images. ``check`` gets the first image."""
        requests = self._requests(units, check, sent=workers > 0)
        if workers and self.transform is not None:
            loader: DataLoader[Any] = DataLoader(
                self,
                sampler=requests,  # type: ignore[arg-type]  # sent to a worker: here images, not numbers of them
                batch_size=None,
                num_workers=workers,
                collate_fn=_identity,
                generator=torch.Generator().manual_seed(0),
                worker_init_fn=start_worker,
            )
            decoded: Iterable[Any] = loader
        else:
            decoded = map(self.__getitem__, requests)
        for block in decoded:
            if isinstance(block, CoderError):
                raise block
            yield block

    def _requests(
        self, units: Iterable[int], check: Callable[[Any], None] | None, *, sent: bool
    ) -> Iterator[tuple[int, list[Any]] | CoderError]:
        """Handles of the images of blocks. This process reads the shards, each once."""
        try:
            for unit in units:
                yield unit, []
                handles = self.slices.handles(unit)
                while block := list(islice(handles, self.size)):
                    if sent and isinstance(block[0], Item):
                        sent = False
                        self._check_pickles(block[0])
                    if check is not None and (loaded := self._first(block)) is not None:
                        check(loaded)
                        check = None
                    yield unit, block
        except CoderError as error:  # a DataLoader may be starting its processes
            yield error

    def _check_pickles(self, item: Item) -> None:
        try:
            pickle.dumps(item)
        except Exception as error:  # of many kinds; in the queue's own thread it would be lost
            name = self.slices.source.name
            raise CoderError(f"{name}: its samples cannot be sent to processes: use --workers 0") from error

    def _first(self, handles: Sequence[int | Item]) -> Any:
        """The first image that can be read; None without any."""
        for handle in handles:
            with contextlib.suppress(OSError, BadSample):
                return self.slices.item(handle).load()
        return None

    def __getitem__(self, request: tuple[int, list[Any]] | CoderError) -> _Block | CoderError:
        if isinstance(request, CoderError):
            return request
        try:
            return self._decode(*request)
        except CoderError as error:
            return CoderError(str(error))

    def _decode(self, unit: int, handles: Sequence[int | Item]) -> _Block:
        records, images, thumbnails, bad = [], [], [], []
        for handle in handles:
            item = self.slices.item(handle)
            try:
                if item.fault is not None:
                    raise item.fault
                loaded = None if self.transform is None else item.load()
            except CoderError:
                raise
            except (OSError, ValueError) as error:
                bad.append(describe(item.key, error))
                continue
            if self.transform is not None:
                try:
                    images.append(self.transform(loaded))
                except BadSample as error:  # any other error of a transform is a bug
                    bad.append(describe(item.key, error))
                    continue
                thumbnails.append(self._thumbnail(handle, item.key, loaded))
            records.append(_Record(item.key, item.captions, item.path, item.member, dict(item.metadata)))
        return _Block(unit, records, default_collate(images) if images else None, thumbnails, bad)

    def _thumbnail(self, handle: int | Item, key: str, loaded: Any) -> bytes:
        if self.thumbnails and not isinstance(loaded, Image) and self.slices.pictures is not None:
            try:
                item = self.slices.picture(handle)
                loaded = item.load() if item.key == key else None
            except (OSError, ValueError, IndexError):  # the last one: fewer pictures
                return b""
        return thumbnail(loaded, side=self.thumbnails) if self.thumbnails and isinstance(loaded, Image) else b""


def _identity(block: Any) -> Any:
    return block


def thumbnail(image: Image, *, side: int) -> bytes:
    """A JPEG file of a picture, its longer side at most ``side`` pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side), Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


_warned: set[str] = set()


def _columns(records: Sequence[_Record], columns: Mapping[str, str]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for record in records:
        for name, kind in columns.items():
            value = record.metadata.get(name)
            typed = as_type(value, kind)
            if typed is None and value not in (None, "") and name not in _warned:
                _warned.add(name)
                log.warning("column %s: %r of %r is no %s; such values are left out", name, str(value)[:60], record.key, kind)
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


#: Fields of which only a digest is known, and what a message calls another one.
_DIGESTS = {"model": "another model", "content": "the data's content has changed", "embeddings": "other embeddings"}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields of ``now`` that had other values ``before``, for a message; empty if there are none.

    Example:
        >>> differences({"what": "both", "dtype": "float32"}, {"what": "images", "dtype": "float32"})
        'what was both, is images'
    """
    different = [name for name in now if before.get(name) != now[name]]
    return ", ".join(
        _DIGESTS.get(name) or f"{name} was {str(before.get(name))[:200]}, is {str(now[name])[:200]}" for name in different
    )


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
    """The data's name, the same from whichever working directory; commands and addresses stay as they are."""
    unchanged = data == "scenes" or "::" in data or "://" in data or data.startswith(("pipe:", *HUB))
    return data if unchanged else os.path.abspath(data)


def content_digest(source: Any) -> str | None:
    """A digest of a source's images and captions where it is cheap: from keys and texts in memory, or from the sizes of local
    shards; else None."""
    inner = getattr(source, "captions", source)  # regions joined to captions: the captions
    digest = hashlib.sha256()
    if isinstance(inner, (ItemSource, Pictures)):
        for _, item in inner.items():
            digest.update(json.dumps([item.key, *item.captions]).encode())
    elif all(map(is_local, getattr(inner, "shards", ["pipe:"]))):
        for shard in inner.shards:
            digest.update(json.dumps([os.path.basename(shard), os.path.getsize(local_path(shard))]).encode())
    else:
        return None
    return digest.hexdigest()[:32]
