"""One run at a time writes into a folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from coder_plugin import distributed
from coder_plugin.errors import CoderError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_log = logging.getLogger(__name__)
_held: set[int] = set()  # file descriptors


def _close_in_child() -> None:
    """A lock belongs to everything that inherits the open file: without this, workers would hold it after their run's end."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder: rank 0 takes it for all ranks. Call it on every rank.

    It is the kernel's lock on ``folder/.lock``, so it ends with the process, however that ends; the file stays. Readers
    (reports, evaluation) take no lock. On file systems without locks a warning is logged and nothing is held.

    Args:
        folder: of the run, made if it does not exist.

    Raises:
        CoderError: on every rank, if another process holds the lock.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with run_lock(folder):
        ...     (folder / ".lock").read_text().startswith("process")
        True
    """
    error, descriptor = None, None
    if distributed.rank() == 0 and fcntl is not None:
        try:
            descriptor = _lock(folder)
        except OSError as caught:
            error = CoderError(f"{folder} cannot be written: {caught.strerror}")
        except CoderError as caught:
            error = caught
    try:
        distributed.raise_on_all_ranks(error)
        yield
    finally:
        if descriptor is not None:
            _held.discard(descriptor)
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = " ".join(os.read(descriptor, 200).decode(errors="replace").split())
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise CoderError(
                f"{folder} is being written by {holder or 'another process'}: wait for that run, stop it, or choose another "
                "--name"
            ) from None
        _log.warning("%s cannot be locked (%s): start no second run of this name while this one lives", folder, error.strerror)
        return None
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held.add(descriptor)
    return descriptor
