"""Extract regions from pictures, unit by unit, so that a killed run can be resumed.

A unit is ``shard_size`` images in the source's order: one region shard, written atomically, and then a note that it is done.
Of data with remote shards a unit is one of these, so that each is fetched once.
Units are dealt to processes in turn, and a batch never crosses units, so the result does not depend on interruptions.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from coder_plugin import files
from coder_plugin.data.bad_samples import DEFAULT_RATE, Bad, BadSamples, check_rate, describe
from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.precomp_write import ENDINGS
from coder_plugin.data.regions.precomp_write import write as write_precomp
from coder_plugin.data.regions.shards import SIZES, ShardFile, write_shard
from coder_plugin.data.source import is_stream
from coder_plugin.data.streams import STRIDE
from coder_plugin.detectors.base import Detector, Prepared
from coder_plugin.detectors.global_features import make_detector_with_global
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write
from coder_plugin.progress import Progress, track

_T = TypeVar("_T")
_R = TypeVar("_R")
_LAYOUTS = ("shards", "precomp")
_EXAMPLES = 10  # bad samples that the report lists


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is extracted from where to where. It can be pickled for other processes.

    Args:
        source: the images; their captions are written too.
        detector: ``detector(device=…)``, called in each process.
        folder: where shards ``{split}-000000.tar`` … or a precomp split are written. Its subfolder ``{split}.extraction``
            holds the settings, a note for each unit that is done, and the shards from which a precomp split is written.
        settings: JSON values that a resumed run must agree with.
        shard_size, batch_size: images of a unit, and of a call of the detector.
        workers: decoding processes for each detecting process; 0: none.
        device: ``cuda`` gives process i the device i modulo their number.
        max_bad_samples: allowed fraction of images that cannot be used.
        captions_per_image: keep the first so many in a precomp split, where all images need the same number. It may change
            between runs until the split is written.

    Raises:
        CoderError: a value out of range.
    """

    source: Any
    detector: Callable[..., Detector]
    folder: Path
    to: str = "shards"
    split: str = "train"
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: int = 1000
    batch_size: int = 8
    workers: int = 2
    device: str = "cpu"
    max_bad_samples: float = DEFAULT_RATE
    captions_per_image: int | None = None

    def __post_init__(self) -> None:
        if self.to not in _LAYOUTS:
            raise CoderError(f"--to is {self.to!r}; it must be one of {', '.join(_LAYOUTS)}")
        minima = {"shard_size": 1, "batch_size": 1, "workers": 0, "captions_per_image": 1}
        check_rate(self.max_bad_samples)
        for name, least in minima.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise CoderError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
        if self.captions_per_image is not None and self.to != "precomp":
            raise CoderError(f"--captions-per-image needs --to precomp; --to {self.to} keeps all captions")

    @property
    def notes(self) -> Path:
        return self.folder / f"{self.split}.extraction"

    @property
    def settings_file(self) -> Path:
        return self.notes / "extraction.json"

    @property
    def shards(self) -> Path:
        return self.folder if self.to == "shards" else self.notes

    @property
    def precomp(self) -> Path:
        """The file of a precomp split that is renamed last."""
        return self.folder / f"{self.split}_{ENDINGS[0]}"

    def note(self, unit: int) -> Path:
        return self.notes / f"{unit:06d}.json"

    def shard(self, unit: int) -> Path:
        return self.shards / f"{self.split}-{unit:06d}.tar"

    def results(self) -> list[Path]:
        """The existing files of the split, whoever wrote them."""
        if self.to == "shards":
            return sorted(self.folder.glob(f"{glob.escape(self.split)}-{'[0-9]' * 6}.tar"))
        return [path for ending in ENDINGS if (path := self.folder / f"{self.split}_{ending}").exists()]

    def done(self) -> dict[int, dict[str, Any]]:
        """The notes of the finished units."""
        notes = {int(path.stem): read_json(path) for path in sorted(self.notes.glob("[0-9]*.json"))}
        return {unit: note for unit, note in notes.items() if not note["images"] or self._has_result(unit)}

    def _has_result(self, unit: int) -> bool:
        # in this order: another rank may be converting the shards to precomp files
        return self.shard(unit).exists() or self.to == "precomp" and self.precomp.exists()


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
        lines = [f"images: {self.images}, {self.new} of them now, in {self.seconds:.1f} s{rate}"]
        if self.bad:
            lines.append(f"skipped: {len(self.bad)}")
            lines += [f"  {key} ({kind}): {reason}" for kind, key, reason in self.bad[:_EXAMPLES]]
            if len(self.bad) > _EXAMPLES:
                lines.append(f"  … and {len(self.bad) - _EXAMPLES} more: {self.job.notes}")
        return "\n".join([*lines, f"written: {self.job.folder}, settings in {self.job.settings_file}"])


def extract_regions(
    source: Any,
    output: str | Path,
    *,
    detector: str = "torchvision",
    options: Mapping[str, Any] | None = None,
    global_model: str | None = None,
    global_weights: str | None = None,
    device: str | None = None,
    processes: int = 1,
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
        processes: processes of this machine that share the work.
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
        ),
        processes=processes,
    )


def extract(job: Job, *, processes: int = 1) -> Report:
    """Do what is left of a job.

    ``processes`` of this machine share the units; under ``accelerate launch`` or torchrun, its ranks do.

    Raises:
        CoderError: a folder begun with other settings, too many images that cannot be used, or a source without images.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and processes > 1:
        raise CoderError(f"--processes {processes} with {world} ranks of a launcher; use one of them")
    if processes < 1:
        raise CoderError(f"--processes is {processes}; it must be 1 or more")
    job.notes.mkdir(parents=True, exist_ok=True)
    start, before = time.perf_counter(), job.done()
    if world > 1:
        work(job, rank, world)
        _wait_for_ranks()
    elif processes > 1:
        _spawn(job, processes)
    else:
        work(job, 0, 1)
    notes = job.done()
    bad = [(kind, key, reason) for note in notes.values() for kind, key, reason in note["bad"]]
    images = sum(note["images"] for note in notes.values())
    if not images:
        example = f"; the first of {len(bad)}: {bad[0][1]!r}: {bad[0][2]}" if bad else ""
        raise CoderError(f"{job.source.name}: no image that can be used{example}")
    counted(job, notes).finish()
    if rank == 0:
        _finish(job, notes)
    new = sum(note["images"] for unit, note in notes.items() if unit not in before)
    return Report(images, bad, new, time.perf_counter() - start, job)


def work(job: Job, part: int, parts: int) -> None:
    """Do the unfinished ones of the units ``part``, ``part + parts``, …"""
    device = job.device
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', part)) % max(1, torch.cuda.device_count())}"
    detector = job.detector(device=device)
    _begin(job, detector.checksum())
    done = job.done()
    bad = counted(job, done)
    total = job.source.num_images if parts == 1 or not is_stream(job.source) else None  # of shards it reads their headers
    workers = min(1, job.workers) if is_stream(job.source) else job.workers  # each worker reads all of this process's units
    loader: DataLoader[Batch] = DataLoader(
        Batches(job.source, detector.preprocess, job.shard_size, job.batch_size, set(done), part, parts),
        batch_size=None,
        collate_fn=_identity,  # type: ignore[arg-type]  # without batch_size it receives single items
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    batches = iter(loader)  # starts the workers before there are threads
    if total is not None and parts == 1:
        total -= sum(note["images"] + len(note["bad"]) for note in done.values())
    threads = torch.get_num_threads()

    def start_thread() -> None:
        torch.set_num_threads(threads)  # OpenMP's threads and CUDA's current device are set for each thread
        if device.startswith("cuda"):
            torch.cuda.set_device(device)

    with (
        closing(run_ahead(partial(_detect, detector), batches, size=4, initializer=start_thread)) as detected,
        Progress(total, what="images", position=part) as bar,
    ):

        def records(unit_batches: Iterable[Batch], bad_of_unit: list[Bad]) -> Iterator[Record]:
            for batch in unit_batches:
                bad.add(len(batch.records) + len(batch.bad), batch.bad)
                bad_of_unit += batch.bad
                yield from batch.records
                bar.update(len(batch.records) + len(batch.bad))

        for unit, unit_batches in groupby(detected, attrgetter("unit")):
            bad_of_unit: list[Bad] = []
            rest = records(unit_batches, bad_of_unit)
            images = 0
            if (first := next(rest, None)) is not None:
                images = write_shard(str(job.shard(unit)), chain([first], rest))
            write_json(job.note(unit), {"images": images, "bad": bad_of_unit})


def counted(job: Job, notes: Mapping[int, dict[str, Any]]) -> BadSamples:
    """The bad samples of finished units."""
    bad = BadSamples(job.source.name, job.max_bad_samples)
    for note in notes.values():
        bad.read += note["images"] + len(note["bad"])
        bad.kinds.update(kind for kind, _, _ in note["bad"])
    return bad


class Batch(NamedTuple):
    """Images of one unit: prepared for the detector, or as records with their regions; and those that cannot be used."""

    unit: int
    names: list[str]
    captions: list[tuple[str, ...]]
    pictures: list[Prepared]
    bad: list[Bad]
    records: list[Record]


class Batches(IterableDataset[Batch]):
    """The batches of one process. The loader's workers take turns, so its batches come in the source's order."""

    def __init__(
        self,
        source: Any,
        preprocess: Callable[[Any], Prepared],
        shard_size: int,
        batch_size: int,
        skip: set[int],
        part: int,
        parts: int,
    ) -> None:
        self.source, self.unit, self.batch_size = source, STRIDE if is_stream(source) else shard_size, batch_size
        self.preprocess, self.skip, self.part, self.parts = preprocess, skip, part, parts

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number, (unit, items) in enumerate(self._chunks()):
            if number % workers == worker:
                yield self._batch(unit, items)

    def _chunks(self) -> Iterator[tuple[int, list[Any]]]:
        indexed = self.source.items(self.part, self.parts, block=self.unit)
        for unit, entries in groupby(indexed, lambda entry: entry[0] // self.unit):
            if unit in self.skip:
                continue
            chunk: list[Any] = []
            for _, item in entries:
                if len(chunk) == self.batch_size:
                    yield unit, chunk
                    chunk = []
                chunk.append(item)
            yield unit, chunk

    def _batch(self, unit: int, items: list[Any]) -> Batch:
        batch = Batch(unit, [], [], [], [], [])
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


def _detect(detector: Detector, batch: Batch) -> Batch:
    try:
        regions = detector.detect(batch.pictures) if batch.pictures else []
    except CoderError:
        raise
    except ValueError as exc:  # from Regions, such as NaN in the features
        raise CoderError(f"the detector's regions of one of {', '.join(batch.names)} are invalid: {exc}") from exc
    rows = zip(batch.names, regions, batch.captions, strict=True)
    return batch._replace(pictures=[], records=[Record(*row) for row in rows])


def run_ahead(
    function: Callable[[_T], _R], items: Iterable[_T], *, size: int, initializer: Callable[[], None] | None = None
) -> Generator[_R, None, None]:
    """``map(function, items)`` in one background thread, up to ``size`` items ahead of their use.

    An exception is raised in the place of its item. Closing the iterator ends the thread after the item in progress.
    """
    pending: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead", initializer=initializer) as executor:
        try:
            for item in items:
                pending.append(executor.submit(function, item))
                if len(pending) > size:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)


def _begin(job: Job, checksum: str) -> None:
    """Save a job's settings in its folder, or compare them with those of the run that began it."""
    path = job.settings_file
    sizes = {"shard_size": job.shard_size, "batch_size": job.batch_size, "to": job.to}
    device = {"device": job.device.partition(":")[0]}  # features differ between kinds in their last bits
    captions = {"captions_per_image": job.captions_per_image}
    content = {**job.settings, **sizes, **device, **captions, "checksum of the weights": checksum}
    settings = json.loads(json.dumps(content))
    if not path.exists():
        results = job.results()
        if results and not path.exists():  # another process may have begun
            raise CoderError(
                f"{job.folder}: has {results[0].name}, which no extraction recorded in {job.notes} wrote; choose another "
                f"folder or split, or remove split {job.split!r} there"
            )
        write_json(path, settings)
    saved = read_json(path)
    changeable = set() if job.precomp.exists() else set(captions)  # used only when the split is written
    for name in sorted((set(saved) | set(settings)) - changeable):
        old, new = ("none" if each.get(name) is None else str(each[name]) for each in (saved, settings))
        if saved.get(name) != settings.get(name):
            raise CoderError(
                f"{job.folder}: was begun with {name} {old}, not {new}; use the same options or another folder, or, to "
                f"start over, delete {job.notes} and the files of split {job.split!r}"
            )


def _finish(job: Job, notes: dict[int, dict[str, Any]]) -> None:
    """Write the shards' sizes or the precomp split, and delete what killed runs left."""
    leftovers = (f".{job.split}-*.writing", f".{job.split}.*.part", f".{SIZES}.*.writing")
    for path in [*job.notes.glob(".*.writing"), *chain.from_iterable(map(job.folder.glob, leftovers))]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if job.to == "shards":
        sizes = {job.shard(unit).name: note["images"] for unit, note in notes.items() if note["images"]}
        path = job.folder / SIZES
        write_json(path, {**(read_json(path) if path.exists() else {}), **sizes})
        return
    if not job.precomp.exists():
        for path in job.results():  # of a run that was killed while it renamed the files
            path.unlink()
        write_json(job.settings_file, {**read_json(job.settings_file), "captions_per_image": job.captions_per_image})
        file = ShardFile(str(job.shards), split=job.split)
        records = (Record(name, file[name], file.captions.get(name, ())[: job.captions_per_image]) for name in file)
        write_precomp(str(job.folder), track(records, len(file), what="images written"), split=job.split)
    for unit in notes:
        job.shard(unit).unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    with atomic_write(path, "w") as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The file's content; a ``CoderError`` names a file that cannot be read."""
    try:
        return files.read_json(path)
    except CoderError as exc:
        raise CoderError(f"{exc}; delete it to extract its images again") from exc


def _spawn(job: Job, processes: int) -> None:
    """:func:`work` for each part in a process of its own; the first that fails ends the others.

    Processes started by torch's spawn end with their parent, so nothing goes on writing after a kill.
    """
    import torch.multiprocessing as mp

    errors = mp.get_context("spawn").SimpleQueue()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else processes
    try:
        mp.spawn(_run_part, args=(job, processes, max(1, cores // processes), errors), nprocs=processes)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as exc:
        if not errors.empty():
            raise CoderError(errors.get()) from exc
        raise


def _run_part(part: int, job: Job, processes: int, threads: int, errors: Any) -> None:
    torch.set_num_threads(threads)
    try:
        work(job, part, processes)
    except CoderError as exc:
        errors.put(str(exc))
        raise


def _wait_for_ranks() -> None:
    """Wait for a launcher's other ranks, whose units may take hours longer."""
    import torch.distributed as dist

    initialize = not dist.is_initialized()
    if initialize:
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()
    if initialize:
        dist.destroy_process_group()
