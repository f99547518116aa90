"""What an index is made of while it is made: files of encoded images and captions, each whole or not there.

Shape letters: n images of a part, t captions, D dimensions, V embeddings of an image.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_replace

#: Fields of a part that are tensors of their own; the items of re-ranking are named by their prefix.
_TENSORS = ("positions", "image_ids", "images", "texts")
_IMAGE, _TEXT = "image_item.", "text_item."


class Part(NamedTuple):
    """Encoded images with their captions, in the data's order."""

    positions: Tensor  # [n] int64, in the data
    image_ids: Tensor  # [n] int64
    keys: list[str]  # n
    captions: list[Sequence[str]]  # n
    thumbnails: list[bytes]  # n, of a picture's file, empty where there is none
    images: Tensor | None  # [n, D] or [n, V, D]
    texts: Tensor | None  # [t, D], all captions one after the other
    image_item: dict[str, Tensor]  # of re-ranking, [n, ...]; empty where nothing re-ranks
    text_item: dict[str, Tensor]  # [t, ...]
    bad: list[str]  # keys of images that could not be read


def widest(shapes: Iterable[Sequence[int]]) -> list[int]:
    """The least shape that all of them fit into."""
    return [max(sizes) for sizes in zip(*shapes, strict=True)]


def joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Items of several batches as one, padded with zeros to the longest."""
    if not rows:
        return {}
    whole = {}
    for name in rows[0]:
        shape = widest(row[name].shape[1:] for row in rows)
        dtype = rows[0][name].dtype
        for row in rows:
            dtype = torch.promote_types(dtype, row[name].dtype)
        whole[name] = torch.zeros(sum(len(row[name]) for row in rows), *shape, dtype=dtype)
        at = 0
        for row in rows:
            value = row[name]
            place: Any = (slice(at, at + len(value)), *(slice(size) for size in value.shape[1:]))
            whole[name][place] = value.to(dtype)
            at += len(value)
    return whole


def write(path: Path, part: Part) -> None:
    """Write it aside, and rename it: a part that bears its name is whole."""
    from safetensors.torch import save_file

    tensors = {name: value for name in _TENSORS if (value := getattr(part, name)) is not None}
    tensors |= {_IMAGE + name: value for name, value in part.image_item.items()}
    tensors |= {_TEXT + name: value for name, value in part.text_item.items()}
    sizes = torch.tensor([len(each) for each in part.thumbnails], dtype=torch.int64)
    thumbnails = np.frombuffer(b"".join(part.thumbnails) or b"\0", dtype=np.uint8).copy()
    names = json.dumps({"keys": part.keys, "captions": part.captions, "bad": part.bad})
    # in a tensor: safetensors bounds its header, and captions may be long
    text = torch.from_numpy(np.frombuffer(names.encode("utf-8", "surrogatepass"), dtype=np.uint8).copy())
    tensors |= {"thumbnail_sizes": sizes, "thumbnails": torch.from_numpy(thumbnails), "names": text}
    aside = path.with_name(f".{path.name}.writing")
    save_file({name: value.contiguous() for name, value in tensors.items()}, aside)
    atomic_replace(aside, path)


class Outline(NamedTuple):
    """What a part is of, without its vectors."""

    positions: Tensor  # [n]
    counts: Tensor  # [n] captions of each image
    bad: list[str]


def outline(path: Path) -> Outline:
    """As :func:`read`, in a fraction of its time."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            names = _names(file.get_tensor("names"))
            counts = torch.tensor([len(own) for own in names["captions"]], dtype=torch.int64)
            return Outline(file.get_tensor("positions"), counts, names["bad"])
    except Exception as error:
        raise _damaged(path, error) from error


def _names(text: Tensor) -> dict[str, Any]:
    return json.loads(text.numpy().tobytes().decode("utf-8", "surrogatepass"))


def _damaged(path: Path, error: Exception) -> CoderError:
    """Whatever damage makes safetensors and json say."""
    return CoderError(f"{path} is damaged ({error}): remove it, and the same command encodes it and what follows anew")


def read(path: Path) -> Part:
    """A part as :func:`write` left it.

    Raises:
        CoderError: it is none, or damaged.
    """
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        names = _names(tensors["names"])
        thumbnails, at = [], 0
        content = tensors["thumbnails"].numpy()
        for size in tensors["thumbnail_sizes"].tolist():
            thumbnails.append(content[at : at + size].tobytes())
            at += size
        return Part(
            tensors["positions"],
            tensors["image_ids"],
            names["keys"],
            names["captions"],
            thumbnails,
            tensors.get("images"),
            tensors.get("texts"),
            _items(tensors, _IMAGE),
            _items(tensors, _TEXT),
            names["bad"],
        )
    except Exception as error:
        raise _damaged(path, error) from error


def _items(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
