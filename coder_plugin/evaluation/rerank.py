"""Two-stage retrieval: a shortlist by the embeddings' inner products, re-ranked by a score of pairs (AsCL eq. 4).

Shape letters: N images, T captions (texts), D joint dimensions, G groups, each of a images and b captions, k candidates
kept of each query, R queries of one tile, P their right pairs.

A score that depends on the pair, such as AsCL's fusion, cannot be looked up in an index of vectors, and all N x T of them
cost too much. So a query's k best candidates by embedding are ordered by the score; the others keep their places behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import (
    captions_of,
    check_embeddings,
    comparable,
    products,
    row_ranks,
    score_dtype,
    summary,
)

_PAIRS = 1024  # scored at once: 32 tokens of 1,024 channels in float32 are 128 MiB of each side


class Scorer(Protocol):
    """A score of pairs that were not all made beforehand."""

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        """Of images [G, a] and captions [G, b], int64: [G, a, b], higher is more alike."""

    def all_pairs(self) -> Tensor:
        """[N, T]."""


class Products:
    """The embeddings' own product as a :class:`Scorer`: the greatest where an image has several embeddings.

    Args:
        images: [N, D] or [N, V, D]. texts: [T, D].
    """

    def __init__(self, images: Tensor, texts: Tensor) -> None:
        self.pairs = comparable([(images, texts)])

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        [(images, texts)] = self.pairs
        views = images if images.ndim == 3 else images[:, None]
        return torch.einsum("gavd,gbd->gavb", views[image_index], texts[text_index]).amax(2)

    def all_pairs(self) -> Tensor:
        return torch.cat([tile.clone() for _, tile in products(self.pairs, None)])


class MeanScore:
    """The mean of several models' scores as a :class:`Scorer`: an ensemble's."""

    def __init__(self, scorers: Iterable[Scorer]) -> None:
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
    """Recall of two-stage retrieval: the k best candidates of each query by embedding, put in order by ``score``.

    Of a query's right candidates, those in its shortlist are ranked within it; where none is there, the rank by embedding,
    k or more, stays. A tie counts against the query and a NaN is read as `recall` reads it, in either stage: a wrong
    candidate as good as the right one by embedding takes its place in the shortlist. Wrong candidates that tie there are
    taken in their order. With k at or above the number of candidates, the ranks are those of ``score`` for all pairs.

    Neither stage holds [N, T], but the shortlists. Each of their pairs is scored once, for both directions, in batches of
    about a thousand; and only for queries with a right candidate in the shortlist: the others' ranks do not depend on them.

    Args:
        image_embeddings: [N, D] or [N, V, D], or several models', as in `recall_from_embeddings`.
        text_embeddings: [T, D], likewise.
        image_of_text: [T] integers in [0, N), as in `recall`.
        score: ``score(images, texts)`` of the numbers of images [G, a] and captions [G, b], int64 on the embeddings'
            device: [G, a, b], any real dtype and device; b is 1.
        k: length of the shortlist, 1 or more.
        chunk: queries whose products are made at once, as in `recall_from_embeddings`.

    Returns:
        What `recall` returns.

    Raises:
        CoderError: k or chunk below 1; shapes that do not fit; scores of another shape than asked for.
    """
    if k < 1:
        raise CoderError(f"the shortlist must have 1 candidate or more, got k = {k}")
    pairs, owner = check_embeddings(image_embeddings, text_embeddings, image_of_text)
    pairs = comparable(pairs)

    def captions_right(first: int, rows: int) -> tuple[Tensor, Tensor]:
        return captions_of(first, rows, owner)

    def image_right(first: int, rows: int) -> tuple[Tensor, Tensor]:
        return torch.arange(rows, device=owner.device), owner[first : first + rows]

    def asked(images: Tensor, texts: Tensor) -> Tensor:
        scores = score(images, texts)
        expected = (*images.shape, texts.shape[1])
        if tuple(scores.shape) != expected:
            raise CoderError(f"the score of images [G, a] and captions [G, b] must be {expected}, got {tuple(scores.shape)}")
        return scores.to(owner.device, score_dtype(scores))

    found = [
        _shortlists(pairs, captions_right, k, chunk),
        _shortlists([pair[::-1] for pair in pairs], image_right, k, chunk),
    ]
    images = len(pairs[0][0])
    keys = [
        found[0].candidates * images + found[0].queries[:, None],
        found[1].queries[:, None] * images + found[1].candidates,
    ]
    wanted = torch.cat([each.flatten() for each in keys]).unique()  # a pair of both directions once
    scores = _scores(asked, wanted, images)
    for each, key in zip(found, keys, strict=True):
        each.ranks[each.queries] = _ranks_within(scores[torch.searchsorted(wanted, key)], each.own)
    return summary(found[0].ranks, found[1].ranks)


class _Shortlists(NamedTuple):
    """What the embeddings alone say of all queries, and the shortlists of the R that have a right candidate in theirs."""

    ranks: Tensor  # [queries]
    queries: Tensor  # [R]
    candidates: Tensor  # [R, K], the right ones last
    own: Tensor  # [R] how many are right


def _shortlists(
    pairs: Sequence[tuple[Tensor, Tensor]],
    right: Callable[[int, int], tuple[Tensor, Tensor]],
    k: int,
    chunk: int | None,
) -> _Shortlists:
    """Of (queries, candidates); ``right(first, rows)`` names the right pairs of a tile."""
    parts = []
    for start, tile in products(pairs, chunk):
        row, column = right(start, len(tile))
        ranks = row_ranks(tile, row, column)
        shortlist, own = _shortlist(tile, row, column, k)
        found = own.nonzero().squeeze(1)
        parts.append((ranks, start + found, shortlist[found], own[found]))
    return _Shortlists(*map(torch.cat, zip(*parts, strict=True)))


def _shortlist(tile: Tensor, row: Tensor, column: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best k candidates [R, K] of score rows [R, candidates], K = min(k, candidates), the right ones last, and how
    many of them are right [R]. Overwrites ``tile``."""
    rows, candidates = tile.shape
    k = min(k, candidates)
    value = tile[row, column]
    value = value.masked_fill(value.isnan(), -torch.inf)
    # Wrong candidates alone: the right ones are below all of them, as none of theirs is left at -inf.
    tile.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.finfo(tile.dtype).min)
    tile[row, column] = -torch.inf
    best, shortlist = tile.topk(min(k + 1, candidates), dim=1)
    tied = (best[:, 1:] == best[:, :-1]).any(1)
    if tied.any():  # topk takes any of those that tie
        shortlist[tied] = tile[tied].sort(dim=1, descending=True, stable=True).indices[:, : best.shape[1]]
    best, shortlist = best[:, :k].contiguous(), shortlist[:, :k].contiguous()
    # A right candidate's place is behind the wrong ones that are as good, and behind the better right ones.
    order = value.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    value, row, column = value[order], row[order], column[order]
    count = torch.bincount(row, minlength=rows)
    behind = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    table = value.new_full((rows, int(count.max())), torch.inf)
    table[row, behind] = value
    wrong = torch.searchsorted(-best, -table, right=True)[row, behind].minimum(candidates - count[row])
    inside = wrong + behind < k
    shortlist[row[inside], k - 1 - behind[inside]] = column[inside]
    return shortlist, torch.bincount(row[inside], minlength=rows)


def _scores(score: Callable[[Tensor, Tensor], Tensor], pairs: Tensor, images: int) -> Tensor:
    """Scores [P] of pairs [P], ascending numbers text * images + image: captions with so many images each at once."""
    texts, count = (pairs // images).unique_consecutive(return_counts=True)
    first = count.cumsum(0) - count
    scores = pairs.new_empty(0, dtype=torch.float32)
    order = count.argsort(descending=True)  # like counts together: a group is filled up to the largest
    while len(order):
        width = int(count[order[0]])
        some = max(1, _PAIRS // width)
        groups, order = order[:some], order[some:]
        last = (count[groups] - 1)[:, None]
        places = first[groups, None] + torch.arange(width, device=last.device).minimum(last)
        for place in places.split(_PAIRS, dim=1):
            got = score(pairs[place] % images, texts[groups, None])[:, :, 0]
            scores = scores if len(scores) else got.new_empty(len(pairs))
            scores[place] = got
    return scores


def _ranks_within(scores: Tensor, own: Tensor) -> Tensor:
    """0-based ranks [G] by scores [G, K], of which the last ``own`` [G] of each row are right."""
    width = scores.shape[1]
    right = torch.arange(width, device=own.device) >= width - own[:, None]
    best = scores.masked_fill(~right | scores.isnan(), -torch.inf).amax(1, keepdim=True)
    beaten = ((scores < best) & ~right).sum(1)
    return width - own - beaten
