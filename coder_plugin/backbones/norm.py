"""BatchNorm over the valid positions of padded sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.functional.similarity import raise_precision


class MaskedBatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over positions [..., C], some of which are padding. Padding counts in no statistic.

    In training the statistics are computed in float32 or better, also under autocast.

    Args:
        features: C.
        across_ranks: use the positions of all ranks. Counts, sums and squares are summed; torch's SyncBatchNorm would count
            padding, and does not run on a CPU.

    Example:
        >>> import torch
        >>> norm = MaskedBatchNorm(1)
        >>> values = torch.tensor([[[1.0], [3.0], [99.0]]])
        >>> norm(values, torch.tensor([[True, True, False]]))[0, :2, 0].round().tolist()
        [-1.0, 1.0]
    """

    #: In training only the first so many rows of the batch enter the statistics; None: all. See :func:`statistics_of`.
    rows: int | None = None

    def __init__(self, features: int, *, across_ranks: bool = False) -> None:
        super().__init__(features)
        self.across_ranks = across_ranks

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Positions [..., C] and bool mask [...], True where valid -> [..., C]. The output at padding is meaningless."""
        if mask is not None:
            input = torch.where(mask[..., None], input, 0)  # padding may hold NaN
        elif self.across_ranks:
            mask = torch.ones(input.shape[:-1], dtype=torch.bool, device=input.device)
        if mask is None or not self.training:
            return super().forward(input.reshape(-1, input.shape[-1])).view_as(input)
        with torch.autocast(input.device.type, enabled=False):
            values, valid = raise_precision(input), mask[..., None]
            dims = tuple(range(values.ndim - 1))
            total = distributed.summed if self.across_ranks else _identity
            sums, count = values[: self.rows].sum(dims), mask[: self.rows].sum().to(values.dtype)
            *_, count = totals = total(torch.cat([sums, count[None]]))
            mean = totals[:-1] / count
            centred = torch.where(valid, values - mean, 0)
            variance = total(centred[: self.rows].square().sum(dims)) / count
            if self.track_running_stats:
                self._update_running(mean, variance * count / (count - 1).clamp(min=1))
            out = centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return out.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1


def _identity(values: Tensor) -> Tensor:
    return values


@contextlib.contextmanager
def statistics_of(module: nn.Module, rows: int) -> Iterator[None]:
    """Inside the context the masked BatchNorms of a module compute their statistics from the first ``rows`` rows of a batch.

    Generated captions are encoded after the real ones in one batch, and must not change the statistics.
    """
    norms = [each for each in module.modules() if isinstance(each, MaskedBatchNorm)]
    try:
        for norm in norms:
            norm.rows = rows
        yield
    finally:
        for norm in norms:
            norm.rows = None
