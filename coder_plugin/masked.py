"""Sets of regions or words in padded tensors.

Shapes: B batch, L positions, D dimensions. Masks are bool [B, L], True where valid, with at least one valid position in
each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coder_plugin.tensors import MIN_LENGTH, unit, upcast


def check_mask(name: str, mask: Tensor, tokens: Tensor) -> None:
    """:class:`ValueError` unless the mask is bool and has the first two dimensions of the tokens [B, L, D]."""
    if mask.dtype != torch.bool or tokens.ndim != 3 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name} must be a bool tensor with the first two dimensions of its features {tuple(tokens.shape)}, got "
            f"{mask.dtype} {tuple(mask.shape)}"
        )


def unit_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    """Each position [B, L, D] L2-normalised, in float32 or float64, and zero at padding, whatever it holds."""
    return unit(torch.where(mask[..., None], tokens, 0))


def unit_channels(tokens: Tensor, mask: Tensor) -> Tensor:
    """Each channel [B, L, D] divided by its norm over the valid positions, as in the released code of VSRN and CAMERA."""
    rows = torch.where(mask[..., None], tokens, 0)
    length = rows.norm(dim=1, keepdim=True)
    return rows / length.masked_fill(length <= MIN_LENGTH, torch.inf)


def without_start(mask: Tensor) -> Tensor:
    """A text's mask [B, T] without its first position, except for texts that have no other.

    Example:
        >>> without_start(torch.tensor([[True, True], [True, False]])).tolist()
        [[False, True], [True, False]]
    """
    single = mask.sum(1, keepdim=True) < 2
    return mask & (single | (torch.arange(mask.shape[1], device=mask.device) > 0))


def lengths(mask: Tensor) -> Tensor:
    """Mask [B, L] -> int [B]: the number of positions up to and including the last valid one; at least 1.

    Example:
        >>> lengths(torch.tensor([[True, False, True, False]]))
        tensor([3])
    """
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * positions).amax(1).clamp(min=1)


def last_state(states: Tensor, mask: Tensor) -> Tensor:
    """The state of a recurrent layer at each row's last valid position: [B, L, D] -> [B, D]."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, 0).amax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


def valid_first(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [B, L, D] and mask with the valid positions moved to the front, in order, as recurrent layers need them."""
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return tokens.gather(1, order[..., None].expand_as(tokens)), mask.gather(1, order)


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean over the valid positions, [B, L, D] -> [B, D], in float32 or float64, also under autocast; zero without any.

    Example:
        >>> mean(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
        tensor([[2.]])
    """
    return upcast(torch.where(mask[..., None], tokens, 0)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def greatest(tokens: Tensor, mask: Tensor) -> Tensor:
    """The largest value of each dimension over the valid positions, [B, L, D] -> [B, D]."""
    return tokens.masked_fill(~mask[..., None], -torch.inf).amax(1)
