"""The manifest of an export: which files belong together, with their checksums.

An export is several files: towers, scoring heads, vocabulary, configuration, tokenizer. ``coder_export.json`` lists them all.
The towers' file has a mark, so that towers without their manifest or their heads are noticed. Folders without either are not
our exports, but open_clip's or transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, read_json, sha256_file, sha256_json

MANIFEST = "coder_export.json"
#: The model card of a shared export, which its owner may edit: it is not listed.
CARD = "README.md"
#: Key of the metadata in the towers' file, and its value if scoring heads belong to them.
MARK, WITH_HEADS = "coder_export", "with heads"
FORMAT = 2
_TYPES: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "step": (int, type(None)),
    "files": (dict,),
}


def seal(folder: Path, *, step: int | None = None) -> None:
    """Write the manifest of a folder whose other files are complete.

    Args:
        folder: of an export; every file in it but the card is listed.
        step: of the run that is exported.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in names
        if name not in (MANIFEST, CARD)
    }
    manifest = {"format": FORMAT, "step": step, "files": files}
    with atomic_write(folder / MANIFEST, "w") as file:
        file.write(json.dumps({**manifest, "sha256": sha256_json(manifest)}, indent=1) + "\n")


def seal_again(folder: Path) -> None:
    """Write the manifest anew after files of a verified export were edited on purpose."""
    manifest = read_manifest(folder)
    assert manifest is not None
    seal(folder, step=manifest["step"])


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an export, checked in itself; None without one.

    Raises:
        CoderError: it is damaged, of a newer version, or lists files outside of the folder; a file is a link out of it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    check_link(folder, MANIFEST)
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise CoderError(f"{path} is damaged: it is not an object")
    if type(manifest.get("format")) is int and manifest["format"] > FORMAT:
        raise CoderError(f"{path} has format {manifest['format']}, from a newer coder-plugin: update to open this export")
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    if manifest.get("sha256") != sha256_json(content):
        raise CoderError(f"{path} is damaged: copy or download the export again")
    if content.keys() != _TYPES.keys() or any(type(content[name]) not in kinds for name, kinds in _TYPES.items()):
        raise CoderError(f"{path} is not the manifest of an export")
    for name, entry in content["files"].items():
        if not (isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)):
            raise CoderError(f"{path}: {name!r} has no size and checksum")
        if not is_inside(name):
            raise CoderError(f"{path} lists {name!r}, which is not a file in its folder")
        check_link(folder, name)
    return content


def check_link(folder: Path, name: str) -> None:
    """Refuse a file of an export that is a link out of its folder: what is shared would hold a file of this machine."""
    real = folder.resolve()
    top = real.parents[1] if real.parent.name == "snapshots" else real  # the hub's cache links to the files beside
    if not (folder / name).resolve().is_relative_to(top):
        raise CoderError(f"{folder / name} is a link to another folder: copy the file")


def is_inside(name: str) -> bool:
    """Whether a relative name with forward slashes stays below its folder."""
    path = PurePosixPath(name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name
    return path.as_posix() == name != "." and not outside


def check_files(folder: Path, listed: Mapping[str, Any]) -> None:
    """Check the files that a manifest lists.

    Raises:
        CoderError: names a file that is missing or changed.
    """
    for name, entry in listed.items():
        file = folder / name
        if not file.is_file():
            raise CoderError(f"{folder} is incomplete: {name} is missing; copy or download the whole export again")
        if file.stat().st_size != entry["bytes"] or sha256_file(file) != entry["sha256"]:
            raise CoderError(f"{file} is damaged, or of another export: copy or download the whole export again")


def verify_export(weights: Path, *, heads: str, others: tuple[str, ...] = ()) -> None:
    """Check an export before it is opened: all files are there, unchanged, and belong together.

    Args:
        weights: the towers' file.
        heads: name of the heads' file.
        others: names of further files that opening reads where they exist.

    Raises:
        CoderError: a file is missing, changed, or of another export; the message names it.
    """
    folder = weights.parent
    manifest, mark = read_manifest(folder), _mark(weights)
    if manifest is None:
        if mark is not None:
            which = f"{MANIFEST} is missing beside {weights.name}, a file of an export"
            raise CoderError(f"{folder} is incomplete: {which}. Give the export's whole folder")
        return
    listed = manifest["files"]
    if mark is None or mark == WITH_HEADS and heads not in listed:
        which = "" if mark is None else f", whose scoring heads ({heads}) it does not list"
        raise CoderError(f"{folder / MANIFEST} does not belong to {weights}{which}: copy or download the whole export again")
    check_files(folder, listed)
    for name in (weights.name, heads, *others):
        if (folder / name).is_file() and name not in listed:
            raise CoderError(f"{folder / name} does not belong to this export ({MANIFEST}): remove it, or export again")


def _mark(weights: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    if weights.suffix != ".safetensors":
        return None
    try:
        with safe_open(weights, "pt") as file:
            return (file.metadata() or {}).get(MARK)
    except (SafetensorError, OSError) as error:
        raise CoderError(f"{weights} cannot be read: {error}") from error
