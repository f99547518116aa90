"""Files that others rely on: one writer at a time, written completely or not at all, verified by their checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from coder_plugin.errors import CoderError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The names that :func:`temporary_path` gives: what they stand for, host, process.
_TEMPORARY = re.compile(r"\.(.+)\.([A-Za-z0-9-]+)\.(\d+)\.[0-9a-f]{8}\.writing")
_log = logging.getLogger(__name__)


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()


def read_options(path: str | Path, origin: str, *, toml: bool = True) -> Any:
    """What a TOML file, or with ``toml=False`` a JSON file, of options holds.

    Args:
        origin: what messages call the file.

    Raises:
        CoderError: it cannot be read, is no regular file or not of this form, or is nested too deeply.
    """
    try:
        with open_regular(path, encoding="utf-8") as file:
            return (tomllib if toml else json).loads(file.read())
    except RecursionError as error:
        raise CoderError(f"{origin}: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CoderError(f"{origin}: {error.strerror if isinstance(error, OSError) and error.strerror else error}") from error


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


def remove_leftovers(folder: str | Path, name: str | None = None) -> None:
    """Remove the temporary files and folders that killed processes of this machine have left in a folder.

    Args:
        name: only those of the file or folder of this name.
    """
    for each in Path(folder).glob(".*.writing"):
        match = _TEMPORARY.fullmatch(each.name)
        if match and name in (None, match[1]) and match[2] == _host() and not _is_running(int(match[3])):
            _remove(each)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def recover(folder: str | Path) -> None:
    """Clean up a folder after a killed writer, of any machine: temporary files and folders are removed, and a folder that was
    being replaced gets its name back. Only for who holds the folder's lock (:func:`locked`).
    """
    for each in list(Path(folder).glob(".*")):
        whole = each.with_name(each.name.removeprefix(".").removesuffix(".old"))
        if each.name.endswith(".old") and each.is_dir():
            _remove(each) if whole.exists() else os.replace(each, whole)
        elif _TEMPORARY.fullmatch(each.name):
            _remove(each)


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold a folder's lock, ``folder/.lock``. The operating system releases it when the process ends, also when it is killed.

    On file systems without locks a warning is logged and nothing is held.

    Args:
        folder: made if it does not exist.

    Raises:
        CoderError: another process holds the lock, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with locked(folder), locked(folder):  # doctest: +ELLIPSIS
        ...     pass
        Traceback (most recent call last):
        coder_plugin.errors.CoderError: ... is being written by another process: wait for it, stop it, or choose another name
    """
    from filelock import FileLock, Timeout

    lock = None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = FileLock(Path(folder) / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        reason = "is being written by another process: wait for it, stop it, or choose another name"
        raise CoderError(f"{folder} {reason}") from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise CoderError(f"{folder} cannot be written: {error.strerror or error}") from error
        _log.warning("%s cannot be locked (%s): let no second process write to it", folder, error)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def refuse_links(folder: str | Path, *, appended: Container[str] = ()) -> None:
    """Refuse a folder in which writing would change files elsewhere, because an entry is a link.

    Args:
        folder: may itself be a link, or not exist.
        appended: names of files that are written in place, which must have no second name (a hard link) either.

    Raises:
        CoderError: names the entry.
    """
    for each in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []:
        status = each.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        if stat.S_ISLNK(status.st_mode) or (is_file and status.st_nlink > 1 and each.name in appended):
            raise CoderError(f"{each} is a link: writing there would change files elsewhere; replace it by a copy or remove it")
        if not is_file and not stat.S_ISDIR(status.st_mode):
            raise CoderError(f"{each} is neither a file nor a folder: remove it")


def move_into(folder: str | Path, path: str | Path, *, name: str | None = None) -> Path:
    """Move a file or folder into ``folder``, which is made, as ``name`` or its own; if that is taken, with a number behind it.

    Returns:
        The new place.
    """
    path = Path(path)
    place = Path(folder) / (name or path.name)
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place = place.with_name(f"{place.name}-{time.time_ns()}")
    os.replace(path, place)
    fsync_path(place.parent)
    fsync_path(path.parent)
    return place


def remove_folder(path: str | Path) -> None:
    """Remove a folder after renaming it: a kill leaves no half of it under its name."""
    temporary = temporary_path(path)
    os.replace(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


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
        temporary.unlink(missing_ok=True)


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
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # killed between the two renames of replace_folder
        os.replace(old, path)
    remove_leftovers(path.parent, path.name)
    temporary = temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(temporary: Path, path: Path) -> None:
    """Rename a finished folder to ``path`` in the same parent, in place of one that is there, after a wait for the disk."""
    for each in (*temporary.rglob("*"), temporary):
        fsync_path(each)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    try:
        os.replace(temporary, path)
    except OSError as error:
        if old.exists():
            try:
                os.replace(old, path)
            except OSError as second:
                raise OSError(f"what was in {path} is now in {old}: move it back ({second})") from error
        raise
    fsync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)
