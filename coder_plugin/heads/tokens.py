"""Token and region features out of the model, for terms that compare them themselves."""

from __future__ import annotations

from torch import Tensor

from coder_plugin.heads.base import Head, Widths


class Tokens(Head):
    """Passes the towers' last-layer tokens on: image [B, L, C] with mask [B, L], text [B, T, C] with mask [B, T]."""

    requires = ("image_tokens", "image_mask", "text_tokens", "text_mask")
    provides = ("coder_image_tokens", "coder_image_mask", "coder_text_tokens", "coder_text_mask")

    def __init__(self, widths: Widths) -> None:
        super().__init__()

    def forward(
        self, image_tokens: Tensor, image_mask: Tensor, text_tokens: Tensor, text_mask: Tensor
    ) -> dict[str, Tensor]:
        return {
            "coder_image_tokens": image_tokens,
            "coder_image_mask": image_mask,
            "coder_text_tokens": text_tokens,
            "coder_text_mask": text_mask,
        }
