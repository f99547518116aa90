"""Recipes in numbers: every option that a recipe's objective and run resolve to, for tests that write the papers' values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from coder_plugin import recipes, registry
from coder_plugin.config import TrainConfig
from coder_plugin.model import required_heads
from coder_plugin.pretrained.options import resolve_config
from coder_plugin.training.optim import create_schedule
from coder_plugin.training.prepare import make_objective


def configuration(name: str) -> TrainConfig:
    """A recipe's run on some data; a recipe for any CLIP takes ViT-B-32."""
    model = {} if "model" in recipes.load(name).settings else {"model": "ViT-B-32"}
    return resolve_config({"recipe": name, "train_data": "x.tar", **model})


def resolved(name: str) -> dict[str, Any]:
    """Weights of the terms by label, and every option of terms and heads, defaults included, by ``OWNER.OPTION``."""
    objective = make_objective(configuration(name))
    found: dict[str, Any] = {}
    for label, term in zip(objective.labels(), objective.terms, strict=True):
        found[label] = term.weight
        found.update({f"{label}.{option}": value for option, value in _options("losses", term.name, term.options).items()})
    given = dict(objective.heads)
    for head in required_heads(objective):
        found.update({f"{head}.{option}": value for option, value in _options("heads", head, given.get(head, ())).items()})
    return found


def owners(options: dict[str, Any]) -> set[str]:
    """Terms and heads of which there is a value."""
    return {key.partition(".")[0] for key in options}


def rates(name: str) -> list[float]:
    """The learning rate of each epoch's last step, of ten."""
    config = configuration(name)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optim.lr)
    schedule = create_schedule(optimizer, config, 10)
    factor = schedule.lr_lambdas[0]
    return [config.optim.lr * factor(10 * epoch + 9) for epoch in range(config.optim.epochs)]


def first_rate(name: str) -> float:
    """The learning rate of the first step, of ten an epoch."""
    config = configuration(name)
    schedule = create_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optim.lr), config, 10)
    return float(schedule.get_last_lr()[0])


def _options(group: str, owner: str, given: Any) -> dict[str, Any]:
    parameters = inspect.signature(registry.load(group, owner)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert dict(given).keys() <= defaults.keys()
    return {**defaults, **dict(given)}
