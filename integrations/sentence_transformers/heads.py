"""The heads that only training needs: built for a loss, and kept in the checkpoints of sentence-transformers' trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from coder_plugin.backbones import clip
from coder_plugin.errors import CoderError
from coder_plugin.model import add_heads
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import head_settings, read_heads, read_tensors, write_tensors
from coder_plugin.resolver import Resolution, resolve

#: All heads of a model in training, banks and momentum towers included.
STATE = "coder_training.safetensors"


def fit_heads(model: Any, loss: Any) -> None:
    """Add the heads that a loss needs, in place, unless the model has them all.

    Heads that the model has already keep their weights and state, and the options that the loss does not set.

    Raises:
        CoderError: a loss that this model cannot serve.
    """
    passed = {name: model.coder.heads[name] for name in model.coder.passed_heads}
    objective = Objective.parse(loss, heads=passed)
    resolution = resolve(objective, clip.available_keys(model), heads=passed)
    if all(_gives(model, name, resolution) for name in resolution.heads):
        return
    coder, training = model.coder, model.training
    chosen = dict(objective.heads)
    options = {
        f"{name}.{option}": value
        for name, pairs in coder.objective.heads
        if name in resolution.heads
        for option, value in pairs
        if option not in dict(chosen.get(name, ()))
    }
    clip.retract(model)
    for key in ("logit_scale", "logit_bias"):  # frozen if no term of the earlier loss read it
        if getattr(model, key, None) is not None:
            getattr(model, key).requires_grad_(True)
    add_heads(
        model,
        model.coder_name,
        loss=objective.with_options(options),
        custom_heads=[head for name, head in passed.items() if name in resolution.heads],
        aggregator=coder.aggregator,
        context_blocks=coder.context_blocks,
    )
    fresh = model.coder.state_dict()
    kept = {name: value for name, value in coder.state_dict().items() if name in fresh and fresh[name].shape == value.shape}
    model.coder.load_state_dict(kept, strict=False)
    model.coder.attach(model)  # a new momentum copy has the old aggregators
    model.coder.load_state_dict(kept, strict=False)  # an old momentum copy is kept
    model.train(training)


def _gives(model: Any, name: str, resolution: Resolution) -> bool:
    """Whether the model has the head, and it computes all that the loss reads of it."""
    head = model.coder.heads[name] if name in model.coder.heads else None
    return head is not None and resolution.reads & set(head.provides) <= set(head.requested_keys)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of transformers' trainer, by its name."""
    return re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def save_state(model: Any, folder: Path) -> None:
    """Write all heads, for :func:`load_state`; nothing where terms or heads are objects, which a file cannot hold."""
    if not model.coder.passed_heads and not any(spec.is_passed for spec in model.coder.objective.terms):
        write_tensors(model.coder.state_dict(), folder / STATE, coder=json.dumps(head_settings(model)))


def load_state(model: Any, folder: Path) -> None:
    """Give the model the heads of a checkpoint, if it has any.

    Raises:
        CoderError: the file is damaged.
    """
    if not (folder / STATE).is_file():
        return
    fit_heads(model, read_heads(folder / STATE).objective)
    try:
        model.coder.load_state_dict(read_tensors(folder / STATE))
    except RuntimeError as error:
        raise CoderError(f"{folder / STATE} does not fit this model: {' '.join(str(error).split())[:300]}") from error
