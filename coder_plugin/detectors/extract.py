"""Pictures to regions through a detector, unit by unit, so that a run that is killed goes on where it stopped.

A unit is ``shard_size`` images in the source's order: one region shard, written aside and renamed, and then a note of
it. Units are dealt to processes in turn; a batch never crosses a unit, so nothing depends on when a run was killed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from coder_plugin.data.regions.base import Record
from coder_plugin.data.regions.precomp_write import write as write_precomp
from coder_plugin.data.regions.shards import ShardFile, write_shard
from coder_plugin.data.source import BadImages
from coder_plugin.detectors.ahead import ahead
from coder_plugin.detectors.base import Detector
from coder_plugin.detectors.batches import Batch, Batches, as_it_is
from coder_plugin.detectors.job import Job, begin, read_note, write_note
from coder_plugin.detectors.processes import meet, spawn
from coder_plugin.errors import CoderError


@dataclass(frozen=True)
class Report:
    """Images written in all, those that could not be decoded with the reasons, and this run's share and seconds."""

    images: int
    bad: list[tuple[str, str]]
    new: int
    seconds: float


def extract(job: Job, *, processes: int = 1) -> Report:
    """Do what is left of a job and return what there is then.

    ``processes`` of this machine share the units; under ``accelerate launch`` or torchrun its ranks do instead.

    Raises:
        CoderError: a folder begun with other settings (says which), too many undecodable pictures, an empty source.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and processes > 1:
        raise CoderError(f"--processes {processes} beside {world} ranks of a launcher; give one of them")
    if processes < 1:
        raise CoderError(f"--processes is {processes}; it must be 1 or more")
    job.notes.mkdir(parents=True, exist_ok=True)
    start, before = time.perf_counter(), job.done()
    if world > 1:
        work(job, rank, world)
        meet()
    elif processes > 1:
        spawn(partial(work, job), processes)
    else:
        work(job, 0, 1)
    notes = job.done()
    bad = [(key, reason) for note in notes.values() for key, reason in note["bad"]]
    images = sum(note["images"] for note in notes.values())
    if len(bad) > job.max_bad:
        raise CoderError(f"{job.source.name}: {len(bad)} images cannot be decoded, more than max_bad={job.max_bad}")
    if not images:
        raise CoderError(f"{job.source.name}: no image that can be decoded")
    if rank == 0:
        _finish(job, notes)
    new = sum(note["images"] for unit, note in notes.items() if unit not in before)
    return Report(images, bad, new, time.perf_counter() - start)


def work(job: Job, part: int, parts: int) -> None:
    """Do the units ``part``, ``part + parts``, … that are not done."""
    device = _device(job.device, part)
    detector = job.detector(device=device)
    begin(job, detector.checksum())
    done = job.done()
    bad = BadImages(job.source.name, job.max_bad)
    bad.restore([key for note in done.values() for key, _ in note["bad"]])
    loader: DataLoader[Batch] = DataLoader(
        Batches(
            job.source,
            detector.preprocess,
            shard_size=job.shard_size,
            batch_size=job.batch_size,
            skip=set(done),
            part=part,
            parts=parts,
        ),
        batch_size=None,
        collate_fn=as_it_is,  # type: ignore[arg-type]  # without batch_size it is given single items
        num_workers=job.workers,
        prefetch_factor=4 if job.workers else None,
    )
    batches = iter(loader)  # forks its workers here, before there are threads
    total = job.source.num_images if parts == 1 else None
    if total is not None:
        total -= sum(note["images"] + len(note["bad"]) for note in done.values())
    with (
        ahead(partial(_detected, detector, batches, device, torch.get_num_threads()), size=4) as found,
        tqdm(total=total, desc="regions", unit=" images", position=part, disable=None) as bar,
    ):
        flow = _Flow(found, bad, bar)
        while (unit := flow.unit) is not None:
            _write_unit(job, unit, flow)


class _Flow:
    """Detected batches, cut where a unit ends."""

    def __init__(self, found: Iterator[tuple[Batch, list[Record]]], bad: BadImages, bar: tqdm) -> None:
        self._found, self._bad, self._bar = found, bad, bar
        self._next = next(found, None)

    @property
    def unit(self) -> int | None:
        return self._next[0].unit if self._next else None

    def records(self, bad: list[tuple[str, str]]) -> Iterator[Record]:
        """The records of the unit at hand; its undecodable pictures are appended to ``bad``."""
        unit = self.unit
        while self._next and self.unit == unit:
            batch, records = self._next
            for key, reason in batch.bad:
                self._bad.add(key, reason)
            bad += batch.bad
            yield from records
            self._bar.update(len(records) + len(batch.bad))
            self._next = next(self._found, None)


def _detected(
    detector: Detector, batches: Iterator[Batch], device: str, threads: int
) -> Iterator[tuple[Batch, list[Record]]]:
    torch.set_num_threads(threads)  # OpenMP keeps the number for each of our threads, CUDA its current device
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    for batch in batches:
        try:
            regions = detector.detect(batch.pictures) if batch.pictures else []
        except CoderError:
            raise
        except ValueError as exc:  # of Regions: NaN in the features, above all
            raise CoderError(f"the detector's regions of one of {', '.join(batch.names)} are no good: {exc}") from exc
        yield (
            batch._replace(pictures=[]),
            [Record(*each) for each in zip(batch.names, regions, batch.captions, strict=True)],
        )


def _write_unit(job: Job, unit: int, flow: _Flow) -> None:
    """The shard of a unit, if any of its pictures could be decoded, and then the note that it is done."""
    bad: list[tuple[str, str]] = []
    records = flow.records(bad)
    images = 0
    if (first := next(records, None)) is not None:
        images = write_shard(str(job.shard(unit)), chain([first], records))
    write_note(job.note(unit), {"images": images, "bad": bad})


def _finish(job: Job, notes: dict[int, dict[str, Any]]) -> None:
    """What is made of all units: the note of the shards' sizes, or the precomp split; and what killed runs left goes."""
    leftovers = (f".{job.split}-*.writing", f".{job.split}.*.part", ".sizes.json.*.writing")
    for path in [*job.notes.glob(".*.writing"), *chain.from_iterable(map(job.folder.glob, leftovers))]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if job.to == "shards":
        sizes = {job.shard(unit).name: note["images"] for unit, note in notes.items() if note["images"]}
        path = job.folder / "sizes.json"
        write_note(path, {**(read_note(path) if path.exists() else {}), **sizes})
        return
    if not job.precomp.exists():
        for path in job.results():  # of a run that was killed while it gave the files their names
            path.unlink()
        write_note(job.settings_file, {**read_note(job.settings_file), "captions_per_image": job.captions_per_image})
        file = ShardFile(str(job.shards), split=job.split)
        records = (Record(name, file[name], file.captions.get(name, ())[: job.captions_per_image]) for name in file)
        bar = tqdm(records, total=len(file), desc="precomp", disable=None)
        write_precomp(str(job.folder), bar, split=job.split)
    for unit in notes:
        job.shard(unit).unlink(missing_ok=True)


def _device(name: str, part: int) -> str:
    if name != "cuda":
        return name
    local = int(os.environ.get("LOCAL_RANK", part))
    return f"cuda:{local % max(1, torch.cuda.device_count())}"
