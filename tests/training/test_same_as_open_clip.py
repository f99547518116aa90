"""``--loss clip`` in this trainer and in open_clip's: the same losses over up to 50 steps on the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch
from timm.optim import create_optimizer_v2

from coder_plugin import Trainer

OPTIONS = {"lr": 1e-3, "wd": 0.2, "beta1": 0.9, "beta2": 0.98, "eps": 1e-6, "warmup": 10, "grad_clip_norm": 1.0}


class Recorder(Trainer):
    """Keeps each step's batches and loss, and the weights before the first step."""

    def run(self) -> dict[str, Any]:
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.losses: list[float] = []
        return super().run()

    def training_step(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        self.seen += [(batch["image"].clone(), batch["text"].clone()) for batch in batches]
        metrics = super().training_step(batches)
        self.losses.append(metrics["loss"])
        return metrics


class Batches(list):  # type: ignore[type-arg]
    """A loader of open_clip's trainer."""

    num_batches = property(len)
    num_samples = property(lambda self: sum(len(images) for images, _ in self))


@pytest.mark.parametrize(("accum_freq", "steps"), [(1, 15), *(pytest.param(n, 50, marks=pytest.mark.slow) for n in (1, 2))])
def test_clip_has_open_clips_losses(accum_freq: int, steps: int, tiny_model: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "batch_size": 8, "accum_freq": accum_freq, "train_num_samples": 8 * accum_freq * steps, "epochs": 1}
    options |= {"workers": 0, "report": False, "val_frequency": 0, "logs": str(tmp_path), "precision": "fp32"}
    ours = Recorder(model=tiny_model, loss="clip", train="scenes", config=options)
    ours.run()
    assert len(ours.losses) == steps and (steps < 50 or ours.losses[-1] < ours.losses[0])

    config = Path(tiny_model)
    open_clip.add_model_config(config)
    plain = open_clip.create_model(config.stem, output_dict=True)
    plain.load_state_dict({name: value for name, value in ours.initial.items() if not name.startswith("coder.")})
    args = SimpleNamespace(
        device="cpu", precision="fp32", distill=False, accum_freq=accum_freq, skip_scheduler=False, horovod=False, rank=0,
        grad_clip_norm=OPTIONS["grad_clip_norm"], log_every_n_steps=1, batch_size=8, world_size=1, wandb=False,
        distributed=False,
    )  # fmt: skip
    betas = (OPTIONS["beta1"], OPTIONS["beta2"])
    optimizer = create_optimizer_v2(plain, "adamw", lr=1e-3, weight_decay=OPTIONS["wd"], betas=betas, eps=OPTIONS["eps"])
    clip_loss, losses = open_clip.ClipLoss(), []

    def loss(**outputs: Any) -> Any:
        result = clip_loss(**outputs)
        losses.append(result["contrastive_loss"].item())
        return result

    data = SimpleNamespace(set_epoch=lambda epoch: None, dataloader=Batches(ours.seen))
    schedule = cosine_lr(optimizer, OPTIONS["lr"], OPTIONS["warmup"], steps)
    train_one_epoch(plain, {"train": data}, loss, 0, optimizer, None, schedule, None, args)
    # one forward: bit for bit here; of two, the sums of gradients round differently, which 50 steps amplify to 5e-5
    assert ours.losses == pytest.approx(losses[::accum_freq], rel=1e-6 if accum_freq == 1 else 5e-4)
