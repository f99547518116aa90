"""CAMERA's encoders, one image and one text at a time (Qu et al., ACM MM 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.references.layers import Sets, State, batch_norm, linear, softmax, unit, unit_channels

#: Kernel and dilation of the convolutions over regions.
SHAPES = ((1, 1), (3, 1), (3, 2), (3, 3), (5, 1), (5, 2), (5, 3))


def image(
    images: Sets, boxes: Sets, sizes: list[tuple[float, float]], state: State, *, training: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Regions [n, R] with boxes [n, 4] in pixels (left, top, right, bottom) and pictures' (width, height) -> views [V, D]
    and the regions' scores [n, V]."""
    sets = [unit_channels(x) for x in image_contexts(images, boxes, sizes, state, training=training)]
    scores = [linear(convolved(x, state), state, "mvs.convs_fc") for x in sets]
    views = []
    for x, score in zip(sets, scores, strict=True):
        views.append(torch.stack([unit((softmax(column)[:, None] * x).sum(0)) for column in score.T]))
    return views, scores


def image_contexts(
    images: Sets, boxes: Sets, sizes: list[tuple[float, float]], state: State, *, training: bool = False
) -> Sets:
    """What SelfAlign's release averages and normalises for CRA: the attention's output [n, D], before the second division of
    its channels by their norms."""
    sets = [unit_channels(linear(x, state, "fc")) for x in images]
    gates = [
        linear(positions(box, *size), state, "position_enc.proj").sigmoid()
        for box, size in zip(boxes, sizes, strict=True)
    ]
    return attend(sets, [x * gate for x, gate in zip(sets, gates, strict=True)], state, training)


def text_contexts(hidden: Sets, state: State, *, training: bool = False, normalise: bool = False) -> Sets:
    """The attention's output [n, D], before the perceptron; SelfAlign's release divides the words by their channels' norms."""
    sets = [linear(x, state, "mapping") for x in hidden]
    sets = [unit_channels(x) for x in sets] if normalise else sets
    return attend(sets, sets, state, training)


def text(hidden: Sets, state: State, *, training: bool = False, normalise: bool = False) -> list[Tensor]:
    """BERT's last layer [n, H] of each text -> features [D]."""
    sets = text_contexts(hidden, state, training=training, normalise=normalise)
    inner = [linear(linear(x, state, "fc1").clamp(min=0), state, "fc2") for x in sets]
    sets = [x + y for x, y in zip(sets, batch_norm(inner, state, "bn", training), strict=True)]
    return [unit(x.mean(0)) for x in sets]


def positions(boxes: Tensor, width: float, height: float) -> Tensor:
    rows = []
    for left, top, right, bottom in boxes.tolist():
        w, h = right - left, bottom - top
        rows.append([left / width, top / height, w / width, h / height, w / h, w * h / (width * height)])
    return torch.tensor(rows, dtype=boxes.dtype)


def attend(sets: Sets, seen: Sets, state: State, training: bool) -> Sets:
    """Adaptive gating self-attention over ``seen``, normalised over the batch, added to ``sets``."""
    mixed = batch_norm([gated(x, state) for x in seen], state, "agsa.bns.0", training)
    return [x + y for x, y in zip(sets, mixed, strict=True)]


def gated(x: Tensor, state: State) -> Tensor:
    layer = "agsa.att_layers.0"
    query, key, value = (linear(x, state, f"{layer}.linears.{i}") for i in range(3))
    inner = len(state[f"{layer}.fc_q.bias"])
    heads = []
    for begin in range(0, query.shape[1], inner):
        q, k, v = (part[:, begin : begin + inner] for part in (query, key, value))
        both = linear(q, state, f"{layer}.fc_q") * linear(k, state, f"{layer}.fc_k")
        gate = linear(both, state, f"{layer}.fc_g").sigmoid()
        q, k = q * gate[:, :inner], k * gate[:, inner:]
        rows = []
        for i in range(len(x)):
            weights = softmax(torch.stack([(q[i] * k[j]).sum() / math.sqrt(inner) for j in range(len(x))]))
            rows.append((weights[:, None] * v).sum(0))
        heads.append(torch.stack(rows))
    return torch.cat(heads, 1)


def convolved(x: Tensor, state: State) -> Tensor:
    """The regions [n, D] through every convolution over their order, ReLU, side by side."""
    found = []
    for i, (kernel, dilation) in enumerate(SHAPES):
        weight, bias = state[f"mvs.convs_dilate.{i}.weight"], state[f"mvs.convs_dilate.{i}.bias"]
        rows = []
        for place in range(len(x)):
            total = bias.clone()
            for tap in range(kernel):
                other = place + (tap - kernel // 2) * dilation
                if 0 <= other < len(x):
                    total = total + weight[:, :, tap] @ x[other]
            rows.append(total.clamp(min=0))
        found.append(torch.stack(rows))
    return torch.cat(found, 1)
