"""Start rows of a trained parameter anew, with the optimizer's moments of these rows.

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
    """Set the optimizer's state of some rows to zero: every tensor of its state that has the parameter's shape.

    Args:
        optimizer: a torch optimizer, or a wrapper with its ``state``.
        parameter: [K, F]. A parameter that the optimizer has not stepped yet has no state.
        rows: bool [K].

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 1))
        >>> optimizer = torch.optim.Adam([weight])
        >>> weight.grad = torch.ones(2, 1)
        >>> optimizer.step()
        >>> reset_moments(optimizer, weight, torch.tensor([False, True]))
        >>> [round(value, 4) for value in optimizer.state[weight]["exp_avg"].flatten().tolist()]
        [0.1, 0.0]
    """
    if parameter not in optimizer.state:
        return
    mask = _part_of(rows[:, None].expand(parameter.shape), parameter)
    for value in optimizer.state[parameter].values():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            distributed.local(value).masked_fill_(mask, 0)


def _part_of(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded as the parameter is."""
    if not distributed.is_sharded(parameter):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(full.contiguous(), mesh, placements).to_local()
