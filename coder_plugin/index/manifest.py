"""What says that a folder is an index of ours, whole, and of which model.

An index's folder holds ``manifest.json`` (written last; its seal and the files' checksums tell damage), ``records.sqlite``
(keys, captions, thumbnails), ``images.faiss`` and ``captions.faiss``, and ``rerank/`` where the model has a fusion score. While
it is made there are ``building.json`` and ``parts/`` instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_replace, sha256_file, sha256_json

FORMAT, VERSION = "coder-plugin index", 1
MANIFEST, BUILDING, RECORDS = "manifest.json", "building.json", "records.sqlite"
#: The kinds of vectors that an index may hold.
KINDS = ("images", "captions")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of ours.

    Raises:
        CoderError: the file is none, or of another format or version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CoderError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CoderError(f"{path} is not of an index that coder-plugin index has made")
    if found.get("version") != VERSION:
        raise CoderError(
            f"{path} is of version {found.get('version')} of the format, and this coder-plugin reads {VERSION}: make it anew"
        )
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write it aside, and rename it."""
    aside = path.with_name(f".{path.name}.writing")
    text = json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=2, ensure_ascii=False)
    aside.write_text(text + "\n", encoding="utf-8")
    atomic_replace(aside, path)


def write_manifest(folder: Path, content: Mapping[str, Any], files: list[Path]) -> None:
    """The last act of making an index: what it holds, and the sums of its files."""
    sums = {file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in files}
    whole = json.loads(json.dumps({**content, "files": sums}))  # as a reader will see it
    write_json(folder / MANIFEST, {**whole, "seal": sha256_json(whole)})


#: Fields that a reader relies on.
_FIELDS = {"model", "plan", "factory", "images", "captions", "unreadable", "vectors", "files"}
_RERANK = re.compile(r"rerank/(image|text)_[a-z_]+\.npy")


def _check_names(path: Path, manifest: Mapping[str, Any]) -> None:
    """That the files are those which an index has: no other is read, and none is followed out of the folder."""
    if lacking := sorted(_FIELDS - manifest.keys()):
        raise CoderError(f"{path} lacks {', '.join(lacking)}: it is of no index that coder-plugin index has made")
    kinds = list(manifest["vectors"])
    wanted = {RECORDS, *(f"{kind}.faiss" for kind in kinds)}
    named = {name for name in manifest["files"] if not _RERANK.fullmatch(name)}
    if named != wanted or not kinds or not set(kinds) <= set(KINDS):
        other = ", ".join(sorted(named ^ wanted)) or "no vectors"
        raise CoderError(f"{path} names {other}, which is not what an index consists of")


def read_manifest(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of a whole index.

    Args:
        verify: also compare each file's checksum; else its size alone.

    Raises:
        CoderError: no index, an unfinished or a damaged one; says which file.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / BUILDING).is_file():
            raise CoderError(f"{folder} is an index that is not finished: run the coder-plugin index command of it once more")
        raise CoderError(f"{folder} is no index: it has no {MANIFEST} (coder-plugin index makes one)")
    manifest = read_json(path)
    said = {key: value for key, value in manifest.items() if key not in ("format", "version", "seal")}
    if sha256_json(said) != manifest.get("seal"):
        raise CoderError(f"{path} is damaged: it has been changed since it was written")
    _check_names(path, manifest)
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise CoderError(f"{file} is missing: the index is damaged, make it anew")
        if os.path.getsize(file) != expected["bytes"]:
            raise CoderError(f"{file} is damaged: {os.path.getsize(file)} bytes, not the {expected['bytes']} of the manifest")
        if verify and sha256_file(file) != expected["sha256"]:
            raise CoderError(f"{file} is damaged: its content is not what the manifest says")
    return manifest
