"""A learning rate of their own for the objective's heads, which begin anew where the towers are pretrained."""

from __future__ import annotations

from typing import Any

from torch import nn


def split_heads(optimizer: Any, model: nn.Module, scale: float) -> Any:
    """A fresh optimizer with the heads' parameters in groups of their own, ``lr_scale`` beside the learning rate.

    The heads' groups come last: 3.3 logs the first group's rate.
    """
    heads = {id(parameter) for name, parameter in model.named_parameters() if name.startswith("coder.heads.")}
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in heads]
        if own:
            others = [parameter for parameter in group["params"] if id(parameter) not in heads]
            factor = scale * group.get("lr_scale", 1.0)
            apart = {**group, "params": own, "lr": group["lr"] * scale, "lr_scale": factor}
            optimizer.param_groups.append(apart)
            group["params"] = others
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def base_learning_rate(optimizer: Any) -> float:
    """In place of main's, which logs the largest rate of all groups for the towers'."""
    return max((float(group["lr"]) / group.get("lr_scale", 1.0) for group in optimizer.param_groups), default=0.0)


def assign_learning_rate(optimizer: Any, new_lr: float) -> None:
    """In place of 3.3's, which gives all groups one rate."""
    for group in optimizer.param_groups:
        group["lr"] = new_lr * group.get("lr_scale", 1.0)
