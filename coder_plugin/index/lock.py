"""The lock of an index that is being written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from coder_plugin import distributed
from coder_plugin.errors import CoderError

LOCK = ".lock"


@contextlib.contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """A lock that the first rank holds for all. The operating system releases it when the process ends, also when killed."""
    from filelock import FileLock, Timeout

    problem, lock = None, None
    if distributed.rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            problem = f"{folder} is being written by another process: wait for it, or choose another folder"
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    distributed.raise_on_all_ranks(None if problem is None else CoderError(problem))
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
