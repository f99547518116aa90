"""Sets of regions or words in padded tensors.

Shapes: B batch, L positions, D dimensions. Masks are bool [B, L], True where valid, a position at least in each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coder_plugin.functional.similarity import raise_precision, unit


def check_mask(name: str, mask: Tensor, tokens: Tensor) -> None:
    if mask.dtype != torch.bool or tokens.ndim != 3 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name} must be a bool tensor with the first two dimensions of its features {tuple(tokens.shape)}, got "
            f"{mask.dtype} {tuple(mask.shape)}"
        )


def unit_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    """Each position of length one in float32 or better, and zero at padding, which may hold anything."""
    return unit(torch.where(mask[..., None], tokens, 0))


def unit_channels(tokens: Tensor, mask: Tensor) -> Tensor:
    """Each channel divided by its norm over the set's valid positions, as VSRN's and CAMERA's released codes do it."""
    rows = torch.where(mask[..., None], tokens, 0)
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


def without_start(mask: Tensor) -> Tensor:
    """A text's mask [B, T] less its first position, where it has another one."""
    alone = mask.sum(1, keepdim=True) < 2
    return mask & (alone | (torch.arange(mask.shape[1], device=mask.device) > 0))


def lengths(mask: Tensor) -> Tensor:
    """Mask [B, L] -> [B]: positions up to and with each row's last valid one; 1 at least."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * places).amax(1).clamp(min=1)


def last_state(states: Tensor, mask: Tensor) -> Tensor:
    """A recurrent layer's states [B, L, D] -> the one at each row's last valid position [B, D]."""
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, 0).amax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


def valid_first(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same sets with their valid positions in front, in order: what a recurrent layer may run over."""
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return tokens.gather(1, order[..., None].expand_as(tokens)), mask.gather(1, order)


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """[B, L, D] -> [B, D] over the valid positions, in float32 or better, also under autocast."""
    return raise_precision(torch.where(mask[..., None], tokens, 0)).sum(1) / mask.sum(1, keepdim=True)


def greatest(tokens: Tensor, mask: Tensor) -> Tensor:
    """Each dimension's largest value over the valid positions [B, L, D] -> [B, D]."""
    return tokens.masked_fill(~mask[..., None], -torch.inf).amax(1)
