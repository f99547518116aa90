"""Training by sentence-transformers' own trainer, on batches that are given or on a data set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from coder_plugin.integrations.sentence_transformers import CoderLoss, PictureText

COLOURS = ["red", "green", "blue", "yellow", "purple", "orange"]


def pictures(number: int = 6) -> list[Image.Image]:
    """Different plain pictures, 64 x 64 pixels."""
    return [Image.new("RGB", (64, 64), (40 * k, 250 - 30 * k, (90 * k) % 256)) for k in range(number)]


def wrap(model: Any) -> Any:
    """A model of ours as a ``SentenceTransformer``."""
    from sentence_transformers import SentenceTransformer

    options = {"similarity_fn_name": "dot", "trust_remote_code": True, "device": "cpu"}
    return SentenceTransformer(modules=[PictureText(model)], **options)


def trainer(model: Any, data: Any, folder: Any, *, loss: Any, batch_size: int = 4, **options: Any) -> Any:
    """A ``SentenceTransformerTrainer`` with a constant rate, without gradient clipping, which logs every step.

    Args:
        model: a ``SentenceTransformer``. data: a ``datasets.Dataset``. folder: of its checkpoints. loss: for ``CoderLoss``.
        options: of the trainer, where it has them, else of its arguments.
    """
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    of_trainer = {
        key: options.pop(key) for key in ("optimizers", "data_collator", "evaluator", "eval_dataset") if key in options
    }
    defaults = {
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = SentenceTransformerTrainingArguments(str(folder), **{**defaults, **options})
    loss = loss if isinstance(loss, torch.nn.Module) else CoderLoss(model, loss)
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss, **of_trainer)


def train(
    model: Any,
    loss: Any,
    batches: Sequence[Mapping[str, Tensor]],
    folder: Any,
    optimizer: Any = None,
    *,
    resume: str | None = None,
    **more: Any,
) -> list[float]:
    """Train a model of ours on these batches in their order.

    Args:
        batches: of every step of this process, with the keys ``image``, ``text`` and ``image_id``.
        folder: for what the trainer writes.
        optimizer: None: AdamW of :func:`trainer`.
        resume: the folder of a checkpoint.
        more: of the trainer's arguments.

    Returns:
        The loss of every step.
    """
    from datasets import Dataset

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if ranks > 1:  # as torchrun does
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        os.environ.update({name: str(value) for name, value in named.items()})
    features = [
        {"image_pixel_values": each["image"], "image_image_id": each["image_id"], "caption_input_ids": each["text"]}
        for each in batches
    ]
    options: dict[str, Any] = {} if ranks == 1 else {"ddp_backend": "gloo"}
    if optimizer is not None:
        options["optimizers"] = (optimizer, None)
    steps = Dataset.from_dict({"step": range(len(batches))})
    runs = trainer(wrap(model), steps, folder, loss=loss, **{"max_steps": len(batches), **options, **more})
    assert runs.accelerator.num_processes == ranks
    runs.get_train_dataloader = lambda: torch.utils.data.DataLoader(features, batch_size=None)  # type: ignore[method-assign]
    losses: list[float] = []  # older trainers log four digits of them
    runs.loss.register_forward_hook(lambda *call: losses.append(torch.stack(list(call[-1].values())).sum().item()))
    runs.train(resume_from_checkpoint=resume)
    return losses
