"""Reading ahead in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from coder_plugin.data.prefetch import Prefetch


def test_items_come_in_order_and_so_many_are_read_ahead() -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(10):
            read.append(number)
            yield number

    ahead = Prefetch(numbers(), 3)
    assert read == []  # the thread starts with the first item
    assert next(ahead) == 0
    for _ in range(100):
        if len(read) == 5:  # 0 was taken, three wait, one is held
            break
        time.sleep(0.02)
    time.sleep(0.05)
    assert len(read) == 5
    assert list(ahead) == list(range(1, 10)) and list(ahead) == []


def test_an_exception_comes_where_the_item_would() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("x")

    ahead = Prefetch(broken(), 2)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(KeyError):
            next(ahead)


def test_close_stops_the_thread_and_closes_the_iterator() -> None:
    closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    ahead = Prefetch(endless(), 1)
    assert next(ahead) == 1
    ahead.close()
    assert closed.is_set() and list(ahead) == []
    Prefetch(endless(), 1).close()  # not begun
