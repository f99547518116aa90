"""DCL, diversity and triplet: outside numbers, a slow reference, hand values, gradients, degenerate and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.functional import cosine, dcl, diversity, triplet
from coder_plugin.functional.dcl_loss import directed_dcl
from coder_plugin.functional.diversity_weights import raw_diversity
from coder_plugin.functional.triplet_loss import directed_triplet
from tests.references import dcl as reference
from tests.references.triplet import triplet as reference_triplet

VECTORS = Path(__file__).resolve().parents[2] / "shared" / "data" / "vectors"
KINDS = ("std", "entropy", "none")
EXACT = {"rtol": 1e-9, "atol": 1e-9}
#: The defaults of dcl and of triplet, for their one-directional cores.
PAPER = {"mu": 0.1, "gamma": 0.3, "positive_weight": 1.0}
HINGE = {"margin": 0.2, "hardest": True, "reduction": "mean"}


def features(n: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images, texts = (normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))
    return images.to(dtype), texts.to(dtype)


def others(n: int) -> Tensor:
    return ~torch.eye(n, dtype=torch.bool)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def close(got: Tensor, want: Any, **tolerance: float) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, want, check_dtype=got.dtype == torch.float64, **tolerance or EXACT)


# Numbers that this code did not make


def vectors(name: str) -> dict[str, Any]:
    file = VECTORS / f"{name}.npz"
    if not file.exists():
        pytest.skip(f"no expected values here: {file}")
    return {key: torch.from_numpy(value) if value.ndim else value.item() for key, value in np.load(file).items()}


@pytest.mark.parametrize("tag", ["plain", "clustered", "tiny"])
def test_expected_values_of_dcl(tag: str) -> None:
    z = vectors(f"dcl_{tag}")
    images, texts = z["image_features"], z["text_features"]
    options = {name: z[name] for name in ("mu", "gamma", "epsilon")}
    for kind in ("std", "entropy"):
        got = diversity(images @ texts.T, others(len(images)), kind=kind, epsilon=z["epsilon"])
        close(got, z[f"diversity_{kind}"])
    for kind in KINDS:
        close(dcl(images, texts, diversity=kind, **options), z[f"loss_{kind}"])
    close(dcl(images, texts, image_ids=z["image_ids"], **options), z["loss_std_masked"])
    close(dcl(images, texts, positive_weight="mu", **options), z["loss_std_printed"])


def test_expected_value_of_triplet() -> None:
    z = vectors("retrieval")
    close(triplet(z["similarity"][:40, :40]), z["triplet"])


# A slow reference over the space of inputs


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int] | None]:
    """Pairs with ids from few values, some of the features equal, near or far from each other."""
    n, d = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    images, texts = features(n, d, seed=draw(st.integers(0, 999)))
    for side in (images, texts):
        for row in draw(st.lists(st.integers(0, n - 1), max_size=3)):
            side[row] = side[0]
    if draw(st.booleans()):  # a narrow cone, as the towers of a fresh CLIP give
        images, texts = (normalize(side * 0.05 + torch.ones(d) / d**0.5, dim=1) for side in (images, texts))
    ids = draw(st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return images, texts, ids


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    kind=st.sampled_from(KINDS),
    mu=st.floats(0.02, 1),
    gamma=st.floats(-0.5, 0.9),
    epsilon=st.floats(0.001, 5),
    positive_weight=st.just("mu") | st.floats(0, 2),
    bank=st.none() | st.integers(0, 99),
)
def test_dcl_equals_the_slow_reference(batch, kind, mu, gamma, epsilon, positive_weight, bank) -> None:
    images, texts, ids = batch
    ways = None if bank is None else torch.rand(2, len(images), generator=torch.Generator().manual_seed(bank)) / 2 + 0.5
    ways = None if ways is None else ways.double()
    options = {
        "mu": mu, "gamma": gamma, "epsilon": epsilon, "diversity": kind, "positive_weight": positive_weight
    }  # fmt: skip
    got = dcl(
        images,
        texts,
        image_ids=None if ids is None else torch.tensor(ids),
        bank_diversity=None if ways is None else (ways[0], ways[1]),
        **options,
    )
    want = reference.dcl(
        images.tolist(), texts.tolist(), ids, bank_diversity=None if ways is None else ways.tolist(), **options
    )
    close(got, want)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 7).flatmap(
        lambda q: st.lists(
            st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=q, max_size=q), min_size=1, max_size=7
        )
    ),
    kind=st.sampled_from(KINDS),
    epsilon=st.floats(0.001, 5),
)
def test_diversity_equals_the_slow_reference_with_any_mask(rows, kind, epsilon) -> None:
    values = [[value for value, _ in row] for row in rows]
    masks = [[mask for _, mask in row] for row in rows]
    got = diversity(torch.tensor(values, dtype=torch.float64), torch.tensor(masks), kind=kind, epsilon=epsilon)
    close(got, reference.diversity(values, masks, kind, epsilon))


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    margin=st.floats(0, 1),
    hardest=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_triplet_equals_the_slow_reference(batch, margin, hardest, reduction) -> None:
    images, texts, ids = batch
    similarity = images @ texts.T
    options = {"margin": margin, "hardest": hardest, "reduction": reduction}
    got = triplet(similarity, image_ids=None if ids is None else torch.tensor(ids), **options)
    close(got, reference_triplet(similarity.tolist(), ids, **options))


# Hand values


def test_dcl_of_two_orthogonal_pairs_by_hand() -> None:
    # one negative each: no spread, div 1. S_pos = 1, S_neg = 0, so 0.1 log(1 + e^-3) - log 2, twice
    eye = torch.eye(2, dtype=torch.float64)
    close(dcl(eye, eye), -1.376576890817643)
    close(dcl(eye, eye, positive_weight="mu"), 2 * (0.1 * math.log1p(math.exp(-3)) - 0.1 * math.log(2)))
    close(dcl(eye, eye, gamma=0.0, mu=1.0, positive_weight=0.0), 2 * math.log(2))


def test_diversity_by_hand() -> None:
    # SD 0.1 gives 1 + 1/e, no spread gives 1; after the division 1 and sigmoid(1)
    similarity = torch.tensor([[0.1, 0.3, 9.0], [0.2, 0.2, 9.0]], dtype=torch.float64)
    negatives = torch.tensor([[True, True, False]] * 2)
    close(raw_diversity(similarity, negatives), [1.36787944117144232, 1.0])
    close(diversity(similarity, negatives), [1.0, 0.73105857863000488])
    # two equal negatives have one bit, one negative has none
    negatives = torch.tensor([[False, True, False], [True, True, False]])
    close(raw_diversity(similarity, negatives, kind="entropy"), [1.0, 1.90483741803595957])
    close(diversity(similarity, negatives, kind="none"), [1.0, 1.0])


def test_triplet_by_hand() -> None:
    similarity = torch.tensor([[0.9, 0.8], [0.3, 0.5]], dtype=torch.float64)
    close(triplet(similarity), 0.05 + 0.25)
    close(triplet(similarity, reduction="sum"), 0.6)
    close(triplet(similarity, margin=0.0), 0.15)
    close(triplet(similarity, image_ids=torch.tensor([4, 4])), 0.0)


def test_weights_of_identical_candidates() -> None:
    images, texts = features(5, 4)
    same = texts[:1].expand(5, 4)
    for kind in ("std", "none"):
        close(diversity(images @ same.T, others(5), kind=kind), torch.ones(5))
        close(raw_diversity(images @ same.T, others(5), kind=kind), torch.ones(5))
    # their entropy is log2(4) for every anchor: equal weights again
    close(diversity(images @ same.T, others(5), kind="entropy"), torch.ones(5))


def test_diversity_averages_with_the_bank() -> None:
    images, texts = features(6, 8)
    own = [diversity(rows, others(6)) for rows in (images @ texts.T, texts @ images.T)]
    close(dcl(images, texts, bank_diversity=(own[0], own[1])), dcl(images, texts))
    # image anchors take the first, text anchors the second
    ones = torch.ones(6, dtype=torch.float64)
    swapped = dcl(texts, images, bank_diversity=(ones, own[0]))
    close(dcl(images, texts, bank_diversity=(own[0], ones)), swapped)
    assert abs(swapped - dcl(images, texts, bank_diversity=(ones, own[1]))) > 1e-6


# Invariances


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_pairs_and_of_modalities_does_not_matter(kind: str) -> None:
    images, texts = features(9, 5, seed=3)
    ids = torch.tensor([1, 2, 2, 3, 1, 5, 6, 7, 1])
    turn = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    loss = dcl(images, texts, image_ids=ids, diversity=kind)
    close(dcl(images[turn], texts[turn], image_ids=ids[turn], diversity=kind), loss)
    close(dcl(texts, images, image_ids=ids, diversity=kind), loss)
    similarity = images @ texts.T
    for hardest in (True, False):
        loss = triplet(similarity, image_ids=ids, hardest=hardest)
        close(triplet(similarity[turn][:, turn], image_ids=ids[turn], hardest=hardest), loss)
        close(triplet(similarity.T, image_ids=ids, hardest=hardest), loss)


def test_a_masked_caption_changes_nothing_and_ids_are_only_compared() -> None:
    images, texts = features(6, 5)
    ids = torch.tensor([8, 8, 3, 4, 5, 6])
    big = torch.tensor([2**62 + 1, 2**62 + 1, 2**62 + 2, 0, -5, 2**62])  # 63-bit hashes: floats would merge them
    close(dcl(images, texts, image_ids=big), dcl(images, texts, image_ids=ids))
    assert abs(dcl(images, texts, image_ids=ids) - dcl(images, texts)) > 1e-4
    # pair 0 against the pairs 2..5 alone: the sibling's row and column are out
    keep = torch.tensor([0, 2, 3, 4, 5])
    rows = (images @ texts.T)[0]
    alone = torch.zeros(1, 6, dtype=torch.bool)
    alone[0, keep[1:]] = True
    one = directed_dcl(rows[None], rows[:1], alone, scalar(1.0)[None], **PAPER)
    close(directed_dcl(rows[None, keep], rows[:1], alone[:, keep], scalar(1.0)[None], **PAPER), one)


# Anchors of one process


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_the_anchors_average_to_the_whole_batch(kind: str) -> None:
    images, texts = features(6, 5, seed=4)
    ids = torch.tensor([1, 2, 3, 1, 4, 5])
    similarity, halves = images @ texts.T, (slice(0, 3), slice(3, 6))
    raw = [raw_diversity(rows, ids[:, None] != ids, kind=kind) for rows in (similarity, similarity.T)]
    # what a gather over processes returns: of each process the largest weights of its anchors, by direction
    largest = torch.stack([torch.stack([each[half].amax() for each in raw]) for half in halves])
    shares = []
    for number, anchors in enumerate(halves):

        def gather(own: Tensor, number: int = number) -> Tensor:
            close(own, largest[number : number + 1])
            return largest

        shares.append(dcl(images, texts, image_ids=ids, diversity=kind, anchors=anchors, gather=gather))
    close(sum(shares) / 2, dcl(images, texts, image_ids=ids, diversity=kind))
    rows = [
        triplet(similarity[half], image_ids=ids, text_to_image=similarity.T[half], anchors=half, reduction="sum")
        for half in halves
    ]
    close(sum(rows), triplet(similarity, image_ids=ids, reduction="sum"))
    with pytest.raises(ValueError, match=r"text_to_image must have similarity's shape \(3, 6\)"):
        triplet(similarity[:3], anchors=halves[0])


# Precision


@pytest.mark.parametrize("kind", ["std", "entropy"])
def test_float32_keeps_a_small_spread_around_a_large_mean(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    similarity = 0.9 + 1e-3 * torch.randn(64, 500, generator=generator)
    allowed = torch.rand(64, 500, generator=generator) < 0.9
    got = raw_diversity(similarity, allowed, kind=kind, epsilon=1e-3)
    want = raw_diversity(similarity.double(), allowed, kind=kind, epsilon=1e-3)
    # E[S^2] - E[S]^2 in float32 is wrong by several per cent here
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_inputs_are_raised_and_float64_stays(dtype: torch.dtype) -> None:
    images, texts = features(8, 16, dtype=dtype)
    for loss in (
        lambda v, w: dcl(v, w),
        lambda v, w: triplet(cosine(v, w)),
        lambda v, w: diversity(v @ w.T, others(8)),
    ):
        assert loss(images, texts).dtype == torch.float32
        assert loss(images.double(), texts.double()).dtype == torch.float64
    assert torch.equal(dcl(images, texts), dcl(images.float(), texts.float()))
    assert torch.equal(triplet(images @ texts.T), triplet((images @ texts.T).float()))
    assert torch.equal(cosine(images, texts), images.float() @ texts.float().T)
    close(dcl(images, texts), dcl(images.double(), texts.double()), rtol=1e-5, atol=1e-5)


def test_autocast_changes_nothing() -> None:
    images, texts = (side.requires_grad_() for side in features(12, 16, dtype=torch.float32))
    for kind in KINDS:
        want = dcl(images, texts, diversity=kind)
        gradient = torch.autograd.grad(want, images)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = dcl(images, texts, diversity=kind)
        assert got.dtype == torch.float32 and torch.equal(got, want)
        assert torch.equal(torch.autograd.grad(got, images)[0], gradient)
    similarity = images @ texts.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cosine(images, texts), similarity)
        assert torch.equal(triplet(cosine(images, texts)), triplet(similarity))


# Gradients


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_dcl(kind: str, gradient: bool) -> None:
    images, texts = (side.requires_grad_() for side in features(5, 3, seed=2))
    ids = torch.tensor([1, 2, 3, 1, 4])
    bank = (torch.linspace(0.6, 1, 5, dtype=torch.float64), torch.linspace(1, 0.7, 5, dtype=torch.float64))
    if not gradient and kind != "none":
        # a numerical gradient would see the weights move: hold them, as the stopped gradient does
        both = (images @ texts.T, texts @ images.T)
        weights = [diversity(rows.detach(), ids[:, None] != ids, kind=kind) for rows in both]
        held = [(a + b) / 2 for a, b in zip(weights, bank, strict=True)]

        def loss(v: Tensor, w: Tensor) -> Tensor:
            rows = v @ w.T
            masks = ids[:, None] != ids
            both = ((rows, held[0]), (rows.T, held[1]))
            return sum(directed_dcl(s, rows.diagonal(), masks, own, **PAPER).mean() for s, own in both)

        assert torch.autograd.gradcheck(loss, (images, texts))
        want = torch.autograd.grad(loss(images, texts), (images, texts))
        got = torch.autograd.grad(
            dcl(images, texts, image_ids=ids, diversity=kind, bank_diversity=bank), (images, texts)
        )
        for one, other in zip(got, want, strict=True):
            close(one, other)
        return

    def loss(v: Tensor, w: Tensor) -> Tensor:
        return dcl(v, w, image_ids=ids, diversity=kind, bank_diversity=bank, diversity_gradient=gradient)

    assert torch.autograd.gradcheck(loss, (images, texts))


def test_stopped_gradient_equals_differences_of_the_reference_with_its_weights_held() -> None:
    images, texts = features(4, 3, seed=7)
    ids = [1, 2, 1, 3]
    allowed = reference.negatives(ids)
    sides = images.tolist(), texts.tolist()
    held = tuple(
        reference.batch_weights(reference.products(*pair), allowed, "std", 0.1) for pair in (sides, sides[::-1])
    )
    leaves = images.clone().requires_grad_(), texts.clone().requires_grad_()
    dcl(*leaves, image_ids=torch.tensor(ids)).backward()
    step = 1e-6
    for side, leaf in enumerate(leaves):
        for row in range(4):
            for column in range(3):
                ends = []
                for sign in (1, -1):
                    moved = [[list(r) for r in rows] for rows in sides]
                    moved[side][row][column] += sign * step
                    ends.append(reference.dcl(*moved, ids, weights=held))
                close(leaf.grad[row, column], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["std", "entropy"])
def test_the_gradient_through_the_weights_is_a_choice(kind: str) -> None:
    images, texts = features(6, 4)
    grads = []
    for through in (False, True):
        leaf = images.clone().requires_grad_()
        loss = dcl(leaf, texts, diversity=kind, epsilon=0.5, diversity_gradient=through)
        loss.backward()
        grads.append(leaf.grad)
        close(loss.detach(), dcl(images, texts, diversity=kind, epsilon=0.5))
    assert (grads[0] - grads[1]).norm() > 1e-3 * grads[0].norm()
    with torch.no_grad():
        assert not dcl(leaf, texts, diversity_gradient=True).requires_grad


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck_of_triplet(hardest: bool, reduction: str) -> None:
    images, texts = features(5, 4, seed=1)
    ids = torch.tensor([1, 2, 3, 1, 4])
    similarity = (images @ texts.T).requires_grad_()
    options = {"hardest": hardest, "reduction": reduction, "margin": 0.3}
    assert torch.autograd.gradcheck(lambda s: triplet(s, image_ids=ids, **options), (similarity,))


# Degenerate batches: finite value and gradient


def degenerate(name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    images, texts = features(6, 8)
    if name == "collapsed":
        return images[:1].expand(6, 8), images[:1].expand(6, 8), None
    if name == "duplicates":
        return images[[0, 0, 1, 1, 2, 2]], images[[0, 0, 1, 1, 2, 2]], torch.tensor([0, 0, 1, 2, 3, 3])
    if name == "opposite":
        return images, -images, None
    if name == "zeros":
        return images * 0, texts * 0, None
    if name == "almost zeros":
        return images * 1e-10, texts * 1e-9, None
    if name == "one row":
        return images[:1], texts[:1], None
    if name == "two rows":
        return images[:2], texts[:2], None
    assert name == "one image"
    return images, texts, torch.full((6,), 7)


CASES = ("collapsed", "duplicates", "opposite", "zeros", "almost zeros", "one row", "two rows", "one image")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_degenerate_batches_stay_finite(name: str, dtype: torch.dtype) -> None:
    images, texts, ids = degenerate(name)

    def check(loss: Callable[[Tensor, Tensor], Tensor], what: str) -> None:
        leaves = [side.to(dtype).clone().requires_grad_() for side in (images, texts)]
        value = loss(*leaves)
        value.backward()
        assert value.isfinite(), what
        assert all(leaf.grad.isfinite().all() for leaf in leaves), f"gradient of {what}"

    for kind in KINDS:
        for through in (False, True):
            for epsilon in (1e-3, 0.1, 1e3):
                options = {"diversity": kind, "diversity_gradient": through, "epsilon": epsilon}
                check(lambda v, w, o=options: dcl(v, w, image_ids=ids, **o), f"dcl {options}")
    for hardest in (True, False):
        for reduction in ("mean", "sum"):
            options = {"hardest": hardest, "reduction": reduction}
            check(lambda v, w, o=options: triplet(cosine(v, w), image_ids=ids, **o), f"triplet {options}")


@pytest.mark.parametrize("kind", ["std", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_spread_has_a_finite_gradient_at_every_scale(kind: str, dtype: torch.dtype) -> None:
    pattern = torch.tensor([[-1.0, 0.5, 2.0]], dtype=torch.float64)
    for exponent in range(-45, 2):
        for epsilon in (1e-6, 0.1, 1e6):
            rows = (pattern * 10.0**exponent).to(dtype).requires_grad_()
            value = raw_diversity(rows, torch.ones(1, 3, dtype=torch.bool), kind=kind, epsilon=epsilon)
            value.backward()
            assert 1 <= value <= 2 and rows.grad.isfinite().all(), f"1e{exponent}, epsilon {epsilon}"


def test_values_of_degenerate_batches() -> None:
    one, two = features(1, 4)
    # no negative: the positive's term alone, in both directions; nothing to win in a hinge
    close(dcl(one, two), -2 * math.log1p((one @ two.T).item()))
    close(triplet(one @ two.T), 0.0)
    images, texts, ids = degenerate("one image")
    close(dcl(images, texts, image_ids=ids), -2 * (1 + (images * texts).sum(1)).log().mean())
    images, texts, _ = degenerate("opposite")
    close(dcl(images[:1], texts[:1]), -2 * math.log(1e-6))  # 1 + S_pos is clamped
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    close(dcl(zeros, zeros), 2 * 0.1 * math.log1p(2 * math.exp(-3)))


@pytest.mark.parametrize("kind", KINDS)
def test_diversity_without_candidates_or_anchors(kind: str) -> None:
    assert torch.equal(diversity(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool), kind=kind), torch.ones(3))
    assert diversity(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), kind=kind).shape == (0,)
    rows = torch.rand(2, 3, requires_grad=True)
    raw_diversity(rows, torch.zeros(2, 3, dtype=torch.bool), kind=kind).sum().backward() if kind != "none" else None
    assert rows.grad is None or not rows.grad.any()


# Bad input

V = torch.zeros(3, 4)
IDS = torch.zeros(2, dtype=torch.long)
BAD: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: dcl(V, V[:2]), r"image_features and text_features .*\(3, 4\) and \(2, 4\)"),
    (lambda: dcl(V, V[:, :3]), r"image_features and text_features .*\(3, 4\) and \(3, 3\)"),
    (lambda: dcl(V[0], V[0]), r"image_features and text_features must have one shape \[n, d\]"),
    (lambda: dcl(V[:0], V[:0]), "hold no pair"),
    (lambda: dcl(V, V, image_ids=IDS), r"image_ids must have shape \(3,\), got \(2,\)"),
    (lambda: dcl(V, V, mu=0), "mu must be > 0, got 0"),
    (lambda: dcl(V, V, mu=math.nan), "mu must be > 0, got nan"),
    (lambda: dcl(V, V, epsilon=-1), "epsilon must be > 0, got -1"),
    (lambda: dcl(V, V, epsilon=0, diversity="none"), "epsilon must be > 0, got 0"),
    (lambda: dcl(V, V, diversity="sd"), "diversity must be 'std', 'entropy' or 'none', got 'sd'"),
    (lambda: dcl(V, V, positive_weight=-1), "positive_weight must be a number >= 0 or 'mu', got -1"),
    (lambda: dcl(V, V, positive_weight="half"), "positive_weight must be a number >= 0 or 'mu', got 'half'"),
    (lambda: dcl(V, V, bank_diversity=(torch.ones(3), torch.ones(3, 1))), r"bank_diversity .*\(3,\).*\(3, 1\)"),
    (lambda: diversity(V, V[:2].bool()), r"similarity and negatives .*\(3, 4\) and \(2, 4\)"),
    (lambda: diversity(V[0], V[0].bool()), r"similarity and negatives must have one shape \[n, q\]"),
    (lambda: diversity(V, V), "negatives must be bool, got torch.float32"),
    (lambda: diversity(V, V.bool(), kind="SD"), "'std', 'entropy' or 'none', got 'SD'"),
    (lambda: diversity(V, V.bool(), epsilon=math.nan), "epsilon must be > 0, got nan"),
    (lambda: directed_dcl(V, V[0], V.bool(), V[:, 0], **PAPER), r"positive and weights must have shape \(3,\), got \(4,\)"),
    (lambda: directed_dcl(V, V[:, 0], V.bool(), V[:, :1], **PAPER), r"positive and weights .* \(3,\) and \(3, 1\)"),
    (lambda: directed_dcl(V, V[:, 0], V.long(), V[:, 0], **PAPER), "negatives must be bool, got torch.int64"),
    (lambda: triplet(V), r"similarity must be square \[n, n\], got \(3, 4\)"),
    (lambda: triplet(V[0]), r"similarity must be square \[n, n\], got \(4,\)"),
    (lambda: triplet(V[:0, :0]), "similarity holds no pair"),
    (lambda: triplet(V[:, :3], image_ids=IDS), r"image_ids must have shape \(3,\), got \(2,\)"),
    (lambda: triplet(V[:, :3], reduction="max"), "reduction must be 'mean' or 'sum', got 'max'"),
    (lambda: directed_triplet(V, V[0], V.bool(), **HINGE), r"positive must have shape \(3,\), got \(4,\)"),
    (lambda: directed_triplet(V, V[:, 0], V, **HINGE), "negatives must be bool, got torch.float32"),
]


@pytest.mark.parametrize("case", range(len(BAD)), ids=[message[:40] for _, message in BAD])
def test_bad_input_is_named(case: int) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


# Compilation


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)  # inductor compiles C++ for half a minute
def test_compiled_equals_eager(backend: str) -> None:
    torch._dynamo.reset()
    ids = torch.tensor([1, 2, 3, 4, 5, 1])

    def both(v: Tensor, w: Tensor) -> Tensor:
        return dcl(v, w, image_ids=ids) + triplet(cosine(v, w), image_ids=ids)

    results = []
    for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
        leaves = [side.requires_grad_() for side in features(6, 5)]
        loss = function(*leaves)
        loss.backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for eager, compiled in zip(*results, strict=True):
        close(compiled, eager)
