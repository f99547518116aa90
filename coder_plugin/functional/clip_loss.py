"""InfoNCE of a batch of pairs by tiles, with a learned scale (CLIP; Radford et al., 2021).

Shapes: n pairs, a anchors (n, or the rows of one process), d dimensions. docs/equations.md#tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coder_plugin.functional.similarity import anchor_rows, check_hard_negatives, check_pairs
from coder_plugin.functional.tiled import hard_candidates
from coder_plugin.functional.tiled_candidates import negative_sums
from coder_plugin.functional.tiled_pairs import batch_sums


def tiled_clip(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    *,
    anchors: slice | None = None,
    image_ids: Tensor | None = None,
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
    triton: bool = False,
) -> Tensor:
    """``open_clip.ClipLoss`` up to rounding, in memory that grows with n alone. Its reference is ``ClipLoss``.

    Args:
        image_features: L2-normalised [n, d]; row i belongs to row i of ``text_features`` [n, d].
        logit_scale: 1 / temperature, > 0, 0-d or of one element; it gets a gradient.
        anchors: the rows of the batch that are anchors; None: all rows.
        image_ids: integers [n], for ``negative_ids`` alone.
        negatives, negative_ids, negative_valid: hard negatives of the images [m, d], as of
            :func:`coder_plugin.functional.dcl`.
        triton: whether Triton's kernels compute the passes over a tile.

    Returns:
        Scalar >= 0, float32 or float64: the mean of both directions' cross-entropies.

    Raises:
        ValueError: shapes that differ, an empty batch.

    Example:
        >>> tiled_clip(torch.eye(2), torch.eye(2), torch.tensor(2.0))  # log(1 + exp(-2))
        tensor(0.1269)
    """
    check_pairs(image_features, text_features)
    check_hard_negatives(negatives, negative_ids, negative_valid, dim=text_features.shape[1])
    scale = logit_scale.to(torch.promote_types(image_features.dtype, torch.float32)).reshape(())
    sums, positive = batch_sums(image_features, text_features, None, anchors, scale, triton=triton)
    positive = positive * scale
    if negatives is not None:
        # beside the positive first: both sums may be of nothing
        rows, ids = anchor_rows(image_features, anchors), None if image_ids is None else anchor_rows(image_ids, anchors)
        further, _ = negative_sums(rows, ids, [hard_candidates(negatives, negative_ids, negative_valid, ids)], scale)
        totals = torch.stack([torch.logaddexp(positive, further), positive])
        return (torch.logaddexp(totals, sums) - positive).mean()
    return (torch.logaddexp(positive, sums) - positive).mean()
