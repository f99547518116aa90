"""VSRN's image encoder, one image at a time, and its text encoder (Li et al., ICCV 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.references import gpo
from tests.references.layers import Sets, State, batch_norm, linear, unit, unit_channels


def image(images: Sets, state: State, *, training: bool = False) -> tuple[list[Tensor], Sets]:
    """Regions [n, R] of each image -> features [D], and the regions [n, D] after the graph layers, normalised."""
    sets = [unit_channels(x) for x in image_contexts(images, state, training=training)]
    last = [recur(x, state, "img_rnn") for x in sets]
    if "bn.weight" in state:
        last = [x[0] for x in batch_norm([x[None] for x in last], state, "bn", training)]
    return [unit(x) for x in last], sets


def image_locals(images: Sets, state: State) -> Sets:
    """What the graph reads: the projections, normalised except in the variant for Flickr30K, which ends in a BatchNorm."""
    sets = [linear(x, state, "fc") for x in images]
    return sets if "bn.weight" in state else [unit_channels(x) for x in sets]


def image_contexts(images: Sets, state: State, *, training: bool = False) -> Sets:
    """What SelfAlign's release averages and normalises for CRA: the last graph layer's output [n, D]."""
    sets = image_locals(images, state)
    for layer in range(1, 5):
        messages = [relate(x, state, f"Rs_GCN_{layer}") for x in sets]
        normed = batch_norm(messages, state, f"Rs_GCN_{layer}.W.1", training)
        sets = [x + message for x, message in zip(sets, normed, strict=True)]
    return sets


def relate(x: Tensor, state: State, name: str) -> Tensor:
    """Every region's message: the others' values, weighted by an affinity that is divided by their number."""
    theta, phi, g = (linear(x, state, f"{name}.{part}") for part in ("theta", "phi", "g"))
    messages = []
    for i in range(len(x)):
        messages.append(sum(((theta[i] * phi[j]).sum() / len(x) * g[j] for j in range(len(x))), torch.zeros_like(x[0])))
    return linear(torch.stack(messages), state, f"{name}.W.0")


def recur(x: Tensor, state: State, name: str) -> Tensor:
    """The last state of a GRU over the rows in their order."""
    return states(x, state, name)[-1]


def states(x: Tensor, state: State, name: str) -> Tensor:
    """The states of a GRU over the rows in their order."""
    weights = (state[f"{name}.{part}_l0"].tolist() for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    return torch.tensor(gpo.gru(x.tolist(), *weights), dtype=x.dtype)


def text(ids: list[list[int]], state: State) -> list[Tensor]:
    """Word ids of each text, start and end among them -> features [D]."""
    return [unit(recur(torch.stack([state["embed.weight"][i] for i in words]), state, "rnn")) for words in ids]
