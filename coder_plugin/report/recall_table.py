"""The table of recall: R@sum, then both directions, which stand below each other on a narrow screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coder_plugin.evaluation.metrics import RECALL_COLUMNS

#: The directions in the order of the table.
DIRECTIONS = {"i2t": "Image to text", "t2i": "Text to image"}
_NAMES = {key: label for label, key in RECALL_COLUMNS.items()}


class Cell(NamedTuple):
    """A number, its difference to the first row's if that is shown, and whether it is the best of its column."""

    text: str = "–"
    difference: str = ""
    best: bool = False


class Column(NamedTuple):
    """A column: the direction it belongs to, or nothing; its name there; the key of its figures; whether lower is better."""

    direction: str
    name: str
    key: str

    @property
    def lower_is_better(self) -> bool:
        return self.key.endswith("medr")


#: R@sum, then for each direction R@1, R@5, R@10 and the median rank.
COLUMNS = (
    Column("", _NAMES["rsum"], "rsum"),
    *(
        Column(title, _NAMES[f"{way}_{figure}"].split()[-1], f"{way}_{figure}")
        for way, title in DIRECTIONS.items()
        for figure in ("r1", "r5", "r10", "medr")
    ),
)


def cells(figures: Mapping[str, Any]) -> list[Cell]:
    """A row's cells, in the order of :data:`COLUMNS`.

    Example:
        >>> [cell.text for cell in cells({"rsum": 266.34, "i2t_r1": 40.0})][:3]
        ['266.3', '40.0', '–']
    """
    return [Cell(f"{figures[column.key]:.1f}") if column.key in figures else Cell() for column in COLUMNS]


def compared_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Cell]]:
    """The cells of several rows: each with its difference to the first row, the best of a column marked.

    Numbers are compared as they are shown. Where all are equal, or there is but one, none is the best.

    Example:
        >>> (first,), (second,) = [row[:1] for row in compared_cells([{"rsum": 250.0}, {"rsum": 251.5}])]
        >>> first, second
        (Cell(text='250.0', difference='', best=False), Cell(text='251.5', difference='+1.5', best=True))
    """
    table = [[Cell() for _ in COLUMNS] for _ in rows]
    for place, column in enumerate(COLUMNS):
        values = [round(float(row[column.key]), 1) if column.key in row else None for row in rows]
        known = [value for value in values if value is not None]
        best = (min if column.lower_is_better else max)(known) if len(set(known)) > 1 else None
        for number, value in enumerate(values):
            if value is not None:
                first = values[0] if number else None
                difference = "" if first is None else f"{value - first:+.1f}".replace("+0.0", "±0").replace("-0.0", "±0")
                table[number][place] = Cell(f"{value:.1f}", difference, value == best)
    return table
