"""Re-initialise rows of a trained parameter, and the optimizer's moments of these rows.

Shapes: K rows of F values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coder_plugin import distributed


@torch.no_grad()
def replace_rows(parameter: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write ``values`` [K, F] into the rows of ``parameter`` [K, F] where ``rows``, bool [K], is true.

    Under FSDP2 the parameter may be sharded. Call it on all ranks with equal arguments then.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> replace_rows(weight, torch.tensor([False, True]), torch.ones(2, 3))
        >>> weight.tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    mask = _part_of(rows[:, None].expand(parameter.shape), parameter)
    weight = distributed.local(parameter)
    weight.copy_(torch.where(mask, _part_of(values.to(parameter.dtype), parameter), weight))


@torch.no_grad()
def reset_moments(optimizer: Any, parameter: Tensor, rows: Tensor) -> None:
    """Reset the optimizer's state of some rows.

    If all rows are new, the parameter's whole state is dropped, the number of steps included. Else averages of
    gradients become zero, and averages of squared gradients the mean of the other rows: at zero, and with the number of
    steps that the parameter has, Adam would divide by almost nothing, and take steps of several times the learning
    rate.

    Args:
        optimizer: a torch optimizer, or a wrapper with its ``state``. Averages of squares have ``sq`` in their names.
        parameter: [K, F]. A parameter that the optimizer has not stepped yet has no state. rows: bool [K].

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 1))
        >>> optimizer = torch.optim.Adam([weight])
        >>> weight.grad = torch.tensor([[1.0], [3.0]])
        >>> optimizer.step()
        >>> reset_moments(optimizer, weight, torch.tensor([False, True]))
        >>> [optimizer.state[weight][name].flatten().round(decimals=4).tolist() for name in ("exp_avg", "exp_avg_sq")]
        [[0.10000000149011612, 0.0], [0.0010000000474974513, 0.0010000000474974513]]
    """
    if parameter not in optimizer.state or not rows.any():
        return
    if rows.all():
        optimizer.state.pop(parameter)
        return
    mask = _part_of(rows[:, None].expand(parameter.shape), parameter)
    for name, value in optimizer.state[parameter].items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue
        if "slow" in name:  # Lookahead's weights
            fresh = distributed.local(parameter)
        else:
            fresh = torch.zeros((), dtype=value.dtype, device=mask.device)
        if "sq" in name:
            full = value.full_tensor() if distributed.is_sharded(value) else value  # type: ignore[attr-defined]
            fresh = _part_of(full[~rows.to(full.device)].mean(0).expand(full.shape), value)
        state = distributed.local(value)
        state.copy_(torch.where(mask.to(state.device), fresh.to(state.device), state))


def _part_of(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded as the parameter is."""
    if not distributed.is_sharded(parameter):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(full.contiguous(), mesh, placements).to_local()
