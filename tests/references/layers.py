"""Layers of the released encoders the slow way, over lists of sets [n, C] in float64 that have no padding.

``state`` holds an encoder's weights under its authors' names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Sets = list[Tensor]


def linear(x: Tensor, state: State, name: str) -> Tensor:
    """Rows [n, C] through a linear layer, or a convolution of kernel 1."""
    weight = state[f"{name}.weight"].flatten(1)
    return torch.stack([torch.stack([(row * w).sum() for w in weight]) + state[f"{name}.bias"] for row in x])


def batch_norm(sets: Sets, state: State, name: str, training: bool, eps: float = 1e-5) -> Sets:
    """Over all positions of all sets together; in training with their own mean and (biased) variance."""
    rows = [row for one in sets for row in one]
    mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    if training:
        mean = sum(rows, torch.zeros_like(mean)) / len(rows)
        variance = sum(((row - mean) ** 2 for row in rows), torch.zeros_like(mean)) / len(rows)
    scale, shift = state[f"{name}.weight"], state[f"{name}.bias"]
    return [torch.stack([(row - mean) / (variance + eps).sqrt() * scale + shift for row in one]) for one in sets]


def unit_channels(x: Tensor) -> Tensor:
    """Each channel over its norm along the set."""
    return torch.stack([channel / math.sqrt(sum(float(v) ** 2 for v in channel)) for channel in x.T], 1)


def unit(vector: Tensor) -> Tensor:
    return vector / math.sqrt(sum(float(v) ** 2 for v in vector))


def softmax(scores: Tensor) -> Tensor:
    powers = torch.tensor([math.exp(float(score) - float(scores.max())) for score in scores], dtype=scores.dtype)
    return powers / powers.sum()
