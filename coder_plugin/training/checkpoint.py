"""Checkpoints: files of ``torch.save`` and a manifest with their checksums, in a folder that is renamed when it is complete.

::

    manifest.json     step, epoch, options and results; SHA-256 and size of each other file
    state.pt          what all ranks share: model, optimizer, schedule, weight average
    rank0.pt, …       what each rank has of its own: random states, position in the data

A file is read only after its checksum was compared, and with ``torch.load(weights_only=True)``, which runs no code. One run
at a time writes into a folder (:func:`coder_plugin.training.disk.run_lock`), and all its ranks see the same file system.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coder_plugin import distributed
from coder_plugin.distributed import on_every_rank, on_first_rank
from coder_plugin.errors import CoderError
from coder_plugin.files import (
    move_into,
    read_json,
    remove_folder,
    replace_folder,
    sha256_file,
    sha256_json,
    temporary_path,
)

State = dict[str, Any]
FORMAT = 2
_MANIFEST = "manifest.json"
_AGE = ("step", "epoch", "saved_at")
_HOLDS = "a checkpoint holds tensors, numbers, texts, and dicts, lists and tuples of them"
_log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint whose manifest has been read; its other files have not been checked."""

    path: Path
    manifest: State


def save(directory: Path, name: str, *, manifest: Mapping[str, Any], common: State, own: State | None = None) -> Path:
    """Write ``directory/name``, in place of a checkpoint of that name. Call it on every rank; if one fails, all raise.

    Args:
        directory: the run's checkpoints.
        name: of the checkpoint.
        manifest: plain JSON with an integer ``step``.
        common: what all ranks share; rank 0 writes it.
        own: what only this rank has.

    Raises:
        CoderError: a state that could not be read again, or another rank's failure.
        OSError: the disk's.

    Example:
        >>> import tempfile
        >>> path = save(Path(tempfile.mkdtemp()), "step_3", manifest={"step": 3}, common={"weight": torch.ones(2)})
        >>> load(path)[1]
        {'weight': tensor([1., 1.])}
    """
    temporary = Path(distributed.gather_objects(str(temporary_path(directory / name)))[0])
    parts = {f"rank{distributed.rank()}.pt": own or {}}
    if distributed.rank() == 0:
        parts["state.pt"] = common
    try:
        on_first_rank(lambda: temporary.mkdir(parents=True))
        written = on_every_rank(lambda: {file: _write(temporary / file, state) for file, state in parts.items()})
        files = {file: record for each in written for file, record in each.items()}
        on_first_rank(lambda: _commit(temporary, directory / name, {**manifest, "files": files}))
    finally:
        if distributed.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory / name


def load(path: Path, *, verify: bool = True) -> tuple[State, State]:
    """A checkpoint's manifest, and the state that all ranks share, on the CPU.

    Args:
        path: its folder.
        verify: compare the checksum; not needed after :func:`verify`.

    Raises:
        CoderError: a file is missing, damaged, or holds something else than a checkpoint does.
    """
    manifest = _read_manifest(path)
    _check_file(path, "state.pt", manifest, verify)
    return manifest, _read(path / "state.pt")


def load_rank(path: Path, rank: int, *, verify: bool = True) -> State:
    """What a rank of the run that saved a checkpoint had of its own; as :func:`load`."""
    _check_file(path, f"rank{rank}.pt", _read_manifest(path), verify)
    return _read(path / f"rank{rank}.pt")


def read_model(path: Path) -> State:
    """The model's weights and buffers in a checkpoint, memory-mapped: its checksum is not compared."""
    model = _read(path / "state.pt", mmap=True).get("model")
    if not isinstance(model, dict):
        raise CoderError(f"{path / 'state.pt'} holds no model")
    return model


def verify(path: Path, *, checksums: bool = True) -> State:
    """The manifest of a checkpoint, after all files were compared with it; CoderError if one is damaged.

    Args:
        path: its folder.
        checksums: otherwise only sizes are compared.
    """
    manifest = _read_manifest(path)
    for name in manifest["files"]:
        _check_file(path, name, manifest, checksums)
    return manifest


def checkpoints(directory: Path, *, problems: list[str] | None = None) -> list[Checkpoint]:
    """All checkpoints, latest step first (then epoch, then time).

    For each without a readable manifest a warning is logged or, if a list is given, an entry added to ``problems``.
    """
    readable = []
    for path in _folders(directory):
        with _skipping(problems):
            readable.append(Checkpoint(path, _read_manifest(path)))
    return sorted(readable, key=lambda each: [each.manifest.get(name) or 0 for name in _AGE], reverse=True)


def newest(directory: Path, *, problems: list[str] | None = None) -> Path | None:
    """The latest complete checkpoint. Damaged ones are skipped, with a warning or an entry as in :func:`checkpoints`."""
    for each in checkpoints(directory, problems=problems):
        with _skipping(problems):
            verify(each.path)
            return each.path
    return None


def prune(directory: Path, keep: Iterable[str]) -> list[str]:
    """Remove all checkpoints but those in ``keep``, and return their names. Call it on one rank, between saves.

    Nothing is removed unless one of ``keep`` has all its files, nor what has no readable manifest.
    """
    kept, found, whole = set(keep), [each.path for each in checkpoints(directory)], []
    for path in found:
        if path.name in kept:
            with _skipping(None):
                whole.append(verify(path, checksums=False))
    removed = [path for path in found if whole and path.name not in kept]
    for path in removed:
        remove_folder(path)
    return [path.name for path in removed]


def set_aside(directory: Path, target: Path, *, after: int) -> list[str]:
    """Move the checkpoints of steps after ``after``, damaged ones too, into the folder ``target``, and return their names.

    A run that goes on from an older checkpoint calls it, so that the newest checkpoint is its own.
    """
    steps = {each.path: each.manifest["step"] for each in checkpoints(directory, problems=[])}
    moved = []
    for path in _folders(directory):
        digits = re.search(r"\d+$", path.name)  # of a damaged checkpoint, its name has the step
        if steps.get(path, int(digits[0]) if digits else 0) > after:
            move_into(target, path)
            moved.append(path.name)
    return moved


def _folders(directory: Path) -> list[Path]:
    """Folders of checkpoints; also one that was being replaced when the run was killed, before the new one had its name."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        replaced = path.name.startswith(".") and path.name.endswith(".old") and not (directory / path.name[1:-4]).exists()
        if path.is_dir() and not path.is_symlink() and (replaced or not path.name.startswith(".")):
            found.append(path)
    return found


@contextlib.contextmanager
def _skipping(problems: list[str] | None) -> Iterator[None]:
    try:
        yield
    except (CoderError, OSError) as error:
        if problems is None:
            _log.warning("skipped a checkpoint: %s", error)
        else:
            problems.append(str(error))


def _write(path: Path, state: State) -> dict[str, Any]:
    """Write a rank's file, and return its record in the manifest."""
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise CoderError(f"{path.name} cannot be saved: {error}; {_HOLDS}") from error
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # the disk's, which torch's error hides
            raise error.__context__ from error
        raise
    _read(path, mmap=True)  # what could not be read again must not be found when the run is resumed
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def _commit(temporary: Path, final: Path, fields: Mapping[str, Any]) -> None:
    manifest = {**fields, "format": FORMAT, "world_size": distributed.world_size(), "saved_at": time.time()}
    try:
        manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as it will be read: tuples become lists
    except (TypeError, ValueError, RecursionError) as error:
        raise CoderError(f"a checkpoint's manifest is plain JSON; other values belong in its state: {error}") from error
    sealed = {**manifest, "manifest_sha256": sha256_json(manifest)}
    check_manifest(sealed)
    (temporary / _MANIFEST).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    replace_folder(temporary, final)


def _read_manifest(path: Path) -> State:
    file = path / _MANIFEST
    if not file.is_file():
        raise CoderError(f"{file} is missing: {path} is not a complete checkpoint")
    manifest = read_json(file)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version != FORMAT:
        raise CoderError(f"{file} has format {version}, from another version of coder_plugin; this one reads {FORMAT}")
    try:
        check_manifest(manifest)
    except CoderError as error:
        raise CoderError(f"{file} is not the manifest of a coder_plugin checkpoint: {error}") from error
    content = {field: value for field, value in manifest.items() if field != "manifest_sha256"}
    if sha256_json(content) != manifest["manifest_sha256"]:
        raise CoderError(f"{file} was altered after it was written")
    return manifest


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_record(value: Any, **kinds: type) -> bool:
    """Whether a value is an object in which each of these fields that is present has its kind."""
    return isinstance(value, dict) and all(isinstance(value.get(name, kind()), kind) for name, kind in kinds.items())


def _are_results(value: Any) -> bool:
    return _is_record(value, shortlist=dict, checkpoint=str) and (
        not value or all(_is_number(value.get(name)) for name in ("rsum", "epoch", "step"))
    )


#: What a training run writes in each field of a manifest; those of the second part may be absent.
_REQUIRED: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: value == FORMAT,
    "step": _is_count,
    "world_size": lambda value: _is_count(value) and 0 < value < 2**20,
    "saved_at": _is_number,
    "files": lambda value: isinstance(value, dict),
    "manifest_sha256": lambda value: isinstance(value, str),
}
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "epoch": _is_number,
    "samples_per_epoch": _is_count,
    "seconds": _is_number,
    **dict.fromkeys(("last", "best", "before"), _are_results),
    "objective": lambda value: _is_record(value, terms=list, heads=dict),
    "zero_shot": lambda value: _is_record(value) and all(map(_is_number, value.values())),
    "changes": lambda value: isinstance(value, list),
    **dict.fromkeys(("config", "backbone", "versions"), _is_record),
}


def check_manifest(manifest: Any) -> None:
    """Check a manifest's fields. A checksum finds damage; anybody can write a manifest whose checksums match.

    Raises:
        CoderError: it does not have the fields of a training run's manifest.
    """
    if not isinstance(manifest, dict):
        raise CoderError("it is not an object")
    present = {name: check for name, check in _OPTIONAL.items() if name in manifest}
    for name, check in {**_REQUIRED, **present}.items():
        if not check(manifest.get(name)):
            raise CoderError(f"its {name!r} is {str(manifest.get(name))[:80]!r}")
    expected = {"state.pt", *(f"rank{rank}.pt" for rank in range(manifest["world_size"]))}
    records = manifest["files"].values()
    if manifest["files"].keys() != expected or not all(isinstance(each, dict) for each in records):
        raise CoderError(f"its 'files' are {', '.join(sorted(manifest['files'])[:4])[:80]}")


def _check_file(path: Path, name: str, manifest: State, checksum: bool) -> None:
    file, record = path / name, manifest["files"].get(name)
    if record is None:
        raise CoderError(f"{path} was saved by {manifest['world_size']} processes and has no {name}")
    if not file.is_file():
        raise CoderError(f"{file} is missing")
    if (size := file.stat().st_size) != record.get("bytes"):
        raise CoderError(f"{file} has {size} bytes, not the {record.get('bytes')} that were written")
    if checksum and sha256_file(file) != record.get("sha256"):
        raise CoderError(f"{file} is damaged: its sha256 is not the one in the manifest")


def _read(file: Path, *, mmap: bool = False) -> State:
    """The state in a file: tensors on the CPU; with ``mmap`` they are read when they are used."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind, for a file that is not torch's
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"it names {named[1]}, which reading it could run" if named else f"{type(error).__name__}: {error}"
        raise CoderError(f"{file} is refused: {' '.join(found.split())[:300]}; {_HOLDS}") from error
    if not isinstance(state, dict):
        raise CoderError(f"{file} is refused: it is a {type(state).__name__}; {_HOLDS}")
    return state
