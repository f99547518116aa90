"""Diversity of an anchor, alone and as the weights of a batch: values, forms of its variance, derivatives, precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.contrast import Block, Dense, Direction, Pairs, Tiles
from coder_plugin.errors import CoderError
from coder_plugin.functional import diversity
from coder_plugin.losses.diversity import diversity_weights, raw_diversity
from tests.losses.drawn import (
    KINDS,
    TILE_SHAPES,
    close,
    drawing,
    hard_negatives,
    pair,
    rows,
    second_order,
    tile_shape,
    transforms,
    vectors,
)
from tests.references import dcl as reference


def raw(similarity: Tensor, negatives: Tensor, **options: Any) -> Tensor:
    """Before the division by the largest [n]."""
    return raw_diversity(Dense.of_scores([similarity], [negatives]), **options)[0]


def others(n: int) -> Tensor:
    return ~torch.eye(n, dtype=torch.bool)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["std", "entropy"])
@pytest.mark.parametrize("tag", ["plain", "clustered", "tiny"])
def test_expected_values(tag: str, kind: Any) -> None:
    z = vectors(f"dcl_{tag}")
    similarity = z["image_features"] @ z["text_features"].T
    got = diversity(similarity, others(len(similarity)), kind=kind, epsilon=z["epsilon"])
    close(got, z[f"diversity_{kind}"])


def test_values_by_hand() -> None:
    # SD 0.1 gives 1 + 1/e, no spread gives 1; after the division 1 and sigmoid(1)
    similarity = torch.tensor([[0.1, 0.3, 9.0], [0.2, 0.2, 9.0]], dtype=torch.float64)
    negatives = torch.tensor([[True, True, False]] * 2)
    close(raw(similarity, negatives), [1.36787944117144232, 1.0])
    close(diversity(similarity, negatives), [1.0, 0.73105857863000488])
    # two equal negatives have one bit, one negative has none
    negatives = torch.tensor([[False, True, False], [True, True, False]])
    close(raw(similarity, negatives, kind="entropy"), [1.0, 1.90483741803595957])
    close(diversity(similarity, negatives, kind="none"), [1.0, 1.0])


@given(
    scores=st.integers(1, 7).flatmap(
        lambda q: st.lists(
            st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=q, max_size=q), min_size=1, max_size=7
        )
    ),
    kind=st.sampled_from(KINDS),
    epsilon=st.floats(0.001, 5),
)
def test_equal_to_the_slow_reference_with_any_mask(scores, kind, epsilon) -> None:
    values = [[value for value, _ in row] for row in scores]
    masks = [[mask for _, mask in row] for row in scores]
    got = diversity(torch.tensor(values, dtype=torch.float64), torch.tensor(masks), kind=kind, epsilon=epsilon)
    close(got, reference.diversity(values, masks, kind, epsilon))


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_candidates_and_scores_that_are_masked_do_not_matter(kind: Any) -> None:
    similarity = rows(drawing(1), 6, 9)
    mask = torch.rand(6, 9, generator=drawing(2)) < 0.7
    want = diversity(similarity, mask, kind=kind)
    turn = torch.randperm(9, generator=drawing(3))
    close(diversity(similarity[:, turn], mask[:, turn], kind=kind), want)
    close(diversity(similarity.masked_fill(~mask, 5.0), mask, kind=kind), want)


# -- the weights of pairs: variances by tiles, and the largest of several processes ----------------------------------


def check_variances(directions: list[Direction], *, mirrored: bool = False) -> None:
    dense = Dense(directions, mirrored=mirrored)
    for shape in TILE_SHAPES:
        with tile_shape(**shape):
            tiled = Tiles(directions, mirrored=mirrored)
            assert torch.equal(tiled.count(), dense.count())
            torch.testing.assert_close(tiled.variance(), dense.variance(), rtol=1e-8, atol=1e-14)
            assert torch.equal(Tiles(directions, mirrored=mirrored).variance(), tiled.variance())  # without count() first
            assert not tiled.variance().requires_grad


@given(
    st.integers(1, 24), st.sampled_from([1, 3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 9), st.booleans()
)
def test_variances_by_tiles_equal_the_dense_ones(n: int, d: int, spread: float, m: int, mirrored: bool) -> None:
    """Of a mirrored batch, whose directions share products, and of directions with further blocks."""
    generator = drawing(n + m)
    ids = torch.randint(max(1, n // 2), (n,), generator=generator)
    v, w = (rows(generator, n, d, spread).requires_grad_() for _ in range(2))
    directions = [Direction(v, (Block(w, ids, ids),)), Direction(w, (Block(v, ids, ids),))]
    if not mirrored:
        hard = hard_negatives(generator, m, d, n)
        further = Block(hard["negatives"], hard["negative_ids"], ids, hard["negative_valid"])
        every = Block(rows(generator, m, d, spread))  # neither ids nor empty places
        directions = [
            directions[0]._replace(blocks=(*directions[0].blocks, further, every)),
            directions[1]._replace(blocks=(*directions[1].blocks, every)),
        ]
    check_variances(directions, mirrored=mirrored)


@pytest.mark.parametrize("kind", KINDS)
def test_each_direction_is_divided_by_its_largest_of_all_processes(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    v, w = pair(6, 4)
    ids, halves = torch.tensor([1, 2, 3, 1, 4, 5]), (slice(0, 3), slice(3, 6))
    monkeypatch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", 0)
    each = raw_diversity(Pairs(v, w, ids, implementation="reference").negatives(), kind=kind)
    # what a gather over processes returns: of each process the largest weights of its anchors, by direction
    largest = torch.stack([each[:, half].amax(1) for half in halves])
    want = each / each.amax(1, keepdim=True)
    gathered = []

    def weights(half: slice, gather: Any) -> Tensor:
        pairs = Pairs(v, w, ids, anchors=half, gather=gather, implementation="reference")
        return diversity_weights(pairs, lambda anchors: [pairs.negatives(anchors)], kind=kind, epsilon=0.1)[0]

    for half in halves:
        close(weights(half, lambda own: gathered.append(own) or largest), want[:, half])
    close(torch.cat(gathered), largest)
    monkeypatch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", 36)
    close(weights(halves[1], lambda own: pytest.fail("a small batch takes a collective")), want[:, halves[1]])


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["std", "entropy"])
def test_derivatives(kind: Any) -> None:
    similarity, mask = rows(drawing(3), 3, 5), torch.rand(3, 5, generator=drawing(2)) < 0.8
    mask[2] = False
    for function in (raw, diversity):
        loss = lambda s, f=function: f(s, mask, kind=kind, epsilon=0.5).square().sum()  # noqa: E731
        second_order(loss, similarity)
        transforms(loss, similarity)


@pytest.mark.parametrize("kind", ["std", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_gradient_is_finite_at_every_scale(kind: str, dtype: torch.dtype) -> None:
    pattern = torch.tensor([[-1.0, 0.5, 2.0]], dtype=torch.float64)
    for scale in (*(10.0**exponent for exponent in range(-45, 2, 3)), 30, 40, 50):  # the last: an entropy of 1e-31
        for epsilon in (1e-6, 0.1, 1e6):
            scores = (pattern * scale).to(dtype).requires_grad_()
            value = raw(scores, torch.ones(1, 3, dtype=torch.bool), kind=kind, epsilon=epsilon)
            value.backward()
            assert 1 <= value <= 2 and scores.grad.isfinite().all(), f"{scale}, epsilon {epsilon}"


# -- precision, compilation, bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["std", "entropy"])
def test_float32_keeps_a_small_spread_around_a_large_mean(kind: str) -> None:
    similarity = 0.9 + 1e-3 * torch.randn(64, 500, generator=drawing())
    mask = torch.rand(64, 500, generator=drawing(1)) < 0.9
    got, want = (raw(each, mask, kind=kind, epsilon=1e-3) for each in (similarity, similarity.double()))
    # E[S^2] - E[S]^2 in float32 is wrong by several per cent here
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=0)


def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    scores, mask = rows(drawing(), 6, 9), torch.rand(6, 9, generator=drawing()) < 0.8
    function = lambda s, m: torch.stack([diversity(s, m, kind=kind) for kind in KINDS])  # noqa: E731
    close(torch.compile(function, backend="aot_eager", fullgraph=True)(scores, mask), function(scores, mask))


V = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((V, V[:2].bool()), {}, r"similarity and negatives .*\(3, 4\) and \(2, 4\)"),
        ((V[0], V[0].bool()), {}, r"similarity and negatives must have one shape \[n, q\]"),
        ((V, V), {}, "negatives must be bool, got torch.float32"),
        ((V, V.bool()), {"kind": "SD"}, "'std', 'entropy' or 'none', got 'SD'"),
        ((V + 1e30, V.bool()), {}, "similarity holds values of 1.0e[+]30"),
        *(
            ((V, V.bool()), {"epsilon": value, "kind": "none"}, f"epsilon must be > 0 and finite, got {value}")
            for value in (0, -1, math.nan, math.inf)
        ),
    ],
    ids=str,
)
def test_bad_input_is_named(arguments: tuple[Tensor, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        diversity(*arguments, **options)
