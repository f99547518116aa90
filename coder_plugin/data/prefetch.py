"""Read ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

_T = TypeVar("_T")


class Prefetch(Generic[_T]):
    """The items of an iterator, of which a thread reads up to ``size`` before they are asked for. It starts with the first one.

    An exception of the iterator is raised where the item would have come.

    Args:
        items: what to read; it runs in the thread.
        size: how many may wait, from 1.

    Example:
        >>> list(Prefetch(iter("abc"), 2))
        ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[_T], size: int) -> None:
        self._items, self._waiting = items, queue.Queue[Any](size)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="coder_plugin-prefetch", daemon=True)
            self._thread.start()
        if self._stopped.is_set():
            raise StopIteration
        failure, item = self._waiting.get()
        if failure is not None:
            self._waiting.put((failure, None))  # for whoever asks again
            raise failure
        return cast(_T, item)

    def close(self) -> None:
        """Stop reading; the iterator is closed in its thread. There are no more items."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        try:
            for item in self._items:
                if not self._put((None, item)):
                    break
            self._put((StopIteration(), None))
        except BaseException as error:
            self._put((error, None))
        finally:
            if hasattr(self._items, "close"):
                self._items.close()

    def _put(self, entry: Any) -> bool:
        while not self._stopped.is_set():
            try:
                self._waiting.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
