"""The statistics of an anchor's negatives: by hand, and by tiles equal to those of all similarities at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.contrast import (
    Block,
    Dense,
    Direction,
    Negatives,
    Pairs,
    Tiles,
    products,
    sums,
    tiles,
    variance,
)
from coder_plugin.errors import CoderError
from tests.few import few
from tests.losses.drawn import TILE_SHAPES, close, drawing, rows, second_order, tile_shape
from tests.operations import Operations
from tests.peak_memory import LargestTensor

INF = math.inf


def both_sides(v: Tensor, w: Tensor, ids: Tensor) -> list[Direction]:
    """Images among texts and texts among images, of one batch."""
    return [Direction(v, (Block(w, ids, ids),)), Direction(w, (Block(v, ids, ids),))]


# -- by hand ---------------------------------------------------------------------------------------------------------

SCORES = [[0.5, 0.1, 0.3, 0.9], [0.2, 0.7, 0.2, -0.4], [0.0, 0.0, 0.6, 0.8]]
#: The negatives: two, three of which two are equal, none.
MASK = [[False, True, True, False], [True, False, True, True], [False] * 4]


def by_hand() -> Dense:
    return Dense.of_scores([torch.tensor(SCORES, dtype=torch.float64)], [torch.tensor(MASK)])


def test_statistics_by_hand() -> None:
    negatives, e = by_hand(), math.exp
    assert negatives.count().tolist() == [[2, 3, 0]]
    close(negatives.positive, [[0.5, 0.7, 0.6]])
    close(negatives.variance(), [[0.01, 0.08, 0.0]])  # of (0.1, 0.3) about 0.2, of (0.2, 0.2, -0.4) about 0
    close(negatives.hardest(), [[0.3, 0.2, -INF]])
    close(negatives.hinge(0.3), [[0.1, 0.0, 0.0]])
    close(negatives.hinge(0.6), [[0.2 + 0.4, 0.1 + 0.1, 0.0]])
    plain = negatives.logsumexp(torch.tensor(2.0, dtype=torch.float64))
    close(plain, [[math.log(e(0.2) + e(0.6)), math.log(2 * e(0.4) + e(-0.8)), -INF]])
    close(negatives.logsumexp(torch.tensor(2.0, dtype=torch.float64), 0.3), plain - 0.6)
    ceiling = torch.tensor([[0.1, -0.4, 1.0]], dtype=torch.float64)  # one that is equal counts
    close(negatives.logsumexp(torch.tensor([[1.0, 3.0, 5.0]], dtype=torch.float64), 0.0, ceiling), [[0.1, -1.2, -INF]])
    # entropy in bits: two of odds e^0.2, three of e^0.2, e^0.2 and e^-0.4, none
    p = 1 / (1 + e(-0.2))
    close(negatives.entropy()[0, 0], -p * math.log2(p) - (1 - p) * math.log2(1 - p))
    equal = Dense.of_scores([torch.full((1, 5), 0.3)], [torch.tensor([[True] * 4 + [False]])])
    close(equal.entropy(), [[2.0]], rtol=1e-6, atol=1e-6)
    assert negatives.entropy()[0, 2] == 0


def test_masks_follow_from_ids_and_valid_rows() -> None:
    ids, anchor_ids, valid = torch.tensor([7, 8, 7]), torch.tensor([7, 9]), torch.tensor([True, True, False])
    wanted = {
        (False, False): [3, 3],
        (True, False): [1, 3],
        (False, True): [2, 2],
        (True, True): [1, 2],
    }
    for (with_ids, with_valid), counts in wanted.items():
        block = Block(torch.eye(3), ids if with_ids else None, anchor_ids, valid if with_valid else None)
        for form in (Dense, Tiles):
            assert form([Direction(torch.eye(3)[:2], (block,))]).count().tolist() == [counts]


@pytest.mark.parametrize("form", [Dense, Tiles])
def test_a_similarity_at_the_ceiling_counts(form: Any) -> None:
    """Two of 0 and one of 1, below 1, 0 and -1."""
    negatives, one = form([Direction(torch.eye(3), (Block(torch.eye(3)),))]), torch.tensor(1.0)
    got = negatives.logsumexp(one, ceiling=torch.tensor([[1.0, 0.0, -1.0]]))
    close(got, [[math.log(2 + math.e), math.log(2), -INF]], rtol=1e-6, atol=0)


# -- tiles equal the dense form --------------------------------------------------------------------------------------

Case = tuple[list[Direction], bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One or two directions of one to three blocks, with equal rows, ids and invalid rows; or a mirrored batch."""
    generator = drawing(draw(st.integers(0, 2**31)))
    d, spread = draw(st.sampled_from([1, 3, 7])), draw(st.sampled_from([1e-3, 1.0, 1e3]))
    images = draw(st.sampled_from([1, 3, 100]))  # of how many the rows are

    def side(count: int) -> tuple[Tensor, Tensor]:
        features, ids = rows(generator, count, d, spread), torch.randint(images, (count,), generator=generator)
        if count > 2 and draw(st.booleans()):
            features[count // 2] = features[0]
        return features, ids

    a = draw(st.integers(1, 23))
    if draw(st.booleans()):
        (v, ids), (w, _) = side(a), side(a)
        return both_sides(v, w, ids), True
    directions = []
    for _ in range(draw(st.integers(1, 2))):
        anchors, anchor_ids = side(a)
        first, blocks = draw(st.integers(0, 3)), []
        for extra in range(draw(st.integers(1, 3))):
            q = draw(st.integers(0, 30)) if extra else a + first
            candidates, ids = side(q)
            valid = torch.rand(q, generator=generator) < 0.6 if draw(st.booleans()) else None
            masked = draw(st.booleans())
            blocks.append(Block(candidates, ids if masked else None, anchor_ids if masked else None, valid))
        directions.append(Direction(anchors, tuple(blocks), first))
    return directions, False


def leaves_of(case: Case) -> tuple[list[Direction], list[Tensor]]:
    """The case with new leaves; mirrored, both directions share them."""
    directions, mirrored = case
    found: dict[int, Tensor] = {}

    def leaf(features: Tensor) -> Tensor:
        return found.setdefault(id(features), features.detach().clone().requires_grad_())

    fresh = [
        Direction(leaf(anchors), tuple(block._replace(rows=leaf(block.rows)) for block in blocks), first)
        for anchors, blocks, first in directions
    ]
    return fresh, list(found.values())


def statistics(negatives: Negatives, scale: Tensor, scales: Tensor, ceiling: Tensor) -> dict[str, Tensor]:
    """Each, also twice in a row and after each other, as a loss of several terms asks for them."""
    found = {"count": negatives.count(), "variance": negatives.variance(), "positive": negatives.positive}
    found["one scale"] = negatives.logsumexp(scale)
    found["positive after it"] = negatives.positive
    found |= {
        "a scale of each anchor": negatives.logsumexp(scales),
        "offset": negatives.logsumexp(scale, 0.3),
        "offset of each": negatives.logsumexp(scales, -0.2),
        "hardest": negatives.hardest(),
        "hinge": negatives.hinge(0.2),
        "variance after it": negatives.variance(),
    }
    if not negatives.mirrored:  # the ceiling is that of the images alone
        found["ceiling"] = negatives.logsumexp(scale, 0.1, ceiling)
        found["ceiling of each"] = negatives.logsumexp(scales, 0.0, ceiling)
    return found


def evaluated(form: Any, case: Case, seed: int) -> dict[str, list[Tensor]]:
    """The value of each statistic, and a gradient of it with respect to all rows and the scale."""
    directions, leaves = leaves_of(case)
    k, a = len(directions), len(directions[0].anchors)
    generator, dtype = drawing(seed), torch.promote_types(leaves[0].dtype, torch.float32)
    numbers = torch.rand(3, k, a, generator=generator, dtype=torch.float64).to(dtype)
    scale, scales = torch.tensor(3.0, dtype=dtype, requires_grad=True), 1 + 20 * numbers[0]
    ceiling, weights = 2 * numbers[1] - 1, numbers[2] - 0.5
    negatives, results = form(directions, mirrored=case[1]), {}
    for name, value in statistics(negatives, scale, scales, ceiling).items():
        results[name] = [value.detach()]
        if name == "count" or "variance" in name:  # without a gradient in tiles
            continue
        counted = value.isfinite()
        product = (torch.where(counted, value, 0) * weights).sum()
        of_all = [*leaves, scale]
        gradients = torch.autograd.grad(product, of_all, allow_unused=True, materialize_grads=True, retain_graph=True)
        results[name] += gradients
    return results


def equal(got: dict[str, list[Tensor]], want: dict[str, list[Tensor]], bound: float, context: Any) -> None:
    assert got.keys() == want.keys()
    for name, values in want.items():
        for place, (one, other) in enumerate(zip(got[name], values, strict=True)):
            assert one.shape == other.shape, (name, place, context)
            assert torch.equal(one == -INF, other == -INF), (name, place, context)
            one, other = (x.double().nan_to_num(neginf=0) for x in (one, other))
            largest = other.abs().max().clamp(min=1e-2) if other.numel() else other.new_tensor(1.0)
            assert ((one - other).abs() <= bound * largest).all(), (name, place, context, (one - other).abs().max())


@given(case=cases(), shape=st.sampled_from(TILE_SHAPES), seed=st.integers(0, 999))
def test_tiles_equal_the_dense_form(case: Case, shape: dict[str, Any], seed: int) -> None:
    """Values and gradients of every statistic. Of two equal hardest rows either may get the gradient."""
    want = evaluated(Dense, case, seed)
    with tile_shape(**shape):
        got = evaluated(Tiles, case, seed)
    spread_ties(case, got, want)
    equal(got, want, 1e-9, shape)


def spread_ties(case: Case, *results: dict[str, list[Tensor]]) -> None:
    """Where rows of a tensor are equal, or nearly so, their gradients of the hardest negative are summed."""
    _, leaves = leaves_of(case)
    for result in results:
        value, *gradients, of_scale = result["hardest"]
        spread = [gradient.clone() for gradient in gradients]
        # of all candidates at once: two blocks may hold the same row
        joint, total = torch.cat([x.detach() for x in leaves]), torch.cat(spread)
        alike = torch.cdist(joint, joint) < 1e-6
        summed = alike.to(total.dtype) @ total
        if joint.shape[1] == 1:  # all similarities are 1 or -1
            summed = total.sum(0, keepdim=True)
        result["hardest"] = [value, summed, of_scale]


@pytest.mark.parametrize(
    ("dtype", "bound", "mirrored", "shape"),
    [
        ("float32", 2e-5, True, TILE_SHAPES[0]),
        ("bfloat16", 2e-2, True, TILE_SHAPES[2]),
        ("float16", 4e-3, False, TILE_SHAPES[1]),
        ("bfloat16", 2e-2, False, TILE_SHAPES[4]),
    ],
    ids=str,
)
def test_other_types_come_near_to_float64(dtype, bound, mirrored, shape) -> None:
    """Results are float32, gradients have the rows' type; also where half types are multiplied as they are."""
    generator, dtype = drawing(3), getattr(torch, dtype)
    (v, w), ids = (rows(generator, 23, 7).to(dtype) for _ in range(2)), torch.randint(9, (23,), generator=generator)
    blocks = Block(w, ids, ids), Block(rows(generator, 11, 7).to(dtype))
    if mirrored:
        case, exact = ((both_sides(*features, ids), True) for features in ((v, w), (v.double(), w.double())))
    else:
        case = [Direction(v, blocks)], False
        exact = [Direction(v.double(), tuple(each._replace(rows=each.rows.double()) for each in blocks))], False
    want = evaluated(Dense, exact, 1)
    for halves in (False, True):
        with tile_shape(**shape), pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "multiplies_halves", lambda device, halves=halves: halves)
            got = evaluated(Tiles, case, 1)
        for name, (value, *gradients) in got.items():
            assert value.dtype == (torch.int64 if name == "count" else torch.float32), name
            assert all(each.dtype == dtype for each in gradients[:-1])
        equal(got, want, bound, (shape, halves))


@pytest.mark.parametrize("shape", TILE_SHAPES[2:], ids=str)
@pytest.mark.parametrize("mirrored", few([True, False]))
@pytest.mark.parametrize("name", ["logsumexp", "hardest", "hinge", "positive"])
def test_second_derivatives(name: str, mirrored: bool, shape: dict[str, Any]) -> None:
    generator = drawing(4)
    v, w, further = (rows(generator, n, 3) for n in (4, 4, 3))
    ids, scale = torch.tensor([0, 1, 0, 2]), torch.tensor(2.0, dtype=torch.float64)
    weights = torch.randn(2, 4, generator=generator, dtype=torch.float64)

    def function(v: Tensor, w: Tensor, further: Tensor, scale: Tensor) -> Tensor:
        blocks = (Block(w, ids, ids),) if mirrored else (Block(w, ids, ids), Block(further))
        negatives = Tiles([Direction(v, blocks), Direction(w, (Block(v, ids, ids),))], mirrored=mirrored)
        if name == "positive":
            return (negatives.positive * weights).square().sum() + 0 * (further.sum() + scale)
        options = {"logsumexp": (scale, 0.3), "hinge": (0.2,)}.get(name, ())
        value = getattr(negatives, name)(*options)
        return (value * weights).square().sum() + 0 * (further.sum() + scale)

    with tile_shape(**shape):
        second_order(function, v, w, further, scale)


@pytest.mark.parametrize("shape", [TILE_SHAPES[0], TILE_SHAPES[2], TILE_SHAPES[4]], ids=str)
def test_frozen_candidates_are_averaged_in_the_forward_pass(shape: dict[str, Any]) -> None:
    """As a bank is; the backward pass then makes no product. Its own graph goes through the dense form."""
    generator = drawing(5)
    anchors, banks = rows(generator, 7, 5), [rows(generator, q, 5) for q in (9, 4)]
    ids, valid = torch.arange(7), torch.rand(4, generator=generator) < 0.6
    scales, results = 1 + torch.rand(1, 7, generator=generator, dtype=torch.float64), []
    ceiling = torch.full((1, 7), 0.5, dtype=torch.float64)
    for form in (Dense, Tiles):
        leaf, scale = anchors.clone().requires_grad_(), torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
        blocks = Block(banks[0], torch.arange(9), ids), Block(banks[1], valid=valid)
        with tile_shape(**shape):
            negatives = form([Direction(leaf, blocks)])
            value = negatives.logsumexp(scales, 0.1, ceiling).sum() + negatives.logsumexp(scale, 0.2).square().sum()
            with Operations() as operations:
                first = torch.autograd.grad(value, [leaf, scale], retain_graph=True)
            products_made = {"aten::mm", "aten::addmm", "aten::addmm_"} & {*operations.names}
            assert not products_made or form is Dense
            again = torch.autograd.grad(value, [leaf, scale], create_graph=True)
            third = torch.autograd.grad(again[0].square().sum() + again[1], leaf)
        results.append((value.detach(), *first, *(each.detach() for each in again), *third))
    for dense, tiled in zip(*results, strict=True):
        close(tiled, dense)


# -- the variance by the matrix of second moments --------------------------------------------------------------------


@given(*map(st.integers, (1, 0, 0), (3, 60, 999)), st.sampled_from([2, 5, 100]), st.sampled_from([1e-3, 1.0]))
def test_the_gram_form_of_the_variance(d: int, more: int, seed: int, images: int, spread: float) -> None:
    """Of at least twice as many pairs as dimensions; an image's texts are taken out one by one, if they are few."""
    generator, n = drawing(seed), 2 * d + more
    v, w = (rows(generator, n, d, spread) for _ in range(2))
    ids = torch.randint(images, (n,), generator=generator)
    directions = both_sides(v, w, ids)
    want, used, original = Dense(directions, mirrored=True).variance(), [], variance._gram_variance
    for most in (0, 16):
        with tile_shape(30), pytest.MonkeyPatch.context() as patch:
            patch.setattr(variance, "MAX_SAME_IMAGE", most)
            patch.setattr(variance, "_gram_variance", lambda *args: used.append(1) or original(*args))
            got = Tiles(directions, mirrored=True).variance()
        assert not got.requires_grad and (got >= 0).all()
        # the similarities of a narrow spread are 1 - 1e-6: their variance is that of rounding beside it
        close(got, want, rtol=1e-7, atol=1e-13)
    assert len(used) == 2 * int(torch.bincount(ids).max() <= 16)


@pytest.mark.parametrize("most", [0, 16])
def test_float32_keeps_a_small_variance_beside_a_large_mean(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variance, "MAX_SAME_IMAGE", most)
    v, w = (rows(drawing(6), 200, 8, 1e-2).float() for _ in range(2))
    w, ids = w.flip(0), torch.arange(200) // 2
    for mirrored in (True, False):
        directions = both_sides(v, w, ids)
        exact = Dense(both_sides(v.double(), w.double(), ids)).variance()
        assert exact.sqrt().max() < 1e-3 and Dense(directions).positive.min() > 0.99
        for one_tile in (0, 1 << 24):
            with tile_shape(900, one_tile=one_tile):
                got = Tiles(directions, mirrored=mirrored).variance()
            torch.testing.assert_close(got.double().sqrt(), exact.sqrt(), rtol=3e-3, atol=0)


# -- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logsumexp", "hardest", "hinge", "variance"])
def test_no_tensor_is_larger_than_the_rows(name: str) -> None:
    """Nor than a tile, in both passes."""
    v, w = (rows(drawing(k), 64, 4).requires_grad_() for k in range(2))
    ids = torch.arange(64) // 2
    with tile_shape(150), LargestTensor() as largest:
        negatives = Tiles(both_sides(v, w, ids), mirrored=True)
        options = {"logsumexp": (torch.tensor(2.0),), "hinge": (0.2,)}.get(name, ())
        value = getattr(negatives, name)(*options)
        if name != "variance":
            value.sum().backward()
    assert 0 < largest.bytes <= 2 * v.nbytes  # of 16 times as many, all similarities


# -- which form ------------------------------------------------------------------------------------------------------


def batch(n: int = 6, **options: Any) -> Pairs:
    return Pairs(rows(drawing(1), n, 4), rows(drawing(2), n, 4), **options)


def test_what_tiles_do_not_support_is_dense_or_refused() -> None:
    views = rows(drawing(1), 12, 4).view(6, 2, 4), rows(drawing(2), 6, 4)
    assert type(Pairs(*views).negatives()) is Dense
    assert type(batch().negatives(dense="diversity=entropy")) is Dense
    with pytest.raises(ValueError, match="implementation='tiled' does not support diversity=entropy: take 'auto'"):
        batch(implementation="tiled").negatives(dense="diversity=entropy")
    with pytest.raises(ValueError, match="implementation='tiled' does not support several features of one item"):
        Pairs(*views, implementation="tiled").negatives()
    with pytest.raises(CoderError, match="gather='ring' does not support several features of one item"):
        Pairs(*views, ring=True).negatives()
    with pytest.raises(ValueError, match="implementation must be 'auto', 'reference' or 'tiled', got 'triton'"):
        batch(implementation="triton")


def test_equal_rows_are_added_in_a_fixed_order_off_the_cpu() -> None:
    """The gradient of hardest negatives, of which several anchors may have one."""
    v, w = (torch.zeros(4, 3, device="meta", requires_grad=True) for _ in range(2))
    values = Tiles(both_sides(v, w, torch.zeros(4, dtype=torch.int64, device="meta")), mirrored=True).hardest()
    with Operations() as operations:
        values.sum().backward()
    assert "aten::index_put_" in operations.names and "aten::index_add_" not in operations.names


@pytest.mark.parametrize("shape", [{"one_tile": tiles.ONE_TILE}, {"kept": sums.MAX_KEPT}])
def test_a_similarity_is_computed_once(shape: dict[str, int]) -> None:
    """DCL's sums: one product in the forward pass, two in the backward pass. One tile serves the variance too, and the
    positives; tiles have theirs apart."""
    v, w = (rows(drawing(k), 8, 4).requires_grad_() for k in range(2))
    ids = torch.arange(8)
    with tile_shape(1 << 21, **shape), Operations() as operations:
        negatives = Tiles(both_sides(v, w, ids), mirrored=True)
        scale = 1 / (1 + negatives.variance()) if "one_tile" in shape else torch.ones(2, 8)
        (negatives.logsumexp(scale).sum() - negatives.positive.sum()).backward()
    products = [name for name in operations.names if name in ("aten::mm", "aten::addmm_")]
    assert len(products) == 3
