"""How a loader's worker takes signals: a terminal and a scheduler send them to all processes of a run."""

from __future__ import annotations

import os
import signal
from types import FrameType


def ignore_stop_signals(worker: int) -> None:
    """Leave SIGINT, SIGUSR1 and the first SIGTERM to the main process, which decides when to stop. A second SIGTERM ends the
    worker: that is how ``DataLoader`` ends one that hangs.

    Args:
        worker: its number, as ``DataLoader`` passes it.
    """
    received = 0

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
