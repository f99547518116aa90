"""AsCL's ratios as functions: expected values, a slow reference, hand values, gradients, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.functional import ascl
from coder_plugin.functional.ascl_loss import directed_ascl
from tests.test_functional_coder import vectors


def scores(n: int, m: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(n, k, generator=generator, dtype=torch.float64) * 2 - 1 for k in (n, m))  # type: ignore[return-value]


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


def test_expected_value():
    z = vectors("ascl")
    got = ascl(z["similarity"], z["noise_similarity"], temperature=z["tau"])
    assert got.dtype == torch.float64 and got.item() == pytest.approx(z["loss"], rel=1e-12)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 6), st.integers(0, 7), st.sampled_from([0.05, 0.3, 1.0]), st.data())
def test_equals_the_slow_reference(n, m, temperature, data):
    similarity, noise = scores(n, m, data.draw(st.integers(0, 10_000)))
    ids = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    wanted = reference(similarity, noise, temperature, ids)
    got = ascl(similarity, noise, temperature=temperature, image_ids=torch.tensor(ids))
    assert got.item() == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    plain = ascl(similarity, temperature=temperature, image_ids=torch.tensor(ids))
    assert plain.item() == pytest.approx(reference(similarity, None, temperature, ids), rel=1e-10, abs=1e-12)


def test_by_hand():
    # one pair, one noised text as near as the caption: log 2; one above it does not count
    assert ascl(torch.tensor([[0.5]]), torch.tensor([[0.5]]), temperature=0.1).item() == pytest.approx(math.log(2))
    assert ascl(torch.tensor([[0.5]]), torch.tensor([[0.6]]), temperature=0.1).item() == 0.0
    assert ascl(torch.tensor([[0.5]]), temperature=0.1).item() == 0.0


def test_noise_is_in_the_images_ratio_alone():
    similarity, noise = scores(4, 4, 1)
    noise = noise - 1  # all below the positives' lowest possible
    similarity = similarity.abs()
    more = ascl(similarity, noise, temperature=0.5) - ascl(similarity, temperature=0.5)
    logits = torch.cat([similarity, noise], 1) / 0.5
    wanted = (logits.logsumexp(1) - (similarity / 0.5).logsumexp(1)).mean()
    torch.testing.assert_close(more, wanted)


def test_noised_texts_that_do_not_count_are_as_if_they_were_not_there():
    similarity, noise = scores(4, 5, 6)
    valid = torch.tensor([True, False, True, False, True])
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    negatives = ~torch.eye(4, dtype=torch.bool)
    inputs = similarity, similarity.diagonal(), negatives
    some = directed_ascl(*inputs, noise, noise_valid=valid, temperature=temperature)
    torch.testing.assert_close(some, directed_ascl(*inputs, noise[:, valid], temperature=temperature))
    assert torch.isfinite(torch.autograd.grad(some.sum(), temperature)[0])


def test_gradient():
    similarity, noise = scores(4, 5, 2)
    leaves = (similarity.requires_grad_(), noise.requires_grad_())
    ids = torch.tensor([1, 2, 1, 3])
    assert torch.autograd.gradcheck(lambda s, z: ascl(s, z, temperature=0.2, image_ids=ids), leaves)
    (gradient,) = torch.autograd.grad(ascl(similarity, noise, temperature=0.2), [noise])
    masked = noise > similarity.diagonal()[:, None]
    assert masked.any() and (gradient[masked] == 0).all() and (gradient[~masked] > 0).all()


def test_a_learned_temperature_gets_its_gradient():
    similarity, noise = scores(3, 3, 3)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ascl(similarity, noise, temperature=t), (temperature,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised(dtype):
    similarity, noise = (x.to(dtype) for x in scores(4, 4, 4))
    got = ascl(similarity, noise, temperature=0.01)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(ascl(similarity.double(), noise.double(), temperature=0.01).item(), rel=1e-5)


def test_compiles():
    similarity, noise = (x.float() for x in scores(4, 4, 5))
    compiled = torch.compile(ascl, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(similarity, noise, temperature=0.05), ascl(similarity, noise, temperature=0.05)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), None), r"similarity must be square \[n, n\], got \(2, 3\)"),
        ((torch.zeros(0, 0), None), "similarity holds no pair"),
        ((torch.zeros(2, 2), torch.zeros(3, 1)), r"noise_similarity must have shape \(2, m\)"),
        ((torch.zeros(2, 2), torch.zeros(2)), "noise_similarity"),
    ],
)
def test_bad_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        ascl(*arguments, temperature=0.1)


def test_one_direction_refuses_a_mask_of_another_shape_or_type():
    similarity, positive = torch.zeros(2, 3), torch.zeros(2)
    for negatives in (torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 3)):
        with pytest.raises(ValueError, match="negatives must (have one shape|be bool)"):
            directed_ascl(similarity, positive, negatives, temperature=0.1)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match="temperature must be > 0"):
        ascl(torch.zeros(2, 2), temperature=temperature)
