"""Sections of the report that need the model: recall, queries, concepts, words and regions, a map, diversity.

Each function returns what one section of ``run.html`` shows, or raises CoderError with the reason why it cannot be shown.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from coder_plugin import registry
from coder_plugin.data.item import Item
from coder_plugin.data.source import map_tensors
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.sweep import Layout, layout_of, reweighed
from coder_plugin.heads.capabilities import Scores, heads_having, heads_with
from coder_plugin.html import data_uri
from coder_plugin.objective import Objective
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.report.alignment import Aligner, evaluating, load_image
from coder_plugin.report.charts import Series, bars, format_number, histogram, lines, scatter
from coder_plugin.report.curves import Figure
from coder_plugin.report.examples import best_and_worst
from coder_plugin.report.figures import new_figure, plot_alignment
from coder_plugin.report.queries import describe_queries, items_by_key, items_of, load_picture, small_picture
from coder_plugin.report.state import anchor_diversity, first_captions, instance_level, similarity
from coder_plugin.report.tsne import tsne
from coder_plugin.training.run_folder import RunFolder

#: Most images for which recall is also measured under other weights of the score's parts.
_SWEEP = 5000


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A model with the data that the report shows.

    Args:
        encoder: of the model.
        source: images with captions. encoded: their vectors.
        weights: a name for the model's weights, such as ``export/best``.
        pictures: a source of the pictures of images that are read as regions, or None.
    """

    encoder: Encoder
    source: Any
    encoded: Encoded
    weights: str
    pictures: Any = None


# -- recall -----------------------------------------------------------------------------------------------------------


def measure(model: Evaluated, run: RunFolder) -> dict[str, Any]:
    """Recall of the model on the data: ``result`` with ranks, ``lengths``, ``sweeps``."""
    from coder_plugin.evaluation import recall_by_length
    from coder_plugin.evaluation.evaluate import shortlist_length
    from coder_plugin.evaluation.two_stage import measure as measure_recall

    depth = shortlist_length((run.config or {}).get("rerank"), model.encoder)
    result = measure_recall(model.encoded, 0, depth)
    lengths = recall_by_length(result["t2i_ranks"], model.encoded.captions)
    return {"result": result, "depth": depth, "lengths": lengths, "sweeps": _sweeps(model), "data": model.source.name}


def _sweeps(model: Evaluated) -> list[Figure]:
    """R@sum under other weights of the score's parts, if the score has several parts."""
    from coder_plugin.evaluation import recall_from_embeddings

    layout = _layout(model)
    if layout is None or len(model.encoded.images) > _SWEEP or model.encoder.reranking is not None:
        return []

    def rsum(**weights: float) -> float:
        other = reweighed(model.encoded, layout, **weights)
        return recall_from_embeddings(other.images, other.texts, other.image_of_text)["rsum"]

    figures = []
    if layout.concepts is not None and 0 < layout.concepts < 1:
        betas = [number / 10 for number in range(11)]
        trained = f"trained with β = {1 - layout.concepts:.2g}; 1 is the instance level alone"
        figures.append(_sweep("β", betas, [rsum(beta=beta) for beta in betas], trained))
    if layout.width:
        weights = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0]
        trained = f"trained with {layout.contexts:g}; 0 leaves the context level out"
        figures.append(_sweep("context weight", weights, [rsum(context_weight=weight) for weight in weights], trained))
    return figures


def _layout(model: Evaluated) -> Layout | None:
    """How the parts of the score lie in the vectors; None if a head of another package adds a part."""
    heads = heads_with(model.encoder.model.coder.heads, Scores)
    return layout_of(heads) if all(head.block_dim is not None for head in heads.values()) else None


def _sweep(name: str, weights: list[float], values: list[float], trained: str) -> Figure:
    best = max(values)
    note = f"{trained}; highest {format_number(best)} at {weights[values.index(best)]:g}"
    chart = lines([Series("R@sum", weights, values)], label=f"R@sum against {name}: {note}", x_label=name)
    return Figure(f"R@sum by {name}", chart, note)


# -- diversity and map ------------------------------------------------------------------------------------------------


def diversity(model: Evaluated, run: RunFolder) -> Figure:
    """Histogram of the diversity of validation anchors, as ``dcl`` weighs them."""
    term, options = weighting_term(model.encoder.model.coder.objective)
    layout, batch = _layout(model), run.pairs_per_step
    if layout is None:
        raise CoderError(
            "a head of another package adds a part to the vectors: the towers' features cannot be separated"
        )
    if batch is None:
        raise CoderError("neither plan.json nor a checkpoint stores the number of pairs per step")
    kind, epsilon = options["diversity"], options["epsilon"]
    values = anchor_diversity(instance_level(model.encoded, layout), batch=batch, kind=kind, epsilon=epsilon)
    chart = histogram(values, label="Diversity of validation anchors", x_label="diversity", min_range=0.02)
    means = ", ".join(f"{name} {sum(each) / len(each):.3f}" for name, each in values.items())
    anchors = len(values["image to text"])
    note = (
        f"{anchors:,} anchors per direction against the {min(batch, anchors) - 1:,} other pairs of their batch, by the "
        f"towers' features, which {term} compares; means: {means} ({kind}, ε = {epsilon:g})"
    )
    if options["diversity_over"] == "batch+bank":
        note += f". {term} uses the mean of this and of the diversity over the bank, which is not shown"
    return Figure("Diversity of validation anchors", chart, note)


def weighting_term(objective: Objective) -> tuple[str, dict[str, Any]]:
    """The first term that weighs its anchors by their diversity over the batch, and all its options.

    Raises:
        CoderError: the objective has no such term.
    """
    for term in objective.terms:
        if term.name in ("dcl", "m_dcl") and term.source is None:
            parameters = inspect.signature(registry.load("losses", term.name)).parameters
            options = {name: each.default for name, each in parameters.items()} | dict(term.options)
            if options["diversity"] != "none" and "batch" in options["diversity_over"]:
                return term.name, options
    raise CoderError("no term weighs pairs by their diversity over the batch (dcl, m_dcl)")


def vector_map(model: Evaluated) -> Figure:
    """Images and captions in two dimensions, with lines between pairs."""
    points = place_vectors(model.encoded)
    captions = [model.encoded.captions[number] for number in points.text_index]
    images = [(float(x), float(y), f"image of: {text}") for (x, y), text in zip(points.images, captions, strict=True)]
    texts = [(float(x), float(y), text) for (x, y), text in zip(points.texts, captions, strict=True)]
    links = [((a, b), (x, y)) for (a, b, _), (x, y, _) in zip(images, texts, strict=True)]
    chart = scatter({"images": images, "captions": texts}, label="Map of images and captions", links=links)
    note = f"{len(images)} images, each with its first caption and a line between the two: {points.method}"
    return Figure("Images and captions", chart, note)


@dataclass(frozen=True, eq=False)
class MapPoints:
    """Coordinates [P, 2] of P images and of one caption each, their indices [P] in the data, and the method's name."""

    images: np.ndarray
    texts: np.ndarray
    image_index: list[int]
    text_index: list[int]
    method: str


def place_vectors(encoded: Encoded, *, pairs: int = 250, seed: int = 0) -> MapPoints:
    """Images spread evenly over the data, each with its first caption.

    By scikit-learn's t-SNE; by the first two principal components if it is not installed or for fewer than ten pairs.
    """
    chosen = first_captions(encoded.image_of_text, len(encoded.images))
    chosen = chosen[torch.linspace(0, len(chosen) - 1, min(pairs, len(chosen))).round().long()]
    images, texts = encoded.images[chosen[:, 0]].float(), encoded.texts[chosen[:, 1]].float()
    if images.ndim == 3:  # of an image's several vectors the one that is most similar to the caption
        best = torch.stack(
            [similarity(view[:, None], text[None]).argmax() for view, text in zip(images, texts, strict=True)]
        )
        images = images[torch.arange(len(images)), best]
    both = torch.cat([images, texts])
    try:
        from sklearn import manifold  # noqa: F401
    except ImportError:
        points = _principal(both)
        method = 'principal components (t-SNE needs scikit-learn: pip install "coder-plugin[report]")'
    else:
        if len(both) < 20:
            points, method = _principal(both), "principal components (too few points for t-SNE)"
        else:
            points, method = tsne(both.numpy(), seed=seed), f"t-SNE of perplexity {min(30.0, (len(both) - 1) / 3):.0f}"
    image_index, text_index = chosen.T.tolist()
    return MapPoints(points[: len(chosen)], points[len(chosen) :], image_index, text_index, method)


def _principal(vectors: Tensor) -> np.ndarray:
    """[P, D] -> [P, 2], the second 0 for D = 1. The largest coordinate of each component is positive."""
    left, values, _ = torch.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    points = torch.zeros(len(vectors), 2)
    scores = (left * values)[:, :2]
    signs = torch.where(scores[scores.abs().argmax(0), range(scores.shape[1])] < 0, -1.0, 1.0)
    points[:, : scores.shape[1]] = scores * signs
    return points.numpy()


# -- queries with their results ---------------------------------------------------------------------------------------


def examples(model: Evaluated, measured: Mapping[str, Any], images: int) -> list[dict[str, Any]]:
    """The best and the worst queries of both directions, with their results."""
    if "result" not in measured:
        raise CoderError("recall could not be measured")
    result, depth = measured["result"], measured["depth"]
    queries = {
        way: best_and_worst(model.encoded, way, result[f"{way}_ranks"], count=images, depth=depth)  # type: ignore[arg-type]
        for way in ("t2i", "i2t")
    }
    return describe_queries(model.encoded, model.source, model.pictures, queries)


def _sample_items(model: Evaluated, images: int) -> list[Item]:
    """Items spread evenly over the data."""
    count = len(model.encoded.image_ids)
    rows = {round(number * (count - 1) / max(1, images - 1)) for number in range(images)}
    return list(items_of(model.source, model.encoded, rows).values())


# -- concepts, words and regions --------------------------------------------------------------------------------------


def concepts(model: Evaluated, images: int, *, first: int = 6) -> list[dict[str, Any]]:
    """The concepts that sample images and their first captions attend to most (CODER)."""
    encoder = model.encoder
    head = next(iter(heads_having(encoder.model.coder.heads, "image_attention").values()), None)
    if head is None:
        raise CoderError("the model has no concept head")

    def greatest(weights: Tensor) -> list[tuple[str, float]]:
        order = weights.float().cpu().argsort(descending=True, stable=True)[:first].tolist()
        names = None if head.vocabulary is None else head.vocabulary.words
        return [(f"concept {place}" if names is None else names[place], float(weights[place])) for place in order]

    items = _sample_items(model, images)
    pictures = items_by_key(model.pictures, {item.key for item in items})
    rows = []
    with evaluating(encoder.model):
        for item in items:
            loaded = load_image(encoder, item)
            if loaded is None:
                continue
            batch = map_tensors(lambda each: each[None].to(encoder.device), loaded[1])
            tokens = encoder.tokenizer([item.captions[0]]).to(encoder.device)
            with encoder.autocast():
                image = greatest(head.image_attention(encoder.model.describe_image(batch))[0])
                text = greatest(head.text_attention(encoder.model.describe_text(tokens))[0])
            full = max(share for _, share in (*image, *text))
            rows.append(
                {
                    "key": item.key,
                    "uri": small_picture(pictures.get(item.key, item)),
                    "caption": item.captions[0],
                    "image": bars(image, label=f"Concepts of the image {item.key}", full_width=full),
                    "text": bars(text, label=f"Concepts of the caption of {item.key}", full_width=full),
                }
            )
    return rows


def aligns(run: RunFolder) -> bool:
    """Whether the run trained words and regions to match (SelfAlign)."""
    return any(term.get("name") in ("lca", "cra") for term in run.objective.get("terms", ()))


def alignments(model: Evaluated, run: RunFolder, images: int) -> list[dict[str, str]]:
    """Figures of the words of sample captions on their images (SelfAlign)."""
    if not aligns(run):
        raise CoderError("the objective has no term of SelfAlign (lca, cra)")
    new_figure(1, 1)  # raises if matplotlib is missing
    items = _sample_items(model, images)
    pictures = items_by_key(model.pictures, {item.key for item in items})
    aligner = Aligner(model.encoder)
    rows = []
    with aligner.evaluating():
        for item in items:
            image = aligner.describe_image(item, load_picture(pictures.get(item.key)))
            if image is None:
                continue
            file = io.BytesIO()
            alignment = aligner.align(item.key, item.captions[0], image)
            plot_alignment(alignment).savefig(file, format="png", dpi=110, bbox_inches="tight")
            rows.append({"key": item.key, "caption": item.captions[0], "uri": data_uri(Image.open(file), 920)})
    return rows
