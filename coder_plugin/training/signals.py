"""SIGTERM, SIGHUP, SIGUSR1 and SIGINT: save at the next step boundary, and leave with a status that schedulers can requeue."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: The exit status of a run that a signal has ended and that can be resumed: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_STATUS = 75
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name))


class StoppedBySignal(SystemExit):
    """Ends the process with status 75, unless it is caught: a signal has stopped the run; ``--resume latest`` continues it."""

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


def _kill_children() -> None:
    """At exit: loading processes inherit the handlers, so the SIGTERM by which multiprocessing ends them does nothing, and it
    would wait for them for ever."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loading process is killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class StopSignals:
    """A context in which the first of the signals is noted instead of ending the process.

    A second SIGINT (Ctrl-C) interrupts at once; further ones of the others change nothing, because schedulers send several.
    SIGHUP, which a closed terminal sends, stays ignored where it is, as under ``nohup``.
    Outside of the main thread, where Python allows no handlers, nothing is changed.

    Attributes:
        received: the signal's name, such as "SIGTERM", or None.

    Example:
        >>> import os
        >>> with StopSignals() as signals:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     signals.received
        'SIGTERM'
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._interrupt = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # nohup, or a daemon
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS if number not in ignored}
            atexit.unregister(_kill_children)
            atexit.register(_kill_children)  # it runs before the function that multiprocessing.util registered when imported
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            if self._interrupt:
                raise StoppedBySignal

    @contextlib.contextmanager
    def interrupting(self, enabled: bool) -> Iterator[None]:
        """A context in which a signal raises :class:`StoppedBySignal` at once, for work that is repeated after resuming.

        Only one process may do so: where other ranks wait for this one, they would wait for ever.
        """
        if enabled and self.received is not None:
            raise StoppedBySignal
        self._interrupt = enabled
        try:
            yield
        finally:
            self._interrupt = False
