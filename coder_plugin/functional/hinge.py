"""Hinge losses over similarities (VSE++, VSE-infinity; METHODS 6, 9)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coder_plugin.functional.similarity import check_rows, different_images, raise_precision


def triplet(
    similarity: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    image_ids: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Hinge loss of a batch's similarities, both directions (VSE++; the base of METHODS 6 and 9).

    Args:
        similarity: images x texts [n, n], matching pairs on the diagonal.
        margin: by how much the positive must win.
        hardest: each anchor's hardest negative alone, or all of them.
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        reduction: over the hinges of a direction, one an anchor with ``hardest``, else one a negative
            (``"mean"`` averages within an anchor first). The two directions are added.

    Returns:
        Scalar. An anchor without negatives counts as zero.
    """
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1]:
        raise ValueError(f"similarity must be square [n, n], got {tuple(similarity.shape)}")
    if not len(similarity):
        raise ValueError("similarity holds no pair")
    similarity = raise_precision(similarity)
    negatives = different_images(image_ids, len(similarity), similarity.device)
    positive = similarity.diagonal()
    images = directed_triplet(similarity, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    texts = directed_triplet(similarity.T, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    return images + texts


def directed_triplet(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """One direction of :func:`triplet`: anchors x candidates [n, q], positives [n], negatives bool [n, q] -> scalar."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1]:
        raise ValueError(f"positive must have shape ({len(similarity)},), got {tuple(positive.shape)}")
    hinge = (margin + raise_precision(similarity) - raise_precision(positive)[:, None]).clamp(min=0)
    hinge = torch.where(negatives, hinge, 0)
    if hardest:
        per_anchor = hinge.amax(1)
    elif reduction == "mean":
        per_anchor = hinge.sum(1) / negatives.sum(1).clamp(min=1)
    else:
        per_anchor = hinge.sum(1)
    return per_anchor.mean() if reduction == "mean" else per_anchor.sum()
