"""Losses by tiles: equal to the reference in value and gradient, in little memory, and without a graph break."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coder_plugin.functional import dcl, m_dcl, tiled_pairs
from coder_plugin.model import create_loss, create_model
from tests.peak_memory import peak
from tests.tiles import compare, rows, small_tiles, value_and_gradient

__all__ = ["small_tiles"]

options = st.fixed_dictionaries(
    {
        "mu": st.sampled_from([0.003, 0.05, 0.1, 1.0]),
        "gamma": st.sampled_from([0.0, 0.3]),
        "epsilon": st.sampled_from([0.01, 0.1]),
        "diversity": st.sampled_from(["std", "std", "none"]),
        "positive_weight": st.sampled_from([0.0, 1.0, "mu"]),
        "effective_negatives": st.sampled_from([None, 50]),
    }
)
shapes = st.tuples(
    st.integers(1, 40), st.sampled_from([1, 3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2**31)
)


@settings(max_examples=200, deadline=None)
@given(shapes, options, st.sampled_from(["distinct", "some", "one"]), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_dcl_equals_its_reference(shape, chosen, images, with_bank, first, share) -> None:
    n, d, spread, seed = shape
    generator = torch.Generator().manual_seed(seed)
    features = rows(generator, n, d, spread), rows(generator, n, d, spread)
    ids = {"distinct": None, "some": torch.randint(max(1, n // 2), (n,), generator=generator), "one": torch.zeros(n)}[images]
    anchors = None
    if share < 0.5:
        start = int(first * (n - 1))
        anchors = slice(start, start + max(1, int(2 * share * (n - start))))
    size = n if anchors is None else anchors.stop - anchors.start
    bank = tuple(torch.rand(2, size, generator=generator, dtype=torch.float64) / 2 + 0.5) if with_bank else None
    compare(dcl, *features, image_ids=ids, anchors=anchors, bank_diversity=bank, **chosen)


@settings(max_examples=200, deadline=None)
@given(
    shapes,
    options,
    st.integers(0, 60),
    st.sampled_from(["paired", "all", "none"]),
    st.sampled_from(["batch", "bank", "batch+bank"]),
    st.sampled_from(["none", "batch", "both"]),
    st.booleans(),
    st.booleans(),
)
def test_m_dcl_equals_its_reference(shape, chosen, q, reverse, over, ids, partly, share) -> None:
    n, d, spread, seed = shape
    generator = torch.Generator().manual_seed(seed)
    parts = [rows(generator, size, d, spread) for size in (n, n, n, n, q, q)]
    of_images = torch.randint(max(1, n), (n,), generator=generator)
    of_entries = torch.randint(max(1, n), (q,), generator=generator)
    compare(
        lambda v, w, **rest: m_dcl(v, w, *parts[2:], **rest),
        *parts[:2],
        image_ids=None if ids == "none" else of_images,
        bank_ids=of_entries if ids == "both" else None,
        bank_valid=torch.rand(q, generator=generator) < 0.5 if partly else None,
        reverse=reverse,
        diversity_over=over,
        anchors=slice(n // 3, n // 3 + max(1, n // 2)) if share else None,
        **chosen,
    )


def test_the_gram_form_of_the_variance_and_images_repeated_too_often_for_it(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    features = rows(generator, 60, 8, 1.0), rows(generator, 60, 8, 1.0)
    grams = []
    original = tiled_pairs._gram_variance
    monkeypatch.setattr(tiled_pairs, "_gram_variance", lambda *args: grams.append(1) or original(*args))
    for ids, used in ((None, 2), (torch.arange(60) // 3, 2), (torch.arange(60) // 20, 0)):
        compare(dcl, *features, image_ids=ids)
        assert len(grams) == 2 * used  # for tiles of both shapes
        grams.clear()


@pytest.mark.parametrize("filled", [0, 100])
def test_float32_is_accurate_while_a_bank_fills(filled) -> None:
    """Nearly equal rows beside entries of zeros: the variance is about the mean of what counts."""
    generator = torch.Generator().manual_seed(4)
    parts = [rows(generator, size, 16, 1e-3) for size in (30, 30, 30, 30, 400, 400)]
    valid = torch.arange(400) < filled
    for bank in parts[4:]:
        bank[~valid] = 0
    passed = {"epsilon": 1e-3, "bank_valid": valid, "implementation": "tiled"}
    want = m_dcl(*parts, **passed)
    torch.testing.assert_close(m_dcl(*(part.float() for part in parts), **passed), want.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_as_near_to_the_truth_as_the_reference(dtype) -> None:
    """Against float64 of the same rounded features: 1e-5 of the largest gradient in float32, the type's own rounding below."""
    generator = torch.Generator().manual_seed(1)
    pair = [rows(generator, 30, 16, 1.0).to(dtype) for _ in range(2)]
    bank = [rows(generator, size, 16, 1.0).half() for size in (30, 30, 40, 40)]
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for function in (dcl, lambda v, w, **rest: m_dcl(v, w, *(each.to(v.dtype) for each in bank[:2]), *bank[2:], **rest)):
        truth = value_and_gradient(lambda v, w, f=function: f(v, w, implementation="reference"), *(x.double() for x in pair))
        got = value_and_gradient(lambda v, w, f=function: f(v, w, implementation="tiled"), *pair)
        assert got[0].dtype == torch.float32 and got[1].dtype == dtype
        for one, other in zip(got, truth, strict=True):
            assert (one.double() - other).abs().max() <= bound * other.abs().max()


def test_one_tile_of_rows_that_differ_much() -> None:
    """In float32 the exponentials of one row vanish about another row's maximum: 0.5 / 0.003 is above 88."""
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 0.5, 0.2], [0.9, 1.0, 0.5], [1.0, 0.1, 1.0]])
    loss = lambda *x, form: dcl(*x, mu=0.003, diversity="none", implementation=form)  # noqa: E731
    want = value_and_gradient(lambda *x: loss(*x, form="reference"), images.double(), texts.double())
    got = value_and_gradient(lambda *x: loss(*x, form="tiled"), images, texts)
    torch.testing.assert_close(got, [each.float() for each in want], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("anchors", [None, slice(3, 9)])
def test_autocast_changes_nothing(anchors) -> None:
    generator = torch.Generator().manual_seed(2)
    features = [rows(generator, 20, 8, 1.0).float().requires_grad_() for _ in range(2)]
    rest = [rows(generator, size, 8, 1.0).float() for size in (20, 20, 30, 30)]
    for loss in (dcl, lambda v, w, **passed: m_dcl(v, w, *rest, **passed)):
        want = torch.autograd.grad(loss(*features, anchors=anchors), features)
        with torch.autocast("cpu", torch.bfloat16):
            got = torch.autograd.grad(loss(*features, anchors=anchors), features)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_auto_takes_the_reference_where_tiles_do_not_apply() -> None:
    generator = torch.Generator().manual_seed(3)
    features = rows(generator, 9, 4, 1.0), rows(generator, 9, 4, 1.0)
    for chosen in ({"diversity": "entropy"}, {"diversity_gradient": True}):
        reference = value_and_gradient(lambda v, w, o=chosen: dcl(v, w, implementation="reference", **o), *features)
        auto = value_and_gradient(lambda v, w, o=chosen: dcl(v, w, **o), *features)
        assert all(torch.equal(one, other) for one, other in zip(auto, reference, strict=True))
        with pytest.raises(ValueError, match="implementation='tiled' needs features"):
            dcl(*features, implementation="tiled", **chosen)
    with pytest.raises(ValueError, match="implementation='tiled' needs features"):
        dcl(features[0][:, None], features[1], implementation="tiled")
    with pytest.raises(ValueError, match="'auto', 'reference', 'tiled' or 'triton', got 'fast'"):
        dcl(*features, implementation="fast")


def test_the_loss_of_a_model_takes_the_implementation(monkeypatch) -> None:
    """``create_loss(implementation=...)`` reaches every term that has tiles."""
    expression = "3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl"
    model = create_model("coder-tiny", loss=expression)
    chosen: list[str] = []
    monkeypatch.setattr("coder_plugin.functional.dcl_loss.use_tiles", lambda form, *_, **__: chosen.append(form) or False)
    monkeypatch.setattr("coder_plugin.functional.m_dcl_loss.use_tiles", lambda form, *_, **__: chosen.append(form) or False)
    outputs = model(torch.randn(4, 3, 64, 64), torch.randint(1, 99, (4, 40)), image_id=torch.arange(4))
    for form in ("reference", "tiled"):
        create_loss(expression, model=model, implementation=form)(**outputs)
        assert chosen == [form] * 3
        chosen.clear()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_dcl_at_32768_pairs(monkeypatch) -> None:
    """At most 0.5 GB, gradients included, where the matrix of similarities alone has 4.3 GB."""
    monkeypatch.undo()
    features = [torch.empty(32_768, 1024, device="meta", requires_grad=True) for _ in range(2)]
    ids = torch.empty(32_768, dtype=torch.int64, device="meta")
    assert 0.27e9 <= peak(lambda: torch.autograd.grad(dcl(*features, image_ids=ids), features)) <= 0.5e9


def test_memory_of_m_dcl_with_a_million_entries(monkeypatch) -> None:
    """At most 1 GB beyond the banks, with 4,096 anchors and 1,048,576 entries."""
    monkeypatch.undo()
    live = [torch.empty(4096, 1024, device="meta", requires_grad=True) for _ in range(2)]
    keys = [torch.empty(4096, 1024, device="meta") for _ in range(2)]
    banks = [torch.empty(1 << 20, 1024, dtype=torch.float16, device="meta") for _ in range(2)]
    passed = {
        "image_ids": torch.empty(4096, dtype=torch.int64, device="meta"),
        "bank_ids": torch.empty(1 << 20, dtype=torch.int64, device="meta"),
        "bank_valid": torch.empty(1 << 20, dtype=torch.bool, device="meta"),
        "bank_diversity": tuple(torch.empty(4096, device="meta") for _ in range(2)),  # from the bank's running moments
    }
    assert 0.03e9 <= peak(lambda: torch.autograd.grad(m_dcl(*live, *keys, *banks, **passed), live)) <= 1e9


def test_the_count_of_memory() -> None:
    """The matrix of 2,000 pairs and its gradient count; a freed tensor does not."""
    features = torch.empty(2000, 8, device="meta", requires_grad=True)
    assert 2000**2 * 4 <= peak(lambda: (features @ features.T).sum().backward()) <= 3 * 2000**2 * 4
    assert peak(lambda: [torch.empty(1000, device="meta").sum() for _ in range(10)]) < 3 * 4000


def test_no_graph_break_under_compile() -> None:
    torch._dynamo.reset()
    function = lambda v, w, ids: dcl(v, w, image_ids=ids, implementation="tiled")  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(6)
    features = [rows(generator, 12, 8, 1.0).requires_grad_() for _ in range(2)]
    ids = torch.arange(12) // 2
    for _ in range(2):
        got = torch.autograd.grad(compiled(*features, ids), features)
        want = torch.autograd.grad(dcl(*features, image_ids=ids, implementation="reference"), features)
        torch.testing.assert_close(got, want)
