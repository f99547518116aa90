"""An index on the disk, opened to be searched by vectors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.index.assemble import RERANK
from coder_plugin.index.manifest import KINDS, RECORDS, read_manifest
from coder_plugin.index.records import Records
from coder_plugin.index.vectors import Vectors


class Index:
    """What ``coder-plugin index`` has made: vectors of images, of captions or of both, and what they are of.

    Args:
        folder: of the index.
        verify: compare the files' checksums with the manifest's, which reads them once; else their sizes alone.
        parameters: of FAISS's parameter space, such as ``nprobe=16``.
        gpu: search on the first GPU, where FAISS sees one and has a form of this kind of index for it.

    Raises:
        CoderError: no index, an unfinished or a damaged one: says which file.
    """

    def __init__(
        self, folder: str | Path, *, verify: bool = True, parameters: str | None = None, gpu: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.manifest: Mapping[str, Any] = read_manifest(self.folder, verify=verify)
        self.records = Records(self.folder / RECORDS)
        self.vectors = {
            kind: Vectors(self.folder / f"{kind}.faiss", **self.manifest["vectors"][kind], parameters=parameters, gpu=gpu)
            for kind in KINDS
            if kind in self.manifest["vectors"]
        }

    def search(self, queries: np.ndarray | Tensor, k: int, *, kind: str = "images") -> tuple[np.ndarray, np.ndarray]:
        """Scores [q, k] float32, falling, and rows [q, k] int64 of the k best images, or captions, for queries [q, D].

        A score is the inner product of retrieval vectors, of an image with several embeddings the greatest.

        Raises:
            CoderError: no such vectors in this index; queries that are not [q, D], or not finite.
        """
        if isinstance(queries, Tensor):
            queries = queries.float().cpu().numpy()
        return self._of(kind).search(queries, k)

    def vector(self, row: int, *, kind: str = "images") -> np.ndarray:
        """The vectors [V, D] of an item; V is 1 but for images with several embeddings."""
        return self._of(kind).of(row)

    def items(self, kind: str, rows: np.ndarray) -> dict[str, Tensor]:
        """What re-ranking needs of images or captions [n, …]; empty where the index keeps nothing for it."""
        start = f"{RERANK}/{'image' if kind == 'images' else 'text'}_"
        names = [name for name in self.manifest["files"] if name.startswith(start)]
        arrays = {
            name[len(start) : -len(".npy")]: np.load(self.folder / name, mmap_mode="r", allow_pickle=False) for name in names
        }
        return {name: torch.from_numpy(np.ascontiguousarray(array[rows])) for name, array in arrays.items()}

    def close(self) -> None:
        """Give up the file of records; the vectors stay until the object goes."""
        self.records.close()

    def _of(self, kind: str) -> Vectors:
        if kind not in self.vectors:
            raise CoderError(f"{self.folder} has no vectors of {kind}: it has those of {' and '.join(self.vectors)}")
        return self.vectors[kind]
