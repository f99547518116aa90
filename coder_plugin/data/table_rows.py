"""The rows of a table, none of them lost to a quote that is never closed."""

from __future__ import annotations

import csv
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular

log = logging.getLogger(__name__)


def read_lines(path: str) -> list[str]:
    """The lines of a table in UTF-8, with their ends.

    Raises:
        CoderError: it cannot be read, or is no UTF-8; says where, and how to convert it.
    """
    try:
        with open_regular(path, newline="", encoding="utf-8-sig") as file:
            return list(file)
    except FileNotFoundError as exc:
        raise CoderError(f"{path}: no such file") from exc
    except UnicodeDecodeError as exc:
        raise CoderError(f"{path}: {describe_bytes(path)}") from exc
    except OSError as exc:
        raise CoderError(f"{path}: cannot be read as a table: {exc.strerror or exc}") from exc


def read_rows(lines: Sequence[str], separator: str, image: str, *, name: str = "table") -> Iterator[tuple[int, list[str]]]:
    """The rows of a table, the header first, each with the number of its first line. Empty lines are left out.

    Quotes are those of Python's ``csv``. A quoted field may run over several lines, but if one of these is a row itself, with
    as many columns as the header and an image of the same file ending, the quote was never closed, and is read as a character.
    So is one that the file ends in, or whose field is longer than ``csv`` allows. A warning names the first such line, and
    the first text whose lines may be rows, where the images' endings do not say so.

    Args:
        lines: with their ends, as :func:`read_lines` gives them.
        separator: of the columns.
        image: the name of the images' column.
        name: of the table, for messages.

    Example:
        >>> lines = ['key,text\\n', 'a.jpg,"two\\n', 'lines"\\n', 'b.jpg,"not closed\\n', 'c.jpg,a dog\\n']
        >>> [row[1] for _, row in read_rows(lines, ",", "key")]
        ['text', 'two\\nlines', '"not closed', 'a dog']
    """
    columns: list[str] = []
    stray: list[int] = []
    doubtful: list[int] = []
    start, ended = 0, False

    def rest() -> Iterator[str]:
        nonlocal ended
        yield from map(lines.__getitem__, range(start, len(lines)))
        ended = True  # csv asks for more: the file ends within a quoted field

    def ending(row: list[str]) -> str:
        return PurePath(row[columns.index(image)]).suffix if image in columns and len(row) == len(columns) else ""

    def is_closed(row: list[str], plain: list[str], stop: int) -> bool:
        inner = [next(csv.reader([each], delimiter=separator)) for each in lines[start + 1 : stop]]
        endings = [ending(each) for each in inner if columns and len(each) == len(columns)]
        own = ending(plain) or ending(row)
        if endings and (not own or (own not in endings and any(endings))):
            doubtful.append(start + 1)
        return not own or own not in endings

    while start < len(lines):
        row = plain = lines[start].rstrip("\r\n").split(separator)
        taken = 1
        if '"' in lines[start]:
            reader = csv.reader(rest(), delimiter=separator)
            try:
                row = next(reader)
                taken = reader.line_num
                closed = not ended and (taken == 1 or is_closed(row, plain, start + taken))
            except csv.Error:  # a field that is longer than csv allows
                closed = False
            if not closed:
                row, taken, ended = plain, 1, False
                stray.append(start + 1)
        if lines[start].strip("\r\n"):
            columns = columns or row
            yield start + 1, row
        start += taken
    if stray:
        log.warning(
            "%s: line %d: a quote that is never closed is read as a character (%d such lines): double it, and quote its field",
            name, stray[0], len(stray),
        )  # fmt: skip
    if doubtful:
        log.warning(
            "%s: line %d: a quoted text runs over lines that may be rows (%d such texts): if they are, close the quote there",
            name, doubtful[0], len(doubtful),
        )  # fmt: skip


def describe_bytes(path: str) -> str:
    """Where a file stops being UTF-8, and how to convert it."""
    content, start = Path(path).read_bytes(), 0
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        start = error.start
    line, byte = content.count(b"\n", 0, start) + 1, start - content.rfind(b"\n", 0, start)
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
    output = shlex.quote(str(Path(path).with_suffix(f".utf8{Path(path).suffix}")))
    return (
        f"line {line}, byte {byte} (0x{content[start : start + 1].hex()}) is not UTF-8: convert the file, for example from "
        f"{encoding} with: iconv -f {encoding} -t utf-8 {shlex.quote(path)} > {output}"
    )
