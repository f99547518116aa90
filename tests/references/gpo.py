"""GPO the slow way, one row and one channel at a time, with a GRU written out (docs/equations.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Vector = list[float]
Matrix = list[list[float]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def apply(matrix: Matrix, vector: Vector, bias: Vector | None = None) -> Vector:
    products = [math.fsum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]
    return products if bias is None else [a + b for a, b in zip(products, bias, strict=True)]


def position_code(position: int, dimensions: int) -> Vector:
    code = []
    for i in range(dimensions):
        angle = position / 10000 ** (2 * (i // 2) / dimensions)
        code.append(math.sin(angle) if i % 2 == 0 else math.cos(angle))
    return code


def gru(inputs: Sequence[Vector], w_ih: Matrix, w_hh: Matrix, b_ih: Vector, b_hh: Vector) -> list[Vector]:
    """All hidden states of one direction, from a zero state; gates in torch's order reset, update, new."""
    hidden = len(w_hh[0])
    state, states = [0.0] * hidden, []
    for x in inputs:
        a, b = apply(w_ih, x, b_ih), apply(w_hh, state, b_hh)
        new = []
        for k in range(hidden):
            reset = sigmoid(a[k] + b[k])
            update = sigmoid(a[hidden + k] + b[hidden + k])
            candidate = math.tanh(a[2 * hidden + k] + reset * b[2 * hidden + k])
            new.append((1 - update) * candidate + update * state[k])
        state = new
        states.append(state)
    return states


def weights(length: int, parameters: Mapping[str, list], d_pe: int, temperature: float) -> Vector:
    """theta of a row of ``length`` valid positions; ``parameters`` is the module's state dict as lists."""
    codes = [position_code(position, d_pe) for position in range(length)]
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    forward = gru(codes, *(parameters[f"gru.{name}"] for name in names))
    backward = gru(codes[::-1], *(parameters[f"gru.{name}_reverse"] for name in names))[::-1]
    scores = []
    for one, other in zip(forward, backward, strict=True):
        state = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
        if "score.weight" in parameters:
            scores += apply(parameters["score.weight"], state)
        else:
            inner = apply(parameters["score.0.weight"], state, parameters["score.0.bias"])
            scores += apply(parameters["score.2.weight"], [max(value, 0.0) for value in inner])
    powers = [math.exp((score - max(scores)) / temperature) for score in scores]
    return [power / math.fsum(powers) for power in powers]


def pool(
    features: Sequence[Sequence[Vector]],
    mask: Sequence[Sequence[bool]],
    parameters: Mapping[str, list],
    *,
    d_pe: int,
    temperature: float = 0.1,
) -> list[Vector]:
    pooled = []
    for row, valid in zip(features, mask, strict=True):
        kept = [position for position, v in zip(row, valid, strict=True) if v]
        theta = weights(len(kept), parameters, d_pe, temperature)
        channels = [sorted((position[c] for position in kept), reverse=True) for c in range(len(row[0]))]
        pooled.append([math.fsum(t * value for t, value in zip(theta, values, strict=True)) for values in channels])
    return pooled
