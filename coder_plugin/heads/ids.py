"""Image ids as an output of the model, for terms that mask captions of one image."""

from __future__ import annotations

from torch import Tensor

from coder_plugin.heads.base import BackboneInfo, Head


class Ids(Head):
    """Requires ``image_id``, int64 [B], 63-bit hashes of image keys, and provides it unchanged as ``coder_ids``.

    Example:
        >>> import torch
        >>> Ids(BackboneInfo(embed_dim=1))(image_id=torch.tensor([7, 8]))
        {'coder_ids': tensor([7, 8])}
    """

    requires = ("image_id",)
    provides = ("coder_ids",)

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, image_id: Tensor) -> dict[str, Tensor]:
        return {"coder_ids": image_id}
