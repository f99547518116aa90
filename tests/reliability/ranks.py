"""Run a function in several forked processes that train together, each with its own output, and see how they end.

The test's process has imported torch, so a rank starts in a fraction of a second. The ranks meet as under SLURM: rank 0's
process holds the key-value store.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coder_plugin.concepts import scenes_vocabulary
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Args:
        status: exit status, or minus the signal's number.
        output: what it printed.
        seconds: from the file ``fault`` being written, or from the start where it is not, to the end.
    """

    status: int
    output: str
    seconds: float


@functools.cache
def _prepare() -> None:
    """What each rank would import and compute by itself."""
    import accelerate  # noqa: F401
    import timm.optim  # noqa: F401

    open_scenes("train"), open_scenes("val"), scenes_vocabulary()  # which keep their results


def run(function: Callable[[Path], object], folder: Path, *, ranks: int = 2, timeout: float = 90) -> list[Ending]:
    """``function(folder)`` in each rank -> how they ended, in rank order.

    A function that is about to fail writes the file ``folder/fault``, from which the time is counted. AssertionError if a
    rank takes longer than ``timeout`` seconds, or leaves a process behind.
    """
    _prepare()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    sys.stderr.flush()
    started, group = time.time(), 0
    pids: list[int] = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _work(function, folder, rank, ranks, port, group)
        group = group or pid
        os.setpgid(pid, group)
        pids.append(pid)
    ended: dict[int, tuple[int, float]] = {}
    try:
        while len(ended) < ranks and time.time() < started + timeout:
            for rank, pid in enumerate(pids):
                if rank not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[rank] = (os.waitstatus_to_exitcode(found[1]), time.time())
            time.sleep(0.02)
        late = sorted(set(range(ranks)) - ended.keys())
        outputs = [Path(folder, f"{rank}.output").read_text() for rank in range(ranks)]
        assert not late, f"ranks {late} did not end within {timeout:g} s:\n" + "\n".join(outputs)
        assert not _members(group), f"processes are left: {_members(group)}"
    finally:
        for pid in _members(group):
            os.kill(pid, signal.SIGKILL)
    fault = folder / "fault"
    since = fault.stat().st_mtime if fault.exists() else started
    return [Ending(ended[rank][0], outputs[rank], ended[rank][1] - since) for rank in range(ranks)]


def _work(function: Callable[[Path], object], folder: Path, rank: int, ranks: int, port: int, group: int) -> None:
    """A rank's life; it ends as the command line does."""
    status = 1
    try:
        os.setpgid(0, group)
        output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        function(folder)
        status = 0
    except CoderError as error:
        print(f"coder-plugin: error: {error}", file=sys.stderr)
        status = 2
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found
