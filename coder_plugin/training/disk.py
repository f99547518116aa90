"""Files that cannot be written: one line that says what, where, why, and which checkpoint is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.training import checkpoint


@contextlib.contextmanager
def writing(what: str, path: Path, run: Path) -> Iterator[None]:
    """A context whose disk errors (full, read-only, failing) become a ``CoderError``.

    Args:
        what: what is written, for the message.
        path: where.
        run: the run's folder, whose newest whole checkpoint is named.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CoderError(f"{what} cannot be written to {path}: {reason}; {whole_checkpoint(run)}") from error


def whole_checkpoint(run: Path) -> str:
    """Which checkpoint of a run is whole, and how to go on from it."""
    newest = checkpoint.newest(run / "checkpoints")
    if newest is None:
        return "the run has no whole checkpoint yet: remove the cause and start it again"
    return f"{newest} is whole: remove the cause, then --resume latest"


def on_first_rank(work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0 while the others wait; if it fails there, every rank raises. Call it on every rank."""
    error = None
    if distributed.rank() == 0:
        try:
            work()
        except Exception as caught:
            error = caught
    distributed.raise_on_all_ranks(error, prefix="rank 0: ")
