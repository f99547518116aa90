"""Extract regions from pictures: each shard, or slice of other data, becomes one region shard (``data/units.py``).

A shard is written atomically, and then a note that it is complete. A batch never crosses shards, so the result depends neither
on interruptions nor on the number of processes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from coder_plugin.data.bad_samples import DEFAULT_RATE, Bad, BadSamples, check_rate
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.shards import add_sizes, write_shard
from coder_plugin.data.units import Block, Finished, Job, Slices, content_digest
from coder_plugin.detectors.base import Detector
from coder_plugin.detectors.global_features import make_detector_with_global
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, read_json
from coder_plugin.progress import Progress


@dataclass(frozen=True, kw_only=True)
class RegionsJob(Job):
    """What is extracted from where to where, for one process or for the tasks of a scheduler. It can be pickled.

    Args:
        source: the images; their captions are written too.
        detector: ``detector(device=…)``, called in each process.
        folder: where shards ``{split}-000000.tar`` … are written. Its subfolder ``{split}.extraction`` holds a note for each,
            with the settings, the number of images and the bad samples.
        settings: JSON values that a resumed run must agree with.
        shard_size, batch_size: images of a shard where the data are not in shards, and of a call of the detector.
        workers: decoding processes for each detecting process; 0: none.
        device: ``cuda`` gives rank i of this machine the device i modulo their number.
        max_bad_samples: allowed fraction of images that cannot be used.

    Raises:
        CoderError: a value out of range.
    """

    source: Any
    detector: Callable[..., Detector]
    folder: Path
    split: str = "train"
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: int = 1000
    batch_size: int = 8
    workers: int = 2
    device: str = "cpu"
    max_bad_samples: float = DEFAULT_RATE

    def __post_init__(self) -> None:
        check_rate(self.max_bad_samples)
        for name, least in {"shard_size": 1, "batch_size": 1, "workers": 0}.items():
            if (value := getattr(self, name)) < least:
                raise CoderError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # without the detector that was opened

    @cached_property
    def opened(self) -> _Opened:  # type: ignore[override]
        """The images and the detector."""
        return _Opened(self)

    def path(self, unit: int) -> Path:
        """The note of a unit."""
        return self.folder / f"{self.split}.extraction" / f"{unit:06d}.json"

    def shard(self, unit: int) -> Path:
        """The region shard of a unit; none is written where no image could be used."""
        return self.folder / f"{self.split}-{unit:06d}.tar"

    def read(self, unit: int) -> dict[str, Any]:
        """The note of a unit; ``CoderError``: a damaged one, or one whose shard is not there as it was written."""
        header, shard = read_json(self.path(unit)), self.shard(unit)
        if not isinstance(header, dict) or not {"plan", "units", "unit", "rows", "captions", "bad", "bytes"} <= {*header}:
            raise CoderError(f"{self.path(unit)} is no note of an extraction: its images are extracted again")
        if header["rows"] and (not shard.is_file() or shard.stat().st_size != header["bytes"]):
            raise CoderError(f"{shard} is missing or damaged: its images are extracted again")
        return header

    def check_folder(self, names: Sequence[str]) -> None:
        """Refuse a folder with shards of the split that no extraction wrote."""
        pattern = re.compile(rf"{re.escape(self.split)}-\d{{6}}\.tar")
        shards = sorted(path.name for path in self.folder.iterdir() if pattern.fullmatch(path.name))
        started = self.path(0).parent / ".started"  # before the first shard, whose note comes after it
        if shards and not names and not started.exists():
            raise CoderError(
                f"{self.folder} has {shards[0]}, which no extraction recorded in {self.path(0).parent} wrote: choose another "
                f"folder or split, or remove split {self.split!r} there"
            )
        started.touch()

    def run(self, *, index: int = 0, count: int = 1, shown: bool = True) -> Finished:
        """As of :class:`~coder_plugin.data.units.Job`; whoever finds all shards complete also writes ``sizes.json``."""
        finished = super().run(index=index, count=count, shown=shown)
        if finished.files == finished.units:
            sizes = {self.shard(unit).name: read_json(self.path(unit))["rows"] for unit in range(self.units)}
            add_sizes(str(self.folder), {name: size for name, size in sizes.items() if size})
        return finished


class _Opened:
    """Images and detector of a job."""

    def __init__(self, job: RegionsJob) -> None:
        self.slices = Slices(job.source, job.shard_size)
        device = job.device
        if device == "cuda":
            rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
            device = f"cuda:{int(rank) % max(1, torch.cuda.device_count())}"
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        self.detector = job.detector(device=device)
        self._bad = partial(BadSamples, job.source.name, job.max_bad_samples)
        plan = {
            **job.settings,
            "content": content_digest(job.source),
            "shard_size": None if self.slices.by_shards else job.shard_size,
            "batch_size": job.batch_size,
            "device": device.partition(":")[0],  # features differ between kinds in their last bits
            "checksum of the weights": self.detector.checksum(),
        }
        self.header: dict[str, Any] = json.loads(json.dumps({"plan": plan, "units": len(self.slices)}))

    def bad(self) -> BadSamples:
        """A new count of bad samples."""
        return self._bad()

    def write(
        self, job: RegionsJob, units: Sequence[int], bad: BadSamples, progress: Progress | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Write the shards and notes of units, and give each note."""
        decoded = self.slices.blocks(units, self.detector.preprocess, job.batch_size, workers=job.workers, collate=list)
        for unit, blocks in groupby(decoded, key=lambda block: block.unit):
            note: dict[str, Any] = {**self.header, "unit": unit, "rows": 0, "captions": 0, "bad": [], "bytes": 0}
            records = self._records(blocks, note, bad, progress)
            if (first := next(records, None)) is not None:
                note["rows"] = write_shard(str(job.shard(unit)), chain([first], records))
                note["bytes"] = job.shard(unit).stat().st_size
            with atomic_write(job.path(unit), "w") as file:
                file.write(json.dumps(note, indent=1, ensure_ascii=False) + "\n")
            yield unit, note

    def _records(
        self, blocks: Iterable[Block], note: dict[str, Any], bad: BadSamples, progress: Progress | None
    ) -> Iterator[Record]:
        """The regions of a unit's images; what was left out is listed in the note."""
        for block in blocks:
            faults: Sequence[Bad] = block.bad
            bad.add(len(block.items) + len(faults), faults)
            note["bad"] += faults
            names = [item.key for item in block.items]
            try:
                regions = self.detector.detect(block.image) if names else []
            except CoderError:
                raise
            except ValueError as exc:  # from Regions, such as NaN in the features
                raise CoderError(f"the detector's regions of one of {', '.join(names)} are invalid: {exc}") from exc
            for item, each in zip(block.items, regions, strict=True):
                note["captions"] += len(item.captions)
                yield Record(item.key, each, item.captions)
            if progress is not None:
                progress.update(len(names) + len(faults))


def regions_job(
    source: Any,
    output: str | Path,
    *,
    detector: str = "torchvision",
    options: Mapping[str, Any] | None = None,
    global_model: str | None = None,
    global_weights: str | None = None,
    device: str | None = None,
    **job: Any,
) -> RegionsJob:
    """A job with a detector named as on the command line.

    Args:
        source: images with or without captions, such as :class:`coder_plugin.data.pictures.Pictures`.
        output: folder to write. If it holds an interrupted extraction with the same options, that is resumed.
        detector: name of an entry point of ``coder_plugin.detectors``.
        options: of the detector; those that are None are ignored.
        global_model: ``timm:MODEL`` adds a feature of the whole image by a model of timm, with ``global_weights``.
        device: ``cpu``, ``cuda``, ``cuda:1`` … (default: ``cuda`` if available).
        job: further options of :class:`RegionsJob`.

    Raises:
        CoderError: options that do not fit together.
    """
    options = {name: value for name, value in (options or {}).items() if value is not None}
    if global_model is None and global_weights is not None:
        raise CoderError("--global-weights without --global-features: add --global-features timm:MODEL")
    kind, _, model = (global_model or "").partition(":")
    if global_model is not None and (kind != "timm" or not model):
        raise CoderError(f"--global-features is {global_model!r}; it must be timm:MODEL, such as timm:resnet152")
    settings = {
        "detector": detector,
        **{name: value for name, value in options.items() if name != "weights"},
        "global_features": model or None,
        "source": source.name,
    }
    return RegionsJob(
        source=source,
        detector=partial(make_detector_with_global, detector, options, model or None, global_weights),
        folder=Path(output),
        settings=settings,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        **job,
    )
