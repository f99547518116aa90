"""An iterator that runs ahead in a thread, so that two stages of a pipeline do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Full, Queue
from typing import Any, TypeVar

_T = TypeVar("_T")
_POLL = 0.1  # seconds between looks at whether the other side has gone


@contextmanager
def ahead(make: Callable[[], Iterator[_T]], *, size: int) -> Iterator[Iterator[_T]]:
    """The items of ``make()``, produced in a thread at most ``size`` ahead of their use; its exception comes after them.

    Leaving the block stops the thread after the item in hand.
    """
    queue: Queue[tuple[str, Any]] = Queue(size)
    left = threading.Event()

    def put(*entry: Any) -> bool:
        while not left.is_set():
            try:
                queue.put(entry, timeout=_POLL)
                return True
            except Full:
                pass
        return False

    def produce() -> None:
        try:
            for item in make():
                if not put("item", item):
                    return
        except BaseException as exc:  # noqa: B036 - raised again where the items are used
            put("error", exc)
        else:
            put("end", None)

    def items() -> Iterator[_T]:
        while True:
            kind, value = queue.get()
            if kind == "item":
                yield value
            elif kind == "error":
                raise value
            else:
                return

    thread = threading.Thread(target=produce, name="ahead", daemon=True)
    thread.start()
    try:
        yield items()
    finally:
        left.set()
        while thread.is_alive():
            try:
                queue.get_nowait()
            except Empty:
                thread.join(_POLL)
