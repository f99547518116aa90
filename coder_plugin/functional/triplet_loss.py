"""Hinge losses over similarities (VSE++, VSE-infinity): the papers' baseline.

Shapes: n pairs, a anchors (n, or the rows of one process), q candidates.
Equations and choices: docs/equations.md#score and docs/equations.md#selfalign.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.functional.similarity import batch_similarity, check_range, check_rows, raise_precision


def triplet(
    similarity: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    image_ids: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    text_to_image: Tensor | None = None,
    anchors: slice | None = None,
) -> Tensor:
    """Hinge loss of a batch's similarities, both directions (VSE++): ``[margin + S_negative - S_positive]_+``.

    Args:
        similarity: any score of images x texts [n, n], matching pairs on the diagonal. With ``anchors`` the rows of
            these images alone, [a, n].
        margin: by how much the positive must exceed a negative.
        hardest: only the hardest negative of each anchor counts; else all of them.
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        reduction: ``"mean"`` or ``"sum"`` over the anchors of a direction. Without ``hardest`` each anchor counts with
            the mean, or the sum, over its negatives. The two directions are added.
        text_to_image: with ``anchors``, the scores of these texts x images [a, n].
        anchors: the rows of the batch that are anchors; None: all rows.

    Returns:
        Scalar >= 0, float32 or float64. An anchor without negatives counts as zero.

    Raises:
        ValueError: shapes that do not fit, an empty batch, an unknown reduction.

    Example:
        >>> triplet(torch.tensor([[0.9, 0.8], [0.3, 0.5]]))
        tensor(0.3000)
    """
    check_triplet_options(reduction=reduction)
    check_range(similarity=similarity, text_to_image=text_to_image)
    rows, columns, positive, negatives = batch_similarity(similarity, text_to_image, image_ids, anchors)
    images = directed_triplet(rows, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    texts = directed_triplet(columns, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    return images + texts


def directed_triplet(
    similarity: Tensor, positive: Tensor, negatives: Tensor, *, margin: float, hardest: bool, reduction: str
) -> Tensor:
    """One direction of :func:`triplet`: anchors x candidates [a, q], positives [a], negatives bool [a, q] -> scalar."""
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


def check_triplet_options(*, reduction: str, **_: Any) -> None:
    """:class:`ValueError` for an unknown reduction."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
