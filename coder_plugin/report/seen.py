"""What a model makes of validation data, as content of the report's sections."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coder_plugin import registry
from coder_plugin.data.item import Item
from coder_plugin.errors import CoderError
from coder_plugin.evaluation.sweep import Layout, layout_of, reweighed
from coder_plugin.heads.capabilities import ReadsConcepts, Reweighs, Scores, heads_with
from coder_plugin.objective import Objective
from coder_plugin.pretrained.encode import Encoded, Encoder
from coder_plugin.report import samples
from coder_plugin.report.attention import alignment_figures, concept_attention
from coder_plugin.report.charts import Series, bars, format_number, histogram, lines, scatter
from coder_plugin.report.curves import Figure
from coder_plugin.report.examples import best_and_worst
from coder_plugin.report.records import Run
from coder_plugin.report.state import anchor_diversity, instance_level
from coder_plugin.report.vectors_map import place_vectors

#: Images up to which recall is measured under other weights of the score's parts.
_SWEEP = 5000


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A model and the data that it is looked at with.

    Args:
        encoder: of the model. source: with captions. encoded: all of them.
        weights: which of the run's, in words. beside: pictures of what is read as regions, or None.
    """

    encoder: Encoder
    source: Any
    encoded: Encoded
    weights: str
    beside: Any = None


def measure(seen: Evaluated, run: Run) -> dict[str, Any]:
    """Recall of the model on the data, with ranks, by length, and under other weights."""
    from coder_plugin.evaluation import recall_by_length
    from coder_plugin.evaluation.evaluate import shortlist_length
    from coder_plugin.evaluation.two_stage import measure as recalls

    depth = shortlist_length((run.config or {}).get("rerank"), seen.encoder)
    result = recalls(seen.encoded, 0, depth)
    lengths = recall_by_length(result["t2i_ranks"], seen.encoded.captions)
    return {"result": result, "depth": depth, "lengths": lengths, "sweeps": _sweeps(seen), "data": seen.source.name}


def _sweeps(seen: Evaluated) -> list[Figure]:
    """R@sum against the weights of the score's parts, where the score has any."""
    from coder_plugin.evaluation import recall_from_embeddings

    layout = _layout(seen)
    if layout is None or len(seen.encoded.images) > _SWEEP or seen.encoder.reranking is not None:
        return []

    def rsum(**weights: float) -> float:
        other = reweighed(seen.encoded, layout, **weights)
        return recall_from_embeddings(other.images, other.texts, other.image_of_text)["rsum"]

    found = []
    if layout.concepts is not None and 0 < layout.concepts < 1:
        betas = [number / 10 for number in range(11)]
        own = f"{1 - layout.concepts:.2g}"
        said = f"trained with β = {own}; 1 is the instance level alone"
        found.append(_sweep("β", betas, [rsum(beta=beta) for beta in betas], said))
    if layout.width:
        weights = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0]
        said = f"trained with {layout.contexts:g}; 0 leaves the context level out"
        found.append(_sweep("context weight", weights, [rsum(context_weight=weight) for weight in weights], said))
    return found


def _layout(seen: Evaluated) -> Layout | None:
    """How the vectors are put together; None: a head of others has a part of them."""
    heads = heads_with(seen.encoder.model.coder.heads, Scores)
    return layout_of(heads) if all(isinstance(head, Reweighs) for head in heads.values()) else None


def _sweep(name: str, weights: list[float], values: list[float], said: str) -> Figure:
    best = max(values)
    note = f"{said}; highest {format_number(best)} at {weights[values.index(best)]:g}"
    chart = lines([Series("R@sum", weights, values)], label=f"R@sum against {name}: {note}", x_label=name)
    return Figure(f"R@sum by {name}", chart, note)


def aligns(run: Run) -> bool:
    """Whether the run has trained words and regions to find each other (SelfAlign)."""
    return bool({"alignment", "contexts"} & set(run.heads))


def diversity(seen: Evaluated, run: Run) -> Figure:
    term, options = _weighing(seen.encoder.model.coder.objective)
    layout, batch = _layout(seen), run.pairs_per_step
    if layout is None:
        raise CoderError("heads of other packages have a part in the vectors: the towers' features cannot be told in them")
    if batch is None:
        raise CoderError("neither plan.json nor a checkpoint tells how many pairs a step had")
    kind, epsilon = options["diversity"], options["epsilon"]
    values = anchor_diversity(instance_level(seen.encoded, layout), batch=batch, kind=kind, epsilon=epsilon)
    chart = histogram(values, label="Diversity of validation anchors", x_label="diversity", least=0.02)
    means = ", ".join(f"{name} {sum(each) / len(each):.3f}" for name, each in values.items())
    anchors = len(values["image to text"])
    batch = min(batch, anchors)
    note = (
        f"{anchors:,} anchors of each direction against the {batch - 1:,} other pairs of their batch, by the towers' own "
        f"features, which {term} compares; means: {means} ({kind}, ε = {epsilon:g})"
    )
    if options["diversity_over"] == "batch+bank":
        note += f". {term} takes the mean of this and of the diversity over the bank, which is not shown"
    return Figure("Diversity of validation anchors", chart, note)


def _weighing(objective: Objective) -> tuple[str, dict[str, Any]]:
    """The first term that weighs its anchors by their diversity over the batch, and all its options."""
    for term in objective.terms:
        if term.name in ("dcl", "m_dcl") and term.source is None:
            parameters = inspect.signature(registry.load("losses", term.name)).parameters
            options = {name: each.default for name, each in parameters.items()} | dict(term.options)
            if options["diversity"] != "none" and "batch" in options["diversity_over"]:
                return term.name, options
    raise CoderError("no term weighs pairs by their diversity over the batch (dcl, m_dcl)")


def examples(seen: Evaluated, known: Mapping[str, Any], images: int) -> list[dict[str, Any]]:
    if "result" not in known:
        raise CoderError("recall could not be measured")
    result, depth = known["result"], known["depth"]
    found = {
        way: best_and_worst(seen.encoded, way, result[f"{way}_ranks"], count=images, depth=depth)  # type: ignore[arg-type]
        for way in ("t2i", "i2t")
    }
    return samples.shown(seen.encoded, seen.source, seen.beside, found)


def both_sides(seen: Evaluated) -> Figure:
    placed = place_vectors(seen.encoded)
    captions = [seen.encoded.captions[number] for number in placed.text_index]
    images = [(float(x), float(y), f"image of: {text}") for (x, y), text in zip(placed.images, captions, strict=True)]
    texts = [(float(x), float(y), text) for (x, y), text in zip(placed.texts, captions, strict=True)]
    links = [((a, b), (x, y)) for (a, b, _), (x, y, _) in zip(images, texts, strict=True)]
    chart = scatter({"images": images, "captions": texts}, label="Map of images and captions", links=links)
    note = f"{len(images)} images, each with its first caption, a line between the two: {placed.method}"
    return Figure("Images and captions", chart, note)


def _sample_items(seen: Evaluated, images: int) -> list[Item]:
    """Items spread evenly over the data."""
    count = len(seen.encoded.image_ids)
    places = {round(number * (count - 1) / max(1, images - 1)) for number in range(images)}
    return list(samples.items_of(seen.source, seen.encoded, places).values())


def concepts(seen: Evaluated, images: int) -> list[dict[str, Any]]:
    if not heads_with(seen.encoder.model.coder.heads, ReadsConcepts):
        raise CoderError("the model has no concept head")
    items = _sample_items(seen, images)
    beside = samples.beside_of(seen.beside, {item.key for item in items})
    found = []
    for each in concept_attention(seen.encoder, items):
        full = max(share for _, share in (*each.image, *each.caption))
        key = each.item.key
        found.append(
            {
                "key": key,
                "uri": samples.small(beside.get(key, each.item)),
                "caption": each.item.captions[0],
                "image": bars(each.image, label=f"Concepts of the image {key}", of=full),
                "text": bars(each.caption, label=f"Concepts of the caption of {key}", of=full),
            }
        )
    return found


def alignments(seen: Evaluated, run: Run, images: int) -> list[dict[str, str]]:
    if not aligns(run):
        raise CoderError("the objective has no term of SelfAlign (lca, cra)")
    from coder_plugin.report.plots import new_figure

    new_figure(1, 1)  # says what to install
    items = _sample_items(seen, images)
    beside = samples.beside_of(seen.beside, {item.key for item in items})
    found = alignment_figures(seen.encoder, items, beside)
    return [{"key": item.key, "caption": item.captions[0], "uri": uri} for item, uri in found]
