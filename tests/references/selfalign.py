"""SelfAlign the slow way (eq. 1-10; docs/equations.md), one word, region and prototype at a time in float64, unpadded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.references.layers import Sets, State, batch_norm, linear

Vector = Sequence[float]


def cosine(x: Vector, y: Vector) -> float:
    length = math.sqrt(math.fsum(a * a for a in x)) * math.sqrt(math.fsum(b * b for b in y))
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / length if length else 0.0


def softmax(values: Vector) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / math.fsum(powers) for power in powers]


def sinkhorn(scores: Sequence[Vector], *, epsilon: float, iterations: int) -> list[list[float]]:
    """Regions x prototypes -> assignments: in turn every prototype's share of all regions is made 1 / K and every region's
    sum 1 / M; at the end rows sum to one."""
    m, k = len(scores), len(scores[0])
    share = [[math.exp(score / epsilon) for score in row] for row in scores]
    for _ in range(iterations):
        column = [math.fsum(row[j] for row in share) for j in range(k)]
        share = [[row[j] / column[j] / k for j in range(k)] for row in share]
        share = [[value / math.fsum(row) / m for value in row] for row in share]
    return [[value * m for value in row] for row in share]


def lca(*tensors: Any, **options: Any) -> float:
    """The loss of :func:`lca_parts`, which has the arguments."""
    return lca_parts(*tensors, **options)[0]


def lca_parts(
    words: Sequence[Sequence[Vector]],
    regions: Sequence[Sequence[Vector]],
    prototypes: Sequence[Vector],
    *,
    temperature: float = 0.1,
    assignment: str = "sinkhorn",
    epsilon: float = 0.05,
    iterations: int = 2,
) -> tuple[float, float]:
    """Equations 1-4: each pair's words and regions. A pair without words adds zero; one without regions has no word to lose.

    Returns the loss, and the entropy of the assignments that its words are to predict, with the same means.
    """
    scores = [[[cosine(region, c) for c in prototypes] for region in of_image] for of_image in regions]
    rows = [row for of_image in scores for row in of_image]
    if assignment == "sinkhorn":
        flat = sinkhorn(rows, epsilon=epsilon, iterations=iterations)
    else:
        flat = [softmax([score / temperature for score in row]) for row in rows]
    start, total, uncertainty = 0, 0.0, 0.0
    for of_text, of_image in zip(words, regions, strict=True):
        losses, entropies = [], []
        for word in of_text:
            alike = [cosine(word, region) for region in of_image]
            p = flat[start + alike.index(max(alike))]
            q = softmax([cosine(word, c) / temperature for c in prototypes])
            losses.append(-math.fsum(a * math.log(b) for a, b in zip(p, q, strict=True)))
            entropies.append(-math.fsum(a * math.log(a) for a in p if a > 0))
        total += math.fsum(losses) / len(losses) if losses else 0.0
        uncertainty += math.fsum(entropies) / len(entropies) if entropies else 0.0
        start += len(of_image)
    return total / len(words), uncertainty / len(words)


def cra(
    contexts: Sequence[Vector],
    local: Sequence[Sequence[Vector]],
    ids: Sequence[Any],
    *,
    temperature: float = 0.7,
    hard_negatives: int = 512,
) -> float:
    """Equation 6 or 7, with the positive in the denominator and the N most similar locals of other images."""
    total = 0.0
    for anchor, own, name in zip(contexts, local, ids, strict=True):
        others = [feature for each, other in zip(local, ids, strict=True) if other != name for feature in each]
        hardest = sorted((cosine(anchor, feature) for feature in others), reverse=True)[:hard_negatives]
        losses = []
        for feature in own:
            s = cosine(anchor, feature) / temperature
            logits = [s, *[similarity / temperature for similarity in hardest]]
            top = max(logits)
            losses.append(top + math.log(math.fsum(math.exp(logit - top) for logit in logits)) - s)
        total += math.fsum(losses) / len(losses)
    return total / len(contexts)


def guide(context: Sets, state: State, side: str, training: bool) -> tuple[Sets, Sets]:
    """Equations 5 and 9 of all items' mean contexts [1, D]: their guides and their fusions."""
    projected = [linear(g, state, f"guides.{side}.project") for g in context]
    guides = [s.clamp(min=0) for s in batch_norm(projected, state, f"guides.{side}.norm", training)]
    fused = []
    for s, g in zip(guides, context, strict=True):
        gate = linear(torch.cat([s, g], 1), state, f"guides.{side}.gate").sigmoid()
        fused.append(gate * s + (1 - gate) * g)
    return guides, fused


def context_score(
    images: Sets, texts: Sets, state: State, *, training: bool, branches: str = "both", score: str = "cosine_of_mean"
) -> tuple[Tensor, dict[str, Any]]:
    """Equation 10 of all images x all texts, from their context features [n, D], and the guides and locals of eq. 5.

    ``score="mean_of_cosines"`` is the authors' code: the mean, over the locals, of each one's cosine with the fusion.
    """
    def compare(fusion: Tensor, local: Tensor) -> float:
        if score == "cosine_of_mean":
            return cosine(fusion[0].tolist(), local.mean(0).tolist())
        return math.fsum(cosine(fusion[0].tolist(), each.tolist()) for each in local) / len(local)

    image_mean, text_mean = ([x.mean(0, keepdim=True) for x in sets] for sets in (images, texts))
    found: dict[str, Any] = {}
    terms: list[Callable[[int, int], float]] = []
    if branches in ("both", "text_global"):
        found["text_guide"], fused_text = guide(text_mean, state, "text", training)
        found["image_locals"] = [x.clamp(min=0) for x in batch_norm(images, state, "norms.image", training)]
        terms.append(lambda i, t: compare(fused_text[t], found["image_locals"][i]))
    if branches in ("both", "image_global"):
        found["image_guide"], fused_image = guide(image_mean, state, "image", training)
        found["text_locals"] = [x.clamp(min=0) for x in batch_norm(texts, state, "norms.text", training)]
        terms.append(lambda i, t: compare(fused_image[i], found["text_locals"][t]))
    if not terms:
        terms = 2 * [lambda i, t: cosine(image_mean[i][0].tolist(), text_mean[t][0].tolist())]
    rows = [[sum(term(i, t) for term in terms) / 2 for t in range(len(texts))] for i in range(len(images))]
    return torch.tensor(rows, dtype=torch.float64), found
