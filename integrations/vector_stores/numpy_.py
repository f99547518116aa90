"""NumPy: ``NAME.npy`` with the vectors, and ``NAME.jsonl`` with a JSON object for each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import numpy as np

from coder_plugin.files import atomic_path, remove_leftovers
from coder_plugin.integrations.vector_stores.base import Table, VectorStore, check_no_file, vectors_of


class NumPy(VectorStore):
    """A folder of arrays [N, D], or [N, V, D] of images with several vectors, which ``np.load`` can map into memory."""

    def __init__(self, where: str) -> None:
        check_no_file(where)
        self.folder = Path(where)

    def exists(self, name: str) -> bool:
        return (self.folder / f"{name}.jsonl").exists()

    def write(self, table: Table) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        array, records = self.folder / f"{table.name}.npy", self.folder / f"{table.name}.jsonl"
        remove_leftovers(array)
        remove_leftovers(records)
        shape = (table.dimensions,) if table.views == 1 else (table.views, table.dimensions)
        count = 0
        with atomic_path(records) as lines, atomic_path(array) as vectors:  # the array is renamed first
            with open(vectors, "wb") as file, open(lines, "w", encoding="utf-8") as text:
                start = _write_header(file, (0, *shape))
                for batch in table.batches:
                    count += len(batch)
                    file.write(vectors_of(batch).astype("<f4", copy=False).tobytes())
                    for record in batch.drop_columns("vector").to_pylist():
                        text.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.seek(0)
                assert _write_header(file, (count, *shape)) == start  # NumPy pads it so that rows can be appended
            records.unlink(missing_ok=True)  # between the two renames there is no table
        return count


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> int:
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.tell()
