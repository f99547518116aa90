"""Run a function in several processes that share a gloo group, and hand back what each returned."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.spawn import ProcessException

from tests import fresh


def run(function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120) -> list[Any]:
    """``function(*args)`` on every rank -> its results in rank order.

    ``function`` is a module's top-level function; it and its results travel by pickle. An exception on any rank, or
    ``timeout`` seconds, ends all processes and raises here.
    """
    fresh.context()
    with tempfile.TemporaryDirectory() as folder:  # a file as the meeting point: no port to be taken by somebody else
        started = multiprocessing.start_processes(
            _work,
            (function, args, ranks, folder, timeout, dict(os.environ)),
            nprocs=ranks,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + timeout
        try:
            while not started.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{function.__name__} on {ranks} ranks took longer than {timeout:g} s")
        except ProcessException as error:
            # one rank's failure breaks the others' collectives, and torch reports whichever process it saw first
            told = sorted(Path(folder).glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
            raise RuntimeError("\n".join(file.read_text() for file in told) or str(error)) from None
        finally:
            for process in started.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _work(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    folder: str,
    timeout: float,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)  # it may be another than when the server of processes began
    warnings.filterwarnings("ignore", category=FutureWarning, module="open_clip")
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is then no matter
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    try:
        result = function(*args)
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
