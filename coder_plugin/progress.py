"""How far a long command is: a bar with rate and time left on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from coder_plugin.terminal import echo

_T = TypeVar("_T")
#: Seconds between lines where there is no terminal.
INTERVAL = 10.0


class Progress:
    """Counts what is done, on standard error.

    Args:
        total: of what there is to do; None: unknown.
        done: before this process began.
        what: is counted, in the plural, such as "images".
        shown: False to show nothing, as on all ranks but the first.
        position: of the bar, from 0, where several processes show one each.
    """

    def __init__(self, total: int | None, done: int = 0, *, what: str, shown: bool = True, position: int = 0) -> None:
        from tqdm import tqdm

        self.total, self.what, self.begun = total, what, done
        self.done = min(done, total or done)
        terminal = sys.stderr.isatty()
        self.lines = shown and not terminal
        self.bar = tqdm(
            total=total, initial=self.done, desc=what, unit="", unit_scale=True, leave=False, position=position,
            disable=not (shown and terminal),
        )  # fmt: skip
        self.started = self.printed = time.monotonic()
        if done and self.lines:
            echo(f"continuing after {self._count()}", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        """Count ``count`` more."""
        self.advance(self.done + count)

    def advance(self, done: int) -> None:
        """Set what is done in all; it never becomes more than the total."""
        before, self.done = self.done, min(done, self.total or done)
        self.bar.update(self.done - before)
        now = time.monotonic()
        if self.lines and now - self.printed > INTERVAL and self.done != self.total:
            self.printed = now
            rate = (self.done - self.begun) / (now - self.started)
            left = "" if not self.total or rate <= 0 else f", {duration((self.total - self.done) / rate)} left"
            echo(f"{self._count()}, {rate:,.{0 if rate >= 10 else 1}f} per second{left}", file=sys.stderr)

    def estimate(self, total: int, begun: int) -> None:
        """Set what there is to do, and what of it was done before this process began, when they become known.

        Example:
            >>> progress = Progress(None, what="images", shown=False)
            >>> progress.estimate(1000, 500), progress.advance(600), progress.done
            (None, None, 600)
        """
        self.total, self.begun = total, begun
        self.bar.total = total

    def close(self) -> None:
        self.bar.close()

    def _count(self) -> str:
        return f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.what}"


def track(items: Iterable[_T], total: int | None = None, *, what: str, shown: bool = True) -> Iterator[_T]:
    """The items, while a :class:`Progress` counts them.

    Example:
        >>> list(track(["a dog", "a cat"], what="captions"))
        ['a dog', 'a cat']
    """
    with Progress(total, what=what, shown=shown) as progress:
        for item in items:
            yield item
            progress.update()


def duration(seconds: float) -> str:
    """A time in minutes and seconds, or in hours, minutes and seconds.

    Example:
        >>> duration(75), duration(3 * 3600 + 62)
        ('1:15', '3:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
