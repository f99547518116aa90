"""What an extraction is asked to do, and what its folder says of it: settings, and a note for each unit that is done."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder_plugin.data.regions.precomp_write import ENDINGS
from coder_plugin.detectors.base import Detector
from coder_plugin.errors import CoderError

TO = ("shards", "precomp")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is extracted from what, and where it goes; it can be pickled, for processes.

    Args:
        source: whose pictures; its captions travel along.
        detector: ``detector(device=…)``, called in each process.
        folder: of the result: shards ``{split}-000000.tar`` …, or a precomp folder, which is written from shards when
            all are there. Below it is ``{split}.extraction``: the settings, a note for each unit, and precomp's shards.
        settings: what a restart must agree with, as JSON values.
        shard_size, batch_size: images of a unit and of a call of the detector.
        workers: processes that decode, for each process that detects; 0: none.
        device: ``cuda`` gives process i the device i modulo their number.
        max_bad: pictures that may be undecodable.
        captions_per_image: keep the first so many in a precomp folder, where all must have equally many. It may still
            change when all is extracted and the split could not be written for want of it.
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
    max_bad: int = 100
    captions_per_image: int | None = None

    def __post_init__(self) -> None:
        if self.to not in TO:
            raise CoderError(f"--to is {self.to!r}; it must be one of {', '.join(TO)} (convert makes others of these)")
        for name, least in (
            ("shard_size", 1),
            ("batch_size", 1),
            ("workers", 0),
            ("max_bad", 0),
            ("captions_per_image", 1),
        ):
            if (value := getattr(self, name)) is not None and value < least:
                raise CoderError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
        if self.captions_per_image is not None and self.to != "precomp":
            raise CoderError(f"--captions-per-image is of --to precomp; --to {self.to} keeps all captions")

    @property
    def notes(self) -> Path:
        return self.folder / f"{self.split}.extraction"

    @property
    def shards(self) -> Path:
        return self.folder if self.to == "shards" else self.notes

    def note(self, unit: int) -> Path:
        return self.notes / f"{unit:06d}.json"

    def shard(self, unit: int) -> Path:
        return self.shards / f"{self.split}-{unit:06d}.tar"

    @property
    def precomp(self) -> Path:
        """The last file that writing a precomp split makes."""
        return self.folder / f"{self.split}_{ENDINGS[0]}"

    @property
    def settings_file(self) -> Path:
        return self.notes / "extraction.json"

    def results(self) -> list[Path]:
        """The files of the split that are there, whoever wrote them."""
        if self.to == "shards":
            return sorted(self.folder.glob(f"{glob.escape(self.split)}-{'[0-9]' * 6}.tar"))
        return [path for ending in ENDINGS if (path := self.folder / f"{self.split}_{ending}").exists()]

    def done(self) -> dict[int, dict[str, Any]]:
        """The notes of the units that are finished."""
        notes = {int(path.stem): read_note(path) for path in sorted(self.notes.glob("[0-9]*.json"))}
        return {unit: note for unit, note in notes.items() if not note["images"] or self._there(unit)}

    def _there(self, unit: int) -> bool:
        # in this order: another rank may be turning the shards into precomp files
        return self.shard(unit).exists() or self.to == "precomp" and self.precomp.exists()


def begin(job: Job, checksum: str) -> None:
    """Note a job's settings in its folder, or compare them with those of the run that began it."""
    path = job.settings_file
    sizes = {"shard_size": job.shard_size, "batch_size": job.batch_size, "to": job.to}
    device = {"device": job.device.partition(":")[0]}  # numbers differ in their last bits
    captions = {"captions_per_image": job.captions_per_image}
    content = {**job.settings, **sizes, **device, **captions, "checksum of the weights": checksum}
    settings = json.loads(json.dumps(content))
    if not path.exists():
        there = job.results()
        if there and not path.exists():  # another process may have begun
            raise CoderError(
                f"{job.folder}: has {there[0].name}, of no extraction that is noted in {job.notes}; give another folder "
                f"or split, or remove split {job.split!r} there"
            )
        write_note(path, settings)
    known = read_note(path)
    free = set() if job.precomp.exists() else set(captions)  # nothing is made of them before the split is written
    for name in sorted((set(known) | set(settings)) - free):
        if known.get(name) != settings.get(name):
            raise CoderError(
                f"{job.folder}: was begun with {name} {_told(known.get(name))}, not {_told(settings.get(name))}; "
                f"give the same options, another folder, or, to begin anew, delete {job.notes} and the files of split "
                f"{job.split!r}"
            )


def _told(value: Any) -> str:
    return "none" if value is None else str(value)


def write_note(path: Path, content: Any) -> None:
    """A JSON file, whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def read_note(path: Path) -> dict[str, Any]:
    """Its content; a CoderError names a file that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise CoderError(f"{path}: cannot be read: {exc}; delete it to have its images extracted again") from exc
