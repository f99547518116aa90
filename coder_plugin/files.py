"""Files that others rely on: whole or not there, and known again by their checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4


def digest(file: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a JSON object says, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(aside: Path, path: Path) -> None:
    """Give a file that was written aside its name, replacing what bore it."""
    flush(aside)
    os.replace(aside, path)
    flush(path.parent)


@contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path``, which is renamed to it when the block ends, or deleted when the block fails.

    Args:
        path: the file to write or replace.
        mode: "w" (text, UTF-8) or "wb".
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.part")  # unique across machines that share a disk
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        put(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
