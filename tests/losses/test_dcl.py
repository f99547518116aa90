"""DCL: values, forms, hard negatives, derivatives, degenerate batches, precision, memory, its term, and several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import create_loss, create_model, distributed
from coder_plugin.contrast import Dense, Negatives, products
from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl, diversity
from coder_plugin.losses import dcl as written
from coder_plugin.losses.dcl import DCL, DCLOptions, anchor_losses
from coder_plugin.losses.diversity import raw_diversity
from coder_plugin.objective import Objective
from tests.losses.checks import PAIRS, compiles, hard_memory, memory_of_pairs, stays_finite
from tests.losses.drawn import (
    BAD_DCL_OPTIONS,
    EXACT,
    FORMS,
    KINDS,
    TILE_SHAPES,
    Momentum,
    close,
    collectives,
    compare_forms,
    dcl_options,
    drawing,
    drawn_terms,
    every_way_equals_one_process,
    expression,
    forms_taken,
    hard_negatives,
    held_weights,
    make_loss,
    outputs,
    pair,
    penalty_of_forms,
    rows,
    same_options,
    second_order,
    small_tiles,
    tile_shape,
    transforms,
    value_and_gradient,
    vectors,
)
from tests.peak_memory import peak
from tests.references import dcl as reference
from tests.references import hard_negatives as hard_reference

__all__ = ["forms_taken", "small_tiles"]
IDS = torch.tensor([1, 2, 3, 1, 4])
#: For several anchors of one image, hard negatives of them, of unknown images and of none, and a share of the anchors.
CASES: dict[str, dict[str, Any]] = {
    "printed": {"image_ids": IDS, "positive_weight": "mu", "mu": 0.3},
    "bank": {"image_ids": IDS, "bank_diversity": tuple(torch.linspace(0.55, 1, 10, dtype=torch.float64).view(2, 5))},
    "hard": {
        "image_ids": IDS, "negative_ids": torch.tensor([-2, -1, 2, 9]), "negative_valid": torch.arange(4) > 0,
        "effective_negatives": 9,
    },
    "anchors hard": {"anchors": slice(2, 5), "negative_ids": torch.tensor([1, 1, 2, 9]), "image_ids": IDS},
}  # fmt: skip


def case(name: str, d: int = 3, seed: int = 2) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function of features and ``implementation``, and features: hard negatives come third."""
    options, features = CASES[name], pair(5, d, seed=seed)
    if "hard" in name:
        features = (*features, rows(drawing(seed + 1), 4, d))

    def loss(v: Tensor, w: Tensor, negatives: Tensor | None = None, **more: Any) -> Tensor:
        return dcl(v, w, negatives=negatives, **{**options, **more})

    return loss, features


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["plain", "clustered", "tiny"])
def test_expected_values(tag: str) -> None:
    z = vectors(f"dcl_{tag}")
    features = z["image_features"], z["text_features"]
    options = {name: z[name] for name in ("mu", "gamma", "epsilon")}
    for kind in KINDS:
        close(dcl(*features, diversity=kind, **options), z[f"loss_{kind}"])
    close(dcl(*features, image_ids=z["image_ids"], **options), z["loss_std_masked"])
    close(dcl(*features, positive_weight="mu", **options), z["loss_std_printed"])


def test_two_orthogonal_pairs_by_hand() -> None:
    # one negative each: no spread, div 1. S_pos = 1, S_neg = 0, so 0.1 log(1 + e^-3) - log 2, twice
    eye = torch.eye(2, dtype=torch.float64)
    close(dcl(eye, eye), -1.376576890817643)
    close(dcl(eye, eye, positive_weight="mu"), 2 * (0.1 * math.log1p(math.exp(-3)) - 0.1 * math.log(2)))
    close(dcl(eye, eye, gamma=0.0, mu=1.0, positive_weight=0.0), 2 * math.log(2))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int] | None]:
    """Pairs with ids from few values, some of the features equal, near or far from each other."""
    n, d = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    images, texts = pair(n, d, seed=draw(st.integers(0, 999)))
    for side in (images, texts):
        for row in draw(st.lists(st.integers(0, n - 1), max_size=3)):
            side[row] = side[0]
    if draw(st.booleans()):  # a narrow cone, as the towers of a fresh CLIP give
        images, texts = (normalize(side * 0.05 + torch.ones(d) / d**0.5, dim=1) for side in (images, texts))
    return images, texts, draw(st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n))


@given(
    batch=batches(),
    kind=st.sampled_from(KINDS),
    mu=st.floats(0.02, 1),
    gamma=st.floats(-0.5, 0.9),
    epsilon=st.floats(0.001, 5),
    positive_weight=st.just("mu") | st.floats(0, 2),
    bank=st.none() | st.integers(0, 99),
)
def test_equal_to_the_slow_reference(batch, kind, mu, gamma, epsilon, positive_weight, bank) -> None:
    images, texts, ids = batch
    ways = None if bank is None else torch.rand(2, len(images), generator=drawing(bank)).double() / 2 + 0.5
    options = {
        "mu": mu, "gamma": gamma, "epsilon": epsilon, "diversity": kind, "positive_weight": positive_weight
    }  # fmt: skip
    image_ids, bank_diversity = None if ids is None else torch.tensor(ids), None if ways is None else tuple(ways)
    got = dcl(images, texts, image_ids=image_ids, bank_diversity=bank_diversity, **options)
    weights = None if ways is None else ways.tolist()
    close(got, reference.dcl(images.tolist(), texts.tolist(), ids, bank_diversity=weights, **options))


@given(
    st.integers(1, 6), st.integers(0, 7), st.sampled_from(KINDS), st.none() | st.integers(1, 50), st.sampled_from(FORMS),
    st.integers(0, 999),
)  # fmt: skip
def test_hard_negatives_equal_the_slow_reference(n, m, kind, effective, form, seed) -> None:
    generator, (v, w) = drawing(seed), pair(n, 4, seed=seed)
    ids = torch.randint(0, n + 1, (n,), generator=generator)
    hard = hard_negatives(generator, m, 4, n)
    slow = hard_reference.Hard(*(each.tolist() for each in hard.values()))
    want = hard_reference.dcl(v.tolist(), w.tolist(), ids.tolist(), slow, kind=kind, effective=effective)
    passed = {"diversity": kind, "effective_negatives": effective, "image_ids": ids, **hard}
    close(dcl(v, w, implementation="auto" if kind == "entropy" else form, **passed), want)


def test_diversity_averages_with_the_bank() -> None:
    images, texts = pair(6, 8)
    others = ~torch.eye(6, dtype=torch.bool)
    own = [diversity(scores, others) for scores in (images @ texts.T, texts @ images.T)]
    close(dcl(images, texts, bank_diversity=(own[0], own[1])), dcl(images, texts))
    # image anchors take the first, text anchors the second
    ones = torch.ones(6, dtype=torch.float64)
    swapped = dcl(texts, images, bank_diversity=(ones, own[0]))
    close(dcl(images, texts, bank_diversity=(own[0], ones)), swapped)
    assert abs(swapped - dcl(images, texts, bank_diversity=(ones, own[1]))) > 1e-6


def test_effective_negatives_keep_the_scale() -> None:
    """Every negative twice: the loss of the plain sum grows, that of a stated number does not."""
    images, texts = pair(6, 4)
    twice, ids = (torch.cat([images, images]), torch.cat([texts, texts])), torch.arange(6).repeat(2)

    def loss(number: int | None, doubled: bool) -> float:
        features, image_ids = (twice, ids) if doubled else ((images, texts), None)
        return dcl(*features, image_ids=image_ids, effective_negatives=number, diversity="none").item()

    assert loss(None, True) > loss(None, False) + 0.01
    close(loss(5, True), loss(5, False))
    assert loss(1, False) < loss(5, False)  # 1 is the smallest number


# -- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_pairs_and_of_modalities_does_not_matter(kind: Any) -> None:
    images, texts = pair(9, 5, seed=3)
    ids, turn = torch.tensor([1, 2, 2, 3, 1, 5, 6, 7, 1]), torch.randperm(9, generator=drawing(1))
    loss = dcl(images, texts, image_ids=ids, diversity=kind)
    close(dcl(images[turn], texts[turn], image_ids=ids[turn], diversity=kind), loss)
    close(dcl(texts, images, image_ids=ids, diversity=kind), loss)


def test_ids_are_only_compared_and_captions_of_one_image_are_not_negatives() -> None:
    images, texts = pair(6, 5)
    ids = torch.tensor([8, 8, 3, 4, 5, 6])
    big = torch.tensor([2**62 + 1, 2**62 + 1, 2**62 + 2, 0, -5, 2**62])  # 63-bit hashes: floats would merge them
    close(dcl(images, texts, image_ids=big), dcl(images, texts, image_ids=ids))
    assert abs(dcl(images, texts, image_ids=ids) - dcl(images, texts)) > 1e-4
    # pair 0 against the pairs 2..5 alone: the sibling's column is out
    scores, mask = (images @ texts.T)[:1], ids[:1, None] != ids
    keep = torch.tensor([0, 2, 3, 4, 5])
    one, other = (
        anchor_losses(Dense.of_scores([s], [m]), torch.ones(1, 1), DCLOptions())
        for s, m in ((scores, mask), (scores[:, keep], mask[:, keep]))
    )
    close(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_masked_hard_negatives_have_no_effect(form: str, small_tiles: None) -> None:
    """An image's own caption among the hard negatives of others, and an empty place: as if they were not there."""
    v, w = pair(4, 4)
    ids, negative_ids = torch.tensor([10, 11, 12, 12]), torch.tensor([-2, -2, -1, 11, 12, 99])
    hard, valid = rows(drawing(2), 6, 4).requires_grad_(), negative_ids != -2

    def loss(hard: Tensor, keep: Any = slice(None)) -> Tensor:
        passed = {"negatives": hard[keep], "negative_ids": negative_ids[keep], "negative_valid": valid[keep]}
        return dcl(v, w, image_ids=ids, implementation=form, **passed)

    value = loss(hard)
    (gradient,) = torch.autograd.grad(value, hard)
    assert not gradient[:2].any() and gradient[2:].abs().amax(1).min() > 0
    close(loss(hard.detach(), slice(2, None)), value.detach())
    for own in (11, 12):  # these texts are negatives of the other images
        moved = torch.where((negative_ids == own)[:, None], v[ids == own][0], hard.detach())
        assert abs(loss(moved) - value) > 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"diversity": "none", "effective_negatives": 9}], ids=str)
def test_without_any_text_it_is_the_loss_without_them(options: dict[str, Any], form: str) -> None:
    v, w = pair(4, 4)
    for m in (0, 3):
        hard = {"negatives": rows(drawing(), m, 4), "negative_ids": torch.full((m,), -2)}
        hard["negative_valid"] = hard["negative_ids"] != -2
        close(dcl(v, w, image_ids=IDS[1:], implementation=form, **hard, **options), dcl(v, w, image_ids=IDS[1:], **options))


@pytest.mark.parametrize("form", FORMS)
def test_the_diversity_counts_hard_negatives_too(form: str) -> None:
    """Negatives of equal similarity have no diversity; a hard negative that differs from them gives some."""
    v = torch.eye(3, dtype=torch.float64)
    further = normalize(torch.tensor([[3.0, 1, 0]], dtype=torch.float64), dim=1)
    weighed, plain = (dcl(v, v, diversity=kind, negatives=further, implementation=form) for kind in ("std", "none"))
    assert abs(weighed - plain) > 1e-3
    assert dcl(v, v, implementation=form) == dcl(v, v, diversity="none", implementation=form)


def test_of_several_features_of_an_image_the_best_counts() -> None:
    v, w = pair(4, 4)
    other, passed = rows(drawing(8), 4, 4), {"image_ids": IDS[1:], **hard_negatives(drawing(5), 5, 4, 4)}
    single, one, both = (dcl(x, w, **passed) for x in (v, v[:, None], torch.stack([v, other], 1)))
    close(one, single)
    assert abs(both - single) > 1e-6
    best = torch.maximum(v @ w.T, other @ w.T)
    scores = Dense.of_scores([best, best.T], [~torch.eye(4, dtype=torch.bool)] * 2)
    weights = raw_diversity(scores)
    losses = anchor_losses(scores, weights / weights.amax(1, keepdim=True), DCLOptions())
    close(dcl(torch.stack([v, other], 1), w), losses.sum() / 4)


# -- forms -----------------------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 20), st.sampled_from([1, 3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 999)),
    options=dcl_options(),
    images=st.sampled_from(["distinct", "some", "one"]),
    hard=st.sampled_from([None, 0, 7, 30]),
    with_bank=st.booleans(),
    share=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_tiles_equal_the_reference(shape, options, images, hard, with_bank, share) -> None:
    n, d, spread, seed = shape
    generator, features = drawing(seed), pair(n, d, seed=seed, spread=spread)
    some = torch.randint(max(1, n // 2), (n,), generator=generator)
    options["image_ids"] = {"distinct": None, "some": some, "one": torch.zeros(n)}[images]
    if share is not None:
        start = int(share[0] * (n - 1))
        options["anchors"] = slice(start, start + max(1, int(share[1] * (n - start))))
    if with_bank:
        size = n if share is None else options["anchors"].stop - start
        options["bank_diversity"] = tuple(torch.rand(2, size, generator=generator).double() / 2 + 0.5)
    if hard is None:
        compare_forms(dcl, *features, **options)
        return
    further = hard_negatives(generator, hard, d, n)
    negatives, names = further.pop("negatives"), {**further, **options}
    compare_forms(lambda v, w, negatives, **rest: dcl(v, w, negatives=negatives, **rest), *features, negatives, **names)


def test_which_form_auto_takes(forms_taken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles where they support the options, except of a small batch with hard negatives, whose directions share no product."""
    v, w = pair(4, 4)
    hard = hard_negatives(drawing(1), 5, 4, 4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "Tiles"),
        ({"implementation": "tiled"}, "Tiles"),
        ({"implementation": "reference"}, "Dense"),
        ({"diversity": "entropy"}, "Dense"),
        ({"diversity_gradient": True}, "Dense"),
        (hard, "Dense"),
        ({"implementation": "tiled", **hard}, "Tiles"),
    ]
    for options, form in cases:
        dcl(v, w, **options)
        assert forms_taken == [(options.get("implementation", "auto"), form)]  # one choice: weights and loss share it
        forms_taken.clear()
    small = dcl(v, w, **hard)
    monkeypatch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", 4 * (4 + 5) - 1)
    forms_taken.clear()
    close(dcl(v, w, **hard), small)
    assert forms_taken == [("auto", "Tiles")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diversity": "entropy"}, "diversity='entropy'"),
        ({"diversity_gradient": True}, "diversity_gradient=True"),
        ({"views": True}, "several features of one item"),
    ],
    ids=str,
)
def test_tiles_refuse_what_they_do_not_support(options: dict[str, Any], message: str) -> None:
    v, w = pair(4, 4)
    v = v[:, None] if options.pop("views", False) else v
    with pytest.raises(ValueError, match=f"implementation='tiled' does not support {message}: take 'auto'"):
        dcl(v, w, implementation="tiled", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_the_anchors_average_to_the_whole_batch(kind: Any) -> None:
    """Also of a batch so large that each process weighs its own anchors."""
    images, texts = pair(6, 5, seed=4)
    passed, halves = {"image_ids": torch.tensor([1, 2, 3, 1, 4, 5]), "diversity": kind}, (slice(0, 3), slice(3, 6))
    want = dcl(images, texts, **passed)
    for small in (36, 35):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", small)
            own: list[Tensor] = []
            for half in halves:
                dcl(images, texts, anchors=half, gather=lambda x: own.append(x) or x, **passed)  # noqa: B023
            shares = [dcl(images, texts, anchors=half, gather=lambda _: torch.cat(own), **passed) for half in halves]  # noqa: B023
            close(sum(shares) / 2, want)
            assert len(own) == (2 if small == 35 and kind != "none" else 0)


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form: str, name: str) -> None:
    """First and second, with the weights held, whose gradient stops."""
    loss, features = case(name)
    one_tile = form == "tiled" and name == "printed"
    for shape in (TILE_SHAPES[1], TILE_SHAPES[-1])[: 1 + one_tile]:
        with tile_shape(**shape), held_weights(written):
            second_order(lambda *x: loss(*x, implementation=form), *features)


@pytest.mark.parametrize("name", ["bank", "anchors hard"])
@pytest.mark.parametrize("kind", ["std", "entropy"])
def test_derivatives_through_the_weights(kind: Any, name: str) -> None:
    loss, features = case(name)
    second_order(lambda *x: loss(*x, diversity=kind, epsilon=0.5, diversity_gradient=True), *features)


@pytest.mark.parametrize("name", CASES)
def test_transforms_and_gradient_penalties(name: str) -> None:
    loss, features = case(name)
    penalty_of_forms(loss, *features)
    for form in ("auto", *FORMS):
        transforms(lambda *x, form=form: loss(*x, implementation=form), *features)


def test_stopped_gradient_equals_differences_of_the_slow_reference_with_its_weights_held() -> None:
    images, texts = pair(4, 3, seed=7)
    ids = [1, 2, 1, 3]
    allowed, sides = reference.negatives(ids), (images.tolist(), texts.tolist())
    held = tuple(reference.batch_weights(reference.products(*pair), allowed, "std", 0.1) for pair in (sides, sides[::-1]))
    _, *gradients = value_and_gradient(lambda *x: dcl(*x, image_ids=torch.tensor(ids)), images, texts)
    for side, gradient in enumerate(gradients):
        for row in range(4):
            for column in range(3):
                ends = []
                for step in (1e-6, -1e-6):
                    moved = [[list(each) for each in rows] for rows in sides]
                    moved[side][row][column] += step
                    ends.append(reference.dcl(*moved, ids, weights=held))
                close(gradient[row, column], (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["std", "entropy"])
def test_the_gradient_through_the_weights_is_a_choice(kind: Any) -> None:
    features = pair(6, 4)
    stopped, through = (
        value_and_gradient(lambda *x, g=g: dcl(*x, diversity=kind, epsilon=0.5, diversity_gradient=g), *features)
        for g in (False, True)
    )
    close(stopped[0], through[0])
    assert (stopped[1] - through[1]).norm() > 1e-3 * stopped[1].norm()
    with torch.no_grad():
        assert not dcl(features[0].requires_grad_(), features[1], diversity_gradient=True).requires_grad


def test_the_equation_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another equation in place of anchor_losses: value and gradient follow in every form."""

    def another(negatives: Negatives, weights: Tensor, options: Any) -> Tensor:
        return anchor_losses(negatives, weights, options) + 3 * (1 - negatives.positive) ** 2 + negatives.hardest()

    v, w = pair(5, 3)
    scores = v @ w.T
    hardest = scores.masked_fill(torch.eye(5, dtype=torch.bool), -9)
    more = 6 * (1 - scores.diagonal()).square().mean() + hardest.amax(1).mean() + hardest.amax(0).mean()
    want = dcl(v, w) + more
    monkeypatch.setattr(written, "anchor_losses", another)
    close(dcl(v, w), want)
    close(DCL()(v, w), want)
    compare_forms(dcl, v, w)
    second_order(lambda *x: dcl(*x, diversity="none"), v, w)


# -- degenerate batches: finite value and gradient -------------------------------------------------------------------


DEGENERATE = [{"diversity": kind, "diversity_gradient": through} for kind in KINDS for through in (False, True)]
DEGENERATE += [{"implementation": form, "mu": mu} for form in FORMS for mu in (0.01, 1.0)]


@pytest.mark.parametrize("options", DEGENERATE, ids=str)
def test_degenerate_batches_stay_finite(options: dict[str, Any]) -> None:
    for epsilon in (1e-3, 1e3):
        stays_finite(lambda v, w, ids, e=epsilon: dcl(v, w, image_ids=ids, epsilon=e, **options))


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "form"), [(torch.float32, "tiled"), (torch.bfloat16, "reference"), (torch.float16, "tiled")], ids=str
)
def test_half_features_are_raised(dtype: torch.dtype, form: str) -> None:
    """Against float64 of the same rounded features: 1e-5 of the largest gradient in float32, the type's own rounding below."""
    features = [each.to(dtype) for each in pair(30, 16, seed=1, spread=1.0)]
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    truth = value_and_gradient(lambda *x: dcl(*x, implementation="reference"), *(x.double() for x in features))
    got = value_and_gradient(lambda *x: dcl(*x, implementation=form), *features)
    assert [each.dtype for each in got] == [torch.float32, dtype, dtype] and truth[0].dtype == torch.float64
    for one, other in zip(got, truth, strict=True):
        assert (one.double() - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize(
    "options", [{"diversity": "entropy"}, {"anchors": slice(3, 9)}, {"implementation": "reference"}], ids=str
)
def test_autocast_changes_nothing(options: dict[str, Any]) -> None:
    features = [each.float().requires_grad_() for each in pair(12, 16)]
    want = dcl(*features, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dcl(*features, **options)
        of_term = DCL()(*features)
    assert got.dtype == torch.float32 and torch.equal(got, want) and of_term == dcl(*features)
    for one, other in zip(*(torch.autograd.grad(value, features) for value in (got, want)), strict=True):
        assert torch.equal(one, other)


# -- compilation and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "one_tile"), [pytest.param("auto", 1 << 24, marks=pytest.mark.slow), ("tiled", 0)])
def test_compiled_without_a_graph_break(form: str, one_tile: int) -> None:
    loss, features = case("printed")
    compiles(lambda *x: loss(*x, implementation=form), *features, one_tile=one_tile)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """C++ code is compiled for half a minute."""
    loss, features = case("printed")
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(value_and_gradient(compiled, *features), value_and_gradient(loss, *features), **EXACT)


def test_memory_grows_with_the_number_of_rows() -> None:
    ids = torch.empty(PAIRS, dtype=torch.int64, device="meta")
    memory_of_pairs(lambda v, w: dcl(v, w, image_ids=ids), bound=0.37e9)
    hard_memory(dcl)


@pytest.mark.slow
def test_memory_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is converted on CPUs alone, a tile at a time and not as a whole."""
    ids = torch.empty(32_768, dtype=torch.int64, device="meta")
    monkeypatch.setattr(products, "TILE", products.TILE_ON_CPU)
    memory_of_pairs(lambda v, w: dcl(v, w, image_ids=ids), bound=0.42e9, dtype=torch.bfloat16, pairs=32_768)


def test_similarities_below_the_smallest_squares() -> None:
    """Their variance rounds to zero, and to no negative zero."""
    v, w = torch.eye(4), torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 1e-40
    expected = dcl(v.double(), w.double())
    for implementation in ("reference", "tiled"):
        torch.testing.assert_close(dcl(v, w, implementation=implementation).double(), expected)


# -- bad input -------------------------------------------------------------------------------------------------------

V = torch.zeros(3, 4)
BAD: list[tuple[tuple[Tensor, Tensor], dict[str, Any], str]] = [
    ((V, V[:2]), {}, r"image_features and text_features .*\(3, 4\) and \(2, 4\)"),
    ((V, V[:, :3]), {}, r"image_features and text_features .*\(3, 4\) and \(3, 3\)"),
    ((V[0], V[0]), {}, r"image_features and text_features must have one shape \[n, d\]"),
    ((V[:0], V[:0]), {}, "hold no pair"),
    ((V, V + 1e30), {}, "text_features holds values of 1.0e[+]30, which overflow"),
    ((V, V), {"image_ids": torch.zeros(2)}, r"image_ids must have shape \(3,\), got \(2,\)"),
    ((V, V), {"bank_diversity": (torch.ones(3), torch.ones(3, 1))}, r"bank_diversity .*\(3,\).*\(3, 1\)"),
    ((V, V), {"implementation": "triton"}, "implementation must be 'auto', 'reference' or 'tiled', got 'triton'"),
    ((V, V), {"negatives": torch.ones(2, 5)}, r"negatives must have shape \[m, 4\], got \(2, 5\)"),
    ((V, V), {"negatives": torch.ones(4)}, r"negatives must have shape \[m, 4\], got \(4,\)"),
    ((V, V), {"negatives": V, "negative_ids": torch.ones(2)}, r"negative_ids must have shape \(3,\), got \(2,\)"),
    ((V, V), {"negatives": V, "negative_valid": torch.ones(2) > 0}, r"negative_valid must have shape \(3,\), got \(2,\)"),
    ((V, V), {"negatives": V, "negative_valid": torch.ones(3)}, "negative_valid must be bool, got torch.float32"),
    ((V, V), {"negative_ids": torch.ones(3)}, "negative_ids and negative_valid need negatives"),
    ((V, V), {"negative_valid": torch.ones(3) > 0}, "negative_ids and negative_valid need negatives"),
    ((V, V), {"negatives": V + 1e30}, "negatives holds values of 1.0e[+]30"),
]


@pytest.mark.parametrize(("features", "options", "message"), BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input_is_named(features: tuple[Tensor, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        dcl(*features, **options)


@pytest.mark.parametrize(("options", "message"), BAD_DCL_OPTIONS, ids=[message for _, message in BAD_DCL_OPTIONS])
def test_options_out_of_range_are_refused_before_the_first_batch(options: dict[str, Any], message: str) -> None:
    for call in (lambda: DCL(**options), lambda: dcl(V, V, **options)):
        with pytest.raises(ValueError, match=message):
            call()
    if options not in ({"positive_weight": "half"}, {"diversity": "sd"}):  # refused by their types, in other words
        with pytest.raises(CoderError):
            Objective.parse(expression("dcl", options))


# -- the term --------------------------------------------------------------------------------------------------------


def from_function(batch: Mapping[str, Tensor], head: Momentum, options: Mapping[str, Any]) -> Tensor:
    """What a term with these options computes, by the function."""
    options = dict(options)
    masked, over, hard = (options.pop(key, None) for key in ("mask_same_image", "diversity_over", "hard_negatives"))
    features, ids = [batch[f"{side}_features"] for side in ("image", "text")], batch["coder_ids"]
    passed: dict[str, Any] = {} if masked is False else {"image_ids": ids}
    if hard:
        negative_ids = batch["coder_negative_ids"].flatten()
        passed |= {"negatives": batch["coder_negative_features"].flatten(0, 1), "negative_ids": negative_ids}
        passed["negative_valid"] = negative_ids != -2
    if over == "batch+bank":
        bank, kinds = head.bank, {name: options[name] for name in ("epsilon",) if name in options}
        other = torch.cat([ids[:, None] != ids, (ids[:, None] != bank.ids) & bank.valid], 1)
        if masked is False:
            every = torch.ones(len(ids), len(bank.ids), dtype=torch.bool)
            other = torch.cat([~torch.eye(len(ids), dtype=torch.bool), every & bank.valid], 1)
        with torch.set_grad_enabled(options.get("diversity_gradient", False)):
            passed["bank_diversity"] = tuple(
                diversity(
                    live @ torch.cat([batch[f"coder_{name}_keys"], getattr(bank, name)]).T,
                    other,
                    kind=options.get("diversity", "std"),
                    **kinds,
                )
                for live, name in zip(features, ("text", "image"), strict=True)
            )
    return dcl(*features, **passed, **options)


BANK = {"diversity_over": "batch+bank"}
TERM_OPTIONS: list[dict[str, Any]] = [
    {}, {"diversity": "none"}, {"epsilon": 0.5, "diversity_gradient": True}, {"hard_negatives": True}, BANK,
    {"mu": 0.3, "gamma": -0.2, "diversity": "entropy", "epsilon": 2.0, "positive_weight": 0.0},
    {**BANK, "epsilon": 0.7, "diversity": "entropy", "mask_same_image": False},
    {"mu": 0.07, "gamma": 0.1, "epsilon": 0.5, "positive_weight": "mu"}, {"effective_negatives": 100},
    {"mask_same_image": False}, {"hard_negatives": True, "mask_same_image": False, "mu": 0.3}, {**BANK, "diversity": "none"},
    {**BANK, "epsilon": 0.02, "mask_same_image": False}, {**BANK, "epsilon": 0.7, "diversity_gradient": True},
    {**BANK, "epsilon": 0.7, "diversity_gradient": True, "diversity": "entropy"},
]  # fmt: skip


@pytest.mark.parametrize(("options", "filled"), [*((options, True) for options in TERM_OPTIONS), (BANK, False)], ids=str)
def test_the_term_equals_its_function(options: dict[str, Any], filled: bool) -> None:
    """Value and gradient, with every option, of which none is without effect."""
    batch, head = outputs(), Momentum(filled=filled)
    leaves = {key: each for key, each in batch.items() if each.requires_grad}
    results = []
    for local_loss in (False, True):
        got = make_loss(expression("dcl", options), {"momentum": head}, local_loss=local_loss)(**batch)
        assert got.keys() == {"dcl_loss"}
        results.append(got["dcl_loss"])
    results.append(from_function(batch, head, options))
    *ours, theirs = ([value, *torch.autograd.grad(value, list(leaves.values()), allow_unused=True)] for value in results)
    for each in ours:
        torch.testing.assert_close(each, theirs, **EXACT)
    for key in options:
        without = {name: each for name, each in options.items() if name != key}
        if filled and key != "diversity_gradient" and options != {**BANK, "diversity": "none"}:
            assert abs(from_function(batch, head, without) - results[-1]) > 1e-6, key


def test_the_options_of_the_term_are_those_of_its_function() -> None:
    tensors = {"image_ids", "bank_diversity", "anchors", "gather", "negatives", "negative_ids", "negative_valid"}
    only_term = {"diversity_over", "mask_same_image", "hard_negatives"}
    same_options(DCL, dcl, only_term=only_term, only_function=tensors | {"implementation"})
    with pytest.raises(TypeError, match="'mo'"):
        DCL(mo=0.1)
    with pytest.raises(ValueError, match="diversity_over must be 'batch' or 'batch.bank', got 'bank'"):
        DCL(diversity_over="bank")  # type: ignore[arg-type]


def test_what_the_term_needs_and_supports() -> None:
    features = ("image_features", "text_features")
    everything = {"same_image", "views", "hard_negatives", "ring"}
    assert (DCL().requires, DCL().optional, DCL().supports) == (features, ("coder_ids",), everything)
    assert DCL(mask_same_image=False).optional == ()
    hard = DCL(hard_negatives=True)
    assert hard.requires == (*features, "coder_negative_features", "coder_negative_ids")
    assert hard.gathers == (*hard.requires, "coder_ids") and "ring" in hard.supports
    over_bank = DCL(diversity_over="batch+bank")
    assert over_bank.requires == (*features, "coder_ids", "coder_image_keys", "coder_text_keys") == over_bank.gathers
    assert not over_bank.optional and "ring" in over_bank.supports
    for options in ({"diversity": "entropy"}, {"diversity_gradient": True}):
        assert DCL(**options).supports == everything - {"ring"}  # type: ignore[arg-type]


def test_without_ids_nothing_is_masked() -> None:
    batch = outputs()
    without = {key: each for key, each in batch.items() if key != "coder_ids"}
    masking, not_masking = (make_loss(f"dcl(mask_same_image={word})") for word in ("true", "false"))
    unmasked = not_masking(**batch, output_dict=False)
    assert abs(masking(**batch, output_dict=False) - unmasked) > 1e-5
    assert not_masking(**without, output_dict=False) == unmasked == masking(**without, output_dict=False)


def test_the_loss_of_a_model_takes_the_implementation(forms_taken: list[tuple[str, str]]) -> None:
    """``create_loss(implementation=...)`` reaches every term that has tiles."""
    objective = "3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl"
    model = create_model("coder-tiny", loss=objective)
    batch = model(torch.randn(4, 3, 64, 64), torch.randint(1, 99, (4, 40)), image_id=torch.arange(4))
    for form in FORMS:
        create_loss(objective, model=model, implementation=form)(**batch)
        assert len(forms_taken) >= 4 and set(forms_taken) == {(form, "Tiles" if form == "tiled" else "Dense")}
        forms_taken.clear()


# -- several ranks ---------------------------------------------------------------------------------------------------

#: Each way to the weights and to what travels; on three ranks every option of the term, and drawn ones.
TERMS = tuple(expression("dcl", options) for options in TERM_OPTIONS[:7])
MORE = (
    *(expression("dcl", options) for options in TERM_OPTIONS),
    *drawn_terms("dcl", 1, diversity_over=("batch", "batch+bank")),
)


@pytest.mark.parametrize(("terms", "ranks"), [(TERMS, 2), pytest.param(MORE, 3, marks=pytest.mark.slow)], ids=["two", "three"])
def test_ranks_equal_one_process_with_the_joint_batch(terms: tuple[str, ...], ranks: int) -> None:
    every_way_equals_one_process(terms, ranks)


@pytest.mark.parametrize(
    ("options", "large", "ring"),
    [
        ({}, 3, 12),
        ({"diversity": "none"}, 2, 6),
        ({"epsilon": 0.5, "diversity_gradient": True}, 4, None),
        ({"hard_negatives": True}, 3, 21),
        (BANK, 4, 14),
    ],
    ids=str,
)
def test_the_number_of_collectives(options: dict[str, Any], large: int, ring: int | None) -> None:
    """One gather and the return of its gradient; in a large batch also the largest weights, and of these the gradient."""
    number = collectives(TERMS, expression("dcl", options))
    assert number.pop("ring", 0) <= (ring or 0) and number == {"all": 2, "local": 2, "large": large}


@pytest.mark.parametrize("hard", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_does_not_grow_with_the_number_of_ranks(hard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 pairs of 1,024 dimensions on each rank, on meta tensors; other ranks are imitated by empty tensors."""
    received = lambda tensors, **_: lambda: [torch.empty_like(each) for each in tensors]  # noqa: E731
    monkeypatch.setattr(distributed, "ring_send_recv", received)
    for reduction in ("all_max", "all_mean", "all_sum"):
        monkeypatch.setattr(distributed, reduction, lambda value: value.detach().clone())
    monkeypatch.setattr(distributed, "rank", lambda: 0)

    def run() -> None:
        features = [torch.empty(4096, 1024, device="meta", requires_grad=True) for _ in range(2)]
        batch = dict(zip(("image_features", "text_features"), features, strict=True))
        batch["coder_ids"] = torch.empty(4096, dtype=torch.int64, device="meta")
        batch["coder_negative_features"] = torch.empty(4096, 1, 1024, device="meta", requires_grad=True)
        batch["coder_negative_ids"] = torch.empty(4096, 1, dtype=torch.int64, device="meta")
        make_loss(expression("dcl", {"hard_negatives": hard}), gather="ring")(**batch, output_dict=False).backward()

    peaks = {}
    for ranks in (3, 8):
        monkeypatch.setattr(distributed, "world_size", lambda ranks=ranks: ranks)
        peaks[ranks] = peak(run)
    assert peaks[3] == peaks[8] <= (0.9e9 if hard else 0.45e9), peaks
