"""How close concept words are to their regions in feature space: t-SNE and two numbers (SelfAlign, figure 5).

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

from coder_plugin.errors import CoderError, install_command
from coder_plugin.report.alignment import Aligner
from coder_plugin.report.charts import new_figure, plain_text
from coder_plugin.report.words import FUNCTION_WORDS, split_words
from coder_plugin.tensors import unit

log = logging.getLogger(__name__)


class TooFew(CoderError):
    """Too few concepts, or occurrences of them, to compare."""


@dataclass(frozen=True, eq=False)
class Points:
    """Occurrences of concept words, each with the most similar region of its image.

    Args:
        concepts: C words, each with two occurrences or more.
        labels: [N] int64, the concept of each occurrence.
        words: [N, D] float32 of unit length, the words' features before the context stage.
        regions: [N, D] float32 of unit length, the features of their regions.
    """

    concepts: tuple[str, ...]
    labels: np.ndarray
    words: np.ndarray
    regions: np.ndarray

    def __post_init__(self) -> None:
        counts = np.bincount(self.labels, minlength=len(self.concepts))
        if len(self.concepts) < 2 or counts.min() < 2:
            counted = (
                ", ".join(f"{word} ({count})" for word, count in zip(self.concepts, counts, strict=False)) or "none"
            )
            raise TooFew(f"at least two concepts must occur in at least two images each; occurrences: {counted}")


def frequent_words(captions: Iterable[str], count: int = 10) -> tuple[str, ...]:
    """The words that occur in most captions, without English function words and numbers; ties in alphabetical order.

    Example:
        >>> frequent_words(["a dog runs", "the dog", "a cat"], 2)
        ('dog', 'cat')
    """
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update({word for word in split_words(caption) if word.isalpha()} - FUNCTION_WORDS)
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:count])


def collect_points(encoder: Any, source: Any, concepts: Sequence[str], *, per_concept: int = 40) -> Points:
    """Read the data until each concept has ``per_concept`` occurrences: of each image, the first caption with the word.

    Args:
        encoder: an :class:`~coder_plugin.pretrained.encode.Encoder` of a model that returns its local features.
        source: images with captions. Images that cannot be read are skipped.
        concepts: distinct words in lower case. Those with fewer than two occurrences are left out with a warning.

    Raises:
        CoderError: as :class:`~coder_plugin.report.alignment.Aligner`.
        TooFew: fewer than two concepts are left.
    """
    aligner = Aligner(encoder)
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {concept: [] for concept in concepts}
    with aligner.evaluating():
        for _, item in source.items():
            wanted = [concept for concept in concepts if len(pairs[concept]) < per_concept]
            if not wanted:
                break
            caption_of = {concept: _caption_with(item.captions, concept) for concept in wanted}
            captions = dict.fromkeys(caption for caption in caption_of.values() if caption is not None)
            image = aligner.describe_image(item) if captions else None
            if image is None:
                continue
            for text in captions:
                caption = aligner.describe_caption(text)
                regions = aligner.compare(caption, image).argmax(1)
                words = [word.text for word in caption.words]
                for concept in wanted:
                    if caption_of[concept] == text and concept in words:
                        number = words.index(concept)
                        pair = caption.vectors[number], image.regions[int(regions[number])]
                        pairs[concept].append((unit(pair[0]).cpu().numpy(), unit(pair[1]).cpu().numpy()))
    kept = tuple(concept for concept in concepts if len(pairs[concept]) > 1)
    if rare := [f"{concept} ({len(pairs[concept])})" for concept in concepts if concept not in kept]:
        log.warning("%s: concepts that occur in fewer than two images: %s", source.name, ", ".join(rare))
    rows = [pair for concept in kept for pair in pairs[concept]]
    labels = np.repeat(np.arange(len(kept)), [len(pairs[concept]) for concept in kept])
    sides = (np.stack([pair[side] for pair in rows]) if rows else np.zeros((0, 1)) for side in (0, 1))
    return Points(kept, labels.astype(np.int64), *sides)


def concept_gaps(points: Points) -> dict[str, float]:
    """For each concept the mean cosine of its words with its regions, minus that with other concepts' regions, in [-2, 2].

    A word's most similar region is left out of its own mean: it was chosen for its similarity.
    """
    cosines = points.words @ points.regions.T
    same = points.labels[:, None] == points.labels
    others = same & ~np.eye(len(same), dtype=bool)
    gaps = {}
    for number, concept in enumerate(points.concepts):
        rows = points.labels == number
        gaps[concept] = float(cosines[rows][others[rows]].mean() - cosines[rows][~same[rows]].mean())
    return gaps


def measure_points(points: Points) -> dict[str, Any]:
    """Numbers for JSON.

    Returns:
        ``gap``: the mean of :func:`concept_gaps`. ``silhouette`` in [-1, 1]: of the concepts as clusters of words and regions,
        by cosine. ``counts`` and ``gaps``: occurrences and gap of each concept.

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


def tsne(vectors: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """t-SNE of [N, D] vectors in two dimensions. The perplexity is 30, or (N - 1) / 3 for fewer points.

    Raises:
        CoderError: scikit-learn is not installed.
    """
    check_sklearn()
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(vectors) - 1) / 3)
    start = "pca" if vectors.shape[1] > 1 else "random"
    return TSNE(perplexity=perplexity, init=start, random_state=seed, max_iter=500).fit_transform(vectors)


def plot_tsne(rows: Mapping[str, Points], path: str | Path, *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Draw models side by side: crosses are words, circles are regions, each concept has a colour.

    Args:
        rows: model name -> its points.
        path: the figure, ``.png`` or ``.svg``.

    Returns:
        Model name -> result of :func:`measure_points`.

    Raises:
        CoderError: matplotlib or scikit-learn is not installed, or no rows.
    """
    if not rows:
        raise CoderError("no model to draw")
    figure = new_figure(1 + 4.5 * len(rows), 5.3)
    measured = {name: measure_points(points) for name, points in rows.items()}
    concepts = list(dict.fromkeys(concept for points in rows.values() for concept in points.concepts))
    handles: dict[str, Any] = {}
    with plain_text():
        for axes, (name, points) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
            words, regions = np.split(tsne(np.concatenate([points.words, points.regions]), seed=seed), 2)
            for number, concept in enumerate(points.concepts):
                colour, members = _colour(concepts.index(concept)), points.labels == number
                axes.scatter(*regions[members].T, s=22, marker="o", facecolors="none", edgecolors=[colour])
                handles[concept] = axes.scatter(*words[members].T, s=22, marker="x", color=[colour])
            axes.set(xticks=(), yticks=())
            gap, silhouette = measured[name]["gap"], measured[name]["silhouette"]
            axes.set_title(f"{name[-48:]}\ngap {gap:.3f}, silhouette {silhouette:.3f}", fontsize="medium")
        title, place = "crosses: words, circles: their regions", "outside lower center"
        shown = [handles[concept] for concept in concepts]
        figure.legend(shown, concepts, title=title, loc=place, ncols=5, frameon=False)
        figure.savefig(path, dpi=150, bbox_inches="tight")
    return measured


def check_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise CoderError(f"t-SNE needs scikit-learn: {install_command('report')}") from error


def _caption_with(captions: Sequence[str], concept: str) -> str | None:
    return next((caption for caption in captions if concept in split_words(caption)), None)


def _colour(number: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab20"]((2 * number + number // 10) % 20)
