"""Checks of a checkpoint's content before it is used. Checksums find damage; these find what was written by somebody else.

Anybody can write a checkpoint whose checksums match. Reading one runs no code (:mod:`coder_plugin.training.serialization`), and
whatever does not have the form that this version saves is refused here by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError

#: Fields of a training run's manifest, where present.
_OBJECTS = ("config", "objective", "last", "best", "zero_shot", "versions")
#: Entries of an optimizer's state that have their parameter's shape.
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Errors of reading another's state, such as a missing key, as one line that names ``what``.

    Running out of memory is no fault of the state and passes unchanged.
    """
    try:
        yield
    except (CoderError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CoderError(f"{what} does not have the form that this version saves ({detail}): use another checkpoint") from error


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check the types of a manifest's fields.

    Raises:
        CoderError: a field of another type than a training run writes.
    """
    step, epoch, world_size = manifest["step"], manifest.get("epoch", 0), manifest["world_size"]
    if step < 0 or type(epoch) not in (int, float) or not epoch >= 0 or not 1 <= world_size < 2**20:
        raise CoderError(f"its step {step}, epoch {epoch!r} and world_size {world_size} are not counts")
    seconds = manifest.get("seconds")
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds < math.inf):
        raise CoderError(f"its seconds are {str(seconds)[:40]!r}")
    for name in _OBJECTS:
        if not isinstance(manifest.get(name, {}), dict):
            raise CoderError(f"its {name!r} is not an object")
    if not isinstance(manifest.get("backbone") or {}, dict):
        raise CoderError("its 'backbone' is not an object")
    objective = manifest.get("objective") or {}
    if not isinstance(objective.get("terms", []), list) or not isinstance(objective.get("heads", {}), dict):
        raise CoderError("its 'objective' does not hold a list of terms and an object of heads")
    for name in ("last", "best"):
        _check_results(name, manifest.get(name, {}))
    accuracy = manifest.get("zero_shot", {})
    if not all(type(value) in (int, float) for value in accuracy.values()) or type(accuracy.get("step", 0)) is not int:
        raise CoderError("its 'zero_shot' does not hold numbers")


def _check_results(name: str, results: Mapping[str, Any]) -> None:
    kinds: dict[str, tuple[type, ...]] = {"rsum": (int, float), "epoch": (int,), "step": (int,)}
    for key, allowed in {**kinds, "shortlist": (dict,), "checkpoint": (str,)}.items() if results else ():
        if type(results.get(key)) not in allowed and (key in kinds or key in results):
            raise CoderError(f"its {name!r} has {key}={str(results.get(key))[:40]!r}")


def check_like(saved: Any, own: Any, path: str) -> None:
    """Check that a saved state has the form of this run's own: names, types, shapes and dtypes; values may differ.

    Args:
        saved: from a checkpoint.
        own: the same part of this run's state. None stands for any number.
        path: what messages call it.

    Raises:
        CoderError: the first difference.
    """
    numbers = (int, float, type(None))
    if isinstance(own, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != own.shape or saved.dtype != own.dtype:
            shown = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, Tensor) else type(saved).__name__
            raise CoderError(f"the checkpoint's {path} is {shown}, this run's is {own.dtype} {list(own.shape)}")
    elif isinstance(own, Mapping):
        if not isinstance(saved, Mapping) or not saved.keys() <= own.keys():
            other = f"has {sorted(map(str, saved.keys() - own.keys()))[:3]}" if isinstance(saved, Mapping) else "is no mapping"
            raise CoderError(f"the checkpoint's {path} {other}, which this run's does not")
        for name, value in saved.items():
            check_like(value, own[name], f"{path}.{name}")
    elif isinstance(own, (list, tuple)):
        if type(saved) is not type(own) or len(saved) != len(own):
            raise CoderError(f"the checkpoint's {path} is not a {type(own).__name__} of {len(own)}")
        for number, (value, each) in enumerate(zip(saved, own, strict=True)):
            check_like(value, each, f"{path}[{number}]")
    elif type(saved) is not type(own) and not (type(saved) in numbers and type(own) in numbers):
        raise CoderError(f"the checkpoint's {path} is a {type(saved).__name__}, this run's a {type(own).__name__}")


def check_optimizer(saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer's state before it is loaded: groups like this run's, and a state of numbers and tensors by parameter.

    Raises:
        CoderError: something else, or a moment whose shape is not its parameter's.
    """
    with reading("the checkpoint's optimizer"):
        own = optimizer.state_dict()
        if {*saved} != {*own} or len(saved["param_groups"]) != len(own["param_groups"]):
            raise CoderError("the checkpoint's optimizer does not fit this run: other groups of parameters")
        for number, (group, mine) in enumerate(zip(saved["param_groups"], own["param_groups"], strict=True)):
            check_like(group, mine, f"optimizer.param_groups[{number}]")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, values in saved["state"].items():
            shape = parameters[index].shape
            for name, value in values.items():
                moment = not isinstance(value, Tensor) or (name in _SHAPED and value.shape != shape)
                if moment and type(value) not in (int, float, bool, type(None)):
                    raise CoderError(f"the checkpoint's optimizer.state[{index}].{name} is not of the shape {list(shape)}")
