"""What a loader's worker does besides loading: it takes signals as its main process wants, and ends with it."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from types import FrameType


def start_worker(worker: int) -> None:
    """The ``worker_init_fn`` of our loaders.

    A terminal and a scheduler send signals to all processes of a run. SIGINT, SIGUSR1 and the first SIGTERM are left to the
    main process, which decides when to stop. A second SIGTERM ends the worker: that is how ``DataLoader`` ends one that hangs.

    A worker also ends when its main process is killed. By itself it would wait for ever, if its results do not fit into the
    pipe that nobody reads any more.

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
    if (main := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(main,), daemon=True).start()


def _end_with(main: BaseProcess) -> None:
    main.join()
    os._exit(1)
