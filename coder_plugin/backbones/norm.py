"""BatchNorm over the valid positions of padded sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.tensors import upcast


class MaskedBatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over positions [..., C], some of which are padding. Padding counts in no statistic.

    In training the statistics are computed in float32 or better, also under autocast.

    Args:
        features: C.
        across_ranks: use the positions of all ranks, in one collective and one for the gradient. torch's SyncBatchNorm would
            count padding, and does not run on a CPU. :func:`normalize_together` shares the collectives between several norms.

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
            own = self._own_moments(upcast(input), mask)
            return self._normalize(input, mask, _moments_of_all([own])[0] if self.across_ranks else own)

    def _own_moments(self, values: Tensor, mask: Tensor) -> _Moments:
        """Of this rank's counted positions."""
        values, mask = values[: self.rows], mask[: self.rows]
        dims = tuple(range(values.ndim - 1))
        count = mask.sum().to(values.dtype)
        mean = values.sum(dims) / count.clamp(min=1)  # padding is zero
        return _Moments(count, mean, torch.where(mask[..., None], values - mean, 0).square().sum(dims))

    def _normalize(self, input: Tensor, mask: Tensor, moments: _Moments) -> Tensor:
        count, mean, squares = moments
        variance = squares / count
        if self.track_running_stats:
            self._update_running(mean, variance * count / (count - 1).clamp(min=1))
        centred = torch.where(mask[..., None], upcast(input) - mean, 0)
        return (centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1


class _Moments(NamedTuple):
    """Number of positions [], their mean [C], and the sum of their squared distances from it [C]."""

    number: Tensor
    mean: Tensor
    squares: Tensor


def _moments_of_all(own: Sequence[_Moments]) -> list[_Moments]:
    """Moments of the positions of all ranks, from one collective for all norms.

    Each rank's are about its own mean, so that no large numbers cancel (Chan et al., 1983).
    """
    if distributed.world_size() == 1:
        return list(own)
    packed = torch.cat([torch.cat([count[None], mean, squares]) for count, mean, squares in own])
    widths = [1 + 2 * len(each.mean) for each in own]
    results = []
    for part, each in zip(distributed.gather(packed[None]).split(widths, 1), own, strict=True):
        counts, means, squares = part.to(each.mean.dtype).split([1, len(each.mean), len(each.mean)], 1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        results.append(_Moments(count, mean, (squares + counts * (means - mean).square()).sum(0)))
    return results


def normalize_together(norms: Sequence[MaskedBatchNorm], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``norm(input)`` of several norms ``across_ranks``, with one collective for all, and one for their gradients.

    Args:
        inputs: of each norm, positions [..., C], all of them valid.

    Example:
        >>> norms = [MaskedBatchNorm(1, across_ranks=True), MaskedBatchNorm(1, across_ranks=True)]
        >>> images, texts = normalize_together(norms, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [5.0]])])
        >>> images.flatten().round().tolist(), texts.flatten().tolist()
        ([-1.0, 1.0], [0.0, 0.0])
    """
    if not all(norm.training and norm.across_ranks for norm in norms):
        return [norm(values) for norm, values in zip(norms, inputs, strict=True)]
    with torch.autocast(inputs[0].device.type, enabled=False):
        masks = [torch.ones(values.shape[:-1], dtype=torch.bool, device=values.device) for values in inputs]
        own = [
            norm._own_moments(upcast(values), mask)
            for norm, values, mask in zip(norms, inputs, masks, strict=True)
        ]
        both = zip(norms, inputs, masks, _moments_of_all(own), strict=True)
        return [norm._normalize(values, mask, moments) for norm, values, mask, moments in both]


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
