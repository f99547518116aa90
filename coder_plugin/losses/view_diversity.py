"""CAMERA's diversity regularisation: the views of an image look at different regions (Qu et al., ACM MM 2020)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.losses.base import Term


class ViewDiversity(Term):
    """The overlap of the views of each image, over the batch. CAMERA weights its sum by 0.01.

    Args:
        reduction: ``mean``, or ``sum`` over the pairs of all ranks, as released.

    Example:
        >>> import torch
        >>> ViewDiversity(reduction="sum")(torch.tensor([1.0, 3.0]))
        tensor(4.)
    """

    requires = ("coder_view_overlap",)

    def __init__(self, *, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self.reduction = reduction

    def forward(self, coder_view_overlap: Tensor) -> Tensor:
        """This rank's overlaps [B] -> scalar."""
        if self.reduction == "mean":
            return coder_view_overlap.mean()
        return coder_view_overlap.sum() * distributed.world_size()  # the ranks' losses are averaged
