"""A separate learning rate for the heads, which start from scratch where the towers are pretrained."""

from __future__ import annotations

from typing import Any

from torch import nn


def split_heads(optimizer: Any, model: nn.Module, scale: float) -> Any:
    """Move the heads' parameters of a new optimizer into separate groups, with ``lr_scale`` besides the learning rate.

    The heads' groups come last, because 3.3 logs the first group's rate.
    """
    heads = {id(parameter) for name, parameter in model.named_parameters() if name.startswith("coder.heads.")}
    for group in list(optimizer.param_groups):
        in_heads = [parameter for parameter in group["params"] if id(parameter) in heads]
        if in_heads:
            others = [parameter for parameter in group["params"] if id(parameter) not in heads]
            factor = scale * group.get("lr_scale", 1.0)
            optimizer.param_groups.append({**group, "params": in_heads, "lr": group["lr"] * scale, "lr_scale": factor})
            group["params"] = others
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def base_learning_rate(optimizer: Any) -> float:
    """Replaces main's function, which would log the largest rate of all groups as the towers'."""
    return max((float(group["lr"]) / group.get("lr_scale", 1.0) for group in optimizer.param_groups), default=0.0)


def assign_learning_rate(optimizer: Any, new_lr: float) -> None:
    """Replaces 3.3's function, which gives all groups the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = new_lr * group.get("lr_scale", 1.0)
