"""What the scripts that train on features of frozen towers share: settings, optimizer, schedule, the best epoch, records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.expression import parse_value
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``OWNER.OPTION=VALUE`` as values by ``OWNER.OPTION``."""
    return {key: parse_value(value) for key, value in (setting.split("=", 1) for setting in settings)}


def with_settings(objective: Objective, settings: dict[str, Any]) -> Objective:
    """The objective with those settings whose owner, a term or a head, it has."""
    owners = {*required_heads(objective), *(term.name for term in objective.terms)}
    return objective.with_options({key: value for key, value in settings.items() if key.rpartition(".")[0] in owners})


def make_optimizer(model: nn.Module, lr: float, wd: float) -> torch.optim.AdamW:
    """AdamW; biases, gains and scalars have no weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": wd},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        fused=True,
    )


def rate(step: int, total: int) -> float:
    """Factor of the learning rate: linear warm-up over 5 % of the steps, then a cosine to zero."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


class BestWeights:
    """Those of the epoch with the highest score."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.score = model, -math.inf
        self.weights: dict[str, Tensor] = {}

    def keep(self, score: float) -> None:
        """Copy the weights if the score is higher than all before."""
        if score > self.score:
            self.score, self.weights = score, {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self) -> None:
        """Give the model the copied weights."""
        self.model.load_state_dict(self.weights)


def append_record(path: str | None, record: dict[str, Any]) -> None:
    """Write a line of JSON, if there is a path."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(json.dumps(record) + "\n")
