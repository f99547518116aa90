"""M-DCL, concepts and prototypes as functions: hand values, slow references, float64 vectors, gradients, bad input."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from coder_plugin.functional import concept_embedding, concept_graph, dcl, m_dcl, pgc
from tests.references import bank as reference

VECTORS = Path(__file__).resolve().parents[2] / "shared" / "data" / "vectors"


def vectors(name: str) -> dict:
    path = VECTORS / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"expected values not at hand: {path}")
    return {key: torch.from_numpy(value) if value.ndim else value.item() for key, value in np.load(path).items()}


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def banks(n: int = 5, q: int = 7, seed: int = 0) -> list[Tensor]:
    return [*(unit(n, 4, seed=seed + i) for i in range(4)), *(unit(q, 4, seed=seed + 10 + i) for i in range(2))]


IDS, BANK_IDS = torch.tensor([1, 2, 3, 1, 4]), torch.tensor([9, 1, 2, 8, 8, 5, 3])
VALID = torch.tensor([True, True, False, True, True, True, False])


@pytest.mark.parametrize("extra", [{}, {"positive_weight": "mu"}])
def test_m_dcl_meets_the_expected_values(extra):
    z = vectors("m_dcl")
    names = "image_features text_features image_keys text_keys image_bank text_bank".split()
    more = {name: z[name] for name in ("image_ids", "bank_ids", "bank_valid")}
    got = m_dcl(*(z[name] for name in names), **more, **extra)
    assert got.item() == pytest.approx(z["loss_printed" if extra else "loss"], rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(0, 8),
    st.sampled_from(["paired", "all", "none"]),
    st.sampled_from(["batch", "bank", "batch+bank"]),
    st.sampled_from(["std", "entropy", "none"]),
    st.sampled_from([1.0, 0.5, "mu"]),
    st.integers(0, 10_000),
)
def test_m_dcl_equals_the_slow_reference(n, q, reverse, over, kind, weight, seed):
    parts = banks(n, q, seed)
    generator = torch.Generator().manual_seed(seed)
    ids, bank_ids = (torch.randint(0, 5, (size,), generator=generator) for size in (n, q))
    valid = torch.rand(q, generator=generator) < 0.7
    got = m_dcl(
        *parts,
        image_ids=ids,
        bank_ids=bank_ids,
        bank_valid=valid,
        reverse=reverse,
        diversity_over=over,
        diversity=kind,
        positive_weight=weight,
    )
    lists = [part.tolist() for part in (*parts[:4], *(bank[valid] for bank in parts[4:]))]
    options = {"reverse": reverse, "over": over, "kind": kind, "positive_weight": weight}
    want = reference.m_dcl(*lists, ids.tolist(), bank_ids[valid].tolist(), **options)
    assert got.item() == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_m_dcl_of_an_empty_bank_and_equal_towers_is_dcl_twice():
    """Keys that equal the live features, no entries: each bank's two directions are DCL's two."""
    images, texts = unit(6, 4), unit(6, 4, seed=1)
    empty = images.new_zeros(0, 4)
    got = m_dcl(images, texts, images, texts, empty, empty)
    torch.testing.assert_close(got, 2 * dcl(images, texts), rtol=1e-12, atol=1e-12)


def test_m_dcl_moves_the_live_features_alone():
    parts = [part.requires_grad_() for part in banks()]
    m_dcl(*parts, image_ids=IDS, bank_ids=BANK_IDS, bank_valid=VALID, reverse="all").backward()
    assert all(part.grad.abs().sum() > 0 for part in parts[:2]) and all(part.grad is None for part in parts[2:])


@pytest.mark.parametrize("reverse", ["paired", "all", "none"])
@pytest.mark.parametrize("through", [False, True])
def test_m_dcl_gradients(reverse, through):
    live, rest = banks()[:2], banks()[2:]
    options = {"image_ids": IDS, "bank_ids": BANK_IDS, "bank_valid": VALID, "reverse": reverse}
    options |= {"diversity_gradient": True} if through else {"diversity": "none"}
    live = [part.requires_grad_() for part in live]
    assert torch.autograd.gradcheck(lambda *features: m_dcl(*features, *rest, **options), live)


def test_m_dcl_ignores_what_is_not_valid_and_masks_its_own_image():
    parts = banks()
    options = {"image_ids": IDS, "bank_ids": BANK_IDS, "bank_valid": VALID}
    want = m_dcl(*parts, **options)
    for bank in parts[4:]:
        bank[~VALID] = 1e4
    torch.testing.assert_close(m_dcl(*parts, **options), want)
    one = m_dcl(*banks(1, 3), image_ids=torch.tensor([1]), bank_ids=torch.tensor([1, 1, 1]))
    two = m_dcl(*banks(1, 3)[:4], *[bank[:0] for bank in banks(1, 3)[4:]])
    torch.testing.assert_close(one, two)  # nothing but entries of its own image: no negatives


@pytest.mark.parametrize("function", ["dcl", "m_dcl"])
def test_effective_negatives_keep_the_scale(function):
    """Every negative twice: the loss of the plain sum grows, that of a stated number does not."""
    parts = banks(6, 12)
    if function == "dcl":
        images, texts = parts[0], parts[1]
        twice = torch.cat([images, images]), torch.cat([texts, texts])
        ids = torch.arange(6).repeat(2)

        def loss(n: int | None, doubled: bool) -> float:
            pair = twice if doubled else (images, texts)
            extra = {"image_ids": ids} if doubled else {}
            return dcl(*pair, **extra, effective_negatives=n, diversity="none").item()
    else:
        ids = torch.arange(6)

        def loss(n: int | None, doubled: bool) -> float:
            bank = [torch.cat([part, part]) if doubled else part for part in parts[4:]]
            extra = {"effective_negatives": n, "diversity": "none", "reverse": "none"}
            return m_dcl(*parts[:4], *bank, image_ids=ids.new_ones(6), bank_ids=ids.new_zeros(len(bank[0])), **extra).item()

    assert loss(None, True) > loss(None, False) + 0.01
    assert loss(5, True) == pytest.approx(loss(5, False), rel=1e-9)
    assert loss(1, False) < loss(5, False)  # 1 is the smallest number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reverse": "both"}, "reverse must be 'paired', 'all' or 'none'"),
        ({"diversity_over": "all"}, "diversity_over must be"),
        ({"mu": 0.0}, "mu must be > 0"),
        ({"effective_negatives": 0}, "effective_negatives must be >= 1"),
        ({"bank_ids": torch.zeros(3)}, r"bank_ids must have shape \(7,\)"),
        ({"image_ids": torch.zeros(3)}, r"image_ids must have shape \(5,\)"),
        ({"bank_valid": torch.ones(7)}, "bank_valid must be bool"),
    ],
)
def test_m_dcl_names_mistakes(change, message):
    options = {"image_ids": IDS, "bank_ids": BANK_IDS, "bank_valid": VALID, **change}
    with pytest.raises(ValueError, match=message):
        m_dcl(*banks(), **options)


@pytest.mark.parametrize("which", range(6))
def test_m_dcl_names_shapes_that_differ(which):
    parts = banks()
    parts[which] = parts[which][:, :3]
    with pytest.raises(ValueError, match="must"):
        m_dcl(*parts)


@pytest.mark.parametrize("rescale", [True, False])
def test_concept_graph_meets_the_expected_values(rescale):
    z = vectors("concepts")
    got = concept_graph(z["cooccurrence"].double(), z["counts"].double(), rescale=rescale)
    torch.testing.assert_close(got, z["adjacency" if rescale else "adjacency_raw"], rtol=1e-9, atol=1e-9)


def test_concept_graph_by_hand():
    """Three words in four captions; c never meets the others. P_ab = 1/2, P_ba = 1/3, so only at 0.4 H is one-sided."""
    together = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    counts = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    both = concept_graph(together, counts, threshold=0.3, rescale=False)
    torch.testing.assert_close(both, torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.float64))
    one = concept_graph(together, counts, threshold=0.4, rescale=False)
    torch.testing.assert_close(one, torch.eye(3, dtype=torch.float64))  # b has no row of its own: D_b^-1/2 is 0
    # 5^(1/2 - 0.02) - 5^-0.02 = 1.197, of 1/3 it is 0.687
    rescaled = concept_graph(together, counts, threshold=0.7)
    torch.testing.assert_close(rescaled, torch.eye(3, dtype=torch.float64))
    assert concept_graph(together, counts, threshold=0.68)[1, 0] == pytest.approx(1.0)


def test_concept_graph_of_a_word_never_counted_is_the_identity_alone():
    graph = concept_graph(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0, 5]), threshold=0.0)
    assert torch.isfinite(graph).all() and graph[0].tolist() == [1, 0]


def test_concept_embedding_meets_the_expected_values():
    z = vectors("concepts")
    embedding, attention = concept_embedding(z["query"], z["weight"], z["concepts"], scale=z["scale"])
    torch.testing.assert_close(embedding, z["embedding"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(attention, z["attention"], rtol=1e-9, atol=1e-9)


def test_concept_embedding_of_a_sharp_query_is_its_concept():
    concepts = torch.eye(4, dtype=torch.float64) * 7
    embedding, attention = concept_embedding(concepts[[2]], torch.eye(4, dtype=torch.float64), concepts, scale=100)
    torch.testing.assert_close(embedding, torch.eye(4, dtype=torch.float64)[[2]])
    assert attention[0, 2] == pytest.approx(1)
    assert torch.autograd.gradcheck(
        lambda *inputs: concept_embedding(*inputs)[0],
        [unit(2, 3).requires_grad_(), torch.randn(3, 3, dtype=torch.float64).requires_grad_(), unit(5, 3).requires_grad_()],
    )


def test_pgc_meets_the_expected_value():
    z = vectors("pgc")
    got = pgc(z["image_concepts"], z["text_concepts"], z["classifier"], z["labels"])
    assert got.item() == pytest.approx(z["loss"], rel=1e-9)


def test_pgc_by_hand():
    """Two prototypes, logits 1 and 0 for the image, 0 and 0 for the text."""
    image, text = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    got = pgc(image, text, torch.eye(2), torch.tensor([0]))
    assert got.item() == pytest.approx(math.log(1 + math.exp(-1)) + math.log(2), rel=1e-6)
    logits = torch.randn(3, 5)
    want = 2 * cross_entropy(logits, torch.tensor([0, 1, 4]))
    torch.testing.assert_close(pgc(logits, logits, torch.eye(5), torch.tensor([0, 1, 4])), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast_are_computed_in_float32(dtype):
    parts = [part.to(dtype) for part in banks()]
    options = {"image_ids": IDS, "bank_ids": BANK_IDS, "bank_valid": VALID}
    want = m_dcl(*(part.float() for part in parts), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert m_dcl(*parts, **options) == want
        got = pgc(parts[0], parts[1], parts[4], torch.arange(5))
        assert got == pgc(*(part.float() for part in (parts[0], parts[1], parts[4])), torch.arange(5))
        query, weight = concept_embedding(parts[0], torch.eye(4, dtype=dtype), parts[4])
    assert got.dtype == query.dtype == weight.dtype == want.dtype == torch.float32


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: concept_graph(torch.zeros(2, 3), torch.zeros(2)),
        lambda: concept_embedding(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(4, 3)),
        lambda: concept_embedding(torch.zeros(2, 3), torch.zeros(3, 3), torch.zeros(0, 3)),
        lambda: pgc(torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)),
        lambda: pgc(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4, 2), torch.zeros(2, dtype=torch.int64)),
        lambda: pgc(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3, dtype=torch.int64)),
        lambda: pgc(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2)),
    ],
)
def test_shapes_that_do_not_fit_are_named(wrong):
    with pytest.raises(ValueError, match="must (be|have)"):
        wrong()
