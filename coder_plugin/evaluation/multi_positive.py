"""Retrieval where a query has several right answers: recall, R-Precision and mAP@R over any ground truth.

Shape letters: Q queries, C candidates, R rows (queries) of one tile, k places looked at, P right pairs, N images, T texts.

A query with r right candidates is judged by its first r places: R-Precision is the share of them that are right, mAP@R the
mean over them of the precision up to each that is right, and 0 for each that is not (Musgrave, Belongie and Lim, *A Metric
Learning Reality Check*, ECCV 2020; Chun et al., *ECCV Caption*, ECCV 2022).

As in :mod:`~coder_plugin.evaluation.metrics`, nothing flatters a model: of equal scores the wrong candidate comes first, a
wrong candidate's NaN is read as +inf and a right one's as -inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import comparable, products, tiles

#: Score rows after the number of their first query: [R, C] each.
Rows = Iterable[tuple[int, Tensor]]
Way = Literal["i2t", "t2i", "i2i", "t2t"]


class Scores:
    """What images and texts are ranked by: inner products of embeddings, or a matrix of scores.

    Args:
        images: [N, D] or [N, V, D] for V views, of which the best counts; or those of each model, whose mean counts.
        texts: [T, D], or those of each model.
        matrix: [N, T] that stands in for the products of images and texts.
    """

    def __init__(
        self, images: Tensor | Sequence[Tensor], texts: Tensor | Sequence[Tensor], matrix: Tensor | None = None
    ) -> None:
        self._images, self._texts = ([side] if isinstance(side, Tensor) else list(side) for side in (images, texts))
        self._matrix = matrix

    def rows(self, way: Way, *, chunk: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """:data:`Rows` of queries against candidates, such as ``"t2i"``: of texts against images.

        A tile may be written to, and is overwritten by the next. ``chunk``: its rows; None: as many as make some four million
        scores.
        """
        if self._matrix is not None and way in ("i2t", "t2i"):
            whole = self._matrix if way == "i2t" else self._matrix.T
            for start, stop in tiles(len(whole), whole.shape[1], chunk):
                yield start, whole[start:stop].clone()
            return
        sides = {"i": self._images, "t": self._texts}
        yield from products(comparable(list(zip(sides[way[0]], sides[way[-1]], strict=True))), chunk)

    def of(self, images: Tensor, texts: Tensor) -> Scores:
        """Of some images and texts alone: their numbers, int64."""
        matrix = None if self._matrix is None else self._matrix[images][:, texts]
        return Scores([each[images] for each in self._images], [each[texts] for each in self._texts], matrix)


class Ranking(NamedTuple):
    """The best candidates of each query that has a right one, best first."""

    queries: Tensor  # [Q'] int64, ascending
    candidates: Tensor  # [Q', k] int64
    right: Tensor  # [Q', k] bool
    positives: Tensor  # [Q'] int64, how many candidates are right


@torch.no_grad()
def rankings(rows: Rows, truths: Mapping[str, Tensor], *, k: int = 10, own: bool = False) -> dict[str, Ranking]:
    """The first places of each query by each ground truth; queries without a right candidate are left out of it.

    Args:
        rows: of all queries, in their order.
        truths: name to [2, P] int64, queries and their right candidates, each pair once.
        k: how many places at least; as many as any query has right candidates are looked at anyway.
        own: queries and candidates are the same items, and none is an answer to itself.

    Raises:
        CoderError: a truth without a pair, a pair twice or of an item with itself; a k beyond what there is to find.
    """
    sorted_truths = {name: _checked(name, pairs, own) for name, pairs in truths.items()}
    places = {name: max(k, int(pairs[0].bincount().max())) for name, pairs in sorted_truths.items()}
    parts: dict[str, list[Ranking]] = {name: [] for name in truths}
    for start, tile in rows:
        for name, pairs in sorted_truths.items():
            if tile.shape[1] - own < places[name]:
                raise CoderError(f"{places[name]} places are looked at, and there are {tile.shape[1] - own} candidates")
            mine = pairs[:, (pairs[0] >= start) & (pairs[0] < start + len(tile))].to(tile.device)
            if mine.shape[1]:
                parts[name].append(_first_places(tile, start, mine, places[name], own))
    return {name: Ranking(*(torch.cat(part).cpu() for part in zip(*each, strict=True))) for name, each in parts.items()}


def _checked(name: str, pairs: Tensor, own: bool) -> Tensor:
    pairs = torch.as_tensor(pairs)
    if pairs.ndim != 2 or len(pairs) != 2 or not pairs.shape[1]:
        raise CoderError(f"{name}: a ground truth is [2, pairs] of queries and right candidates, got {tuple(pairs.shape)}")
    if pairs.unique(dim=1).shape != pairs.shape:
        raise CoderError(f"{name}: a ground truth names each query and right candidate once")
    if own and (pairs[0] == pairs[1]).any():
        raise CoderError(f"{name}: an item is no right answer to itself")
    return pairs[:, pairs[0].argsort(stable=True)]


def _first_places(tile: Tensor, start: int, pairs: Tensor, k: int, own: bool) -> Ranking:
    """Of one tile, which is left as it is; ``pairs`` are sorted by query."""
    queries, row, count = pairs[0].unique_consecutive(return_inverse=True, return_counts=True)
    tile, column = tile[queries - start], pairs[1]
    # -inf is nobody's score: the least of a right candidate is the lowest number, and of a wrong one the next
    least = torch.finfo(tile.dtype).min
    second = torch.nextafter(tile.new_tensor(least), tile.new_tensor(0.0))
    value = tile[row, column].nan_to_num(nan=least, posinf=torch.inf, neginf=least)
    tile = tile.nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=second)
    tile[row, column] = -torch.inf
    if own:
        tile[torch.arange(len(tile), device=tile.device), queries] = -torch.inf
    best, place = tile.topk(k, dim=1)
    behind = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    scores = tile.new_full((len(tile), int(count.max())), -torch.inf)
    columns = torch.zeros_like(scores, dtype=torch.int64)
    scores[row, behind], columns[row, behind] = value, column
    # the wrong ones first, so that a stable sort leaves them before right ones of the same score
    order = torch.cat([best, scores], 1).argsort(dim=1, descending=True, stable=True)[:, :k]
    return Ranking(queries, torch.cat([place, columns], 1).gather(1, order), order >= k, count)


def figures(ranked: Ranking, *, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float | int]:
    """``map_at_r``, ``r_precision``, ``r1`` and its like, the means over the queries in percent, and how many ``queries``."""
    place = torch.arange(1, ranked.right.shape[1] + 1)
    within = ranked.right & (place <= ranked.positives[:, None])
    out = {
        "map_at_r": (within.cumsum(1).double() / place * within).sum(1) / ranked.positives,
        "r_precision": within.sum(1).double() / ranked.positives,
        **{f"r{k}": ranked.right[:, :k].any(1).double() for k in ks},
    }
    return {**{name: 100 * float(value.mean()) for name, value in out.items()}, "queries": len(ranked.queries)}


def multi_positive(rows: Rows, pairs: Tensor, *, ks: Sequence[int] = (1, 5, 10), own: bool = False) -> dict[str, float | int]:
    """mAP@R, R-Precision and recall at ``ks`` by any ground truth: :func:`figures` of :func:`rankings`.

    Args:
        rows: score rows; of embeddings ``Scores(images, texts).rows("i2t")``, of a matrix ``[(0, similarity)]``.
        pairs, own: one of the truths of :func:`rankings`, and its ``own``.
    """
    return figures(rankings(rows, {"pairs": pairs}, k=max(ks), own=own)["pairs"], ks=ks)


def pairs_of(truth: Mapping[int, Iterable[int]], queries: Sequence[int], candidates: Sequence[int]) -> Tensor:
    """[2, P]: a ground truth by ids as places in ``queries`` and ``candidates``; ids that are not there are left out."""
    place = {candidate: number for number, candidate in enumerate(candidates)}
    found = [
        (number, place[right])
        for number, query in enumerate(queries)
        for right in dict.fromkeys(truth.get(query, ()))
        if right in place
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2).T
