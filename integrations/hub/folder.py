"""A folder that is replaced by another as a whole, and only if it holds nothing of somebody's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from coder_plugin.errors import CoderError
from coder_plugin.files import sha256_file
from coder_plugin.pretrained.hub_cache import RECORD, read_record


def check_replaceable(folder: Path) -> None:
    """Look at a folder (an absolute path) before anything is written; one that a stopped :func:`swap` left is put back.

    Raises:
        CoderError: it holds what sharing did not write, or what was changed since. OSError: the disk's.
    """
    if folder in (Path.cwd(), *Path.cwd().parents):
        raise CoderError(f"{folder} is the working directory, or above it, and would be replaced: name a folder in it")
    if _old(folder).exists():
        if folder.exists():
            shutil.rmtree(_old(folder))
        else:
            os.replace(_old(folder), folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise CoderError(f"{folder} is a file: name a folder")
    record = read_record(folder)
    if record is None:
        raise CoderError(f"{folder} is there and holds something else: name a new folder, or one that was shared")
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == RECORD:
            continue
        if name not in record["files"]:
            raise CoderError(f"{folder} holds {name}, which sharing did not write: move it out of there, or name a new folder")
        if path.suffix != ".safetensors" and sha256_file(path) != record["files"][name]["sha256"]:
            raise CoderError(f"{path} was changed since it was shared: move it out of there, or name a new folder")


def swap(aside: Path, folder: Path) -> None:
    """Give a folder that was written aside its name, replacing what bore it, which comes back if that fails.

    Raises:
        OSError: the disk's. CoderError: what was there could not be put back, and where it is.
    """
    old = _old(folder)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(aside, folder)
    except OSError:
        if old.exists():
            _put_back(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    """Where a folder lies while another takes its place."""
    return folder.with_name(f".{folder.name}.replaced-by-share")


def _put_back(old: Path, folder: Path) -> None:
    try:
        os.replace(old, folder)
    except OSError as error:
        raise CoderError(f"{folder} could not be written; what was there is in {old}: move it back ({error})") from error
