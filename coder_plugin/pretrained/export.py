"""The trained CLIP without ``coder.*``, as a folder that plain open_clip opens (DESIGN, rule 5); a region model's likewise.

``open_clip.create_model(NAME, pretrained=FOLDER/open_clip_model.safetensors)`` or ``"local-dir:FOLDER"``; of a region model
``coder_plugin.create_model(FOLDER, pretrained=FOLDER/coder_model.safetensors)``. What else the
retrieval vectors need, scoring heads and aggregators, lies beside it in a file of its own, without banks and copies.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from coder_plugin.backbones import own
from coder_plugin.backbones.base import Backbone
from coder_plugin.backbones.clip import TEXT_FOLDER, read_training_checkpoint
from coder_plugin.errors import CoderError
from coder_plugin.heads.capabilities import ReadsConcepts, affects_ranking, heads_with
from coder_plugin.model import required_heads_with
from coder_plugin.objective import Objective

WEIGHTS = "open_clip_model.safetensors"  # of an open_clip model; backbones of ours have their own
OLDER = ("open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")  # what open_clip has called them
HEADS = "coder.safetensors"
VOCABULARY = "concepts.safetensors"


def export_model(
    model: Any, folder: Path, state: Mapping[str, Tensor] | None = None, *, tokenizer: Any = None
) -> Path:
    """Write the weights and the configuration the model was made with, overrides included; returns the weights' path.

    Where that configuration could not be read (a hub that cannot be reached), only the weights are written. ``state``: the
    model's state dict, where it is at hand already, such as one gathered of sharded parameters. ``tokenizer``: open_clip's; of
    a Hugging Face one the files are written, which ``open_clip.get_tokenizer("local-dir:…")`` looks for there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = plain_state(model) if state is None else without_heads(state)
    if isinstance(model, Backbone):
        _write(plain, folder / own.WEIGHTS)
        model.save_config(folder)
        return folder / own.WEIGHTS
    _write(plain, folder / WEIGHTS)
    inner: Any = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "save_pretrained"):
        inner.save_pretrained(folder)
    text: Any = getattr(getattr(model, "text", None), "config", None)
    if hasattr(text, "save_pretrained"):  # a Hugging Face tower's shape, which open_clip would ask its hub, or a path, for
        text.save_pretrained(folder / TEXT_FOLDER)
    if model.coder_config is not None:
        written = {"model_cfg": model.coder_config, "preprocess_cfg": dict(model.visual.preprocess_cfg)}
        (folder / "open_clip_config.json").write_text(json.dumps(written, indent=2))
    return folder / WEIGHTS


def export_heads(model: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> Path | None:
    """Write scoring heads and aggregators with the objective they are of, and the vocabulary beside them; None where the
    score is the towers' alone. ``state``: as in :func:`export_model`."""
    scoring = _scoring_state(model, state)
    if not scoring:
        return None
    made = made_with(model)
    for options in made["objective"]["heads"].values():
        options.pop("vocabulary", None)  # it lies beside, and where it was is nobody's business
    _write(scoring, folder / HEADS, coder=json.dumps(made))
    for head in heads_with(model.coder.heads, ReadsConcepts).values():
        if head.vocabulary is not None:
            head.vocabulary.save(folder / VOCABULARY)
    return folder / HEADS


def made_with(model: Any) -> dict[str, Any]:
    """What :class:`Made` is read from."""
    aggregator = "gpo" if len(model.coder.aggregators) else "tower"
    objective, blocks = model.coder.objective, model.coder.context_blocks
    return {"objective": objective.to_dict(), "aggregator": aggregator, "context_blocks": blocks}


def exported(folder: Path) -> tuple[Path | None, Path | None]:
    """An export's weights, and its configuration where the model is a backbone of ours; None where there is none."""
    if (folder / own.WEIGHTS).is_file():
        return folder / own.WEIGHTS, folder / own.CONFIG
    return next((folder / name for name in (WEIGHTS, *OLDER) if (folder / name).is_file()), None), None


def weights_named(pretrained: str | None) -> str | None:
    """What ``--pretrained`` names: of an export's folder the weights in it, else what was given."""
    weights = exported(Path(pretrained))[0] if pretrained and Path(pretrained).is_dir() else None
    return pretrained if weights is None else str(weights)


def heads_beside(pretrained: str | None) -> Path | None:
    """The file of scoring heads beside an export's weights, if ``pretrained`` names such weights."""
    weights = Path(pretrained or "")
    heads = weights.parent / HEADS
    return heads if weights.is_file() and heads.is_file() else None


class Made(NamedTuple):
    """What a model of an export was made with."""

    objective: Objective
    aggregator: str
    context_blocks: int


def read_heads(path: Path) -> Made:
    """What :func:`export_heads` wrote beside the weights; the vocabulary is the one beside the file."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            made = json.loads(file.metadata()["coder"])
        objective = Objective.from_dict(made["objective"])
        if (vocabulary := path.parent / VOCABULARY).is_file():
            readers = required_heads_with(objective, ReadsConcepts)
            objective = objective.with_options({f"{name}.vocabulary": str(vocabulary) for name in readers})
        # exports of earlier versions read nothing before or after a context stage
        return Made(objective, made["aggregator"], made.get("context_blocks", 1))
    except CoderError:
        raise
    except Exception as error:  # whatever a damaged file makes safetensors and json say
        raise CoderError(f"{path} is no file of scoring heads: {error}") from error


def start_heads(model: Any, pretrained: str | None) -> bool:
    """Take scoring heads that come with weights to start from, those beside an export or in a checkpoint of open_clip's
    trainer. Returns whether there were any; a warning where they are another objective's."""
    file = heads_beside(pretrained)
    checkpoint = read_training_checkpoint(pretrained)
    if file is not None:
        state = _read(file)
    elif checkpoint is not None:
        plain = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
        state = _scoring_state(model, plain)
        if not state:
            logging.info("%s: its towers alone are taken", pretrained)
            return False
    else:
        return False
    try:
        _load(model, state, str(file or pretrained))
    except CoderError as error:
        logging.warning("the run starts from the towers alone, with fresh heads: %s", error)
        return False
    logging.info("%s: the heads that score are loaded", file or pretrained)
    return True


def load_heads(model: Any, path: Path) -> None:
    """Put the weights that :func:`export_heads` wrote into a model made with the same objective."""
    _load(model, _read(path), str(path))


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CoderError(f"{path} cannot be read: {error}") from error


def _load(model: Any, state: Mapping[str, Tensor], where: str) -> None:
    expected = _scoring_state(model)
    missing, other = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    wrong = [name for name in expected.keys() & state.keys() if expected[name].shape != state[name].shape]
    if missing or other or wrong:
        raise CoderError(f"{where} does not fit this model: {', '.join([*missing, *other, *wrong][:4])}")
    model.coder.load_state_dict({name.removeprefix("coder."): value for name, value in state.items()}, strict=False)


def _scoring_state(model: Any, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    ranking = [f"coder.heads.{name}." for name, head in model.coder.heads.items() if affects_ranking(head)]
    wanted = ["coder.aggregators.", *ranking]
    state = model.state_dict() if state is None else state
    return {name: value for name, value in state.items() if name.startswith(tuple(wanted))}


def plain_state(model: Any) -> dict[str, Tensor]:
    """The state dict that the model's open_clip class has: no heads, low-rank adapters merged into their weights."""
    if any("lora_" in name for name, _ in model.named_parameters()):
        model = _merged(model)
    return without_heads(model.state_dict())


def without_heads(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict less what is under ``model.coder``."""
    return {name: value for name, value in state.items() if not name.startswith("coder.")}


def _write(state: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Beside and renamed: nobody meets half a file."""
    from safetensors.torch import save_file

    aside = path.with_name(f".{path.name}.writing")
    own = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}  # safetensors shares nothing
    save_file(own, aside, metadata={"format": "pt", **metadata})
    umask = os.umask(0)
    os.umask(umask)
    aside.chmod(0o666 & ~umask)  # safetensors makes its files private, against the user's umask
    os.replace(aside, path)


def _merged(model: Any) -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer

    coder = model.coder
    model.coder = nn.Module()  # banks and momentum towers need not be copied
    try:
        merged = copy.deepcopy(model)
    finally:
        model.coder = coder
    layers = [(name, module) for name, module in merged.named_modules() if isinstance(module, BaseTunerLayer)]
    outer: list[str] = []
    for name, module in layers:
        if outer and name.startswith(f"{outer[-1]}."):
            continue  # part of an attention that has been merged as a whole
        outer.append(name)
        parent, _, child = name.rpartition(".")
        setattr(merged.get_submodule(parent), child, _plain_layer(module))
    return merged


def _plain_layer(module: Any) -> nn.Module:
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    module.merge()
    return module.get_base_layer()
