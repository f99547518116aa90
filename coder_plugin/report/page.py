"""What the pages of runs have in common: sections that may be missing, and writing the file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write

log = logging.getLogger(__name__)


class Content(NamedTuple):
    """The content of a section, or None and the reason why there is none."""

    value: Any
    reason: str = ""


def make_content(given: Content, make: Callable[..., Any], *others: Any) -> Content:
    """A section's content, or the reason why there is none.

    A bug in one section is logged and shown there. It must not end a run that has trained for days.

    Args:
        given: what the section is made of; without a value its reason is the section's.
        make: called with the value and the others.
    """
    if given.value is None:
        return given
    try:
        return Content(make(given.value, *others))
    except CoderError as error:
        return Content(None, str(error))
    except Exception as error:
        log.warning("a section of the report could not be made", exc_info=True)
        return Content(None, f"this section could not be made: {type(error).__name__}: {error}")


def write_page(path: Path, page: str) -> Path:
    """Write a page as a whole or not at all.

    Raises:
        CoderError: it cannot be written.
    """
    try:
        with atomic_write(path, "w") as file:
            file.write(page)
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
