"""The resolved plan of a run: terms, heads, shapes, parameters, data, steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from coder_plugin import distributed
from coder_plugin.config import TrainConfig, options_by_name
from coder_plugin.training import prepare
from coder_plugin.training.log import machine, versions
from coder_plugin.training.step import restored_buffers

if TYPE_CHECKING:
    from coder_plugin.training.loop import Trainer


def make_plan(trainer: Trainer) -> dict[str, Any]:
    """What ``--dry-run`` prints and ``plan.json`` holds. Call it on every rank: the forward pass may gather."""
    config, model, loader = trainer.config, trainer.model, trainer.loader
    training = model.training
    model.train()
    devices = [trainer.device] if trainer.device.type == "cuda" else []
    with torch.no_grad(), restored_buffers(model), torch.random.fork_rng(devices=devices):
        outputs = model(**prepare.example_batch(model, trainer.tokenizer, rows=2))
    model.train(training)
    parameters = list(model.parameters())
    optim = config.optim
    return {
        "run": str(trainer.folder),
        "objective": str(trainer.objective),
        "options": trainer.objective.to_dict(),
        "terms": trainer.objective.labels(),
        "heads": {name: sum(p.numel() for p in head.parameters()) for name, head in model.coder.heads.items()},
        "notes": {name: notes for name, head in model.coder.heads.items() if (notes := head.notes())},
        "model": f"{config.model.name} ({type(model).__name__})",
        "outputs": {key: ["B", *value.shape[1:]] if value.ndim else [] for key, value in outputs.items()},
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "frozen because no term reads them": trainer.frozen,
        "training data": {
            "name": loader.source.name,
            "images": loader.source.num_images,
            "samples per epoch": loader.samples_per_epoch,
            "captions": config.data.captions,
        },
        "validation data": None if trainer.val is None else {"name": trainer.val.name, "images": trainer.val.num_images},
        "batch": {
            "per rank and forward": optim.batch_size,
            "global per step": optim.batch_size * optim.accum_freq * distributed.world_size(),
        },
        "steps per epoch": trainer.steps_per_epoch,
        "epochs": optim.epochs,
        "precision": {"no": "fp32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision),
        "device": str(trainer.device),
        "machine": machine(trainer.device),
        "ranks": distributed.world_size(),
        "changed on resume": trainer.changes,
        "versions": versions(),
    }


def options_with_origins(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Every option that has a value, by flat name, with the layer that set it: default, scenes, model, recipe, file or flag."""
    values: Mapping[str, Any] = config.to_flat()
    return {
        name: {"value": values[name], "from": config.origins.get(name, "default")}
        for name in options_by_name()
        if values[name] not in (None, [])
    }
