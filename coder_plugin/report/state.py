"""Whether a run's state is sound: banks and centres from its newest checkpoint, and the diversity of validation anchors.

Shapes: Q bank entries, K centres, D dimensions, N images, T captions, B pairs of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.sweep import Layout
from coder_plugin.functional import diversity
from coder_plugin.functional.similarity import unit
from coder_plugin.pretrained.encode import Encoded

#: Anchors whose diversity is measured at most.
_ANCHORS = 5000


@dataclass(frozen=True, eq=False)
class Bank:
    """One head's coupled banks.

    Args:
        size: Q. filled: entries that are. pairs_per_step: how many a step writes.
        norms: of the filled image and text entries.
        ages: int64 [filled], how many steps ago each entry was written, 0 the last one.
    """

    head: str
    size: int
    filled: int
    images: int
    pairs_per_step: int
    norms: dict[str, list[float]]
    ages: Tensor


@dataclass(frozen=True, eq=False)
class Centres:
    """One head's prototypes.

    Args:
        clusters: K. filled, idle, reseeded: as in :meth:`coder_plugin.heads.prototypes.Prototypes.health`, not divided by K;
            idle counts those that no pair of the last ``window``, which is ``patience * K / 2``, chose.
        sizes: pairs that each filled centre has had. norms: of the filled centres.
    """

    head: str
    clusters: int
    filled: int
    idle: int
    window: int
    reseeded: int
    seen: int
    sizes: list[float]
    norms: list[float]


def read_state(checkpoint: Path, *, pairs_per_step: int, patience: float = 30.0) -> list[Bank | Centres]:
    """The banks and centres in a checkpoint; of the model's weights nothing is read.

    Args:
        checkpoint: its folder. pairs_per_step: the global batch.
        patience: the option of the prototypes.

    Raises:
        CoderError: the weights cannot be read.
    """
    path = checkpoint / "model.safetensors"
    found: list[Bank | Centres] = []
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            for name in sorted(names):
                owner, _, last = name.rpartition(".")
                head = owner.removeprefix("coder.heads.")
                if last == "pointer" and {f"{owner}.{each}" for each in ("image", "text", "ids", "count")} <= names:
                    found.append(_bank(file, owner, head, pairs_per_step))
                elif last == "last_seen" and {f"{owner}.{each}" for each in ("centres", "counts", "seen", "filled")} <= names:
                    found.append(_centres(file, owner, head, patience))
    except (OSError, SafetensorError) as error:
        raise CoderError(f"{path} cannot be read: {error}") from error
    return found


def entry_ages(pointer: int, count: int, size: int, pairs_per_step: int) -> Tensor:
    """Steps since each filled entry [count] of a ring was written: 0 for those of the last step."""
    places = torch.arange(count)
    return (pointer - 1 - places) % size // pairs_per_step


def instance_level(encoded: Encoded, layout: Layout) -> Encoded:
    """The features [.., D] that towers or aggregators give, of unit length: what ``dcl`` compares (METHODS 1, 2). They come
    first in a retrieval vector.

    Raises:
        CoderError: the score has nothing of them.
    """
    if layout.concepts == 1:
        raise CoderError("the score is of the concepts alone (beta = 0): the towers' features are not in the vectors")

    def cut(vectors: Tensor) -> Tensor:
        width = (vectors.shape[-1] - layout.width) // (1 if layout.concepts is None else 2)
        return unit(vectors[..., :width])

    return encoded._replace(images=cut(encoded.images), texts=cut(encoded.texts))


def anchor_diversity(encoded: Encoded, *, batch: int, kind: Any = "std", epsilon: float = 0.1) -> dict[str, list[float]]:
    """Diversity of images and captions against the others of their batch: each image with its first caption, in batches of
    ``batch`` pairs, a smaller last one left out. As training weighs them where ``encoded`` is :func:`instance_level`.

    Returns:
        ``image to text`` and ``text to image``: a number in (0.5, 1] for each anchor, of 5,000 at most.
    """
    pairs = first_captions(encoded.image_of_text, len(encoded.images))
    whole = min(len(pairs), _ANCHORS)
    batch = min(batch, whole)
    found: dict[str, list[float]] = {"image to text": [], "text to image": []}
    for start in range(0, whole - batch + 1, batch):
        images, captions = pairs[start : start + batch].T
        scores = similarity(encoded.images[images], encoded.texts[captions])
        negatives = ~torch.eye(batch, dtype=torch.bool)
        for rows, values in zip((scores, scores.T), found.values(), strict=True):
            values += diversity(rows, negatives, kind=kind, epsilon=epsilon).tolist()
    return found


def first_captions(image_of_text: Tensor, images: int) -> Tensor:
    """Int64 [n, 2]: each image that has a caption, and the first of them."""
    first = torch.full((images,), len(image_of_text)).scatter_reduce(
        0, image_of_text, torch.arange(len(image_of_text)), "amin"
    )
    own = (first < len(image_of_text)).nonzero().squeeze(1)
    return torch.stack([own, first[own]], 1)


def similarity(images: Tensor, texts: Tensor) -> Tensor:
    """Scores [n, m] of images [n, D], or [n, V, D] whose best feature counts, and texts [m, D]."""
    scores = images.float() @ texts.float().T
    return scores.amax(1) if images.ndim == 3 else scores


def _bank(file: Any, owner: str, head: str, pairs_per_step: int) -> Bank:
    count, pointer = (int(file.get_tensor(f"{owner}.{each}")) for each in ("count", "pointer"))
    keys = {side: file.get_tensor(f"{owner}.{side}") for side in ("image", "text")}
    size = len(keys["image"])
    return Bank(
        head.removesuffix(".bank"),
        size,
        count,
        len(file.get_tensor(f"{owner}.ids")[:count].unique()),
        pairs_per_step,
        {side: each[:count].float().norm(dim=1).tolist() for side, each in keys.items()},
        entry_ages(pointer, count, size, pairs_per_step),
    )


def _centres(file: Any, owner: str, head: str, patience: float) -> Centres:
    filled, seen, reseeded = (int(file.get_tensor(f"{owner}.{each}")) for each in ("filled", "seen", "reseeded"))
    centres, last_seen = file.get_tensor(f"{owner}.centres"), file.get_tensor(f"{owner}.last_seen")[:filled]
    window = patience * len(centres) / 2
    return Centres(
        head.removesuffix(".centres"),
        len(centres),
        filled,
        int((seen - last_seen > window).sum()),
        int(window),
        reseeded,
        seen,
        file.get_tensor(f"{owner}.counts")[:filled].double().tolist(),
        centres[:filled].norm(dim=1).tolist(),
    )
