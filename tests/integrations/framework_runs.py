"""Trainings for test_frameworks.py: the same one in a raw loop, Hugging Face's Trainer, Lightning and sentence-transformers.

Importing this takes seconds, so tests import it in a fixture.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import coder_plugin
from coder_plugin import distributed, follow
from coder_plugin.data.scenes import open_scenes
from coder_plugin.following import clamp_logit_scale
from coder_plugin.integrations.lightning import FollowCallback
from coder_plugin.integrations.transformers import CoderTrainer, retrieval_metrics
from coder_plugin.integrations.transformers import FollowCallback as HuggingFaceFollowCallback
from coder_plugin.objective import Objective
from coder_plugin.training.optim import create_optimizer
from tests.integrations import sentence_transformers_runs

__all__ = ["create_optimizer", "retrieval_metrics"]

BANKS = "dcl + m_dcl"
#: A bank of two and a half batches; prototypes are clustered after the third step.
OPTIONS: dict[str, dict[str, Any]] = {
    BANKS: {"momentum.bank_size": 10},
    "coder": {
        "momentum.bank_size": 10,
        "concepts.vocabulary": "scenes",
        "prototypes.clusters": 3,
        "prototypes.recluster": 12,
    },
}
PAIRS, STEPS = 4, 4
Batch = dict[str, Tensor]
State = dict[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def objective(loss: str, *, local_loss: bool = False) -> Objective:
    parsed = Objective.parse(loss).with_options(OPTIONS.get(loss, {}))
    return Objective(parsed.terms, parsed.heads, local_loss)


def make(path: str, loss: str = BANKS) -> Any:
    """A model in training mode; the same weights each time."""
    torch.manual_seed(0)
    return coder_plugin.create_model(path, loss=objective(loss)).train()


def batches(count: int = STEPS, *, seed: int = 0) -> list[Batch]:
    """Random pairs, each with an image of its own."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        text = torch.randint(1, 400, (PAIRS, 40), generator=random)
        text[:, 5] = 49407
        ids = torch.arange(PAIRS) + PAIRS * (number + 100 * seed)
        made.append({"image": torch.randn(PAIRS, 3, 64, 64, generator=random), "text": text, "image_id": ids})
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For comparisons up to rounding, of which AdamW makes more where a gradient is nearly zero."""
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def bank_ids(model: Any) -> list[int]:
    """The ids in the bank, in the order in which they were written, if it is not full."""
    bank = model.coder.heads["momentum"].bank
    return bank.ids[bank.valid].tolist()


def train(drive: Callable[..., Any], path: str, data: list[Batch], folder: Path, *, loss: str = BANKS, **options: Any) -> State:
    """The state after a training that begins with :func:`make`'s weights."""
    model = make(path, loss)
    torch.manual_seed(1)
    drive(model, coder_plugin.create_loss(objective(loss), model=model), data, folder, **options)
    return model.state_dict()


# -- each of these trains ``model`` on ``data``, and accumulates the gradients of ``accumulate`` batches for a step --------


def raw(
    model: Any,
    loss: Any,
    data: list[Batch],
    folder: Path,
    *,
    accumulate: int = 1,
    make_optimizer: MakeOptimizer = adamw,
    follows: bool = True,
) -> None:
    wrapped = DistributedDataParallel(model) if distributed.world_size() > 1 else model
    optimizer = make_optimizer(model)
    if follows:
        follow(model, optimizer, after_step=lambda: clamp_logit_scale(model))
    for number, batch in enumerate(data, 1):
        (sum(loss(**wrapped(**batch)).values()) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


class InOrder(CoderTrainer):
    """Takes the batches as they are."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None)


def hugging_face(
    model: Any,
    loss: Any,
    data: list[Batch],
    folder: Path,
    *,
    accumulate: int = 1,
    make_optimizer: MakeOptimizer = adamw,
    follows: bool = True,
    scaler: Any = None,
    resume: str | None = None,
    **options: Any,
) -> CoderTrainer:
    arguments = TrainingArguments(
        str(folder / "hugging-face"),
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,  # it clips to 1 by default
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{"num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", **options},
    )
    optimizer = make_optimizer(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = InOrder(model, loss=loss, args=arguments, train_dataset=data, optimizers=(optimizer, constant))
    if not follows:
        trainer.remove_callback(HuggingFaceFollowCallback)
    if scaler is not None:
        trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class Retrieval(lightning.LightningModule):
    """A user's module."""

    def __init__(self, model: Any, loss: Any, make_optimizer: MakeOptimizer = adamw) -> None:
        super().__init__()
        self.model, self.loss, self.make_optimizer = model, loss, make_optimizer

    def training_step(self, batch: Batch, number: int) -> Tensor:
        losses = self.loss(**self.model(**batch))
        self.log_dict(losses)
        return sum(losses.values())

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.model)


def lightning_trainer(folder: Path, *, follows: bool = True, further: Sequence[Any] = (), **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=str(folder),
        callbacks=[*([FollowCallback()] if follows else []), *further],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"max_epochs": 1, "enable_checkpointing": False, "devices": distributed.world_size(), **options},
    )


def in_lightning(
    model: Any,
    loss: Any,
    data: list[Batch],
    folder: Path,
    *,
    accumulate: int = 1,
    make_optimizer: MakeOptimizer = adamw,
    resume: str | None = None,
    **options: Any,
) -> Any:
    module = Retrieval(model, loss, make_optimizer)
    trainer = lightning_trainer(folder, accumulate_grad_batches=accumulate, **options)
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=resume)
    return trainer


def sentence_transformers(
    model: Any,
    loss: Any,
    data: list[Batch],
    folder: Path,
    *,
    accumulate: int = 1,
    make_optimizer: MakeOptimizer = adamw,
) -> None:
    options = {"gradient_accumulation_steps": accumulate, "max_steps": len(data) // accumulate}
    place = folder / "sentence-transformers"
    sentence_transformers_runs.train(model, loss.objective, data, place, make_optimizer(model), **options)


class InFloat32(MixedPrecision):
    """Lightning's loss scaling without its autocast."""

    def __init__(self, scaler: Any) -> None:
        super().__init__("16-mixed", "cpu", scaler)

    def forward_context(self) -> Any:
        return contextlib.nullcontext()


def two_epochs(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Options that save every epoch, and the checkpoint of the first, of two steps."""
    if name == "hugging_face":
        return folder / "hugging-face" / "checkpoint-2", {"num_train_epochs": 2, "save_strategy": "epoch"}
    saver = lightning.pytorch.callbacks.ModelCheckpoint(folder / "lightning", "{epoch}", save_top_k=-1)
    return folder / "lightning" / "epoch=0.ckpt", {"max_epochs": 2, "enable_checkpointing": True, "further": [saver]}


def joined(work: Callable[..., None], *args: Any) -> None:
    """``work(this module, *args)`` in a process group, as a launcher's script runs."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # which tells Lightning that the processes were launched
    dist.init_process_group("gloo")
    try:
        work(sys.modules[__name__], *args)
    finally:
        dist.destroy_process_group()


class Recorder(coder_plugin.Trainer):
    """Our trainer, which keeps the batches that it trains on."""

    seen: list[Batch]

    def training_step(self, batches: Any) -> dict[str, float]:
        self.seen.extend({name: value.clone() for name, value in batch.items()} for batch in batches)
        return super().training_step(batches)


def ours(model: Any, loss: str | Objective, folder: Path, *, steps: int = STEPS, **further: Any) -> Recorder:
    """Train on the built-in scenes."""
    optim = {"batch_size": PAIRS, "lr": 1e-3, "warmup": 0, "lr_scheduler": "const", "epochs": 1, **further}
    options = {**optim, "workers": 0, "report": False, "logs": str(folder), "name": "ours"}
    parsed = loss if isinstance(loss, Objective) else objective(loss)
    trainer = Recorder(model=model, loss=parsed, train=open_scenes("train", count=PAIRS * steps), config=options)
    trainer.seen = []
    trainer.run()
    return trainer
