"""The graph of concepts, and samples as mixtures of concepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional import concept_embedding, concept_graph
from tests.losses.drawn import close, drawing, rows, second_order, transforms, value_and_gradient, vectors

EYE = torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize("rescale", [True, False])
def test_expected_values_of_the_graph(rescale: bool) -> None:
    z = vectors("concepts")
    got = concept_graph(z["cooccurrence"].double(), z["counts"].double(), rescale=rescale)
    close(got, z["adjacency" if rescale else "adjacency_raw"])


def test_the_graph_by_hand() -> None:
    """Three words; c never meets the others. P_ab = 1/2, P_ba = 1/3, so at 0.4 the edge is one-sided."""
    together = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    counts = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    close(concept_graph(together, counts, threshold=0.3, rescale=False), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    close(concept_graph(together, counts, threshold=0.4, rescale=False), torch.eye(3))  # b has no row: D_b^-1/2 is 0
    # 5^(1/2 - 0.02) - 5^-0.02 = 1.197, of 1/3 it is 0.687
    close(concept_graph(together, counts, threshold=0.7), torch.eye(3))
    close(concept_graph(together, counts, threshold=0.68)[1, 0], 1.0)


def test_a_share_that_equals_the_threshold_is_an_edge() -> None:
    """P_ab = P_ba = 1/2 exactly; above it there is none."""
    together, counts = torch.tensor([[0, 1], [1, 0]]), torch.tensor([2, 2])
    close(concept_graph(together, counts, threshold=0.5, rescale=False), torch.ones(2, 2))
    close(concept_graph(together, counts, threshold=0.5 + 1e-6, rescale=False), torch.eye(2))


def test_types_of_counts() -> None:
    together, counts = torch.tensor([[0, 1], [1, 0]]), torch.tensor([2, 3])
    assert concept_graph(together, counts).dtype == torch.float32
    assert concept_graph(together.double(), counts).dtype == concept_graph(together, counts.double()).dtype == torch.float64


def test_a_word_that_was_never_counted_has_the_identity_alone() -> None:
    graph = concept_graph(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0, 5]), threshold=0.0)
    assert torch.isfinite(graph).all() and graph[0].tolist() == [1, 0]


def test_expected_values_of_the_embedding() -> None:
    z = vectors("concepts")
    embedding, attention = concept_embedding(z["query"], z["weight"], z["concepts"], scale=z["scale"])
    close(embedding, z["embedding"])
    close(attention, z["attention"])


def test_a_sharp_query_is_its_concept_at_any_length() -> None:
    embedding, attention = concept_embedding(EYE[[2]] * 3, EYE, EYE * 7, scale=100)
    close(embedding, EYE[[2]])
    close(attention, EYE[[2]])


def test_derivatives_of_the_embedding() -> None:
    inputs = rows(drawing(), 2, 3), torch.randn(3, 3, dtype=torch.float64, generator=drawing(1)), rows(drawing(2), 5, 3)
    loss = lambda *x: (concept_embedding(*x)[0] * rows(drawing(3), 2, 3)).sum()  # noqa: E731
    second_order(loss, *inputs)
    transforms(loss, *inputs)
    zero = [each * 0 for each in inputs]
    assert all(each.isfinite().all() for each in value_and_gradient(loss, *zero))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_raised_also_under_autocast(dtype: torch.dtype) -> None:
    inputs = [each.to(dtype) for each in (rows(drawing(), 5, 4), EYE, rows(drawing(1), 7, 4))]
    want = concept_embedding(*(each.float() for each in inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = concept_embedding(*inputs)
    assert all(torch.equal(one, other) and one.dtype == torch.float32 for one, other in zip(got, want, strict=True))


ZERO = torch.zeros


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: concept_graph(ZERO(2, 3), ZERO(2)), r"cooccurrence must be \[g, g\] .* got \(2, 3\) and \(2,\)"),
        (lambda: concept_embedding(ZERO(2, 3), ZERO(3, 2), ZERO(4, 3)), r"query must be \[n, f\], .*\(3, 2\)"),
        (lambda: concept_embedding(ZERO(2, 3), ZERO(3, 3), ZERO(0, 3)), r"concepts \[g, f\], .*\(0, 3\)"),
        (lambda: concept_embedding(ZERO(2, 3), ZERO(3, 3), ZERO(4, 2)), r"concepts \[g, f\], .*\(4, 2\)"),
        (lambda: concept_embedding(ZERO(2, 3) + 1e30, ZERO(3, 3), ZERO(4, 3)), "query holds values of 1.0e[+]30"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_bad_input_is_named(wrong: Callable[[], Tensor], message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        wrong()
