"""Training on a GPU: the same numbers as on a CPU, one wait a step, refused steps and copies beside the step before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from coder_plugin import Trainer
from coder_plugin.training.step import NonFiniteError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SETTINGS = ["momentum.bank_size=64", "prototypes.clusters=4", "prototypes.recluster=24"]


def make(folder: Path, model: str, **more: Any) -> Trainer:
    options = {"batch_size": 8, "train_num_samples": 128, "workers": 0, "logs": str(folder), "name": "run", "epochs": 1}
    options |= {"val_frequency": 0, "warmup": 0, "report": False, "log_every_n_steps": 100, "precision": "fp32", "tf32": False}
    trainer = Trainer(model=model, loss="coder", train="scenes", config={**options, "set": SETTINGS, **more})
    trainer.setup_optimizer()
    trainer.model.train()
    return trainer


def groups(trainer: Trainer) -> Any:
    return trainer._groups(trainer.loader.epoch(0))


def state(trainer: Trainer) -> dict[str, Any]:
    moments = trainer.optimizer.state_dict()["state"]
    moments = {f"{index}.{name}": value for index, each in moments.items() for name, value in each.items()}
    return {name: value.detach().clone() for name, value in {**trainer.model.state_dict(), **moments}.items()}


def test_losses_are_those_of_a_cpu(tmp_path, tiny_model, monkeypatch) -> None:
    from accelerate.state import AcceleratorState

    losses = {}
    for device in ("cpu", "cuda"):
        AcceleratorState._reset_state(reset_partial_state=True)
        with monkeypatch.context() as patch:
            if device == "cpu":
                patch.setattr(torch.cuda, "is_available", lambda: False)
            torch.manual_seed(0)
            trainer = make(tmp_path / device, tiny_model)
            assert trainer.device.type == device
            steps = groups(trainer)
            losses[device] = [trainer.training_step(trainer._on_device(next(steps))) for trainer.step in range(2)]
    for step, tolerance in enumerate((1e-3, 3e-2)):
        assert losses["cuda"][step] == pytest.approx(losses["cpu"][step], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_a_refused_step_changes_nothing(tmp_path, tiny_model, precision) -> None:
    trainer = make(tmp_path, tiny_model, precision=precision, grad_clip_norm=1.0)
    steps = groups(trainer)
    for trainer.step in range(2):
        trainer.training_step(trainer._on_device(next(steps)))
    before, group = state(trainer), trainer._on_device(next(steps))
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    hook = weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteError, match="gradient of"):
        trainer.training_step(copy.copy(group))
    hook.remove()
    after = state(trainer)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    trainer.optimizer.zero_grad()
    metrics = trainer.training_step(group)
    assert all(map(torch.isfinite, map(torch.tensor, metrics.values())))
    assert any(not torch.equal(value, state(trainer)[name]) for name, value in before.items())


def test_the_host_waits_once_in_a_step_and_after_the_optimizer(tmp_path, tiny_model) -> None:
    trainer = make(tmp_path, tiny_model, precision="amp_bf16", set=[*SETTINGS[:2], "prototypes.recluster=120"])
    steps, queued = groups(trainer), []
    for trainer.step in range(3):
        trainer.training_step(trainer._on_device(next(steps)))
    trainer.step = 3
    group = trainer._on_device(next(steps))
    trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: queued.append(True))
    read = type(trainer)._after_optimizer

    def waits(self: Any, optimizer: Any, *arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        read(self, optimizer, *arguments)  # the one wait
        torch.cuda.set_sync_debug_mode("error")

    optimizer = trainer.optimizer.optimizer
    optimizer._optimizer_step_post_hooks[next(iter(optimizer._optimizer_step_post_hooks))] = waits.__get__(trainer)
    try:
        torch.cuda.set_sync_debug_mode("error")
        trainer.training_step(group)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert queued == [True]


def test_pictures_copied_ahead_are_those_of_the_batch(tmp_path, tiny_model) -> None:
    trainer = make(tmp_path, tiny_model)
    ahead = groups(trainer)
    stream = trainer._copies
    plain = make(tmp_path / "plain", tiny_model).loader.epoch(0)
    following = next(ahead)
    for _ in range(5):
        group, following = following, next(ahead)
        assert group.copied is not None and trainer._copies is stream
        (batch,) = trainer._on_device(group)
        torch.cuda._sleep(10_000_000)  # the next copy ends before this batch is read
        expected = trainer._to_device(next(plain))
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], value) for name, value in expected.items() if isinstance(value, torch.Tensor))
