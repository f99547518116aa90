"""A run's folder: its lock, what must not be a link in it, and disk errors as one line."""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from coder_plugin import distributed
from coder_plugin.distributed import on_every_rank, on_first_rank
from coder_plugin.errors import CoderError
from coder_plugin.files import locked, recover, refuse_links
from coder_plugin.training import checkpoint

#: Seconds that another machine has to see a file that rank 0 has written: network file systems cache what is absent.
SEEN_WITHIN = 60.0


def run_folder(logs: str, name: str) -> Path:
    """The folder of a run: ``logs/name``.

    Raises:
        CoderError: the name is not that of a folder in ``logs``.
    """
    if name in (".", "..") or set(name) & set("/\\\0"):
        raise CoderError(f"--name {name!r} is not a folder's name: leave out / and \\, and give its folder with --logs")
    return Path(logs) / name


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder: rank 0 takes it for all ranks. Call it on every rank.

    Readers (reports, evaluation) take no lock.

    Args:
        folder: of the run, made if it does not exist.

    Raises:
        CoderError: on every rank, if another process holds the lock, the folder cannot be written, or what the trainer
            writes there is a link.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "run"
        >>> with run_lock(folder):
        ...     folder.is_dir()
        True
    """
    with contextlib.ExitStack() as held:

        def take() -> None:
            for part in ("", "checkpoints", "export", "set-aside"):
                refuse_links(folder / part, appended=("metrics.jsonl",))
            held.enter_context(locked(folder))
            for part in ("", "checkpoints", "export"):
                recover(folder / part)

        on_first_rank(take)
        yield


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
        newest = checkpoint.newest(run / "checkpoints")
        whole = "the run has no whole checkpoint yet: remove the cause and start it again"
        if newest is not None:
            whole = f"{newest} is whole: remove the cause, then --resume latest"
        raise CoderError(f"{what} cannot be written to {path}: {reason}; {whole}") from error


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

    def see() -> None:
        until = time.monotonic() + SEEN_WITHIN
        while not path.exists():
            if time.monotonic() > until:
                raise CoderError(
                    f"rank {distributed.rank()} on {platform.node()} does not see {folder}: all ranks write their part "
                    "of a checkpoint there, so --logs must be on a file system that all machines share, under the same path"
                )
            time.sleep(0.2)

    try:
        on_every_rank(see)
    finally:
        if distributed.rank() == 0:
            path.unlink(missing_ok=True)
