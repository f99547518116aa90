"""Read the text files of precomp folders: captions, ids, and the file names of ids."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence

from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular, read_json

#: Exactly the texts that repr() writes for bytes.
_BYTES = re.compile(r"""b(?:'(?:(?![\\'])[ -~]|\\[\\'tnr]|\\x[0-9a-f]{2})*'|"(?:(?![\\"])[ -~]|\\[\\tnr]|\\x[0-9a-f]{2})*")""")


def lines_of(path: str) -> list[str] | None:
    """The stripped lines of a file; None where the file does not exist."""
    if not os.path.exists(path):
        return None
    try:
        with open_regular(path, "rb") as file:
            lines = file.read().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    except OSError as exc:
        raise CoderError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    texts = []
    for number, line in enumerate(lines if lines != [b""] else [], 1):
        try:
            text = decode_bytes_repr(line.decode("utf-8").strip())
        except UnicodeDecodeError:
            text = None
        if not text:
            raise CoderError(f"{path}: line {number} is {'empty' if text == '' else 'not UTF-8 text'}")
        texts.append(text)
    return texts


def decode_bytes_repr(line: str) -> str | None:
    """The caption of a line. Some copies of the data hold captions as Python prints bytes, ``b'a dog'``.

    Returns None for bytes that are not UTF-8.
    """
    if not _BYTES.fullmatch(line):
        return line
    try:
        return ast.literal_eval(line).decode("utf-8").strip()
    except UnicodeDecodeError:
        return None


def are_row_numbers(ids: Sequence[str]) -> bool:
    """Whether ids are 0, 1, 2 … or 1, 2, 3 …: such ids repeat in every split, so they do not identify images."""
    return any(all(name == str(row) for row, name in enumerate(ids, start)) for start in (0, 1))


def read_id_mapping(folder: str) -> dict[str, str]:
    """Ids to file names from ``id_mapping.json`` in this folder or its parent; empty where there is none."""
    for place in (folder, os.path.dirname(os.path.abspath(folder))):
        path = os.path.join(place, "id_mapping.json")
        if not os.path.exists(path):
            continue
        content = read_json(path)
        if not isinstance(content, dict) or not all(isinstance(name, str) and name for name in content.values()):
            raise CoderError(f"{path}: must be an object of ids to file names")
        return content
    return {}
