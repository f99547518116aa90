"""The text files of precomp folders: lists of captions and ids, and what the ids' images are called."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence

from coder_plugin.errors import CoderError

#: What repr() writes for bytes, and nothing else.
_BYTES = re.compile(r"""b(?:'(?:(?![\\'])[ -~]|\\[\\'tnr]|\\x[0-9a-f]{2})*'|"(?:(?![\\"])[ -~]|\\[\\tnr]|\\x[0-9a-f]{2})*")""")


def lines_of(path: str) -> list[str] | None:
    """The lines of a file, without the blanks around them; None where there is no file."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as exc:
        raise CoderError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = []
    for number, line in enumerate(lines):
        try:
            texts.append(plain(line.decode("utf-8").strip()) or "")
        except UnicodeDecodeError as exc:
            raise CoderError(f"{path}: line {number + 1} is not UTF-8 text") from exc
        if not texts[-1]:
            raise CoderError(f"{path}: line {number + 1} is empty")
    return texts


def plain(line: str) -> str | None:
    """The text that a line stands for: some copies have captions as Python prints bytes, ``b'a dog'``; None for bytes that
    are no text."""
    if not _BYTES.fullmatch(line):
        return line
    try:
        return ast.literal_eval(line).decode("utf-8").strip()
    except UnicodeDecodeError:
        return None


def counting(ids: Sequence[str]) -> bool:
    """Whether ids are 0, 1, 2 … or 1, 2, 3 …: those of every split are, so they name no image."""
    return any(all(name == str(place) for place, name in enumerate(ids, start)) for start in (0, 1))


def mapping_of(folder: str) -> dict[str, str]:
    """What ``id_mapping.json`` says, here or one folder up; empty where there is none."""
    for place in (folder, os.path.dirname(os.path.abspath(folder))):
        path = os.path.join(place, "id_mapping.json")
        if not os.path.exists(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError) as exc:
            raise CoderError(f"{path}: cannot be read as JSON: {exc}") from exc
        if not isinstance(content, dict) or not all(isinstance(name, str) and name for name in content.values()):
            raise CoderError(f"{path}: must be an object that gives each id a file name")
        return content
    return {}
