"""What the scripts that train on features of frozen towers share: flags, settings, steps, best epoch, caches and records."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.expression import parse_value
from coder_plugin.model import required_heads
from coder_plugin.objective import Objective
from coder_plugin.training.optim import parameter_groups

#: Splits of a cache that choose nothing: the model of the best epoch is evaluated on them.
REPORTED = ("report", "test")


def add_training_options(parser: argparse.ArgumentParser, *, epochs: int, batch_size: int) -> None:
    """Flags of ``train``: the losses, their options and rates, the seeds, and where records go."""
    parser.add_argument("--losses", nargs="+", required=True, help="loss expressions, one run each")
    parser.add_argument("--set", nargs="*", default=[], action="extend", metavar="OWNER.OPTION=VALUE",
                        help="options of terms and heads; a loss without the owner ignores them")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=epochs, help=f"epochs [{epochs}]")
    parser.add_argument("--batch-size", type=int, default=batch_size, help=f"pairs of a step [{batch_size}]")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3], help="learning rates, one run each [1e-3]")
    parser.add_argument("--wd", type=float, default=0.05, help="weight decay [0.05]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each seed")
    parser.add_argument("--json", help="append results to this file")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``OWNER.OPTION=VALUE`` as values by ``OWNER.OPTION``."""
    return {key: parse_value(value) for key, value in (setting.split("=", 1) for setting in settings)}


def with_settings(objective: Objective, settings: dict[str, Any]) -> Objective:
    """The objective with those settings whose owner, a term or a head, it has."""
    owners = {*required_heads(objective), *(term.name for term in objective.terms)}
    return objective.with_options({key: value for key, value in settings.items() if key.rpartition(".")[0] in owners})


def make_optimizer(model: nn.Module, lr: float, wd: float, heads_lr_scale: float = 1.0) -> torch.optim.AdamW:
    """AdamW; biases, gains and scalars have no weight decay."""
    groups = parameter_groups(model, lr=lr, weight_decay=wd, heads_lr_scale=heads_lr_scale)
    return torch.optim.AdamW(groups, fused=True)


def rate(step: int, total: int) -> float:
    """Factor of the learning rate: linear warm-up over 5 % of the steps, then a cosine to zero."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


class Steps:
    """AdamW's steps on a warm-up and a cosine, with what the package wants after each one."""

    def __init__(
        self, model: Any, lr: float, wd: float, total: int, clip: float = math.inf, heads_lr_scale: float = 1.0
    ) -> None:
        self.model, self.clip = model, clip
        self.optimizer = make_optimizer(model, lr, wd, heads_lr_scale)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(step, total))

    def step(self, loss: Tensor) -> None:
        """Reduce a loss; gradients are clipped to the norm ``clip``."""
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip < math.inf:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()
        self.model.coder.post_step(self.optimizer)
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))


class CachedEncoder(nn.Module):
    """Replaces a transformers encoder. It returns the hidden states last passed to :meth:`set_states`, the first of them where
    fewer texts are encoded: a momentum copy of the model has the same encoder, and encodes the captions alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config, self.states = SimpleNamespace(hidden_size=width), torch.empty(0)

    def set_states(self, states: Tensor) -> None:
        self.states = states.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedEncoder:
        return self

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.states[: len(input_ids), : input_ids.shape[1]])


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


def plain(result: dict[str, Any], ranks: bool = False) -> dict[str, Any]:
    """A recall's numbers; with ``ranks`` also the ranks of every image and caption, as lists."""
    figures = {key: value for key, value in result.items() if not isinstance(value, Tensor)}
    return figures | ({key: result[key].tolist() for key in ("i2t_ranks", "t2i_ranks")} if ranks else {})


def save_cache(splits: dict[str, Any], path: str) -> None:
    """Write a cache as a whole or not at all."""
    torch.save(splits, f"{path}.tmp")
    Path(f"{path}.tmp").replace(path)


def append_record(path: str | None, record: dict[str, Any]) -> None:
    """Write a line of JSON, if there is a path."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(json.dumps(record) + "\n")
