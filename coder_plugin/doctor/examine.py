"""All checks of ``coder-plugin doctor`` in their order. Nothing is downloaded or written."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coder_plugin.config import TrainConfig, resolve
from coder_plugin.doctor import data, installation, recipe, run
from coder_plugin.doctor.findings import Finding, guarded
from coder_plugin.errors import CoderError
from coder_plugin.hub_access import is_download_error


def examine(
    options: Mapping[str, Any],
    folders: Sequence[str] = (),
    *,
    samples: int = 256,
    check_all: bool = False,
) -> list[Finding]:
    """All findings on the installation, what ``options`` name, and ``folders``.

    Args:
        options: of training, by flag name.
        folders: of runs or exports, or ``hf-hub:OWNER/NAME`` if it is in the hub's cache.
        samples: pictures decoded of a split with more than 10,000 images.
        check_all: decode all pictures and read all captions.

    Raises:
        CoderError: unknown options, or a folder that is nothing that can be checked.
    """
    config = resolve([("flag", options)])
    stay_offline()
    paths = [folder_of(spec, config.model.cache_dir) for spec in folders]
    checks = [(check, path) for path in paths for check in run.checks_for(path)]  # fails before the long checks
    findings = []
    for what, check in (("packages", installation.check_packages), ("plugins", installation.check_plugins)):
        findings += guarded("installation", check, doing=f"checking installed {what}")
    findings += guarded("machine", installation.check_gpus)
    for check_folder, path in checks:
        findings += guarded("run", check_folder, path, doing=f"checking {path}")
    return findings + check_training(config, options, samples=samples, check_all=check_all)


def check_training(
    config: TrainConfig, options: Mapping[str, Any], *, samples: int = 256, check_all: bool = False
) -> list[Finding]:
    """Data, objective and model, as far as ``options`` name them."""
    splits: dict[str, data.Split] = {}
    findings: list[Finding] = []
    for name in ("train", "val"):
        if getattr(config.data, name) is not None:
            reads = data.read_split, splits, name, config, None if check_all else data.MOST
            findings += guarded(name, *reads, doing=f"reading {name} data: {getattr(config.data, name)}")
    train = splits.get("train")
    if train is not None and train.items and not train.broken:
        findings += guarded("train", recipe.check_epoch, config, train)
    if config.evaluation.zeroshot is not None:
        findings += guarded("zeroshot", recipe.check_zero_shot, config, doing="reading zero-shot classes")
    tokenizers: list[Any] = []
    on_model: list[Finding] = []
    if {"model", "loss", "concepts", "recipe"} & options.keys():
        makes = recipe.check_recipe, config, train, tokenizers
        on_model = guarded("recipe", *makes, doing="making model and loss")
    looks: dict[str, list[data.Look]] = {}
    readable = {name: each for name, each in splits.items() if each.items}
    for name, each in readable.items():
        findings += guarded(name, data.check_captions, each, doing=f"checking {len(each.items):,} images of {name}")
        for tokenizer in tokenizers:
            findings += guarded(name, data.check_lengths, each, tokenizer)
        findings += guarded(name, data.check_ids, each)
        findings += guarded(name, data.check_pictures, each, config, looks, None if check_all else samples)
    if len(readable) == 2:
        findings += guarded("leak", data.check_leaks, readable["train"], readable["val"])
        if len(looks) == 2:
            totals = {name: len(each.items) for name, each in readable.items()}
            findings += guarded("leak", data.check_copies, looks, totals)
    return findings + on_model


def stay_offline() -> None:
    """Forbid downloads. Call it before transformers and open_clip are imported: they ask a hub for files not in its cache."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if (hub := sys.modules.get("huggingface_hub")) is not None:
        hub.constants.HF_HUB_OFFLINE = True


def folder_of(spec: str, cache_dir: str | None = None) -> Path:
    """``spec`` as a folder; for ``hf-hub:OWNER/NAME`` the copy in the hub's cache.

    Raises:
        CoderError: the cache has no copy, or an incomplete one.
    """
    from coder_plugin.pretrained.hub_cache import HUB, fetch, is_on_hub

    try:
        return fetch(spec, cache_dir=cache_dir)
    except CoderError as error:
        incomplete = error.__cause__ is None  # an interrupted download leaves a copy without a model
        if not is_on_hub(spec) or not (is_download_error(error) or incomplete):
            raise
        name = spec.removeprefix(HUB).partition("@")[0]
        raise CoderError(
            f"{spec}: no complete copy in the hub's cache, and doctor downloads nothing: hf download {name}, or name a folder"
        ) from error
