"""The rows of a table, none of them lost to a quote that is never closed."""

from __future__ import annotations

import csv
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import PurePath

log = logging.getLogger(__name__)


def read_rows(file: Iterable[str], separator: str, image: str, *, name: str = "table") -> Iterator[tuple[int, list[str]]]:
    """The rows of a table, the header first, each with the number of its first line. Empty lines are left out.

    Quotes are those of Python's ``csv``. A quoted field may run over several lines, but if one of these is a row itself, with
    as many columns as the header and an image of the same file ending, the quote was never closed, and is read as a character.
    So is one that the file ends in, or whose field is longer than ``csv`` allows. A warning names the first such line, and
    the first text whose lines may be rows, where the images have no ending to tell this by.

    Args:
        file: lines with their ends, as of a file opened with ``newline=""``.
        separator: of the columns.
        image: the name of the images' column.
        name: of the table, for messages.

    Example:
        >>> lines = ['key,text\\n', 'a.jpg,"two\\n', 'lines"\\n', 'b.jpg,"not closed\\n', 'c.jpg,a dog\\n']
        >>> [row[1] for _, row in read_rows(lines, ",", "key")]
        ['text', 'two\\nlines', '"not closed', 'a dog']
    """
    lines, again = iter(file), deque[str]()  # again: lines that were read as part of a field, and are rows
    columns: list[str] = []
    stray: list[int] = []
    doubtful: list[int] = []

    def take(taken: list[str]) -> Iterator[str]:
        while line := again.popleft() if again else next(lines, ""):
            taken.append(line)
            yield line
        taken.append("")  # csv asks for more: the file ends within a quoted field

    def ending(row: list[str]) -> str:
        return PurePath(row[columns.index(image)]).suffix if image in columns and len(row) == len(columns) else ""

    def is_closed(row: list[str], plain: list[str], taken: list[str]) -> bool:
        inner = [next(csv.reader([each], delimiter=separator)) for each in taken[1:]]
        endings = [ending(each) for each in inner if columns and len(each) == len(columns)]
        own = ending(plain) or ending(row)
        if taken[-1] and endings and not own:
            doubtful.append(number)
        return bool(taken[-1]) and (not own or own not in endings)

    number = 1
    while line := again.popleft() if again else next(lines, ""):
        row = plain = line.rstrip("\r\n").split(separator)
        taken: list[str] = []
        if '"' in line:
            again.appendleft(line)
            try:
                row = next(csv.reader(take(taken), delimiter=separator))
                closed = len(taken) == 1 or is_closed(row, plain, taken)
            except csv.Error:  # a field that is longer than csv allows
                closed = False
            if not closed:
                again.extendleft(filter(None, reversed(taken[1:])))
                del taken[1:]
                row = plain
                stray.append(number)
        if line.strip("\r\n"):
            columns = columns or row
            yield number, row
        number += len(taken) or 1
    if stray:
        log.warning(
            "%s: line %d: a quote that is never closed is read as a character (%d such lines): double it, and quote its field",
            name, stray[0], len(stray),
        )
    if doubtful:
        log.warning(
            "%s: line %d: a quoted text runs over lines that may be rows (%d such texts): if they are, close the quote there",
            name, doubtful[0], len(doubtful),
        )
