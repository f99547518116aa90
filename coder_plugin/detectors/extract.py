"""Extract regions from pictures, part by part, so that a killed run can be resumed.

A part is ``shard_size`` images in the source's order: one region shard, written atomically, and then a note that it is done.
Of data with remote shards a part is one of these, so that each is fetched once.
Parts are dealt to ranks in turn, and a batch never crosses parts, so the result does not depend on interruptions.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from coder_plugin import files
from coder_plugin.data.bad_samples import DEFAULT_RATE, Bad, BadSamples, check_rate, describe
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.shards import add_sizes, write_shard
from coder_plugin.data.source import is_stream
from coder_plugin.data.streams import STRIDE
from coder_plugin.detectors.base import Detector, Prepared
from coder_plugin.detectors.global_features import make_detector_with_global
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, remove_all_leftovers
from coder_plugin.progress import Progress

_EXAMPLES = 10  # bad samples that the report lists


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is extracted from where to where. It can be pickled for other processes.

    Args:
        source: the images; their captions are written too.
        detector: ``detector(device=…)``, called in each process.
        folder: where shards ``{split}-000000.tar`` … are written. Its subfolder ``{split}.extraction`` holds the settings and
            a note for each part that is done.
        settings: JSON values that a resumed run must agree with.
        shard_size, batch_size: images of a part, and of a call of the detector.
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

    @property
    def notes(self) -> Path:
        return self.folder / f"{self.split}.extraction"

    def note(self, part: int) -> Path:
        return self.notes / f"{part:06d}.json"

    def shard(self, part: int) -> Path:
        return self.folder / f"{self.split}-{part:06d}.tar"

    def done(self) -> dict[int, dict[str, Any]]:
        """The notes of the finished parts: the number of images, and the bad samples."""
        notes = {int(path.stem): read_json(path) for path in sorted(self.notes.glob("[0-9]*.json"))}
        return {part: note for part, note in notes.items() if not note["images"] or self.shard(part).exists()}


@dataclass(frozen=True)
class Report:
    """What an extraction wrote.

    Args:
        images: number of images in the result.
        bad: the images that could not be used: kind of fault, key and reason.
        new: images extracted by this run, in ``seconds``.
        job: what was done.
    """

    images: int
    bad: list[Bad]
    new: int
    seconds: float
    job: Job

    def __str__(self) -> str:
        rate = f" ({self.new / self.seconds:.1f} images/s)" if self.new else ""
        lines = [f"images: {self.images:,}, {self.new:,} of them now, in {self.seconds:.0f} s{rate}"]
        if self.bad:
            lines.append(f"skipped: {len(self.bad):,}")
            lines += [f"  {key} ({kind}): {reason}" for kind, key, reason in self.bad[:_EXAMPLES]]
        if len(self.bad) > _EXAMPLES:
            lines.append(f"  … all of them in {self.job.notes}")
        return "\n".join([*lines, f"written to {self.job.folder}: train on them with --regions {self.job.folder}"])


def extract_regions(
    source: Any,
    output: str | Path,
    *,
    detector: str = "torchvision",
    options: Mapping[str, Any] | None = None,
    global_model: str | None = None,
    global_weights: str | None = None,
    device: str | None = None,
    **job: Any,
) -> Report:
    """Extract the regions of a source's images by a detector named as on the command line.

    Args:
        source: images with or without captions, such as :class:`coder_plugin.data.pictures.Pictures`.
        output: folder to write. If it holds an interrupted extraction with the same options, that is resumed.
        detector: name of an entry point of ``coder_plugin.detectors``.
        options: of the detector; those that are None are ignored.
        global_model: ``timm:MODEL`` adds a feature of the whole image by a model of timm, with ``global_weights``.
        device: ``cpu``, ``cuda``, ``cuda:1`` … (default: ``cuda`` if available).
        job: further options of :class:`Job`.

    Raises:
        CoderError: see :func:`extract`; or unknown names and options.
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
        "images": source.num_images,
    }
    return extract(
        Job(
            source=source,
            detector=partial(make_detector_with_global, detector, options, model or None, global_weights),
            folder=Path(output),
            settings=settings,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            **job,
        )
    )


def extract(job: Job) -> Report:
    """Do what is left of a job; the ranks of ``accelerate launch`` or torchrun share the parts.

    Raises:
        CoderError: a folder begun with other settings, too many images that cannot be used, or a source without images.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    job.notes.mkdir(parents=True, exist_ok=True)
    start, before = time.perf_counter(), job.done()
    work(job, rank, world)
    if world > 1:
        _wait_for_ranks()
    notes = job.done()
    bad = [(kind, key, reason) for note in notes.values() for kind, key, reason in note["bad"]]
    images = sum(note["images"] for note in notes.values())
    if not images:
        example = f"; the first of {len(bad)}: {bad[0][1]!r}: {bad[0][2]}" if bad else ""
        raise CoderError(f"{job.source.name}: no image that can be used{example}")
    counted(job, notes).finish()
    if rank == 0:
        remove_all_leftovers(job.folder)
        remove_all_leftovers(job.notes)
        add_sizes(str(job.folder), {job.shard(part).name: note["images"] for part, note in notes.items() if note["images"]})
    new = sum(note["images"] for part, note in notes.items() if part not in before)
    return Report(images, bad, new, time.perf_counter() - start, job)


def work(job: Job, rank: int, world: int) -> None:
    """Do the unfinished ones of the parts ``rank``, ``rank + world``, …"""
    device = job.device
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % max(1, torch.cuda.device_count())}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    detector = job.detector(device=device)
    _begin(job, detector.checksum())
    done = job.done()
    bad = counted(job, done)
    workers = min(1, job.workers) if is_stream(job.source) else job.workers  # each worker reads all of this process's parts
    loader: DataLoader[Batch] = DataLoader(
        Batches(job, detector.preprocess, set(done), rank, world),
        batch_size=None,
        collate_fn=_identity,  # type: ignore[arg-type]  # without batch_size it receives single items
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    total = job.source.num_images if world == 1 else None
    if total is not None:
        total -= sum(note["images"] + len(note["bad"]) for note in done.values())
    with Progress(total, what="images", position=rank) as bar:

        def records(batches: Iterable[Batch], bad_of_part: list[Bad]) -> Iterator[Record]:
            for batch in batches:
                bad.add(len(batch.pictures) + len(batch.bad), batch.bad)
                bad_of_part += batch.bad
                yield from _detect(detector, batch)
                bar.update(len(batch.pictures) + len(batch.bad))

        for part, batches in groupby(loader, attrgetter("part")):
            bad_of_part: list[Bad] = []
            rest = records(batches, bad_of_part)
            images = 0
            if (first := next(rest, None)) is not None:
                images = write_shard(str(job.shard(part)), chain([first], rest))
            write_json(job.note(part), {"images": images, "bad": bad_of_part})


def counted(job: Job, notes: Mapping[int, dict[str, Any]]) -> BadSamples:
    """The bad samples of finished parts."""
    bad = BadSamples(job.source.name, job.max_bad_samples)
    for note in notes.values():
        bad.read += note["images"] + len(note["bad"])
        bad.kinds.update(kind for kind, _, _ in note["bad"])
    return bad


class Batch(NamedTuple):
    """Images of one part, prepared for the detector, and those that cannot be used."""

    part: int
    names: list[str]
    captions: list[tuple[str, ...]]
    pictures: list[Prepared]
    bad: list[Bad]


class Batches(IterableDataset[Batch]):
    """The batches of one process. The loader's workers take turns, so its batches come in the source's order."""

    def __init__(
        self, job: Job, preprocess: Callable[[Any], Prepared], skip: set[int], rank: int, world: int
    ) -> None:
        self.source, self.batch_size, self.preprocess, self.skip = job.source, job.batch_size, preprocess, skip
        self.part_size = STRIDE if is_stream(job.source) else job.shard_size
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number, (part, items) in enumerate(self._chunks()):
            if number % workers == worker:
                yield self._batch(part, items)

    def _chunks(self) -> Iterator[tuple[int, list[Any]]]:
        indexed = self.source.items(self.rank, self.world, block=self.part_size)
        for part, entries in groupby(indexed, lambda entry: entry[0] // self.part_size):
            while part not in self.skip and (chunk := [item for _, item in islice(entries, self.batch_size)]):
                yield part, chunk

    def _batch(self, part: int, items: list[Any]) -> Batch:
        batch = Batch(part, [], [], [], [])
        for item in items:
            try:
                picture = item.load()
            except (OSError, ValueError) as exc:
                batch.bad.append(describe(item.key, exc))
                continue
            batch.pictures.append(self.preprocess(picture))
            batch.names.append(item.key)
            batch.captions.append(item.captions)
        return batch


def _identity(batch: Batch) -> Batch:
    """Replaces the loader's default, which would convert all arrays to tensors."""
    return batch


def _detect(detector: Detector, batch: Batch) -> list[Record]:
    try:
        regions = detector.detect(batch.pictures) if batch.pictures else []
    except CoderError:
        raise
    except ValueError as exc:  # from Regions, such as NaN in the features
        raise CoderError(f"the detector's regions of one of {', '.join(batch.names)} are invalid: {exc}") from exc
    return [Record(*row) for row in zip(batch.names, regions, batch.captions, strict=True)]


def _begin(job: Job, checksum: str) -> None:
    """Save a job's settings in its folder, or compare them with those of the run that began it."""
    path = job.notes / "extraction.json"
    sizes = {"shard_size": job.shard_size, "batch_size": job.batch_size}
    device = job.device.partition(":")[0]  # features differ between kinds in their last bits
    settings = json.loads(json.dumps({**job.settings, **sizes, "device": device, "checksum of the weights": checksum}))
    if not path.exists():
        found = sorted(job.folder.glob(f"{glob.escape(job.split)}-{'[0-9]' * 6}.tar"))
        if found and not path.exists():  # another process may have begun
            raise CoderError(
                f"{job.folder}: has {found[0].name}, which no extraction recorded in {job.notes} wrote; choose another "
                f"folder or split, or remove split {job.split!r} there"
            )
        write_json(path, settings)
    saved = read_json(path)
    for name in sorted(set(saved) | set(settings)):
        if saved.get(name) != settings.get(name):
            old, new = ("none" if each.get(name) is None else str(each[name]) for each in (saved, settings))
            raise CoderError(
                f"{job.folder}: was begun with {name} {old}, not {new}; use the same options or another folder, or, to "
                f"start over, delete {job.notes} and the files of split {job.split!r}"
            )


def write_json(path: Path, content: Any) -> None:
    with atomic_write(path, "w") as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The file's content; a ``CoderError`` names a file that cannot be read."""
    try:
        return files.read_json(path)  # type: ignore[no-any-return]
    except CoderError as exc:
        raise CoderError(f"{exc}; delete it to extract its images again") from exc


def _wait_for_ranks() -> None:
    """Wait for a launcher's other ranks, whose parts may take hours longer."""
    import torch.distributed as dist

    initialize = not dist.is_initialized()
    if initialize:
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()
    if initialize:
        dist.destroy_process_group()
