"""The manifest: what an index's folder holds, of which model, and the checksums of its files.

A complete index holds ``manifest.json`` (written last), ``records.sqlite`` (keys, captions, thumbnails), ``images.faiss`` and
``captions.faiss``, and ``rerank/`` where the model has a fusion score. While it is being built there are ``building.json`` and
``parts/`` instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coder_plugin import files
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, sha256_file, sha256_json

FORMAT, VERSION = "coder-plugin index", 1
MANIFEST, BUILDING, RECORDS = "manifest.json", "building.json", "records.sqlite"
#: The kinds of vectors that an index may hold.
KINDS = ("images", "captions")
#: Fields that a reader relies on, and their types.
_FIELDS = {"model": dict, "plan": dict, "factory": str, "images": int, "captions": int, "unreadable": int, "vectors": dict}
_RERANK = re.compile(r"rerank/(image|text)_[a-z_]+\.npy")
#: Types of fields of ``model``, ``plan``, ``vectors`` and ``files``, where present. ``None`` stands for null.
_MODEL = {"name": (str,), "spec": (str, type(None)), "export": (str,), "options": (dict,), "objective": (str,),
          "reranker": (str, type(None))}
_SIZES = ("items", "views", "dimensions")
#: More than any vector has, so that products of sizes stay far below 2**63.
_MOST = {"items": 2**40, "views": 2**12, "dimensions": 2**20}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1 << 24  # of a manifest, whose size does not grow with the index's


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of an index.

    Raises:
        CoderError: the file cannot be read, or is of another format or version.
    """
    content = files.read_json(path, most=_MOST_BYTES)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CoderError(f"{path} was not written by coder-plugin index")
    if content.get("version") != VERSION:
        raise CoderError(
            f"{path} has version {str(content.get('version'))[:40]} of the format, and this coder-plugin reads {VERSION}: "
            "build it again"
        )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with the format's name and version."""
    with atomic_write(path, "w") as file:
        file.write(json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=2, ensure_ascii=False) + "\n")


def write_manifest(folder: Path, content: Mapping[str, Any], files: list[Path]) -> None:
    """The last step of building an index: its content, and the sizes and checksums of its files."""
    sums = {file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in files}
    manifest = json.loads(json.dumps({**content, "files": sums}))  # as a reader will parse it
    write_json(folder / MANIFEST, {**manifest, "manifest_sha256": sha256_json(manifest)})


def read_manifest(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of a complete index.

    Args:
        folder: the index.
        verify: also compare each file's checksum, which reads the files; else only their sizes.

    Raises:
        CoderError: no index there, an unfinished or a damaged one; the message names the file.
    """
    path = folder / MANIFEST
    if not path.exists():
        if (folder / BUILDING).is_file():
            raise CoderError(f"{folder} is an index that is not finished: run its coder-plugin index command again")
        raise CoderError(f"{folder} is not an index: it has no {MANIFEST} (coder-plugin index makes one)")
    manifest = read_json(path)
    content = {key: value for key, value in manifest.items() if key not in ("format", "version", "manifest_sha256")}
    try:
        digest = sha256_json(content)
    except RecursionError as error:
        raise CoderError(f"{path} cannot be read: it is nested too deeply") from error
    if digest != manifest.get("manifest_sha256"):
        raise CoderError(f"{path} is damaged: it has been changed since it was written")
    _check_fields(path, manifest)
    _check_names(path, manifest)
    _check_sizes(path, manifest)
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise CoderError(f"{file} is missing: the index is damaged, build it again")
        if os.path.getsize(file) != expected["bytes"]:
            raise CoderError(f"{file} is damaged: {os.path.getsize(file)} bytes, not the {expected['bytes']} of the manifest")
        if verify and sha256_file(file) != expected["sha256"]:
            raise CoderError(f"{file} is damaged: its checksum is not the manifest's")
    return manifest


def _refusal(path: Path, what: str) -> CoderError:
    return CoderError(f"{path} was not written by coder-plugin index: {what}")


def _check_fields(path: Path, manifest: Mapping[str, Any]) -> None:
    """Somebody else may have written the manifest, with checksums that match: every field that is read has its type."""
    if missing := sorted({*_FIELDS, "files"} - manifest.keys()):
        raise CoderError(f"{path} lacks {', '.join(missing)}: it was not written by coder-plugin index")
    for name, kind in {**_FIELDS, "files": dict}.items():
        if type(manifest[name]) is not kind or (kind is int and not 0 <= manifest[name] < _MOST["items"]):
            raise _refusal(path, f"{name} is {str(manifest[name])[:60]!r}")
    model = manifest["model"]
    if not isinstance(model.get("fingerprint"), str):
        raise _refusal(path, "its model has no fingerprint")
    for name, kinds in _MODEL.items():
        if name in model and type(model[name]) not in kinds:
            raise _refusal(path, f"its model's {name} is {str(model[name])[:60]!r}")
    if type(manifest["plan"].get("re-ranking")) is not bool:
        raise _refusal(path, "its plan does not say whether it re-ranks")


def _check_sizes(path: Path, manifest: Mapping[str, Any]) -> None:
    """The sizes of vectors and files."""
    for kind, sizes in manifest["vectors"].items():
        if not isinstance(sizes, dict) or {*sizes} != {*_SIZES}:
            raise _refusal(path, f"the sizes of its {kind} are {str(sizes)[:60]!r}")
        for name, value in sizes.items():
            if type(value) is not int or not 1 <= value <= _MOST[name]:
                raise _refusal(path, f"{name} of its {kind} is {str(value)[:60]!r}")
        if kind in KINDS and sizes["items"] != manifest[kind]:
            raise _refusal(path, f"it has {manifest[kind]} {kind} and vectors of {sizes['items']}")
    for name, expected in manifest["files"].items():
        size, checksum = (expected.get("bytes"), expected.get("sha256")) if isinstance(expected, dict) else (None, None)
        if type(size) is not int or not isinstance(checksum, str) or not _SHA256.fullmatch(checksum):
            raise _refusal(path, f"{name[:60]!r} is listed without its size and checksum")


def _check_names(path: Path, manifest: Mapping[str, Any]) -> None:
    """Only the files of an index may be listed: no other file is read, and no path leads out of the folder."""
    kinds = list(manifest["vectors"])
    expected = {RECORDS, *(f"{kind}.faiss" for kind in kinds)}
    listed = {name for name in manifest["files"] if not _RERANK.fullmatch(name)}
    if listed != expected or not kinds or not set(kinds) <= set(KINDS):
        different = ", ".join(sorted(listed ^ expected))[:300] or "no vectors"
        raise CoderError(f"{path} lists {different}, which do not match the files of an index")
