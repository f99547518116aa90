"""The rows that the latest filters allow: an opened index does not change, and many queries share a filter."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from coder_plugin.index.records import Records

_BYTES = 64 << 20
_ENTRY = 1024  # bytes of an entry without its rows, about


class FilterCache:
    """Evaluates filters; its method may be called from any thread.

    Args:
        records: of an opened index.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self._rows: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def where(self, expression: str, kind: str) -> np.ndarray:
        """As :meth:`~coder_plugin.index.records.Records.where`, for rows that are not changed.

        Those of the last filter are kept, and of those before it 64 MiB in all.
        """
        key = expression, kind
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
                return self._rows[key]
        rows = self.records.where(expression, kind=kind)
        with self._lock:
            if key not in self._rows:  # another thread may have been faster
                self._rows[key] = rows
                self._bytes += _size(key, rows)
            while self._bytes > _BYTES and len(self._rows) > 1:
                self._bytes -= _size(*self._rows.popitem(last=False))
        return rows


def _size(key: tuple[str, str], rows: np.ndarray) -> int:
    return rows.nbytes + 4 * len(key[0]) + _ENTRY
