"""The exception for mistakes that a user can correct, and the hints in messages: similar names, what to install."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from urllib.parse import unquote, urlparse


class CoderError(ValueError):
    """A mistake that a user can correct. The message says what was wrong and what is allowed.

    The command line prints it in one line and exits with status 2.
    """


def did_you_mean(word: str, *choices: Iterable[str], folder: str = "") -> str:
    """A hint to append to a message, such as ``"; did you mean 'dcl'?"``; empty if no name is similar.

    Args:
        word: the unknown name.
        choices: groups of known names. The hint names the most similar name of the first group that has a similar one.
        folder: of the names, as the user wrote it; the hint names the path.

    Example:
        >>> did_you_mean("dlc", ["clip", "dcl"], ["dlc-2"])
        "; did you mean 'dcl'?"
        >>> did_you_mean("mdcl", ["dcl", "m_dcl"])
        "; did you mean 'm_dcl'?"
        >>> did_you_mean("transformer", ["clip", "dcl"])
        ''
        >>> did_you_mean("scense", ["scenes"], folder="logs")
        "; did you mean 'logs/scenes'?"
    """
    limit = 1 if len(word) < 6 else len(word) // 3
    for names in choices:
        distances = {name: _distance(word.lower(), name.lower()) for name in names}
        nearest = min(distances, key=lambda name: distances[name], default=None)
        if nearest is not None and distances[nearest] <= limit:
            return f"; did you mean {os.path.join(folder, nearest)!r}?"
    return ""


@cache
def install_command(extra: str) -> str:
    """The command that installs one of the extras: ``pip install "coder-plugin[lora]"``, or with the clone's folder where the
    package is installed from a clone by ``pip install -e``.

    Args:
        extra: a name of the optional dependencies in ``pyproject.toml``.
    """
    try:
        origin = json.loads(metadata.distribution("coder-plugin").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    if origin.get("dir_info", {}).get("editable"):
        return f'pip install -e "{unquote(urlparse(origin["url"]).path)}[{extra}]"'
    return f'pip install "coder-plugin[{extra}]"'


def _distance(one: str, other: str) -> int:
    """Number of insertions, deletions, substitutions and swaps of neighbours that turn one word into the other; 0 for words
    that are equal but for ``-`` and ``_``, such as ``mdcl`` and ``m_dcl``."""
    if re.sub("[-_]", "", one) == re.sub("[-_]", "", other):
        return 0
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, other_letter in enumerate(other, 1):
            cost = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (letter != other_letter))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == other_letter:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
