"""Which process embeds which unit: each begins with its own stripe, and then takes what nobody has.

A unit that is being embedded has a lock file, whose lock the operating system releases when the process ends, also when it is
killed. There is no other communication.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coder_plugin.index.embeddings_header import Header
from coder_plugin.index.unit_file import UnitSummary, is_complete

log = logging.getLogger(__name__)
#: Seconds between two looks at units that others are embedding.
PATIENCE = 2.0


class Claims:
    """Iterates over the units that this process is to embed, each locked until :meth:`release`.

    Args:
        folder: of the embeddings.
        header: of the folder.
        index: number of this process, from 0.
        count: of processes.
        wait: at the end, wait for units that others are embedding, and take them if these processes end; else leave them.

    Example:
        >>> import tempfile
        >>> header = Header(model={"fingerprint": ""}, plan={}, units=5, dimensions=1)
        >>> list(Claims(Path(tempfile.mkdtemp()), header, index=1, count=2))  # its own, then others' from the end
        [1, 3, 4, 2, 0]
    """

    def __init__(self, folder: Path, header: Header, *, index: int = 0, count: int = 1, wait: bool = False) -> None:
        self.folder, self.header, self.index, self.count, self.wait = folder, header, index, count, wait
        #: Units that were complete when they were looked at.
        self.complete: dict[int, UnitSummary] = {}
        #: Units that another process was embedding when they were looked at last.
        self.busy: set[int] = set()
        self._locks: dict[int, int] = {}  # descriptors
        self._warned = False  # that there are no locks

    def __iter__(self) -> Iterator[int]:
        own = range(self.index, self.header.units, self.count)
        yield from (unit for unit in own if self._claim(unit))
        others = (unit for unit in reversed(range(self.header.units)) if unit % self.count != self.index)
        yield from (unit for unit in others if self._claim(unit))
        while self.busy and self.wait:
            time.sleep(PATIENCE)
            yield from (unit for unit in sorted(self.busy) if self._claim(unit))

    def look_again(self) -> None:
        """Look whether what others were embedding is complete now: units are claimed ahead of those that are written."""
        for unit in sorted(self.busy):
            self._is_complete(unit)

    def release(self, unit: int) -> None:
        """Give a unit back; if its file is complete, nobody takes it again."""
        if (descriptor := self._locks.pop(unit, None)) is not None:
            with suppress(OSError):  # first removed, then released: who opened it before finds the unit complete
                self._lock_file(unit).unlink()
            os.close(descriptor)

    def close(self) -> None:
        """Release all units."""
        for unit in list(self._locks):
            self.release(unit)

    def _claim(self, unit: int) -> bool:
        if self._is_complete(unit) or not self._lock(unit):
            return False
        if self._is_complete(unit):  # by the process that had the lock
            self.release(unit)
            return False
        return True

    def _is_complete(self, unit: int) -> bool:
        summary = is_complete(self.folder / self.header.file(unit), self.header, unit)
        if summary is not None:
            self.complete[unit] = summary
            self.busy.discard(unit)
        return summary is not None

    def _lock(self, unit: int) -> bool:
        try:
            descriptor = lock_file(self._lock_file(unit))
        except OSError as error:
            if unit % self.count != self.index:
                return False
            if not self._warned:
                text = "%s: files cannot be locked there (%s): each process embeds its own share alone"
                log.warning(text, self.folder, error)
            self._warned = True
            return True
        if descriptor is None:
            self.busy.add(unit)
            return False
        self.busy.discard(unit)
        self._locks[unit] = descriptor
        return True

    def _lock_file(self, unit: int) -> Path:
        return self.folder / f".{unit:08d}.lock"


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file, which is made if there is none, until its descriptor is closed or the process ends.

    Args:
        path: the file.
        wait: until another process or thread has released it.

    Returns:
        The descriptor; None if another one has the lock.

    Raises:
        OSError: the file cannot be made, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
