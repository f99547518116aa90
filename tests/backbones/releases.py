"""Made-up checkpoints with the names, shapes and layout of the released ones."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
VOCABULARY = ["<pad>", "<start>", "<end>", "<unk>", *"abcdefghij"]


def named(modules: dict[str, nn.Module]) -> State:
    """Their tensors, made random: norms' statistics and weights too."""
    state = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    for name, value in state.items():
        if name.endswith("running_var"):
            state[name] = torch.rand_like(value) + 0.5
        elif value.is_floating_point() and value.ndim == 1:
            state[name] = torch.randn_like(value) / 2 + (1.0 if ".weight" in name or name == "bn.weight" else 0.0)
    return state


def gpo() -> dict[str, nn.Module]:
    return {"gpool.gru": nn.GRU(32, 32, bidirectional=True), "gpool.linear": nn.Linear(32, 1, bias=False)}


def attention(dim: int, heads: int) -> dict[str, nn.Module]:
    inner = dim // heads
    layer = "agsa.att_layers.0"
    return {
        **{f"{layer}.linears.{i}": nn.Linear(dim, dim) for i in range(3)},
        f"{layer}.fc_q": nn.Linear(inner, inner),
        f"{layer}.fc_k": nn.Linear(inner, inner),
        f"{layer}.fc_g": nn.Linear(inner, 2 * inner),
        "agsa.bns.0": nn.BatchNorm1d(dim),
    }


def vse_infinity(region_dim: int, dim: int, bert: Any = None, *, mlp: bool = True) -> tuple[State, State]:
    image: dict[str, nn.Module] = {"fc": nn.Linear(region_dim, dim)}
    if mlp:
        image |= {"mlp.layers.0": nn.Linear(region_dim, dim // 2), "mlp.layers.1": nn.Linear(dim // 2, dim)}
        image |= {"mlp.bns.0": nn.BatchNorm1d(dim // 2), "mlp.bns.1": nn.BatchNorm1d(dim)}
    if bert is None:  # the variant with a BiGRU
        words = {"embed": nn.Embedding(len(VOCABULARY), 5), "rnn": nn.GRU(5, dim, bidirectional=True)}
        return named(image | gpo()), named(words | gpo())
    return named(image | gpo()), named({"bert": bert, "linear": nn.Linear(bert.config.hidden_size, dim), **gpo()})


def camera(region_dim: int, dim: int, bert: Any, *, heads: int, views: int) -> tuple[State, State]:
    shapes = [(256, 1), (128, 3), (128, 3), (128, 3), (128, 5), (128, 5), (128, 5)]
    image: dict[str, nn.Module] = {"fc": nn.Linear(region_dim, dim), "position_enc.proj": nn.Linear(6, dim)}
    image |= attention(dim, heads)
    image |= {f"mvs.convs_dilate.{i}": nn.Conv1d(dim, *shape) for i, shape in enumerate(shapes)}
    image |= {"mvs.convs_fc": nn.Linear(1024, views)}
    text: dict[str, nn.Module] = {"bert": bert, "mapping": nn.Linear(bert.config.hidden_size, dim)}
    text |= attention(dim, heads)
    return named(image), named(
        {**text, "fc1": nn.Linear(dim, dim), "fc2": nn.Linear(dim, dim), "bn": nn.BatchNorm1d(dim)}
    )


def vsrn(region_dim: int, dim: int, *, batch_norm: bool, layers: int = 1) -> tuple[State, State]:
    image: dict[str, nn.Module] = {"fc": nn.Linear(region_dim, dim), "img_rnn": nn.GRU(dim, dim)}
    for layer in range(1, 5):
        image |= {f"Rs_GCN_{layer}.{name}": nn.Conv1d(dim, dim, 1) for name in ("g", "W.0", "theta", "phi")}
        image |= {f"Rs_GCN_{layer}.W.1": nn.BatchNorm1d(dim)}
    if batch_norm:
        image |= {"bn": nn.BatchNorm1d(dim)}
    return named(image), named({"embed": nn.Embedding(len(VOCABULARY), 7), "rnn": nn.GRU(7, dim, layers)})


def save(path: Path, image: State, text: State, *, kind: str = "zip") -> str:
    """As the released codes save it."""
    content = {
        "epoch": 3,
        "model": [OrderedDict(image), OrderedDict(text)],
        "best_rsum": 500.0,
        "opt": argparse.Namespace(data_name="f30k_precomp", embed_size=8),
        "Eiters": 7,
    }
    torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    return str(path)
