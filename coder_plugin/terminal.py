"""Text from data, printed: a caption or a file's name must not steer the terminal that shows it."""

from __future__ import annotations

import logging
import re
import sys
from typing import IO

#: Control characters but tab and newline, marks that reverse the direction of what follows, separators that terminals
#: treat as newlines, and halves of characters, which cannot be encoded. The joiners of emoji and of Persian are not among them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with escapes in place of characters that a terminal acts on.

    Escapes are JSON's, so JSON that is printed so still has its value. Tabs and newlines stay.

    Args:
        text: any, also with halves of surrogate pairs.

    Example:
        >>> print(printable("red \x1b[2J circle, naïve 猫"))
        red \u001b[2J circle, naïve 猫
    """
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def echo(text: object = "", *, file: IO[str] | None = None) -> None:
    r"""Print a text that may hold words from data; the only way in which commands print.

    What the stream's encoding lacks is escaped as well.

    Args:
        text: anything; :func:`printable` is applied to its string.
        file: a text stream; None: standard output.

    Example:
        >>> echo("a dog\r\x07")
        a dog\u000d\u0007
    """
    stream = sys.stdout if file is None else file
    encoding = getattr(stream, "encoding", None) or "utf-8"
    line = printable(str(text)).encode(encoding, "backslashreplace").decode(encoding)
    print(line, file=stream, flush=True)


def plural(number: int, what: str) -> str:
    """A number with its noun, in the plural unless it is one.

    Example:
        >>> plural(1, "epoch"), plural(2_000, "step"), plural(2, "process")
        ('1 epoch', '2,000 steps', '2 processes')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}{'es' if what.endswith('s') else 's'}"


class PrintableFormatter(logging.Formatter):
    """A log record without characters that a terminal acts on; tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
