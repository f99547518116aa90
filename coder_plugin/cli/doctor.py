"""``coder-plugin doctor``: the checks that flags call for, one after the other, and what they found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coder_plugin.cli.flags import read_options
from coder_plugin.config import TrainConfig, options_by_name, resolve
from coder_plugin.doctor.findings import Finding, format_findings, guarded, worst
from coder_plugin.errors import CoderError

#: A split of at most so many images has all its pictures decoded, whatever ``--samples`` says: within a minute or so.
SMALL = 10_000


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_flags

    parser = commands.add_parser(
        "doctor",
        help="check installation, machine, data, objective or a trained run, and say what to do",
        description="Check the installation and the machine; with data, a model or an objective named as for train, these too; "
        "with a folder, the run, export or index in it. Nothing is downloaded or written. Status 1 where there is a problem.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", nargs="*", help="folder of a run, an export or an index; or hf-hub:OWNER/NAME, if it is cached"
    )
    parser.add_argument("--vectors", metavar="FILE", help="word vectors, to compare with the captions' words")
    parser.add_argument(
        "--samples", type=int, default=256, metavar="N", help="images to decode of a split with more than 10,000 [256]"
    )
    parser.add_argument("--all", action="store_true", help="decode every image and read every shard")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 for a warning, too")
    parser.add_argument("--json", metavar="FILE", help="write the findings to FILE ('-': standard output)")
    add_flags(parser, only=flags())
    parser.set_defaults(run=run)


def flags() -> list[str]:
    """Options of training that say something of the model, the recipe, the data, or the machine."""
    more = ("batch_size", "accum_freq", "epochs", "precision", "logs", "seed")
    parts = ("model", "loss", "data")
    return [name for name, option in options_by_name().items() if option.subject in parts or name in more]


def run(arguments: argparse.Namespace) -> int:
    """Check, tell, and return the exit status: 1 with a problem, or with ``--strict`` with a warning, else 0.

    Raises:
        CoderError: options that are unknown or do not go together; a folder that is nothing of ours, a repository of the
            hub that is not in its cache.
    """
    if arguments.samples < 1:
        raise CoderError(f"--samples is {arguments.samples}; it must be 1 or more")
    found = examine(arguments)
    if arguments.json != "-":
        print(format_findings(found))
    if arguments.json:
        text = json.dumps([asdict(each) for each in found], indent=2)
        if arguments.json == "-":
            print(text)
        else:
            try:
                Path(arguments.json).write_text(text + "\n")
            except OSError as error:
                raise CoderError(f"--json {arguments.json}: {error.strerror}") from error
    return int(worst(found) in (("warning", "problem") if arguments.strict else ("problem",)))


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """All findings. Nothing is downloaded, and nothing written."""
    from coder_plugin.doctor import machine, offline, run

    given = read_options(arguments)
    config = resolve([("flag", given)])
    offline.stay_offline()
    folders = [offline.folder_of(spec, config.model.cache_dir) for spec in arguments.folder]
    checks = [check for folder in folders for check in run.check_run(folder)]  # a slip is told of now
    found = _installation()
    found += guarded("machine", machine.check_gpus, config)
    found += guarded("machine", machine.check_room, config)
    for name, check, folder in checks:
        found += guarded(name, check, folder)
    return [*found, *check_training(config, given, arguments)]


def _installation() -> list[Finding]:
    from coder_plugin.doctor import installation

    found = guarded("installation", installation.check_packages)
    return [*found, *guarded("installation", installation.check_libraries)]


def check_training(config: TrainConfig, given: Mapping[str, Any], arguments: argparse.Namespace) -> list[Finding]:
    """What a run would train with, if flags name data, a model or a recipe."""
    named = [
        name for name in ("train_data", "val_data", "model", "loss", "concepts", "regions") if given.get(name) is not None
    ]
    if not named and arguments.vectors is None and arguments.config is None:
        return []
    from coder_plugin.doctor import captions, recipe, walk, words

    splits: dict[str, walk.Walked] = {}
    found: list[Finding] = []
    for name in ("train", "val"):
        if getattr(config.data, name) is not None:
            found += guarded(name, _open, splits, name, config, arguments.all)
    made = recipe.Made()
    of_recipe = []
    if arguments.config or {"model", "loss", "concepts"} & set(named):
        of_recipe = guarded("recipe", _recipe, config, splits, made)
    counted = words.words_of([splits["train"]]) if "train" in splits else words.count_words(())
    if config.loss.concepts:
        of_recipe += guarded("words", words.check_concepts, config.loss.concepts, counted)
    if arguments.vectors is not None:
        of_recipe += guarded("words", words.check_vectors, arguments.vectors, counted)
    readable = {name: split for name, split in splits.items() if split.items}
    for name, split in readable.items():
        found += guarded(name, captions.check_captions, split)
        if made.tokenizer is not None:
            found += guarded(name, captions.check_lengths, split, made.tokenizer)
    return [*found, *_images(readable, config, made, arguments), *of_recipe]


def _open(splits: dict[str, Any], name: str, config: TrainConfig, whole: bool) -> Iterator[Finding]:
    """Open and read a split into ``splits``."""
    from coder_plugin.doctor import captions, walk

    splits[name] = split = walk.walk_split(name, config, most=None if whole else walk.MOST)
    yield from captions.check_reading(split, config.data.max_bad_images)


def _recipe(config: TrainConfig, splits: Mapping[str, Any], made: Any) -> Iterator[Finding]:
    from coder_plugin.data.from_config import make_source
    from coder_plugin.doctor.recipe import check_recipe

    whole = source = make_source(config.data, split="train") if config.data.on_scenes else None
    if (split := splits.get("train")) is not None and not split.shards and not split.samples and split.items:
        whole, source = split.whole, split.source
    yield from check_recipe(config, whole, source, made)


def _images(splits: Mapping[str, Any], config: TrainConfig, made: Any, arguments: argparse.Namespace) -> list[Finding]:
    """Ids, and pictures or regions, of each split and across them."""
    from coder_plugin.data.regions.base import Regions
    from coder_plugin.doctor import captions, identity, pictures, regions

    found: list[Finding] = []
    looks: dict[str, list[Any]] = {}
    for name, split in splits.items():
        found += guarded(name, identity.check_ids, split)
        total = len(split.items)
        items = split.items if arguments.all or total <= SMALL else split.sample(arguments.samples, config.run.seed)
        seen = pictures.look_at(items, f"{name}: pictures", threads=split.threads)
        if config.data.regions is not None or any(isinstance(look, Regions) for look in seen):
            found += guarded(name, regions.check_regions, name, items, seen, total, config, made)
        else:
            looks[name] = seen
            found += guarded(name, pictures.check_pictures, name, seen, total, config, made)
    if len(splits) == 2:
        for check in (identity.check_ids_across, captions.check_same_captions):
            found += guarded("leak", check, splits["train"], splits["val"])
    if looks:
        totals = {name: len(splits[name].items) for name in looks}
        found += guarded("leak", identity.check_copies, looks, totals)
    return found
