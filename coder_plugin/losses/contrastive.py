"""open_clip's own losses as terms: the baselines, so never rewritten.

They take every other pair of the global batch for a negative, several captions of one image included.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.losses.base import Term


class Clip(Term):
    """InfoNCE: ``open_clip.ClipLoss`` (Radford et al., 2021), gathered with gradient."""

    requires = ("image_features", "text_features", "logit_scale")
    uses = ("logit_bias",)
    masks_same_image = False

    def __init__(self) -> None:
        super().__init__()
        from open_clip.loss import ClipLoss

        self.loss = ClipLoss(gather_with_grad=True)

    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None = None
    ) -> Tensor:
        self.loss.rank, self.loss.world_size = distributed.rank(), distributed.world_size()
        self.loss.local_loss = self.local_loss
        return self.loss(image_features, text_features, logit_scale, logit_bias=logit_bias)


class SigLip(Term):
    """Pairwise sigmoid loss: ``open_clip.SigLipLoss`` (Zhai et al., 2023). Each rank's value is over its own images.

    Args:
        dist_impl: how texts travel between ranks, as open_clip's ``--loss-dist-impl``.
    """

    requires = ("image_features", "text_features", "logit_scale", "logit_bias")
    masks_same_image = False

    def __init__(self, *, dist_impl: Literal["bidir", "shift", "reduce", "gather"] = "bidir") -> None:
        super().__init__()
        from open_clip.loss import SigLipLoss

        self.loss = SigLipLoss(dist_impl=dist_impl)

    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor
    ) -> Tensor:
        self.loss.rank, self.loss.world_size = distributed.rank(), distributed.world_size()
        return self.loss(image_features, text_features, logit_scale, logit_bias)
