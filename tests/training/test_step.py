"""One step: accumulation equals the big batch, shares add up, and what is not finite stops before anything is written."""

import contextlib

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from coder_plugin.model import create_loss, create_model
from coder_plugin.training.step import NonFiniteError, explain_gradient, forward_backward

RECIPES = ["dcl", "clip", "triplet", "siglip", "3*dcl + clip + 0.5*triplet(hardest=false)"]


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def tiny(objective: str) -> nn.Module:
    torch.manual_seed(0)
    model = create_model("coder-tiny", loss=objective).train()
    for module in model.modules():  # BatchNorm makes a batch's rows depend on each other: not what is tested here
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def batch(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.randn(rows, 3, 64, 64, generator=generator),
        "text": torch.randint(1, 400, (rows, 40), generator=generator),
        "image_id": torch.arange(rows) // 2,  # pairs of siblings, some across micro-batches
    }


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def split(full: dict[str, torch.Tensor], sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    parts = {key: value.split(sizes) for key, value in full.items()}
    return [{key: parts[key][i] for key in parts} for i in range(len(sizes))]


@pytest.mark.parametrize("objective", RECIPES)
def test_accumulation_equals_the_joint_batch(accelerator, objective):
    model = tiny(objective)
    loss = create_loss(objective, model=model)
    whole = forward_backward(model, loss, [batch(10)], accelerator)
    expected = gradients(model)
    model.zero_grad()
    accumulated = forward_backward(model, loss, split(batch(10), [3, 3, 4]), accelerator)
    got = gradients(model)
    assert (got - expected).norm() / expected.norm() <= 1e-5
    assert accumulated.losses == pytest.approx(whole.losses, rel=1e-5)


def test_one_micro_batch_is_plain_backpropagation(accelerator):
    model = tiny("dcl + clip")
    loss = create_loss("dcl + clip", model=model)
    forward_backward(model, loss, [batch(8)], accelerator)
    got = gradients(model)
    model.zero_grad()
    loss(output_dict=False, **model(**batch(8))).backward()
    assert (got - gradients(model)).norm() / got.norm() <= 1e-6


class Noisy(nn.Module):
    """A model with dropout and BatchNorm, to see that the two forwards of accumulation are one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        normal = nn.functional.normalize
        return {
            "image_features": normal(self.layers(image), dim=-1),
            "text_features": normal(self.layers(text), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }


def noisy_loss():
    from coder_plugin.coder import CoderLoss
    from coder_plugin.objective import Objective
    from coder_plugin.resolver import resolve

    objective = Objective.parse("clip")
    return CoderLoss(objective, resolve(objective, {"image_features", "text_features", "logit_scale"}).bindings, {})


def test_replayed_forward_has_the_same_dropout_and_statistics_move_once(accelerator):
    loss = noisy_loss()
    torch.manual_seed(0)
    model = Noisy()
    inputs = {"image": torch.randn(8, 6), "text": torch.randn(8, 6)}
    parts = split(inputs, [4, 4])
    seed = torch.get_rng_state()
    forward_backward(model, loss, parts, accelerator)
    got, after = gradients(model), torch.get_rng_state()
    assert model.layers[1].num_batches_tracked == 4  # two micro-batches of two inputs, not eight
    model.zero_grad()
    torch.set_rng_state(seed)
    outputs = [model(**part) for part in parts]
    joined = {key: torch.cat([o[key] for o in outputs]) for key in ("image_features", "text_features")}
    loss(output_dict=False, logit_scale=outputs[0]["logit_scale"], **joined).backward()
    assert (got - gradients(model)).norm() / got.norm() <= 1e-5
    assert torch.equal(after, torch.get_rng_state())


def test_shares_are_gradient_norms(accelerator):
    model = tiny("dcl + 3*triplet")
    loss = create_loss("dcl + 3*triplet", model=model)
    result = forward_backward(model, loss, [batch(8)], accelerator, measure=True)
    assert sum(result.shares.values()) == pytest.approx(1)
    outputs = model(**batch(8))
    features = [outputs["image_features"], outputs["text_features"]]
    norms = {
        name: sum(g.square().sum() for g in torch.autograd.grad(value, features, retain_graph=True)).sqrt().item()
        for name, value in loss(**outputs).items()
    }
    assert result.shares["dcl_loss"] == pytest.approx(norms["dcl_loss"] / sum(norms.values()), rel=1e-4)


def test_a_loss_that_is_not_finite_is_named_and_leaves_no_gradient(accelerator):
    model = tiny("dcl + clip")
    loss = create_loss("dcl + clip", model=model)
    with torch.no_grad():
        model.logit_scale.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="clip_loss = nan") as caught:
        forward_backward(model, loss, [batch(4)], accelerator).check()
    assert "dcl_loss" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("sizes", [[8], [4, 4]])
def test_a_step_that_is_refused_leaves_statistics_as_they_were(accelerator, sizes):
    """BatchNorm counts before the check, with accumulation in the second pass."""
    model = Noisy()
    loss = noisy_loss()
    parts = split({"image": torch.randn(8, 6), "text": torch.randn(8, 6)}, sizes)
    forward_backward(model, loss, parts, accelerator).check()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.zero_grad()
    with torch.no_grad():
        model.logit_scale.fill_(float("nan"))
    result = forward_backward(model, loss, parts, accelerator)
    assert model.layers[1].num_batches_tracked == 4 * len(sizes)
    with pytest.raises(NonFiniteError, match="clip_loss = nan"):
        result.check()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())


def test_the_norm_is_read_and_checked_with_the_losses(accelerator):
    model = tiny("dcl + clip")
    result = forward_backward(model, create_loss("dcl + clip", model=model), [batch(4)], accelerator)
    assert result.gradient_norm is None and result.found_inf() == 0
    result.norm = torch.tensor(2.5)
    assert result.gradient_norm == 2.5 and set(result.losses) == {"dcl_loss", "clip_loss"}
    assert result.metrics["loss"] == pytest.approx(sum(result.losses.values()))
    for overflow in (True, False):
        result = forward_backward(model, create_loss("dcl + clip", model=model), [batch(4)], accelerator)
        result.norm = torch.tensor(torch.inf)
        assert result.found_inf() == 1
        if overflow:
            result.check(overflow=True)
            assert result.gradient_norm == torch.inf
        else:
            with pytest.raises(NonFiniteError, match="finite at the features"):
                result.check()


def test_the_loss_scaler_scales_gradients_once():
    """As Accelerator's backward does: all gradients by the scale, with one micro-batch and with several."""
    from types import SimpleNamespace

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = SimpleNamespace(scaler=scaler, no_sync=lambda model: contextlib.nullcontext())
    plain = SimpleNamespace(scaler=None, no_sync=lambda model: contextlib.nullcontext())
    for sizes in ([8], [4, 4]):
        model = tiny("dcl + clip")
        loss = create_loss("dcl + clip", model=model)
        forward_backward(model, loss, split(batch(8), sizes), plain)
        expected = gradients(model)
        model.zero_grad()
        forward_backward(model, loss, split(batch(8), sizes), scaled)
        torch.testing.assert_close(gradients(model), 1024 * expected)


def test_a_gradient_that_is_not_finite_names_the_term(accelerator):
    model = tiny("dcl + clip")
    loss = create_loss("dcl + clip", model=model)

    class Poisoned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    term = loss.terms["dcl"]
    inner = term.compute
    term.compute = lambda image_features, **rest: inner(image_features=Poisoned.apply(image_features), **rest)
    result = forward_backward(model, loss, [batch(4)], accelerator)
    assert "dcl_loss" in explain_gradient(model, loss, result.leaves)
    assert "clip_loss" not in explain_gradient(model, loss, result.leaves)
