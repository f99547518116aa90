"""SelfAlign's context relation alignment: values, tiles, padding, derivatives, the term on one process and several."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.errors import CoderError
from coder_plugin.functional import cosine, cra, triplet
from coder_plugin.losses import cra as cra_module
from coder_plugin.losses.cra import CRA
from tests import gloo
from tests.losses import selfalign
from tests.losses.checks import compiles
from tests.losses.drawn import close, drawing, same_options, second_order, transforms, value_and_gradient, vectors
from tests.losses.selfalign import PAIRS, D, Model, contexts_and_locals, joint, numbers, sets, valid
from tests.references import selfalign as reference
from tests.references.triplet import triplet as reference_triplet

IDS = torch.tensor([5, 5, 6, 7])


# -- values ----------------------------------------------------------------------------------------------------------


def test_expected_values() -> None:
    z = vectors("selfalign")
    inputs = z["global_context"], z["regions"], z["region_mask"]
    close(cra(*inputs, hard_negatives=8), z["cra_hard8"])
    close(cra(*inputs, hard_negatives=10**6), z["cra_all"])


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 8, 512]),
    st.sampled_from([0.05, 0.7]),
    st.integers(0, 99),
)
def test_equals_the_slow_reference(items, hard_negatives, temperature, seed) -> None:
    (local, mask), ids = sets([length for length, _ in items], 5, seed), [name for _, name in items]
    context = numbers(len(items), D, seed=seed)
    options = {"temperature": temperature, "hard_negatives": hard_negatives}
    got = cra(context, local, mask, image_ids=torch.tensor(ids) + 2**62, **options)
    slow = context.tolist(), valid(local, mask)
    close(got, reference.cra(*slow, ids, **options))
    close(cra(context, local, mask, **options), reference.cra(*slow, range(len(ids)), **options))
    assert got.dtype == torch.float64 and got.shape == () and got >= 0


def test_by_hand() -> None:
    """Anchors along x and y; a local of cosines 1 and 0, and one of 0 and 1: log(1 + exp(-1 / 0.5)) each."""
    axes, mask = torch.eye(2), torch.ones(2, 1, dtype=torch.bool)
    got = cra(3 * axes, 2 * axes[:, None], mask, temperature=0.5)
    assert got.item() == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)
    # one negative of two: the hardest, of cosine 1, as near as the positive
    local = torch.stack([axes[:1].expand(2, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])])
    anchors, mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    got = cra(anchors, local, mask, temperature=0.5, hard_negatives=1)
    assert got.item() == pytest.approx((math.log(2) + (math.log(2) + math.log(1 + math.exp(4))) / 2) / 2, rel=1e-6)


def test_nothing_to_contrast_is_zero() -> None:
    context, local, mask = contexts_and_locals()
    assert cra(context[:1], local[:1], mask[:1]).item() == 0
    assert cra(context, local, mask, image_ids=torch.zeros(4, dtype=torch.int64)).item() == 0
    assert cra(context, local, torch.zeros_like(mask)).item() == 0
    without = mask.clone()
    without[1] = False  # a pair without locals counts as zero, and has no negatives for the others
    keep = torch.tensor([0, 2, 3])
    value, of_context = value_and_gradient(lambda c: cra(c, local, without), context)
    close(value, cra(context[keep], local[keep], mask[keep]) * 3 / 4)
    assert not of_context[1].any()


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard_negatives", [2, 512])
def test_derivatives(hard_negatives: int) -> None:
    context, local, mask = contexts_and_locals()
    local, mask = local[:, :3], mask[:, :3]

    def loss(context: Tensor, local: Tensor) -> Tensor:
        options = {"hard_negatives": hard_negatives, "temperature": 0.3}
        return cra(context, local, mask, image_ids=IDS, **options).square()

    second_order(loss, context, local)
    transforms(loss, context, local)
    gradient = value_and_gradient(lambda c, x: cra(c, x, mask, image_ids=IDS), context, local)[2]
    assert (gradient[~mask] == 0).all() and (gradient[mask].norm(dim=-1) > 0).all()


@pytest.mark.parametrize("kept", [1, 4])
def test_finite_gradients_at_zero_vectors_and_single_pairs(kept: int) -> None:
    _, regions, mask = contexts_and_locals()
    regions = regions[:kept].float()
    regions[0, 0] = 0
    context = torch.zeros(kept, D)
    context[1:] = 1
    results = value_and_gradient(lambda c, x: cra(c, x, mask[:kept]), context, regions)
    assert all(torch.isfinite(x).all() for x in results)


# -- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 512])
@pytest.mark.parametrize("fill", [math.inf, math.nan])
def test_padding_counts_nowhere(fill: float, count: int) -> None:
    """Padding changes neither the value nor the gradient, whatever and however much it holds."""

    def run(context: Tensor, local: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = lambda c, x: cra(c, x, mask, hard_negatives=count)  # noqa: E731
        value, of_context, of_local = value_and_gradient(loss, context, local)
        assert (of_local[~mask] == 0).all()
        return value, of_context, of_local[mask]

    for extra in (0, 3):
        for one, other in zip(run(*contexts_and_locals(fill, extra)), run(*contexts_and_locals()), strict=True):
            close(one, other)


def test_the_order_of_pairs_and_the_length_of_features_do_not_matter() -> None:
    context, local, mask = contexts_and_locals()
    order, factors = torch.tensor([2, 0, 3, 1]), torch.linspace(0.01, 90, 4, dtype=torch.float64)
    wanted = cra(context, local, mask, image_ids=IDS, hard_negatives=3)
    close(cra(context[order], local[order], mask[order], image_ids=IDS[order], hard_negatives=3), wanted)
    scaled = context * factors[:, None], local * factors[:, None, None]
    close(cra(*scaled, mask, image_ids=IDS, hard_negatives=3), wanted)


# -- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tile", "count"), [(1, 4), (25, 1), (40, 512), (79, 4)])
def test_tiles_are_one_tile(monkeypatch: pytest.MonkeyPatch, tile: int, count: int) -> None:
    """A row, one of 20 and more, two, three of four at once: value and gradient are those of all at once."""
    context, local, mask = contexts_and_locals()

    def run() -> list[Tensor]:
        loss = lambda c, x: cra(c, x, mask, image_ids=IDS, hard_negatives=count)  # noqa: E731
        return value_and_gradient(loss, context, local)

    wanted = run()
    monkeypatch.setattr(cra_module, "_TILE_SIZE", tile)
    monkeypatch.setattr(cra_module, "_MIN_ROWS", 1)
    for got, each in zip(run(), wanted, strict=True):
        close(got, each)


# -- precision and compilation ---------------------------------------------------------------------------------------


def test_half_types_autocast_and_compilation() -> None:
    context, local, mask = contexts_and_locals()
    loss = lambda c, x: cra(c, x, mask, image_ids=IDS, hard_negatives=4)  # noqa: E731
    for dtype in (torch.bfloat16, torch.float16):
        got = loss(context.to(dtype), local.to(dtype))
        assert got.dtype == torch.float32
        close(got, loss(context.to(dtype).double(), local.to(dtype).double()), rtol=1e-5, atol=1e-5)
    leaves = [x.float().requires_grad_() for x in (context, local)]
    want = loss(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = loss(*leaves)
    assert torch.equal(got, want) and got.dtype == torch.float32
    for one, other in zip(*(torch.autograd.grad(x, leaves) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    compiles(loss, context, local)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_context": torch.zeros(1, D)}, r"global_context and local_context .* got \(1, 5\) and \(4, 5, 5\)"),
        ({"global_context": torch.full((4, D), 1e30)}, "global_context holds values"),
        ({"local_context": torch.zeros(4, D)}, "local_mask must"),
        ({"local_mask": torch.ones(4, 5)}, "local_mask must be a bool tensor"),
        ({"image_ids": torch.arange(3)}, r"image_ids must have shape \(4,\), got \(3,\)"),
    ],
)
def test_bad_input_is_named(change: dict[str, Tensor], message: str) -> None:
    inputs = dict(zip(("global_context", "local_context", "local_mask"), contexts_and_locals(), strict=True))
    with pytest.raises((ValueError, CoderError), match=message):
        cra(**{**inputs, **change})
    with pytest.raises(ValueError, match="b >= 1 pairs"):
        cra(*(x[:0] for x in contexts_and_locals()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be > 0"),
        ({"temperature": math.inf}, "temperature must be > 0"),
        ({"hard_negatives": 0}, "hard_negatives must be >= 1"),
        ({"margin": math.nan}, "margin must be finite, got nan"),
        ({"reduction": "max"}, "reduction must be 'mean' or 'sum', got 'max'"),
        ({"ca_on": "all"}, "ca_on must be 'context', 'combined' or 'none', got 'all'"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CRA(**options)
    if {"temperature", "hard_negatives"} & options.keys():
        with pytest.raises(ValueError, match=message):
            cra(*contexts_and_locals(), **options)


# -- the term --------------------------------------------------------------------------------------------------------

#: label: objective, options of heads
LOSSES: dict[str, selfalign.Loss] = {
    "cra": ("cra(hard_negatives=4)", {}),
    "not masked": ("cra(hard_negatives=4,mask_same_image=false)", {}),
    "all negatives": ("cra(hardest=false,margin=0.5,temperature=0.2)", {}),
    "sum": ("cra(hard_negatives=7,reduction=sum,margin=0.5)", {}),
    "sum all": ("cra(hard_negatives=7,reduction=sum,hardest=false,margin=0.5)", {}),
    "combined": ("cra(hard_negatives=4,ca_on=combined,margin=0.5)", {}),
    "combined sum": ("cra(hard_negatives=1,ca_on=combined,reduction=sum,margin=0.5)", {}),
    "combined weighted": ("cra(hard_negatives=4,ca_on=combined,margin=0.5)", {"contexts.weight": 0.3}),
    "mean of cosines": ("cra(hard_negatives=4,ca_on=combined)", {"contexts.score": "mean_of_cosines"}),
    "without triplet": ("cra(hard_negatives=4,ca_on='none')", {}),
    "text_global": ("cra(hard_negatives=4)", {"contexts.branches": "text_global"}),
    "image_global": ("cra(hard_negatives=4)", {"contexts.branches": "image_global", "contexts.gate": "mlp"}),
    "without contrast": ("cra", {"contexts.branches": "none"}),
    "all terms": ("triplet(reduction=sum) + 0.5*lca + 2*cra(hard_negatives=4,reduction=sum)", {}),
}
CASES = [(name, False) for name in LOSSES]
CASES += [(name, True) for name in ("cra", "sum", "sum all", "combined", "combined weighted", "all terms")]
#: Cases on two ranks: one for each way in which ranks change the computation. The slow test has all, on three ranks.
FEW = [(name, False) for name in ("not masked", "all negatives", "mean of cosines", "text_global", "all terms")]
FEW += [(name, True) for name in ("cra", "sum all", "combined", "all terms")]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "all terms"])
def test_the_term_equals_its_functions(name: str) -> None:
    model, batch = Model(LOSSES[name], local_loss=name.startswith("combined")), joint(2)
    out, options = model(batch), dict(model.objective.terms[0].options)
    got = model.loss()(**out)
    ids = batch["image_id"] if options.get("mask_same_image", True) else None
    contrast = {key: options[key] for key in ("temperature", "hard_negatives") if key in options}
    branches = [
        cra(*(out[key] for key in keys), image_ids=ids, **contrast)
        for one, other in (("text", "image"), ("image", "text"))
        if (keys := (f"coder_{one}_guide", f"coder_{other}_locals", f"coder_{other}_locals_mask"))[0] in out
    ]
    assert len(branches) == {"text_global": 1, "image_global": 1, "without contrast": 0}.get(name, 2)
    wanted = {"cra_contrast_loss": sum(branches) / 2} if branches else {}
    score = cosine(out["coder_image_contexts"], out["coder_text_contexts"])
    if options.get("ca_on") == "combined":
        score = (0.3 if name == "combined weighted" else 1.0) * score
        score = score + cosine(out["image_features"], out["text_features"])
    if options.get("ca_on") != "none":
        hinge = {key: options[key] for key in ("margin", "hardest", "reduction") if key in options}
        wanted["cra_triplet_loss"] = triplet(score, image_ids=ids, **hinge)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        close(got[key], value)
        assert value > 0.01


def test_the_combined_hinge_takes_the_best_view() -> None:
    model, batch = Model(LOSSES["combined"]), joint(2)
    out = model(batch)
    views = torch.randn(2 * PAIRS, 3, D, generator=drawing(1), dtype=torch.float64)
    out["image_features"] = views = normalize(views, dim=-1)
    base = torch.einsum("ivd,td->itv", views, out["text_features"]).amax(2)
    score = base + out["coder_image_contexts"] @ out["coder_text_contexts"].T
    close(model.loss()(**out)["cra_triplet_loss"], triplet(score, margin=0.5, image_ids=batch["image_id"]))


@pytest.mark.parametrize("weight", [0.3, 2.5])
def test_the_combined_hinge_weighs_the_context_score(weight: float) -> None:
    """S_b + weight * S_c, the score that retrieval uses, against one pair at a time."""
    model, batch = Model(("cra(ca_on=combined,margin=0.5)", {"contexts.weight": weight})), joint(2)
    out, ids = model(batch), batch["image_id"].tolist()

    def products(image: str, text: str) -> list[list[float]]:
        images, texts = out[image].tolist(), out[text].tolist()
        return [[math.fsum(a * b for a, b in zip(v, w, strict=True)) for w in texts] for v in images]

    base, context = products("image_features", "text_features"), products("coder_image_contexts", "coder_text_contexts")
    both = [list(zip(*rows, strict=True)) for rows in zip(base, context, strict=True)]
    score, plain = ([[b + factor * c for b, c in row] for row in both] for factor in (weight, 1))
    wanted = reference_triplet(score, ids, margin=0.5)
    assert model.loss()(**out)["cra_triplet_loss"].item() == pytest.approx(wanted, rel=1e-10)
    assert abs(reference_triplet(plain, ids, margin=0.5) - wanted) > 1e-3


def test_options_of_the_term_are_those_of_its_functions() -> None:
    shared = {"image_ids", "gather", "exchange"}
    own = {"margin", "hardest", "reduction", "ca_on", "mask_same_image"}
    same_options(CRA, cra, only_term=own, only_function=shared)
    tensors = {
        "image_ids", "text_to_image", "anchors", "negative_similarity", "negative_ids", "negative_valid",
    }  # fmt: skip
    own = {"temperature", "hard_negatives", "ca_on", "mask_same_image"}
    same_options(CRA, triplet, only_term=own, only_function=tensors)
    assert CRA().supports == {"same_image", "views"}


# -- several ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(2, FEW), pytest.param((3, CASES), marks=pytest.mark.slow)], ids=["two", "three"])
def results(request: pytest.FixtureRequest) -> list[dict[tuple[str, bool], Any]]:
    ranks, cases = request.param
    return gloo.run(selfalign.steps, LOSSES, cases, ranks, ranks=ranks, timeout=240)


def test_ranks_equal_one_process_with_the_joint_batch(results) -> None:
    for name, local_loss in results[0]:
        selfalign.ranks_equal_one_process(LOSSES[name], [result[name, local_loss] for result in results])


def test_the_comparison_can_fail(results) -> None:
    """Each option matters, and the ranks' own shares differ."""
    for other in ("not masked", "all negatives"):
        one, two = (selfalign.alone(LOSSES[name], len(results))["losses"] for name in ("cra", other))
        assert one != pytest.approx(two, rel=1e-4)
    for name in ("sum all", "combined", "all terms"):
        local = [sum(result[name, True]["losses"].values()) for result in results]
        assert max(local) - min(local) > 1e-3, name
