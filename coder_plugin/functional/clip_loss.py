"""InfoNCE of a batch of pairs by tiles, with a learned scale (CLIP; Radford et al., 2021).

Shapes: n pairs, a anchors (n, or the rows of one process), d dimensions. docs/equations.md#tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coder_plugin.functional.similarity import check_pairs
from coder_plugin.functional.tiled_pairs import batch_sums


def tiled_clip(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, *, anchors: slice | None = None, triton: bool = False
) -> Tensor:
    """``open_clip.ClipLoss`` up to rounding, in memory that grows with n alone. Its reference is ``ClipLoss``.

    Args:
        image_features: L2-normalised [n, d]; row i belongs to row i of ``text_features`` [n, d].
        logit_scale: 1 / temperature, > 0, 0-d or of one element; it gets a gradient.
        anchors: the rows of the batch that are anchors; None: all rows.
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
    scale = logit_scale.to(torch.promote_types(image_features.dtype, torch.float32)).reshape(())
    sums, positive = batch_sums(image_features, text_features, None, anchors, scale, triton=triton)
    positive = positive * scale
    return (torch.logaddexp(positive, sums) - positive).mean()
