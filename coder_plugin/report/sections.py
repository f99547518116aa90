"""Sections of the report that need the model: recall, queries, concepts, words and regions, a map.

Each function returns the blocks of one section, or raises CoderError with the reason why it cannot be shown.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from coder_plugin.data.item import Item
from coder_plugin.data.source import map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.evaluate import evaluating
from coder_plugin.heads.capabilities import heads_having
from coder_plugin.html import data_uri
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.report.alignment import Aligner, load_image
from coder_plugin.report.charts import Figure, scatter
from coder_plugin.report.examples import items_by_key, items_of, load_picture, query_blocks, shown_images
from coder_plugin.report.figures import plot_alignment
from coder_plugin.report.page import Block, figures, heading, note, table
from coder_plugin.report.tsne import tsne
from coder_plugin.training.run_folder import RunFolder

#: Pairs on the map.
_PAIRS = 250


class Evaluated(NamedTuple):
    """A model's results on the data that a page shows.

    ``name`` is that of the model's weights, such as ``export/best``, or of its run; ``pictures`` a source of the pictures of
    images that are read as regions, or None; ``result`` what :func:`measure` has added; ``encoder`` is None where several
    models are shown, of which one at a time is in memory.
    """

    name: str
    encoded: Encoded
    source: Any  # images with captions
    pictures: Any
    result: dict[str, Any]
    encoder: Encoder | None = None


def measure(model: Evaluated, run: RunFolder) -> list[Block]:
    """Recall of the model on the data, with ranks, and the ``depth`` of its shortlists, as ``model.result``; no blocks."""
    from coder_plugin.evaluation.evaluate import measure as measure_recall
    from coder_plugin.evaluation.evaluate import shortlist_length

    assert model.encoder is not None
    depth = shortlist_length((run.config or {}).get("rerank"), model.encoder)
    model.result.update(measure_recall(model.encoded, 0, depth), depth=depth)
    return []


def recall_by_length(model: Evaluated) -> list[Block]:
    """Text-to-image recall by the number of words of the caption (AsCL, figure 5)."""
    from coder_plugin.evaluation import recall_by_length

    lengths = recall_by_length(model.result["t2i_ranks"], model.encoded.captions)
    rows = [
        (str(each["words"]), [f"{each['count']:,}", *(_percent(each[f"t2i_r{k}"]) for k in (1, 5, 10))])
        for each in [*lengths["bins"], {**lengths["all"], "words": "all"}]
    ]
    head = ["Words", "Captions", "R@1", "R@5", "R@10"]
    return [heading("Text to image, by the words of the caption"), table(head, rows, narrow=True)]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def examples(model: Evaluated, images: int) -> list[Block]:
    """The best and the worst queries of both directions, with their results."""
    if not model.result:
        raise CoderError("recall was not measured")
    text = "The queries whose first match ranks best and worst. A frame and ✓ mark a match; the number is the score."
    if model.encoded.items is not None:
        text += (
            " It is the fusion score. Results outside the shortlist are not re-ranked: their score is the inner product of the"
            " vectors, marked “product”."
        )
    depth = model.result["depth"]
    return [note(text), *query_blocks(model.encoded, model.source, model.pictures, model.result, count=images, depth=depth)]


def vector_map(model: Evaluated) -> list[Block]:
    """Images spread evenly over the data, each with its first caption, by t-SNE."""
    return figures([map_figure(model.encoded, "Images and captions", images=_PAIRS)], wide=True)


def map_figure(encoded: Encoded, name: str, *, images: int, all_captions: bool = False) -> Figure:
    """A t-SNE of images that are spread evenly over the data, with the first caption of each or all of them.

    Args:
        images: how many at most.
        all_captions: without lines between an image and its captions.

    Raises:
        CoderError: fewer than two images have a caption, or scikit-learn is not installed.
    """
    chosen = first_captions(encoded.image_of_text, len(encoded.images))
    chosen = chosen[torch.linspace(0, len(chosen) - 1, min(images, len(chosen))).round().long()]
    if len(chosen) < 2:
        raise CoderError("a map needs two images or more")
    rows, captions = chosen.T
    points = encoded.images[rows].float()
    if points.ndim == 3:  # of an image's several vectors the one that is most similar to the caption
        best = (points * encoded.texts[captions, None].float()).sum(-1).argmax(1)
        points = points[torch.arange(len(points)), best]
    if all_captions:
        captions = torch.isin(encoded.image_of_text, rows).nonzero().squeeze(1)
    placed = tsne(torch.cat([points, encoded.texts[captions].float()]).numpy())
    of = f"and their {len(captions)} captions" if all_captions else "each with its first caption and a line between the two"
    chart = scatter(placed[: len(rows)], placed[len(rows) :], linked=not all_captions)
    return Figure(name, chart, f"{len(rows)} images{' ' if all_captions else ', '}{of}, by t-SNE")


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


def _sample_items(model: Evaluated, images: int) -> dict[int, Item]:
    """Items spread evenly over the data."""
    count = len(model.encoded.image_ids)
    return items_of(model.source, model.encoded, {round(number * (count - 1) / max(1, images - 1)) for number in range(images)})


def concepts(model: Evaluated, images: int, *, first: int = 6) -> list[Block]:
    """The concepts that sample images and their first captions attend to most (CODER)."""
    encoder = model.encoder
    assert encoder is not None
    head = next(iter(heads_having(encoder.model.coder.heads, "image_attention").values()), None)
    if head is None:
        raise CoderError("the model has no concept head")

    def greatest(weights: Tensor) -> list[str]:
        order = weights.float().cpu().argsort(descending=True, stable=True)[:first].tolist()
        names = {} if head.vocabulary is None else dict(enumerate(head.vocabulary.words))
        return [f"{names.get(place, f'concept {place}')} {100 * float(weights[place]):.1f}\u00a0%" for place in order]

    blocks = [note("The concepts with the highest attention weights for an image and for its first caption.")]
    items = _sample_items(model, images)
    shown = shown_images(items, model.pictures)
    with evaluating(encoder.model):
        for row, item in items.items():
            loaded = load_image(encoder, item)
            if loaded is None:
                continue
            batch = map_tensors(lambda each: each[None].to(encoder.device), loaded[1])
            tokens = encoder.tokenizer([item.captions[0]]).to(encoder.device)
            with encoder.autocast():
                image = greatest(head.image_attention(encoder.model.describe_image(batch))[0])
                text = greatest(head.text_attention(encoder.model.describe_text(tokens))[0])
            rows = [(str(number), pair) for number, pair in enumerate(zip(image, text, strict=True), 1)]
            attended = table(["", "Image", "Caption"], rows, narrow=True)["table"]
            blocks.append({"attended": {"caption": item.captions[0], "image": shown[row], "table": attended}})
    return blocks


def aligns(run: RunFolder) -> bool:
    """Whether the run trained words and regions to match (SelfAlign)."""
    return any(term.get("name") in ("lca", "cra") for term in run.objective.get("terms", ()))


def alignments(model: Evaluated, run: RunFolder, images: int) -> list[Block]:
    """Figures of the words of sample captions on their images (SelfAlign)."""
    if not aligns(run):
        raise CoderError("the objective has no term of SelfAlign (lca, cra)")
    items = _sample_items(model, images).values()
    pictures = items_by_key(model.pictures, {item.key for item in items})
    aligner = Aligner(model.encoder)
    made = []
    with aligner.evaluating():
        for item in items:
            image = aligner.describe_image(item, load_picture(pictures.get(item.key)))
            if image is not None:
                file = io.BytesIO()
                alignment = aligner.align(item.key, item.captions[0], image)
                plot_alignment(alignment).savefig(file, format="png", dpi=110, bbox_inches="tight")
                made.append(Figure("", note=item.captions[0], uri=data_uri(Image.open(file), 920)))
    text = "Each word's most similar region, and the relevance of each region to the caption (brighter is more relevant)."
    return [note(text), *figures(made, wide=True)]
