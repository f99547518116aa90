"""Two-stage retrieval: a shortlist by the embeddings' inner products, re-ranked by a score of pairs (AsCL eq. 4).

Shape letters: N images, T captions (texts), D joint dimensions, V views, G groups, each of a images and b captions, k length of
a shortlist, R queries of one tile, P pairs.

A score that depends on the pair, such as AsCL's fusion, cannot be looked up in an index of vectors, and computing all N x T
scores costs too much. So each query's k best candidates by embedding are ordered by the score. The others keep their order
behind these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import (
    best_candidates,
    captions_of,
    check_embeddings,
    comparable,
    products,
    row_ranks,
    score_dtype,
    summary,
)
from coder_plugin.heads.capabilities import PairScorer

_PAIRS = 1024  # pairs scored at once; with 32 tokens of 1,024 float32 channels they take 128 MiB per side


class MeanScore:
    """The mean of several models' scores, that of an ensemble, as a
    :class:`~coder_plugin.heads.capabilities.PairScorer`."""

    def __init__(self, scorers: Iterable[PairScorer]) -> None:
        self.scorers = list(scorers)

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        return self._mean(scorer(image_index, text_index) for scorer in self.scorers)

    def all_pairs(self) -> Tensor:
        return self._mean(scorer.all_pairs() for scorer in self.scorers)

    def _mean(self, scores: Iterable[Tensor]) -> Tensor:
        total: Any = 0
        for each in scores:
            total = total + each.cpu()
        return total / len(self.scorers)


@torch.no_grad()
def rerank(
    image_embeddings: Tensor | Sequence[Tensor],
    text_embeddings: Tensor | Sequence[Tensor],
    image_of_text: Tensor | Sequence[int],
    score: Callable[[Tensor, Tensor], Tensor],
    *,
    k: int,
    chunk: int | None = None,
) -> dict[str, Any]:
    """Recall of two-stage retrieval: each query's k best candidates by embedding, ordered by ``score``.

    If the shortlist holds right candidates, the best of them gives the query's rank. Otherwise the rank by embedding, k or
    more, stays. In both stages a tie counts against the query, and NaN is treated as in `recall`: a wrong candidate that ties
    with the right one by embedding comes before it in the shortlist. Wrong candidates that tie keep their order. With k at or
    above the number of candidates, the ranks are those of ``score`` for all pairs.

    Memory holds the shortlists, never [N, T]. Each pair is scored once for both directions, in batches of about a thousand.
    Queries without a right candidate in the shortlist are not scored, because their ranks do not depend on it.

    Args:
        image_embeddings: [N, D] or [N, V, D], or several models', as in `recall_from_embeddings`.
        text_embeddings: [T, D], likewise.
        image_of_text: [T] integers in [0, N), as in `recall`.
        score: ``score(images, texts)`` gets the indices of images [G, a] and of captions [G, b], int64, on the embeddings'
            device, and returns scores [G, a, b] of any real dtype and device; b is 1.
        k: length of the shortlist, 1 or more.
        chunk: queries whose products are computed at once, as in `recall_from_embeddings`.

    Returns:
        What `recall` returns.

    Raises:
        CoderError: k or chunk below 1; shapes that do not fit; scores of another shape.

    Example:
        >>> from coder_plugin.evaluation import Scores
        >>> embeddings = torch.eye(2)  # two images and their captions
        >>> figures = rerank(embeddings, embeddings, [0, 1], Scores(embeddings, embeddings), k=1)
        >>> figures["i2t_r1"], figures["t2i_r1"]
        (100.0, 100.0)
    """
    if k < 1:
        raise CoderError(f"the shortlist must have 1 candidate or more, got k = {k}")
    pairs, owner = check_embeddings(image_embeddings, text_embeddings, image_of_text)
    pairs = comparable(pairs)

    def captions_right(first: int, rows: int) -> tuple[Tensor, Tensor]:
        return captions_of(first, rows, owner)

    def image_right(first: int, rows: int) -> tuple[Tensor, Tensor]:
        return torch.arange(rows, device=owner.device), owner[first : first + rows]

    def checked_score(images: Tensor, texts: Tensor) -> Tensor:
        scores = score(images, texts)
        expected = (*images.shape, texts.shape[1])
        if tuple(scores.shape) != expected:
            raise CoderError(f"the score of images [G, a] and captions [G, b] must be {expected}, got {tuple(scores.shape)}")
        return scores.to(owner.device, score_dtype(scores))

    shortlists = [
        _shortlists(pairs, captions_right, k, chunk),
        _shortlists([pair[::-1] for pair in pairs], image_right, k, chunk),
    ]
    images = len(pairs[0][0])
    keys = [
        shortlists[0].candidates * images + shortlists[0].queries[:, None],
        shortlists[1].queries[:, None] * images + shortlists[1].candidates,
    ]
    unique = torch.cat([each.flatten() for each in keys]).unique()  # pairs in shortlists of both directions are scored once
    scores = _scores(checked_score, unique, images)
    for each, key in zip(shortlists, keys, strict=True):
        each.ranks[each.queries] = row_ranks(scores[torch.searchsorted(unique, key)], *each.right.nonzero().T)
    return summary(shortlists[0].ranks, shortlists[1].ranks)


class _Shortlists(NamedTuple):
    """Ranks of all queries by embedding, and the shortlists of the R queries that have a right candidate in theirs."""

    ranks: Tensor  # [queries]
    queries: Tensor  # [R]
    candidates: Tensor  # [R, K]
    right: Tensor  # [R, K] bool


def _shortlists(
    pairs: Sequence[tuple[Tensor, Tensor]],
    right_pairs: Callable[[int, int], tuple[Tensor, Tensor]],
    k: int,
    chunk: int | None,
) -> _Shortlists:
    """Shortlists from (queries, candidates) of each model; ``right_pairs(first, rows)`` gives row and column of right pairs."""
    parts = []
    for start, tile in products(pairs, chunk):
        row, column = right_pairs(start, len(tile))
        ranks = row_ranks(tile, row, column)
        shortlist, right = best_candidates(tile, row, column, k)
        rows = right.any(1).nonzero().squeeze(1)
        parts.append((ranks, start + rows, shortlist[rows], right[rows]))
    return _Shortlists(*map(torch.cat, zip(*parts, strict=True)))


def _scores(score: Callable[[Tensor, Tensor], Tensor], pairs: Tensor, images: int) -> Tensor:
    """Scores [P] of pairs [P], which are ascending numbers text * images + image. A batch has captions with about equally many
    images."""
    texts, count = (pairs // images).unique_consecutive(return_counts=True)
    first = count.cumsum(0) - count
    scores = pairs.new_empty(0, dtype=torch.float32)
    order = count.argsort(descending=True)  # groups of similar counts need little padding
    while len(order):
        width = int(count[order[0]])
        size = max(1, _PAIRS // width)
        groups, order = order[:size], order[size:]
        last = (count[groups] - 1)[:, None]
        indices = first[groups, None] + torch.arange(width, device=last.device).minimum(last)
        for index in indices.split(_PAIRS, dim=1):
            batch = score(pairs[index] % images, texts[groups, None])[:, :, 0]
            scores = scores if len(scores) else batch.new_empty(len(pairs))
            scores[index] = batch
    return scores
