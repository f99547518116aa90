"""Convert a checkpoint released by the authors of VSE-infinity, CAMERA or VSRN to an export that coder-plugin opens.

    python scripts/convert_released.py model_best.pth FOLDER [NAME=VALUE ...]

NAME=VALUE are options of the region model that the file does not hold: ``vocabulary=FILE`` for a BiGRU,
``text=FOLDER_OR_NAME`` for BERT's configuration and words (default: bert-base-uncased).

All three save ``{"model": [image encoder, text encoder], "opt": …}``. The names and shapes of the tensors tell which of the
three models a file holds, and with which options. No code in a file is run: ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin import create_model
from coder_plugin.backbones.plugin_backbones import fit_weights
from coder_plugin.errors import CoderError
from coder_plugin.expression import parse_value
from coder_plugin.pretrained.export import export_model

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


def build(path: str, **options: Any) -> Any:
    """The model of a released file, with its weights, in eval mode. Files lack the temperature, which is that of a new model.

    Args:
        path: the file.
        options: of :class:`~coder_plugin.backbones.region_options.Options`, which the file does not hold.

    Raises:
        CoderError: a file of none of the three models; an option that the file decides; another vocabulary.
    """
    release = _read_release(path)
    if decided := sorted(options.keys() & release.options.keys()):
        raise CoderError(f"{path} decides {decided[0]}: {release.options[decided[0]]}; leave it out")
    if release.options["encoder"] == "bert":
        options.setdefault("pretrained_text", False)
    model = create_model(release.preset, loss="clip", **release.options, **options).eval()
    weights = {**_renamed(path, release.image, _IMAGE), **_renamed(path, release.text, _TEXT)}
    for name, value in weights.items():
        if name.startswith("visual.graph.") and value.ndim == 3:
            weights[name] = value.squeeze(2)  # a convolution of kernel 1 is a linear layer
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith("coder.")}
    words = weights.get("text.embed.weight")
    if words is not None and len(words) != len(expected["text.embed.weight"]):
        raise CoderError(
            f"{path} has {len(words)} words, this vocabulary {len(expected['text.embed.weight'])}: use the vocabulary of its "
            "training, vocabulary=FILE"
        )
    ours = {"logit_scale", *(name for name, _ in model.named_buffers() if name not in weights)} & expected.keys()
    if statistics := sorted(name for name in ours if name.endswith(("running_mean", "running_var"))):
        raise CoderError(f"{path} lacks BatchNorm's {statistics[0]}")
    fit_weights(model, {**weights, **{name: expected[name] for name in ours}}, path)
    if release.title == "CAMERA":
        log.warning(
            "%s: CAMERA's own code lets a text attend to its padding and averages over it; here padding is masked, "
            "so short texts have other features than its authors computed",
            path,
        )
    log.info("%s: read %d tensors of %s", path, len(weights), release.title)
    return model


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
        if unsafe := re.search(r"GLOBAL (\S+) (?:was not an allowed global|whose module)", str(error)):
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert a checkpoint of VSE-infinity, CAMERA or VSRN to an export.")
    parser.add_argument("checkpoint", help="the authors' file, such as model_best.pth")
    parser.add_argument("folder", help="a new folder, for coder-plugin eval FOLDER or --pretrained FOLDER")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="what the file lacks: vocabulary=FILE, text=NAME")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pairs = (option.partition("=") for option in arguments.options)
    try:
        model = build(arguments.checkpoint, **{name: parse_value(value) for name, _, value in pairs})
        export_model(model, arguments.folder)
    except CoderError as error:
        print(f"convert_released: error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.folder}: {model.name}, opened by coder-plugin eval {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
