"""What sample images and captions attend to: concepts (CODER), and each word's region (SelfAlign), for the report.

Shapes: g concepts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from coder_plugin.data.item import Item
from coder_plugin.data.source import Unusable, map_tensors
from coder_plugin.heads.capabilities import ReadsConcepts, heads_with
from coder_plugin.html import data_uri


@dataclass(frozen=True)
class Attended:
    """The concepts of an image and of its first caption that get most attention, with their shares in [0, 1]."""

    item: Item
    image: tuple[tuple[str, float], ...]
    caption: tuple[tuple[str, float], ...]


@torch.no_grad()
def concept_attention(encoder: Any, items: Sequence[Item], *, first: int = 6) -> list[Attended]:
    """Of each image that can be read, and of its first caption.

    Args:
        encoder: :class:`~coder_plugin.pretrained.encode.Encoder` of a model with a head that reads concepts.
    """
    model = encoder.model
    head = next(iter(heads_with(model.coder.heads, ReadsConcepts).values()))
    training = model.training
    model.eval()
    found = []
    try:
        for item in items:
            try:
                loaded = item.load()
            except (OSError, ValueError):
                continue
            try:
                image = encoder.transform(loaded)
            except Unusable:
                continue
            batch = map_tensors(lambda each: each[None].to(encoder.device), image)
            tokens = encoder.tokenizer([item.captions[0]]).to(encoder.device)
            with encoder.autocast():
                weights = [
                    head.image_attention(model.describe_image(batch))[0],
                    head.text_attention(model.describe_text(tokens))[0],
                ]
            found.append(Attended(item, *(_greatest(each, head.vocabulary, first) for each in weights)))
    finally:
        model.train(training)
    return found


def alignment_figures(encoder: Any, items: Sequence[Item], beside: Mapping[str, Item]) -> list[tuple[Item, str]]:
    """Of each image that can be read, and of its first caption, the figure of
    :func:`~coder_plugin.report.alignment_plot.plot_alignment` as a data URI.

    Args:
        beside: by key, items whose pictures lie under what is read as regions.

    Raises:
        CoderError: matplotlib is not installed; the model does not give words and regions of one space, or where they lie.
    """
    from coder_plugin.report.alignment import Aligner
    from coder_plugin.report.alignment_plot import plot_alignment

    aligner = Aligner(encoder)
    found = []
    with aligner.evaluating():
        for item in items:
            seen = aligner.see(item, load_picture(beside.get(item.key)))
            if seen is None:
                continue
            aligned = aligner.align(item.key, item.captions[0], seen)
            file = io.BytesIO()
            plot_alignment(aligned).savefig(file, format="png", dpi=110, bbox_inches="tight")
            found.append((item, data_uri(Image.open(file), 920)))
    return found


def load_picture(item: Item | None) -> Image.Image | None:
    """An item's picture; None where it has none that can be read, or is read as regions."""
    if item is None:
        return None
    try:
        loaded = item.load()
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, Image.Image) else None


def _greatest(weights: torch.Tensor, vocabulary: Any, first: int) -> tuple[tuple[str, float], ...]:
    words = [f"concept {number}" for number in range(len(weights))] if vocabulary is None else vocabulary.words
    order = weights.float().cpu().argsort(descending=True, stable=True)[:first].tolist()
    return tuple((words[place], float(weights[place])) for place in order)
