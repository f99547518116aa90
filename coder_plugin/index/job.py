"""An embedding by names alone, which can be sent to other processes and machines: model, data, folder and options."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.backbones.names import model_names
from coder_plugin.config import OPENING, READING, DataConfig
from coder_plugin.data import HUB
from coder_plugin.data.decode import set_max_pixels
from coder_plugin.data.from_config import make_source, pictures_under_regions
from coder_plugin.data.pictures import Pictures, is_pictures
from coder_plugin.data.source import ItemSource
from coder_plugin.data.tars import local_path
from coder_plugin.data.units import Units
from coder_plugin.distributed import rank
from coder_plugin.errors import CoderError
from coder_plugin.index.embed import Embedding, Finished, begin, embed_all, embed_unit, locked, plan_of
from coder_plugin.index.embeddings_header import Header, check_columns
from coder_plugin.index.unit_file import is_complete
from coder_plugin.locations import is_local
from coder_plugin.pretrained.build import check_data
from coder_plugin.pretrained.device import local_device
from coder_plugin.pretrained.open import default_export, open_pretrained, saved_data_config

log = logging.getLogger(__name__)
#: Images of a file where the data are not in shards.
ROWS_PER_FILE = 4096


@dataclass(frozen=True, kw_only=True)
class EmbedJob:
    """What ``coder-plugin embed`` does, for one process or for the tasks of Ray, Spark and the like.

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
        >>> job.start()  # the number of files
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

    def start(self) -> int:
        """Begin the folder, or check that it was begun with the same options.

        Returns:
            The number of units, each of which a call of the job embeds.

        Raises:
            CoderError: model or data that cannot be opened, or do not fit; the folder was begun with other options.
        """
        return self._open().header().units

    @property
    def dimensions(self) -> int:
        """Of the vectors."""
        return self._open().embedding.dimensions

    def plan(self) -> dict[str, Any]:
        """Everything that decides what is in the files, as ``embed.json`` says it; begins no folder."""
        opened = self._open()
        return plan_of(opened.embedding, **opened.described)

    def __call__(self, unit: int) -> dict[str, Any]:
        """Embed a unit, unless its file is complete. The process keeps model and data open for the next one.

        Args:
            unit: from 0 to ``start() - 1``.

        Returns:
            ``unit``, ``path``, and the numbers of ``rows``, ``captions`` and ``bad`` samples.
        """
        opened = self._open()
        header = opened.header()
        path = Path(self.output) / header.file(unit)
        with locked(lock := path.with_name(f".{unit:08d}.lock")):  # against a second attempt at the same time
            summary = is_complete(path, header, unit) or embed_unit(opened.embedding, unit, path, header)
            lock.unlink(missing_ok=True)  # who waits for it finds the unit complete
        sizes = {"rows": summary.rows, "captions": summary.captions, "bad": len(summary.bad)}
        return {"unit": unit, "path": str(path), **sizes}

    def run(self, *, index: int = 0, count: int = 1, wait: bool = False, shown: bool = True) -> Finished:
        """Embed what the folder lacks, as process ``index`` of ``count``; arguments as of
        :func:`~coder_plugin.index.embed.embed_all`."""
        opened = self._open()
        header = opened.header(index)
        return embed_all(self.output, opened.embedding, header, index=index, count=count, wait=wait, shown=shown)

    def _open(self) -> _Opened:
        return _opened(json.dumps(asdict(self), sort_keys=True))


class _Opened:
    """Model and data of a job."""

    def __init__(self, job: EmbedJob) -> None:
        check_columns(job.columns)
        self.job = job
        self.data = saved_data_config(job.model, {**job.options, "train_data": job.data, "val_data": job.data})
        source, pictures = open_data(self.data, job.data, job.split, metadata=list(job.columns))
        self.model = open_pretrained(
            job.model, job.options, export=job.export, name=job.model, device=local_device(), reranker=job.reranker
        )
        if job.model is None:
            _warn_of_random_weights(job.options)
        encoder = self.model.encoder()
        if job.tokens and encoder.reranking is None:
            raise CoderError(
                f"--tokens: {self.model.name} has no head that re-ranks: add --reranker maxsim, or leave out --tokens"
            )
        self.embedding = Embedding(
            encoder=encoder,
            units=Units(source, job.rows_per_file),
            thumbnails=job.thumbnails,
            tokens=encoder.reranking is not None if job.tokens is None else job.tokens or job.reranker is not None,
            pictures=None if pictures is None else Units(pictures, job.rows_per_file),
        )

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        """Model, data and options for the folder's header, with digests of the weights and the captions, so computed once."""
        job = self.job
        opened = {name: value for name, value in job.options.items() if name in OPENING}
        return {
            "model": model_record(self.model, job.model, export=job.export or default_export(job.model), options=opened),
            "plan": reading_plan(self.embedding.units.source, self.data, job.data, job.split, self.model.config.precision),
            "what": job.what,
            "dtype": job.dtype,
            "columns": job.columns,
        }

    def header(self, first: int = 0) -> Header:
        """Of the folder, which is begun if it was not."""
        name, most = self.embedding.units.source.name, self.model.config.max_regions
        check = partial(check_data, self.model.model, name=name, max_regions=most)
        return begin(self.job.output, self.embedding, **self.described, check=check, first=first)


def _warn_of_random_weights(options: Mapping[str, Any]) -> None:
    """Warn where a model is named without weights: the vectors of such a model mean nothing."""
    name = str(options.get("model"))
    if options.get("pretrained") is None and (name.endswith(".json") or name in model_names()) and rank() == 0:
        log.warning("%s has random weights, so its vectors mean nothing: name trained ones with --pretrained", name)


@functools.lru_cache(maxsize=1)
def _opened(job: str) -> _Opened:
    return _Opened(EmbedJob(**json.loads(job)))


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


def reading_plan(source: Any, data: DataConfig, location: str, split: str, precision: str) -> dict[str, Any]:
    """What decides how data are read and computed, as JSON values for :func:`~coder_plugin.index.embed.begin`."""
    return {
        "data": absolute_data(location),
        "split": split,
        "content": content_digest(source),
        "precision": precision,
        **{name: absolute(getattr(data, name)) for name in READING},
    }


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
