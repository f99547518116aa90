"""Filters by metadata columns: the values that a result must have, as an SQL expression over the index's records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coder_plugin.errors import CoderError

#: Different values of a column that the page offers as a list; of more it takes a typed one.
MOST_VALUES = 100
_LONGEST = 8000  # characters of an expression


def expression(filters: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """What a search takes as ``where``: all columns must have their value, or one of their values.

    Args:
        filters: a value or a list of values for each column: texts, numbers, bool, or None for images without a value.
        columns: the index's metadata columns, and the type of each.

    Returns:
        None without filters.

    Raises:
        CoderError: the index has no such column; a value that no column has; too many of them.

    Example:
        >>> print(expression({"source": ["coco", "it's"], "safe": True}, {"source": "string", "safe": "bool"}))
        "source" IN ('coco', 'it''s') AND "safe" = 1
    """
    parts = []
    for name, value in filters.items():
        if name not in columns:
            raise CoderError(f"the index has no column {name[:100]!r} to filter by, only {', '.join(columns) or 'none'}")
        values = value if isinstance(value, list) else [value]
        several = [_literal(name, each, columns[name]) for each in values if each is not None]
        either = [f'"{name}" IS NULL'] if None in values else []
        if several:
            either.append(f'"{name}" = {several[0]}' if len(several) == 1 else f'"{name}" IN ({", ".join(several)})')
        if not either:
            raise CoderError(f"the filter {name} has no values")
        parts.append(either[0] if len(either) == 1 else f"({' OR '.join(either)})")
    whole = " AND ".join(parts)
    if len(whole) > _LONGEST:
        raise CoderError("the filters are too long: give fewer values")
    return whole or None


#: Types of a value that each type of column can have.
_TYPES = {"string": (str,), "int64": (int, float), "float64": (int, float), "bool": (bool, int)}


def _literal(name: str, value: Any, kind: str) -> str:
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise CoderError(f"the filter {name} has a value that no column of type {kind} has")
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str) and "\0" not in value:
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, int) and abs(value) < 1 << 63:
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise CoderError(f"the filter {name} has a value that no column has")


def offered(records: Any, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """The filters of the page: ``name``, ``type``, and ``values``, ascending, which are None where a text is to be typed.

    Args:
        records: of the index.
        columns: as in :func:`expression`. Numbers with many values are left out: nobody types one.
    """
    filters = []
    for name, kind in columns.items():
        try:
            values: Sequence[Any] | None = records.values(name, MOST_VALUES)
        except CoderError:  # too large to be looked through in time
            values = None
        if values or (values is None and kind == "string"):
            filters.append({"name": name, "type": kind, "values": values})
    return filters
