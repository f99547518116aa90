"""VSE-infinity's encoders, one image and one text at a time (Chen et al., CVPR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.references import gpo
from tests.references.layers import Sets, State, batch_norm, linear, unit


def image(images: Sets, state: State, *, training: bool = False) -> list[Tensor]:
    """Regions [n, R] of each image -> features [D]: FC plus a perceptron of two layers, GPO."""
    hidden = batch_norm([linear(x, state, "mlp.layers.0") for x in images], state, "mlp.bns.0", training)
    projected = [
        linear(x, state, "fc") + linear(h.clamp(min=0), state, "mlp.layers.1")
        for x, h in zip(images, hidden, strict=True)
    ]
    return [unit(pool(x, state)) for x in projected]


def text(hidden: Sets, state: State) -> list[Tensor]:
    """BERT's last layer [n, H] of each text, CLS and SEP among it -> features [D]."""
    return [unit(pool(linear(x, state, "linear"), state)) for x in hidden]


def pool(x: Tensor, state: State) -> Tensor:
    parameters = {name.removeprefix("gpool."): v.tolist() for name, v in state.items() if name.startswith("gpool.")}
    parameters["score.weight"] = parameters.pop("linear.weight")
    (pooled,) = gpo.pool([x.tolist()], [[True] * len(x)], parameters, d_pe=32)
    return torch.tensor(pooled, dtype=x.dtype)
