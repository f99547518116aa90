"""Findings: what a check reports. A check that fails is a finding too, so that it cannot stop the others."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, plural

_PACKAGE = Path(__file__).parents[1]
LEVELS = ("ok", "note", "warning", "problem")
_SHOWN = 3
_EACH = 300  # characters of one entry of a list
_LONGEST = 400  # characters of another library's message


@dataclass(frozen=True)
class Finding:
    """One line that says what was found and, unless it is ok, one that says what to do.

    Args:
        level: of :data:`LEVELS`.
        name: ``part.what``, such as ``train.captions.long``; it does not depend on the numbers in ``text``.
    """

    level: str
    name: str
    text: str
    do: str = ""


ok = partial(Finding, "ok")
note = partial(Finding, "note")
warning = partial(Finding, "warning")
problem = partial(Finding, "problem")


def guarded(name: str, check: Callable[..., Iterable[Finding]], *arguments: Any, doing: str = "") -> list[Finding]:
    """The findings of ``check(*arguments)``. An error that it raises is one more, and each warning that it logs.

    ``doing``, of a check that may take long, is printed on standard error before it.
    """
    findings: list[Finding] = []
    if doing:
        echo(f"{doing} …", file=sys.stderr)
    with _captured_warnings() as messages:
        try:
            findings.extend(check(*arguments))
        except CoderError as error:
            findings.append(
                problem(f"{name}.refused", one_line(error), "training would stop here: fix what the message names")
            )
        except (Exception, SystemExit) as error:
            findings.append(_failed(name, error))
    logged = [
        warning(f"{name}.said", text, "nothing, if expected; else fix what the message names") for text in messages
    ]
    return [*logged, *findings]


def _failed(name: str, error: BaseException) -> Finding:
    """A check that raised an unexpected error."""
    where = ""
    if (trace := error.__traceback__) is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
    return problem(
        f"{name}.failed",
        f"the check itself failed: {type(error).__name__}: {one_line(error)}{where}",
        "fix what the message names; if it names nothing of yours, report a bug with this line",
    )


@contextlib.contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """This package's warnings that are logged in the block, each once, instead of on the console."""
    messages: list[str] = []

    class CaptureHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = one_line(record.getMessage())
            if _PACKAGE in Path(record.pathname).parents and text not in messages:
                messages.append(text)

    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [CaptureHandler(logging.WARNING)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield messages
    finally:
        root.handlers = handlers


def one_line(text: object) -> str:
    return _cut(" ".join(str(text).split()), _LONGEST)


def _cut(text: str, most: int) -> str:
    """At most so many characters, without the middle: a message begins with the place and ends with the reason."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[: most - end - 1]}…{text[-end:]}"


def some(names: Iterable[str]) -> str:
    """The first of many names.

    Example:
        >>> some("abcde")
        "'a', 'b', 'c' and 2 more"
    """
    return listed(map(repr, names))


def listed(texts: Iterable[str]) -> str:
    """The first of many texts, without quotes."""
    texts = list(texts)
    shown = ", ".join(_cut(text, _EACH) for text in texts[:_SHOWN])
    return f"{shown} and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else shown


def share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" + (f" ({100 * part / whole:.2g} %)" if 0 < part < whole else "")


def format_findings(findings: Sequence[Finding]) -> str:
    """Findings grouped by part, in their order, and the number of each level."""
    lines: list[str] = []
    for part in dict.fromkeys(each.name.partition(".")[0] for each in findings):
        lines.append(part)
        for each in findings:
            if each.name.partition(".")[0] == part:
                lines.append(f"  {each.level:<8} {' '.join(each.text.splitlines())}")
                if each.do:
                    lines.append(f"  {'':<8}   -> {each.do}")
    counts = Counter(each.level for each in findings)
    totals = [plural(counts[level], level) for level in ("problem", "warning", "note") if counts[level]]
    return "\n".join([*lines, "", ", ".join(totals) or "nothing to do"])


def worst(findings: Sequence[Finding]) -> str:
    """The highest level of the findings."""
    return max((each.level for each in findings), key=LEVELS.index, default="ok")
