"""Read the text files of precomp folders: captions, ids, and the file names of ids."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path

from coder_plugin.errors import CoderError
from coder_plugin.files import open_regular, read_json

#: Exactly the texts that repr() writes for bytes.
_BYTES = re.compile(r"""b(?:'(?:(?![\\'])[ -~]|\\[\\'tnr]|\\x[0-9a-f]{2})*'|"(?:(?![\\"])[ -~]|\\[\\tnr]|\\x[0-9a-f]{2})*")""")


def lines_of(path: str | Path) -> list[str]:
    """The stripped lines of a file, separated by line feeds only, as in tools that read it in binary.

    Raises:
        CoderError: it cannot be read, or a line is empty or no UTF-8.
    """
    try:
        with open_regular(path, "rb") as file:
            lines = file.read().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    except OSError as exc:
        raise CoderError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    texts = []
    for number, line in enumerate(lines if lines != [b""] else [], 1):
        try:
            text = _decode_bytes_repr(line.decode("utf-8").strip())
        except UnicodeDecodeError:
            text = None
        if not text:
            raise CoderError(f"{path}: line {number} is {'empty' if text == '' else 'not UTF-8 text'}")
        texts.append(text)
    return texts


def _decode_bytes_repr(line: str) -> str:
    """The caption of a line. Some copies of the data hold captions as Python prints bytes, ``b'a dog'``."""
    return str(ast.literal_eval(line).decode("utf-8").strip()) if _BYTES.fullmatch(line) else line


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
