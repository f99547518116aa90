"""Checkpoints that never unpickle: safetensors and JSON files under a manifest that holds their checksums.

Loading a pickle runs its code, so no file is a pickle (see :mod:`coder_plugin.training.serialization`). A run can be killed
at any moment. So a checkpoint is written to a temporary folder, flushed to the disk and renamed: a folder with a
checkpoint's name is complete. Later damage is detected by checksum before anything is used. Hidden folders next to a
checkpoint ``last``, which the next save cleans up:

    .last.writing        not finished
    .last.old            the copy being replaced; used as ``last`` if the run was killed between the two renames
    .last-….removing     partly removed

One run at a time writes into a directory, and all its ranks see the same file system.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from coder_plugin.errors import CoderError
from coder_plugin.files import fsync_path, read_json, sha256_file, sha256_json
from coder_plugin.training.failures import PeerError
from coder_plugin.training.saved_state import check_manifest
from coder_plugin.training.serialization import pack, unpack

State = dict[str, Any]
StrPath = str | os.PathLike[str]
FORMAT = 1
#: Most bytes of the description of a part.
_MOST_BYTES = 1 << 30
_MANIFEST = "manifest.json"
_RESERVED = frozenset({"format", "world_size", "saved_at", "files", "manifest_sha256"})  # manifest fields that `save` writes
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
_PART = re.compile(r"(?!manifest$)(?!.*-rank\d+$)[A-Za-z0-9_][A-Za-z0-9_-]*")
_FILE = re.compile(r"(?P<part>[A-Za-z0-9_][A-Za-z0-9_-]*)\.(json|safetensors)")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<state>writing|old|removing)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read; its other files have not been checked."""

    path: Path
    manifest: State


def save(
    directory: StrPath,
    name: str,
    *,
    manifest: Mapping[str, Any],
    common: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] = lambda: None,
) -> Path:
    """Write ``directory/name``. Every rank calls this, and every rank raises if one of them fails.

    A checkpoint that already has this name is replaced.

    Args:
        manifest: plain JSON with an integer ``step``.
        common: state that is equal on all ranks, by part name; rank 0 writes it.
        own: this rank's state (random states, loader position), by part name; written as ``{part}-rank{rank}``.
        barrier: waits for all ranks.

    Raises:
        CoderError: a name or a state that cannot be saved, or another rank's failure.
    """
    directory = Path(directory)
    errors: list[Exception] = []

    def phase(work: Callable[[], object]) -> None:
        """Run ``work`` unless something failed, and reach the barrier in any case: no rank waits for one that failed."""
        try:
            if not errors:
                work()
        except Exception as error:
            errors.append(error)
        barrier()

    temporary = directory / f".{name}.writing"
    parts = dict(common or {}) if rank == 0 else {}
    # after this first barrier no rank still reads the result of the previous save
    phase(lambda: _check_request(name, manifest, [*(common or {}), *(own or {})], rank, world_size))
    phase(lambda: _prepare(directory, name) if rank == 0 else None)
    phase(lambda: _write(temporary, parts | {f"{part}-rank{rank}": tree for part, tree in (own or {}).items()}, rank))
    phase(lambda: _commit(directory, name, manifest, world_size) if rank == 0 else None)
    if errors:
        raise errors[0]
    if temporary.exists():
        raise PeerError(f"the checkpoint {name!r} was not written; another rank's error says why")
    return directory / name


def load(path: StrPath, *, rank: int = 0, verify: bool = True) -> tuple[State, State, State | None]:
    """Read a checkpoint: (manifest, common parts, this rank's parts). All files are checked before any is used.

    Args:
        verify: compare checksums; otherwise only names and sizes.

    Returns:
        This rank's parts are None if the saving run had no such rank. ``manifest["world_size"]`` says how many ranks it had.

    Raises:
        CoderError: a file is missing or damaged.
    """
    path = find(path)
    manifest = _read_manifest(path)
    _verify(path, manifest, verify)
    common, own = {}, {}
    for part in dict.fromkeys(file.split(".")[0] for file in manifest["files"]):
        ranked = re.fullmatch(r"(.+)-rank(\d+)", part)
        if not ranked:
            common[part] = _read(path, part)
        elif int(ranked[2]) == rank:
            own[ranked[1]] = _read(path, part)
    return manifest, common, own if rank < manifest["world_size"] else None


def find(path: StrPath) -> Path:
    """The folder of a checkpoint: ``path``, or the replaced copy if the run was killed before its successor was in place."""
    path = Path(path)
    old = path.parent / f".{path.name}.old"
    return old if not path.exists() and old.is_dir() else path


def read_part(path: StrPath, part: str) -> Any:
    """One part of a checkpoint that :func:`load` has checked; a rank's own part is named ``{part}-rank{rank}``."""
    return _read(Path(path), part)


def verify(path: StrPath) -> State:
    """The manifest of a checkpoint, after comparing all files with their checksums; CoderError if one is damaged."""
    manifest = _read_manifest(Path(path))
    _verify(Path(path), manifest, True)
    return manifest


def checkpoints(directory: StrPath, *, problems: list[str] | None = None) -> list[Checkpoint]:
    """All checkpoints, latest step first (then epoch, then time).

    For each without a readable manifest a warning is logged or, if a list is given, an entry added to ``problems``.
    """
    directory, readable = Path(directory), []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        hidden = _HIDDEN.fullmatch(path.name)
        stands_in = hidden and hidden["state"] == "old" and not (directory / hidden["name"]).exists()
        if not path.is_dir() or (path.name.startswith(".") and not stands_in):
            continue
        try:
            readable.append(Checkpoint(path, _read_manifest(path)))
        except (CoderError, OSError) as error:
            if problems is None:
                _log.warning("skipped a checkpoint: %s", error)
            else:
                problems.append(str(error))
    return sorted(readable, key=_age, reverse=True)


def newest(directory: StrPath, *, verify: bool = True, problems: list[str] | None = None) -> Path | None:
    """The latest complete checkpoint. Damaged ones are skipped, with a warning or entry as in :func:`checkpoints`."""
    for checkpoint in checkpoints(directory, problems=problems):
        try:
            _verify(checkpoint.path, checkpoint.manifest, verify)
            return checkpoint.path
        except (CoderError, OSError) as error:
            if problems is None:
                _log.warning("skipped a checkpoint: %s", error)
            else:
                problems.append(str(error))
    return None


def prune(directory: StrPath, keep: Iterable[str]) -> list[str]:
    """Remove all checkpoints but those in ``keep``, and return their names. Call it on one rank, between saves.

    Nothing is removed unless one of ``keep`` has all its files, nor what has no readable manifest.
    """
    if isinstance(keep, str):
        raise CoderError(f"keep takes several names, such as [{keep!r}]; a string would be read letter by letter")
    kept = {Path(name).name for name in keep}
    tidy(Path(directory))
    readable = checkpoints(directory)
    if not any(each.path.name in kept and _is_whole(each) for each in readable):
        return []
    removed = [each.path for each in readable if each.path.name not in kept and not each.path.is_symlink()]
    for path in removed:
        _remove(path, path.name)
    return [path.name for path in removed]


def set_aside(directory: StrPath, target: StrPath, *, after: int) -> list[str]:
    """Move the checkpoints of steps after ``after``, damaged ones too, into the folder ``target``, and return their names.

    A run that goes on from an older checkpoint calls it, so that the newest checkpoint is its own.
    """
    directory, target = Path(directory), Path(target)
    moved = [path for path in sorted(directory.glob("[!.]*")) if path.is_dir() and (_step_of(path) or 0) > after]
    for path in moved:
        target.mkdir(exist_ok=True)
        place = target / path.name
        os.replace(path, place.with_name(f"{place.name}-{time.time_ns()}") if place.exists() else place)
        fsync_path(target)
        fsync_path(directory)
    return [path.name for path in moved]


def _step_of(path: Path) -> int | None:
    """From the manifest; of a damaged checkpoint, from its name."""
    try:
        return _read_manifest(path)["step"]
    except (CoderError, OSError):
        number = re.search(r"\d+$", path.name)
        return None if number is None else int(number[0])


def _is_whole(checkpoint: Checkpoint) -> bool:
    try:
        _verify(checkpoint.path, checkpoint.manifest, False)
    except (CoderError, OSError):
        return False
    return True


def _age(checkpoint: Checkpoint) -> list[float]:
    return [checkpoint.manifest.get(field, 0) for field in ("step", "epoch", "saved_at")]


def _check_request(name: str, manifest: Mapping[str, Any], parts: list[str], rank: int, world_size: int) -> None:
    if not _NAME.fullmatch(name):
        raise CoderError(f"a checkpoint's name is letters, digits and _.=+- and starts with none of .=+-; got {name!r}")
    if not 0 <= rank < world_size:
        raise CoderError(f"rank {rank} is not one of {world_size}")
    for part in parts:
        if not _PART.fullmatch(part):
            raise CoderError(f"a part's name is letters, digits, _ and -, not 'manifest' or '…-rank0'; got {part!r}")
    if taken := _RESERVED & manifest.keys():
        raise CoderError(f"the manifest field {min(taken)!r} is written by save itself")
    if type(manifest.get("step")) is not int or type(manifest.get("epoch", 0)) not in (int, float):
        raise CoderError("a manifest has an integer 'step', and its 'epoch' is a number if given")
    try:
        json.dumps(manifest, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CoderError(f"a manifest is plain JSON; what is not (nan, tensors) belongs in a part: {error}") from error


def _prepare(directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tidy(directory)
    final = directory / name
    if final.is_symlink() or (final.exists() and not (final / _MANIFEST).is_file()):
        raise CoderError(f"{final} is not a checkpoint, so it is not replaced")
    (directory / f".{name}.writing").mkdir()


def _write(temporary: Path, parts: Mapping[str, Any], rank: int) -> None:
    if not temporary.is_dir():
        raise PeerError(f"{temporary} does not exist; rank 0's error says why")
    packed = {part: pack(tree, root=part) for part, tree in parts.items()}  # raises before anything is written
    sums = {}
    for part, (tensors, skeleton) in packed.items():
        weights, description = temporary / f"{part}.safetensors", temporary / f"{part}.json"
        save_file(tensors, weights)
        description.write_text(json.dumps(skeleton, allow_nan=False), encoding="utf-8")
        shutil.copymode(description, weights)  # safetensors ignores the user's umask
        for file in (weights, description):
            fsync_path(file)
            sums[file.name] = {"sha256": sha256_file(file), "bytes": file.stat().st_size}
    (temporary / f"rank{rank}.sums.json").write_text(json.dumps(sums), encoding="utf-8")


def _commit(directory: Path, name: str, user: Mapping[str, Any], world_size: int) -> None:
    """Write the manifest last, then rename: before the rename there is no new checkpoint, after it a complete one."""
    temporary, final, old = directory / f".{name}.writing", directory / name, directory / f".{name}.old"
    files: dict[str, Any] = {}
    for rank in range(world_size):
        sums = temporary / f"rank{rank}.sums.json"
        if not sums.is_file():
            raise PeerError(f"rank {rank} did not finish its files of {name!r}; its own error says why")
        files |= read_json(sums)
        sums.unlink()
    manifest = {"format": FORMAT, **user, "world_size": world_size, "saved_at": time.time(), "files": files}
    manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as it will be read: tuples become lists
    content = json.dumps(manifest | {"manifest_sha256": sha256_json(manifest)}, indent=1)
    (temporary / _MANIFEST).write_text(content, encoding="utf-8")
    fsync_path(temporary / _MANIFEST)
    fsync_path(temporary)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    fsync_path(directory)
    if old.exists():
        _remove(old, name)


def tidy(directory: Path) -> None:
    """Clean up after a killed run: a replaced copy without its successor gets its name back, the rest is removed."""
    for path in sorted(directory.glob(".*")):
        hidden = _HIDDEN.fullmatch(path.name)
        if not hidden or not path.is_dir() or path.is_symlink():
            continue
        if hidden["state"] != "old":
            shutil.rmtree(path, ignore_errors=True)
        elif (directory / hidden["name"]).exists():
            _remove(path, hidden["name"])
        else:
            os.replace(path, directory / hidden["name"])


def _remove(path: Path, name: str) -> None:
    """Rename before removing: a kill during the removal must not leave half a checkpoint under a valid name."""
    temporary = path.parent / f".{name}-{time.time_ns()}.removing"
    os.replace(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise CoderError(f"{file} is missing: {path} is not a complete checkpoint")
    manifest = read_json(file)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version > FORMAT:
        raise CoderError(f"{file} has format {version}, from a newer coder_plugin; this one reads up to {FORMAT}")
    kinds = {"format": int, "step": int, "world_size": int, "saved_at": float, "files": dict, "manifest_sha256": str}
    if version != FORMAT or any(type(manifest.get(field)) is not kind for field, kind in kinds.items()):
        raise CoderError(f"{file} is not the manifest of a coder_plugin checkpoint")
    content = {field: value for field, value in manifest.items() if field != "manifest_sha256"}
    if sha256_json(content) != manifest["manifest_sha256"]:
        raise CoderError(f"{file} was altered after it was written")
    try:
        check_manifest(manifest)
    except CoderError as error:
        raise CoderError(f"{file} is not the manifest of a coder_plugin checkpoint: {error}") from error
    return manifest


def _verify(path: Path, manifest: dict[str, Any], hashes: bool) -> None:
    """Check every listed file before one is used. Names are matched in full, so a manifest cannot point outside its folder."""
    files = manifest["files"]
    for name, expected in files.items():
        matched, file = _FILE.fullmatch(name), path / name
        pair = {f"{matched['part']}.json", f"{matched['part']}.safetensors"} if matched else {""}
        if not pair <= files.keys() or not isinstance(expected, dict) or not {"sha256", "bytes"} <= expected.keys():
            raise CoderError(f"{path / _MANIFEST} lists {name!r}, which is not a part's file with its checksum")
        if not file.is_file():
            raise CoderError(f"{file} is missing")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CoderError(f"{file} has {size} bytes, not the {expected['bytes']} that were written")
        if hashes and sha256_file(file) != expected["sha256"]:
            raise CoderError(f"{file} is damaged: its sha256 is not the one in the manifest")


def _read(path: Path, part: str) -> Any:
    weights, description = path / f"{part}.safetensors", path / f"{part}.json"
    try:
        # copied from the memory map, because the directory may be replaced during the run
        tensors = {name: tensor.clone() for name, tensor in load_file(weights, device="cpu").items()}
    except Exception as error:
        raise CoderError(f"{weights} is not a safetensors file: {error}") from error
    values = read_json(description, most=_MOST_BYTES)
    try:
        return unpack(tensors, values)
    except CoderError as error:
        raise CoderError(f"{description}: {error}") from error
