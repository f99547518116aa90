"""Locked towers stay what they were; how ranks share the loss."""

import json
from dataclasses import replace

import open_clip
import pytest
import torch

from coder_plugin import create_loss, create_model
from coder_plugin.config import TrainConfig
from coder_plugin.objective import Objective
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training import prepare
from coder_plugin.training.resume import comparable


def test_locked_batch_norms_of_a_timm_tower_keep_their_statistics_and_activation(tmp_path):
    config = {
        "embed_dim": 16,
        "vision_cfg": {"timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": "linear", "image_size": 64},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
        "custom_text": True,
    }
    path = tmp_path / "locked-timm-test.json"
    path.write_text(json.dumps(config))
    options = {"model": str(path), "lock_image": True}
    model = prepare.make_training_model(TrainConfig().with_options(**options), Objective.parse("dcl"), torch.device("cpu"))
    image = torch.randn(4, 3, 64, 64)
    before = {name: value.clone() for name, value in model.visual.trunk.state_dict().items()}
    expected = model.eval().visual(image)
    assert torch.equal(model.train().visual(image), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.visual.trunk.state_dict().items())
    if open_clip.__version__.startswith("3."):  # 4 locks the projection as well
        assert any(parameter.requires_grad for parameter in model.visual.head.parameters())

    plain = TrainConfig().with_options(model=str(path))
    open_clips = prepare.make_training_model(plain, Objective.parse("dcl"), torch.device("cpu"))
    open_clips.load_state_dict(model.state_dict())
    assert torch.equal(open_clips.eval().visual(image), expected)


RESNET = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8, "patch_size": None},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.mark.parametrize(
    "options, frozen",
    [
        ({"lora_rank": 2}, True),
        ({"lora_rank": 2, "lock_image_freeze_bn_stats": False}, False),
        ({"lock_image": True}, True),
        ({"lock_image": True, "lock_image_freeze_bn_stats": False}, False),
        ({}, False),
    ],
)
def test_statistics_of_frozen_batch_norms(options, frozen, tmp_path, caplog):
    path = tmp_path / "resnet-for-tests.json"
    path.write_text(json.dumps(RESNET))
    config = TrainConfig().with_options(model=str(path), **options)
    model = prepare.make_training_model(config, Objective.parse("dcl"), torch.device("cpu")).train()
    before = {name: value.clone() for name, value in model.visual.named_buffers()}
    model.visual(torch.randn(4, 3, 32, 32))
    assert before and all(torch.equal(value, before[name]) for name, value in model.visual.named_buffers()) is frozen
    assert ("the image tower has no linear layers in numbered blocks, so it gets no adapters" in caplog.text) is (
        "lora_rank" in options
    )


def test_several_processes_compute_their_own_anchors(monkeypatch, tiny_model):
    def local_loss(loss=None, **options):
        config = resolve_config({"model": tiny_model, "loss": "dcl", **options}, flags_name="argument")
        return prepare.make_objective(config, loss).local_loss

    assert not local_loss() and local_loss(local_loss=True)
    monkeypatch.setattr("coder_plugin.distributed.world_size", lambda: 2)
    assert local_loss() and not local_loss(local_loss=False)
    model = create_model(tiny_model, loss="dcl")
    made = create_loss("dcl", model=model)
    assert not local_loss(made)  # a loss object is computed as it was made
    one, two = Objective.parse("dcl"), replace(Objective.parse("dcl"), local_loss=True)
    assert comparable(one) == comparable(two)  # a run may be resumed with another number of processes


@pytest.mark.parametrize("model, tag", [("ViT-B-32", "laion2b_s34b_b79k"), ("RN50", "cc12m"), ("coder-tiny", None)])
def test_the_weights_that_are_suggested_are_those_of_the_pages(model, tag, caplog):
    prepare.say_random_weights(TrainConfig().with_options(model=model))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([] if tag is None else [
        f"{model} starts from random weights; open_clip has trained ones, such as --pretrained {tag}"
    ])


@pytest.mark.parametrize("loss, batch_size, named", [("clip + m_dcl", 1, "clip"), ("clip", 2, None), ("m_dcl", 1, None)])
def test_a_batch_of_one_pair_is_warned_of(loss, batch_size, named, caplog, tiny_model):
    model = create_model(tiny_model, loss=loss)
    criterion = create_loss(loss, model=model)
    prepare.check_pairs(TrainConfig().with_options(batch_size=batch_size), criterion)
    if batch_size == 1:
        criterion.warn_of_one_pair()  # in the first step
    lines = [record.getMessage() for record in caplog.records if "no negatives" in record.getMessage()]
    assert len(lines) == (named is not None) and all(f"and {named} has no others" in line for line in lines)
