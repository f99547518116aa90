"""Shards that are not on this machine: ``pipe:`` runs a command, urllib reads ``http(s)://``, fsspec all other addresses.

Only a location that the user has typed gets here (:mod:`coder_plugin.locations`).
"""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from coder_plugin.errors import CoderError

_BLOCK = 1 << 20
#: Seconds that a server may take to answer, and a command to end once its output is closed.
_TIMEOUT, _PATIENCE = 60, 10


def scheme(location: str) -> str:
    """The part of a location before its first colon, in lower case.

    Example:
        >>> scheme("s3://bucket/train-000000.tar"), scheme("pipe:cat a.tar")
        ('s3', 'pipe')
    """
    return location.partition(":")[0].strip().lower()


def is_command(location: str) -> bool:
    """Whether a location is a command that gives a shard, and so no place where somebody else finds it."""
    return scheme(location) == "pipe"


def check_remote(shards: Iterable[str]) -> None:
    """Check, before training, that there is something to read remote shards with.

    Args:
        shards: locations that are not local.

    Raises:
        CoderError: a scheme that nothing reads, a library that is not installed, or ``*`` in a location.
    """
    for name, shard in {scheme(shard): shard for shard in shards}.items():
        if name == "pipe":
            continue
        if "*" in shard:
            raise CoderError(f"{shard!r}: remote shards cannot be listed: name them with braces, such as {{000000..000099}}")
        if name not in ("http", "https"):
            _filesystem(shard)


@contextmanager
def open_remote(shard: str) -> Iterator[IO[bytes]]:
    """A context with a remote shard's content, readable from its start to its end.

    At its end the rest is read, so that a command or a transfer that fails late is noticed.

    Raises:
        OSError: it cannot be opened, or the command that gives it fails; says why.
        CoderError: as of :func:`check_remote`.
    """
    with _command(shard.partition(":")[2]) if is_command(shard) else _open(shard) as file:
        yield file
        while file.read(_BLOCK):
            pass


@contextmanager
def _command(command: str) -> Iterator[Any]:
    """The output of a command, which must end with status 0 if all of it is read."""
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE)
    failed = "the command that reads it ended with status {}"
    try:
        yield process.stdout
    except Exception as exc:
        with suppress(subprocess.TimeoutExpired):
            if (status := process.wait(0.5)) > 0:  # it failed by itself: what was read from it is a consequence
                raise OSError(failed.format(status)) from exc
        raise
    else:
        if status := _end(process):
            raise OSError(failed.format(status))
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    process.stdout.close()
    try:
        return process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def read_small(location: str, most: int) -> bytes | None:
    """The content of a small remote file; None if it cannot be read or has more than ``most`` bytes."""
    try:
        with _open(location) as file:
            content: bytes = file.read(most + 1)
    except Exception:  # absent, not allowed, no connection: the libraries have errors of their own
        return None
    return content if len(content) <= most else None


def _open(shard: str) -> Any:
    if scheme(shard) in ("http", "https"):
        return urllib.request.urlopen(shard, timeout=_TIMEOUT)  # its errors are OSErrors that say what the server answered
    return _filesystem(shard).open(shard, "rb")


def _filesystem(shard: str) -> Any:
    """The file system of a location by fsspec."""
    try:
        import fsspec

        return fsspec.filesystem(scheme(shard))
    except (ImportError, ValueError) as error:  # a library that it needs is not installed; no such scheme
        reason = " ".join(str(error).split())
        raise CoderError(
            f"{shard!r} cannot be read: {reason}; or write a command that gives the shard: 'pipe:COMMAND {shard}'"
        ) from error
