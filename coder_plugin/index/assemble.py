"""Parts of encoded data, put together: FAISS indexes, records, what re-ranking needs, the manifest.

Shape letters: N images, T captions, D dimensions, V embeddings of an image.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_replace
from coder_plugin.index import manifest, parts, records, vectors

#: Folder of the arrays that re-ranking reads.
RERANK = "rerank"


def assemble(folder: Path, paths: Sequence[Path], content: Mapping[str, Any], *, factory: str) -> None:
    """Write the index that the parts hold, in the data's order, whichever part holds what.

    Args:
        folder: the index. paths: of all parts. content: what the manifest says beside sizes and files.

    Raises:
        CoderError: no image was encoded, vectors that are not finite, a factory that FAISS does not know or cannot train.
    """
    shutil.rmtree(folder / RERANK, ignore_errors=True)
    order = _Order(paths)
    scratch = folder / "parts" / "laid"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    laid = _Laid(scratch, order)
    connection = records.create(folder / f".{manifest.RECORDS}.writing")
    bad: list[str] = []
    for path in paths:
        part = parts.read(path)
        bad += part.bad
        rows = order.rows(part)
        _record(connection, part, *rows)
        laid.add(part, *rows)
    records.finish(connection)
    atomic_replace(folder / f".{manifest.RECORDS}.writing", folder / manifest.RECORDS)
    if not laid.vectors:
        raise CoderError("there is nothing to make vectors of: the data hold no captions")
    files = [folder / manifest.RECORDS]
    described = {}
    for kind, array in laid.vectors.items():
        files.append(folder / f"{kind}.faiss")
        described[kind] = {"items": len(array), "views": array.shape[1], "dimensions": array.shape[2]}
        vectors.write(files[-1], array, factory)
    if laid.items:
        (folder / RERANK).mkdir()
        for name, array in laid.items.items():
            array.flush()
            files.append(folder / RERANK / f"{name}.npy")
            shutil.move(str(array.filename), files[-1])
    sizes = {"images": order.images, "captions": order.captions, "unreadable": len(bad), "unreadable_keys": bad[:100]}
    made = {"made": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    manifest.write_manifest(folder, {**content, **sizes, "vectors": described, **made}, files)
    laid.close()


class _Order:
    """Which row each image and caption of a part has: by their positions in the data, ranks having taken turns."""

    def __init__(self, paths: Sequence[Path]) -> None:
        positions, counts = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for path in paths:
            part = parts.outline(path)
            positions.append(part.positions)
            counts.append(part.counts)
        self.positions, order = torch.cat(positions).sort()
        self.counts = torch.cat(counts)[order]
        self.first_caption = self.counts.cumsum(0) - self.counts
        self.images, self.captions = len(self.positions), int(self.counts.sum())
        if not self.images:
            raise CoderError("no image could be encoded: see the warnings")

    def rows(self, part: parts.Part) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a part's images [n] and of its captions [t]."""
        images = torch.searchsorted(self.positions, part.positions)
        counts = self.counts[images]
        within = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return images.numpy(), (torch.repeat_interleave(self.first_caption[images], counts) + within).numpy()


class _Laid:
    """Arrays on the disk that parts are laid into, row by row: vectors [N, V, D] and [T, 1, D], items of re-ranking."""

    def __init__(self, scratch: Path, order: _Order) -> None:
        self.scratch, self.order = scratch, order
        self.vectors: dict[str, Any] = {}
        self.items: dict[str, Any] = {}

    def add(self, part: parts.Part, images: np.ndarray, captions: np.ndarray) -> None:
        for kind, value, rows in (("images", part.images, images), ("captions", part.texts, captions)):
            if value is None or not len(rows):
                continue
            if not bool(value.isfinite().all()):
                raise CoderError(f"the model's vectors of {kind} are not finite: nothing can be found by them")
            value = value if value.ndim == 3 else value[:, None]
            self._into(self.vectors, kind, value.float().numpy(), rows, kind)
        for side, items, rows in (("image", part.image_item, images), ("text", part.text_item, captions)):
            for name, value in items.items():
                self._into(self.items, f"{side}_{name}", value.numpy(), rows, "images" if side == "image" else "captions")

    def _into(self, arrays: dict[str, Any], name: str, value: np.ndarray, rows: np.ndarray, kind: str) -> None:
        there = arrays.get(name)
        shape = value.shape[1:] if there is None else tuple(parts.widest([there.shape[1:], value.shape[1:]]))
        dtype = value.dtype if there is None else np.promote_types(there.dtype, value.dtype)
        if there is None or there.shape[1:] != shape or there.dtype != dtype:  # a longer one has come: lay out anew
            count = self.order.images if kind == "images" else self.order.captions
            path = self.scratch / f"{name}-{'x'.join(map(str, shape))}-{dtype}.npy"
            wider = np.lib.format.open_memmap(path, "w+", dtype, (count, *shape))
            if there is not None:
                own: Any = (slice(None), *map(slice, there.shape[1:]))
                wider[own] = there
            arrays[name] = wider
        place: Any = (rows, *map(slice, value.shape[1:]))
        arrays[name][place] = value

    def close(self) -> None:
        self.vectors.clear()
        self.items.clear()


def _record(connection: Any, part: parts.Part, images: np.ndarray, captions: np.ndarray) -> None:
    rows = zip(images.tolist(), part.keys, part.image_ids.tolist(), part.positions.tolist(), strict=True)
    small = ((row, file) for row, file in zip(images.tolist(), part.thumbnails, strict=True) if file)
    owners = (row for row, own in zip(images.tolist(), part.captions, strict=True) for _ in own)
    texts = (text for own in part.captions for text in own)
    records.add(connection, rows, small, zip(captions.tolist(), owners, texts, strict=True))
