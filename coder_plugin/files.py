"""Files that others rely on: written completely or not at all, and verified by their checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from coder_plugin.errors import CoderError


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()


def open_regular(path: str | Path, mode: str = "r", **options: Any) -> IO[Any]:
    """:func:`open` for reading, of regular files only: a named pipe would be waited for, and a device may never end.

    Args:
        path: the file, or a link to one.
        mode: "r" or "rb".
        options: of :func:`open`.

    Raises:
        OSError: as :func:`open`; also for what is no regular file.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        OSError: [Errno 22] it is not a regular file: '/dev/null'
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return descriptor

    return open(path, mode, opener=opener, **options)


def read_json(path: str | Path, *, most: int = 1 << 26) -> Any:
    """The value in a JSON file that others may have written.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        CoderError: it cannot be read, is no regular file, is larger, is no JSON, or is nested too deeply.

    Example:
        >>> read_json("nowhere.json")
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: nowhere.json cannot be read: No such file or directory
    """
    path = Path(path)
    try:
        with open_regular(path, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise CoderError(f"{path} cannot be read: it has over {most:,} bytes")
        return json.loads(content)
    except OSError as error:
        raise CoderError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise CoderError(f"{path} cannot be read as JSON: it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, CoderError):
            raise
        raise CoderError(f"{path} cannot be read as JSON: {error}") from error


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value, hexadecimal; the order of an object's fields does not matter.

    Example:
        >>> sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fsync_path(path: str | Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_replace(temporary: str | Path, path: str | Path) -> None:
    """Rename a finished temporary file in the same folder to ``path``, replacing the file there, and wait for the disk."""
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(Path(path).parent)


def temporary_path(path: str | Path) -> Path:
    """A new name next to ``path``: ``.NAME.HOST.PID.RANDOM.writing``. No other process takes it, on no machine."""
    path = Path(path)
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}.writing")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]


def remove_leftovers(path: str | Path) -> None:
    """Remove the temporary files and folders of ``path`` that killed processes of this machine have left."""
    path = Path(path)
    _remove_leftovers(path.parent, re.escape(path.name))


def remove_all_leftovers(folder: str | Path) -> None:
    """As :func:`remove_leftovers` for all files in a folder."""
    _remove_leftovers(Path(folder), ".+")


def _remove_leftovers(folder: Path, name: str) -> None:
    form = re.compile(rf"\.{name}\.{_host()}\.(\d+)\.[0-9a-f]{{8}}\.writing")
    for each in folder.glob(".*.writing"):
        if (match := form.fullmatch(each.name)) and not _is_running(int(match[1])):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary file's name next to ``path``, for libraries that write files themselves; as :func:`atomic_write`.

    Args:
        path: the file to write. Its folder must exist.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with atomic_path(path) as temporary:
        ...     _ = temporary.write_text("complete")
        >>> path.read_text()
        'complete'
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        atomic_replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def atomic_write(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file next to ``path`` for writing, and rename it to ``path`` when the block ends.

    Another process sees the old file or the complete new one. If the block raises, the temporary file is removed and the old
    file stays.

    Args:
        path: the file to write. Its folder is made if it does not exist.
        mode: "wb", or "w" for UTF-8 text.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with atomic_write(path, "w") as file:
        ...     _ = file.write("complete")
        >>> path.read_text()
        'complete'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary, open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Make a temporary folder next to ``path`` to fill, and rename it to ``path`` when the block ends.

    A folder that is already at ``path`` is replaced: between two renames, a kill leaves it under ``.NAME.old``, and the next
    call moves it back before the block runs. If the block raises, the temporary folder is removed and the old one stays.

    Args:
        path: the folder to write. Its parent is made if it does not exist.

    Raises:
        OSError: the disk's error. If the old folder could not be moved back after it, the message says where it is.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model"
        >>> with atomic_folder(path) as temporary:
        ...     _ = (temporary / "notes.txt").write_text("complete")
        >>> (path / "notes.txt").read_text()
        'complete'
    """
    path = Path(path)
    temporary, old = temporary_path(path), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # killed between the two renames below
        os.replace(old, path)
    remove_leftovers(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for each in (*temporary.rglob("*"), temporary):
            fsync_path(each)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            if old.exists():
                _move_back(old, path)
            raise
        fsync_path(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_back(old: Path, path: Path) -> None:
    try:
        os.replace(old, path)
    except OSError as error:
        raise OSError(f"what was in {path} is now in {old}: move it back ({error})") from error
