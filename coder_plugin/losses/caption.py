"""VSRN's caption-generation loss (Li et al., ICCV 2019)."""

from __future__ import annotations

from torch import Tensor

from coder_plugin.losses.base import Term


class Caption(Term):
    """Negative log-likelihood of each caption given its image, summed over its tokens; mean over the batch.

    Example:
        >>> import torch
        >>> Caption()(torch.tensor([1.0, 3.0]))
        tensor(2.)
    """

    requires = ("coder_caption_nll",)

    def forward(self, coder_caption_nll: Tensor) -> Tensor:
        """This rank's sums [B] -> scalar."""
        return coder_caption_nll.mean()
