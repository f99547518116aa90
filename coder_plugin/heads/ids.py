"""Image ids out of the model, for every term that masks captions of one image."""

from __future__ import annotations

from torch import Tensor

from coder_plugin.heads.base import BackboneInfo, Head


class Ids(Head):
    """Passes ``image_id`` [B] (63-bit hashes of image keys) on as ``coder_ids``."""

    requires = ("image_id",)
    provides = ("coder_ids",)

    def __init__(self, backbone: BackboneInfo) -> None:
        super().__init__()

    def forward(self, image_id: Tensor) -> dict[str, Tensor]:
        return {"coder_ids": image_id}
