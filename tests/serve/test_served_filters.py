"""Filters by metadata columns as SQL: what they find, and values that would be more than values."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

fastapi = pytest.importorskip("fastapi")

from coder_plugin.serve.app import expression  # noqa: E402

COLUMNS = {"source": "string", "width": "int64", "weight": "float64", "safe": "bool"}
ROWS = [
    ("coco", 640, 0.5, 1),
    ("it's", 320, 1e300, 0),
    ("' OR 1 = 1 --", 0, -2.0, None),
    ('"; DROP TABLE images', -(2**63) + 1, None, 1),
    (None, None, 0.25, 0),
    ("", 1, 1.0, 1),
    ("猫\n\\", 2, 2.0, 0),
]


@pytest.fixture(scope="module")
def connection() -> Any:
    connection = duckdb.connect(":memory:")
    connection.execute("CREATE TABLE images (row BIGINT, source VARCHAR, width BIGINT, weight DOUBLE, safe BOOLEAN)")
    connection.executemany("INSERT INTO images VALUES (?, ?, ?, ?, ?)", [(n, *row) for n, row in enumerate(ROWS)])
    return connection


def found(connection: Any, filters: dict[str, Any]) -> list[int]:
    where = expression(filters, COLUMNS)
    return [row for (row,) in connection.execute(f"SELECT row FROM images WHERE ({where}\n) ORDER BY row").fetchall()]


@pytest.mark.parametrize("column", range(4))
def test_each_value_finds_its_rows(connection: Any, column: int) -> None:
    name = list(COLUMNS)[column]
    for row in ROWS:
        value = bool(row[column]) if name == "safe" and row[column] is not None else row[column]
        assert found(connection, {name: value}) == [n for n, each in enumerate(ROWS) if each[column] == row[column]]


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ({"source": ["coco", "", "nobody's"]}, [0, 5]),
        ({"source": ["coco", None]}, [0, 4]),
        ({"source": [None]}, [4]),
        ({"source": "coco", "width": 320}, []),
        ({"safe": True, "width": [640, 1]}, [0, 5]),
        ({"source": [None, "coco"], "safe": False}, [4]),
        ({"source": "x') OR ('1' = '1"}, []),
    ],
)
def test_filters_hold_together(connection: Any, filters: dict[str, Any], rows: list[int]) -> None:
    assert found(connection, filters) == rows


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"key": "x"}, "the index has no column 'key' to filter by, only source, width, weight, safe"),
        ({"source\" = 'x' OR \"width": "x"}, "the index has no column"),
        ({"source": "a\0b"}, "the filter source has a value that no column of type string has"),
        ({"width": 2**63}, "the filter width has a value that no column of type int64 has"),
        ({"weight": float("nan")}, "the filter weight has a value that no column of type float64 has"),
        ({"weight": float("inf")}, "the filter weight has a value that no column of type float64 has"),
        ({"source": {"a": 1}}, "the filter source has a value that no column of type string has"),
        ({"source": True}, "the filter source has a value that no column of type string has"),
        ({"width": "abc"}, "the filter width has a value that no column of type int64 has"),
        ({"width": True}, "the filter width has a value that no column of type int64 has"),
        ({"source": ["x" * 200] * 50}, "the filters are too long: give fewer values"),
    ],
)
def test_what_is_no_filter(filters: dict[str, Any], words: str) -> None:
    with pytest.raises(fastapi.HTTPException) as error:
        expression(filters, COLUMNS)
    assert error.value.status_code == 422 and words in error.value.detail
    with pytest.raises(fastapi.HTTPException, match="only none"):
        expression({"source": "x"}, {})
