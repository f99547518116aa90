"""State of the heads: banks and centres in a run's newest checkpoint, and the diversity of validation anchors.

Shapes: Q bank entries, K centres, D dimensions, N images, T captions, B pairs of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.sweep import Layout
from coder_plugin.functional import diversity
from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report.charts import format_number, histogram
from coder_plugin.report.curves import Figure
from coder_plugin.tensors import unit
from coder_plugin.training.checkpoint import read_model
from coder_plugin.training.run_folder import RunFolder

#: Most anchors whose diversity is measured.
_ANCHORS = 5000
_UNIT = "should be 1: any other norm is a fault"


@dataclass(frozen=True, eq=False)
class Bank:
    """The image and text banks of one head.

    Args:
        size: Q. filled: entries in use. images: distinct images among them. pairs_per_step: entries that a step writes.
        norms: of the filled image and text entries.
        ages: int64 [filled], steps since each entry was written, 0 for those of the last step.
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
    """The prototypes of one head.

    Args:
        clusters: K. ready: whether the pairs have been clustered.
        passed: pairs so far. changed, restarted: as in :meth:`coder_plugin.heads.prototypes.Prototypes.health`, restarted as a
            number. sizes: pairs that chose each centre in and since the last clustering. norms: of the centres.
    """

    head: str
    clusters: int
    ready: bool
    passed: int
    changed: float
    restarted: int
    sizes: list[float]
    norms: list[float]


def state_blocks(run: RunFolder) -> list[dict[str, Any]]:
    """Each bank and set of centres for the template: its ``name``, ``tiles`` (a number and what it counts), ``figures``.

    Raises:
        CoderError: no checkpoint, or the objective keeps no such state.
    """
    if run.checkpoint is None:
        raise CoderError("there is no complete checkpoint to read banks and centres from")
    batch = run.pairs_per_step
    if batch is None:
        raise CoderError("neither plan.json nor the checkpoint's options store the number of pairs per step")
    state = read_state(run.checkpoint, pairs_per_step=batch)
    if not state:
        raise CoderError("the objective keeps no banks and no centres")
    return [_bank_block(each) if isinstance(each, Bank) else _centres_block(each) for each in state]


def read_state(checkpoint: Path, *, pairs_per_step: int) -> list[Bank | Centres]:
    """The banks and centres in a checkpoint. The model's weights are not read.

    Args:
        checkpoint: its folder.
        pairs_per_step: the global batch.

    Raises:
        CoderError: the file cannot be read.
    """
    tensors = read_model(checkpoint)
    state: list[Bank | Centres] = []
    for name in sorted(tensors):
        owner, _, last = name.rpartition(".")
        head = owner.removeprefix("coder.heads.")
        if last == "pointer" and {f"{owner}.{each}" for each in ("image", "text", "ids", "count")} <= tensors.keys():
            state.append(_bank(tensors, owner, head, pairs_per_step))
        elif last == "ready" and {f"{owner}.{each}" for each in ("centres", "counts")} <= tensors.keys():
            state.append(_centres(tensors, owner, head))
    return state


def entry_ages(pointer: int, count: int, size: int, pairs_per_step: int) -> Tensor:
    """Steps since each filled entry [count] of a ring buffer was written, 0 for those of the last step.

    Example:
        >>> entry_ages(pointer=4, count=4, size=8, pairs_per_step=2)
        tensor([1, 1, 0, 0])
    """
    return (pointer - 1 - torch.arange(count)) % size // pairs_per_step


def instance_level(encoded: Encoded, layout: Layout) -> Encoded:
    """The features [.., D] of towers or aggregators, of unit length, which ``dcl`` compares (``docs/equations.md#dcl``).

    They are the first part of a retrieval vector.

    Raises:
        CoderError: the score has no such part.
    """
    if layout.concepts == 1:
        raise CoderError("the score uses concepts alone (beta = 0): the vectors do not hold the towers' features")

    def cut(vectors: Tensor) -> Tensor:
        width = (vectors.shape[-1] - layout.width) // (1 if layout.concepts is None else 2)
        return unit(vectors[..., :width])

    return encoded._replace(images=cut(encoded.images), texts=cut(encoded.texts))


def anchor_diversity(
    encoded: Encoded, *, batch: int, kind: Any = "std", epsilon: float = 0.1
) -> dict[str, list[float]]:
    """Diversity of images and captions against the others of their batch, as in training for :func:`instance_level` features.

    Each image is paired with its first caption; batches have ``batch`` pairs, a smaller last one is left out.

    Returns:
        ``image to text`` and ``text to image``: a number in (0.5, 1] for each of at most 5,000 anchors.
    """
    pairs = first_captions(encoded.image_of_text, len(encoded.images))
    total = min(len(pairs), _ANCHORS)
    batch = min(batch, total)
    values: dict[str, list[float]] = {"image to text": [], "text to image": []}
    for start in range(0, total - batch + 1, batch):
        images, captions = pairs[start : start + batch].T
        scores = similarity(encoded.images[images], encoded.texts[captions])
        negatives = ~torch.eye(batch, dtype=torch.bool)
        for rows, column in zip((scores, scores.T), values.values(), strict=True):
            column += diversity(rows, negatives, kind=kind, epsilon=epsilon).tolist()
    return values


def first_captions(image_of_text: Tensor, images: int) -> Tensor:
    """int64 [n, 2]: each image that has a caption, and its first caption.

    Example:
        >>> first_captions(torch.tensor([2, 0, 2, 0]), 4).tolist()
        [[0, 1], [2, 0]]
    """
    texts = len(image_of_text)
    first = torch.full((images,), texts).scatter_reduce(0, image_of_text, torch.arange(texts), "amin")
    captioned = (first < texts).nonzero().squeeze(1)
    return torch.stack([captioned, first[captioned]], 1)


def similarity(images: Tensor, texts: Tensor) -> Tensor:
    """Scores [n, m] of images [n, D], or [n, V, D] of which the best vector counts, and texts [m, D]."""
    scores = images.float() @ texts.float().T
    return scores.amax(1) if images.ndim == 3 else scores


def _bank(tensors: Mapping[str, Tensor], owner: str, head: str, pairs_per_step: int) -> Bank:
    count, pointer = (int(tensors[f"{owner}.{each}"]) for each in ("count", "pointer"))
    keys = {side: tensors[f"{owner}.{side}"] for side in ("image", "text")}
    size = len(keys["image"])
    return Bank(
        head.removesuffix(".bank"),
        size,
        count,
        len(tensors[f"{owner}.ids"][:count].unique()),
        pairs_per_step,
        {side: each[:count].float().norm(dim=1).tolist() for side, each in keys.items()},
        entry_ages(pointer, count, size, pairs_per_step),
    )


def _centres(tensors: Mapping[str, Tensor], owner: str, head: str) -> Centres:
    head = head.removesuffix(".centres")
    counts, above = tensors[f"{owner}.counts"], owner.removesuffix(".centres")
    return Centres(
        head,
        len(counts),
        bool(tensors[f"{owner}.ready"]),
        int(tensors[f"{above}.passed"]),
        float(tensors[f"{above}.changed"]),
        int(tensors[f"{above}.restarted"]),
        counts.double().tolist(),
        tensors[f"{owner}.centres"].norm(dim=1).tolist(),
    )


def _bank_block(bank: Bank) -> dict[str, Any]:
    oldest = f"{int(bank.ages.max()):,}" if bank.filled else "–"
    tiles = [
        (f"{bank.filled:,}", f"of {bank.size:,} entries are filled"),
        (f"{bank.images:,}", "different images among them"),
        (oldest, f"steps since the oldest entry was written ({bank.pairs_per_step} entries a step)"),
    ]
    figures = []
    if bank.filled:
        norms = histogram(bank.norms, label="Norms of the bank's entries", x_label="norm", min_range=0.02)
        ages = histogram(
            {"entries": bank.ages.tolist()}, label="Ages of the bank's entries", x_label="steps ago", integers=True
        )
        figures = [
            Figure("Norms of the entries", norms, _UNIT),
            Figure("Age of the entries", ages, f"median {int(bank.ages.median()):,} steps"),
        ]
    return {"name": f"{bank.head}: banks", "tiles": tiles, "figures": figures}


def _centres_block(centres: Centres) -> dict[str, Any]:
    tiles = [(f"{centres.clusters:,}", "centres" if centres.ready else "centres, not yet clustered")]
    figures = []
    if centres.ready:
        tiles += [
            (f"{100 * centres.changed:.0f} %", "of the pairs changed their label in the last clustering"),
            (f"{centres.restarted:,}", "clusters had become empty and started anew so far"),
        ]
        sizes = sorted(centres.sizes)
        top = sizes[min(len(sizes) - 1, int(0.99 * len(sizes)))]
        chart = histogram(
            {"centres": sizes}, label="Sizes of the clusters", x_label="pairs assigned", top=top, integers=True
        )
        largest = f"median {format_number(sizes[len(sizes) // 2])}, largest {format_number(sizes[-1])}"
        note = f"{largest}, of {centres.passed:,} pairs in all"
        if sizes[-1] > top:
            note += f"; the last bar counts {format_number(top)} and more"
        norms = histogram({"centres": centres.norms}, label="Norms of the centres", x_label="norm", min_range=0.02)
        figures = [Figure("Sizes of the clusters", chart, note), Figure("Norms of the centres", norms, _UNIT)]
    return {"name": f"{centres.head}: centres", "tiles": tiles, "figures": figures}
