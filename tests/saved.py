"""What a checkpoint holds, as one flat dict to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def content(checkpoint: Path) -> dict[str, Any]:
    """Every value of a checkpoint's files by path, such as ``state/model/logit_scale`` or ``rank0/position/epoch``."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{name}/{key}", each)
        else:
            found[name] = value

    for file in sorted(checkpoint.glob("*.pt")):
        add(file.stem, torch.load(file, weights_only=True))
    return found


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model and the optimizer."""
    wanted = ("state/model/", "state/optimizer/")
    return {
        name.removeprefix("state/model/"): value
        for name, value in content(checkpoint).items()
        if name.startswith(wanted) and isinstance(value, torch.Tensor)
    }
