"""How near frequent concept words lie to their regions: t-SNE and two numbers (SelfAlign, figure 5).

Shapes: C concepts, N occurrences of them, D channels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.errors import CoderError
from coder_plugin.functional.similarity import unit
from coder_plugin.report.alignment import Aligner
from coder_plugin.report.plots import literal, new_figure
from coder_plugin.report.words import FUNCTION_WORDS, split

log = logging.getLogger(__name__)


class TooFew(CoderError):
    """Too few concepts, or occurrences of them, to compare."""


@dataclass(frozen=True, eq=False)
class Points:
    """Occurrences of concept words, each with the region that the word finds in its image.

    Args:
        concepts: C words, each with two occurrences or more.
        labels: int [N], which concept each occurrence is of.
        words: [N, D] float32 of unit length: the words before the context stage. regions: likewise, of their regions.
    """

    concepts: tuple[str, ...]
    labels: np.ndarray
    words: np.ndarray
    regions: np.ndarray

    def __post_init__(self) -> None:
        counts = np.bincount(self.labels, minlength=len(self.concepts))
        if len(self.concepts) < 2 or counts.min() < 2:
            there = ", ".join(f"{word} ({count})" for word, count in zip(self.concepts, counts, strict=False)) or "none"
            raise TooFew(f"concepts can be compared where two occur in two images each, or more do; there are: {there}")


def frequent_words(captions: Iterable[str], count: int = 10) -> tuple[str, ...]:
    """The words that most captions hold, equals by alphabet, without English function words and signs."""
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update({word for word in split(caption) if word.isalpha()} - FUNCTION_WORDS)
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:count])


def collect_points(encoder: Any, source: Any, concepts: Sequence[str], *, per_concept: int = 40) -> Points:
    """Read the data until each concept has so many occurrences: in an image the first caption that holds the word counts.

    Args:
        encoder: an :class:`~coder_plugin.pretrained.encode.Encoder`, of a model that gives its locals.
        source: images with captions; those that cannot be read are passed over.
        concepts: words, in lower case, each once. Those with fewer than two occurrences are told of and left out.

    Raises:
        CoderError: as :class:`~coder_plugin.report.alignment.Aligner`; TooFew, which is one: fewer than two concepts are left.
    """
    aligner = Aligner(encoder)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {concept: [] for concept in concepts}
    with aligner.evaluating():
        for _, item in source.items():
            open_ = [concept for concept in concepts if len(found[concept]) < per_concept]
            if not open_:
                break
            holders = {concept: _holder(item.captions, concept) for concept in open_}
            captions = dict.fromkeys(caption for caption in holders.values() if caption is not None)
            if not captions:
                continue
            seen = aligner.see(item)
            if seen is None:
                continue
            for caption in captions:
                read = aligner.read(caption)
                regions = aligner.compare(read, seen).argmax(1)
                texts = [word.text for word in read.words]
                for concept in open_:
                    if holders[concept] == caption and concept in texts:
                        place = texts.index(concept)
                        pair = read.vectors[place], seen.regions[int(regions[place])]
                        found[concept].append((unit(pair[0]).cpu().numpy(), unit(pair[1]).cpu().numpy()))
    kept = tuple(concept for concept in concepts if len(found[concept]) > 1)
    if rare := [f"{concept} ({len(found[concept])})" for concept in concepts if concept not in kept]:
        log.warning("%s: concepts in fewer than two images as the model reads them: %s", source.name, ", ".join(rare))
    pairs = [pair for concept in kept for pair in found[concept]]
    labels = np.repeat(np.arange(len(kept)), [len(found[concept]) for concept in kept])
    words, regions = (np.stack([pair[side] for pair in pairs]) if pairs else np.zeros((0, 1)) for side in (0, 1))
    return Points(kept, labels.astype(np.int64), words, regions)


def concept_gaps(points: Points) -> dict[str, float]:
    """For each concept the mean cosine of its words with its regions, minus that with other concepts' regions, in [-2, 2].

    The region that a word itself has found is left out: it was chosen to be similar.
    """
    cosines = points.words @ points.regions.T
    same = points.labels[:, None] == points.labels
    own = same & ~np.eye(len(same), dtype=bool)
    gaps = {}
    for number, concept in enumerate(points.concepts):
        rows = points.labels == number
        gaps[concept] = float(cosines[rows][own[rows]].mean() - cosines[rows][~same[rows]].mean())
    return gaps


def measure_points(points: Points) -> dict[str, Any]:
    """For JSON: ``gap``, the mean of :func:`concept_gaps`; ``silhouette`` in [-1, 1], of the concepts as clusters of words and
    regions together, by cosine; and by concept how often it occurs (``counts``) and its gap (``gaps``).

    Raises:
        CoderError: scikit-learn is not installed.
    """
    check_sklearn()
    from sklearn.metrics import silhouette_score

    gaps = concept_gaps(points)
    both, labels = np.concatenate([points.words, points.regions]), np.tile(points.labels, 2)
    return {
        "gap": float(np.mean(list(gaps.values()))),
        "silhouette": float(silhouette_score(both, labels, metric="cosine")),
        "counts": dict(zip(points.concepts, np.bincount(points.labels).tolist(), strict=True)),
        "gaps": gaps,
    }


def place_points(points: Points, *, seed: int = 0) -> np.ndarray:
    """Places [2 N, 2] float32 of the words, then of the regions: scikit-learn's t-SNE, of perplexity 30 or what so few
    points allow.

    Raises:
        CoderError: scikit-learn is not installed.
    """
    check_sklearn()
    from sklearn.manifold import TSNE

    both = np.concatenate([points.words, points.regions])
    perplexity = min(30.0, (len(both) - 1) / 3)
    start = "pca" if both.shape[1] > 1 else "random"
    return TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform(both)


def plot_tsne(rows: Mapping[str, Points], path: str | Path, *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Draw models side by side: crosses are words, circles regions, a colour is a concept.

    Args:
        rows: a model's name to its points. path: of the figure, ``.png`` or ``.svg``.

    Returns:
        By model what :func:`measure_points` gives.

    Raises:
        CoderError: matplotlib or scikit-learn is not installed, or no rows.
    """
    if not rows:
        raise CoderError("no model to draw")
    figure = new_figure(1 + 4.5 * len(rows), 5.3)
    measured = {name: measure_points(points) for name, points in rows.items()}
    concepts = list(dict.fromkeys(concept for points in rows.values() for concept in points.concepts))
    handles: dict[str, Any] = {}
    for axes, (name, points) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
        words, regions = np.split(place_points(points, seed=seed), 2)
        for number, concept in enumerate(points.concepts):
            colour, own = _colour(concepts.index(concept)), points.labels == number
            axes.scatter(*regions[own].T, s=22, marker="o", facecolors="none", edgecolors=[colour])
            handles[concept] = axes.scatter(*words[own].T, s=22, marker="x", color=[colour], label=literal(concept))
        axes.set(xticks=(), yticks=())
        gap, silhouette = measured[name]["gap"], measured[name]["silhouette"]
        axes.set_title(f"{literal(name[-48:])}\ngap {gap:.3f}, silhouette {silhouette:.3f}", fontsize="medium")
    figure.legend(
        [handles[concept] for concept in concepts],
        [literal(concept) for concept in concepts],
        title="crosses: words, circles: their regions",
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return measured


def check_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise CoderError('t-SNE needs scikit-learn: pip install "coder-plugin[report]"') from error


def _holder(captions: Sequence[str], concept: str) -> str | None:
    return next((caption for caption in captions if concept in split(caption)), None)


def _colour(number: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab20"]((2 * number + number // 10) % 20)
