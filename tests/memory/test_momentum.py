"""The momentum copy: its average, its buffers, and that nothing else moves it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import coder_plugin
from coder_plugin.memory.momentum import MomentumCopy
from coder_plugin.model import create_loss
from coder_plugin.training import checkpoint
from coder_plugin.training.average import WeightAverage
from tests import gloo
from tests.few import few

RECIPE = "3*dcl(diversity_over='batch+bank') + m_dcl"


@pytest.fixture
def model(tiny_model):
    torch.manual_seed(0)
    return coder_plugin.create_model(tiny_model, loss=RECIPE).train()


def batch(n: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 400, (n, 40), generator=generator)
    text[:, 5] = 49407  # the end of the text
    return {
        "image": torch.randn(n, 3, 64, 64, generator=generator),
        "text": text,
        "image_id": torch.arange(n) + 1000 * seed,
    }


def nudge(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def tower(model: nn.Module) -> MomentumCopy:
    return model.coder.heads["momentum"].towers


def test_the_copy_averages_what_is_trained_and_takes_over_the_rest(model):
    model.lock_image_tower(unlocked_groups=1)
    before = copy.deepcopy(tower(model).model.state_dict())
    nudge(model)
    with torch.no_grad():
        model.visual.class_embedding.add_(1)  # frozen, and changed by hand: weights loaded into a locked tower
    model.coder.post_step()
    online, trained = model.state_dict(), {name for name, p in model.named_parameters() if p.requires_grad}
    moved = {"averaged": 0, "taken over": 0}
    for name, value in tower(model).model.state_dict().items():
        if name in trained:
            moved["averaged"] += 1
            torch.testing.assert_close(value, 0.995 * before[name] + 0.005 * online[name])
        else:
            moved["taken over"] += 1
            assert torch.equal(value, online[name]), name
    assert min(moved.values()) > 3
    mask = dict(tower(model).model.named_buffers())["attn_mask"]
    assert mask.isinf().any() and not mask.isnan().any()


def test_batch_norms_statistics_are_those_of_the_model():
    """Also where the model has other tensors than at the step before."""
    model = coder_plugin.create_model("coder-tiny", loss=RECIPE).train()
    norms = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
    assert norms
    for _ in range(2):
        for module in model.visual.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.randn_like(module.running_mean)
        model.coder.post_step()
        online, own = dict(model.named_buffers()), dict(tower(model).model.named_buffers())
        assert all(torch.equal(own[name], online[name]) for name in norms)


def same_storage(model: nn.Module) -> dict[str, bool]:
    online = dict(model.named_parameters(remove_duplicate=False))
    return {name: average is online[name] for name, average in tower(model).model.named_parameters()}


def test_locked_parameters_are_in_memory_once(model):
    model.lock_image_tower()
    model.coder.attach(model)  # as trainers do, after locking
    locked = {name for name, parameter in model.visual.named_parameters() if not parameter.requires_grad}
    assert len(locked) > 10
    shared = same_storage(model)
    frozen = {f"visual.{name}" for name in locked} | {"logit_scale"}  # no term reads the scale
    assert {name for name in shared if shared[name]} == frozen
    nudge(model)
    model.coder.post_step()
    assert same_storage(model) == shared


def test_parameters_locked_later_are_shared_and_unlocked_ones_average_again(model):
    assert not any(same_storage(model).values())
    model.lock_image_tower()
    model.coder.post_step()
    shared = same_storage(model)
    assert shared["visual.proj"] and not shared["token_embedding.weight"]
    model.visual.proj.requires_grad_(True)
    model.coder.post_step()
    average = tower(model).model.visual.proj
    assert average is not model.visual.proj and not average.requires_grad and torch.equal(average, model.visual.proj)
    before = average.clone()
    nudge(model)
    model.coder.post_step()
    torch.testing.assert_close(average, torch.lerp(before, model.visual.proj.detach(), 0.005))
    assert same_storage(model)["visual.conv1.weight"]


def test_shared_parameters_are_saved_and_loaded(model, tmp_path):
    model.lock_image_tower()
    model.coder.attach(model)
    nudge(model)
    model.coder.post_step()
    path = checkpoint.save(tmp_path, "step_1", manifest={"step": 1}, common={"model": model.state_dict()})
    state = checkpoint.load(path)[1]["model"]
    other = copy.deepcopy(model)
    nudge(other)
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    other.coder.post_step()
    assert same_storage(other) == same_storage(model)


@pytest.mark.parametrize("assign", [False, True])
def test_an_average_that_is_loaded_does_not_become_the_weights_of_a_tower_locked_since(model, assign):
    nudge(model)
    model.coder.post_step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    other = copy.deepcopy(model)
    other.lock_image_tower()
    other.coder.attach(other)
    assert same_storage(other)["visual.conv1.weight"]
    other.load_state_dict(saved, assign=assign)
    assert [name for name, value in other.state_dict().items() if not torch.equal(value, saved[name])] == []
    other.coder.post_step()
    assert same_storage(other)["visual.conv1.weight"]


def test_tied_parameters_are_shared_and_copied_under_both_names(model):
    model.visual.register_module("tied", torch.nn.Module())
    model.visual.tied.proj = model.visual.proj
    model.lock_image_tower()
    model.coder.attach(model)
    average = tower(model).model
    assert average.visual.tied.proj is average.visual.proj is model.visual.proj
    model.visual.proj.requires_grad_(True)
    model.coder.post_step()
    assert average.visual.tied.proj is average.visual.proj is not model.visual.proj


def test_the_copy_has_no_gradient_and_keeps_its_mode(model):
    outputs = model(**batch())
    assert not outputs["coder_image_keys"].requires_grad
    torch.testing.assert_close(outputs["coder_image_keys"], outputs["image_features"], rtol=1e-5, atol=1e-5)
    sum(create_loss(RECIPE, model=model)(**outputs).values()).backward()
    copied = tower(model)
    assert all(p.grad is None and not p.requires_grad for p in copied.parameters())
    model.eval().train()
    assert not any(module.training for module in copied.model.modules())
    assert not hasattr(copied.model.coder, "momentum") and not len(copied.model.coder.heads)


def test_mode_train_keeps_dropout(tiny_model):
    objective = coder_plugin.objective.Objective.parse(RECIPE).with_options({"momentum.mode": "train"})
    model = coder_plugin.create_model(tiny_model, loss=objective, force_patch_dropout=0.5)
    assert all(module.training for module in tower(model).model.modules())
    model.eval()
    assert all(module.training for module in tower(model).model.modules())


def test_forward_and_loss_write_nothing_and_a_step_writes_once(model):
    loss = create_loss(RECIPE, model=model)
    before = copy.deepcopy(model.coder.state_dict())
    for seed in range(3):  # as under accumulation: several forwards and losses of one step
        loss(**model(**batch(seed=seed)))
    assert all(torch.equal(value, before[name]) for name, value in model.coder.state_dict().items())
    model.coder.post_step()
    bank = model.coder.heads["momentum"].bank
    assert int(bank.count) == 6 and bank.ids[:6].tolist() == batch(seed=2)["image_id"].tolist()
    model.coder.post_step()  # a step without a loss: nothing is stashed
    assert int(bank.count) == 6
    loss(**model(**batch()))
    model.coder.discard()
    model.coder.post_step()
    assert int(bank.count) == 6


def test_the_copy_is_state_but_not_trained_averaged_or_exported(model):
    names = model.coder.state_names()
    assert {"coder.heads.momentum.towers.model.visual.proj", "coder.heads.momentum.bank.pointer"} <= set(names)
    assert set(names) <= model.state_dict().keys() | {n for n, _ in model.named_buffers()}
    average = WeightAverage(model, 0.9, leave_out=names)
    assert not any(name.startswith("coder.") for name in average.weights)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_momentum_out_of_range(momentum):
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        MomentumCopy(momentum=momentum)


def test_autocast_keys_are_float32(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys = model(**batch())["coder_image_keys"]
    assert keys.dtype == torch.float32
    torch.testing.assert_close(keys.norm(dim=1), torch.ones(6))


def test_the_average_of_half_precision_weights_is_not_rounded_away(model):
    """Of the way to new weights it goes 1 - 0.995^100 in a hundred steps, also where the model's weights are in bfloat16."""
    model.to(torch.bfloat16)
    name = "visual.proj"
    start = dict(model.named_parameters())[name].detach().float().clone()
    nudge(model)
    for _ in range(100):
        model.coder.post_step()
    average, goal = dict(tower(model).model.named_parameters())[name], dict(model.named_parameters())[name]
    assert average.dtype == torch.float32 and goal.dtype == torch.bfloat16
    way = ((average - start).norm() / (goal.float() - start).norm()).item()
    assert way == pytest.approx(1 - 0.995**100, abs=1e-3)


def test_a_model_that_begins_in_bfloat16_has_a_float32_copy(tiny_model):
    model = coder_plugin.create_model(tiny_model, loss=RECIPE, precision="pure_bf16").train()
    assert {p.dtype for p in tower(model).model.parameters()} == {torch.float32}
    model.lock_image_tower()
    model.coder.attach(model)
    model.coder.post_step()
    assert model.visual.proj.dtype == torch.bfloat16 and tower(model).model.visual.proj.dtype == torch.float32
    keys = model(**{**batch(), "image": batch()["image"].bfloat16()})["coder_image_keys"]
    assert keys.dtype == torch.float32


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16, torch.float64]))
def test_state_is_never_rounded_and_every_type_trains(tiny_model, dtype):
    """k-means, banks and moments beside weights in another type; images in float32 take the weights' type."""
    options = {"momentum.bank_size": 8, "prototypes.clusters": 3, "prototypes.recluster": 6}
    objective = coder_plugin.objective.Objective.parse("coder").with_options(options)
    model = coder_plugin.create_model(tiny_model, loss=objective).train()
    before = {name: buffer.dtype for name, buffer in model.coder.heads.named_buffers()}
    model.to(dtype)
    buffers = dict(model.coder.heads.named_buffers())
    after = {name: buffer.dtype for name, buffer in buffers.items() if "moments" in name or ".centres." in name}
    assert {name for name in after if torch.promote_types(before[name], after[name]) != after[name]} == set()
    assert after["momentum.bank.image_moments.first"] == torch.float64
    loss = create_loss(objective, model=model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    coder_plugin.follow(model, optimizer)
    for seed in range(3):
        sum(loss(**model(**batch(seed=seed))).values()).backward()
        optimizer.step()
    assert model.coder.heads["prototypes"].centres.ready and int(model.coder.heads["momentum"].bank.count) == 8


@pytest.mark.parametrize("part", ["model", "visual"])
def test_weights_that_are_loaded_before_the_first_step_are_copied(tiny_model, part):
    """A warm start without the copies' weights, as from plain open_clip, and of one tower; a teacher's copy, too."""
    loss = RECIPE + " + distill(teacher=base)"
    model = coder_plugin.create_model(tiny_model, loss=loss).train()
    towers = {name: torch.randn_like(value) for name, value in model.state_dict().items() if not name.startswith("coder.")}
    if part == "model":
        model.load_state_dict(towers, strict=False)
    else:
        own = {name.removeprefix("visual."): value for name, value in towers.items() if name.startswith("visual.")}
        model.visual.load_state_dict(own)
        model(**batch())
    for copied in (tower(model), model.coder.heads["teacher"].copy):
        assert torch.equal(copied.model.visual.proj, towers["visual.proj"])
    before = tower(model).model.visual.proj.clone()
    model.coder.post_step()
    model.load_state_dict(towers | {"visual.proj": torch.zeros_like(before)}, strict=False)
    assert torch.equal(tower(model).model.visual.proj, before)  # an average of steps stays


def test_copies_are_no_modules_of_the_model(model):
    """What walks over modules, such as peft, weight averages and requires_grad_, leaves them alone."""
    assert not [name for name, _ in model.named_modules() if ".towers." in name]
    assert [name for name in model.state_dict() if ".towers.model.visual.proj" in name]
    model.requires_grad_(True)
    assert not any(parameter.requires_grad for parameter in tower(model).parameters())
    assert len(list(tower(model).parameters())) > 10


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_made_before_the_first_step_and_before_a_tower_is_locked(model, use_buffers):
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=use_buffers)
    model.coder.post_step()
    average.update_parameters(model)
    model.lock_image_tower()
    model.coder.post_step()
    nudge(model)
    average.update_parameters(model)
    assert average.n_averaged == 2 and not torch.equal(average.module.text_projection, model.text_projection)


def follow() -> dict[str, torch.Tensor]:
    """Ranks with unequal data, so unequal BatchNorm statistics."""
    from coder_plugin import distributed

    torch.manual_seed(0)
    model = coder_plugin.create_model("coder-tiny", loss=RECIPE).train()
    loss = create_loss(RECIPE, model=model)
    for seed in range(2):
        loss(**model(**batch(4, seed=10 * seed + distributed.rank())))
        model.coder.post_step()
    return model.coder.heads["momentum"].state_dict()


def test_two_ranks_hold_the_same_copy_statistics_included():
    one, two = gloo.run(follow)
    assert any("running_mean" in name for name in one)
    assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []
