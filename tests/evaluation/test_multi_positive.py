"""Several right answers to a query: against a loop over places, and what makes no sense."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.evaluation.metrics import best_candidates
from coder_plugin.evaluation.multi_positive import Scores, multi_positive, pairs_of, rankings
from tests.references import multi_positive as reference

NAN, INF = float("nan"), float("inf")


def made(queries: int, candidates: int, seed: int, *, own: bool = False) -> tuple[Tensor, dict[int, set[int]]]:
    """Scores of few values, so that many tie, with NaN and infinities; no to many right candidates."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, 1.0, 1.0, 2.0, -1.0, NAN, INF, -INF])
    matrix = values[torch.randint(len(values), (queries, candidates), generator=rng)]
    right = torch.rand(queries, candidates, generator=rng) < 0.3
    if own:
        right.fill_diagonal_(False)
    right[0, -1] = True
    return matrix, {q: set(row.nonzero().flatten().tolist()) for q, row in enumerate(right)}


def pairs(truth: dict[int, set[int]], queries: int, candidates: int) -> Tensor:
    return pairs_of(truth, range(queries), range(candidates))


@given(st.integers(1, 9), st.integers(12, 25), st.integers(0, 10**6), st.booleans())
def test_as_one_place_at_a_time(queries: int, candidates: int, seed: int, own: bool) -> None:
    queries = candidates if own else queries
    matrix, truth = made(queries, candidates, seed, own=own)
    got = multi_positive([(0, matrix)], pairs(truth, queries, candidates), exclude_self=own)
    assert got == pytest.approx(reference.figures(matrix.tolist(), truth, own=own))
    rows = [(start, matrix[start : start + 2]) for start in range(0, queries, 2)]
    ranked = rankings(rows, {"a": pairs(truth, queries, candidates)}, exclude_self=own)["a"]
    for query, right, count in zip(*(each.tolist() for each in ranked), strict=True):
        order = reference.ranked(matrix[query].tolist(), truth[query], query if own else None)
        assert right == [candidate in truth[query] for candidate in order[: len(right)]]
        assert count == len(truth[query])
    for query, right in truth.items():
        own_column = torch.tensor([query]) if own else None
        column = torch.tensor(sorted(right), dtype=torch.int64)
        row = matrix[query : query + 1].clone()
        best, marks = best_candidates(row, torch.zeros_like(column), column, 11, exclude=own_column) if right else ([[]], [[]])
        order = reference.ranked(matrix[query].tolist(), right, query if own else None)[: len(marks[0])]
        finite = matrix[query].nan_to_num(neginf=-9)  # wrong candidates at the lowest number tie
        assert [int(each) for each in best[0]] == order or not finite.equal(matrix[query])
    assert ranked.queries.tolist() == [query for query, right in truth.items() if right]


def test_by_hand() -> None:
    """Of three right ones at places 1, 3 and 5 of six: (1/1 + 2/3) / 3, 2/3."""
    matrix = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0]])
    got = multi_positive([(0, matrix)], torch.tensor([[0, 0, 0], [4, 0, 2]]))
    assert got == pytest.approx(
        {"map_at_r": 100 * (1 + 2 / 3) / 3, "r_precision": 200 / 3, "r1": 100, "r5": 100, "r10": 100, "queries": 1}
    )
    collapsed = multi_positive([(0, torch.zeros(2, 20))], torch.tensor([[0, 1, 1], [3, 4, 5]]))
    assert set(collapsed.values()) == {0, 2}  # nothing found, of two queries


def test_scores_of_embeddings() -> None:
    """Both ways and within, of views and of several models, in tiles of any size."""
    rng = torch.Generator().manual_seed(0)
    images, texts = torch.randn(7, 3, 4, generator=rng), torch.randn(11, 4, generator=rng)
    others = torch.randn(7, 5, generator=rng), torch.randn(11, 5, generator=rng)
    views = torch.einsum("avd,bd->avb", images, texts).amax(1)
    within = torch.einsum("avd,bwd->avbw", images, images).amax((1, 3))
    expected = {
        "i2t": (views + others[0] @ others[1].T) / 2,
        "t2i": ((views + others[0] @ others[1].T) / 2).T,
        "i2i": (within + others[0] @ others[0].T) / 2,
        "t2t": (texts @ texts.T + others[1] @ others[1].T) / 2,
    }
    scores = Scores([images, others[0]], [texts, others[1]])
    for way, matrix in expected.items():
        for chunk in (1, 3, None):
            got = torch.cat([tile.clone() for _, tile in scores.rows(way, chunk=chunk)])  # type: ignore[arg-type]
            torch.testing.assert_close(got, matrix)
    some = torch.tensor([5, 0]), torch.tensor([2, 2, 9])
    given_matrix = torch.randn(7, 11, generator=rng)
    for way in ("i2t", "t2i"):
        part = torch.cat([tile.clone() for _, tile in scores.of(*some).rows(way)])
        whole = expected["i2t"][some[0]][:, some[1]]
        torch.testing.assert_close(part, whole if way == "i2t" else whole.T)
        instead = Scores(images, texts, given_matrix).of(*some)
        for _, tile in instead.rows(way):
            torch.testing.assert_close(tile, (m := given_matrix[some[0]][:, some[1]]) if way == "i2t" else m.T)
            tile.zero_()  # as a reader may
        assert next(iter(instead.rows(way)))[1].any()


def test_no_sense() -> None:
    matrix = torch.zeros(2, 20)
    for truth, match in (
        (torch.zeros(2, 0, dtype=torch.int64), r"\[2, pairs\]"),
        (torch.zeros(3, 1, dtype=torch.int64), r"\[2, pairs\]"),
        (torch.tensor([[0, 0], [3, 3]]), "once"),
    ):
        with pytest.raises(CoderError, match=match):
            multi_positive([(0, matrix)], truth)
    with pytest.raises(CoderError, match="no right answer to itself"):
        multi_positive([(0, torch.zeros(20, 20))], torch.tensor([[3], [3]]), exclude_self=True)
    with pytest.raises(CoderError, match="the best 10 candidates are ranked, and there are only 9"):
        multi_positive([(0, torch.zeros(10, 10))], torch.tensor([[3], [4]]), exclude_self=True)


def test_ids_to_places() -> None:
    got = pairs_of({7: [30, 10, 30], 8: [99], 9: [20]}, [8, 7], [10, 20, 30])
    assert got.tolist() == [[1, 1], [2, 0]]
