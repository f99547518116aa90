"""Pictures with captions and a small model, for indexes that commands make."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

import coder_plugin
from coder_plugin.data.scenes import open_scenes
from coder_plugin.pretrained.export import export_model


def write_pictures(folder: Path, count: int, *, name: str = "{:03d}.png") -> Path:
    """Write scenes as PNG files, and a table with two captions of each; returns the path of the table, ``all.csv``."""
    scenes = open_scenes("val")
    with open(folder / "all.csv", "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["filepath", "title"])
        for number in range(count):
            item, path = scenes[number], folder / name.format(number)
            item.load().save(path)
            table.writerows([[str(path), caption] for caption in item.captions[:2]])
    return folder / "all.csv"


def write_model(folder: Path, loss: Any, *, seed: int = 0) -> Path:
    """Export ``coder-tiny`` with random weights; returns ``folder``."""
    torch.manual_seed(seed)
    export_model(coder_plugin.create_model("coder-tiny", loss=loss), folder)
    return folder
