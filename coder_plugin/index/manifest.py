"""The manifest: what an index's folder holds, of which model, and the checksums of its files.

A complete index holds ``manifest.json`` (written last) and ``segments/``: each segment is a folder of some images with their
vectors (``images.faiss``, ``captions.faiss``), records (``records.sqlite``) and, where the model re-ranks, ``rerank/``. Files
are never changed after they have been written. Images are removed by ``removed-00001.npy``, which lists their rows, and a new
manifest. While an index is being built there is ``building.json`` instead of the manifest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coder_plugin import files
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write, sha256_file, sha256_json

FORMAT, VERSION = "coder-plugin index", 2
MANIFEST, BUILDING, RECORDS, SEGMENTS = "manifest.json", "building.json", "records.sqlite", "segments"
#: Folder of the arrays that re-ranking reads, in a segment.
RERANK = "rerank"
#: The kinds of vectors that an index may hold.
KINDS = ("images", "captions")
#: Types of metadata columns, and how Python reads them.
COLUMN_TYPES = {"string": str, "int64": int, "float64": float, "bool": bool}
#: Fields that a reader relies on, and their types.
_FIELDS = {
    "model": dict,
    "plan": dict,
    "factory": str,
    "images": int,
    "captions": int,
    "unreadable": int,
    "unreadable_kinds": dict,
    "unreadable_keys": list,
    "vectors": dict,
    "columns": dict,
    "segments": list,
    "removed": dict,
    "files": dict,
}
_SEGMENT = re.compile(r"[0-9]{5,9}")
_ARRAY = re.compile(r"(image|text)_[A-Za-z0-9_]{1,100}\.npy")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
#: Types of fields of ``model``, ``plan``, ``vectors`` and ``files``, where present. ``None`` stands for null.
_MODEL = {"name": (str,), "spec": (str, type(None)), "export": (str,), "options": (dict,), "objective": (str,),
          "reranker": (str, type(None))}
_SIZES = ("items", "views", "dimensions")
#: More than any vector has, so that products of sizes stay far below 2**63.
_MOST = {"items": 2**40, "views": 2**12, "dimensions": 2**20}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1 << 26  # of a manifest: it has a few lines for each segment


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


def sums(folder: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Sizes and checksums of files, by their paths below ``folder``."""
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths}


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest atomically: the last step of building an index, and of each change."""
    manifest = json.loads(json.dumps(content))  # as a reader will parse it
    write_json(folder / MANIFEST, {**manifest, "manifest_sha256": sha256_json(manifest)})


def content_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without the fields that :func:`write_manifest` adds."""
    return {key: value for key, value in manifest.items() if key not in ("format", "version", "manifest_sha256")}


def removed_files(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Names of the files that list the rows that were removed, by kind; empty where there are none."""
    number = manifest["removed"].get("number", 0)
    return {"images": f"removed-{number:05d}.npy", "captions": f"removed-captions-{number:05d}.npy"} if number else {}


def read_manifest(folder: Path, *, verify: bool = False) -> dict[str, Any]:
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
    try:
        digest = sha256_json(content_of(manifest))
    except RecursionError as error:
        raise CoderError(f"{path} cannot be read: it is nested too deeply") from error
    if digest != manifest.get("manifest_sha256"):
        raise CoderError(f"{path} is damaged: it has been changed since it was written")
    _check_fields(path, manifest)
    _check_segments(path, manifest)
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
    if missing := sorted(_FIELDS.keys() - manifest.keys()):
        raise CoderError(f"{path} lacks {', '.join(missing)}: it was not written by coder-plugin index")
    for name, kind in _FIELDS.items():
        if type(manifest[name]) is not kind or (kind is int and not 0 <= manifest[name] < _MOST["items"]):
            raise _refusal(path, f"{name} is {str(manifest[name])[:60]!r}")
    for kind, count in manifest["unreadable_kinds"].items():
        if type(count) is not int or not 0 <= count < _MOST["items"]:
            raise _refusal(path, f"its unreadable samples of kind {kind[:40]!r} are {str(count)[:60]!r}")
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


def _check_segments(path: Path, manifest: Mapping[str, Any]) -> None:
    """Names and counts of segments, metadata columns and removed rows."""
    for kind in KINDS:
        for each in manifest["segments"]:
            count = each.get(kind) if isinstance(each, dict) else None
            if type(count) is not int or not 0 <= count < _MOST["items"] or (kind == "images" and not count):
                raise _refusal(path, f"a segment is {str(each)[:60]!r}")
        if sum(each[kind] for each in manifest["segments"]) != manifest[kind]:
            raise _refusal(path, f"its segments do not hold {manifest[kind]} {kind}")
    names = [each.get("name") for each in manifest["segments"]]
    if any(not isinstance(name, str) or not _SEGMENT.fullmatch(name) for name in names) or len({*names}) < len(names):
        raise _refusal(path, "its segments have other names, or one twice")
    columns = manifest["columns"]
    if len({name.lower() for name in columns}) < len(columns) or any(
        not _COLUMN.fullmatch(name) or not isinstance(kind, str) or kind not in COLUMN_TYPES for name, kind in columns.items()
    ):
        raise _refusal(path, f"its columns are {str(columns)[:60]!r}")
    removed = manifest["removed"]
    if removed and ({*removed} != {"number", *KINDS} or any(type(value) is not int or value < 0 for value in removed.values())):
        raise _refusal(path, f"removed is {str(removed)[:60]!r}")
    if removed and (removed["number"] < 1 or any(removed[kind] > manifest[kind] for kind in KINDS)):
        raise _refusal(path, f"removed is {str(removed)[:60]!r}")


def _check_names(path: Path, manifest: Mapping[str, Any]) -> None:
    """Only the files of an index may be listed: no other file is read, and no path leads out of the folder."""
    kinds = list(manifest["vectors"])
    expected = {*removed_files(manifest).values()}
    for segment in manifest["segments"]:
        folder = f"{SEGMENTS}/{segment['name']}"
        expected |= {f"{folder}/{RECORDS}", *(f"{folder}/{kind}.faiss" for kind in kinds if segment.get(kind))}
    trained = {f"trained-{kind}.faiss" for kind in kinds}
    folders = {segment["name"] for segment in manifest["segments"]}

    def is_array(name: str) -> bool:
        first, folder, second, file, *others = [*name.split("/"), "", "", "", ""]
        inside = (first, second) == (SEGMENTS, RERANK) and folder in folders and not any(others)
        return inside and bool(_ARRAY.fullmatch(file))

    listed = {name for name in manifest["files"] if name not in trained and not is_array(name)}
    if listed != expected or not kinds or not set(kinds) <= set(KINDS):
        different = ", ".join(sorted(listed ^ expected))[:300] or "no vectors"
        raise CoderError(f"{path} lists {different}, which do not match the files of an index")
