"""M-DCL: values, forms, hard negatives, derivatives, precision, memory, its term with banks, and several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional import dcl, m_dcl
from coder_plugin.losses import m_dcl as written
from coder_plugin.losses.m_dcl import MDCL
from coder_plugin.objective import Objective
from coder_plugin.resolver import resolve
from tests.few import few
from tests.losses.checks import compiles
from tests.losses.drawn import (
    EXACT,
    FORMS,
    KEYS,
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
    penalty_of_forms,
    rows,
    second_order,
    tile_shape,
    transforms,
    value_and_gradient,
    vectors,
)
from tests.peak_memory import peak
from tests.references import bank as reference
from tests.references import hard_negatives as hard_reference

__all__ = ["forms_taken"]
REVERSE, OVER = ("paired", "all", "none"), ("batch", "bank", "batch+bank")


def parts(n: int = 5, q: int = 7, d: int = 4, *, seed: int = 0, spread: float = 1e3) -> list[Tensor]:
    """Live features of images and texts, their keys, and the banks' entries."""
    return [rows(drawing(seed + k), size, d, spread) for k, size in enumerate((n, n, n, n, q, q))]


IDS, BANK_IDS = torch.tensor([1, 2, 3, 1, 4]), torch.tensor([9, 1, 2, 8, 8, 5, 3])
VALID = torch.tensor([True, True, False, True, True, True, False])
BANKS = {"image_ids": IDS, "bank_ids": BANK_IDS, "bank_valid": VALID}
HARD = {
    "negatives": rows(drawing(9), 4, 4), "negative_ids": torch.tensor([-2, 1, 2, 9]), "negative_valid": torch.arange(4) > 0
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "printed": {"positive_weight": "mu", "mu": 0.3, "reverse": "none", "diversity_over": "batch"},
    "over the bank": {"diversity_over": "bank", "effective_negatives": 20},
    "hard": HARD,
    "anchors hard": {"anchors": slice(2, 5), **HARD},
    "all": {"reverse": "all", "diversity": "none"},
}


def case(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function of the live features and ``implementation``, and these."""
    live, rest = parts()[:2], parts()[2:]
    return lambda v, w, **more: m_dcl(v, w, *rest, **{**BANKS, **CASES[name], **more}), live


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"positive_weight": "mu"}], ids=str)
def test_expected_values(options: dict[str, Any]) -> None:
    z = vectors("m_dcl")
    names = "image_features text_features image_keys text_keys image_bank text_bank".split()
    more = {name: z[name] for name in ("image_ids", "bank_ids", "bank_valid")}
    close(m_dcl(*(z[name] for name in names), **more, **options), z["loss_printed" if options else "loss"])


@given(
    st.integers(1, 6), st.integers(0, 8), st.sampled_from(REVERSE), st.sampled_from(OVER), st.sampled_from(KINDS),
    st.sampled_from([1.0, 0.5, "mu"]), st.sampled_from([0.02, 0.1, 2.0]), st.integers(0, 10_000),
)  # fmt: skip
def test_equal_to_the_slow_reference(n, q, reverse, over, kind, weight, epsilon, seed) -> None:
    features, generator = parts(n, q, seed=seed), drawing(seed)
    ids, bank_ids = (torch.randint(0, 5, (size,), generator=generator) for size in (n, q))
    valid = torch.rand(q, generator=generator) < 0.7
    shared = {"reverse": reverse, "positive_weight": weight, "epsilon": epsilon}
    banks = {"image_ids": ids, "bank_ids": bank_ids, "bank_valid": valid}
    lists = [each.tolist() for each in (*features[:4], *(bank[valid] for bank in features[4:]))]
    want = reference.m_dcl(*lists, ids.tolist(), bank_ids[valid].tolist(), over=over, kind=kind, **shared)
    close(m_dcl(*features, **banks, diversity_over=over, diversity=kind, **shared), want)


@given(st.integers(1, 6), st.integers(0, 7), st.integers(0, 4), st.sampled_from(FORMS), st.integers(0, 10_000))
def test_hard_negatives_equal_the_slow_reference(n, m, q, form, seed) -> None:
    features, generator = parts(n, q, seed=seed), drawing(seed)
    ids, bank_ids = (torch.randint(0, n + 2, (size,), generator=generator) for size in (n, q))
    hard = hard_negatives(generator, m, 4, n)
    v, w, *keys = (each.tolist() for each in features)
    slow = hard_reference.Hard(*(each.tolist() for each in hard.values()))
    want = hard_reference.m_dcl(v, w, tuple(keys[:2]), tuple(keys[2:]), ids.tolist(), bank_ids.tolist(), slow)
    close(m_dcl(*features, image_ids=ids, bank_ids=bank_ids, implementation=form, **hard), want)


@pytest.mark.parametrize("reverse", ["paired", "all"])
def test_of_an_empty_bank_and_equal_towers_it_is_dcl_twice(reverse: Any) -> None:
    """Keys that equal the live features, no entries: each bank's two directions are DCL's two."""
    images, texts, *_ = parts(6)
    empty = images.new_zeros(0, 4)
    got = m_dcl(images, texts, images, texts, empty, empty, reverse=reverse)
    torch.testing.assert_close(got, 2 * dcl(images, texts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_valid_or_of_an_anchors_own_image_has_no_effect(form: str) -> None:
    features = parts()
    for reverse in REVERSE:
        passed = {**BANKS, "implementation": form, "reverse": reverse}
        want = m_dcl(*features, **passed)
        moved = [torch.where(VALID[:, None], bank, 1e4) for bank in features[4:]]
        close(m_dcl(*features[:4], *moved, **passed), want)
    one = parts(1, 3)
    own = m_dcl(*one, image_ids=torch.tensor([1]), bank_ids=torch.tensor([1, 1, 1]), implementation=form)
    close(own, m_dcl(*one[:4], *[bank[:0] for bank in one[4:]], implementation=form))  # no negatives
    # ids of the bank alone say nothing: without ids every pair is an image of its own
    close(m_dcl(*one, bank_ids=torch.zeros(3)), m_dcl(*one))
    # hard negatives: an empty place, and an image's own caption among those of others
    hard = m_dcl(*features, **BANKS, **HARD, implementation=form)
    without = {"negatives": HARD["negatives"][1:], "negative_ids": HARD["negative_ids"][1:]}
    close(m_dcl(*features, **BANKS, **without, implementation=form), hard)
    assert abs(hard - m_dcl(*features, **BANKS, implementation=form)) > 1e-4
    for m in (0, 3):
        none = {"negatives": HARD["negatives"][:m], "negative_valid": torch.zeros(m) > 0}
        close(m_dcl(*features, **BANKS, **none, implementation=form), m_dcl(*features, **BANKS))


# -- forms -----------------------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 20), st.sampled_from([1, 3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 999)),
    options=dcl_options(reverse=st.sampled_from(REVERSE), diversity_over=st.sampled_from(OVER)),
    q=st.integers(0, 40),
    ids=st.sampled_from(["none", "batch", "both"]),
    hard=st.sampled_from([None, 0, 9]),
    partly=st.booleans(),
    known=st.booleans(),
    share=st.booleans(),
)
def test_tiles_equal_the_reference(shape, options, q, ids, hard, partly, known, share) -> None:
    n, d, spread, seed = shape
    generator = drawing(seed)
    v, w, *rest = parts(n, q, d, seed=seed, spread=spread)
    of_images, of_entries = (torch.randint(max(1, n), (size,), generator=generator) for size in (n, q))
    options["image_ids"] = None if ids == "none" else of_images
    options["bank_ids"] = of_entries if ids == "both" else None
    options["bank_valid"] = torch.rand(q, generator=generator) < 0.5 if partly else None
    options["anchors"] = slice(n // 3, n // 3 + max(1, n // 2)) if share else None
    if known:
        size = len(range(n)[options["anchors"]]) if share else n
        options["bank_diversity"] = tuple(torch.rand(2, size, generator=generator).double() / 2 + 0.5)
    further = {} if hard is None else hard_negatives(generator, hard, d, n)
    compare_forms(lambda v, w, **more: m_dcl(v, w, *rest, **more), v, w, **options, **further)


def test_which_form_auto_takes(forms_taken: list[tuple[str, str]]) -> None:
    tiles, dense = ({}, HARD), ({"diversity": "entropy"}, {"diversity_gradient": True})
    for options, form in [*((each, "Tiles") for each in tiles), *((each, "Dense") for each in dense)]:
        for reverse in REVERSE:
            m_dcl(*parts(), **BANKS, reverse=reverse, **options)  # type: ignore[arg-type]
        assert set(forms_taken) == {("auto", form)}, options
        forms_taken.clear()
        if form == "Dense":
            with pytest.raises(ValueError, match="implementation='tiled' does not support diversity"):
                m_dcl(*parts(), implementation="tiled", **options)


# -- derivatives -----------------------------------------------------------------------------------------------------


def test_the_live_features_alone_get_a_gradient() -> None:
    live, others = parts()[:2], [*parts()[2:], HARD["negatives"]]
    leaves = [each.clone().requires_grad_() for each in (*live, *others)]
    for form in FORMS:
        for reverse in REVERSE:
            passed = {**BANKS, **HARD, "negatives": leaves[-1], "reverse": reverse, "implementation": form}
            gradients = torch.autograd.grad(m_dcl(*leaves[:6], **passed), leaves, allow_unused=True)
            assert all(each.abs().sum() > 0 for each in gradients[:2]) and gradients[2:] == (None,) * 5


@pytest.mark.parametrize("name", [name for name in CASES if name != "hard"])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form: str, name: str) -> None:
    """First and second, with the weights held, whose gradient stops."""
    loss, live = case(name)
    with tile_shape(**TILE_SHAPES[1]), held_weights(written):
        second_order(lambda *x: loss(*x, implementation=form), *live)


@pytest.mark.parametrize("kind", few(["std", "entropy"]))
@pytest.mark.parametrize("name", ["over the bank", "anchors hard", "all"])
def test_derivatives_through_the_weights(name: str, kind: Any) -> None:
    loss, live = case(name)
    second_order(lambda *x: loss(*x, diversity=kind, diversity_gradient=True, epsilon=0.5), *live)


@pytest.mark.parametrize("name", few(CASES, 2))
def test_transforms_and_gradient_penalties(name: str) -> None:
    loss, live = case(name)
    penalty_of_forms(loss, *live)
    for form in ("auto", *FORMS):
        transforms(lambda *x, form=form: loss(*x, implementation=form), *live)


def test_the_gradient_through_the_weights_is_a_choice() -> None:
    loss, live = case("plain")
    for reverse in REVERSE:
        stopped, through = (
            value_and_gradient(lambda *x, g=g, r=reverse: loss(*x, diversity_gradient=g, reverse=r, epsilon=0.5), *live)
            for g in (False, True)
        )
        close(stopped[0], through[0])
        assert (stopped[1] - through[1]).norm() > 1e-3 * stopped[1].norm()


# -- degenerate batches, precision, compilation, memory --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=str)
def test_degenerate_batches_stay_finite(dtype: torch.dtype) -> None:
    features = parts(6, 5)
    batches = {
        "collapsed": [each[:1].expand_as(each) for each in features],
        "zeros": [each * 0 for each in features],
        "opposite": [features[0], -features[0], features[0], -features[0], *features[4:]],
        "one row": [*(each[:1] for each in features[:4]), *features[4:]],
        "nothing but it": [each[:1] for each in features[:4]] + [each[:0] for each in features[4:]],
    }
    choices: list[dict[str, Any]] = [{"diversity": kind, "diversity_gradient": True} for kind in ("std", "entropy")]
    choices += [{"diversity": "none"}, {"implementation": "tiled"}]
    for name, batch in batches.items():
        images = torch.full((len(batch[0]),), 7)
        for ids in ({}, {"image_ids": images, "bank_ids": torch.full((len(batch[4]),), 7)}):
            for options in choices:
                for reverse in REVERSE:
                    v, w, *rest = (each.to(dtype) for each in batch)
                    passed = {**options, **ids, "reverse": reverse}
                    results = value_and_gradient(lambda *x, r=rest, p=passed: m_dcl(*x, *r, **p), v, w)
                    assert all(each.isfinite().all() for each in results), (name, passed)


@pytest.mark.parametrize("filled", [0, 100])
def test_float32_is_accurate_while_a_bank_fills(filled: int) -> None:
    """Nearly equal rows beside entries of zeros: the variance is about the mean of what counts."""
    features, valid = parts(30, 400, 16, seed=4, spread=1e-3), torch.arange(400) < filled
    features[4:] = [torch.where(valid[:, None], bank, 0) for bank in features[4:]]
    passed = {"epsilon": 1e-3, "bank_valid": valid, "implementation": "tiled"}
    want, got = m_dcl(*features, **passed), m_dcl(*(each.float() for each in features), **passed)
    torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "on_gpu"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
def test_half_features_are_raised(dtype: torch.dtype, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 of the same rounded features, with banks in float16; also where halves are multiplied as on a GPU."""
    monkeypatch.setattr("coder_plugin.contrast.products.multiplies_halves", lambda device: on_gpu)
    *four, image_bank, text_bank = parts(30, 40, 16, seed=1, spread=1.0)
    features = [*(each.to(dtype) for each in four), image_bank.half(), text_bank.half()]
    v, w, *rest = (each.double() for each in features)
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    truth = value_and_gradient(lambda *x: m_dcl(*x, *rest, implementation="reference"), v, w)
    for form in FORMS:
        got = value_and_gradient(lambda *x, f=form: m_dcl(*x, *features[2:], implementation=f), *features[:2])
        assert [each.dtype for each in got] == [torch.float32, dtype, dtype]
        for one, other in zip(got, truth, strict=True):
            assert (one.double() - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize("options", [{}, {"implementation": "reference", "reverse": "all"}], ids=str)
def test_autocast_changes_nothing(options: dict[str, Any]) -> None:
    v, w, *rest = (each.float() for each in parts())
    live = [v.requires_grad_(), w.requires_grad_()]
    want = m_dcl(*live, *rest, **BANKS, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = m_dcl(*live, *rest, **BANKS, **options)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    for one, other in zip(*(torch.autograd.grad(value, live) for value in (got, want)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow  # test_dcl.py compiles tiles, test_compile.py the loss of CODER
@pytest.mark.parametrize("form", ["auto", "tiled"])
def test_compiled_without_a_graph_break(form: str) -> None:
    loss, live = case("hard")
    compiles(lambda *x: loss(*x, implementation=form), *live)


@pytest.mark.parametrize(("q", "m"), [(1 << 16, 0), (0, 1 << 16)], ids=["entries", "hard negatives"])
def test_memory_with_many_candidates(q: int, m: int) -> None:
    """At most 0.25 GB beyond the banks, gradients included, with 4,096 anchors; one matrix of similarities has 1.07 GB."""
    empty = lambda *shape, **of: torch.empty(*shape, device="meta", **of)  # noqa: E731
    live = [empty(4096, 1024, requires_grad=True) for _ in range(2)]
    keys, banks = [empty(4096, 1024) for _ in range(2)], [empty(q, 1024, dtype=torch.float16) for _ in range(2)]
    passed = {
        "image_ids": empty(4096, dtype=torch.int64),
        "bank_diversity": tuple(empty(4096) for _ in range(2)),  # from the bank's running moments
        "bank_ids": empty(q, dtype=torch.int64),
        "bank_valid": empty(q, dtype=torch.bool),
    }
    if m:
        passed |= {"negatives": empty(m, 1024), "negative_ids": empty(m, dtype=torch.int64)}
    assert 0.03e9 <= peak(lambda: torch.autograd.grad(m_dcl(*live, *keys, *banks, **passed), live)) <= 0.25e9


# -- bad input -------------------------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"reverse": "both"}, "reverse must be 'paired', 'all' or 'none', got 'both'"),
    ({"diversity_over": "all"}, "diversity_over must be 'batch', 'bank' or 'batch.bank', got 'all'"),
    ({"mu": 0.0}, "mu must be > 0"),  # dcl's options are checked by the same class
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"bank_ids": torch.zeros(3)}, r"bank_ids must have shape \(7,\), got \(3,\)"),
    ({"image_ids": torch.zeros(3)}, r"image_ids must have shape \(5,\), got \(3,\)"),
    ({"bank_valid": torch.zeros(3) > 0}, r"bank_valid must have shape \(7,\), got \(3,\)"),
    ({"bank_valid": torch.ones(7)}, "bank_valid must be bool, got torch.float32"),
    ({"negative_ids": torch.ones(2)}, "negative_ids and negative_valid need negatives"),  # test_dcl.py has the other faults
    ({"negatives": torch.full((2, 4), 1e80, dtype=torch.float64)}, "negatives holds values of 1.0e[+]80"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_bad_input_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, CoderError), match=message):
        m_dcl(*parts(), **{**BANKS, **options})


# -- the term --------------------------------------------------------------------------------------------------------


def from_function(batch: Mapping[str, Tensor], head: Momentum, options: Mapping[str, Any]) -> Tensor:
    """What a term with these options computes, by the function."""
    options, bank = dict(options), head.bank
    masked, hard = options.pop("mask_same_image", True), options.pop("hard_negatives", False)
    passed = {"image_ids": batch["coder_ids"], "bank_ids": bank.ids} if masked else {}
    if hard:
        ids = batch["coder_negative_ids"].flatten()
        passed |= {"negatives": batch["coder_negative_keys"].flatten(0, 1), "negative_ids": ids, "negative_valid": ids != -2}
    features = [batch[key] for key in ("image_features", "text_features", "coder_image_keys", "coder_text_keys")]
    return m_dcl(*features, bank.image, bank.text, bank_valid=bank.valid, **passed, **options)


TERM_OPTIONS: list[dict[str, Any]] = [
    {}, {"diversity": "none"}, {"diversity_gradient": True}, {"hard_negatives": True}, {"reverse": "all"},
    {"diversity_over": "bank", "epsilon": 0.7}, {"mask_same_image": False, "diversity": "entropy", "epsilon": 0.4},
    {"mu": 0.07, "gamma": 0.1, "epsilon": 0.5, "positive_weight": "mu"}, {"reverse": "none"}, {"diversity_over": "batch"},
    {"effective_negatives": 100}, {"hard_negatives": True, "mask_same_image": False},
]  # fmt: skip


@pytest.mark.parametrize(("options", "filled"), [*((options, True) for options in TERM_OPTIONS), ({}, False)], ids=str)
def test_the_term_equals_its_function(options: dict[str, Any], filled: bool) -> None:
    """Value and gradient, with every option, of which none is without effect."""
    batch, head = outputs(), Momentum(filled=filled)
    leaves = {key: each for key, each in batch.items() if each.requires_grad and key.endswith("_features")}
    values = [
        make_loss(expression("m_dcl", options), {"momentum": head}, local_loss=local)(**batch)["m_dcl_loss"]
        for local in (False, True)
    ]
    values.append(from_function(batch, head, options))
    *ours, theirs = ([each, *torch.autograd.grad(each, list(leaves.values()), allow_unused=True)] for each in values)
    for each in ours:
        torch.testing.assert_close(each, theirs, **EXACT)
    for key in options:
        without = {name: each for name, each in options.items() if name != key}
        if filled and key != "diversity_gradient":
            assert abs(from_function(batch, head, without) - values[-1]) > 1e-6, key


@pytest.mark.parametrize(
    ("options", "message"), [*BAD_OPTIONS, ({"warmup": -1}, "warmup must be >= 0, got -1")], ids=lambda each: str(each)
)
def test_options_out_of_range_are_refused_before_the_first_batch(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MDCL(**options)
    if "warmup" not in options:
        with pytest.raises(ValueError, match=message):
            m_dcl(*parts(), **options)
    with pytest.raises(CoderError):
        Objective.parse(expression("m_dcl", options))


def test_what_the_term_needs_and_supports() -> None:
    everything = {"same_image", "hard_negatives", "ring"}
    keys = ("image_features", "text_features", "coder_ids", "coder_image_keys", "coder_text_keys")
    assert (MDCL().requires, MDCL().gathers, MDCL().optional, MDCL().supports) == (keys, keys, (), everything)
    hard = MDCL(hard_negatives=True)
    assert hard.requires == (*keys, "coder_negative_keys", "coder_negative_ids") == hard.gathers
    for options in ({"diversity": "entropy"}, {"diversity_gradient": True}, {"reverse": "all"}):
        assert MDCL(**options).supports == everything - {"ring"}  # type: ignore[arg-type]


@pytest.mark.parametrize("others", ["", "m_dcl + "])
def test_the_keys_are_stashed_once_and_written_after_the_step(others: str) -> None:
    batch, head = outputs(), Momentum(filled=False)
    loss = make_loss(f"{others}dcl(diversity_over='batch+bank')", {"momentum": head})
    loss(**batch), loss(**batch)
    assert int(head.bank.count) == 0
    head.post_step(), head.post_step()
    assert int(head.bank.count) == 12
    assert torch.equal(head.bank.text[:12], batch["coder_text_keys"])
    assert torch.equal(head.bank.ids[:12], batch["coder_ids"])


def test_silent_until_the_bank_is_warm() -> None:
    batch, head = outputs(), Momentum(filled=False)
    loss = make_loss("m_dcl(warmup=13)", {"momentum": head})
    first = loss(**batch)["m_dcl_loss"]
    (gradient,) = torch.autograd.grad(first, batch["image_features"])
    assert first == 0 and not gradient.any()
    head.post_step()
    assert loss(**batch)["m_dcl_loss"] == 0  # 12 of 13 entries
    head.post_step()
    full = make_loss("m_dcl(warmup=4096)", {"momentum": head})  # more than the bank can hold: when it is full
    close(loss(**batch)["m_dcl_loss"], from_function(batch, head, {}))
    close(full(**batch)["m_dcl_loss"], from_function(batch, head, {}))


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("m_dcl@concepts", "momentum banks and generated texts have the backbone's own features only"),
        ("m_dcl(reverse=both)", "reverse=both must be paired or all or 'none'"),
    ],
)
def test_objectives_that_make_no_sense(objective: str, message: str) -> None:
    with pytest.raises(CoderError, match=message):
        resolve(Objective.parse(objective), KEYS)


# -- several ranks ---------------------------------------------------------------------------------------------------

SHARED = "dcl(diversity_over='batch+bank',hard_negatives=true)"
#: Each way to the weights and to what travels, and terms that share pairs and keys; on three ranks every option of the term.
TERMS = (*(expression("m_dcl", options) for options in TERM_OPTIONS[:7]), f"2*m_dcl(hard_negatives=true) + {SHARED}")
MORE = (
    *(expression("m_dcl", options) for options in TERM_OPTIONS),
    *drawn_terms("m_dcl", 1, reverse=REVERSE, diversity_over=OVER),
    f"2*m_dcl + {SHARED}",
)


@pytest.mark.parametrize(("terms", "ranks"), [(TERMS, 2), pytest.param(MORE, 3, marks=pytest.mark.slow)], ids=["two", "three"])
def test_ranks_equal_one_process_with_the_joint_batch(terms: tuple[str, ...], ranks: int) -> None:
    every_way_equals_one_process(terms, ranks)


@pytest.mark.parametrize(
    ("term", "large", "ring"),
    [
        ("m_dcl()", 4, 22),
        ("m_dcl(hard_negatives=true)", 3, 26),
        ("m_dcl(diversity='none')", 2, 9),
        ("m_dcl(diversity_gradient=true)", 4, None),
    ],
)
def test_the_number_of_collectives(term: str, large: int, ring: int | None) -> None:
    """One gather and the return of its gradient; in a large batch also the largest weights, of batch and bank."""
    number = collectives(TERMS, term)
    assert number.pop("ring", 0) <= (ring or 0) and number == {"all": 2, "local": 2, "large": large}


def test_each_tensor_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[Tensor]] = []

    def gather_together(tensors: list[Tensor], **_: Any) -> list[Tensor]:
        sent.append(list(tensors))
        return [torch.cat([each, each]) for each in tensors]

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "gather_together", gather_together)
    batch = outputs()
    loss = make_loss("dcl(diversity_over='batch+bank') + m_dcl + clip", {"momentum": Momentum()})
    loss(**batch, logit_scale=torch.tensor(3.0))
    names = ("image_features", "text_features", "coder_image_keys", "coder_text_keys", "coder_ids")
    assert sorted(map(id, sent[0])) == sorted(id(batch[name]) for name in names) and len(sent) == 1
