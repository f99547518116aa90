"""Runs of a model that trains, evaluates, saves and exports in well under a second, and what two of them have in common.

A run is made in a forked process, so that it can be killed at any point and torch is imported once.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from coder_plugin.concepts import scenes_vocabulary
from coder_plugin.data.item import Item
from coder_plugin.errors import CoderError
from coder_plugin.training.loop import Trainer
from tests import saved

MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 8, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 4, "heads": 1, "layers": 1},
}
#: Of the model and the vocabulary: a run is resumed with the same path, wherever its own folder is copied to.
FILES = Path(os.environ.get("TINY_RUN_FILES") or tempfile.mkdtemp(prefix="tiny-run-"))
if "TINY_RUN_FILES" not in os.environ:  # the first process of several
    atexit.register(shutil.rmtree, FILES, ignore_errors=True)
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")


def items(count: int, first: int = 0) -> list[Item]:
    """Pictures of one colour, the caption "a red circle" and the like."""

    def load(number: int) -> Image.Image:
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(256, (16, 16, 3), generator=generator, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())

    def text(number: int) -> str:
        place = "left of" if number % 2 else "above"
        return f"a {COLOURS[number % 4]} {SHAPES[number % 3]} {place} a {COLOURS[number % 3]} square"

    return [
        Item(str(number), (text(number), text(number + 1)), lambda number=number: load(number))
        for number in range(first, first + count)
    ]


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Eight steps in two epochs, saved after every second, evaluated after each epoch."""
    model = FILES / "tiny.json"
    if not model.exists():
        model.write_text(json.dumps(MODEL))
    defaults = {
        "model": str(model),
        "logs": str(folder),
        "name": "run",
        "batch_size": 4,
        "epochs": 2,
        "save_every_steps": 2,
        "workers": 0,
        "val_frequency": 1,
        "warmup": 2,
        "lr": 1e-2,
        "lr_scheduler": "const",
        "ema_decay": 0.5,
        "log_every_n_steps": 1,
        "set": ["momentum.bank_size=8"],
    }
    return {**defaults, **changes}


def trainer(options: dict[str, Any], *, loss: str = "dcl + m_dcl", count: int = 16) -> Trainer:
    config = {key: value for key, value in options.items() if key not in ("model", "concepts")}
    if "concepts" in options:
        config["concepts"] = options["concepts"]
    return Trainer(model=options["model"], loss=loss, train=items(count), val=items(6, first=100), config=config)


def coder_options(folder: Path, **changes: Any) -> dict[str, Any]:
    """All of CODER's state: bank, momentum towers, prototypes, concepts with their vocabulary."""
    words = FILES / "words.safetensors"
    if not words.exists():
        scenes_vocabulary().save(words)
    settings = ["momentum.bank_size=8", "prototypes.clusters=3", "prototypes.recluster=8", "concepts.warmup=2"]
    return options(folder, **{"set": settings, "concepts": str(words), **changes})


def in_child(work: Callable[[], object], *, quiet: bool = True) -> int:
    """``work()`` in a forked process: its exit status, negative for a signal. ``CoderError`` is 2, as in the command."""
    child = os.fork()
    if not child:
        status = 1
        try:
            if quiet:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
            torch.set_num_threads(1)
            work()
            status = 0
        except CoderError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state(folder: Path, name: str) -> dict[str, Any]:
    """What a checkpoint holds of model, optimizer, schedule, random states and positions."""
    return saved.content(folder / "checkpoints" / name)


def last_checkpoint(folder: Path) -> str:
    return max(path.name for path in (folder / "checkpoints").iterdir())


def exports(folder: Path) -> dict[str, bytes]:
    """The files of a run's exports."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("export/**/*")) if path.is_file()}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names whose values are not the same, bit for bit."""
    missing = sorted(one.keys() ^ other.keys())
    unequal = [
        name
        for name in one.keys() & other.keys()
        if not (torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name])
    ]
    return missing + sorted(unequal)


def assert_same_run(whole: Path, other: Path) -> None:
    """The newest checkpoint's state, the exports' content and the rows of the log are the same."""
    name = last_checkpoint(whole)
    assert last_checkpoint(other) == name
    assert not differences(state(whole, name), state(other, name))
    assert not differences(exports(whole), exports(other))
    assert rows(other) == rows(whole)
