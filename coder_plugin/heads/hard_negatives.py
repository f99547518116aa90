"""Hard negatives: texts that are wrong for an image, which come with the batch.

Shapes: B batch, n hard negatives of an image, T text positions, D joint dimension.
"""

from __future__ import annotations

from torch import Tensor

from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import EncodesNegatives


class HardNegatives(EncodesNegatives):
    """Features of the hard negatives, encoded by the text tower in the same pass as the captions, and their images' ids.

    Requires ``text_negatives`` [B, n, T] and ``text_negative_ids`` [B, n]. Provides ``coder_negative_features`` [B, n, D],
    L2-normalised, if a term reads them, and ``coder_negative_ids`` [B, n]: of the images that they are captions of, -1 where
    that is not known, -2 where there is no text.

    Example:
        >>> import torch
        >>> ids, features = torch.tensor([[7, -2]]), torch.eye(2)[None]
        >>> out = HardNegatives(BackboneInfo(embed_dim=2))(torch.ones(1, 2, 5), ids, features)
        >>> out["coder_negative_ids"], out["coder_negative_features"].shape
        (tensor([[ 7, -2]]), torch.Size([1, 2, 2]))
    """

    requires = ("text_negatives", "text_negative_ids")
    uses = ("negative_features",)
    provides = ("coder_negative_features", "coder_negative_ids")

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    @property
    def encodes(self) -> bool:
        return "coder_negative_features" in self.requested_keys

    def forward(
        self, text_negatives: Tensor, text_negative_ids: Tensor, negative_features: Tensor | None = None
    ) -> dict[str, Tensor]:
        features = {} if negative_features is None else {"coder_negative_features": negative_features}
        return {**features, "coder_negative_ids": text_negative_ids}
