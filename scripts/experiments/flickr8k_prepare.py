"""What flickr8k.py trains on: shards, regions, features of frozen towers and words, made once in the work folder."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from braceexpand import braceexpand
from flickr8k_plan import Plan

from coder_plugin.locations import absolute

HERE = Path(__file__).resolve().parent
#: 36 regions of an image: the cells of the last feature map.
NETWORK = shlex.split(
    "--detector timm --detector-model tf_efficientnet_lite0 --weights towers/lite0.safetensors --image-size 192 --split val"
)

#: AsCL's figure 3: caches of texts with one kind of noise, or of positives.
ASCL_TEXTS = {
    **{name: ["--noise", name] for name in ("shuffle", "dropout", "gaussian")},
    "cutoff": ["--noise", "token_cutoff+feature_cutoff"],
    **{name: ["--positives", name] for name in ("join", "truncate")},
}


def has_split(cache: Path, split: str) -> bool:
    """Whether a cache of a script of frozen towers has a split."""
    return cache.is_file() and split in torch.load(cache, mmap=True, weights_only=True)


def local_shards(data: str | None) -> list[str]:
    """The files that a pattern with braces names; of an address none."""
    return [] if data is None or "://" in data else list(braceexpand(data))


def files_read(plan: Plan) -> set[str]:
    """Words in the flags of the chosen settings and their rows: among them the caches that they read."""
    flags = [word for name in plan.chosen_settings for word in plan.settings[name]["flags"]]
    for name in plan.chosen_settings:
        for row in plan.rows_of(name):
            flags += shlex.split(plan.row(name, row).get("flags", ""))
    return set(flags)


def prepare(options: argparse.Namespace) -> None:
    """Extract regions of all splits and features of the frozen towers, and collect the concepts of the training captions."""
    work: Path = options.work
    read = files_read(Plan("cpu", options.settings))
    work.mkdir(parents=True, exist_ok=True)

    def call(*command: str) -> None:
        print(shlex.join(command), flush=True)
        if subprocess.run([sys.executable, *command], cwd=work).returncode:
            raise SystemExit(f"failed: {shlex.join(command)}")

    if options.vectors != "none":
        if not os.path.isfile(options.vectors):
            raise SystemExit(f"--vectors {options.vectors}: no such file")
        options.vectors = absolute(options.vectors)
    if os.path.isdir(options.tagger):
        options.tagger = absolute(options.tagger)
    for data in (options.train_data, options.held_out, options.val_data, options.test_data):
        if missing := [path for path in local_shards(data) if not os.path.isfile(path)]:
            raise SystemExit(f"{data}: {missing[0]} does not exist")

    for data, name in (
        (options.train_data, "train"),
        (options.held_out, "held-out"),
        (options.val_data, "val"),
        (options.test_data, "test"),
    ):
        (work / "shards" / name).mkdir(parents=True, exist_ok=True)
        for path in local_shards(data):
            link = work / "shards" / name / os.path.basename(path)
            if not link.is_symlink():
                link.symlink_to(os.path.abspath(path))
    if not (work / "towers" / "lite0.safetensors").is_file():
        call(str(HERE / "flickr8k_towers.py"), "towers", "--context-length", "24")
    text = json.loads((work / "towers" / "lite0-minilm.json").read_text())["text_cfg"]["hf_model_name"]
    if not (work / "towers" / "minilm").exists():
        (work / "towers" / "minilm").symlink_to(text)
    parts = [
        (options.train_data, "regions", "train"),
        (options.held_out, "regions", "dev"),
        (options.val_data, "regions-val", "dev"),
        (options.test_data, "regions-test", "dev"),
    ]
    for data, folder, split in parts:
        if data is not None and not (work / folder / f"{split}_ims.npy").is_file():
            shards = f"{folder}-shards"
            call("-m", "coder_plugin.cli", "regions", "extract", absolute(data), shards, *NETWORK, "--to-split", split)
            call("-m", "coder_plugin.cli", "regions", "convert", shards, folder, "--to", "precomp", "--split", split)
    towers = ["--model", "towers/lite0-minilm.json", "--image-weights", "towers/lite0.safetensors"]
    train, held_out, val = map(absolute, (options.train_data, options.held_out, options.val_data))
    regions = ["--train-data", "regions", "--val-data", "regions", "--report-data", "regions-val"]
    caches = {
        "frozen.pt": ["frozen_towers.py", *towers, "--train-data", f"{train}::{held_out}", "--val-data", val],
        "grids.pt": ["frozen_selfalign.py", *towers, "--train-data", train, "--val-data", held_out, "--report-data", val],
        "words.pt": ["frozen_ascl.py", "--text", "towers/minilm", *regions],
    }
    for name, flags in ASCL_TEXTS.items():
        caches[f"words-{name}.pt"] = [*caches["words.pt"], *flags]
    if options.test_data is not None:
        test = absolute(options.test_data)
        for name, location in {"frozen.pt": test, "grids.pt": test, "words.pt": "regions-test"}.items():
            caches[name] += ["--test-data", location]
    for name, (script, *flags) in caches.items():
        tested = options.test_data is not None and "--test-data" in flags
        missing = not (work / name).is_file() or (tested and not has_split(work / name, "test"))
        if name in read and missing:
            call(str(HERE / script), "cache", name, *flags)
    if not (work / "concepts.safetensors").is_file():
        words = ["--vectors", options.vectors, "--output", "concepts.safetensors", "--tagger", options.tagger]
        call("-m", "coder_plugin.cli", "concepts", "--train-data", "regions", *words)
