"""Token and region features as outputs of the model, for terms that compare tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from coder_plugin.heads.base import BackboneInfo, Head


class Tokens(Head):
    """The towers' last-layer tokens, those of texts padded to the input's length T.

    Requires ``image_tokens`` [B, L, C], ``image_mask`` [B, L], ``text_tokens`` [B, T', C], ``text_mask`` [B, T'] and ``text``
    [B, T], T' <= T. Provides them as ``coder_image_tokens``, ``coder_image_mask``, ``coder_text_tokens`` [B, T, C] and
    ``coder_text_mask`` [B, T].

    Example:
        >>> import torch
        >>> tokens, mask = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
        >>> out = Tokens(BackboneInfo(embed_dim=4))(tokens, mask, tokens, mask, torch.zeros(2, 5, dtype=torch.int64))
        >>> out["coder_text_tokens"].shape, out["coder_text_mask"][0].tolist()
        (torch.Size([2, 5, 4]), [True, True, True, False, False])
    """

    requires = ("image_tokens", "image_mask", "text_tokens", "text_mask", "text")
    provides = ("coder_image_tokens", "coder_image_mask", "coder_text_tokens", "coder_text_mask")

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(
        self, image_tokens: Tensor, image_mask: Tensor, text_tokens: Tensor, text_mask: Tensor, text: Tensor
    ) -> dict[str, Tensor]:
        missing = text.shape[1] - text_tokens.shape[1]
        return {
            "coder_image_tokens": image_tokens,
            "coder_image_mask": image_mask,
            "coder_text_tokens": F.pad(text_tokens, (0, 0, 0, missing)),
            "coder_text_mask": F.pad(text_mask, (0, missing)),
        }
