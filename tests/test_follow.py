"""The heads' state advances exactly once per performed optimizer step, whoever runs the loop."""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

import coder_plugin
from coder_plugin import CoderError, follow
from coder_plugin.memory.rows import reset_moments

RECIPE = "dcl + m_dcl"
PAIRS = 4


@pytest.fixture
def model(tiny_model: str) -> Any:
    torch.manual_seed(0)
    return coder_plugin.create_model(tiny_model, loss=RECIPE).train()


@pytest.fixture
def loss(model: Any) -> Any:
    return coder_plugin.create_loss(RECIPE, model=model)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 400, (PAIRS, 40), generator=generator)
    text[:, 5] = 49407
    return {
        "image": torch.randn(PAIRS, 3, 64, 64, generator=generator),
        "text": text,
        "image_id": torch.arange(PAIRS) + 100 * seed,
    }


def backward(model: Any, loss: Any, seed: int = 0) -> None:
    sum(loss(**model(**batch(seed))).values()).backward()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.01)


def trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def filled(model: Any) -> int:
    return int(model.coder.heads["momentum"].bank.count)


def test_a_loop_that_follows_equals_one_that_calls_post_step(model: Any, loss: Any) -> None:
    other = copy.deepcopy(model)
    other_loss = coder_plugin.create_loss(RECIPE, model=other)
    optimizers = sgd(trained(model)), sgd(trained(other))
    following = follow(model, optimizers[0])
    for seed in range(3):
        for each, criterion, optimizer in ((model, loss, optimizers[0]), (other, other_loss, optimizers[1])):
            optimizer.zero_grad()
            backward(each, criterion, seed)
            optimizer.step()
        other.coder.post_step(optimizers[1])
    assert following.steps == 3 and filled(model) == 3 * PAIRS
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_accumulated_batches_advance_nothing_and_the_last_one_is_written(model: Any, loss: Any) -> None:
    optimizer = sgd(trained(model))
    following = follow(model, optimizer)
    for seed in range(4):
        backward(model, loss, seed)
    assert following.steps == 0 == filled(model)
    optimizer.step()
    assert following.steps == 1 and filled(model) == PAIRS
    assert model.coder.heads["momentum"].bank.ids[:PAIRS].tolist() == batch(3)["image_id"].tolist()


@pytest.mark.parametrize("fused", [False, True])  # the scaler lets a fused optimizer skip the step itself
def test_a_step_that_the_loss_scaler_skips_writes_nothing(model: Any, loss: Any, fused: bool) -> None:
    optimizer = torch.optim.SGD(trained(model), lr=0.01, fused=fused)
    following = follow(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for scale in (1.0, float("inf")):
        optimizer.zero_grad()
        (scaler.scale(sum(loss(**model(**batch())).values())) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
    assert following.steps == 1 and filled(model) == PAIRS


def test_several_optimizers_make_one_step(model: Any, loss: Any) -> None:
    parameters = trained(model)
    optimizers = [sgd(parameters[::2]), sgd(parameters[1::2])]
    following = follow(model, optimizers)
    backward(model, loss)
    optimizers[0].step()
    assert following.steps == 0
    optimizers[1].step()
    assert following.steps == 1
    average = dict(model.coder.heads["momentum"].towers.model.named_parameters())
    assert not torch.equal(average["visual.proj"], model.visual.proj)
    backward(model, loss, 1)
    optimizers[1].step()
    assert following.steps == 1


def test_of_several_optimizers_one_may_skip_a_step(model: Any, loss: Any) -> None:
    parameters = trained(model)
    optimizers = [sgd(parameters[::2]), sgd(parameters[1::2])]
    following = follow(model, optimizers)
    backward(model, loss, 0)
    optimizers[0].step()
    with torch.no_grad():
        model.eval()(**batch(0))
    assert following.steps == 0  # evaluation is no step
    backward(model.train(), loss, 1)
    assert following.steps == 1 and filled(model) == PAIRS
    for optimizer in optimizers:
        optimizer.step()
    assert following.steps == 2 and filled(model) == 2 * PAIRS


class Wrapper:
    """Holds an optimizer as accelerate's and Lightning's do."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer


def test_wrapped_models_and_optimizers_are_found(model: Any, loss: Any) -> None:
    from accelerate import Accelerator

    optimizer = sgd(trained(model))
    wrapped = Wrapper(Accelerator(cpu=True).prepare(optimizer))
    task = nn.Module()
    task.wrapped = SimpleModule(model)
    following = follow(task, wrapped)
    backward(model, loss)
    optimizer.step()
    assert following.steps == 1


class SimpleModule(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


def test_moments_of_new_rows_are_forgotten_by_the_optimizer_that_has_them(model: Any) -> None:
    weight = nn.Parameter(torch.ones(2, 1))
    optimizers = [sgd(trained(model)), torch.optim.Adam([weight])]
    weight.grad = torch.ones(2, 1)
    follow(model, optimizers)
    optimizers[1].step()
    momentum = model.coder.heads["momentum"]
    momentum.replaced_rows = [(weight, torch.tensor([False, True]))]
    optimizers[0].step()
    assert optimizers[1].state[weight]["exp_avg"].flatten().tolist() == [pytest.approx(0.1), 0.0]


def test_removed_it_follows_no_more_and_another_may(model: Any, loss: Any) -> None:
    optimizer = sgd(trained(model))
    first = follow(model, optimizer)
    with pytest.raises(CoderError, match="follows an optimizer already: call remove"):
        follow(model, optimizer)
    first.remove()
    second = follow(model, optimizer)
    backward(model, loss)
    optimizer.step()
    assert (first.steps, second.steps) == (0, 1)


@pytest.mark.parametrize("split", [False, True])
def test_a_copy_of_a_followed_model_is_not_followed(model: Any, split: bool) -> None:
    parameters = trained(model)
    optimizers = [sgd(parameters[:3]), sgd(parameters[3:])] if split else [sgd(parameters)]
    following = follow(model, optimizers)
    other = copy.deepcopy(model)
    optimizers[0].step()
    backward(other, coder_plugin.create_loss(RECIPE, model=other))  # begins no step of the first model
    assert (following.steps, filled(model)) == (0 if split else 1, 0)
    optimizer = sgd(trained(other))
    second = follow(other, optimizer)
    optimizer.step()
    assert (second.steps, filled(other)) == (1, PAIRS)


def test_what_cannot_be_followed_is_refused(model: Any) -> None:
    optimizer = sgd(trained(model))
    with pytest.raises(CoderError, match="no model of coder_plugin.create_model in the Linear: .* by add_heads"):
        follow(nn.Linear(1, 1), optimizer)
    with pytest.raises(CoderError, match="2 models with heads in the ModuleList"):
        follow(nn.ModuleList([model, copy.deepcopy(model)]), optimizer)
    with pytest.raises(CoderError, match="needs a torch optimizer, got SimpleNamespace: without one call"):
        follow(model, SimpleNamespace(step=lambda: None))
    rebuilt = copy.deepcopy(model)
    for optimizers in (optimizer, [optimizer, sgd([nn.Parameter(torch.ones(1))])]):
        with pytest.raises(CoderError, match="holds no parameter of the model: make it from this model's parameters"):
            follow(rebuilt, optimizers)
    assert rebuilt.coder.followed_by is None
    follow(nn.Sequential(rebuilt), [optimizer, sgd(trained(rebuilt)[:1])]).remove()  # one of several suffices
    follow(rebuilt.requires_grad_(False), optimizer).remove()  # its parameters may be elsewhere
    for optimizers in ([], [optimizer, optimizer]):
        with pytest.raises(CoderError, match="an optimizer, or a list of different ones"):
            follow(model, optimizers)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "coder_plugin.follow" in each.getMessage()]


def test_a_forgotten_call_is_reported_once_in_the_third_forward(
    model: Any, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.AdamW(trained(model))
    with caplog.at_level(logging.WARNING):
        for seed in range(5):
            assert len(warnings_of(caplog)) == (seed > 2)
            backward(model, loss, seed)
            optimizer.step()
    assert warnings_of(caplog) == [
        "the model's banks, momentum towers or centres have not moved for 2 training steps: call "
        "coder_plugin.follow(model, optimizer) once before training (with Lightning or Hugging Face's Trainer add the callback "
        "FollowCallback of coder_plugin.integrations instead), or model.coder.post_step() after every optimizer.step()"
    ]


def test_nothing_is_reported_where_nothing_is_forgotten(
    model: Any, loss: Any, caplog: pytest.LogCaptureFixture, tiny_model: str
) -> None:
    plain = coder_plugin.create_model(tiny_model, loss="clip").train()  # has no state
    cases = [(model, loss, True), (plain, coder_plugin.create_loss("clip", model=plain), False)]
    with caplog.at_level(logging.WARNING):
        for each, criterion, has_state in cases:
            optimizer = sgd(trained(each))
            if has_state:
                follow(each, optimizer)
            for seed in range(2):
                for _ in range(3):  # accumulation
                    backward(each, criterion, seed)
                optimizer.step()
        for _ in range(4):  # no step at all
            backward(model, loss)
        for _ in range(4):  # nor where a forward pass has parameters of its own
            own = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
            torch.func.functional_call(model, own, (), batch())
    assert not warnings_of(caplog)


def test_a_copy_that_is_trained_with_the_loss_of_its_original_is_reported(
    model: Any, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rebuilt = copy.deepcopy(model)
    for each, criterion in ((model, loss), (rebuilt, loss)):
        optimizer = sgd(trained(each))
        follow(each, optimizer)
        for seed in range(4):
            assert not caplog.records
            backward(each, criterion, seed)
            optimizer.step()
            if each is rebuilt and seed == 2:
                (record,) = caplog.records
                assert "in 3 steps the loss has handed no values to head 'momentum'" in record.getMessage()
                caplog.clear()


def test_lbfgs_calls_the_model_many_times_in_one_step(model: Any, loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.LBFGS(trained(model), lr=1e-3, max_iter=4)
    following = follow(model, optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        value = sum(loss(**model(**batch())).values())
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(closure)
    assert following.steps == 2 and not following.stepping and not caplog.records


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its implementations write it (Foret et al., 2021)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.01)

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.parametrize("by_closure", [False, True])
def test_the_two_forwards_of_sam_are_one_step(model: Any, loss: Any, by_closure: bool) -> None:
    optimizer = SAM(trained(model))
    following = follow(model, optimizer)
    for seed in range(2):
        backward(model, loss, seed)
        if by_closure:
            optimizer.step(lambda seed=seed: backward(model, loss, seed))
        else:
            optimizer.first_step()
            assert following.steps == seed
            backward(model, loss, seed)
            optimizer.second_step()
        assert following.steps == seed + 1
    assert filled(model) == 2 * PAIRS


def test_a_step_of_lookahead_ends_when_its_slow_weights_are_written(model: Any, loss: Any) -> None:
    """timm's does not call Optimizer.__init__, so torch gives its steps no hooks."""
    optimizer = timm.optim.create_optimizer_v2(trained(model), opt="lookahead_adamw", lr=0.01)
    seen: list[torch.Tensor] = []
    following = follow(model, optimizer, after_step=lambda: seen.append(model.visual.proj.detach().clone()))
    for seed in range(6):
        backward(model, loss, seed)
        optimizer.step()
        assert following.steps == seed + 1 and torch.equal(seen[-1], model.visual.proj)
    assert filled(model) == 6 * PAIRS


def test_new_rows_of_a_parameter_have_no_slow_weights() -> None:
    weight = nn.Parameter(torch.ones(2, 1))
    optimizer = timm.optim.create_optimizer_v2([weight], opt="lookahead_sgd", lr=0.1)
    weight.grad = torch.ones(2, 1)
    for _ in range(6):
        optimizer.step()
    state = optimizer._base_optimizer.state[weight]
    kept = state["lookahead_slow_buff"][0].clone()
    with torch.no_grad():
        weight[1] = 7.0
    reset_moments(optimizer._base_optimizer, weight, torch.tensor([False, True]))
    assert state["lookahead_slow_buff"][1] == 7 and torch.equal(state["lookahead_slow_buff"][0], kept)


def test_an_optimizer_whose_steps_nobody_can_notice_is_refused(model: Any) -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": parameters}]

    with pytest.raises(CoderError, match="Bare does not call torch.optim.Optimizer.__init__, so nothing can notice its steps"):
        follow(model, Bare(trained(model)))


def test_steps_of_another_optimizer_are_reported(model: Any, loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    follow(model, sgd(trained(model)))
    other = sgd(trained(model))
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            backward(model, loss, seed)
            other.step()
    assert len(warned := warnings_of(caplog)) == 1 and "give it the one whose step() is called" in warned[0]


@pytest.mark.parametrize("expression", ["coder", "clip + selfalign", "ascl", "clip + distill(teacher=base)"])
def test_a_model_that_is_followed_and_its_loss_pickle(tiny_model: str, expression: str) -> None:
    model = coder_plugin.create_model(tiny_model, loss=expression).train()
    loss = coder_plugin.create_loss(expression, model=model)
    optimizer = sgd(trained(model))
    follow(model, optimizer)
    backward(model, loss)
    optimizer.step()
    again, loss_again = pickle.loads(pickle.dumps((model, loss)))
    assert again.coder.followed_by is None is not model.coder.followed_by
    values = []
    for each, criterion in ((model, loss), (again, loss_again)):
        torch.manual_seed(1)
        values.append(sum(criterion(**each(**batch(1))).values()))
    assert torch.equal(*values)
    follow(again, sgd(trained(again)))


def test_region_models_pickle() -> None:
    options = {"vocabulary": ["<pad>", "<start>", "<end>", "<unk>", "dog"], "region_dim": 4, "embed_dim": 4, "word_dim": 4}
    model = coder_plugin.create_model("region-bigru-vsrn", loss="dcl + m_dcl", **options)
    again = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
