"""Rows of an index that were removed: two sorted arrays beside the manifest that names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_write
from coder_plugin.index.manifest import KINDS, removed_files


def read_removed(folder: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The rows that were removed, by kind, ascending int64.

    Raises:
        CoderError: a file is something else.
    """
    rows = {kind: np.zeros(0, dtype=np.int64) for kind in KINDS}
    for kind, name in removed_files(manifest).items():
        path = folder / name
        try:
            array = np.load(path, allow_pickle=False)
        except Exception as error:  # the header is parsed as Python, so an error of any kind may come
            raise CoderError(f"{path} is not a list of removed rows: {str(error)[:200]}") from error
        if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.shape != (manifest["removed"][kind],):
            raise CoderError(f"{path} is not a list of {manifest['removed'][kind]} removed rows")
        if len(array) and not (array[0] >= 0 and array[-1] < manifest[kind] and (np.diff(array) > 0).all()):
            raise CoderError(f"{path} lists rows that the index does not have, or not in order")
        rows[kind] = array
    return rows


def write_removed(folder: Path, rows: Mapping[str, np.ndarray], number: int) -> tuple[dict[str, int], list[Path]]:
    """Write new files of removed rows; the manifest's field about them, and the files."""
    fields = {"number": number, **{kind: len(rows[kind]) for kind in KINDS}}
    paths = []
    for kind, name in removed_files({"removed": fields}).items():
        paths.append(folder / name)
        with atomic_write(paths[-1]) as file:
            np.save(file, rows[kind])
    return fields, paths
