"""Parts: files of encoded images and captions, written while an index is built; and the assembly of the index from them.

Each part is written to a temporary file and renamed, so a part that exists is complete.

Shape letters: N images, T captions, n images of a part, t captions of a part, D dimensions, V embeddings of an image.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_path, atomic_replace, fsync_path
from coder_plugin.index import manifest, records_file, training, vectors_file

#: Fields of a part that are tensors; the tensors of re-ranking are stored under these prefixes.
_TENSORS = ("positions", "image_ids", "images", "texts", "blocks", "last")
_IMAGE, _TEXT = "image_item.", "text_item."


class Part(NamedTuple):
    """Encoded images with their captions, in the data's order."""

    positions: Tensor  # [n] int64, in the data
    image_ids: Tensor  # [n] int64
    keys: list[str]  # n
    captions: list[Sequence[str]]  # n
    thumbnails: list[bytes]  # n JPEG files, empty where there is none
    images: Tensor | None  # [n, D] or [n, V, D]
    texts: Tensor | None  # [t, D], the captions of all images one after the other
    image_item: dict[str, Tensor]  # for re-ranking, [n, ...]; empty without a fusion score
    text_item: dict[str, Tensor]  # [t, ...]
    bad: list[tuple[str, str]]  # kind of fault and key of samples that could not be used
    blocks: Tensor  # [b] int64, numbers of the blocks of images that it is made of
    last: Tensor  # [1] bool, whether the process that wrote it had no more to read


class PartSummary(NamedTuple):
    """A part without its vectors."""

    positions: Tensor  # [n]
    counts: Tensor  # [n] captions of each image
    bad: list[tuple[str, str]]
    blocks: Tensor  # [b]
    last: bool


def largest_shape(shapes: Iterable[Sequence[int]]) -> list[int]:
    """The smallest shape that all of them fit into."""
    return [max(sizes) for sizes in zip(*shapes, strict=True)]


def pad_and_concatenate(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Re-ranking tensors of several batches as one, padded with zeros to the longest."""
    if not batches:
        return {}
    out = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        dtype = values[0].dtype
        for value in values:
            dtype = torch.promote_types(dtype, value.dtype)
        shape = largest_shape(value.shape[1:] for value in values)
        out[name] = torch.zeros(sum(map(len, values)), *shape, dtype=dtype)
        start = 0
        for value in values:
            target: Any = (slice(start, start + len(value)), *(slice(size) for size in value.shape[1:]))
            out[name][target] = value.to(dtype)
            start += len(value)
    return out


def write(path: Path, part: Part) -> None:
    """Write a part to a temporary file, then rename it."""
    from safetensors.torch import save_file

    tensors = {name: value for name in _TENSORS if (value := getattr(part, name)) is not None}
    tensors |= {_IMAGE + name: value for name, value in part.image_item.items()}
    tensors |= {_TEXT + name: value for name, value in part.text_item.items()}
    sizes = torch.tensor([len(file) for file in part.thumbnails], dtype=torch.int64)
    thumbnails = np.frombuffer(b"".join(part.thumbnails) or b"\0", dtype=np.uint8).copy()
    names = json.dumps({"keys": part.keys, "captions": part.captions, "bad": part.bad})
    # a tensor, not metadata: safetensors limits the size of its header, and captions may be long
    text = torch.from_numpy(np.frombuffer(names.encode("utf-8", "surrogatepass"), dtype=np.uint8).copy())
    tensors |= {"thumbnail_sizes": sizes, "thumbnails": torch.from_numpy(thumbnails), "names": text}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {"digest": _digest(tensors)})


def read(path: Path) -> Part:
    """A part as :func:`write` wrote it.

    Raises:
        CoderError: the file is not a part, or is damaged.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if (file.metadata() or {}).get("digest") != _digest(tensors):
                raise ValueError("its content has changed since it was written")
        names = _names(tensors["names"])
        _check(tensors, names)
        content = tensors["thumbnails"].numpy()
        ends = tensors["thumbnail_sizes"].cumsum(0).tolist()
        thumbnails = [content[start:end].tobytes() for start, end in zip([0, *ends], ends, strict=False)]
        return Part(
            tensors["positions"],
            tensors["image_ids"],
            names["keys"],
            names["captions"],
            thumbnails,
            tensors.get("images"),
            tensors.get("texts"),
            {name.removeprefix(_IMAGE): value for name, value in tensors.items() if name.startswith(_IMAGE)},
            {name.removeprefix(_TEXT): value for name, value in tensors.items() if name.startswith(_TEXT)},
            [(kind, key) for kind, key in names["bad"]],
            tensors["blocks"],
            tensors["last"],
        )
    except Exception as error:
        raise _damaged(path, error) from error


def summary(path: Path) -> PartSummary:
    """Positions and counts of a part, without reading its vectors.

    Raises:
        CoderError: the file is not a part, or is damaged.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            names = _names(file.get_tensor("names"))
            tensors = {name: file.get_tensor(name) for name in ("positions", "blocks", "last")}
            _check(tensors, names)
            counts = torch.tensor([len(captions) for captions in names["captions"]], dtype=torch.int64)
            bad = [(kind, key) for kind, key in names["bad"]]
            return PartSummary(tensors["positions"], counts, bad, tensors["blocks"], bool(tensors["last"]))
    except Exception as error:
        raise _damaged(path, error) from error


def _names(text: Tensor) -> dict[str, Any]:
    return json.loads(text.numpy().tobytes().decode("utf-8", "surrogatepass"))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes; of the content and not of the file, whose header it is stored in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check(tensors: Mapping[str, Tensor], names: Mapping[str, Any]) -> None:
    """ValueError unless the types and lengths are those of :class:`Part`: somebody else may have written the file."""
    keys, captions, bad = names["keys"], names["captions"], names["bad"]
    lists = (keys, bad, captions, *(captions if isinstance(captions, list) else ()))
    if not all(isinstance(each, list) for each in lists) or not all(isinstance(each, list) and len(each) == 2 for each in bad):
        raise ValueError("its names are not lists")
    if not all(isinstance(text, str) for texts in (keys, *bad, *captions) for text in texts):
        raise ValueError("its names are not texts")
    images, texts = len(keys), sum(map(len, captions))
    lengths = {"positions": images, "image_ids": images, "thumbnail_sizes": images, "images": images, "texts": texts}
    for name, tensor in tensors.items():
        kind = name.partition(".")[0] + "."
        length = images if kind == _IMAGE else texts if kind == _TEXT else lengths.get(name)
        if length is not None and (tensor.ndim < 1 or len(tensor) != length):
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, not {length} rows")
        if name == "last" and tensor.numel() != 1:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, not one value")
        numbers = ("positions", "image_ids", "thumbnail_sizes", "blocks")
        if name in numbers and (tensor.ndim != 1 or tensor.dtype != torch.int64):
            raise ValueError(f"{name} is {tensor.dtype} of {list(tensor.shape)}")
    if len(captions) != images:
        raise ValueError(f"it has captions of {len(captions)} images and {images} keys")


def _damaged(path: Path, error: Exception) -> CoderError:
    return CoderError(f"{path} is damaged ({error}): remove it, and the same command encodes it and what follows again")


def assemble(folder: Path, paths: Sequence[Path], content: Mapping[str, Any], *, factory: str) -> None:
    """Write the index from its parts: records, FAISS files, re-ranking arrays and, last, the manifest.

    Rows are in the data's order, whichever process encoded them.

    Args:
        folder: the index.
        paths: files of all parts.
        content: fields of the manifest besides sizes and files.
        factory: FAISS index factory string.

    Raises:
        CoderError: no image was encoded; vectors that are not finite; a factory that FAISS does not know or cannot train.
    """
    segment = folder / manifest.SEGMENTS / "00000"
    shutil.rmtree(segment, ignore_errors=True)
    segment.mkdir(parents=True)
    order = _RowOrder(paths)
    scratch = folder / "parts" / "arrays"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    arrays = _MemmapWriter(scratch, order)
    bad: list[tuple[str, str]] = []
    with atomic_path(segment / manifest.RECORDS) as temporary:
        connection = records_file.create(temporary)
        for path in paths:
            part = read(path)
            bad += part.bad
            images, captions = order.rows(part)
            _add_records(connection, part, images, captions)
            arrays.add(part, images, captions)
        records_file.finish(connection)
    if not arrays.vectors:
        raise CoderError("the data have no captions, and only captions were to be indexed: there is nothing to embed")
    files = [segment / manifest.RECORDS]
    sizes = {}
    for kind, array in arrays.vectors.items():
        files.append(segment / f"{kind}.faiss")
        sizes[kind] = {"items": len(array), "views": array.shape[1], "dimensions": array.shape[2]}
        empty = training.train(factory, array.shape[2], partial(_sample, array))
        with atomic_path(files[-1]) as temporary:
            vectors_file.write(temporary, _chunks(array), empty)
    if arrays.items:
        (segment / manifest.RERANK).mkdir()
        for name, array in arrays.items.items():
            array.flush()
            files.append(segment / manifest.RERANK / f"{name}.npy")
            atomic_replace(str(array.filename), files[-1])
        fsync_path(segment)
    counts: dict[str, Any] = {"images": order.images, "captions": order.captions, "unreadable": len(bad)}
    only = {"name": "00000", "images": order.images, "captions": order.captions}
    counts |= {"unreadable_kinds": Counter(kind for kind, _ in bad), "unreadable_keys": [key for _, key in bad[:100]]}
    counts |= {"segments": [only], "files": manifest.sums(folder, files)}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest.write_manifest(folder, {**content, **counts, "vectors": sizes, "made": date})


def _sample(array: Any, size: int) -> np.ndarray:
    rows = training.sample_rows(array.shape[0] * array.shape[1], size)
    return np.ascontiguousarray(array.reshape(-1, array.shape[2])[rows])


def _chunks(array: Any) -> Any:
    for start in range(0, len(array), 4096):
        yield np.ascontiguousarray(array[start : start + 4096]).reshape(-1, array.shape[2])


class _RowOrder:
    """The row of each image and caption of a part, by their positions in the data."""

    def __init__(self, paths: Sequence[Path]) -> None:
        summaries = [summary(path) for path in paths]
        none = torch.zeros(0, dtype=torch.int64)
        self.positions, order = torch.cat([none, *(each.positions for each in summaries)]).sort()
        self.counts = torch.cat([none, *(each.counts for each in summaries)])[order]
        self.first_caption = self.counts.cumsum(0) - self.counts
        self.images, self.captions = len(self.positions), int(self.counts.sum())
        if not self.images:
            raise CoderError("no image could be encoded: see the warnings")

    def rows(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a part's images [n] and of its captions [t]."""
        images = torch.searchsorted(self.positions, part.positions)
        counts = self.counts[images]
        within = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return images.numpy(), (torch.repeat_interleave(self.first_caption[images], counts) + within).numpy()


class _MemmapWriter:
    """Arrays on disk that parts are written into row by row: vectors [N, V, D] and [T, 1, D], and re-ranking tensors."""

    def __init__(self, scratch: Path, order: _RowOrder) -> None:
        self.scratch = scratch
        self.counts = {"images": order.images, "captions": order.captions}
        self.vectors: dict[str, Any] = {}
        self.items: dict[str, Any] = {}

    def add(self, part: Part, images: np.ndarray, captions: np.ndarray) -> None:
        """Write a part's tensors into the rows of its images [n] and captions [t]."""
        for kind, value, rows in (("images", part.images, images), ("captions", part.texts, captions)):
            if value is None or not len(rows):
                continue
            if not bool(value.isfinite().all()):
                raise CoderError(f"the model's vectors of {kind} are not finite, so they cannot be searched")
            value = value if value.ndim == 3 else value[:, None]
            self._write(self.vectors, kind, value.float().numpy(), rows, kind)
        for name, value in part.image_item.items():
            self._write(self.items, f"image_{name}", value.numpy(), images, "images")
        for name, value in part.text_item.items():
            self._write(self.items, f"text_{name}", value.numpy(), captions, "captions")

    def _write(self, arrays: dict[str, Any], name: str, value: np.ndarray, rows: np.ndarray, kind: str) -> None:
        array = arrays.get(name)
        shape = value.shape[1:] if array is None else tuple(largest_shape([array.shape[1:], value.shape[1:]]))
        dtype = value.dtype if array is None else np.promote_types(array.dtype, value.dtype)
        if array is None or array.shape[1:] != shape or array.dtype != dtype:  # a longer item: copy into a larger array
            path = self.scratch / f"{name}-{'x'.join(map(str, shape))}-{dtype}.npy"
            larger = np.lib.format.open_memmap(path, "w+", dtype, (self.counts[kind], *shape))
            if array is not None:
                target: Any = (slice(None), *map(slice, array.shape[1:]))
                larger[target] = array
            arrays[name] = larger
        target = (rows, *map(slice, value.shape[1:]))
        arrays[name][target] = value


def _add_records(connection: Any, part: Part, images: np.ndarray, captions: np.ndarray) -> None:
    image_rows = images.tolist()
    each = zip(image_rows, part.keys, part.image_ids.tolist(), strict=True)
    rows = ((row, key, image_id, None, None) for row, key, image_id in each)
    thumbnails = ((row, file) for row, file in zip(image_rows, part.thumbnails, strict=True) if file)
    owners = (row for row, texts in zip(image_rows, part.captions, strict=True) for _ in texts)
    texts = (text for texts in part.captions for text in texts)
    records_file.add(connection, rows, thumbnails, zip(captions.tolist(), owners, texts, strict=True))
