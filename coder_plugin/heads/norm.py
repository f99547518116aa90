"""BatchNorm over the valid positions of padded sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.functional.similarity import raise_precision


class MaskedBatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over positions [..., C] of which some are padding: these count in no statistic.

    ``rows``: so many of the batch's first rows count in training, None: all. See :func:`statistics_of`.

    Args:
        features: C.
        across_ranks: statistics of the positions of all ranks together: their count, sum and squares are added up. torch's
            SyncBatchNorm would count padding, and refuses a CPU.
    """

    rows: int | None = None

    def __init__(self, features: int, *, across_ranks: bool = False) -> None:
        super().__init__(features)
        self.across_ranks = across_ranks

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Positions [..., C] and bool mask [...], True where valid -> [..., C]; what padding becomes means nothing."""
        if mask is not None:
            input = torch.where(mask[..., None], input, 0)  # padding may hold anything
        elif self.across_ranks:
            mask = torch.ones(input.shape[:-1], dtype=torch.bool, device=input.device)
        if mask is None or not self.training:
            return super().forward(input.reshape(-1, input.shape[-1])).view_as(input)
        with torch.autocast(input.device.type, enabled=False):
            values, valid = raise_precision(input), mask[..., None]
            over = tuple(range(values.ndim - 1))
            total = distributed.summed if self.across_ranks else _own
            sums, count = values[: self.rows].sum(over), mask[: self.rows].sum().to(values.dtype)
            *_, count = whole = total(torch.cat([sums, count[None]]))
            mean = whole[:-1] / count
            centred = torch.where(valid, values - mean, 0)
            variance = total(centred[: self.rows].square().sum(over)) / count
            if self.track_running_stats:
                self._follow(mean, variance * count / (count - 1).clamp(min=1))
            out = centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return out.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1


def _own(part: Tensor) -> Tensor:
    return part


@contextlib.contextmanager
def statistics_of(module: nn.Module, rows: int) -> Iterator[None]:
    """In the forward inside, the masked BatchNorms of a module take their statistics of the batch's first rows alone: of
    captions, and not of what was generated of them."""
    norms = [each for each in module.modules() if isinstance(each, MaskedBatchNorm)]
    try:
        for norm in norms:
            norm.rows = rows
        yield
    finally:
        for norm in norms:
            norm.rows = None
