"""AsCL's ratios: expected values, a slow reference, derivatives, tiles, and the term on one process and two."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.functional import ascl
from coder_plugin.losses.ascl import AsCL
from tests.losses.checks import (
    PAIRS,
    ascl_of_features,
    compiles,
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
    expression,
    make_loss,
    pair,
    rows,
    second_order,
    tile_shape,
    transforms,
    value_and_gradient,
    vectors,
)


def scores(n: int, m: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = drawing(seed)
    of_texts, of_noised = (torch.rand(n, k, generator=generator, dtype=torch.float64) * 2 - 1 for k in (n, m))
    return of_texts, of_noised


def reference(similarity: Tensor, noise: Tensor | None, temperature: float, ids: list[int]) -> float:
    """Equation 5 as printed but for its logarithms, one pair after the other."""
    n, total = len(similarity), 0.0
    for i in range(n):
        positive = math.exp(similarity[i, i] / temperature)
        others = [j for j in range(n) if ids[j] != ids[i]]
        texts = sum(math.exp(similarity[i, j] / temperature) for j in others)
        images = sum(math.exp(similarity[j, i] / temperature) for j in others)
        noised = [] if noise is None else [s.item() for s in noise[i] if s <= similarity[i, i]]
        generated = sum(math.exp(s / temperature) for s in noised)
        total += -math.log(positive / (positive + images)) - math.log(positive / (positive + texts + generated))
    return total / n


# -- values ----------------------------------------------------------------------------------------------------------


def test_expected_value() -> None:
    z = vectors("ascl")
    got = ascl(z["similarity"], z["noise_similarity"], temperature=z["tau"])
    assert got.dtype == torch.float64 and got.item() == pytest.approx(z["loss"], rel=1e-12)


@given(st.integers(1, 6), st.integers(0, 7), st.sampled_from([0.05, 0.3, 1.0]), st.data())
def test_equals_the_slow_reference(n: int, m: int, temperature: float, data: st.DataObject) -> None:
    similarity, noise = scores(n, m, data.draw(st.integers(0, 10_000)))
    ids = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    for noised in (noise, None):
        got = ascl(similarity, noised, temperature=temperature, image_ids=torch.tensor(ids))
        close(got, reference(similarity, noised, temperature, ids), rtol=1e-10, atol=1e-12)


def test_by_hand() -> None:
    # one pair, one noised text as near as the caption: log 2; one above it does not count
    assert ascl(torch.tensor([[0.5]]), torch.tensor([[0.5]]), temperature=0.1).item() == pytest.approx(math.log(2))
    assert ascl(torch.tensor([[0.5]]), torch.tensor([[0.6]]), temperature=0.1).item() == 0.0
    assert ascl(torch.tensor([[0.5]]), temperature=0.1).item() == 0.0


def test_noise_is_in_the_images_ratio_alone() -> None:
    similarity, noise = scores(4, 4, 1)
    similarity, noise = similarity.abs(), noise - 1  # all below the positives' lowest possible
    more = ascl(similarity, noise, temperature=0.5) - ascl(similarity, temperature=0.5)
    logits = torch.cat([similarity, noise], 1) / 0.5
    close(more, (logits.logsumexp(1) - (similarity / 0.5).logsumexp(1)).mean())


def test_noised_texts_that_do_not_count_are_as_if_they_were_not_there() -> None:
    similarity, noise = scores(4, 5, 6)
    valid = torch.tensor([True, False, True, False, True])
    some, without = (
        value_and_gradient(lambda t, z=z, v=v: ascl(similarity, z, temperature=t, noise_valid=v), torch.tensor(0.3))
        for z, v in ((noise, valid), (noise[:, valid], None))
    )
    torch.testing.assert_close(some, without)
    none = torch.zeros(5, dtype=torch.bool)
    close(ascl(similarity, noise, temperature=0.3, noise_valid=none), ascl(similarity, temperature=0.3))


def test_order_of_pairs_does_not_matter_nor_do_the_ids_themselves() -> None:
    (v, w), noised = pair(6, 4), rows(drawing(1), 3, 4)
    ids, turn = torch.tensor([8, 8, 3, 4, 5, 3]), torch.tensor([3, 1, 5, 0, 4, 2])
    big = torch.tensor([2**62 + 1, 2**62 + 1, 2**62 + 2, 0, -5, 2**62 + 2])  # floats would merge them
    options = {"temperature": 0.3}
    want = ascl_of_features(v, w, noised, image_ids=ids, **options)
    close(ascl_of_features(v[turn], w[turn], noised.flip(0), image_ids=ids[turn], **options), want)
    close(ascl_of_features(v, w, noised, image_ids=big, **options), want)
    assert abs(ascl_of_features(v, w, noised, **options) - want) > 1e-3
    # without noise both directions are alike
    close(ascl_of_features(w, v, image_ids=ids, **options), ascl_of_features(v, w, image_ids=ids, **options))


def test_shares_of_the_anchors_average_to_the_whole_batch() -> None:
    (similarity, noise), ids = scores(6, 4, 2), torch.tensor([1, 2, 3, 1, 4, 5])
    options = {"temperature": 0.3, "image_ids": ids}
    parts = [
        ascl(similarity[own], noise[own], text_to_image=similarity.T[own], anchors=own, **options)
        for own in (slice(0, 2), slice(2, 6))
    ]
    close(parts[0] / 3 + parts[1] * 2 / 3, ascl(similarity, noise, **options))


def test_the_best_of_several_features_of_an_image_counts() -> None:
    (v, w), noised = pair(4, 3), rows(drawing(1), 3, 3)
    views = torch.stack([v, rows(drawing(2), 4, 3)], 1)
    got = ascl_of_features(views, w, noised, temperature=0.3)
    best = [torch.maximum(views[:, 0] @ texts.T, views[:, 1] @ texts.T) for texts in (w, noised)]
    close(got, ascl(*best, temperature=0.3))


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noised", [True, False])
def test_derivatives_of_scores(noised: bool) -> None:
    """The temperature's too. A noised text above the caption gets none."""
    similarity, noise = scores(3, 4, 2)
    ids, inputs = torch.tensor([1, 2, 1]), (similarity, noise) if noised else (similarity,)

    def loss(temperature: Tensor, *inputs: Tensor) -> Tensor:
        return ascl(*inputs, temperature=temperature, image_ids=ids)

    second_order(loss, torch.tensor(0.3, dtype=torch.float64), *inputs)
    transforms(loss, torch.tensor(0.3, dtype=torch.float64), *inputs)
    if noised:
        gradient = value_and_gradient(lambda z: ascl(similarity, z, temperature=0.2), noise)[1]
        above = noise > similarity.diagonal()[:, None]
        assert above.any() and (gradient[above] == 0).all() and (gradient[~above] > 0).all()


@pytest.mark.parametrize(
    ("form", "case"),
    [("reference", "some negatives"), *(("tiled", case) for case in ("some negatives", "one image", "noise above"))],
)
def test_derivatives_of_features(form: str, case: str) -> None:
    """Also where an image has no negatives, or where all noised texts are above the caption."""
    v, w = pair(4, 3, seed=3)
    noised = v[:1] if case == "noise above" else torch.cat([v[:1], -v])
    ids = torch.zeros(4) if case == "one image" else torch.tensor([0, 1, 0, 2])
    options = {"image_ids": ids, "implementation": form}
    above = v @ noised.T > (v * w).sum(1, keepdim=True)
    assert above.any() and bool(above.all(1).any()) is (case == "noise above")

    def loss(scale: Tensor, *features: Tensor) -> Tensor:
        return ascl_of_features(*features, temperature=1 / scale, **options)

    for shape in TILE_SHAPES[2::2] if form == "tiled" else TILE_SHAPES[:1]:  # tests/contrast/ has the others
        with tile_shape(**shape):
            for check in (second_order, transforms):
                check(loss, torch.tensor(3.0, dtype=torch.float64), v, w, noised)


# -- tiles -----------------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 30), st.sampled_from([3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2**31)),
    st.sampled_from(["distinct", "some", "one"]),
    st.sampled_from([None, (0.0, 0.5), (0.3, 1.0), (0.9, 1.0)]),
    st.sampled_from([0, 1, 30]),
    st.booleans(),
    st.sampled_from([0.01, 0.05, 1.0]),
    st.booleans(),
)
def test_tiles_equal_the_reference(shape, images, share, m, partly, temperature, learned) -> None:
    """The gradients of images, texts, noised texts and the scale, 1 over the temperature."""
    n, d, spread, seed = shape
    generator = drawing(seed)
    v, w, *noised = (rows(generator, count, d, spread) for count in (n, n, m)[: 2 + (m > 0)])
    ids = {"distinct": None, "some": torch.randint(max(1, n // 2), (n,), generator=generator), "one": torch.zeros(n)}
    start = 0 if share is None else int(share[0] * (n - 1))
    passed = {
        "image_ids": ids[images],
        "noise_valid": torch.rand(m, generator=generator) < 0.5 if m and partly else None,
        "anchors": None if share is None else slice(start, max(int(share[1] * n), start + 1)),
    }
    if not learned:
        compare_forms(ascl_of_features, v, w, *noised, temperature=temperature, **passed)
        return

    def loss(scale: Tensor, *features: Tensor, **form: Any) -> Tensor:
        return ascl_of_features(*features, temperature=1 / scale, **passed, **form)

    compare_forms(loss, torch.tensor(1 / temperature, dtype=torch.float64), v, w, *noised)


def test_memory() -> None:
    ids = torch.empty(PAIRS, dtype=torch.int64, device="meta")
    valid = torch.empty(PAIRS, dtype=torch.bool, device="meta")
    passed = {"temperature": 0.05, "image_ids": ids, "noise_valid": valid}
    memory_of_pairs(lambda *x: ascl_of_features(*x, **passed), sides=3, bound=0.5e9)


# -- precision, compilation, degenerate batches ----------------------------------------------------------------------


def loss_of_form(form: str) -> Callable[..., Tensor]:
    passed = {"temperature": 0.1, "image_ids": torch.tensor([1, 2, 3, 1, 4, 5]), "implementation": form}
    return lambda *features: ascl_of_features(*features, **passed)


@pytest.mark.parametrize("form", FORMS)
def test_half_types_are_raised_and_autocast_changes_nothing(form: str) -> None:
    raises_halves(loss_of_form(form), *pair(6, 4), rows(drawing(1), 5, 4))


@pytest.mark.parametrize("form", ["reference", pytest.param("tiled", marks=pytest.mark.slow)])
def test_compiles(form: str) -> None:
    compiles(loss_of_form(form), *pair(6, 4), rows(drawing(1), 5, 4), one_tile=0)


@pytest.mark.parametrize("form", FORMS)
def test_degenerate_batches_stay_finite(form: str) -> None:
    for temperature in (0.01, 1.0):
        stays_finite(
            lambda v, w, ids, t=temperature: ascl_of_features(
                v, w, torch.cat([w[:2], -w[:1]]), temperature=t, image_ids=ids, implementation=form
            )
        )


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), None), r"similarity must be square \[n, n\], got \(2, 3\)"),
        ((torch.zeros(0, 0), None), "similarity holds no pair"),
        ((torch.zeros(2, 2), torch.zeros(3, 1)), r"noise_similarity must have shape \(2, m\), got \(3, 1\)"),
        ((torch.zeros(2, 2), torch.zeros(2)), "noise_similarity"),
        ((torch.full((2, 2), 1e30), None), "similarity holds values of 1.0e\\+30"),
        ((torch.zeros(2, 2), torch.full((2, 1), 1e30)), "noise_similarity holds values"),
    ],
)
def test_bad_shapes(arguments: tuple[Tensor, Tensor | None], message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        ascl(*arguments, temperature=0.1)


def test_bad_features() -> None:
    v, w = pair(3, 4)
    for arguments, options, message in (
        ((v, w[:2]), {}, r"must have one shape \[n, d\], got \(3, 4\) and \(2, 4\)"),
        ((v, w), {"image_ids": torch.arange(2)}, r"image_ids must have shape \(3,\), got \(2,\)"),
        ((v, w, w * 1e200), {}, "noised_features holds values"),
    ):
        with pytest.raises((ValueError, CoderError), match=message):
            ascl_of_features(*arguments, temperature=0.1, **options)
    with pytest.raises(ValueError, match=r"text_to_image must have similarity's shape \(1, 3\)"):
        ascl(torch.zeros(1, 3), temperature=0.1, anchors=slice(0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "scale"}, "temperature must be a number > 0 or 'logit_scale', got 'scale'"),
        ({"similarity": "sum"}, "similarity must be 'cosine' or 'fusion', got 'sum'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsCL(**options)


# -- the term --------------------------------------------------------------------------------------------------------

NOISED = ("coder_noised_features", "coder_positive_features", "coder_noised_positive_features")
FUSION = ("coder_fusion", "coder_fusion_noised", "coder_fusion_positive", "coder_fusion_noised_positive")


def joint(n: int = 12) -> dict[str, Tensor]:
    """A model's keys, with the texts that AsCL's head generates and the scores of a fusion head."""
    generator = drawing(7)
    keys = {name: rows(generator, n, 4, 1e3).requires_grad_() for name in ("image_features", "text_features", *NOISED)}
    keys |= {name: torch.rand(n, n, generator=generator, dtype=torch.float64).requires_grad_() for name in FUSION}
    return keys | {
        "coder_ids": torch.arange(n) // 2 * 2 % 9 + 2**62,
        "coder_noise_changed": torch.rand(n, 2, generator=generator) < 0.7,
        "logit_scale": torch.tensor(4.0, dtype=torch.float64, requires_grad=True),
    }


def expected(keys: dict[str, Tensor], similarity: str, *, masked: bool = True, temperature: Any = 0.5) -> Tensor:
    """The mean of the captions' and the positives' loss, each with its own noised texts (AsCL eq. 5-7)."""
    if similarity == "fusion":
        caption, noised, positive, noised_positive = (keys[name] for name in FUSION)
    else:
        images = keys["image_features"]
        texts = (keys[name] for name in ("text_features", *NOISED))
        caption, noised, positive, noised_positive = (images @ each.T for each in texts)
    passed = {"temperature": temperature, "image_ids": keys["coder_ids"] if masked else None}
    parts = zip((caption, positive), (noised, noised_positive), keys["coder_noise_changed"].T, strict=True)
    return sum(ascl(score, noise, noise_valid=valid, **passed) for score, noise, valid in parts) / 2


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("similarity", ["cosine", "fusion"])
def test_the_term_reads_the_generated_texts_of_its_similarity_alone(similarity: str, masked: bool) -> None:
    options = {"similarity": similarity, "temperature": 0.5, "mask_same_image": masked}
    loss, keys = make_loss(expression("ascl", options)), joint()
    got = loss(**keys)
    assert got.keys() == {"ascl_loss"}
    close(got["ascl_loss"], expected(keys, similarity, masked=masked))
    assert abs(got["ascl_loss"] - expected(keys, similarity, masked=not masked)) > 1e-3
    assert similarity == "fusion" or not any("fusion" in key for key in loss.bindings[0].values())
    assert ("coder_ids" in loss.terms["ascl"].optional) is masked
    gradients = torch.autograd.grad(got["ascl_loss"], [keys["image_features"], keys["coder_fusion"]], allow_unused=True)
    assert [each is None for each in gradients] == [similarity == "fusion", similarity == "cosine"]


def test_without_generated_texts_it_is_infonce_of_the_captions() -> None:
    keys = {name: each for name, each in joint().items() if name not in (*NOISED, "coder_noise_changed")}
    scores = keys["image_features"] @ keys["text_features"].T
    got = make_loss("ascl(temperature=0.2)")(**keys)["ascl_loss"]
    close(got, ascl(scores, temperature=0.2, image_ids=keys["coder_ids"]))


def test_the_models_own_scale_is_one_over_the_temperature() -> None:
    keys = joint()
    scale = keys["logit_scale"]
    got = make_loss("ascl(temperature=logit_scale)")(**keys, output_dict=False)
    want = expected(keys, "cosine", temperature=1 / scale)
    close(got, want)
    assert abs(want - expected(keys, "cosine", temperature=scale)) > 0.1
    for one, other in zip(*(torch.autograd.grad(x, [scale, keys["image_features"]]) for x in (got, want)), strict=True):
        close(one, other)
    del keys["logit_scale"]
    with pytest.raises(CoderError, match="loss 'ascl' needs logit_scale"):
        make_loss("ascl(temperature=logit_scale)")(**keys)


EXPRESSIONS = (
    "ascl(temperature=0.5)",
    "ascl(temperature=0.5,mask_same_image=false)",
    "ascl(temperature=logit_scale)",
    "ascl(similarity=fusion,temperature=0.5)",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_two_ranks_equal_one_process_with_the_joint_batch(expression: str) -> None:
    ranks_equal_one_process(joint, EXPRESSIONS, expression)


def test_options_and_what_the_term_supports() -> None:
    parameters = inspect.signature(AsCL).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "temperature": 0.05, "similarity": "cosine", "mask_same_image": True,
    }  # fmt: skip
    assert AsCL().supports == {"same_image", "views", "ring"}
    assert AsCL(similarity="fusion").supports == {"same_image", "views"} and AsCL().supports >= {"ring"}
    views = {"image_features": pair(6, 4)[0].view(3, 2, 4), "text_features": pair(3, 4)[1]}
    close(AsCL()(**views), ascl_of_features(*views.values(), temperature=0.05))


def test_noise_in_the_fusions_words_is_refused_for_cosines() -> None:
    heads = {"asymmetry": SimpleNamespace(noise_at="output")}
    with pytest.raises(CoderError, match=r"noise_at=output .* use ascl\(similarity=fusion\) alone"):
        AsCL().bind(heads, local_loss=False)
    AsCL(similarity="fusion").bind(heads, local_loss=False)
