"""InfoNCE: open_clip's own loss as a term, the baseline."""

from __future__ import annotations

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.losses.base import Term


class Clip(Term):
    """``open_clip.ClipLoss`` (Radford et al., 2021), gathered with gradient. Every other pair of the global batch is a
    negative, other captions of the same image included.

    Example:
        >>> import torch
        >>> Clip()(torch.eye(2), torch.eye(2), torch.tensor(2.0))  # log(1 + exp(-2))
        tensor(0.1269)
    """

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
        """This rank's features [B, D], L2-normalised, and the model's scale and bias -> scalar."""
        self.loss.rank, self.loss.world_size = distributed.rank(), distributed.world_size()
        self.loss.local_loss = self.local_loss
        return self.loss(image_features, text_features, logit_scale, logit_bias=logit_bias)
