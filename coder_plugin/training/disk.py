"""Files that cannot be written: one line that says what, where, why, and which checkpoint is whole."""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
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


#: Seconds that another machine has to see a file that rank 0 has written: network file systems cache what is absent.
SEEN_WITHIN = 60.0


def check_shared(folder: Path) -> None:
    """Raise on every rank unless all of them see the files that rank 0 writes: each writes its part of a checkpoint there.

    Args:
        folder: of the run; it exists on rank 0.

    Raises:
        CoderError: a rank does not see the folder. The message names its machine.
    """
    if distributed.world_size() == 1:
        return
    path = folder / f".shared-{distributed.gather_objects(secrets.token_hex(8))[0]}"
    on_first_rank(path.touch)
    error = None
    until = time.monotonic() + SEEN_WITHIN
    while distributed.rank() > 0 and not path.exists():
        if time.monotonic() > until:
            error = CoderError(
                f"rank {distributed.rank()} on {platform.node()} does not see {folder}: all ranks write their part "
                "of a checkpoint there, so --logs must be on a file system that all machines share, under the same path"
            )
            break
        time.sleep(0.2)
    try:
        distributed.raise_on_all_ranks(error)
    finally:
        if distributed.rank() == 0:
            path.unlink(missing_ok=True)
