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
#: Pairs that a fusion score is asked for at once.
_PAIRS = 1024


@dataclass(frozen=True)
class Hit:
    """One candidate of a query: its place in the data, its score, and whether it is right.

    ``behind``: a fusion score has put a shortlist in order, and this one lies behind it: its score is the vectors' product.
    """

    index: int
    score: float
    right: bool
    behind: bool = False


@dataclass(frozen=True)
class Example:
    """A query with its first candidates.

    Args:
        query: its place among the images or the captions. rank: 0-based, of its truth, as recall counts.
        truth: the best-ranked right candidate.
    """

    query: int
    rank: int
    hits: tuple[Hit, ...]
    truth: Hit


def best_and_worst(
    encoded: Encoded, way: Way, ranks: Tensor, *, count: int, depth: int | None = None, first: int = 5
) -> tuple[list[Example], list[Example]]:
    """The queries of the lowest and those of the highest ranks, ties in the data's order; of the captions of one image the
    first such alone, and no query is in both.

    Args:
        ranks: of all queries, 0-based, as recall gives them.
        count: how many of each at most; first: candidates of each.
        depth: of a model that re-ranks, the candidates that its fusion score orders; None: all.
    """
    rows = _rows(encoded, way, depth)
    order = ranks.argsort(stable=True).tolist()
    best = _distinct(order, way, encoded, count, set())
    worst_first = (-ranks).argsort(stable=True).tolist()
    worst = _distinct(worst_first, way, encoded, count, {_image(query, way, encoded) for query in best})
    return [example(encoded, way, query, rows, first) for query in best], [
        example(encoded, way, query, rows, first) for query in worst
    ]


def example(encoded: Encoded, way: Way, query: int, rows: Callable[[int], tuple[Tensor, Tensor, int]], first: int) -> Example:
    """A query's candidates in the order in which recall counts them: at equal scores, wrong before right."""
    candidates, scores, ordered = rows(query)
    if way == "i2t":
        right = encoded.image_of_text[candidates] == query
    else:
        right = candidates == encoded.image_of_text[query]
    behind = (torch.arange(len(scores)) >= ordered).tolist()
    hits = [Hit(*each) for each in zip(candidates.tolist(), scores.tolist(), right.tolist(), behind, strict=True)]
    place = next(number for number, hit in enumerate(hits) if hit.right)
    return Example(query, place, tuple(hits[:first]), hits[place])


def _rows(encoded: Encoded, way: Way, depth: int | None) -> Callable[[int], tuple[Tensor, Tensor, int]]:
    """Of a query all candidates [C] in order, their scores [C], and how many of the first have the score that orders them all
    or, of a model that re-ranks, the shortlist."""
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
    asked = torch.full_like(candidates, query)
    images, texts = (asked, candidates) if way == "i2t" else (candidates, asked)
    with torch.no_grad():
        return scorer(images[:, None], texts[:, None])[:, 0, 0].float().cpu()


def _ordered(scores: Tensor, right: Tensor) -> Tensor:
    wrong_first = right.long().argsort(stable=True)
    return wrong_first[scores[wrong_first].argsort(descending=True, stable=True)]


def _image(query: int, way: Way, encoded: Encoded) -> int:
    return query if way == "i2t" else int(encoded.image_of_text[query])


def _distinct(order: Iterable[int], way: Way, encoded: Encoded, count: int, taken: set[int]) -> list[int]:
    found: list[int] = []
    taken = set(taken)
    for query in order:
        if len(found) == count:
            break
        image = _image(query, way, encoded)
        if image not in taken:
            taken.add(image)
            found.append(query)
    return found
