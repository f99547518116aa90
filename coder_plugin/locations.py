"""Locations of data and losses in files that others may have written: what runs code or fetches is taken from the user alone.

``--val-data "pipe:…"`` runs a command, a URL fetches, and a loss ``PATH.py:NAME`` is imported. On the
command line the user has typed it. In a run's ``config.json``, a file of ``--config`` or a recipe somebody else may have:
:func:`local_only` marks such a value, and :func:`check_local` and :func:`check_local_loss` refuse the mark where it would be
opened, so that a flag can replace it.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping
from itertools import islice
from typing import Any

from coder_plugin.errors import CoderError

#: The options that name data, by flat name; others name no more than files below these.
LOCATIONS = ("train_data", "val_data", "regions")
#: A pattern of shards in a file may stand for at most so many.
MOST_SHARDS = 1_000_000
_MARK = "<from a file: "
_RANGE = re.compile(r"\{(-?\d{1,30})\.\.(-?\d{1,30})")
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")
_LOCAL = re.compile(r"(file:(?!//[^/])|[A-Za-z]:[\\/])")  # a file's URL, or a drive of Windows
_ADDRESS = re.compile(r"\s*(hf-hub|hf|transformers|https?|ftp|s3|gs):", re.IGNORECASE)
_CHANGED = re.compile(r"[\x00-\x1f\x7f]|\$\{")  # control characters, which URL parsers drop, and variables


def is_local(location: str) -> bool:
    """Whether a location of data names local files only, also after its braces are expanded.

    A location with control characters or ``${variable}`` is not local: readers drop the former and replace the latter.

    Example:
        >>> [is_local(each) for each in ("shards/{0..9}.tar", "a.tar::pipe:cat b.tar", "{s3:,gs:}//x.tar", "file:/x.tar")]
        [True, False, False, True]
    """
    from braceexpand import braceexpand

    if _CHANGED.search(location):
        return False
    spans = (abs(int(first) - int(last)) for first, last in _RANGE.findall(location))
    if max(spans, default=0) > MOST_SHARDS:
        return False
    for part in location.split("::"):
        patterns = [part]
        try:
            patterns += islice(braceexpand(part), MOST_SHARDS + 1)
        except ValueError:  # unbalanced braces, which expand to nothing; the reader reports them
            pass
        if len(patterns) > MOST_SHARDS:
            return False
        if any(_SCHEME.match(each) and not _LOCAL.match(each) for each in patterns):
            return False
    return True


def absolute(location: str) -> str:
    """A location of data whose relative paths begin with the working directory, so that it means the same in another folder.

    Parts that are not local, or of which there is no file, such as a name that a plugin's reader takes, stay as they are.

    Example:
        >>> absolute("https://example.org/{0..9}.tar"), absolute("scenes")
        ('https://example.org/{0..9}.tar', 'scenes')
        >>> absolute(".") == os.getcwd()
        True
    """
    from braceexpand import braceexpand

    if location == "scenes" or location.startswith(_MARK):
        return location
    folder, parts = os.getcwd(), []
    for part in location.split("::"):
        path = part
        try:
            patterns = list(braceexpand(part)) if is_local(part) and not _SCHEME.match(part) else []
        except ValueError:
            patterns = []
        if patterns and not any(map(os.path.isabs, patterns)) and not re.search(r"[{},]|::", folder):
            if os.path.exists(patterns[0]):
                path = os.path.join(folder, part)
                path = path if ".." in part else os.path.normpath(path)  # the folder above a link is that of its target
            elif next(glob.iglob(patterns[0]), None) is not None:
                path = os.path.join(glob.escape(folder), part)
        parts.append(path if is_local(path) else part)
    return "::".join(parts)


def local_only(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by flat name from a file, with a mark on locations that are not local and on losses in Python files."""

    def is_safe(name: str, value: str) -> bool:
        return ".py:" not in value if name == "loss" else name not in LOCATIONS or is_local(value)

    return {
        name: value if not isinstance(value, str) or is_safe(name, value) else f"{_MARK}{value}>"
        for name, value in options.items()
    }


def check_model_addresses(options: Mapping[str, Any], origin: str, flags: Mapping[str, Any]) -> None:
    """Refuse the address of a model to fetch (``hf-hub:``, ``transformers:``, a URL, an encoder's name on the hub) in a file.

    Args:
        options: of the file, by flat name.
        origin: the file, for the message.
        flags: what was typed, which replaces the file's.

    Raises:
        CoderError: names the address, and the flag that opens it all the same.
    """

    def by_flag(values: Mapping[str, Any]) -> dict[str, str]:
        named = {f"--{name} ": str(values[name]) for name in ("model", "pretrained", "loss") if values.get(name)}
        for name in ("set", "model_kwargs"):
            for option, _, value in (each.partition("=") for each in values.get(name) or ()):
                named[f"--{name.replace('_', '-')} {option}="] = value.strip(" '\"")
        return named

    typed = by_flag(flags)
    for flag, value in by_flag(options).items():
        is_encoder = flag == "--model-kwargs text="  # of a region model: a folder, or a name on the hub
        parts = re.split(r"[\s'\"(=,)]+", value) if flag == "--loss " else [value]
        is_address = any(_ADDRESS.match(each) and not os.path.exists(each.partition(":")[2]) for each in parts)
        if flag not in typed and (is_address or (is_encoder and not os.path.isdir(value))):
            what = "a model in the loss" if flag == "--loss " else "the model"
            raise CoderError(
                f"{origin} names {what} {value[:200]!r}, which would be fetched: if you trust it, give it again on the "
                f"command line ({flag}{shlex.quote(value[:200])})"
            )


def check_local_loss(loss: str) -> None:
    """:class:`CoderError` for a loss that :func:`local_only` has marked."""
    _refuse_marked(loss, "a configuration file or recipe names the loss", "which runs a Python file", "--loss")


def check_local(location: str) -> None:
    """:class:`CoderError` for a location of data that :func:`local_only` has marked: names it, and the flags that open it."""
    why = f"which runs a command, fetches, or stands for more than {MOST_SHARDS:,} files"
    _refuse_marked(location, "a configuration file reads data from", why, "--train-data, --val-data, --regions")


def _refuse_marked(value: str, what: str, why: str, flags: str) -> None:
    if value.startswith(_MARK):
        named = value.removeprefix(_MARK).removesuffix(">")
        raise CoderError(f"{what} {named[:200]!r}, {why}: if you trust it, give it again on the command line ({flags})")
