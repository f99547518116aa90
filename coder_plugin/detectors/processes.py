"""Extraction in several processes: our own, or a launcher's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from coder_plugin.errors import CoderError


def spawn(work: Callable[[int, int], Any], processes: int) -> None:
    """``work(part, processes)`` for each part in a process of its own; the first that fails ends the others.

    torch's spawn has them end with their parent, too, so that a killed run leaves nobody who goes on writing.
    """
    import torch.multiprocessing as mp

    errors = mp.get_context("spawn").SimpleQueue()
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    try:
        mp.spawn(_run, args=(work, processes, threads, errors), nprocs=processes)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as exc:
        if not errors.empty():
            raise CoderError(errors.get()) from exc
        raise


def _run(part: int, work: Callable[[int, int], Any], processes: int, threads: int, errors: Any) -> None:
    import torch

    torch.set_num_threads(threads)
    try:
        work(part, processes)
    except CoderError as exc:
        errors.put(str(exc))
        raise


def meet() -> None:
    """Wait for the other ranks of a launcher, whose units may take hours longer."""
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()
    if own:
        dist.destroy_process_group()
