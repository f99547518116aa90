"""The global batch as anchors and candidates: what every in-batch term compares.

B pairs of this rank, N = world size * B pairs of all ranks, n anchors (N, or B with a local loss), D dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import cosine


class Pairs(NamedTuple):
    """Similarities of both directions with their positives and negatives."""

    image_to_text: Tensor  # [n, N]
    text_to_image: Tensor  # [n, N]
    positive: Tensor  # [n]
    negatives: Tensor  # bool [n, N]


def global_pairs(
    image_features: Tensor, text_features: Tensor, image_ids: Tensor | None, *, local_loss: bool = False
) -> Pairs:
    """Gather the pairs of all ranks (with gradient) and compare them.

    Args:
        image_features: this rank's [B, D], L2-normalised. text_features: [B, D].
        image_ids: [B]; pairs of one image are not each other's negatives. None: all distinct.
        local_loss: only this rank's pairs are anchors. Every rank then holds B x N instead of N x N numbers.
    """
    images, texts = distributed.gather(image_features), distributed.gather(text_features)
    ids = torch.arange(len(images), device=images.device) if image_ids is None else distributed.gather(image_ids)
    if local_loss and distributed.world_size() > 1:
        own = slice(distributed.rank() * len(image_features), (distributed.rank() + 1) * len(image_features))
        image_to_text = cosine(images[own], texts)
        text_to_image = cosine(texts[own], images)
        positive = image_to_text.diagonal(own.start)
    else:
        own = slice(None)
        image_to_text = cosine(images, texts)
        text_to_image = image_to_text.T
        positive = image_to_text.diagonal()
    return Pairs(image_to_text, text_to_image, positive, ids[own, None] != ids[None, :])
