"""A step waits for the device once, and runs the momentum towers once for each micro-batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coder_plugin import Trainer, distributed
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training.optim import has_fused_step
from tests.host_reads import host_reads
from tests.reliability import ranks as forked

SETTINGS = {
    "coder": ["momentum.bank_size=64", "prototypes.clusters=4", "prototypes.recluster=24"],
    "clip": [],
    "ascl": [],
    "selfalign": [],
    "clip + 0.5*triplet": [],
}


def make(folder: Path, model: str, loss: str, **more: Any) -> Trainer:
    options = {"batch_size": 8, "train_num_samples": 128, "workers": 0, "logs": str(folder), "name": "run", "epochs": 1}
    options |= {"model": model, "val_frequency": 0, "warmup": 0, "report": False, "log_every_n_steps": 100}
    trainer = Trainer(model=model, loss=loss, train="scenes", config={**options, "set": SETTINGS[loss], **more})
    trainer.setup_optimizer()
    trainer.model.train()
    return trainer


def reads_of_steps(trainer: Trainer, steps: int) -> list[list[str]]:
    batches, found, before = trainer.loader.epoch(0), [], []
    hook = trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: before.append(len(reads)))
    for trainer.step in range(steps):
        group = [trainer._to_device(next(batches)) for _ in range(trainer.config.optim.accum_freq)]
        with host_reads() as reads:
            trainer.training_step(group)
            assert not trainer._all_leave()
        found.append(reads)
    hook.remove()
    assert before[1:] == [0] * (steps - 1), "the host waits before the optimizer's step is queued"
    return found


QUICK = [("coder", 1)]
SLOW = [(loss, 1) for loss in SETTINGS if loss != "coder"] + [("clip", 2), ("coder", 2), ("selfalign", 2)]


@pytest.mark.parametrize(("loss", "accum_freq"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_step_reads_the_device_once(tmp_path, tiny_model, loss, accum_freq) -> None:
    """Not in the first step, which logs, nor where the prototypes are clustered anew: after 24, 48 and 72 pairs."""
    trainer = make(tmp_path, tiny_model, loss, accum_freq=accum_freq, grad_clip_norm=1.0)
    check_reads(reads_of_steps(trainer, 11 if accum_freq == 1 else 7), pairs=8 * accum_freq, clusters=loss == "coder")


def check_reads(found: list[list[str]], *, pairs: int, clusters: bool) -> None:
    clustered = {step for step in range(11) if clusters and (step + 1) * pairs // 24 != step * pairs // 24}
    assert {0, *clustered} != set(range(len(found)))
    for step, reads in enumerate(found):
        if step and step not in clustered:
            assert len(reads) == 1 and reads[0].startswith("tolist at step.py"), (step, reads)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["coder", "clip"])
def test_a_step_of_two_ranks_reads_the_device_once(tmp_path, tiny_model, loss) -> None:
    """As in one process. The ranks agree to go on without a further read."""

    def train(folder: Path) -> None:
        trainer = make(folder, tiny_model, loss, grad_clip_norm=1.0)
        assert distributed.world_size() == 2
        check_reads(reads_of_steps(trainer, 7), pairs=16, clusters=loss == "coder")

    endings = forked.run(train, tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings


def test_the_counter_sees_reads() -> None:
    """Each kind of read that a step might make."""
    values, mask = torch.arange(3.0), torch.tensor([True, False, True])
    kinds = [
        lambda: values.sum().item(),
        lambda: int(values[0]),
        lambda: bool(values[1] > 0),
        lambda: values.tolist(),
        lambda: values.nonzero(),
        lambda: values[mask],
        lambda: values.clone().__setitem__(mask, torch.ones(2)),
        lambda: values.unique(),
        lambda: values.cpu(),
        lambda: values.masked_select(mask),
        lambda: values.numpy(),
    ]
    for number, kind in enumerate(kinds):
        with host_reads() as reads:
            kind()
        assert reads, number
    with host_reads() as reads:
        torch.where(mask, values, 0).sort().values[torch.tensor([1])] * 2
    assert not reads


@pytest.mark.parametrize("accum_freq", [1, 3])
def test_the_momentum_towers_run_once_for_each_micro_batch(tmp_path, tiny_model, accum_freq) -> None:
    trainer = make(tmp_path, tiny_model, "coder", accum_freq=accum_freq)
    towers, online = trainer.model.coder.heads["momentum"].towers, trainer.model
    calls = {"momentum": 0, "online": 0}
    towers.register_forward_hook(lambda *_: calls.__setitem__("momentum", calls["momentum"] + 1))
    online.register_forward_hook(lambda *_: calls.__setitem__("online", calls["online"] + 1))
    batches = trainer.loader.epoch(0)
    for steps in (1, 2):
        trainer.training_step([trainer._to_device(next(batches)) for _ in range(accum_freq)])
        assert calls == {"momentum": steps * accum_freq, "online": steps * accum_freq * (1 if accum_freq == 1 else 2)}
    assert int(trainer.model.coder.heads["momentum"].bank.count) == 2 * 8 * accum_freq


def test_towers_in_training_mode_run_in_both_passes(tmp_path, tiny_model) -> None:
    """Dropout draws random numbers: the second pass must draw them too, or the heads after it would draw others."""
    more = {"accum_freq": 2, "set": [*SETTINGS["coder"], "momentum.mode=train"]}
    trainer = make(tmp_path, tiny_model, "coder", **more)
    calls = []
    trainer.model.coder.heads["momentum"].towers.register_forward_hook(lambda *_: calls.append(1))
    batches = trainer.loader.epoch(0)
    trainer.training_step([trainer._to_device(next(batches)) for _ in range(2)])
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("opt", "precision", "device", "fused"),
    [
        ("adamw", "fp32", "cuda", True),
        ("adam", "amp_bf16", "cuda", True),
        ("adamw", "amp", "cuda", False),  # the loss scaler must learn of steps that are skipped
        ("adamw", "fp32", "cpu", True),
        ("adamw", "fp32", "xpu", False),
        ("lamb", "fp32", "cuda", False),
    ],
)
def test_the_fused_optimizer_is_for_cpu_and_cuda_without_a_loss_scaler(opt, precision, device, fused, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    config = resolve_config({"opt": opt, "precision": precision}, flags_name="argument")
    parameter = SimpleNamespace(device=torch.device(device), is_floating_point=lambda: True)
    assert has_fused_step(opt, config, [parameter]) is fused
