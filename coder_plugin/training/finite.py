"""Weights and state with NaN or infinity are neither saved nor resumed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.training.step import NonFiniteError


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that hold NaN or infinity. Attention masks may: they mask with -inf.

    Args:
        state: a model's ``state_dict()``.

    Example:
        >>> import torch
        >>> not_finite({"weight": torch.ones(2), "bias": torch.tensor([0.0, torch.nan])})
        ['bias']
    """
    checked = {name: value for name, value in state.items() if not name.endswith("attn_mask")}
    if not checked:
        return []
    finite = torch.stack([value.isfinite().all() for value in checked.values()]).tolist()  # one wait for the device
    return [name for name, is_finite in zip(checked, finite, strict=True) if not is_finite]


def check_before_saving(model: Mapping[str, Tensor], step: int) -> None:
    """Call it on all ranks with the model's state before a checkpoint is written.

    Raises:
        NonFiniteError: on all ranks, if the state of one is not finite.
    """
    per_rank = distributed.gather_objects(not_finite(model))
    for rank, names in enumerate(per_rank):
        if names:
            where = f" on rank {rank}" if len(per_rank) > 1 else ""
            raise NonFiniteError(f"{_list(names)} not finite{where} after step {step}: no checkpoint was written")


def check_loaded(model: Mapping[str, Tensor]) -> None:
    """Check the model's state in a checkpoint.

    Raises:
        CoderError: it is not finite; names the tensors.
    """
    if names := not_finite(model):
        raise CoderError(f"the checkpoint's {_list(names)} not finite: give --resume the folder of an earlier checkpoint")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"
