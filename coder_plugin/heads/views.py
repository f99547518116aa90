"""Overlap of the views of CAMERA's summarisation (Qu et al., ACM MM 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.functional.similarity import raise_precision
from coder_plugin.heads.base import BackboneInfo, Head


class Views(Head):
    """``||A^T A - I||_F^2`` of an image's region scores A, each view's scores of unit length (CAMERA, released code).

    Requires ``image_views`` [B, L, V], the scores of L regions for V views. Provides ``coder_view_overlap`` [B].

    Example:
        >>> Views(BackboneInfo(embed_dim=1))(torch.eye(3)[None])["coder_view_overlap"]
        tensor([0.])
    """

    requires = ("image_views",)
    provides = ("coder_view_overlap",)

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, image_views: Tensor) -> dict[str, Tensor]:
        with torch.autocast(image_views.device.type, enabled=False):
            scores = F.normalize(raise_precision(image_views), dim=1)
            overlap = scores.transpose(1, 2) @ scores
            overlap = overlap - torch.eye(overlap.shape[-1], device=overlap.device, dtype=overlap.dtype)
            return {"coder_view_overlap": overlap.square().sum((1, 2))}
