"""All checks of ``coder-plugin doctor`` in their order. Nothing is downloaded or written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coder_plugin.config import TrainConfig, resolve
from coder_plugin.data.from_config import make_source
from coder_plugin.data.regions.base import Regions
from coder_plugin.doctor import captions, identity, images, installation, machine, recipe, run, split
from coder_plugin.doctor.findings import Finding, guarded, is_absent
from coder_plugin.doctor.split import Split
from coder_plugin.errors import CoderError

#: A split of at most so many images has all its pictures decoded, whatever ``samples`` is: it takes about a minute.
SMALL = 10_000


def examine(
    options: Mapping[str, Any],
    folders: Sequence[str] = (),
    *,
    samples: int = 256,
    check_all: bool = False,
    vectors: str | None = None,
    check_objective: bool = False,
) -> list[Finding]:
    """All findings on the installation, the machine, what ``options`` name, and ``folders``.

    Args:
        options: of training, by flag name.
        folders: of runs, exports or indexes, or ``hf-hub:OWNER/NAME`` if it is in the hub's cache.
        samples: pictures decoded of a split with more than :data:`SMALL` images.
        check_all: decode all pictures and read all captions.
        vectors: a file of word vectors.
        check_objective: check objective and model also if ``options`` name none.

    Raises:
        CoderError: unknown options, or a folder that is nothing that can be checked.
    """
    if samples < 1:
        raise CoderError(f"--samples is {samples}; it must be 1 or more")
    config = resolve([("flag", options)])
    stay_offline()
    paths = [folder_of(spec, config.model.cache_dir) for spec in folders]
    checks = [
        (part, check, path) for path in paths for part, check in run.checks_for(path)
    ]  # fails before the long checks
    findings = guarded("installation", installation.check_packages)
    findings += guarded("installation", installation.check_libraries)
    findings += guarded("machine", machine.check_gpus, config)
    findings += guarded("machine", machine.check_room, config)
    for part, check, path in checks:
        findings += guarded(part, check, path)
    findings += check_training(
        config, options, samples=samples, check_all=check_all, vectors=vectors, check_objective=check_objective
    )
    return findings


def check_training(
    config: TrainConfig,
    options: Mapping[str, Any],
    *,
    samples: int = 256,
    check_all: bool = False,
    vectors: str | None = None,
    check_objective: bool = False,
) -> list[Finding]:
    """Data, objective, model and words, as far as ``options`` name them."""
    names = ("train_data", "val_data", "model", "loss", "concepts", "regions", "zeroshot")
    named = {name for name in names if options.get(name) is not None}
    if not named and vectors is None and not check_objective:
        return []
    splits: dict[str, Split] = {}
    findings: list[Finding] = []
    for name in ("train", "val"):
        if getattr(config.data, name) is not None:
            findings += guarded(name, _read_split, splits, name, config, check_all)
    if config.evaluation.zeroshot is not None:
        findings += guarded("zeroshot", recipe.check_zero_shot, config)
    facts = recipe.ModelFacts()
    on_model: list[Finding] = []
    if check_objective or {"model", "loss", "concepts"} & named:
        on_model = guarded("recipe", _check_recipe, config, splits, facts)
    train_items = splits["train"].items if "train" in splits else []
    words = captions.count_words(caption for item in train_items for caption in item.captions)
    if config.loss.concepts:
        on_model += guarded("words", captions.check_concepts, config.loss.concepts, words)
    if vectors is not None:
        on_model += guarded("words", captions.check_vectors, vectors, words)
    readable = {name: each for name, each in splits.items() if each.items}
    for name, each in readable.items():
        findings += guarded(name, captions.check_captions, each)
        if facts.tokenizer is not None:
            findings += guarded(name, captions.check_lengths, each, facts.tokenizer)
    findings += _check_images(readable, config, facts, samples=samples, check_all=check_all)
    return [*findings, *on_model]


def _read_split(splits: dict[str, Split], name: str, config: TrainConfig, check_all: bool) -> Iterator[Finding]:
    """Read a split into ``splits``."""
    splits[name] = split.read_split(name, config, most=None if check_all else split.MOST)
    yield from captions.check_reading(splits[name], config.data.max_bad_samples)


def _check_recipe(config: TrainConfig, splits: Mapping[str, Split], facts: recipe.ModelFacts) -> Iterator[Finding]:
    full_source = source = make_source(config.data, split="train") if config.data.on_scenes else None
    train = splits.get("train")
    if train is not None and train.items and not train.shards and not train.samples:
        full_source, source = train.full_source, train.source
    yield from recipe.check_recipe(config, full_source, source, facts)


def _check_images(
    splits: Mapping[str, Split], config: TrainConfig, facts: recipe.ModelFacts, *, samples: int, check_all: bool
) -> list[Finding]:
    """Ids, and pictures or regions, of each split and across both."""
    findings: list[Finding] = []
    looks: dict[str, list[Any]] = {}
    for name, each in splits.items():
        findings += guarded(name, identity.check_ids, each)
        total = len(each.items)
        items = each.items if check_all or total <= SMALL else each.sample(samples, config.run.seed)
        loaded = images.look_at(items, f"{name}: pictures", threads=each.threads)
        if config.data.regions is not None or any(isinstance(look, Regions) for look in loaded):
            findings += guarded(name, images.check_regions, name, items, loaded, total, config, facts)
        else:
            looks[name] = loaded
            findings += guarded(name, images.check_pictures, name, loaded, total, config, facts)
    if len(splits) == 2:
        for check in (identity.check_ids_across, captions.check_same_captions):
            findings += guarded("leak", check, splits["train"], splits["val"])
    if looks:
        totals = {name: len(splits[name].items) for name in looks}
        findings += guarded("leak", identity.check_copies, looks, totals)
    return findings


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
        if not is_on_hub(spec) or not (is_absent(error) or incomplete):
            raise
        name = spec.removeprefix(HUB).partition("@")[0]
        raise CoderError(
            f"{spec}: no complete copy in the hub's cache, and doctor downloads nothing: hf download {name}, or name a folder"
        ) from error
