"""The teacher: a frozen copy or another model, what is saved of it, and that nothing moves it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coder_plugin
from coder_plugin.config import TrainConfig
from coder_plugin.errors import CoderError
from coder_plugin.heads.teacher import open_teacher
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import export_model
from coder_plugin.training import prepare
from coder_plugin.training.average import WeightAverage
from coder_plugin.training.optim import parameter_groups
from tests.backbones import tiny_clip
from tests.conftest import TINY

BASE = "clip + distill"
PREFIX = "coder.heads.teacher."


@pytest.fixture
def model(tiny_model: str) -> Any:
    torch.manual_seed(0)
    return coder_plugin.create_model(tiny_model, loss=BASE).train()


def batch(n: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 400, (n, 40), generator=generator)
    text[:, 5] = 49407  # the end of the text
    return {"image": torch.randn(n, 3, 64, 64, generator=generator), "text": text}


def nudge(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def taught(model: Any) -> tuple[Tensor, Tensor]:
    outputs = model(**batch())
    return outputs["coder_teacher_image_features"], outputs["coder_teacher_text_features"]


@torch.no_grad()
def embedded(model: Any) -> tuple[Tensor, Tensor]:
    """Without a gradient, in eval mode: as the teacher computes it, to the last bit."""
    model.eval()
    return model.embed_image(batch()["image"]), model.embed_text(batch()["text"])


def teacher(model: Any) -> Any:
    return model.coder.heads["teacher"]


def saved(model: Any) -> set[str]:
    return {name.removeprefix(PREFIX) for name in model.state_dict() if name.startswith(PREFIX)}


def test_the_teacher_stays_where_training_started(model: Any) -> None:
    before = embedded(model)
    outputs = model.train()(**batch())
    assert torch.equal(outputs["coder_teacher_image_features"], before[0])
    assert torch.equal(outputs["coder_teacher_text_features"], before[1])
    assert outputs["coder_teacher_logit_scale"].tolist() == [float(model.logit_scale.detach().exp())] * 4
    loss = coder_plugin.create_loss(BASE, model=model)
    assert float(loss(**outputs)["distill_loss"].detach()) == pytest.approx(0, abs=1e-9)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    following = coder_plugin.follow(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        losses = loss(**model(**batch(seed=step)))
        sum(losses.values()).backward()
        optimizer.step()
    assert following.steps == 3 and float(losses["distill_loss"].detach()) > 1e-3
    model.eval().train()
    assert all(torch.equal(now, then) for now, then in zip(taught(model), before, strict=True))
    assert not torch.allclose(embedded(model)[0], before[0], atol=1e-3)


def test_the_teacher_is_not_trained_averaged_synchronised_or_exported(model: Any, tmp_path: Path) -> None:
    parameters = list(teacher(model).parameters())
    assert parameters and not any(each.requires_grad for each in parameters)
    assert not any(module.training for module in teacher(model).copy.model.modules())
    trained = {id(each) for group in parameter_groups(model, lr=1.0, weight_decay=0.1) for each in group["params"]}
    assert not trained & {id(each) for each in parameters}
    names = model.coder.state_names()  # what DDP ignores
    inside = {f"{PREFIX}{name}" for name, _ in (*teacher(model).named_parameters(), *teacher(model).named_buffers())}
    assert inside <= set(names)
    assert not any("teacher" in name for name in WeightAverage(model, 0.9, leave_out=names).weights)
    taught(model)
    sum(coder_plugin.create_loss(BASE, model=model)(**model(**batch())).values()).backward()
    assert all(each.grad is None for each in parameters)
    export_model(model, tmp_path / "export")
    opened = coder_plugin.load_model(tmp_path / "export")
    assert not any("teacher" in name for name in opened.state_dict())
    assert not any(b"coder_teacher" in file.read_bytes() for file in (tmp_path / "export").glob("*.safetensors"))


def test_what_is_locked_is_in_memory_and_in_checkpoints_once(model: Any) -> None:
    assert {name for name, _ in teacher(model).named_parameters()} <= saved(model)
    before = taught(model)
    model.lock_image_tower()
    model.coder.attach(model)  # as trainers do, after locking
    own = dict(model.named_parameters())
    for name, parameter in teacher(model).copy.model.named_parameters():
        assert (parameter is own[name]) == (not own[name].requires_grad), name
    locked = {name for name, parameter in own.items() if not parameter.requires_grad}
    assert len(locked) > 10 and not {f"copy.model.{name}" for name in locked} & saved(model)
    assert "copy.model.token_embedding.weight" in saved(model)
    taught(model)  # the forward pass of the first step
    nudge(model)
    assert all(torch.equal(now, then) for now, then in zip(taught(model), before, strict=True))


def test_a_tower_unlocked_later_does_not_take_the_teacher_along(model: Any) -> None:
    before = taught(model)
    model.lock_image_tower()
    model.coder.attach(model)
    for parameter in model.visual.parameters():
        parameter.requires_grad_(True)
    taught(model)  # the forward pass of the step that changes it
    nudge(model)
    assert all(torch.equal(now, then) for now, then in zip(taught(model), before, strict=True))
    assert "copy.model.visual.conv1.weight" in saved(model)
    assert not any(each.requires_grad for each in teacher(model).parameters())


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_a_checkpoint_brings_the_teacher_back(model: Any, tiny_model: str, then: bool, now: bool) -> None:
    """Whether a tower was locked when it was saved, and is when it is loaded; over other weights that training starts from."""
    want = taught(model)
    if then:
        model.lock_image_tower()
        model.coder.attach(model)
    nudge(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    other = coder_plugin.create_model(tiny_model, loss=BASE).train()
    if now:
        other.lock_image_tower()
        other.coder.attach(other)
    other.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items() if name in state)
    assert torch.equal(taught(other)[1], want[1])
    assert torch.equal(taught(other)[0], want[0])
    plain = {name: value for name, value in state.items() if not name.startswith(PREFIX)}
    with pytest.raises(RuntimeError, match="Missing key.*teacher"):
        other.load_state_dict(plain)


def test_with_adapters_the_base_has_none(tiny_model: str) -> None:
    torch.manual_seed(0)
    config = TrainConfig().with_options(model=tiny_model, lora_rank=2)
    model = prepare.make_training_model(config, Objective.parse(BASE), torch.device("cpu")).train()
    assert any("lora_" in name for name, _ in model.named_parameters())
    copied = teacher(model).copy.model
    assert not any("lora_" in name or "base_layer" in name for name, _ in copied.named_parameters())
    before = taught(model)
    torch.testing.assert_close(before[0], model(**batch())["image_features"], rtol=1e-5, atol=1e-6)
    nudge(model)
    assert all(torch.equal(now, then) for now, then in zip(taught(model), before, strict=True))
    assert not torch.allclose(model(**batch())["image_features"], before[0], atol=1e-3)
    kept = {name for name in saved(model) if "resblocks" in name}
    assert not any(".mlp." in name or ".ln_" in name for name in kept)  # attentions, which peft writes anew
    state = copy.deepcopy(model.state_dict())
    again = prepare.make_training_model(config, Objective.parse(BASE), torch.device("cpu")).train()
    again.load_state_dict(state)
    torch.testing.assert_close(taught(again)[0], before[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def export(tiny_model: str, tmp_path: Path) -> str:
    torch.manual_seed(5)
    other = coder_plugin.create_model(tiny_model, loss="clip")
    export_model(other, tmp_path / "another")
    return str(tmp_path / "another")


def test_another_model_as_the_teacher(tiny_model: str, export: str) -> None:
    """By its folder; of it a checkpoint holds a checksum."""
    other = coder_plugin.load_model(export)
    loss = f"clip + distill(teacher='{export}')"
    model = coder_plugin.create_model(tiny_model, loss=loss).train()
    want = embedded(other)
    assert all(torch.equal(got, each) for got, each in zip(taught(model), want, strict=True))
    value = coder_plugin.create_loss(loss, model=model)(**model(**batch()))["distill_loss"]
    assert float(value.detach()) > 0.1
    assert saved(model) == {"digest"} and model.state_dict()[f"{PREFIX}digest"].any()
    state = model.state_dict()
    again = coder_plugin.create_model(tiny_model, loss=loss).train()
    again.load_state_dict(state)
    assert all(torch.equal(got, each) for got, each in zip(taught(again), want, strict=True))
    model.coder.attach(model)  # it is not opened twice, nor replaced by the student
    assert all(torch.equal(got, each) for got, each in zip(taught(model), want, strict=True))
    loss = f"distill(teacher='local-dir:{export}', kind=similarity)"
    model = coder_plugin.create_model(tiny_model, loss=loss).train()
    sum(coder_plugin.create_loss(loss, model=model)(**model(**batch())).values()).backward()
    assert float(model.logit_scale.grad.abs()) > 0  # the student's; the teacher has its own


def test_a_wider_teacher_can_be_compared_by_similarity_only(tiny_model: str, tmp_path: Path) -> None:
    wide = tmp_path / "tiny-wide-for-teacher.json"
    wide.write_text(json.dumps({**TINY, "embed_dim": 48}))
    export_model(coder_plugin.create_model(str(wide), loss="clip"), tmp_path / "wide")
    loss = f"distill(teacher='{tmp_path / 'wide'}', kind=similarity)"
    model = coder_plugin.create_model(tiny_model, loss=loss).train()
    outputs = model(**batch())
    assert outputs["coder_teacher_image_features"].shape == (4, 48)
    sum(coder_plugin.create_loss(loss, model=model)(**outputs).values()).backward()
    assert model.visual.proj.grad.abs().sum() > 0
    with pytest.raises(CoderError, match="has features of 48 dimensions, the model of 32"):
        create = f"distill(teacher='{tmp_path / 'wide'}')"
        coder_plugin.create_loss(create, model=coder_plugin.create_model(tiny_model, loss=create))


def changed(**parts: Any) -> dict[str, Any]:
    return {**TINY, **{name: {**TINY[name], **values} for name, values in parts.items()}}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (changed(vision_cfg={"image_size": 32}), {}, r"pictures of \[32, 32\] pixels, and the model pictures of \[64, 64\]"),
        (changed(text_cfg={"context_length": 20}), {}, "it reads texts of 20 tokens, and the model texts of 40"),
        (TINY, {"force_preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}, r"pictures normalised with mean \[0.5, 0.5, 0.5\]"),
    ],
)
def test_a_teacher_that_reads_something_else_is_refused(
    model: Any, tmp_path: Path, config: dict, options: dict, message: str
) -> None:
    path = tmp_path / "tiny-other-for-teacher.json"
    path.write_text(json.dumps(config))
    export_model(coder_plugin.create_model(str(path), loss="clip", **options), tmp_path / "other")
    with pytest.raises(CoderError, match=message):
        open_teacher(str(tmp_path / "other"), model)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_models_of_transformers_teach(kind: str, tmp_path: Path) -> None:
    """Themselves, and each other: the folder that the student starts from is another teacher with the same features."""
    folder = getattr(tiny_clip, kind)(tmp_path / kind)
    for loss in (BASE, f"clip + distill(teacher='{folder}')"):
        model = coder_plugin.create_model(str(folder), loss=loss).train()
        image, text = torch.randn(3, 3, 32, 32), model.tokenizer()(["a dog", "two cats", "a red car"])
        outputs = model(image[:, :, : model.visual.image_size, : model.visual.image_size], text)
        losses = coder_plugin.create_loss(loss, model=model)(**outputs)
        assert float(losses["distill_loss"].detach()) == pytest.approx(0, abs=1e-8)
    assert saved(model) == {"digest"}
