"""Exports: a trained model as a folder that its library opens, and what else its retrieval vectors need.

An export of an open_clip model opens as ``open_clip.create_model("local-dir:FOLDER")``, one of a model of transformers as
``AutoModel.from_pretrained(FOLDER)`` with ``AutoProcessor.from_pretrained(FOLDER)``, one of a region model as
``coder_plugin.create_model(FOLDER, pretrained=FOLDER/coder_model.safetensors)``. Files of their own hold the scoring heads and
aggregators (``coder.safetensors``), their vocabulary, and how the model reads images and computes (``coder_options.json``).
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from coder_plugin.backbones import plugin_backbones, transformers_files
from coder_plugin.backbones.adapters import remove_adapters
from coder_plugin.backbones.base import Backbone
from coder_plugin.backbones.clip import TEXT_FOLDER, read_training_checkpoint
from coder_plugin.backbones.transformers_clip import TransformersTowers
from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_folder, atomic_path, atomic_write, read_json
from coder_plugin.heads.capabilities import affects_ranking, heads_having
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export_manifest import MANIFEST, MARK, WITH_HEADS, read_manifest, seal, verify_export
from coder_plugin.registry import load

WEIGHTS = "open_clip_model.safetensors"  # of an open_clip model; region models have their own name
OLDER = ("open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")  # open_clip's earlier names
HEADS = "coder.safetensors"
VOCABULARY = "concepts.safetensors"
OPTIONS = "coder_options.json"
#: What :func:`check_finite` says of a tensor.
NOT_FINITE = "holds NaN or infinity"
#: Files of tokenizers, where no manifest lists them.
_TOKENIZER_FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json vocab.txt vocab.json merges.txt".split()
#: Options that an export stores, because neither its weights nor its configuration hold them.
INFERENCE_OPTIONS = ("max_regions", "precision", "rerank", "channels_last")

#: The largest number in the options of heads.
_MOST = 1 << 20


def export_model(
    model: Any,
    folder: str | Path,
    state: Mapping[str, Tensor] | None = None,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> Path:
    """Write the weights, the scoring heads with their vocabulary, the configuration (overrides included), and how the model
    reads images and computes.

    All is written to a folder beside ``folder`` and renamed, so that no half of an export is ever there. Files that are no
    part of the export that it replaces are kept; in a folder without an export, that is every file.

    Args:
        model: with or without heads.
        folder: made if it does not exist; an export in it is replaced.
        state: the model's state dict, if it has been gathered already; None: taken from the model.
        tokenizer: open_clip's. The files of a Hugging Face tokenizer are written, because ``local-dir:`` looks for them.
        options: :data:`INFERENCE_OPTIONS` by name, and ``objective``, the loss as text.
        step: of the run, for :func:`exported_step`.

    Returns:
        The path of the weights.

    Raises:
        CoderError: the folder holds no export, but a file or folder with the name of one of an export's.
    """
    folder = Path(folder)
    with atomic_folder(folder) as temporary:
        kept = _other_files(folder)
        name = write_export(model, temporary, state, tokenizer=tokenizer, options=options, step=step).name
        if foreign := [each.name for each in kept if (temporary / each.name).exists()]:
            raise CoderError(
                f"{folder} holds no export, and its {', '.join(sorted(foreign))} would be replaced; nothing was changed: give "
                "another folder"
            )
        for each in kept:
            target = temporary / each.name
            shutil.copytree(each, target, symlinks=True) if each.is_dir() and not each.is_symlink() else shutil.copy2(
                each, target, follow_symlinks=False
            )
    return folder / name


def write_export(
    model: Any,
    folder: Path,
    state: Mapping[str, Tensor] | None = None,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> Path:
    """Fill a folder as :func:`export_model` does, for callers that rename it themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_options(model, folder, options or {})
    plain = plain_state(model) if state is None else without_heads(state)
    scoring = _scoring_state(model, state)
    readers = heads_having(model.coder.heads, "image_attention").values()
    vocabularies = [head.vocabulary for head in readers if head.vocabulary]
    mark = {MARK: WITH_HEADS if scoring else "towers"}
    if isinstance(model, Backbone):
        weights = folder / plugin_backbones.WEIGHTS
        write_tensors(plain, weights, **mark)
        model.save_config(folder)
    elif isinstance(model, TransformersTowers):
        weights = folder / transformers_files.WEIGHTS
        write_tensors(plain, weights, **mark)
        model.save_files(folder)
    else:
        weights = folder / WEIGHTS
        write_tensors(plain, weights, **mark)
        inner: Any = getattr(tokenizer, "tokenizer", None)
        if hasattr(inner, "save_pretrained"):
            inner.save_pretrained(folder)
        text: Any = getattr(getattr(model, "text", None), "config", None)
        if hasattr(text, "save_pretrained"):  # a Hugging Face tower's shape; open_clip would fetch it from the hub or a path
            text.save_pretrained(folder / TEXT_FOLDER)
        config = {"model_cfg": model.coder_config, "preprocess_cfg": dict(model.visual.preprocess_cfg)}
        with atomic_write(folder / "open_clip_config.json", "w") as file:
            file.write(json.dumps(config, indent=2))
    if scoring:
        settings = head_settings(model)
        settings["heads"] = [name for name, head in model.coder.heads.items() if affects_ranking(head)]
        for each in settings["objective"]["heads"].values():
            each.pop("vocabulary", None)  # it is in the folder, and its old path is private
        write_tensors(scoring, folder / HEADS, coder=json.dumps(settings), **mark)
        for vocabulary in vocabularies:
            vocabulary.save(folder / VOCABULARY)
    seal(folder, step=step)
    return weights


def exported_step(folder: Path) -> int | None:
    """The step of the run whose model an export holds; None if there is no export, a damaged one, or one of no run."""
    try:
        manifest = read_manifest(folder) if export_files(folder)[0] is not None else None
    except CoderError:
        return None
    return None if manifest is None else manifest["step"]


def verify(weights: str | Path | None) -> None:
    """Check the export that a file of weights belongs to (:func:`~coder_plugin.pretrained.export_manifest.verify_export`).

    Raises:
        CoderError: files are missing, changed, or of two exports.
    """
    if weights is not None and Path(weights).is_file():
        texts = (VOCABULARY.replace(".safetensors", ".json"), "open_clip_config.json", plugin_backbones.CONFIG)
        verify_export(Path(weights), heads=HEADS, others=(VOCABULARY, OPTIONS, *texts))


def check_finite(model: nn.Module, where: str) -> None:
    """Refuse weights with NaN, and parameters with infinity.

    Raises:
        CoderError: names the first such tensor.
    """
    parameters = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            bad = ~value.isfinite() if name in parameters else value.isnan()
            if bad.any():
                raise CoderError(f"{where}: {name} {NOT_FINITE}; take an export from before, such as --export best")


def _other_files(folder: Path) -> list[Path]:
    """What is in a folder besides the export in it: notes, cards, links; without an export, all."""
    try:
        manifest = read_manifest(folder)
    except CoderError:
        manifest = None
    listed = {name.split("/")[0] for name in manifest["files"]} if manifest is not None else set()
    ours = {MANIFEST, WEIGHTS, plugin_backbones.WEIGHTS}
    if any((folder / name).exists() for name in ours):
        ours |= {*listed, HEADS, VOCABULARY, VOCABULARY.replace(".safetensors", ".json"), OPTIONS, TEXT_FOLDER}
        ours |= {plugin_backbones.CONFIG, "open_clip_config.json", *_TOKENIZER_FILES}
    entries = folder.iterdir() if folder.is_dir() else ()
    return [path for path in entries if path.name not in ours and not path.name.endswith(".writing")]


def inference_options(config: Any) -> dict[str, Any]:
    """The options of a run (:class:`~coder_plugin.config.TrainConfig`) that its exports store."""
    options = config.to_flat()
    return {name: options[name] for name in INFERENCE_OPTIONS}


def _write_options(model: Any, folder: Path, options: Mapping[str, Any]) -> None:
    stored = {name: options[name] for name in INFERENCE_OPTIONS if options.get(name) is not None}
    objective = options.get("objective") or str(model.coder.objective)
    with atomic_write(folder / OPTIONS, "w") as file:
        file.write(json.dumps({"objective": objective, **stored}, indent=1) + "\n")


def read_inference_options(folder: Path) -> dict[str, Any]:
    """The options that an export stores, and its ``objective`` as text; empty for weights that are not our export.

    Raises:
        CoderError: the file cannot be read.
    """
    path = folder / OPTIONS
    if not path.is_file():
        return {}
    options = read_json(path)
    if not isinstance(options, dict):
        raise CoderError(f"{path} cannot be read: it is not an object")
    options = {name: options[name] for name in ("objective", *INFERENCE_OPTIONS) if options.get(name) is not None}
    if not isinstance(options.get("objective", ""), str):
        raise CoderError(f"{path} cannot be read: its objective is not a text")
    return options


def head_settings(model: Any) -> dict[str, Any]:
    """The settings of a model's heads as plain values; :class:`HeadSettings` is read from them."""
    coder = model.coder
    return {
        "objective": coder.objective.to_dict(),
        "aggregator": coder.aggregator,
        "context_blocks": coder.context_blocks,
        "heads": list(coder.heads),
    }


def export_files(folder: Path) -> tuple[Path | None, Path | None]:
    """An export's weights, or None if ``folder`` is not an export; and the configuration of a region model or of a model of
    transformers, else None.

    A folder that transformers has saved such a model to is an export without heads.
    """
    if (folder / plugin_backbones.WEIGHTS).is_file():
        return folder / plugin_backbones.WEIGHTS, folder / plugin_backbones.CONFIG
    weights = next((folder / name for name in (WEIGHTS, *OLDER) if (folder / name).is_file()), None)
    own = folder / transformers_files.WEIGHTS
    if weights is None and own.is_file() and transformers_files.has_configuration(folder):
        return own, folder / "config.json"
    return weights, None


def weights_named(pretrained: str | None) -> str | None:
    """``--pretrained``, with an export's folder replaced by the weights in it."""
    weights = export_files(Path(pretrained))[0] if pretrained and Path(pretrained).is_dir() else None
    return pretrained if weights is None else str(weights)


def heads_beside(pretrained: str | None) -> Path | None:
    """The file of scoring heads next to an export's weights; None if ``pretrained`` is not the path of such weights."""
    weights = Path(pretrained or "")
    heads = weights.parent / HEADS
    return heads if weights.is_file() and heads.is_file() else None


class HeadSettings(NamedTuple):
    """How the heads of an exported model were made."""

    objective: Objective
    aggregator: str
    context_blocks: int
    heads: tuple[str, ...]  # in their order; of an export those that score or re-rank


def read_heads(path: Path) -> HeadSettings:
    """The settings that :func:`export_model` wrote, with the vocabulary in the same folder.

    Raises:
        CoderError: the file is something else, or damaged.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            settings = json.loads(file.metadata()["coder"])
        objective = Objective.from_dict(settings["objective"], inference=True)
        _check_settings(settings)
        names = settings["heads"]
        if (vocabulary := path.parent / VOCABULARY).is_file():
            readers = heads_having({name: load("heads", name) for name in names}, "image_attention")
            objective = objective.with_options({f"{name}.vocabulary": str(vocabulary) for name in readers})
        return HeadSettings(objective, settings["aggregator"], settings["context_blocks"], tuple(names))
    except Exception as error:  # safetensors and json raise many kinds for damaged files
        raise CoderError(f"{path} is not a file of scoring heads: {error}") from error


def _check_settings(settings: Mapping[str, Any]) -> None:
    """The types and ranges of a heads' file, which somebody else may have written."""
    names, blocks = settings["heads"], settings["context_blocks"]
    if not (isinstance(names, list) and len(names) <= 64 and all(isinstance(name, str) for name in names)):
        raise CoderError(f"its heads are {str(names)[:80]!r}, not a list of names")
    if not isinstance(settings["aggregator"], str) or type(blocks) is not int:
        raise CoderError("its aggregator is not a name, or its context_blocks is not a number")
    for head, options in settings["objective"]["heads"].items():
        for option, value in options.items():
            if isinstance(value, int) and abs(value) > _MOST:
                raise CoderError(f"the option {head}.{option} is {value}; the most is {_MOST:,}")


def start_heads(model: Any, pretrained: str | None) -> bool:
    """Load the scoring heads that come with the weights a run starts from: next to an export, or in a checkpoint of
    open_clip's trainer. Heads of another objective are left out with a warning.

    Returns:
        Whether heads were loaded.
    """
    verify(pretrained)
    file = heads_beside(pretrained)
    checkpoint = read_training_checkpoint(pretrained)
    if file is not None:
        state = plugin_backbones.read_weights(file)
    elif checkpoint is not None:
        plain = {name.removeprefix("module."): value for name, value in checkpoint["state_dict"].items()}
        state = _scoring_state(model, plain)
        if not state:
            logging.info("%s: only the towers are loaded", pretrained)
            return False
    else:
        return False
    try:
        _load(model, state, str(file or pretrained))
    except CoderError as error:
        logging.warning("only the towers are loaded, and the heads start at random: %s", error)
        return False
    logging.info("%s: the scoring heads are loaded", file or pretrained)
    return True


def load_heads(model: Any, path: Path) -> None:
    """Load the weights of heads that :func:`export_model` wrote into a model with the same heads."""
    _load(model, plugin_backbones.read_weights(path), str(path))


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
    """The state dict without heads, with low-rank adapters merged: that of the model's class in its own library."""
    if any("lora_" in name for name, _ in model.named_parameters()):
        coder, model.coder = model.coder, nn.Module()  # do not copy banks and momentum towers
        try:
            merged = copy.deepcopy(model)
        finally:
            model.coder = coder
        remove_adapters(merged, merge=True)
        model = merged
    return without_heads(model.state_dict())


def without_heads(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without ``model.coder``."""
    return {name: value for name, value in state.items() if not name.startswith("coder.")}


def _sort_metadata(path: Path) -> None:
    """Rewrite a safetensors header with its metadata sorted: safetensors writes them in another order in each process."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) <= size
        file.seek(8)
        file.write(content.ljust(size))


def write_tensors(state: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write a safetensors file with ``metadata``: to a temporary file first, which is renamed. Equal input, equal bytes."""
    from safetensors.torch import save_file

    # clones, because safetensors refuses tensors that share memory
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", **metadata})
        _sort_metadata(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # safetensors makes its files private, whatever the user's umask
