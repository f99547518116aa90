"""Generalised pooling operator: from a set of local features to one vector (CODER eq. 9-11, docs/equations.md#gpo).

Shapes: B batch, L positions (regions or tokens), C channels, U distinct lengths in the batch.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coder_plugin.tensors import is_on_cpu, upcast

#: What scores a position: a linear layer without bias, as released for VSE-infinity, or CODER's printed two-layer perceptron.
Decoder = Literal["linear", "mlp"]


class GPO(nn.Module):
    """Weighted sum of each channel's sorted values, with learnt weights that depend on the number of values alone.

    ``pooled_c = sum_l theta_l * (l-th largest of the valid values of channel c)``, where theta is the softmax over the
    n valid positions of ``f(BiGRU(codes of positions 0 .. n-1)) / temperature``. Code dimension 2j of position l is
    ``sin(l / 10000^(2j / d_pe))``, dimension 2j + 1 the cosine; positions count from 0, as released for VSE-infinity,
    which the papers do not specify. The two directions of the GRU are averaged.

    Args:
        d_pe: dimension of the position codes, even.
        d_hidden: hidden dimension of the GRU.
        temperature: > 0, divides the scores before the softmax.
        decoder: f. ``"linear"`` has no bias, as released; ``"mlp"`` is the two-layer perceptron that CODER prints.

    Raises:
        ValueError: options out of range.

    Example:
        >>> GPO()(torch.ones(1, 3, 2), torch.tensor([[True, True, False]])).round(decimals=4).tolist()
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        *,
        d_pe: int = 32,
        d_hidden: int = 32,
        temperature: float = 0.1,
        decoder: Decoder = "linear",
    ) -> None:
        super().__init__()
        if d_pe < 2 or d_pe % 2:
            raise ValueError(f"d_pe must be even and >= 2, got {d_pe}")
        if d_hidden < 1:
            raise ValueError(f"d_hidden must be >= 1, got {d_hidden}")
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        if decoder not in ("linear", "mlp"):
            raise ValueError(f"decoder must be 'linear' or 'mlp', got {decoder!r}")
        self.d_pe, self.temperature = d_pe, temperature
        self.gru = nn.GRU(d_pe, d_hidden, batch_first=True, bidirectional=True)
        last = nn.Linear(d_hidden, 1, bias=False)  # the softmax would cancel a bias
        self.score: nn.Module = last
        if decoder == "mlp":
            self.score = nn.Sequential(nn.Linear(d_hidden, d_hidden), nn.ReLU(), last)

    def train(self, mode: bool = True) -> GPO:
        super().train(mode)
        self.gru.train()  # cuDNN refuses gradients through a GRU in eval mode; without dropout the modes are equal
        return self

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Pool the valid positions of every row.

        Values at other positions, NaN and inf included, affect neither the result nor gradients. On a CPU only the columns
        that a row uses are sorted. Elsewhere, and while compiling, all L are, and the weights of all lengths up to L are
        computed, so that shapes do not depend on the masks and nothing waits for the device.

        Args:
            features: floating point [B, L, C].
            mask: bool [B, L], True where valid; in any order, at least one a row.

        Returns:
            [B, C], float64 if the features are, else float32, also under autocast and for half inputs.

        Raises:
            ValueError: wrong shapes or types, no row; on a CPU also a row without valid position, which elsewhere gives zeros.
        """
        if features.ndim != 3 or not features.is_floating_point():
            raise ValueError(f"features must be floating point [B, L, C], got {features.dtype} {tuple(features.shape)}")
        if mask.dtype != torch.bool or mask.shape != features.shape[:2]:
            raise ValueError(
                f"mask must be bool {tuple(features.shape[:2])} for features {tuple(features.shape)}, got "
                f"{mask.dtype} {tuple(mask.shape)}"
            )
        if not len(features):
            raise ValueError(f"features hold no row: {tuple(features.shape)}")
        with torch.autocast(features.device.type, enabled=False):
            values = upcast(features)
            if is_on_cpu(features):
                lengths, first, last = _extent(mask)
                # cut columns that no row uses first: the sort is the expensive part
                values, mask = values[:, first:last], mask[:, first:last]
                distinct, row = lengths.unique(return_inverse=True)
                longest = int(distinct[-1])
                weights = self._weights(distinct, longest, values)[row]
            else:
                longest = features.shape[1]
                distinct = torch.arange(1, longest + 1, device=features.device)
                weights = self._weights(distinct, longest, values)[(mask.sum(1) - 1).clamp(min=0)]
            # transposed and contiguous, the sort is 1.3 (30 positions) to 1.8 times (36) as fast as along dimension 1
            values = values.transpose(1, 2).contiguous().masked_fill(~mask[:, None], -torch.inf)
            values = values.sort(dim=-1, descending=True).values[..., :longest]
            counted = torch.arange(longest, device=values.device) < mask.sum(1)[:, None, None]
            return (torch.where(counted, values, 0) * weights[:, None]).sum(-1)

    def _weights(self, lengths: Tensor, longest: int, like: Tensor) -> Tensor:
        """theta [U, longest] for distinct lengths [U], of which the last is ``longest``; zero beyond each, as ``like``."""
        positions = torch.arange(longest, device=like.device)
        even = torch.arange(0, self.d_pe, 2, dtype=like.dtype, device=like.device)
        rates = torch.exp(even * (-math.log(10000) / self.d_pe))
        angles = positions[:, None] * rates
        codes = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
        # Each length's positions come last in its row, so that the backward direction starts at the last of them. The forward
        # direction does not depend on the length: the row of the greatest one has it for all.
        shift = longest - lengths[:, None]
        rows = codes[(positions - shift).clamp(min=0)]
        forward, backward = _call(self.gru, rows, rows.dtype)[0].unflatten(-1, (2, -1)).unbind(-2)
        own = (positions + shift).clamp(max=longest - 1)[..., None].expand_as(backward)
        states = (forward[-1] + backward.gather(1, own)) / 2
        scores = _call(self.score, states, like.dtype).squeeze(-1)
        valid = positions < lengths[:, None]
        return (scores / self.temperature).masked_fill(~valid, -torch.inf).softmax(-1)


def _extent(mask: Tensor) -> tuple[Tensor, int, int]:
    """Valid positions of each row [B], and the first column and the one past the last that any row uses; on the CPU."""
    counts = torch.cat((mask.sum(1), mask.any(0).long())).cpu()  # one transfer, and the only synchronisation
    lengths, used = counts[: len(mask)], counts[len(mask) :].nonzero()
    empty = (lengths == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"{len(empty)} of {len(mask)} rows have no valid position, the first is row {empty[0]}")
    return lengths, int(used[0]), int(used[-1]) + 1


def _call(module: nn.Module, inputs: object, dtype: torch.dtype) -> Any:
    """``module(inputs)`` computed in ``dtype``, whatever the type of its parameters."""
    parameters = dict(module.named_parameters())
    if all(parameter.dtype == dtype for parameter in parameters.values()):
        return module(inputs)
    return functional_call(module, {name: parameter.to(dtype) for name, parameter in parameters.items()}, (inputs,))
