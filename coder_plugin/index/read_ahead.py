"""Reading the lists of an inverted file that a search will look at, all at once.

A mapped file is read where it is touched, one place after the other, and the operating system reads around each: of an index
that is larger than memory a search would read gigabytes. Asked beforehand, it reads the lists alone, and many at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from functools import cache
from typing import Any

import numpy as np

#: Seconds after which a list is asked for again: its memory may have been given to others.
_FORGET = 60.0


class ReadAhead:
    """Asks for lists of a mapped inverted file; on Linux, elsewhere it does nothing.

    Args:
        lists: ``faiss.OnDiskInvertedLists`` whose places were checked; it must live as long.
        places: of each list its first byte in the file and its length in bytes, [nlist, 2] int64.
    """

    def __init__(self, lists: Any, places: np.ndarray) -> None:
        page = mmap.PAGESIZE
        starts = int(lists.ptr) + places[:, 0]
        self.starts = starts // page * page
        self.lengths = starts + places[:, 1] - self.starts
        self.asked = places[:, 1] == 0  # of empty ones there is nothing to read
        self._empty, self._since = self.asked.copy(), time.monotonic()

    def ask(self, numbers: np.ndarray) -> None:
        """Ask for lists, int64 of any shape; -1 is none. Returns at once."""
        if sys.platform != "linux":
            return
        if time.monotonic() - self._since > _FORGET:
            self.asked, self._since = self._empty.copy(), time.monotonic()
        numbers = numbers[numbers >= 0]
        wanted = np.unique(numbers[~self.asked[numbers]])
        self.asked[wanted] = True
        for start, length in zip(self.starts[wanted].tolist(), self.lengths[wanted].tolist(), strict=True):
            _madvise()(start, length, mmap.MADV_WILLNEED)


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
