"""AsCL's analyses besides recall: alignment, uniformity, recall by query length (AsCL III-D, III-E).

Shape letters: N images, T captions (texts), V views of an image, D joint dimensions, P pairs.

Distances are Euclidean, between embeddings normalised to the unit sphere: sqrt(2 - 2 cos), in [0, 2]. The distance of an
image with several views is that of its nearest view, which retrieval scores it by; of two images, that of the nearest pair.

A score that depends on the pair, such as AsCL's fusion, has no embedding. Where a model has one, the distance of an image and
its caption is also given as sqrt(2 - 2 S), S the pair's score in place of the cosine. Distances within one modality, and so
uniformity, are those of the embeddings: two images, or two captions, have no fused score. For a model that scores all pairs
they are those of the means of the tokens that it scores by, because its towers' embeddings may be in no loss. Each result names
its score.

Everything is computed in float64. Positive pairs are few: their embeddings are subtracted. All other pairs go through
square tiles of |a|² + |b|² - 2ab with the mean embedding moved to the origin. That keeps the distances of a collapsed
model to many digits, where 2 - 2cos would cancel to noise; two near-duplicates in a wide set are exact to about 1e-7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import align, check_embeddings, recall_from_embeddings

LENGTH_EDGES = (6, 8, 10, 12, 15, 20)  # words; AsCL's own are not printed, but it reads them below 10 words

_TILE = 2**20  # distances in memory at once: 8 MiB, and a few times that for intermediate results
_RECALLS = {"t2i_r1": 1, "t2i_r5": 5, "t2i_r10": 10}
_COLUMNS = {
    "I-T mean": ("alignment", "image_text", "mean"),
    "I-T fused": ("alignment", "image_text_fused", "mean"),
    "T-T mean": ("alignment", "text_text", "mean"),
    "I-I mean": ("uniformity", "images", "mean"),
    "I-I var": ("uniformity", "images", "variance"),
    "T-T' mean": ("uniformity", "texts", "mean"),
    "T-T' var": ("uniformity", "texts", "variance"),
}


@torch.no_grad()
def analyse(
    images: Tensor,
    texts: Tensor,
    image_of_text: Tensor | Sequence[int],
    captions: Sequence[str],
    *,
    t2i_ranks: Tensor | Sequence[int] | None = None,
    ranked_by: str | None = None,
    fused_scores: Tensor | None = None,
    compared: str = "embeddings",
    edges: Sequence[int] = LENGTH_EDGES,
    sample: int | None = None,
    seed: int = 0,
    chunk: int | None = None,
) -> dict[str, Any]:
    """All analyses of one model, as plain numbers that JSON takes.

    Args:
        images: [N, D], or [N, V, D] for V views each; any real dtype, any norm but zero.
        texts: [T, D], on the device of the images.
        image_of_text: [T] integers in [0, N): the image of each caption; every image has one at least.
        captions: the T captions as strings.
        t2i_ranks: [T] 0-based ranks of each caption's image, for example re-ranked ones; None: those of the
            embeddings' inner products as they are, which `recall_from_embeddings` gives.
        ranked_by: the score that gave the ranks, in words, such as "fused score of all pairs"; with ``t2i_ranks``.
        fused_scores: [T], of a model that scores pairs, the score of each caption with its image, in [-1, 1].
        compared: what ``images`` and ``texts`` are, in words, such as "means of tokens".
        edges, sample, seed: as in `recall_by_length`.
        chunk: as in `alignment` and `uniformity`.

    Returns:
        ``images`` and ``texts`` (their numbers), ``alignment``, ``uniformity`` and ``recall_by_length``: what the
        functions of those names return. ``scores`` names the score that each of them belongs to: ``compared``, what
        ``ranked_by`` says, and for ``image_text_fused``, which is there with ``fused_scores``, "fused score".

    Raises:
        CoderError: shapes that do not fit, an image without a caption, an embedding without a direction (NaN,
            infinity, zeros), several models at once.
    """
    aligned = alignment(images, texts, image_of_text, chunk=chunk)  # also checks what all parts share
    scores = {"alignment": compared, "uniformity": compared}
    if fused_scores is not None:
        aligned["image_text_fused"] = _fused_alignment(fused_scores, len(texts))
        scores["image_text_fused"] = "fused score"
    scores["recall_by_length"] = compared if t2i_ranks is None else ranked_by or "ranks that were given"
    if isinstance(captions, str) or len(captions) != len(texts):
        raise CoderError(f"captions must be the strings of the {len(texts)} text embeddings, got {len(captions)}")
    if t2i_ranks is None:
        t2i_ranks = recall_from_embeddings(images, texts, image_of_text)["t2i_ranks"]
    by_length = recall_by_length(t2i_ranks, captions, edges=edges, sample=sample, seed=seed)
    return {
        "images": len(images),
        "texts": len(texts),
        "alignment": aligned,
        "uniformity": uniformity(images, texts, image_of_text, chunk=chunk),
        "recall_by_length": by_length,
        "scores": scores,
    }


def token_means(item: Mapping[str, Tensor]) -> Tensor:
    """The vectors [n, D] float32 of images or texts of a model that scores pairs alone: means of the tokens that it compares.

    Its towers' embeddings are in no loss, so that they say nothing about it.

    Args:
        item: ``tokens`` [n, L, D], bool ``mask`` [n, L] with a token in each row and, of images that have one, the projected
            feature of the whole image ``whole`` [n, D], which is added.

    Example:
        >>> tokens = torch.tensor([[[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]])
        >>> token_means({"tokens": tokens, "mask": torch.tensor([[True, True, False]])})
        tensor([[2., 4.]])
    """
    weights = item["mask"].float() / item["mask"].sum(1, keepdim=True)
    means = torch.einsum("nl,nld->nd", weights, item["tokens"].float())
    return means + item["whole"].float() if "whole" in item else means


def _fused_alignment(scores: Tensor, count: int) -> dict[str, Any]:
    """Distances sqrt(2 - 2 S) of pairs by their scores S [T]."""
    if scores.shape != (count,) or not scores.is_floating_point():
        raise CoderError(f"fused_scores must be one score for each of the {count} captions, got {tuple(scores.shape)}")
    scores = scores.double()
    if not bool((scores.abs() <= 1 + 1e-3).all()):  # float16 items shift a score by up to 1e-4
        raise CoderError("fused_scores must be in [-1, 1]")
    pairs = _Distances()
    pairs.add((2 - 2 * scores.clamp(-1, 1)).sqrt())
    return pairs.summary()


@torch.no_grad()
def alignment(
    images: Tensor, texts: Tensor, image_of_text: Tensor | Sequence[int], *, chunk: int | None = None
) -> dict[str, dict[str, Any]]:
    """Distances of positive pairs (AsCL figure 4a): each caption and its image, each two captions of one image.

    Args:
        images: [N, D] or [N, V, D]; texts: [T, D]; image_of_text: [T], as in `analyse`.
        chunk: pairs subtracted at once; None: as many as make some million numbers. It changes memory only.

    Returns:
        ``image_text`` and ``text_text``: each ``count`` of pairs, ``mean``, ``variance`` (population form) and ``std``
        of their distances. Every pair weighs the same. Without a pair, as with one caption per image, the count is 0 and
        the rest None.
    """
    points, captions, owner = _on_sphere(images, texts, image_of_text)
    indices = torch.arange(len(captions), device=owner.device)
    image_text, text_text = _Distances(), _Distances()
    _subtract(image_text, points, captions, owner, indices, chunk)
    order = owner.argsort(stable=True)
    grouped = owner[order]
    for step in range(1, len(order)):
        first = (grouped[step:] == grouped[:-step]).nonzero().squeeze(1)
        if not len(first):  # no image has more captions than this
            break
        _subtract(text_text, captions, captions, order[first], order[first + step], chunk)
    return {"image_text": image_text.summary(), "text_text": text_text.summary()}


@torch.no_grad()
def uniformity(
    images: Tensor, texts: Tensor, image_of_text: Tensor | Sequence[int], *, chunk: int | None = None
) -> dict[str, dict[str, Any]]:
    """Distances of negative pairs (AsCL figure 4b): of different images, and of captions of different images.

    Each unordered pair counts once. Exact: no sampling, and never more than one tile of the pairs in memory.

    Args:
        images: [N, D] or [N, V, D]; texts: [T, D]; image_of_text: [T], as in `analyse`.
        chunk: rows and columns of a tile; None: as many as make some million distances. It changes memory only.

    Returns:
        ``images`` and ``texts``: each ``count`` of pairs, ``mean``, ``variance`` (population form) and ``std`` of their
        distances. Where there is no pair (a single image) the count is 0 and the numbers are None.
    """
    points, captions, owner = _on_sphere(images, texts, image_of_text)
    sides = {"images": (points, torch.arange(len(points), device=owner.device)), "texts": (captions, owner)}
    return {name: _apart(side, group, chunk).summary() for name, (side, group) in sides.items()}


def recall_by_length(
    t2i_ranks: Tensor | Sequence[int],
    captions: Sequence[str],
    *,
    edges: Sequence[int] = LENGTH_EDGES,
    sample: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Text-to-image recall by the number of words of the query (AsCL figure 5).

    Args:
        t2i_ranks: [T] integers, the 0-based rank of each caption's image.
        captions: the T captions; words are what whitespace separates.
        edges: where a bin ends and the next begins, in words: (6, 8) makes "<6", "6-7" and "8+". No caption is left
            out, an empty one is in the first bin.
        sample: how many captions to draw, without replacement (AsCL: 1,000); None: all of them.
        seed: of the draw; equal numbers of captions give equal draws, so models on the same data share it.

    Returns:
        ``bins``, a list of ``words`` (the label), ``count``, ``t2i_r1``, ``t2i_r5`` and ``t2i_r10`` in percent (None
        where the count is 0); ``all``, the same without label over all bins; ``edges``, ``sample`` and ``seed``.
    """
    ranks = torch.as_tensor(t2i_ranks).cpu()
    if isinstance(captions, str) or ranks.shape != (len(captions),) or not len(captions):
        raise CoderError(f"ranks and captions must be one each, got shape {tuple(ranks.shape)} and {len(captions)}")
    if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype == torch.bool or int(ranks.min()) < 0:
        raise CoderError("ranks must be integers from 0 up")
    labels, bin_of = length_bins(captions, edges)
    if sample is not None and not 1 <= sample <= len(ranks):
        raise CoderError(f"sample must be from 1 to the {len(ranks)} captions there are, got {sample}")
    if sample is not None:
        drawn = torch.randperm(len(ranks), generator=torch.Generator().manual_seed(seed))[:sample]
        ranks, bin_of = ranks[drawn], bin_of[drawn]
    bins = [{"words": label, **_recalls(ranks[bin_of == number])} for number, label in enumerate(labels)]
    return {"bins": bins, "all": _recalls(ranks), "edges": list(edges), "sample": sample, "seed": seed}


def length_bins(captions: Sequence[str], edges: Sequence[int] = LENGTH_EDGES) -> tuple[list[str], Tensor]:
    """The labels of the bins of `recall_by_length`, and the bin of each caption [T]."""
    edges = list(edges)
    integers = all(isinstance(edge, int) for edge in edges)
    if not edges or not integers or any(low >= high for low, high in zip([0, *edges], edges, strict=False)):
        raise CoderError(f"edges must be increasing numbers of words, from 1 up, got {edges}")
    words = torch.tensor([len(caption.split()) for caption in captions])
    inner = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in zip(edges, edges[1:], strict=False)]
    return [f"<{edges[0]}", *inner, f"{edges[-1]}+"], torch.bucketize(words, torch.tensor(edges), right=True)


def format_analyses(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Two plain text tables, of distances and of recall by query length (percent), with a line per model.

    T-T are captions of one image, T-T' of different images. "I-T fused" is the distance of an image and
    its caption by a fused score; all other distances compare embeddings. A name is followed by the score that ranked its
    recall. "-" stands where there is no pair, no caption or no fused score.

    Args:
        rows: name to what `analyse` returned, with equal ``edges``.
    """
    labels = length_labels(rows)
    distances = [["name", *_COLUMNS]]
    recalls = [["name", "words", *labels, "all"]]
    for name, row in rows.items():
        numbers = [row[part].get(pairs, {}).get(figure) for part, pairs, figure in _COLUMNS.values()]
        distances.append([str(name), *("-" if number is None else f"{number:.4f}" for number in numbers)])
        lengths = [*row["recall_by_length"]["bins"], row["recall_by_length"]["all"]]
        title = f"{name}, by {ranked_by(row)}" if ranked_by(row) else str(name)
        recalls.append([title, "captions", *(str(each["count"]) for each in lengths)])
        for key, k in _RECALLS.items():
            recalls.append(["", f"t2i R@{k}", *("-" if each[key] is None else f"{each[key]:.1f}" for each in lengths)])
    return f"{align(distances)}\n\n{align(recalls)}"


def ranked_by(row: Mapping[str, Any]) -> str:
    """The score that a row's recall by length belongs to, in words; empty for a row that does not say."""
    return row.get("scores", {}).get("recall_by_length", "")


def length_labels(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The labels of the bins that all rows share.

    Raises:
        CoderError: no row, a row that `analyse` did not return, rows of different bins.
    """
    labels: list[str] | None = None
    for name, row in rows.items():
        missing = [key for key in ("alignment", "uniformity", "recall_by_length") if key not in row]
        if missing:
            raise CoderError(f"row {name!r} lacks {', '.join(missing)}: rows are what analyse() returns")
        row_labels = [each["words"] for each in row["recall_by_length"]["bins"]]
        if labels not in (None, row_labels):
            raise CoderError(f"row {name!r} has other bins of query length: analyse all models with the same edges")
        labels = row_labels
    if labels is None:
        raise CoderError("there is no model to report on")
    return labels


class _Distances:
    """Count, mean, variance and potential of distances that come in parts.

    Parts merge by their means and squared deviations: sums of squares would cancel where the variance is small.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.deviations = 0, 0.0, 0.0

    def add(self, distances: Tensor) -> None:
        """Add ``distances`` [P], float64, in [0, 2] except for rounding."""
        new = len(distances)
        if not new:
            return
        mean = float(distances.mean())
        self.deviations += float((distances - mean).square_().sum())
        self.deviations += (mean - self.mean) ** 2 * self.count * new / (self.count + new)
        self.count += new
        self.mean += (mean - self.mean) * new / self.count

    def summary(self) -> dict[str, Any]:
        if not self.count:
            return {"count": 0, "mean": None, "variance": None, "std": None}
        variance = self.deviations / self.count
        return {"count": self.count, "mean": self.mean, "variance": variance, "std": variance**0.5}


def _subtract(into: _Distances, left: Tensor, right: Tensor, a: Tensor, b: Tensor, chunk: int | None) -> None:
    """Add the distances of ``left[a]`` [P, V, D] and ``right[b]`` [P, 1, D], from their differences, to ``into``."""
    rows = max(1, _TILE // left[0].numel()) if chunk is None else chunk
    for first, second in zip(a.split(rows), b.split(rows), strict=True):
        into.add(torch.linalg.vector_norm(left[first] - right[second], dim=-1).amin(1))


def _apart(points: Tensor, group: Tensor, chunk: int | None) -> _Distances:
    """The distances of all pairs of ``points`` [n, V, D] with different ``group`` [n]."""
    n, views = points.shape[:2]
    side = max(1, isqrt(_TILE) // views) if chunk is None else chunk
    origin = points.mean((0, 1))
    out = _Distances()
    for i in range(0, n, side):
        rows = (points[i : i + side] - origin).flatten(0, 1)
        for j in range(i, n, side):
            columns = (points[j : j + side] - origin).flatten(0, 1)
            squares = (rows @ columns.T).mul_(-2)
            squares += rows.square().sum(1)[:, None]
            squares += columns.square().sum(1)
            if views > 1:
                squares = squares.unflatten(1, (-1, views)).unflatten(0, (-1, views)).amin((1, 3))
            differ = group[i : i + side, None] != group[j : j + side]
            if i == j:
                differ = differ.triu_()
            out.add(squares[differ].clamp_(min=0).sqrt_())
    return out


def _on_sphere(
    images: Tensor, texts: Tensor, image_of_text: Tensor | Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit images [N, V, D] and texts [T, 1, D] in float64, and the owners, int64 [T]."""
    if isinstance(images, (list, tuple)) and images and isinstance(images[0], Tensor):
        raise CoderError("analyses are of one model: an ensemble has no embedding of its own")
    [(images, texts)], owner = check_embeddings(images, texts, image_of_text)
    unit = []
    for name, side in (("image", images), ("text", texts)):
        if side.is_complex():
            raise CoderError(f"embeddings must be real numbers, got {side.dtype}")
        points = (side if side.ndim == 3 else side[:, None]).to(torch.float64, copy=True)
        norms = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
        wrong = ~(norms.isfinite() & (norms > 0)).all(1).squeeze(1)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise CoderError(
                f"{int(wrong.sum())} {name} embedding(s) have no direction: NaN, infinity or zeros, the first at {at}"
            )
        unit.append(points.div_(norms))
    return unit[0], unit[1], owner


def _recalls(ranks: Tensor) -> dict[str, Any]:
    """Count and recalls (percent) of the 0-based ``ranks`` of one bin."""
    count = len(ranks)
    return {"count": count, **{key: 100.0 * int((ranks < k).sum()) / count if count else None for key, k in _RECALLS.items()}}
