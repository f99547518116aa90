"""Hinges: expected values, slow references, derivatives, tiles, hard negatives, and the term on one process and two."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.errors import CoderError
from coder_plugin.functional import cosine, triplet
from coder_plugin.losses.triplet import Triplet
from tests.losses.checks import (
    PAIRS,
    compiles,
    hard_memory,
    memory_of_pairs,
    raises_halves,
    ranks_equal_one_process,
    stays_finite,
    triplet_of_features,
)
from tests.losses.drawn import (
    FORMS,
    TILE_SHAPES,
    close,
    compare_forms,
    drawing,
    expression,
    hard_negatives,
    make_loss,
    outputs,
    pair,
    rows,
    same_options,
    second_order,
    tile_shape,
    transforms,
    value_and_gradient,
    vectors,
)
from tests.references import hard_negatives as hard_reference
from tests.references.triplet import triplet as reference

IDS = torch.tensor([1, 2, 3, 1, 4])
KINDS = [{"hardest": hardest, "reduction": reduction} for hardest in (True, False) for reduction in ("mean", "sum")]


# -- values ----------------------------------------------------------------------------------------------------------


def test_expected_value() -> None:
    z = vectors("retrieval")
    close(triplet(z["similarity"][:40, :40]), z["triplet"])


def test_by_hand() -> None:
    similarity = torch.tensor([[0.9, 0.8], [0.3, 0.5]], dtype=torch.float64)
    close(triplet(similarity), 0.05 + 0.25)
    close(triplet(similarity, reduction="sum"), 0.6)
    close(triplet(similarity, margin=0.0), 0.15)
    close(triplet(similarity, image_ids=torch.tensor([4, 4])), 0.0)
    further = torch.tensor([[0.8, 1.0], [0.0, 0.4]], dtype=torch.float64)  # scores of two hard negatives
    options = {"negative_similarity": further, "reduction": "sum"}
    close(triplet(similarity, **options), 0.3 + 0.1 + 0.5)
    close(triplet(similarity, hardest=False, **options), 0.6 + 0.1 + 0.3 + 0.1)
    close(triplet(similarity, negative_valid=torch.tensor([True, False]), **options), 0.6)
    ids = {"image_ids": torch.tensor([7, 8]), "negative_ids": torch.tensor([1, 7])}
    close(triplet(similarity, **ids, **options), 0.1 + 0.1 + 0.5)
    # the share of the second image alone
    own = {"text_to_image": similarity.T[1:], "anchors": slice(1, 2), "negative_similarity": further[1:]}
    close(triplet(similarity[1:], reduction="sum", **ids, **own), 0.1 + 0.5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int] | None]:
    """Pairs with ids from few values, some of the features equal, near or far from each other."""
    n, d = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    images, texts = pair(n, d, seed=draw(st.integers(0, 999)), spread=draw(st.sampled_from([1e3, 0.05])))
    for side in (images, texts):
        for row in draw(st.lists(st.integers(0, n - 1), max_size=3)):
            side[row] = side[0]
    return images, texts, draw(st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n))


@given(batches(), st.floats(0, 1), st.sampled_from(KINDS))
def test_equals_the_slow_reference(batch: Any, margin: float, kind: dict[str, Any]) -> None:
    images, texts, ids = batch
    similarity, image_ids = images @ texts.T, None if ids is None else torch.tensor(ids)
    want = reference(similarity.tolist(), ids, margin=margin, **kind)
    close(triplet(similarity, image_ids=image_ids, margin=margin, **kind), want)
    for form in FORMS:
        close(triplet_of_features(images, texts, image_ids=image_ids, margin=margin, implementation=form, **kind), want)


@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(0, 7), st.integers(0, 10_000))
def test_hard_negatives_equal_the_slow_reference(kind: dict[str, Any], n: int, m: int, seed: int) -> None:
    generator, (v, w) = drawing(seed), pair(n, 4, seed=seed)
    hard, ids = hard_negatives(generator, m, 4, n), torch.randint(0, n + 1, (n,), generator=generator)
    slow = hard_reference.Hard(*(hard[key].tolist() for key in ("negatives", "negative_ids", "negative_valid")))
    want = hard_reference.triplet(v.tolist(), w.tolist(), ids.tolist(), slow, **kind)
    for form in FORMS:
        close(triplet_of_features(v, w, image_ids=ids, implementation=form, **hard, **kind), want)
    scores = {"negative_similarity": v @ hard.pop("negatives").T, **hard}
    close(triplet(v @ w.T, image_ids=ids, **scores, **kind), want)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=str)
def test_order_of_pairs_and_of_modalities_does_not_matter(kind: dict[str, Any]) -> None:
    images, texts = pair(9, 5, seed=3)
    ids = torch.tensor([1, 2, 2, 3, 1, 5, 6, 7, 1])
    turn = torch.randperm(9, generator=drawing(1))
    similarity = images @ texts.T
    want = triplet(similarity, image_ids=ids, **kind)
    close(triplet(similarity[turn][:, turn], image_ids=ids[turn], **kind), want)
    close(triplet(similarity.T, image_ids=ids, **kind), want)
    close(triplet(similarity, image_ids=ids + 2**62, **kind), want)
    assert abs(triplet(similarity, **kind) - want) > 1e-3


def test_shares_of_the_anchors_add_up_to_the_whole_batch() -> None:
    similarity, ids = torch.stack([*pair(6, 6, seed=4)])[0], torch.tensor([1, 2, 3, 1, 4, 5])
    halves = slice(0, 3), slice(3, 6)
    rows = [
        triplet(similarity[half], image_ids=ids, text_to_image=similarity.T[half], anchors=half, reduction="sum")
        for half in halves
    ]
    close(sum(rows), triplet(similarity, image_ids=ids, reduction="sum"))
    with pytest.raises(ValueError, match=r"text_to_image must have similarity's shape \(3, 6\)"):
        triplet(similarity[:3], anchors=halves[0])


def test_values_of_degenerate_batches() -> None:
    """Nothing to win without a negative."""
    for options in KINDS:
        close(triplet(torch.tensor([[0.3]]), **options), 0.0)
        for form in FORMS:
            one, two = pair(3, 4)
            same = {"image_ids": torch.zeros(3), "implementation": form}
            close(triplet_of_features(one, two, **same, **options), 0.0)


def test_several_features_of_an_image() -> None:
    """The best of an image's views counts, also among hard negatives."""
    v, w = pair(4, 4)
    hard, views = hard_negatives(drawing(1), 5, 4, 4), torch.stack([v, rows(drawing(8), 4, 4)], 1)
    passed = {"image_ids": torch.tensor([0, 1, 2, 2]), **hard}
    single, one, both = (triplet_of_features(x, w, **passed) for x in (v, views[:, :1], views))
    close(one, single)
    assert abs(both - single) > 1e-3
    scores = torch.maximum(views[:, 0] @ w.T, views[:, 1] @ w.T)
    close(triplet_of_features(views, w), triplet(scores))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=str)
def test_hard_negatives_that_are_masked_have_no_effect(kind: dict[str, Any], form: str) -> None:
    """An image's own caption among the hard negatives of others, and an empty place: as if they were not there."""
    (v, w), negatives = pair(4, 4, seed=2), rows(drawing(3), 6, 4)
    ids, of = torch.tensor([10, 11, 12, 12]), torch.tensor([-2, -2, -1, 11, 12, 99])

    def loss(x: Tensor, keep: slice = slice(None)) -> Tensor:
        hard = {"negatives": x[keep], "negative_ids": of[keep], "negative_valid": of[keep] != -2}
        return triplet_of_features(v, w, image_ids=ids, margin=0.9, implementation=form, **hard, **kind)

    value, gradient = value_and_gradient(loss, negatives)
    assert not gradient[:2].any() and gradient.isfinite().all()
    close(value, loss(negatives, slice(2, None)))
    for own in (11, 12):  # only of their own images the texts are no negatives
        near = v[ids == own][0]
        assert abs(loss(torch.where((of == own)[:, None], near, negatives)) - value) > 1e-6
    for m in (0, 3):
        none = {"negatives": negatives[:m], "negative_ids": of[:m], "negative_valid": torch.zeros(m, dtype=torch.bool)}
        plain = triplet_of_features(v, w, image_ids=ids, implementation=form, **none, **kind)
        close(plain, triplet(v @ w.T, image_ids=ids, **kind))


# -- derivatives -----------------------------------------------------------------------------------------------------


def away_from_kinks(v: Tensor, w: Tensor, further: Tensor, ids: Tensor, margin: float) -> bool:
    """No hinge is near zero, no two negatives of an anchor are nearly alike, and some hinges are in play."""
    similarity, others = v @ w.T, ids[:, None] != ids
    wide = torch.cat([similarity, v @ further.T], 1), torch.cat([others, torch.ones(len(v), len(further)).bool()], 1)
    for scores, mask in (wide, (similarity.T, others)):
        hinges = (margin + scores - similarity.diagonal()[:, None]).masked_fill(~mask, torch.inf)
        ordered = scores.masked_fill(~mask, torch.inf).sort(1).values.diff(dim=1).nan_to_num(1.0)
        if hinges.abs().min() < 1e-2 or ordered.min() < 1e-3 or not (hinges < 0).any() or not (hinges > 0).any():
            return False
    return True


@pytest.mark.parametrize("form", ["scores", *FORMS])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=str)
def test_derivatives(kind: dict[str, Any], form: str) -> None:
    """At a point away from the kinks, with hard negatives."""
    for seed in itertools.count():
        (v, w), further = pair(5, 4, seed=seed), rows(drawing(seed), 3, 4, 1e3)
        if away_from_kinks(v, w, further, IDS, 0.3):
            break

    def loss(v: Tensor, w: Tensor, further: Tensor) -> Tensor:
        if form == "scores":
            scores = {"negative_similarity": v @ further.T}
            return triplet(v @ w.T, image_ids=IDS, margin=0.3, **scores, **kind)
        return triplet_of_features(
            v, w, image_ids=IDS, margin=0.3, negatives=further, implementation=form, **kind
        ).square()

    for shape in TILE_SHAPES[2::2] if form == "tiled" else TILE_SHAPES[:1]:  # tests/contrast/ has the others
        with tile_shape(**shape):
            for check in (second_order, transforms):
                check(loss, v, w, further)


# -- tiles -----------------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 30), st.sampled_from([3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2**31)),
    st.sampled_from(["distinct", "some", "one"]),
    st.sampled_from([None, (0.0, 0.5), (0.3, 1.0), (0.9, 1.0)]),
    st.sampled_from([None, 0, 1, 30]),
    st.sampled_from([0.0, 0.2, 3.0]),
    st.sampled_from(KINDS),
)
def test_tiles_equal_the_reference(shape, images, share, hard, margin, kind) -> None:
    n, d, spread, seed = shape
    generator = drawing(seed)
    v, w = rows(generator, n, d, spread), rows(generator, n, d, spread)
    ids = {"distinct": None, "some": torch.randint(max(1, n // 2), (n,), generator=generator), "one": torch.zeros(n)}
    start = 0 if share is None else int(share[0] * (n - 1))
    passed = {
        "image_ids": ids[images],
        "anchors": None if share is None else slice(start, max(int(share[1] * n), start + 1)),
        "margin": margin,
        **kind,
    }
    if hard is None:
        compare_forms(triplet_of_features, v, w, **passed)
        return
    given_ids = hard_negatives(generator, hard, d, n)

    def loss(v: Tensor, w: Tensor, negatives: Tensor, **form: Any) -> Tensor:
        return triplet_of_features(v, w, **passed, **{**given_ids, "negatives": negatives}, **form)

    compare_forms(loss, v, w, given_ids["negatives"])


@pytest.mark.parametrize("hardest", [True, False])
def test_of_equal_negatives_the_hinge_is_the_same(hardest: bool) -> None:
    """Two captions of one image are two equal candidates of every text; the copies share the gradient somehow."""
    generator = drawing(1)
    v, w = rows(generator, 6, 5).repeat_interleave(2, 0), rows(generator, 12, 5)
    ids, results = torch.arange(12) // 2, []
    for form in FORMS:
        with tile_shape(40, anchors=5):
            passed = {"image_ids": ids, "hardest": hardest, "implementation": form}
            value, of_images, of_texts = value_and_gradient(lambda *x, o=passed: triplet_of_features(*x, **o), v, w)
        results.append((value, of_images.unflatten(0, (6, 2)).sum(1), of_texts))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hardest", [True, False])
def test_memory(hardest: bool) -> None:
    ids = torch.empty(PAIRS, dtype=torch.int64, device="meta")
    memory_of_pairs(lambda *x: triplet_of_features(*x, image_ids=ids, hardest=hardest), bound=0.44e9)
    hard_memory(lambda *x, **hard: triplet_of_features(*x, hardest=hardest, **hard))


# -- precision, compilation, degenerate batches ----------------------------------------------------------------------


def loss_of_form(hardest: bool, form: str) -> Callable[..., Tensor]:
    """With hard negatives and without."""
    passed = {"image_ids": IDS, "hardest": hardest, "margin": 0.5, "implementation": form}
    loss = triplet_of_features
    return lambda v, w, further: loss(v, w, **passed) + loss(v, w, negatives=further, **passed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hardest", [True, False])
def test_half_types_are_raised_and_autocast_changes_nothing(hardest: bool, form: str) -> None:
    raises_halves(loss_of_form(hardest, form), *pair(5, 4, seed=2), rows(drawing(2), 3, 4))


@pytest.mark.parametrize(("hardest", "form"), [(True, FORMS[0]), pytest.param(False, FORMS[1], marks=pytest.mark.slow)])
def test_compiles(hardest: bool, form: str) -> None:
    passed = {"image_ids": IDS, "hardest": hardest, "margin": 0.5, "implementation": form}
    loss = lambda v, w, further: triplet_of_features(v, w, negatives=further, **passed)  # noqa: E731
    compiles(loss, *pair(5, 4, seed=2), rows(drawing(2), 3, 4), one_tile=0)


@pytest.mark.parametrize("form", FORMS)
def test_degenerate_batches_stay_finite(form: str) -> None:
    for kind in (KINDS[0], KINDS[-1]):
        for negatives in (None, 2):
            stays_finite(
                lambda v, w, ids, m=negatives, k=kind: triplet_of_features(
                    v, w, image_ids=ids, negatives=None if m is None else w[:m], implementation=form, **k
                )
            )


# -- bad input -------------------------------------------------------------------------------------------------------

V = torch.zeros(3, 4)
S = torch.zeros(3, 3)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: triplet(V), r"similarity must be square \[n, n\], got \(3, 4\)"),
    (lambda: triplet(V[0]), r"similarity must be square \[n, n\], got \(4,\)"),
    (lambda: triplet(V[:0, :0]), "similarity holds no pair"),
    (lambda: triplet(S, image_ids=torch.zeros(2)), r"image_ids must have shape \(3,\), got \(2,\)"),
    (lambda: triplet(S, reduction="max"), "reduction must be 'mean' or 'sum', got 'max'"),
    (lambda: triplet(S, margin=math.nan), "margin must be finite, got nan"),
    (lambda: triplet(S, margin=math.inf), "margin must be finite, got inf"),
    (lambda: triplet(S + 1e30), "similarity holds values of 1.0e\\+30"),
    (lambda: triplet(S, negative_similarity=V[:2]), r"negative_similarity must be \[3, m\], got \(2, 4\)"),
    (lambda: triplet(S, negative_similarity=V[0]), r"negative_similarity must be \[3, m\], got \(4,\)"),
    (lambda: triplet(S, negative_similarity=V + 1e30), "negative_similarity holds values"),
    (lambda: triplet(S, negative_similarity=V, negative_ids=torch.ones(3)), r"negative_ids must have shape \(4,\)"),
    (lambda: triplet(S, negative_similarity=V, negative_valid=torch.ones(4)), "negative_valid must be bool"),
    (lambda: triplet(S, negative_valid=torch.ones(4).bool()), "need negative_similarity"),
    (lambda: Triplet(reduction="max"), "reduction must be 'mean' or 'sum', got 'max'"),
    (lambda: Triplet(margin=math.nan), "margin must be finite, got nan"),
    (lambda: Triplet(similarity="sum"), "similarity must be 'cosine' or 'fusion', got 'sum'"),
    (lambda: Triplet(mean_epochs=-1), "mean_epochs must be >= 0, got -1"),
    (lambda: Triplet(mean_epochs=1, hardest=False), "leave out mean_epochs"),
    (lambda: Triplet(similarity="fusion", hard_negatives=True), "hard_negatives needs similarity=cosine"),
]


@pytest.mark.parametrize("case", range(len(BAD)), ids=[message[:40] for _, message in BAD])
def test_bad_input_is_named(case: int) -> None:
    call, message = BAD[case]
    with pytest.raises((ValueError, CoderError), match=message):
        call()


# -- the term --------------------------------------------------------------------------------------------------------


def joint() -> dict[str, Tensor]:
    """A model's keys, with hard negatives, the scores of a fusion head and the epoch."""
    keys, n = outputs(), 12
    scores = torch.rand(n, n, generator=drawing(1), dtype=torch.float64).requires_grad_()
    return keys | {"coder_fusion": scores, "coder_epoch": torch.full((n,), 1)}


@pytest.mark.parametrize("similarity", ["cosine", "fusion"])
@pytest.mark.parametrize("options", [{}, {"margin": 0.6}, *KINDS[1:]], ids=str)
def test_the_term_equals_its_function(options: dict[str, Any], similarity: str) -> None:
    keys = joint()
    scores = keys["coder_fusion"] if similarity == "fusion" else keys["image_features"] @ keys["text_features"].T
    want = triplet(scores, image_ids=keys["coder_ids"], **options)
    for local_loss in (False, True):
        got = make_loss(expression("triplet", {**options, "similarity": similarity}), local_loss=local_loss)(**keys)
        assert got.keys() == {"triplet_loss"}
        close(got["triplet_loss"], want)
    assert not options or abs(want - triplet(scores, image_ids=keys["coder_ids"])) > 1e-3


def test_hard_negatives_of_all_images_are_negatives_of_each() -> None:
    keys = joint()
    flat, of = keys["coder_negative_features"].flatten(0, 1), keys["coder_negative_ids"].flatten()
    hard = {"negatives": flat, "negative_ids": of, "negative_valid": of != -2}
    for masked in (True, False):
        options = {"hard_negatives": True, "hardest": False, "mask_same_image": masked}
        got = make_loss(expression("triplet", options))(**keys, output_dict=False)
        passed = {"image_ids": keys["coder_ids"] if masked else None, "hardest": False, **hard}
        close(got, triplet_of_features(keys["image_features"], keys["text_features"], **passed))


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize(("epoch", "hardest"), [(1, False), (2, True)])
def test_all_negatives_count_in_the_first_epochs(epoch: int, hardest: bool, local_loss: bool) -> None:
    """Value and gradient are those of the one form alone."""
    keys, plain = outputs(), outputs()
    loss = make_loss("triplet(margin=0.3,reduction=sum,mean_epochs=2)", local_loss=local_loss)
    got = loss(**keys, coder_epoch=torch.full((12,), epoch), output_dict=False)
    features = plain["image_features"], plain["text_features"]
    passed = {"image_ids": plain["coder_ids"], "margin": 0.3, "reduction": "sum"}
    want = triplet(cosine(*features), hardest=hardest, **passed)
    close(got, want)
    got.backward(), want.backward()
    close(keys["image_features"].grad, features[0].grad)
    assert abs(want - triplet(cosine(*features), hardest=not hardest, **passed)) > 1


def test_captions_of_one_image_are_masked_by_ids() -> None:
    keys = outputs()
    masking, not_masking = (
        make_loss(expression("triplet", {"hardest": False, "mask_same_image": masked})) for masked in (True, False)
    )
    unmasked = not_masking(**keys, output_dict=False)
    assert abs(masking(**keys, output_dict=False) - unmasked) > 1e-3
    del keys["coder_ids"]
    for loss in (masking, not_masking):  # no ids, nothing to mask
        close(loss(**keys, output_dict=False), unmasked)


EXPRESSIONS = (
    "triplet(margin=0.5)",
    "triplet(margin=0.5,mask_same_image=false,hardest=false)",
    "triplet(reduction=sum)",
    "triplet(similarity=fusion,reduction=sum,hardest=false)",
    "triplet(hard_negatives=true,hardest=false,reduction=sum)",
    "triplet(hard_negatives=true,reduction=sum,mean_epochs=2)",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_two_ranks_equal_one_process_with_the_joint_batch(expression: str) -> None:
    ranks_equal_one_process(joint, EXPRESSIONS, expression)


def test_options_and_what_the_term_supports() -> None:
    own = {"mean_epochs", "similarity", "mask_same_image", "hard_negatives"}
    tensors = {
        "image_ids", "text_to_image", "anchors", "negative_similarity", "negative_ids", "negative_valid",
    }  # fmt: skip
    same_options(Triplet, triplet, only_term=own, only_function=tensors)
    assert Triplet().supports == {"same_image", "views", "hard_negatives", "ring"}
    assert Triplet(similarity="fusion").supports == {"same_image", "views", "hard_negatives"}
    views = normalize(torch.randn(3, 2, 4, generator=drawing()).double(), dim=-1)
    close(Triplet()(views, pair(3, 4)[1]), triplet_of_features(views, pair(3, 4)[1]))
