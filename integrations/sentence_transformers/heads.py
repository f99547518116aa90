"""The heads that only training needs: built for a loss, and kept in the checkpoints of sentence-transformers' trainer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from coder_plugin.backbones import clip
from coder_plugin.backbones.plugin_backbones import read_weights
from coder_plugin.errors import CoderError
from coder_plugin.model import add_heads
from coder_plugin.objective import Objective
from coder_plugin.pretrained.export import head_settings, read_heads, write_tensors
from coder_plugin.resolver import Resolution, resolve

#: All heads of a model in training, banks and momentum towers included.
STATE = "coder_training.safetensors"


def fit_heads(model: Any, loss: Any) -> None:
    """Add the heads that a loss needs, in place, unless the model has them all.

    Heads that the model has stay: an earlier loss, which may be trained in turn with this one, goes on to use them. Where this
    loss sets other options of a head, the head is built again with the earlier one's weights and state.

    Raises:
        CoderError: a loss that this model cannot serve, alone or together with the earlier one.
    """
    coder, training, available = model.coder, model.training, clip.available_keys(model)
    passed = {name: coder.heads[name] for name in coder.passed_heads}
    objective = Objective.parse(loss, heads=passed)
    resolution = resolve(objective, available, heads=passed)
    for key in resolution.reads & {"logit_scale", "logit_bias"}:  # frozen if no term of the earlier loss read it
        parameter = getattr(model, key, None)
        if parameter is not None and key not in resolve(coder.objective, available, heads=passed).reads:
            parameter.requires_grad_(True)
    if all(_gives(model, name, resolution) for name in resolution.heads):
        return
    kept = [
        term
        for term in coder.objective.terms
        if term not in objective.terms and {*resolve(Objective((term,)), available, heads=passed).heads} <= {*coder.heads}
    ]
    together = replace(objective, terms=(*objective.terms, *kept))
    needed = resolve(together, available, heads=passed).heads
    chosen, earlier = dict(objective.heads), dict(coder.objective.heads)
    options = {
        f"{name}.{option}": value
        for name, pairs in earlier.items()
        if name in needed
        for option, value in pairs
        if option not in dict(chosen.get(name, ()))
    }
    if coder.followed_by is not None:
        coder.followed_by.remove()
    clip.retract(model)
    add_heads(
        model,
        model.coder_name,
        loss=together.with_options(options),
        custom_heads=[head for name, head in passed.items() if name in needed],
        aggregator=coder.aggregator,
        context_blocks=coder.context_blocks,
    )
    fresh = model.coder
    fresh.aggregators = coder.aggregators
    fresh.refresh(model)  # new copies have the aggregators, too
    for name, head in coder.heads.items():
        if name not in needed:
            continue
        if {*dict(fresh.objective.heads).get(name, ())} == {*earlier.get(name, ())}:
            head.requested_keys = fresh.heads[name].requested_keys
            fresh.heads[name] = head
        else:
            state = fresh.heads[name].state_dict()
            same = {key: value for key, value in head.state_dict().items() if key in state and state[key].shape == value.shape}
            fresh.heads[name].load_state_dict(same, strict=False)
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
        model.coder.load_state_dict(read_weights(folder / STATE))
    except RuntimeError as error:
        raise CoderError(f"{folder / STATE} does not fit this model: {' '.join(str(error).split())[:300]}") from error
