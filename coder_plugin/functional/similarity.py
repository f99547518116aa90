"""Similarities of anchors and candidates, and who may be whose negative: what every loss here starts from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cosine(anchors: Tensor, candidates: Tensor) -> Tensor:
    """Products [n, q] of [n, d] and [q, d] in float32 or better, also under autocast (METHODS, first paragraph).

    Where a side has several features each, [n, v, d] or [q, v, d], the greatest product counts (CAMERA's views).
    """
    with torch.autocast(anchors.device.type, enabled=False):
        anchors, candidates = raise_precision(anchors), raise_precision(candidates)
        products = anchors.flatten(0, -2) @ candidates.flatten(0, -2).T
        if anchors.ndim == candidates.ndim == 2:
            return products
        views = [x.shape[1] if x.ndim == 3 else 1 for x in (anchors, candidates)]
        return products.unflatten(1, (-1, views[1])).unflatten(0, (-1, views[0])).amax((1, 3))


def different_images(image_ids: Tensor | None, n: int, device: torch.device) -> Tensor:
    """Bool [n, n], True where two pairs of a batch show different images: who may be whose negative (METHODS 2)."""
    if image_ids is None:
        return ~torch.eye(n, dtype=torch.bool, device=device)
    if image_ids.shape != (n,):
        raise ValueError(f"image_ids must have shape ({n},), got {tuple(image_ids.shape)}")
    return image_ids[:, None] != image_ids[None, :]


def check_rows(similarity: Tensor, negatives: Tensor) -> None:
    if similarity.ndim != 2 or similarity.shape != negatives.shape:
        raise ValueError(
            f"similarity and negatives must have one shape [n, q], got {tuple(similarity.shape)} "
            f"and {tuple(negatives.shape)}"
        )
    if negatives.dtype != torch.bool:
        raise ValueError(f"negatives must be bool, got {negatives.dtype}")


def raise_precision(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def unit(features: Tensor) -> Tensor:
    """L2-normalised over the last dimension, in float32 or better, also under autocast."""
    return F.normalize(raise_precision(features), dim=-1)
