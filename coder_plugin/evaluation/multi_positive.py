"""Retrieval where a query has several right answers: recall, R-Precision and mAP@R over any ground truth.

Shape letters: Q queries, C candidates, R rows (queries) of one tile, k best candidates of a query, P right pairs, N images,
T texts.

For a query with r right candidates, R-Precision is the share of right ones among the first r. mAP@R is the mean over these r
ranks of the precision up to the rank if the candidate there is right, else 0 (Musgrave, Belongie and Lim, *A Metric
Learning Reality Check*, ECCV 2020; Chun et al., *ECCV Caption*, ECCV 2022).

As in :mod:`~coder_plugin.evaluation.metrics`, ties and NaN count against the model: among equal scores the wrong candidate
comes first, a wrong candidate's NaN is read as +inf and a right one's as -inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import (
    best_candidates,
    comparable,
    over_folds,
    products,
    recall,
    recall_from_embeddings,
    tiles,
)

#: Pairs of the first query's number and score rows [R, C].
Rows = Iterable[tuple[int, Tensor]]
Way = Literal["i2t", "t2i", "i2i", "t2t"]


class Scores:
    """The scores that rank images and texts: inner products of embeddings, or a matrix. Also a
    :class:`~coder_plugin.heads.capabilities.PairScorer`.

    Args:
        images: [N, D], or [N, V, D] for V views, of which the best counts. A sequence holds those of several models, whose
            scores are averaged.
        texts: [T, D], or a sequence likewise.
        matrix: [N, T], used instead of the products of images and texts.
    """

    def __init__(
        self, images: Tensor | Sequence[Tensor], texts: Tensor | Sequence[Tensor], matrix: Tensor | None = None
    ) -> None:
        self._images, self._texts = ([side] if isinstance(side, Tensor) else list(side) for side in (images, texts))
        self._matrix = matrix

    @cached_property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return comparable(list(zip(self._images, self._texts, strict=True)))

    def rows(self, way: Way, *, chunk: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """:data:`Rows` of one direction. A tile may be written to, and is overwritten by the next.

        Args:
            way: queries and candidates; ``"t2i"``: texts are queries, images are candidates.
            chunk: rows of a tile; None: as many as make about four million scores.
        """
        if self._matrix is not None and way in ("i2t", "t2i"):
            matrix = self._matrix if way == "i2t" else self._matrix.T
            for start, stop in tiles(len(matrix), matrix.shape[1], chunk):
                yield start, matrix[start:stop].clone()
            return
        sides = {"i": self._images, "t": self._texts}
        yield from products(comparable(list(zip(sides[way[0]], sides[way[-1]], strict=True))), chunk)

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        """Scores [G, a, b] of images [G, a] and texts [G, b], by their indices, int64."""
        if self._matrix is not None:
            return self._matrix[image_index[:, :, None], text_index[:, None]]
        total: Any = 0
        for images, texts in self._pairs:
            views = images if images.ndim == 3 else images[:, None]
            total = total + torch.einsum("gavd,gbd->gavb", views[image_index], texts[text_index]).amax(2)
        return total / len(self._images)

    def all_pairs(self) -> Tensor:
        """The scores of all pairs [N, T]."""
        return torch.cat([tile.clone() for _, tile in self.rows("i2t")]) if self._matrix is None else self._matrix

    def recall(self, image_of_text: Tensor, *, folds: int = 0) -> dict[str, Any]:
        """What :func:`~coder_plugin.evaluation.recall` returns; with ``folds`` their mean under ``folds``."""
        if self._matrix is None:
            out = recall_from_embeddings(self._images, self._texts, image_of_text)
        else:
            out = recall(self._matrix, image_of_text)
        if folds:
            count = len(self._images[0])
            out["folds"] = over_folds(image_of_text, count, folds, lambda *fold: self.of(*fold[:2]).recall(fold[2]))
        return out

    def of(self, images: Tensor | slice, texts: Tensor) -> Scores:
        """The scores of only these images and texts, by their indices, int64."""
        matrix = None if self._matrix is None else self._matrix[images][:, texts]
        return Scores([each[images] for each in self._images], [each[texts] for each in self._texts], matrix)


class Ranking(NamedTuple):
    """Which of the k best candidates are right, best first, of each query that has a right one."""

    queries: Tensor  # [Q'] int64, ascending
    right: Tensor  # [Q', k] bool
    positives: Tensor  # [Q'] int64, how many candidates are right


@torch.no_grad()
def rankings(rows: Rows, truths: Mapping[str, Tensor], *, k: int = 10, exclude_self: bool = False) -> dict[str, Ranking]:
    """The best candidates of each query by each ground truth. Queries without a right candidate are left out.

    Args:
        rows: of all queries, in their order.
        truths: name to [2, P] int64, queries and their right candidates, each pair once.
        k: candidates per query; more if a query has more right candidates.
        exclude_self: queries and candidates are the same items, and no item is a candidate of itself.

    Raises:
        CoderError: a truth without a pair, with a pair twice or, with ``exclude_self``, of an item with itself; fewer
            candidates than ``k``.
    """
    sorted_truths = {name: _checked(name, pairs, exclude_self) for name, pairs in truths.items()}
    depths = {name: max(k, int(pairs[0].bincount().max())) for name, pairs in sorted_truths.items()}
    parts: dict[str, list[Ranking]] = {name: [] for name in truths}
    for start, tile in rows:
        for name, pairs in sorted_truths.items():
            candidates = tile.shape[1] - exclude_self
            if candidates < depths[name]:
                raise CoderError(f"the best {depths[name]} candidates are ranked, and there are only {candidates}")
            queries, column = pairs[:, (pairs[0] >= start) & (pairs[0] < start + len(tile))].to(tile.device)
            if len(queries):
                queries, row, count = queries.unique_consecutive(return_inverse=True, return_counts=True)
                own = queries if exclude_self else None
                _, right = best_candidates(tile[queries - start], row, column, depths[name], exclude=own)
                parts[name].append(Ranking(queries, right, count))
    return {name: Ranking(*(torch.cat(part).cpu() for part in zip(*each, strict=True))) for name, each in parts.items()}


def _checked(name: str, pairs: Tensor, exclude_self: bool) -> Tensor:
    """The pairs [2, P] sorted by query."""
    pairs = torch.as_tensor(pairs)
    if pairs.ndim != 2 or len(pairs) != 2 or not pairs.shape[1]:
        raise CoderError(f"{name}: a ground truth is [2, pairs] of queries and right candidates, got {tuple(pairs.shape)}")
    if pairs.unique(dim=1).shape != pairs.shape:
        raise CoderError(f"{name}: a ground truth names each query and right candidate once")
    if exclude_self and (pairs[0] == pairs[1]).any():
        raise CoderError(f"{name}: an item is no right answer to itself")
    return pairs[:, pairs[0].argsort(stable=True)]


def figures(ranked: Ranking, *, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float | int]:
    """Means over the queries in percent: ``map_at_r``, ``r_precision``, ``r1`` … for ``ks``; and the number of ``queries``."""
    rank = torch.arange(1, ranked.right.shape[1] + 1)
    within = ranked.right & (rank <= ranked.positives[:, None])
    out = {
        "map_at_r": (within.cumsum(1).double() / rank * within).sum(1) / ranked.positives,
        "r_precision": within.sum(1).double() / ranked.positives,
        **{f"r{k}": ranked.right[:, :k].any(1).double() for k in ks},
    }
    return {**{name: 100 * float(value.mean()) for name, value in out.items()}, "queries": len(ranked.queries)}


def multi_positive(
    rows: Rows, pairs: Tensor, *, ks: Sequence[int] = (1, 5, 10), exclude_self: bool = False
) -> dict[str, float | int]:
    """mAP@R, R-Precision and recall at ``ks`` by any ground truth: :func:`figures` of :func:`rankings`.

    Args:
        rows: score rows; of embeddings ``Scores(images, texts).rows("i2t")``, of a matrix ``[(0, similarity)]``.
        pairs: [2, P] int64, queries and their right candidates, each pair once.
        ks: ranks of the recalls.
        exclude_self: as in :func:`rankings`.

    Raises:
        CoderError: as :func:`rankings`.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1, 0.7]])
        >>> multi_positive([(0, scores)], torch.tensor([[0, 0], [0, 3]]), ks=(1, 2))["r_precision"]
        50.0
    """
    return figures(rankings(rows, {"pairs": pairs}, k=max(ks), exclude_self=exclude_self)["pairs"], ks=ks)


def pairs_of(truth: Mapping[int, Iterable[int]], queries: Sequence[int], candidates: Sequence[int]) -> Tensor:
    """A ground truth by ids as indices into ``queries`` and ``candidates`` [2, P]; other ids are left out."""
    index = {candidate: number for number, candidate in enumerate(candidates)}
    pairs = [
        (number, index[right])
        for number, query in enumerate(queries)
        for right in dict.fromkeys(truth.get(query, ()))
        if right in index
    ]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
