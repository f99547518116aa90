"""Shards that are not on this machine: which program or library reads them, and how their failures are noticed.

Only a location that the user has typed gets here (:mod:`coder_plugin.locations`).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import IO, Any

import webdataset as wds
from webdataset.gopen import Pipe

from coder_plugin.errors import CoderError

#: Schemes that a program reads which webdataset starts.
_PROGRAMS = {**dict.fromkeys(("http", "https", "sftp", "ftps", "scp"), "curl"), "ais": "ais"}
#: Schemes that a library of fsspec's reads where it is installed, else a program: its package, and the program's command.
_BUCKETS = {
    "s3": ("s3fs", ["aws", "s3", "cp", "--only-show-errors", "{}", "-"]),
    "gs": ("gcsfs", ["gsutil", "cat", "{}"]),
}
#: As webdataset calls it; errors are kept for messages.
_CURL = "curl --connect-timeout 30 --retry 30 --retry-delay 2 --fail --silent --show-error --location".split()
#: Statuses of curl that are no failure: nobody read its output to the end.
_CURL_IGNORED = [141, 23]
#: What curl's usual statuses mean.
_CURL_SAYS = {
    3: "the address is not valid",
    5: "the proxy's name is not known",
    6: "the server's name is not known: check the address and the network",
    7: "the server does not accept the connection: check the address and the network",
    9: "the server refuses access",
    18: "the transfer ended before the file did",
    22: "the server has no such file, or refuses it",
    28: "the server did not answer in time",
    35: "no encrypted connection could be made",
    47: "the server redirects without end",
    51: "the server's certificate is not valid",
    52: "the server closed the connection without an answer",
    55: "the connection broke",
    56: "the connection broke",
    60: "the server's certificate is not trusted",
    67: "the server refuses the login",
    78: "the server has no such file: check the address",
}
_BLOCK = 1 << 20
#: Seconds that a command may take to end once its output is closed, and a small file to arrive.
_PATIENCE = 10


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
        CoderError: a scheme that nothing reads, a program or library that is not installed, or ``*`` in a location.
    """
    examples = {scheme(shard): shard for shard in shards}
    for name, shard in examples.items():
        if name == "pipe":
            continue
        if "*" in shard:
            raise CoderError(f"{shard!r}: remote shards cannot be listed: name them with braces, such as {{000000..000099}}")
        if name in _PROGRAMS:
            _check_program(name, _PROGRAMS[name])
        elif name in _BUCKETS:
            package, (program, *_) = _BUCKETS[name]
            if importlib.util.find_spec(package) is None:
                _check_program(name, program, f", or the package {package} (pip install {package})")
        elif name != "hf":
            _filesystem(shard)


def _check_program(name: str, program: str, otherwise: str = "") -> None:
    if shutil.which(program) is None:
        raise CoderError(f"{name}: locations need the program {program!r}{otherwise}; it is not installed")


@contextmanager
def open_remote(shard: str) -> Iterator[IO[bytes]]:
    """A context with a remote shard's content, readable from its start to its end.

    At its end the rest is read, so that a command or a transfer that fails late is noticed.

    Raises:
        OSError: it cannot be opened, or the command that gives it fails; says why.
        CoderError: as of :func:`check_remote`.
    """
    file = _open(shard)
    try:
        yield file
        while file.read(_BLOCK):
            pass
    except Exception as exc:
        if isinstance(file, Pipe):
            with suppress(subprocess.TimeoutExpired):
                if (status := file.proc.wait(0.5)) > 0:  # it failed by itself: what was read from it is a consequence
                    raise OSError(_reason(shard, file, status)) from exc
        raise
    else:
        if isinstance(file, Pipe) and (status := _end(file)) not in file.ignore_status:
            raise OSError(_reason(shard, file, status))
    finally:
        _end(file)
        if (errors := getattr(file, "errors", None)) is not None:
            errors.close()


def _reason(shard: str, file: Any, status: int) -> str:
    """Why the command that gives a shard failed: in plain words where it is curl, else with the last line of its errors."""
    said = ""
    if (errors := getattr(file, "errors", None)) is not None:
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    command = shard.partition(":")[2].split() if scheme(shard) == "pipe" else []
    if _PROGRAMS.get(scheme(shard)) == "curl" or command[:1] == ["curl"]:
        if status == 22 and (code := re.search(r"error: (\d{3})\b", said)):
            return _http_reason(int(code[1]))
        if status in _CURL_SAYS:
            return f"{_CURL_SAYS[status]} (curl's status {status})"
    return f"the command that gives it ended with status {status}" + (f": {said}" if said else "")


def _http_reason(code: int) -> str:
    """What a server's answer means.

    Example:
        >>> _http_reason(403), _http_reason(599)
        ('the server refuses access (403 Forbidden): check the address and your rights', 'the server failed (599)')
    """
    phrase = f"{code} {HTTPStatus(code).phrase}" if code in set(HTTPStatus) else str(code)
    if code in (404, 410):
        return f"the server has no such file ({phrase}): check the address"
    if code in (401, 403, 407):
        return f"the server refuses access ({phrase}): check the address and your rights"
    return f"the server {'failed' if code >= 500 else 'refuses the request'} ({phrase})"


def _open(shard: str) -> Any:
    name = scheme(shard)
    if name in _BUCKETS:
        package, command = _BUCKETS[name]
        if importlib.util.find_spec(package) is None:
            _check_program(name, command[0], f", or the package {package} (pip install {package})")
            return _start([part.format(shard) for part in command])
    if _PROGRAMS.get(name) == "curl":
        return _start([*_CURL, shard], ignored=_CURL_IGNORED)
    if name == "pipe" or name in _PROGRAMS:
        return wds.gopen(shard)
    return _filesystem(shard).open(shard, "rb")


def _start(command: list[str], *, ignored: Sequence[int] = ()) -> Pipe:
    """Start a command. What it says of errors is kept in a file, ``errors``."""
    errors = tempfile.TemporaryFile()
    pipe = Pipe(command, mode="rb", bufsize=8192, stderr=errors, ignore_status=list(ignored))
    pipe.errors = errors
    return pipe


def _filesystem(shard: str) -> Any:
    """The file system of a location, by fsspec or, for ``hf://``, by huggingface_hub."""
    if scheme(shard) == "hf":
        from huggingface_hub import HfFileSystem

        return HfFileSystem()
    try:
        import fsspec

        return fsspec.filesystem(scheme(shard))
    except (ImportError, ValueError) as error:  # a library that it needs is not installed; no such scheme
        reason = " ".join(str(error).split())
        raise CoderError(
            f"{shard!r} cannot be read: {reason}; write a command that gives the shard instead: 'pipe:COMMAND {shard}'"
        ) from error


def _end(file: Any) -> int:
    """Close what :func:`_open` has opened. Returns a command's status, 0 of anything else."""
    if not isinstance(file, Pipe):
        file.close()
        return 0
    file.stream.close()
    try:
        return int(file.proc.wait(_PATIENCE))
    except subprocess.TimeoutExpired:
        file.proc.kill()
        return int(file.proc.wait())


def read_small(location: str, most: int) -> bytes | None:
    """The content of a small remote file; None if it cannot be read, has more than ``most`` bytes, or takes too long."""
    name = scheme(location)
    if name in _PROGRAMS and _PROGRAMS[name] == "curl":
        command = ["curl", "--silent", "--fail", "--location", "--max-time", str(_PATIENCE), location]
    elif name in _BUCKETS and importlib.util.find_spec(_BUCKETS[name][0]) is None:
        command = [part.format(location) for part in _BUCKETS[name][1]]
    else:
        try:
            with _filesystem(location).open(location, "rb") as file:
                content = file.read(most + 1)
        except Exception:  # absent, not allowed, no connection: the libraries have errors of their own
            return None
        return content if len(content) <= most else None
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    late = threading.Timer(2 * _PATIENCE, process.kill)
    late.start()
    with process:  # closes the pipe and waits
        content = process.stdout.read(most + 1) if process.stdout is not None else b""
        if len(content) > most:
            process.kill()
    late.cancel()
    return content if process.returncode == 0 and len(content) <= most else None
