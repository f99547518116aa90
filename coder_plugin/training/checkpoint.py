"""Checkpoints that never unpickle: safetensors and JSON files under a manifest that holds their checksums.

Loading somebody's pickle runs their code, so no file here is one (see `tree`). A run can be killed at any instruction,
so a checkpoint is written aside, flushed, and renamed: what bears a checkpoint's name is whole, and damage done later
is found by checksum before anything is used. Hidden neighbours of a checkpoint `last`, put right at the next save:

    .last.writing        not finished
    .last.old            the copy being replaced; stands in for `last` if a kill fell between the two renames
    .last-….removing     half removed

One run at a time writes into a directory; all its ranks see the same file system.
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
from coder_plugin.files import fsync_path, sha256_file, sha256_json
from coder_plugin.training.serialization import pack, unpack

State = dict[str, Any]
StrPath = str | os.PathLike[str]
FORMAT = 1
_MANIFEST = "manifest.json"
_RESERVED = frozenset({"format", "world_size", "saved_at", "files", "seal"})  # manifest fields that `save` writes
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
_PART = re.compile(r"(?!manifest$)(?!.*-rank\d+$)[A-Za-z0-9_][A-Za-z0-9_-]*")
_FILE = re.compile(r"(?P<part>[A-Za-z0-9_][A-Za-z0-9_-]*)\.(json|safetensors)")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<state>writing|old|removing)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest can be read; its other files have not been looked at."""

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
    """Write `directory/name`; every rank calls this, and every rank raises if any failed.

    `common` maps part names to trees that are the same everywhere (rank 0 writes them), `own` to this rank's (random
    states, loader positions), written as `{part}-rank{rank}`. `manifest` is plain JSON with an integer `step`. A
    checkpoint that already has this name is replaced.
    """
    directory = Path(directory)
    faults: list[Exception] = []

    def phase(work: Callable[[], object]) -> None:
        """A rank that fails still meets the others at every barrier; none is left waiting for it."""
        try:
            if not faults:
                work()
        except Exception as error:
            faults.append(error)
        barrier()

    aside = directory / f".{name}.writing"
    parts = dict(common or {}) if rank == 0 else {}
    # After this first barrier no rank is still looking at the outcome of the save before.
    phase(lambda: _check_request(name, manifest, [*(common or {}), *(own or {})], rank, world_size))
    phase(lambda: _prepare(directory, name) if rank == 0 else None)
    phase(lambda: _write(aside, parts | {f"{part}-rank{rank}": tree for part, tree in (own or {}).items()}, rank))
    phase(lambda: _commit(directory, name, manifest, world_size) if rank == 0 else None)
    if faults:
        raise faults[0]
    if aside.exists():
        raise CoderError(f"the checkpoint {name!r} was not written; another rank's error says why")
    return directory / name


def load(path: StrPath, *, rank: int = 0, verify: bool = True) -> tuple[State, State, State | None]:
    """(manifest, common parts, own parts). All files are checked before one is used; `verify=False` skips checksums.

    Own parts are None for a rank that the saving run did not have. Fewer ranks than then is for the caller to judge:
    `manifest["world_size"]` says how many there were.
    """
    path = Path(path)
    if not path.exists() and (old := path.parent / f".{path.name}.old").is_dir():
        path = old
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


def verify(path: StrPath) -> State:
    """The manifest of a checkpoint, whose files have been held against their checksums; CoderError where one is damaged."""
    manifest = _read_manifest(Path(path))
    _verify(Path(path), manifest, True)
    return manifest


def checkpoints(directory: StrPath, *, problems: list[str] | None = None) -> list[Checkpoint]:
    """Latest step first (then epoch, then time); what has no readable manifest is left out with a warning, or an entry of ``problems``."""
    directory, found = Path(directory), []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        hidden = _HIDDEN.fullmatch(path.name)
        standing_in = hidden and hidden["state"] == "old" and not (directory / hidden["name"]).exists()
        if not path.is_dir() or (path.name.startswith(".") and not standing_in):
            continue
        try:
            found.append(Checkpoint(path, _read_manifest(path)))
        except (CoderError, OSError) as error:
            if problems is None:
                _log.warning("skipped a checkpoint: %s", error)
            else:
                problems.append(str(error))
    return sorted(found, key=_age, reverse=True)


def newest(directory: StrPath, *, verify: bool = True) -> Path | None:
    """The latest whole checkpoint; damaged ones are skipped with a warning that says what is wrong."""
    for checkpoint in checkpoints(directory):
        try:
            _verify(checkpoint.path, checkpoint.manifest, verify)
            return checkpoint.path
        except (CoderError, OSError) as error:
            _log.warning("skipped a checkpoint: %s", error)
    return None


def prune(directory: StrPath, keep: Iterable[str]) -> list[str]:
    """Remove all other checkpoints that this version can read, and say which; call it on one rank, between saves."""
    if isinstance(keep, str):
        raise CoderError(f"keep takes several names, such as [{keep!r}]; a bare string would be read letter by letter")
    kept = {Path(name).name for name in keep}
    _tidy(Path(directory))
    paths = [found.path for found in checkpoints(directory)]
    doomed = [path for path in paths if path.name not in kept and not path.is_symlink()]
    for path in doomed:
        _remove(path, path.name)
    return [path.name for path in doomed]


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
    _tidy(directory)
    final = directory / name
    if final.is_symlink() or (final.exists() and not (final / _MANIFEST).is_file()):
        raise CoderError(f"{final} is not a checkpoint, so it is not replaced")
    (directory / f".{name}.writing").mkdir()


def _write(aside: Path, parts: Mapping[str, Any], rank: int) -> None:
    if not aside.is_dir():
        raise CoderError(f"{aside} was not made; rank 0's own error says why")
    packed = {part: pack(tree, root=part) for part, tree in parts.items()}  # a refusal comes before the first byte
    sums = {}
    for part, (tensors, skeleton) in packed.items():
        weights, description = aside / f"{part}.safetensors", aside / f"{part}.json"
        save_file(tensors, weights)
        description.write_text(json.dumps(skeleton, allow_nan=False), encoding="utf-8")
        shutil.copymode(description, weights)  # safetensors makes its files private, against the user's umask
        for file in (weights, description):
            fsync_path(file)
            sums[file.name] = {"sha256": sha256_file(file), "bytes": file.stat().st_size}
    (aside / f"rank{rank}.sums.json").write_text(json.dumps(sums), encoding="utf-8")


def _commit(directory: Path, name: str, user: Mapping[str, Any], world_size: int) -> None:
    """The manifest is the last file, the rename the last act: before it no new checkpoint, after it a whole one."""
    aside, final, old = directory / f".{name}.writing", directory / name, directory / f".{name}.old"
    files: dict[str, Any] = {}
    for rank in range(world_size):
        sums = aside / f"rank{rank}.sums.json"
        if not sums.is_file():
            raise CoderError(f"rank {rank} did not finish its files of {name!r}; its own error says why")
        files |= _read_json(sums)
        sums.unlink()
    manifest = {"format": FORMAT, **user, "world_size": world_size, "saved_at": time.time(), "files": files}
    manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as a reader will see it: tuples are lists
    (aside / _MANIFEST).write_text(json.dumps(manifest | {"seal": sha256_json(manifest)}, indent=1), encoding="utf-8")
    fsync_path(aside / _MANIFEST)
    fsync_path(aside)
    if final.exists():
        os.replace(final, old)
    os.replace(aside, final)
    fsync_path(directory)
    if old.exists():
        _remove(old, name)


def _tidy(directory: Path) -> None:
    """What a killed run left: a moved-aside copy without its successor gets its name back, all else goes."""
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
    """Rename first: a kill inside rmtree must not leave half a checkpoint under a name that counts."""
    doomed = path.parent / f".{name}-{time.time_ns()}.removing"
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise CoderError(f"{file} is missing: {path} is not a whole checkpoint")
    manifest = _read_json(file)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version > FORMAT:
        raise CoderError(f"{file} has format {version}, from a newer coder_plugin; this one reads up to {FORMAT}")
    kinds = {"format": int, "step": int, "world_size": int, "saved_at": float, "files": dict, "seal": str}
    if version != FORMAT or any(type(manifest.get(field)) is not kind for field, kind in kinds.items()):
        raise CoderError(f"{file} is not the manifest of a coder_plugin checkpoint")
    if sha256_json({field: value for field, value in manifest.items() if field != "seal"}) != manifest["seal"]:
        raise CoderError(f"{file} was altered after it was written")
    return manifest


def _verify(path: Path, manifest: dict[str, Any], hashes: bool) -> None:
    """Every listed file, before one is used. Names are matched whole: a manifest cannot point elsewhere."""
    files = manifest["files"]
    for name, expected in files.items():
        matched, file = _FILE.fullmatch(name), path / name
        pair = {f"{matched['part']}.json", f"{matched['part']}.safetensors"} if matched else {""}
        if not pair <= files.keys() or not isinstance(expected, dict) or not {"sha256", "bytes"} <= expected.keys():
            raise CoderError(f"{path / _MANIFEST} lists {name!r}, which is not half of a part with its checksum")
        if not file.is_file():
            raise CoderError(f"{file} is missing")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CoderError(f"{file} has {size} bytes, not the {expected['bytes']} that were written")
        if hashes and sha256_file(file) != expected["sha256"]:
            raise CoderError(f"{file} is damaged: its sha256 is not the one in the manifest")


def _read(path: Path, part: str) -> Any:
    weights, description = path / f"{part}.safetensors", path / f"{part}.json"
    try:
        # Copied out of the memory map: this directory may be replaced while the run goes on.
        tensors = {name: tensor.clone() for name, tensor in load_file(weights, device="cpu").items()}
    except Exception as error:
        raise CoderError(f"{weights} is not a safetensors file: {error}") from error
    try:
        return unpack(tensors, _read_json(description))
    except CoderError as error:
        raise CoderError(f"{description}: {error}") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CoderError(f"{file} is not JSON: {error}") from error
