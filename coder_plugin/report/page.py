"""A page of sections, each of blocks that ``templates/report.html`` shows; what cannot be made is named with the reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin import __version__
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import RECALL_COLUMNS
from coder_plugin.files import atomic_write
from coder_plugin.html import render
from coder_plugin.report.charts import Figure

log = logging.getLogger(__name__)
#: A block's kind and its content, such as ``{"note": "a remark"}``.
Block = dict[str, Any]
#: The figures of the recall table in its order, with their names; of median ranks less is better.
RECALL = {"rsum": "R@sum"} | {key: name for name, key in RECALL_COLUMNS.items()}
#: What the names mean.
RECALL_NOTE = (
    "i2t: captions are ranked for an image; t2i: images for a caption. R@K in percent, R@sum their sum, MedR: median rank, of "
    "which less is better."
)
#: Cells of a column that is aligned to the right if it has no others.
_NUMBER = re.compile(r"(–|[\d,]+(\.\d+)?)$")


class Section(NamedTuple):
    """A part of a page: its anchor, its title and its blocks."""

    anchor: str
    title: str
    blocks: Sequence[Block]


class Cell(NamedTuple):
    """A cell of a table: its text, its difference to the first cell of its row, and whether it is the row's best."""

    text: str = "–"
    difference: str = ""
    best: bool = False


def note(text: str) -> Block:
    return {"note": text}


def heading(text: str) -> Block:
    return {"heading": text}


def figures(made: Sequence[Figure], *, wide: bool = False) -> list[Block]:
    return [{"figures": made, "wide": wide}] if made else []


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[Any]]], *, fold: str = "", narrow: bool = False) -> Block:
    """Rows with their names; cells are texts or :class:`Cell`.

    Args:
        head: names of the columns; empty: none are shown.
        fold: a title under which the table is folded away.
        narrow: the table fits a phone, which shows the rows of others as cards.
    """
    rows = [(name, [each if isinstance(each, Cell) else Cell(str(each)) for each in cells]) for name, cells in rows]
    numbers = [all(_NUMBER.match(cell.text) for cell in column) for column in zip(*(cells for _, cells in rows), strict=False)]
    return {"table": {"head": head, "rows": rows, "fold": fold, "narrow": narrow, "numbers": numbers}}


def attempt(make: Callable[..., list[Block]], *arguments: Any) -> list[Block]:
    """The blocks that ``make`` returns, or a note with the reason why there are none.

    An unexpected error is logged and shown there: it must not end a run that has trained for days.
    """
    try:
        return make(*arguments)
    except CoderError as error:
        return [note(f"Not shown: {error}")]
    except Exception as error:
        log.warning("a section of the report could not be made", exc_info=True)
        return [note(f"Not shown: this section could not be made: {type(error).__name__}: {error}")]


def recall_cells(results: Mapping[str, Any]) -> list[str]:
    """One evaluation's cells, in the order of :data:`RECALL`.

    Example:
        >>> recall_cells({"rsum": 266.34, "i2t_r1": 40.0})[:3]
        ['266.3', '40.0', '–']
    """
    return [f"{results[key]:,.1f}" if key in results else "–" for key in RECALL]


def write_page(path: Path, title: str, sections: Sequence[Section], **values: Any) -> Path:
    """Render a page and write it as a whole or not at all.

    Args:
        path: of the file. title: of the page. sections: in their order.
        **values: ``subtitle``, ``problems`` (texts) and ``tiles`` (numbers and what they count).

    Raises:
        CoderError: the file cannot be written.
    """
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    values = {"subtitle": "", "problems": (), "tiles": (), **values}
    page = render("report.html", title=title, sections=sections, version=__version__, written=written, **values)
    try:
        with atomic_write(path, "w") as file:
            # a file system and JSON can hold halves of characters, which UTF-8 cannot
            file.write(page.encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise CoderError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error
    return path


def format_seconds(seconds: float) -> str:
    """A duration in words.

    Example:
        >>> [format_seconds(each) for each in (0.25, 9.04, 75, 3720)]
        ['0.25 s', '9.0 s', '1 min 15 s', '1 h 02 min']
    """
    if seconds < 60:
        return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 9.95 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
