"""InfoNCE and the sigmoid loss as open_clip computes them: values, derivatives, tiles, hard negatives, the terms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.losses.clip import Clip
from coder_plugin.losses.siglip import SigLip
from coder_plugin.objective import Objective
from tests.losses.checks import (
    HALVES,
    clip_of_features,
    compiles,
    hard_memory,
    memory_of_pairs,
    raises_halves,
    ranks_equal_one_process,
    stays_finite,
)
from tests.losses.drawn import (
    FORMS,
    TILE_SHAPES,
    close,
    compare_forms,
    drawing,
    hard_negatives,
    leaves_of,
    make_loss,
    outputs,
    pair,
    rows,
    second_order,
    tile_shape,
    transforms,
    value_and_gradient,
)
from tests.references import hard_negatives as reference


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def hard_of(n: int, m: int, d: int, seed: int) -> dict[str, Tensor]:
    """Hard negatives of images of which some are one."""
    generator = drawing(seed)
    return {"image_ids": torch.randint(0, n + 1, (n,), generator=generator), **hard_negatives(generator, m, d, n)}


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_by_hand(form: str) -> None:
    eye = torch.eye(2, dtype=torch.float64)
    close(clip_of_features(eye, eye, number(2.0), implementation=form), math.log(1 + math.exp(-2)))
    # a hard negative as near as the caption, of the first image alone: log 2 more or less
    options = {"negatives": eye[:1], "negative_ids": torch.tensor([9]), "image_ids": torch.tensor([5, 9])}
    sums = 2 * math.log(1 + math.exp(-2)), math.log(2 + math.exp(-2)), math.log(1 + math.exp(-2))
    close(clip_of_features(eye, eye, number(2.0), implementation=form, **options), sum(sums) / 4)


@given(
    st.tuples(st.integers(1, 30), st.sampled_from([3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2**31)),
    st.sampled_from([1.0, 14.3, 100.0]),
)
def test_equals_open_clips_and_its_tiles(shape: tuple[int, int, float, int], scale: float) -> None:
    n, d, spread, seed = shape
    features = *pair(n, d, seed=seed, spread=spread), number(scale)
    compare_forms(clip_of_features, *features)
    for form in FORMS:
        results = [
            value_and_gradient(function, *features)
            for function in (ClipLoss(), lambda *x, form=form: clip_of_features(*x, implementation=form))
        ]
        for want, got in zip(*results, strict=True):
            assert (got - want).abs().max() <= 1e-10 * want.abs().max().clamp(min=1e-3)


@given(st.sampled_from(FORMS), st.integers(1, 6), st.integers(0, 7), st.integers(0, 10_000))
def test_hard_negatives_equal_the_slow_reference(form: str, n: int, m: int, seed: int) -> None:
    """Of images alone, but not of their own; captions of one image in the batch are negatives."""
    (v, w), hard = pair(n, 4, seed=seed), hard_of(n, m, 4, seed)
    slow = reference.Hard(*(hard[key].tolist() for key in ("negatives", "negative_ids", "negative_valid")))
    want = reference.clip(v.tolist(), w.tolist(), hard["image_ids"].tolist(), slow, 5.0)
    close(clip_of_features(v, w, number(5.0), implementation=form, **hard), want)


@given(st.integers(1, 20), st.integers(0, 30), st.sampled_from([None, (0.0, 0.5), (0.3, 1.0)]), st.integers(0, 2**31))
def test_tiles_of_hard_negatives_and_of_shares_equal_the_reference(n: int, m: int, share: Any, seed: int) -> None:
    (v, w), hard = pair(n, 5, seed=seed), hard_of(n, m, 5, seed)
    start = 0 if share is None else int(share[0] * (n - 1))
    anchors = None if share is None else slice(start, max(int(share[1] * n), start + 1))

    def loss(v: Tensor, w: Tensor, scale: Tensor, negatives: Tensor, **form: Any) -> Tensor:
        return clip_of_features(v, w, scale, anchors=anchors, **{**hard, "negatives": negatives}, **form)

    compare_forms(loss, v, w, number(9.0), hard["negatives"])


@pytest.mark.parametrize("form", FORMS)
def test_shares_of_the_anchors_average_to_the_whole_batch(form: str) -> None:
    (v, w), hard = pair(6, 4), hard_of(6, 5, 4, 1)
    for options in ({}, hard):
        passed = {"implementation": form, **options}
        parts = [clip_of_features(v, w, number(5.0), anchors=own, **passed) for own in (slice(0, 2), slice(2, 6))]
        close(parts[0] / 3 + parts[1] * 2 / 3, clip_of_features(v, w, number(5.0), **passed))


@pytest.mark.parametrize("form", FORMS)
def test_hard_negatives_that_are_masked_have_no_effect(form: str) -> None:
    """An image's own caption among the hard negatives of others, and an empty place: as if they were not there."""
    (v, w), negatives, scale = pair(4, 4, seed=2), rows(drawing(3), 6, 4), number(5.0)
    ids, of = torch.tensor([10, 11, 12, 12]), torch.tensor([-2, -2, -1, 11, 12, 99])

    def loss(x: Tensor, keep: slice = slice(None)) -> Tensor:
        hard = {"negatives": x[keep], "negative_ids": of[keep], "negative_valid": of[keep] != -2}
        return clip_of_features(v, w, scale, image_ids=ids, implementation=form, **hard)

    value, gradient = value_and_gradient(loss, negatives)
    assert not gradient[:2].any() and gradient.isfinite().all()
    close(value, loss(negatives, slice(2, None)))
    for own in (11, 12):  # only of their own images the texts are no negatives
        near = v[ids == own][0]
        assert abs(loss(torch.where((of == own)[:, None], near, negatives)) - value) > 1e-6
    for m in (0, 3):
        none = {"negatives": negatives[:m], "negative_ids": of[:m], "negative_valid": torch.zeros(m, dtype=torch.bool)}
        close(clip_of_features(v, w, scale, image_ids=ids, implementation=form, **none), ClipLoss()(v, w, scale))


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hard", "n"), [(True, 4), (False, 4), (False, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form: str, hard: bool, n: int) -> None:
    """Also of one pair, which has no negatives."""
    (v, w), options = pair(n, 3, seed=5), hard_of(n, 3, 3, 1) if hard else {}
    further = [options.pop("negatives")] if hard else []

    def loss(v: Tensor, w: Tensor, scale: Tensor, *x: Tensor) -> Tensor:
        passed = {**options, "negatives": x[0]} if x else {}
        return clip_of_features(v, w, scale, implementation=form, **passed).square()

    for shape in TILE_SHAPES[2::2] if form == "tiled" else TILE_SHAPES[:1]:  # tests/contrast/ has the others
        with tile_shape(**shape):
            for check in (second_order, transforms):
                check(loss, v, w, number(3.0), *further)


# -- memory, precision, compilation, degenerate batches --------------------------------------------------------------


def test_memory() -> None:
    memory_of_pairs(lambda v, w, scale: clip_of_features(v, w, scale), bound=0.37e9, numbers=1)
    scale = torch.empty((), device="meta")
    hard_memory(lambda v, w, **hard: clip_of_features(v, w, scale, **hard))
    ids, of = (torch.empty(n, dtype=torch.int64, device="meta") for n in (4096, 65_536))
    hard_memory(  # the term takes tiles by itself, since there are more than 4 million similarities
        lambda v, w, *, negatives, **_: Clip(hard_negatives=True)(
            v, w, scale, None, ids, negatives.view(4096, 16, 64), of.view(4096, 16)
        )
    )


def test_half_types_are_raised_but_where_open_clip_computes() -> None:
    (v, w), hard = pair(6, 4), hard_of(6, 5, 4, 1)
    further, scale = hard.pop("negatives"), torch.tensor(5.0)
    raises_halves(lambda v, w: clip_of_features(v, w, scale, implementation="tiled"), v, w)
    for form in FORMS:
        passed = {"implementation": form, **hard}
        raises_halves(lambda v, w, x, o=passed: clip_of_features(v, w, scale, negatives=x, **o), v, w, further)
    for dtype in HALVES:
        halves = v.to(dtype), w.to(dtype), scale
        assert torch.equal(clip_of_features(*halves), ClipLoss()(*halves))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        floats = v.float(), w.float(), scale
        assert torch.equal(clip_of_features(*floats), ClipLoss()(*floats))


@pytest.mark.parametrize(
    ("form", "one_tile", "hard"), [pytest.param("tiled", 1 << 24, False, marks=pytest.mark.slow), ("reference", 0, True)]
)
def test_compiles(form: str, one_tile: int, hard: bool) -> None:
    options = hard_of(5, 3, 4, 1) if hard else {}
    loss = lambda v, w, scale: clip_of_features(v, w, scale, implementation=form, **options)  # noqa: E731
    compiles(loss, *pair(5, 4), number(3.0), one_tile=one_tile)


@pytest.mark.parametrize("form", FORMS)
def test_degenerate_batches_stay_finite(form: str) -> None:
    for scale in (0.1, 100.0):
        for negatives in (None, 2):
            stays_finite(
                lambda v, w, ids, m=negatives, s=scale: clip_of_features(
                    v, w, torch.tensor(s), image_ids=ids, negatives=None if m is None else w[:m], implementation=form
                )
            )


# -- bad input -------------------------------------------------------------------------------------------------------

F, ONE = torch.eye(4), torch.tensor(1.0)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: clip_of_features(F, F[:2], ONE), r"must have one shape \[n, d\], got \(4, 4\) and \(2, 4\)"),
    (lambda: clip_of_features(F, F * 1e30, ONE), "text_features holds values of 1.0e\\+30"),
    (lambda: Objective.parse("siglip(dist_impl=ring)"), "dist_impl=ring must be bidir or shift"),
]


@pytest.mark.parametrize("case", range(len(BAD)), ids=[message[:40] for _, message in BAD])
def test_bad_input_is_named(case: int) -> None:
    call, message = BAD[case]
    with pytest.raises((ValueError, CoderError), match=message):
        call()


# -- the terms -------------------------------------------------------------------------------------------------------


def joint() -> dict[str, Tensor]:
    """A model's keys."""
    scales = {"logit_scale": number(5.0).requires_grad_(), "logit_bias": number(-3.0).requires_grad_()}
    return {**outputs(), **scales}


@pytest.mark.parametrize("bias", [False, True])
def test_the_term_is_open_clips(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit; by tiles near it. A bias that all logits share changes nothing, but has a gradient."""
    keys = {name: each for name, each in joint().items() if bias or name != "logit_bias"}
    read = [keys[name] for name in ("image_features", "text_features", "logit_scale", "logit_bias")[: 3 + bias]]
    got = make_loss("clip")(**keys)
    assert got.keys() == {"clip_loss"}
    want = ClipLoss()(*read[:3], logit_bias=keys.get("logit_bias"))
    assert torch.equal(got["clip_loss"], want)
    gradients = torch.autograd.grad(want, read)
    for form in ("reference", "tiled", "auto"):
        if form == "auto":  # of a large batch
            monkeypatch.setattr("coder_plugin.contrast.pairs.SMALL_MATRIX", 20)
        with tile_shape(40, anchors=5):
            value = make_loss("clip", implementation=form)(**keys)["clip_loss"]
        close(value, want)
        for one, other in zip(torch.autograd.grad(value, read), gradients, strict=True):
            close(one, other)


def test_siglip_is_open_clips() -> None:
    for dist_impl in ("bidir", "shift", "reduce", "gather"):
        assert make_loss(f"siglip(dist_impl={dist_impl})").terms["siglip"].loss.dist_impl == dist_impl
    keys, loss = joint(), make_loss("siglip")
    got = loss(**keys)
    assert got.keys() == {"siglip_loss"}
    read = [keys[name] for name in ("image_features", "text_features", "logit_scale", "logit_bias")]
    assert torch.equal(got["siglip_loss"], SigLipLoss()(*read))
    assert all(each.abs().max() > 1e-6 for each in torch.autograd.grad(got["siglip_loss"], read))


def test_siglip_by_hand_and_its_derivatives() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    value = SigLip()(eye, eye, number(2.0), number(-1.0))
    close(value, math.log1p(math.exp(-1)) + math.log1p(math.exp(-1)))  # of each text: 2 - 1 and -(0 - 1)
    assert torch.autograd.gradcheck(SigLip(), leaves_of([*pair(3, 3), number(2.0), number(-1.0)]))


def test_hard_negatives_of_all_images_are_negatives_of_each() -> None:
    keys = joint()
    flat, of = keys["coder_negative_features"].flatten(0, 1), keys["coder_negative_ids"].flatten()
    features = keys["image_features"], keys["text_features"], keys["logit_scale"]
    hard = {"image_ids": keys["coder_ids"], "negatives": flat, "negative_ids": of, "negative_valid": of != -2}
    got = make_loss("clip(hard_negatives=true)")(**keys)["clip_loss"]
    close(got, clip_of_features(*features, **hard))
    del keys["coder_ids"]  # without ids every text is a negative of every image
    got = make_loss("clip(hard_negatives=true)")(**keys)["clip_loss"]
    close(got, clip_of_features(*features, negatives=flat, negative_valid=of != -2))


def test_options_and_what_the_terms_support() -> None:
    for term, options in ((Clip, {"hard_negatives": False}), (SigLip, {"dist_impl": "bidir"})):
        assert {name: each.default for name, each in inspect.signature(term).parameters.items()} == options
    assert Clip().supports == {"hard_negatives", "ring"} and SigLip().supports == {"ring"}  # captions are not masked
    assert "coder_ids" not in Clip().optional and "coder_ids" in Clip(hard_negatives=True).optional


EXPRESSIONS = ("clip", "clip(hard_negatives=true)", "siglip")  # by what siglip's texts travel is open_clip's own code


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_two_ranks_equal_one_process_with_the_joint_batch(expression: str) -> None:
    ranks_equal_one_process(joint, EXPRESSIONS, expression)
