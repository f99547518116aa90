"""InfoNCE: open_clip's own loss as a term, the baseline."""

from __future__ import annotations

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.functional.tiled import use_tiles
from coder_plugin.losses.base import Term
from coder_plugin.losses.gathered import gather_batch


class Clip(Term):
    """``open_clip.ClipLoss`` (Radford et al., 2021), gathered with gradient. Every other pair of the global batch is a
    negative, other captions of the same image included. Above 4 million similarities it is computed by tiles, which is equal up
    to rounding (docs/equations.md#tiles).

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
        pairs = len(image_features) ** 2 * distributed.world_size() * (1 if self.local_loss else distributed.world_size())
        if use_tiles(self.implementation, (image_features, text_features), pairs=pairs, small=False):
            batch = gather_batch(image_features, text_features, None, local_loss=self.local_loss)
            loss = tiled_clip(batch.images, batch.texts, logit_scale, anchors=batch.anchors)
            # a bias that all logits share changes nothing; its gradient is zero, as in ClipLoss
            return loss if logit_bias is None else loss + 0 * logit_bias.sum()
        self.loss.rank, self.loss.world_size = distributed.rank(), distributed.world_size()
        self.loss.local_loss = self.local_loss
        return self.loss(image_features, text_features, logit_scale, logit_bias=logit_bias)
