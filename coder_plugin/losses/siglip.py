"""Pairwise sigmoid loss: open_clip's own loss as a term, a baseline."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.losses.base import Term


class SigLip(Term):
    """``open_clip.SigLipLoss`` (Zhai et al., 2023). The value of each rank is over its own images. Every other pair of
    the global batch is a negative, other captions of the same image included.

    Args:
        dist_impl: how texts travel between ranks, as open_clip's ``--loss-dist-impl``.

    Example:
        >>> import torch
        >>> SigLip()(torch.eye(2), torch.eye(2), torch.tensor(2.0), torch.tensor(-1.0))
        tensor(0.6265)
    """

    requires = ("image_features", "text_features", "logit_scale", "logit_bias")
    supports = frozenset({"ring"})  # the texts travel between ranks as it is

    def __init__(self, *, dist_impl: Literal["bidir", "shift", "reduce", "gather"] = "bidir") -> None:
        super().__init__()
        from open_clip.loss import SigLipLoss

        self.loss = SigLipLoss(dist_impl=dist_impl)

    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor
    ) -> Tensor:
        """This rank's features [B, D], L2-normalised, and the model's scale and bias -> scalar."""
        self.loss.rank, self.loss.world_size = distributed.rank(), distributed.world_size()
        return self.loss(image_features, text_features, logit_scale, logit_bias)
