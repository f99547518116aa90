"""What a check has found, how a check is run so that none can end the others, and how findings are shown."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError

_PACKAGE = Path(__file__).parents[1]
LEVELS = ("ok", "note", "warning", "problem")
_SHOWN = 3
_EACH = 160  # characters of one thing in a list
_LONGEST = 400  # characters of somebody else's message


@dataclass(frozen=True)
class Finding:
    """One line on what was found and, unless all is well, one on what to do.

    Args:
        level: of :data:`LEVELS`.
        name: ``part.what``, such as ``train.captions.long``; it stays the same whatever the numbers in ``text``.
    """

    level: str
    name: str
    text: str
    do: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding("ok", name, text)


def note(name: str, text: str, do: str) -> Finding:
    return Finding("note", name, text, do)


def warning(name: str, text: str, do: str) -> Finding:
    return Finding("warning", name, text, do)


def problem(name: str, text: str, do: str) -> Finding:
    return Finding("problem", name, text, do)


def guarded(name: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """The findings of ``check(*arguments)``. What it raises is one more of them, and what it logs, each is a warning."""
    found: list[Finding] = []
    with _heard() as said:
        try:
            found.extend(check(*arguments))
        except CoderError as error:
            found.append(problem(f"{name}.refused", one_line(error), "training would stop here: put right what it names"))
        except (Exception, SystemExit) as error:
            found.append(failed(name, error))
    told = [warning(f"{name}.said", text, "nothing, if you knew; else put right what it names") for text in said]
    return [*told, *found]


def failed(name: str, error: BaseException) -> Finding:
    """That a check itself did not work."""
    where = ""
    if (trace := error.__traceback__) is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
    return problem(
        f"{name}.failed",
        f"the check itself failed: {type(error).__name__}: {one_line(error)}{where}",
        "mend what the message names; if it names nothing of yours, report it with this line",
    )


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """The warnings that are logged in the block, each once, instead of on the console."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = one_line(record.getMessage())
            if _PACKAGE in Path(record.pathname).parents and text not in said:  # others talk, too
                said.append(text)

    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [Ear(logging.WARNING)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield said
    finally:
        root.handlers = handlers


def one_line(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def some(names: Iterable[str]) -> str:
    """The first names of many: ``'a', 'b', 'c' and 7 more``."""
    return listed(map(repr, names))


def listed(texts: Iterable[str]) -> str:
    """The first texts of many, as they are."""
    texts = list(texts)
    shown = ", ".join(text if len(text) <= _EACH else f"{text[: _EACH - 1]}…" for text in texts[:_SHOWN])
    return f"{shown} and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else shown


def many(count: int, what: str) -> str:
    """``1 pair``, ``2 pairs``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" + (f" ({100 * part / whole:.2g} %)" if 0 < part < whole else "")


def bytes_text(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def format_findings(found: Sequence[Finding]) -> str:
    """Findings by the part that they are of, in the order in which they were made, and how many there are of each level."""
    lines: list[str] = []
    for part in dict.fromkeys(each.name.partition(".")[0] for each in found):
        lines.append(part)
        for each in found:
            if each.name.partition(".")[0] == part:
                lines.append(f"  {each.level:<8} {each.text}")
                if each.do:
                    lines.append(f"  {'':<8}   -> {each.do}")
    counts = Counter(each.level for each in found)
    told = [many(counts[level], level) for level in ("problem", "warning", "note") if counts[level]]
    return "\n".join([*lines, "", ", ".join(told) or "nothing to do"])


def worst(found: Sequence[Finding]) -> str:
    return max((each.level for each in found), key=LEVELS.index, default="ok")
