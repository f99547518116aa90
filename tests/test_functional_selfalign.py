"""SelfAlign's alignments as functions: expected values, slow references, hand values, padding, tiles, gradients, bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.functional import cra, cra_loss, lca
from coder_plugin.functional.lca_loss import correspondence, lca_from_scores, prototype_scores, sinkhorn_bias
from tests.references import selfalign as reference
from tests.test_functional_coder import vectors

D, K = 5, 7
ASSIGNMENTS = ("sinkhorn", "softmax")


def sets(lengths: list[int], width: int, seed: int, *, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Padded features [b, width, D], of any length, and their mask; the same for every padding."""
    padded = torch.full((len(lengths), width, D), fill, dtype=torch.float64)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        padded[row, :length] = torch.randn(length, D, generator=generator, dtype=torch.float64)
    return padded, torch.arange(width) < torch.tensor(lengths)[:, None]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def valid(padded: Tensor, mask: Tensor) -> list[list[list[float]]]:
    return [each[valid_row].tolist() for each, valid_row in zip(padded, mask, strict=True)]


def pairs(fill: float = 0.0, extra: int = 0) -> tuple[Tensor, ...]:
    """Words, their mask, regions, theirs, prototypes; the last text has no words."""
    return *sets([3, 1, 4, 0], 4 + extra, 1, fill=fill), *sets([2, 5, 1, 3], 5 + extra, 2, fill=fill), rows(K, D)


def contexts(fill: float = 0.0, extra: int = 0) -> tuple[Tensor, ...]:
    return rows(4, D, seed=3), *sets([2, 5, 1, 3], 5 + extra, 2, fill=fill)


def same(got: Tensor, wanted: Any, tolerance: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(got.detach(), wanted, rtol=tolerance, atol=tolerance)


# values


def test_expected_values():
    z = vectors("selfalign")
    names = ("words", "word_mask", "regions", "region_mask", "prototypes")
    for how in ASSIGNMENTS:
        same(lca(*(z[name] for name in names), assignment=how), z[f"lca_{how}"], 1e-9)
    inputs = z["global_context"], z["regions"], z["region_mask"]
    same(cra(*inputs, hard_negatives=8), z["cra_hard8"], 1e-9)
    same(cra(*inputs, hard_negatives=10**6), z["cra_all"], 1e-9)


LENGTHS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    LENGTHS,
    st.sampled_from(ASSIGNMENTS),
    st.sampled_from([0.05, 0.1, 1.0]),
    st.sampled_from([0.03, 0.05, 0.5]),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_lca_equals_the_slow_reference(lengths, assignment, temperature, epsilon, iterations, seed):
    words, word_mask = sets([words for words, _ in lengths], 4, seed)
    regions, region_mask = sets([regions for _, regions in lengths], 5, seed + 100)
    options = {"temperature": temperature, "assignment": assignment, "epsilon": epsilon, "iterations": iterations}
    prototypes = rows(K, D, seed=seed)
    got = lca(words, word_mask, regions, region_mask, prototypes, **options)
    wanted = reference.lca(valid(words, word_mask), valid(regions, region_mask), prototypes.tolist(), **options)
    same(got, wanted, 1e-10)
    assert got.dtype == torch.float64 and got.shape == () and got >= 0
    matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
    scores = prototype_scores(words, prototypes, word_mask), prototype_scores(regions, prototypes, region_mask)
    loss, entropy = lca_from_scores(scores[0], word_mask, scores[1], region_mask, matched, **options)
    parts = reference.lca_parts(valid(words, word_mask), valid(regions, region_mask), prototypes.tolist(), **options)
    same(loss, parts[0], 1e-10)
    same(entropy, parts[1], 1e-10)
    assert entropy <= loss + 1e-12 and entropy <= math.log(K) + 1e-12 and not entropy.requires_grad


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 8, 512]),
    st.sampled_from([0.05, 0.7]),
    st.integers(0, 99),
)
def test_cra_equals_the_slow_reference(items, hard_negatives, temperature, seed):
    local, mask = sets([length for length, _ in items], 5, seed)
    ids = [name for _, name in items]
    context = rows(len(items), D, seed=seed)
    options = {"temperature": temperature, "hard_negatives": hard_negatives}
    got = cra(context, local, mask, image_ids=torch.tensor(ids) + 2**62, **options)
    same(got, reference.cra(context.tolist(), valid(local, mask), ids, **options), 1e-10)
    distinct = cra(context, local, mask, **options)
    same(distinct, reference.cra(context.tolist(), valid(local, mask), range(len(ids)), **options), 1e-10)
    assert got.dtype == torch.float64 and got.shape == () and got >= 0


def test_lca_by_hand():
    """Two prototypes, along the axes. The word lies along the first; of its regions, one at 60 and one at 30 degrees, it takes
    the second, which softmax gives to the prototypes by cosines of sqrt(3)/2 and 1/2."""
    half, root = 0.5, 3**0.5 / 2
    regions = torch.tensor([[[half, root], [root, half], [1.0, 0.0]]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])  # the best of all is padding
    words, prototypes = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    assert correspondence(words, torch.tensor([[True]]), regions, mask).argmax(2).item() == 1
    p = 1 / (1 + math.exp((half - root) / 0.2))
    log_q = [-math.log(1 + math.exp(-1 / 0.2)), -math.log(1 + math.exp(1 / 0.2))]
    wanted = -p * log_q[0] - (1 - p) * log_q[1]
    got = lca(words, torch.tensor([[True]]), regions, mask, prototypes, temperature=0.2, assignment="softmax")
    assert got.item() == pytest.approx(wanted, rel=1e-6)
    # Sinkhorn: the two regions mirror each other, so no prototype needs a push and 1 / 0.05 is all the sharpness
    p = 1 / (1 + math.exp((half - root) / 0.05))
    got = lca(words, torch.tensor([[True]]), regions, mask, prototypes, temperature=0.2)
    assert got.item() == pytest.approx(-p * log_q[0] - (1 - p) * log_q[1], rel=1e-6)


def test_cra_by_hand():
    """Anchors along x and y; a local of cosines 1 and 0, and one of 0 and 1: log(1 + exp(-1 / 0.5)) each."""
    axes, mask = torch.eye(2), torch.ones(2, 1, dtype=torch.bool)
    got = cra(3 * axes, 2 * axes[:, None], mask, temperature=0.5)
    assert got.item() == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)
    # one negative of two: the hardest, of cosine 1, as near as the positive
    local = torch.stack([axes[:1].expand(2, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])])
    anchors, mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    got = cra(anchors, local, mask, temperature=0.5, hard_negatives=1)
    assert got.item() == pytest.approx((math.log(2) + (math.log(2) + math.log(1 + math.exp(4))) / 2) / 2, rel=1e-6)


def test_nothing_to_contrast_is_zero():
    context, local, mask = contexts()
    assert cra(context[:1], local[:1], mask[:1]).item() == 0
    assert cra(context, local, mask, image_ids=torch.zeros(4, dtype=torch.int64)).item() == 0
    words, _, regions, region_mask, prototypes = pairs()
    assert lca(words, torch.zeros(4, 4, dtype=torch.bool), regions, region_mask, prototypes).item() == 0


# Sinkhorn


@pytest.mark.parametrize("extreme", [False, True])
def test_sinkhorns_marginals(extreme):
    """Every region's assignment sums to one, and after enough iterations all prototypes are used alike."""
    scores = rows(4, 6, K).tanh()
    if extreme:  # a prototype opposite to all regions, at the sharpest epsilon in float32
        scores, scores[..., 2] = scores.sign(), -1.0
        scores = scores.float()
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 4])[:, None]
    bias = sinkhorn_bias(scores, mask, epsilon=0.03 if extreme else 0.2, iterations=3000)
    assert torch.isfinite(bias).all()
    assigned = (scores / (0.03 if extreme else 0.2) + bias).softmax(-1)[mask]
    torch.testing.assert_close(assigned.sum(1), torch.ones_like(assigned[:, 0]))
    if not extreme:
        torch.testing.assert_close(assigned.sum(0), torch.full((K,), 14 / K, dtype=torch.float64), rtol=1e-3, atol=0)
    few = (scores / 0.2 + sinkhorn_bias(scores, mask, epsilon=0.2, iterations=2)).softmax(-1)[mask]
    none = (scores / 0.2).softmax(-1)[mask]
    assert (few.sum(0) - 14 / K).abs().max() < (none.sum(0) - 14 / K).abs().max()


def test_balance_is_of_the_whole_batch_however_it_is_parted():
    scores, mask = rows(4, 6, K).tanh(), torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    wanted = sinkhorn_bias(scores, mask, iterations=3)
    sums: list[Tensor] = []

    def total(part: Tensor) -> Tensor:  # as another rank with the same features would add
        sums.append(part)
        return 2 * part

    got = sinkhorn_bias(scores, mask, iterations=3, total=total)
    assert len(sums) == 3 and all(part.shape == (K,) for part in sums)
    torch.testing.assert_close(got.softmax(0), wanted.softmax(0))  # a constant for all prototypes is no difference
    flat = sinkhorn_bias(scores.flatten(0, 1), mask.flatten(), iterations=3)
    torch.testing.assert_close(flat, wanted)


# gradients


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_gradient_of_lca(assignment):
    """The assignment is a constant: the numerical derivative is taken with the matches and targets of the start."""
    words, word_mask, regions, region_mask, prototypes = pairs()
    words, prototypes = words.requires_grad_(), prototypes.requires_grad_()
    matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
    targets = prototype_scores(regions, prototypes).detach()
    options = {"temperature": 0.1, "assignment": assignment, "epsilon": 0.05, "iterations": 2}

    def loss(words: Tensor, prototypes: Tensor) -> Tensor:
        scores = prototype_scores(words, prototypes)
        return lca_from_scores(scores, word_mask, targets, region_mask, matched, **options)[0]

    assert torch.autograd.gradcheck(loss, (words, prototypes))
    regions = regions.requires_grad_()
    value = lca(words, word_mask, regions, region_mask, prototypes, assignment=assignment)
    same(value, loss(words, prototypes).detach())
    got = torch.autograd.grad(value, [words, prototypes, regions], allow_unused=True)
    for one, other in zip(got, torch.autograd.grad(loss(words, prototypes), [words, prototypes]), strict=False):
        same(one, other)
    assert got[2] is None
    assert (got[0][~word_mask] == 0).all() and (got[0][word_mask].norm(dim=-1) > 0).all()


@pytest.mark.parametrize("hard_negatives", [2, 512])
def test_gradient_of_cra(hard_negatives):
    context, local, mask = contexts()
    ids = torch.tensor([1, 2, 1, 3])
    leaves = context.requires_grad_(), local.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c, x: cra(c, x, mask, image_ids=ids, hard_negatives=hard_negatives, temperature=0.3), leaves
    )
    gradient = torch.autograd.grad(cra(*leaves, mask, image_ids=ids), local)[0]
    assert (gradient[~mask] == 0).all() and (gradient[mask].norm(dim=-1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pairs_kept", [1, 4])
def test_finite_gradients_at_zero_vectors_and_single_pairs(dtype, pairs_kept):
    words, word_mask, regions, region_mask, prototypes = (
        x.to(dtype) if x.is_floating_point() else x for x in pairs()
    )
    words, regions = words[:pairs_kept].clone(), regions[:pairs_kept].clone()
    words[0, 0], regions[0, 0], prototypes[0] = 0, 0, 0
    leaves = [x.requires_grad_() for x in (words, prototypes)]
    masks = word_mask[:pairs_kept], region_mask[:pairs_kept]
    value = lca(leaves[0], masks[0], regions, masks[1], leaves[1])
    assert all(torch.isfinite(x).all() for x in (value, *torch.autograd.grad(value, leaves)))
    context = torch.zeros(pairs_kept, D, dtype=dtype)
    context[1:] = 1
    leaves = [x.requires_grad_() for x in (context, regions)]
    value = cra(*leaves, masks[1])
    assert all(torch.isfinite(x).all() for x in (value, *torch.autograd.grad(value, leaves)))


# invariances


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("fill", [1e6, math.inf, math.nan])
def test_padding_counts_nowhere(assignment, fill):
    """Neither what it holds nor how much there is of it, in value and gradient."""

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        words, word_mask, regions, region_mask, prototypes = inputs
        prototypes, words = prototypes.requires_grad_(), words.requires_grad_()
        value = lca(words, word_mask, regions, region_mask, prototypes, assignment=assignment)
        of_words, of_prototypes = torch.autograd.grad(value, [words, prototypes])
        return value, torch.cat([of_words[word_mask], of_prototypes])

    def run_cra(context: Tensor, local: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
        leaves = context.requires_grad_(), local.requires_grad_()
        value = cra(*leaves, mask, hard_negatives=count)
        of_context, of_local = torch.autograd.grad(value, leaves)
        assert (of_local[~mask] == 0).all()
        return value, torch.cat([of_context, of_local[mask]])

    for extra in (0, 3):
        for got, wanted in zip(run(pairs(fill, extra)), run(pairs()), strict=True):
            same(got, wanted.detach())
        for count in (3, 512):
            got, wanted = run_cra(*contexts(fill, extra), count), run_cra(*contexts(), count)
            for one, other in zip(got, wanted, strict=True):
                same(one, other.detach())


def test_the_order_of_pairs_and_the_length_of_features_do_not_matter():
    words, word_mask, regions, region_mask, prototypes = pairs()
    context, local, mask = contexts()
    order, ids = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 5, 6, 7])
    factors = torch.linspace(0.01, 90, 4, dtype=torch.float64)
    for how in ASSIGNMENTS:
        wanted = lca(words, word_mask, regions, region_mask, prototypes, assignment=how)
        moved = (x[order] for x in (words, word_mask, regions, region_mask))
        same(lca(*moved, prototypes, assignment=how), wanted)
        scaled = words * factors[:, None, None], word_mask, regions * factors.flip(0)[:, None, None], region_mask
        same(lca(*scaled, prototypes * torch.linspace(0.1, 9, K)[:, None], assignment=how), wanted, 1e-10)
    wanted = cra(context, local, mask, image_ids=ids, hard_negatives=3)
    same(cra(context[order], local[order], mask[order], image_ids=ids[order], hard_negatives=3), wanted)
    same(cra(context * factors[:, None], local * factors[:, None, None], mask, image_ids=ids, hard_negatives=3), wanted)


def test_exchanged_arguments_are_the_other_direction():
    words, word_mask, regions, region_mask, prototypes = (x[:3] if x.ndim > 1 and len(x) == 4 else x for x in pairs())
    got = lca(regions, region_mask, words, word_mask, prototypes)
    wanted = reference.lca(valid(regions, region_mask), valid(words, word_mask), prototypes.tolist())
    same(got, wanted, 1e-10)
    assert abs(got - lca(words, word_mask, regions, region_mask, prototypes)) > 1e-3


@pytest.mark.parametrize("tile", [1, 25, 40, 79])
@pytest.mark.parametrize("count", [1, 4, 512])
def test_tiles_are_one_tile(monkeypatch, tile, count):
    """A row, one of 20 and more, two, three of four at once: value and gradient are those of all at once."""
    ids = torch.tensor([5, 5, 6, 7])

    def run() -> list[Tensor]:
        context, local, mask = contexts()
        leaves = context.requires_grad_(), local.requires_grad_()
        value = cra(*leaves, mask, image_ids=ids, hard_negatives=count)
        return [value, *torch.autograd.grad(value, leaves)]

    wanted = run()
    monkeypatch.setattr(cra_loss, "_TILE_SIZE", tile)
    monkeypatch.setattr(cra_loss, "_LEAST_ROWS", 1)
    for got, each in zip(run(), wanted, strict=True):
        same(got, each.detach())


# precision


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_autocast_changes_nothing(assignment):
    words, word_mask, regions, region_mask, prototypes = (x.float() if x.is_floating_point() else x for x in pairs())
    context, local, mask = (x.float() if x.is_floating_point() else x for x in contexts())

    def run(lower: bool) -> list[Tensor]:
        w, c, x = (each.clone().requires_grad_() for each in (words, context, local))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lower):
            one = lca(w, word_mask, regions, region_mask, prototypes, assignment=assignment)
            two = cra(c, x, mask, hard_negatives=4)
        return [one, two, *torch.autograd.grad(one, w), *torch.autograd.grad(two, [c, x])]

    for one, other in zip(run(True), run(False), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised(dtype):
    def cast(tensors: tuple[Tensor, ...], to: torch.dtype) -> list[Tensor]:
        return [x.to(dtype).to(to) if x.is_floating_point() else x for x in tensors]

    for how in ASSIGNMENTS:
        got = lca(*cast(pairs(), dtype), assignment=how)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(lca(*cast(pairs(), torch.float64), assignment=how).item(), rel=1e-5)
    scores, mask = rows(4, 6, K).tanh().to(dtype), torch.ones(4, 6, dtype=torch.bool)
    torch.testing.assert_close(sinkhorn_bias(scores, mask), sinkhorn_bias(scores.float(), mask))
    got = cra(*cast(contexts(), dtype), hard_negatives=4)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(cra(*cast(contexts(), torch.float64), hard_negatives=4).item(), rel=1e-5)


# bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": torch.zeros(4, D)}, r"words and regions must be \[b, t, d\] and \[b, l, d\]"),
        ({"words": torch.zeros(3, 4, D)}, r"words and regions must .* got \(3, 4, 5\) and \(4, 5, 5\)"),
        ({"regions": torch.zeros(4, 5, D + 1)}, "words and regions"),
        ({"word_mask": torch.ones(4, 4)}, "word_mask must be a bool tensor"),
        ({"word_mask": torch.ones(4, 1, dtype=torch.bool)}, r"word_mask .* \(4, 1\)"),
        ({"region_mask": torch.ones(4, 6, dtype=torch.bool)}, "region_mask must"),
        ({"prototypes": torch.zeros(K, D + 1)}, r"prototypes must be \[k, 5\]"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"assignment": "sinkhon"}, "assignment must be 'sinkhorn' or 'softmax', got 'sinkhon'"),
        ({"epsilon": 0.01}, "epsilon must be >= 0.03"),
        ({"epsilon": math.nan}, "epsilon must be >= 0.03"),
        ({"iterations": 0}, "iterations must be >= 1"),
    ],
)
def test_lca_names_mistakes(change, message):
    inputs = dict(zip(("words", "word_mask", "regions", "region_mask", "prototypes"), pairs(), strict=True))
    with pytest.raises(ValueError, match=message):
        lca(**{**inputs, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_context": torch.zeros(1, D)}, r"global_context and local_context must be .* got \(1, 5\) and \(4, 5, 5\)"),
        ({"global_context": torch.zeros(4, D + 1)}, "global_context and local_context"),
        ({"global_context": torch.zeros(4, 1, D)}, "global_context and local_context"),
        ({"local_context": torch.zeros(4, D)}, "local_mask must"),
        ({"local_mask": torch.ones(4, 5)}, "local_mask must be a bool tensor"),
        ({"image_ids": torch.arange(3)}, r"image_ids must have shape \(4,\), got \(3,\)"),
        ({"image_ids": torch.arange(4)[:, None]}, "image_ids must have shape"),
        ({"temperature": -1.0}, "temperature must be > 0"),
        ({"hard_negatives": 0}, "hard_negatives must be >= 1"),
    ],
)
def test_cra_names_mistakes(change, message):
    inputs = dict(zip(("global_context", "local_context", "local_mask"), contexts(), strict=True))
    with pytest.raises(ValueError, match=message):
        cra(**{**inputs, **change})


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="b >= 1 pairs"):
        lca(*(x[:0] for x in pairs()[:4]), rows(K, D))
    with pytest.raises(ValueError, match="b >= 1 pairs"):
        cra(*(x[:0] for x in contexts()))
