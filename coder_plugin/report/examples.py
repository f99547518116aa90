"""The best and the worst queries of a model in both directions, with what they find.

Shapes: N images, T captions (texts), D dimensions, V features of an image, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report.state import similarity

Way = Literal["i2t", "t2i"]
#: Pairs that a fusion score computes at once.
_PAIRS = 1024


@dataclass(frozen=True)
class Hit:
    """One candidate of a query: its index in the data, its score, and whether it is right.

    ``behind``: a fusion score re-ranked a shortlist, and this candidate comes after it; its score is the vectors' product.
    """

    index: int
    score: float
    right: bool
    behind: bool = False


@dataclass(frozen=True)
class Example:
    """A query with its first candidates.

    Args:
        query: its index among the images or the captions.
        rank: 0-based, of the best right candidate, as recall counts.
        truth: the best-ranked right candidate.
    """

    query: int
    rank: int
    hits: tuple[Hit, ...]
    truth: Hit


def best_and_worst(
    encoded: Encoded, way: Way, ranks: Tensor, *, count: int, depth: int | None = None, first: int = 5
) -> tuple[list[Example], list[Example]]:
    """The queries with the lowest and those with the highest ranks, ties in the data's order.

    Of several captions of one image only the first counts, and no image is in both lists.

    Args:
        ranks: of all queries, 0-based, as recall returns them.
        count: most queries in each list.
        depth: candidates that the fusion score re-ranks, for a model that has one; None: all.
        first: candidates shown per query.
    """
    rows = _rows(encoded, way, depth)
    order = ranks.argsort(stable=True).tolist()
    best = _distinct(order, way, encoded, count, set())
    worst_first = (-ranks).argsort(stable=True).tolist()
    worst = _distinct(worst_first, way, encoded, count, {_image(query, way, encoded) for query in best})
    return [example(encoded, way, query, rows, first) for query in best], [
        example(encoded, way, query, rows, first) for query in worst
    ]


def example(
    encoded: Encoded, way: Way, query: int, rows: Callable[[int], tuple[Tensor, Tensor, int]], first: int
) -> Example:
    """A query's candidates in the order in which recall counts them: at equal scores, wrong before right."""
    candidates, scores, ordered = rows(query)
    if way == "i2t":
        right = encoded.image_of_text[candidates] == query
    else:
        right = candidates == encoded.image_of_text[query]
    behind = (torch.arange(len(scores)) >= ordered).tolist()
    hits = [Hit(*each) for each in zip(candidates.tolist(), scores.tolist(), right.tolist(), behind, strict=True)]
    rank = next(number for number, hit in enumerate(hits) if hit.right)
    return Example(query, rank, tuple(hits[:first]), hits[rank])


def _rows(encoded: Encoded, way: Way, depth: int | None) -> Callable[[int], tuple[Tensor, Tensor, int]]:
    """For a query: all candidates [C] in order, their scores [C], and how many of the first have the final score (all, or
    those on the shortlist if the model re-ranks)."""
    items = encoded.items
    scorer = None if items is None else items.head.scorer(items.images, items.texts)

    def row(query: int) -> tuple[Tensor, Tensor, int]:
        if way == "i2t":
            scores, right = similarity(encoded.images[query][None], encoded.texts)[0], encoded.image_of_text == query
        else:
            scores = similarity(encoded.images, encoded.texts[query][None])[:, 0]
            right = torch.arange(len(scores)) == encoded.image_of_text[query]
        order = _ordered(scores, right)
        if scorer is None:
            return order, scores[order], len(order)
        shortlist = order[:depth].sort().values
        fused = torch.cat([_fused(scorer, way, query, part) for part in shortlist.split(_PAIRS)])
        within = _ordered(fused, right[shortlist])
        behind = order[len(shortlist) :]
        return torch.cat([shortlist[within], behind]), torch.cat([fused[within], scores[behind]]), len(shortlist)

    return row


def _fused(scorer: Any, way: Way, query: int, candidates: Tensor) -> Tensor:
    queries = torch.full_like(candidates, query)
    images, texts = (queries, candidates) if way == "i2t" else (candidates, queries)
    with torch.no_grad():
        return scorer(images[:, None], texts[:, None])[:, 0, 0].float().cpu()


def _ordered(scores: Tensor, right: Tensor) -> Tensor:
    wrong_first = right.long().argsort(stable=True)
    return wrong_first[scores[wrong_first].argsort(descending=True, stable=True)]


def _image(query: int, way: Way, encoded: Encoded) -> int:
    return query if way == "i2t" else int(encoded.image_of_text[query])


def _distinct(order: Iterable[int], way: Way, encoded: Encoded, count: int, taken: set[int]) -> list[int]:
    queries: list[int] = []
    taken = set(taken)
    for query in order:
        if len(queries) == count:
            break
        image = _image(query, way, encoded)
        if image not in taken:
            taken.add(image)
            queries.append(query)
    return queries
