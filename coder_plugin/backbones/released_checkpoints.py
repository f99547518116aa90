"""Checkpoints released by the authors of VSE-infinity, CAMERA and VSRN, in the names of :class:`RegionText`.

All three save ``{"model": [image encoder, text encoder], "opt": …}``. The names and shapes of the tensors tell which of the
three models a file holds, and with which options. No code in a file is run: ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin.backbones.base import Backbone
from coder_plugin.backbones.region_text import RegionText
from coder_plugin.errors import CoderError

log = logging.getLogger(__name__)

State = dict[str, Tensor]

#: Patterns of their names, matched at the start -> our names, for the image and the text encoder; "" drops a tensor.
_IMAGE = (
    (r"fc\.", r"visual.fc."),
    (r"mlp\.layers\.0\.", r"visual.mlp.hidden."),
    (r"mlp\.bns\.0\.", r"visual.mlp.norm."),
    (r"mlp\.layers\.1\.", r"visual.mlp.out."),
    (r"mlp\.bns\.1\.", r""),  # VSE-infinity creates it and never calls it
    (r"gpool\.gru\.", r"visual.pool.gru."),
    (r"gpool\.linear\.", r"visual.pool.score."),
    (r"Rs_GCN_(\d)\.(g|theta|phi)\.", r"visual.graph.\1.\2."),
    (r"Rs_GCN_(\d)\.W\.0\.", r"visual.graph.\1.out."),
    (r"Rs_GCN_(\d)\.W\.1\.", r"visual.graph.\1.norm."),
    (r"img_rnn\.", r"visual.rnn."),
    (r"bn\.", r"visual.norm."),
    (r"position_enc\.proj\.", r"visual.attention.position."),
    (r"agsa\.", r"visual.attention."),
    (r"mvs\.convs_dilate\.", r"visual.pool.convolutions."),
    (r"mvs\.convs_fc\.", r"visual.pool.score."),
)
_TEXT = (
    (r"bert\.pooler\.", r""),  # unused
    (r"bert\.embeddings\.position_ids$", r""),  # 0, 1, 2 …
    (r"bert\.(.*LayerNorm)\.gamma$", r"text.transformer.\1.weight"),
    (r"bert\.(.*LayerNorm)\.beta$", r"text.transformer.\1.bias"),
    (r"bert\.", r"text.transformer."),
    (r"(?:linear|mapping)\.", r"text.proj."),
    (r"gpool\.gru\.", r"text.pool.gru."),
    (r"gpool\.linear\.", r"text.pool.score."),
    (r"agsa\.", r"text.context.attention."),
    (r"fc1\.", r"text.context.hidden."),
    (r"fc2\.", r"text.context.out."),
    (r"bn\.", r"text.context.norm."),
    (r"embed\.", r"text.embed."),
    (r"rnn\.", r"text.rnn."),
)
#: Names inside CAMERA's two attentions.
_ATTENTION = {
    "att_layers.0.linears.0.": "query.",
    "att_layers.0.linears.1.": "key.",
    "att_layers.0.linears.2.": "value.",
    "att_layers.0.fc_q.": "gate_query.",
    "att_layers.0.fc_k.": "gate_key.",
    "att_layers.0.fc_g.": "gate.",
    "bns.0.": "norm.",
}


@dataclass(frozen=True)
class _Release:
    title: str
    preset: str
    options: Mapping[str, Any]
    image: State
    text: State


def describe_released(path: str) -> tuple[str, dict[str, Any]]:
    """The name of the backbone of a released file, and its options.

    The vocabulary of a BiGRU is not in the files: give it as the further option ``vocabulary``.

    Raises:
        CoderError: no such file, or a file of none of the three models.
    """
    release = _read_release(path)
    return release.preset, dict(release.options)


def read_released(path: str, model: Backbone) -> State:
    """A released file's tensors in the names of ``model``: a complete state dict.

    The temperature, which the files do not have, stays that of the model.

    Raises:
        CoderError: a file of none of the three models, or of a model with other options.
    """
    release = _read_release(path)
    if not isinstance(model, RegionText):
        raise CoderError(f"{path} is a checkpoint of {release.title} and needs a region model: --model {release.preset}")
    current = asdict(model.options)
    wrong = {name: value for name, value in release.options.items() if current[name] != value}
    if wrong:
        options = " ".join(f"{name}={str(value).lower()}" for name, value in wrong.items())
        raise CoderError(
            f"{path} is a checkpoint of {release.title} with other options than this {model.name}: "
            f"use --model {release.preset} --model-kwargs {options}"
        )
    weights = {**_renamed(path, release.image, _IMAGE), **_renamed(path, release.text, _TEXT)}
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith("coder.")}
    for name, value in weights.items():
        if name.startswith("visual.graph.") and value.ndim == 3:
            weights[name] = value.squeeze(2)  # a convolution of kernel 1 is a linear layer
    rows = weights.get("text.embed.weight")
    if rows is not None and len(rows) != len(expected["text.embed.weight"]):
        raise CoderError(
            f"{path} has {len(rows)} words, this model's vocabulary {len(expected['text.embed.weight'])}: use the vocabulary "
            "of its training, --model-kwargs vocabulary=FILE"
        )
    ours = {"logit_scale", *(name for name, _ in model.named_buffers() if name not in weights)} & expected.keys()
    statistics = sorted(name for name in ours if name.endswith(("running_mean", "running_var")))
    if statistics:
        raise CoderError(f"{path} lacks BatchNorm's {statistics[0]}")
    weights.update({name: expected[name] for name in ours})
    if release.title == "CAMERA":
        log.warning(
            "%s: CAMERA's own code lets a text attend to its padding and averages over it; here padding is masked, "
            "so short texts have other features than its authors computed",
            path,
        )
    log.info("%s: read %d tensors of %s", path, len(weights) - len(ours), release.title)
    return weights


def read_checkpoint(path: str | Path) -> Any:
    """The content of a ``torch.save`` file: plain data, tensors on the CPU, and ``argparse.Namespace``; nothing else.

    Both of torch's formats can be read, also those that Python 2 wrote.

    Raises:
        CoderError: not such a file, not complete, or with objects of other types, which loading would have to run.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True, encoding="latin1")
    except Exception as error:  # malformed bytes make torch, pickle and zipfile raise almost anything
        if unsafe := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
            raise CoderError(
                f"{path} cannot be read as a PyTorch checkpoint: it contains {unsafe[1]}, and loading that could run code. If "
                "you trust the file, save its weights alone: "
                "torch.save({'model': torch.load(FILE, weights_only=False)['model']}, NEW)"
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CoderError(f"{path} cannot be read as a PyTorch checkpoint; is it complete? ({reason})") from error


def check_tensors(mapping: Any) -> State:
    """A state dict without gradients.

    Raises:
        ValueError: not a dict from names to tensors, or a tensor that is larger than its values in the file.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError("it is not a dict of tensors")
    for name, value in mapping.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"its entry {str(name)[:60]!r} is not a tensor")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"its entry {name[:60]!r} is not a complete tensor")  # a stride of 0 could fill the memory
    return {name: value.detach() for name, value in mapping.items()}


def _read_release(path: str) -> _Release:
    content = read_checkpoint(path)
    states = content.get("model") if isinstance(content, dict) else None
    if not isinstance(states, (list, tuple)) or len(states) < 2:
        raise CoderError(
            f"{path} is not a checkpoint of VSE-infinity, CAMERA or VSRN: it has no 'model' with an image and a text encoder"
        )
    try:
        image, text = (_without_prefix(check_tensors(state)) for state in states[:2])
    except ValueError as error:
        raise CoderError(f"{path}: {error}, where 'model' should hold the encoders' tensors") from error
    try:
        return _identify(path, image, text)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, CoderError):
            raise
        raise CoderError(f"{path} lacks tensors of the model that its names suggest: {error}") from error


def _without_prefix(state: State) -> State:
    """Names without the prefix that DataParallel adds."""
    return {name.removeprefix("module."): value for name, value in state.items()}


def _identify(path: str, image: State, text: State) -> _Release:
    if any(name.startswith(("backbone.", "image_encoder.", "cnn.")) for name in image):
        raise CoderError(
            f"{path} holds a model that reads pictures with a CNN; region models read region features"
        )
    options: dict[str, Any] = {}
    if "fc.weight" in image:
        options["embed_dim"], options["region_dim"] = image["fc.weight"].shape
    if "gpool.linear.weight" in image:
        title, preset = "VSE-infinity", "region-bert" if "linear.weight" in text else "region-bigru"
        options |= {
            "mlp": "mlp.layers.0.weight" in image,
            "context": "none",
            "image_pooling": "gpo",
            "text_pooling": "gpo",
        }
    elif "Rs_GCN_1.g.weight" in image:
        title, preset = "VSRN", "region-bigru-vsrn"
        options |= {"mlp": False, "context": "vsrn", "image_pooling": "gru", "text_pooling": "last"}
        options["batch_norm"] = "bn.weight" in image
    elif "mvs.convs_fc.weight" in image:
        title, preset = "CAMERA", "region-bert-camera"
        options |= {"mlp": False, "context": "camera", "image_pooling": "views", "text_context": "camera"}
        options |= {"text_pooling": "mean", "views": len(image["mvs.convs_fc.weight"])}
        options["heads"] = options["embed_dim"] // len(image["agsa.att_layers.0.fc_q.weight"])
    elif any(name.startswith("fc.") for name in image):
        raise CoderError(
            f"{path} is a checkpoint of SCAN or VSE++: its image encoder projects regions without pooling them, so it has no "
            "feature of an image, and no region model here can load it"
        )
    else:
        raise CoderError(
            f"{path} is not a checkpoint of VSE-infinity, CAMERA or VSRN: its image encoder has {sorted(image)[:3]}"
        )
    if title != "CAMERA":
        options["text_context"] = "none"
    options["encoder"] = "bigru" if "embed.weight" in text else "bert"
    if options["encoder"] == "bigru":
        options["word_dim"] = text["embed.weight"].shape[1]
        options["text_layers"] = len([name for name in text if re.fullmatch(r"rnn\.weight_ih_l\d+", name)])
        options["bidirectional"] = "rnn.weight_ih_l0_reverse" in text
    return _Release(title, preset, options, image, text)


def _renamed(path: str, state: State, table: tuple[tuple[str, str], ...]) -> State:
    out, dropped = {}, []
    for name, value in state.items():
        rule = next(((pattern, replacement) for pattern, replacement in table if re.match(pattern, name)), None)
        if rule is None:
            raise CoderError(f"{path} has a tensor {name!r} that none of the released models has")
        if not rule[1]:
            dropped.append(name)
            continue
        ours = re.sub(*rule, name, count=1)
        # their layers count from 1
        ours = re.sub(r"^visual\.graph\.(\d)", lambda match: f"visual.graph.{int(match[1]) - 1}", ours)
        for theirs, replacement in _ATTENTION.items():
            ours = ours.replace(f"attention.{theirs}", f"attention.{replacement}")
        out[ours] = value
    if dropped:
        log.info("%s: left out %d unused tensors: %s", path, len(dropped), ", ".join(dropped))
    return out
