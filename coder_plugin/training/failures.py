"""Work in which one rank may fail: its error is raised there, and every other rank ends with a line that says so.

The launcher (torchrun, accelerate launch, ``srun --kill-on-bad-exit``) ends the ranks that wait for one that has ended. One
that hangs ends them with the process group's timeout, ``--rank-timeout``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from coder_plugin import distributed
from coder_plugin.errors import CoderError

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


def on_every_rank(work: Callable[[], Result]) -> list[Result]:
    """Run ``work`` on every rank and gather its small results, in rank order. If it fails on one rank, all raise.

    Raises:
        CoderError: another rank's error; the rank that failed raises its own.

    Example:
        >>> on_every_rank(lambda: 3)  # one process
        [3]
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    outcomes = distributed.gather_objects((result, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise CoderError(f"rank {rank}: {message}")
    return [each for each, _ in outcomes]


def on_first_rank(work: Callable[[], Result]) -> Result | None:
    """Run ``work`` on rank 0 while the others wait, and return its small result on all; as :func:`on_every_rank`."""
    return on_every_rank(lambda: work() if distributed.rank() == 0 else None)[0]


def names_lost_ranks(method: Method) -> Method:
    """A method that trains: an error that only says that a connection to another rank ended becomes one line.

    Under torchrun the error is recorded for its summary, which names the rank that failed first.
    """

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except Exception as error:
            if "TORCHELASTIC_ERROR_FILE" in os.environ:
                from torch.distributed.elastic.multiprocessing.errors import get_error_handler

                with contextlib.suppress(OSError):
                    get_error_handler().record_exception(error)
            if not _is_lost_connection(error):
                raise
            detail = " ".join(str(error).split())[:200]
            raise CoderError(
                f"rank {distributed.rank()} cannot reach another rank, which has ended (its own message or the launcher's says "
                f"why) or has done nothing for --rank-timeout seconds: {detail}"
            ) from error

    return run  # type: ignore[return-value]


def _is_lost_connection(error: Exception) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and any(word in str(error) for word in words))
