"""GPO: a slow reference, invariances, padding, gradients, precision, ways to run it, bad input."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coder_plugin.backbones.gpo import GPO
from tests.host_reads import as_on_a_device, host_reads
from tests.references import gpo as reference


def made(*, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> GPO:
    """A GPO whose weights are far from uniform: its parameters are larger than torch's."""
    torch.manual_seed(seed)
    pool = GPO(**{"d_pe": 6, "d_hidden": 4} | options).to(dtype)
    with torch.no_grad():
        for parameter in pool.parameters():
            parameter.normal_()
    return pool


def inputs(lengths: list[int], positions: int, channels: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features [B, L, C] in float64, and masks [B, L] with that many valid positions anywhere."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(lengths), positions, channels, generator=generator, dtype=torch.float64)
    mask = torch.zeros(len(lengths), positions, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(positions, generator=generator)[:length]] = True
    return features, mask


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    positions = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, positions), min_size=1, max_size=6))
    features, mask = inputs(lengths, positions, draw(st.integers(1, 4)), seed=draw(st.integers(0, 999)))
    if draw(st.booleans()):
        features = features.round()  # ties
    return features, mask


@given(
    batch=batches(),
    seed=st.integers(0, 99),
    decoder=st.sampled_from(["linear", "mlp"]),
    temperature=st.floats(0.05, 3),
)
def test_equals_the_slow_reference(batch, seed, decoder, temperature) -> None:
    features, mask = batch
    pool = made(seed=seed, decoder=decoder, temperature=temperature)
    parameters = {name: value.tolist() for name, value in pool.state_dict().items()}
    want = reference.pool(features.tolist(), mask.tolist(), parameters, d_pe=6, temperature=temperature)
    torch.testing.assert_close(pool(features, mask), torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", [36, pytest.param(77, marks=pytest.mark.slow)])
def test_printed_sizes_equal_the_slow_reference(positions: int) -> None:
    torch.manual_seed(0)
    pool = GPO()
    features, mask = inputs([positions, 15, 1], positions, 2)
    parameters = {name: value.tolist() for name, value in pool.state_dict().items()}
    want = torch.tensor(reference.pool(features.tolist(), mask.tolist(), parameters, d_pe=32))
    torch.testing.assert_close(pool(features.float(), mask), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("lengths", [[3, 1, 6], [2, 2]])
def test_padding_reaches_neither_result_nor_gradient(garbage: float, lengths: list[int]) -> None:
    features, mask = inputs(lengths, 8, 3)
    pool = made()

    def run(fill: float) -> tuple[Tensor, ...]:
        x = features.masked_fill(~mask[..., None], fill).requires_grad_()
        pooled = pool(x, mask)
        return pooled, *torch.autograd.grad(pooled.square().sum(), [x, *pool.parameters()])

    got, want = run(garbage), run(0.0)
    assert (got[1][~mask] == 0).all()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("decoder", ["linear", "mlp"])
def test_gradients(decoder: str, whole: bool) -> None:
    """By default one product of the Jacobian with vectors."""
    features, mask = inputs([3, 1, 4, 3], 5, 2)
    pool = made(decoder=decoder, temperature=1.0)
    names = [name for name, _ in pool.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(pool, dict(zip(names, parameters, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (features.requires_grad_(), *pool.parameters()), fast_mode=not whole)


# Precision and ways to run


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_computed_in_float32_or_better(dtype: torch.dtype, parameters: torch.dtype) -> None:
    features, mask = inputs([5, 2, 7], 7, 4)
    pool, features = made(dtype=parameters), features.to(dtype).requires_grad_()
    got = pool(features, mask)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = made()
    exact.load_state_dict(pool.state_dict())
    want = exact(features.double(), mask)
    precision = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got.double(), want, rtol=precision, atol=precision)
    gradients = torch.autograd.grad(got.sum(), [features, *pool.parameters()])
    assert [g.dtype for g in gradients] == [dtype] + [parameters] * (len(gradients) - 1)
    assert all(g.isfinite().all() for g in gradients)


def test_eval_mode_no_grad_and_checkpointing_change_nothing() -> None:
    features, mask = inputs([5, 2, 7], 7, 4)
    pool = made()
    features.requires_grad_()
    want = pool(features, mask)
    gradients = torch.autograd.grad(want.square().sum(), [features, *pool.parameters()])
    again = checkpoint(pool, features, mask, use_reentrant=False)
    for one, other in zip(
        torch.autograd.grad(again.square().sum(), [features, *pool.parameters()]), gradients, strict=True
    ):
        assert torch.equal(one, other)
    pool.eval()
    assert torch.equal(pool(features, mask), want)
    with torch.no_grad():
        assert torch.equal(pool(features, mask), want)


@pytest.mark.parametrize("decoder", ["linear", "mlp"])
@pytest.mark.parametrize("lengths", [[3, 1, 6], [6, 6], [2]])
def test_on_a_device_it_is_the_same_without_a_read(lengths, decoder) -> None:
    """Value and gradients, with the weights of all lengths instead of those of the batch, and all columns sorted."""
    torch.manual_seed(0)
    pool = GPO(d_pe=4, d_hidden=5, decoder=decoder).double()
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1)  # padding first
    features = torch.randn(len(lengths), 6, 3, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(len(lengths), 3, dtype=torch.float64)

    def run() -> list[torch.Tensor]:
        out = pool(features, mask)
        return [out, *torch.autograd.grad((out * direction).sum(), [features, *pool.parameters()])]

    want = run()
    with host_reads() as reads:
        got = run()
    assert not [read for read in reads if "rnn.py" not in read]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    with as_on_a_device():  # where a row without a position cannot be refused, it is zero
        assert not pool(features, mask & torch.tensor([[False]])).any()


def test_a_fused_optimizer_changes_what_is_computed_without_gradients() -> None:
    """Fused optimizers write parameters without a new version of them."""
    pool, features = GPO(), torch.randn(2, 5, 3)
    mask = torch.ones(2, 5, dtype=torch.bool)
    optimizer = torch.optim.AdamW(pool.parameters(), lr=0.05, fused=True)
    with as_on_a_device():
        with torch.no_grad():
            before = pool(features, mask)
        (pool(features, mask) - features[:, 0]).square().mean().backward()
        optimizer.step()
        want = pool(features, mask).detach()
        with torch.no_grad():
            after = pool(features, mask)
    assert torch.equal(after, want) and not torch.equal(after, before)


@pytest.mark.slow
def test_runs_compiled() -> None:
    pool = made()
    compiled = torch.compile(pool, backend="aot_eager")
    for lengths in ([5, 2, 7], [1, 3, 3]):
        features, mask = inputs(lengths, 7, 4)
        features.requires_grad_()
        want, got = pool(features, mask), compiled(features, mask)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), [features, *pool.parameters()]),
            torch.autograd.grad(want.sum(), [features, *pool.parameters()]),
        )


@pytest.mark.parametrize("decoder", ["linear", "mlp"])
def test_names_in_the_state_dict(decoder: str) -> None:
    pool = GPO(decoder=decoder)
    kinds = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    score = ["score.weight"] if decoder == "linear" else ["score.0.weight", "score.0.bias", "score.2.weight"]
    assert list(pool.state_dict()) == [f"gru.{kind}{way}" for way in ("", "_reverse") for kind in kinds] + score
    file = io.BytesIO()
    torch.save(pool.state_dict(), file)
    file.seek(0)
    other = GPO(decoder=decoder)
    other.load_state_dict(torch.load(file, weights_only=True))
    features, mask = inputs([3, 5], 5, 4)
    assert torch.equal(pool(features, mask), other(features, mask))


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_pe": 5}, "d_pe must be even"),
        ({"d_pe": 0}, "d_pe must be even"),
        ({"d_hidden": 0}, "d_hidden must be >= 1"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": float("nan")}, "temperature must be > 0"),
        ({"decoder": "rnn"}, "'linear' or 'mlp', got 'rnn'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPO(**options)


@pytest.mark.parametrize(
    ("features", "mask", "message"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), r"\[B, L, C\]"),
        (torch.zeros(2, 3, 4, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), "floating point"),
        (torch.zeros(2, 3, 4), torch.ones(2, 3), "mask must be bool"),
        (torch.zeros(2, 3, 4), torch.ones(2, 4, dtype=torch.bool), r"mask must be bool \(2, 3\)"),
        (torch.zeros(0, 3, 4), torch.ones(0, 3, dtype=torch.bool), "no row"),
        (torch.zeros(2, 0, 4), torch.ones(2, 0, dtype=torch.bool), "2 of 2 rows have no valid position"),
        (torch.zeros(3, 2, 4), torch.tensor([[1, 0], [0, 0], [1, 1]]).bool(), "1 of 3 .* the first is row 1"),
    ],
)
def test_bad_input(features: Tensor, mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(dtype=torch.float32)(features, mask)
