"""MaxSim, the late interaction of an image's and a text's tokens (ColBERT, FILIP).

Shapes: n images of L tokens, m texts of T words, D channels. Leading dimensions are free. Masks are bool, True where valid.
Equations and choices: docs/equations.md#maxsim.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from coder_plugin.functional.masked_sets import unit_tokens

#: Whose tokens look for their best match.
Direction = Literal["text", "image", "both"]
#: How the best matches of one side become one number.
Reduction = Literal["mean", "sum"]
#: Similarities of tokens that are computed at once by default: 16 MiB in float32.
_TILE = 1 << 22


def maxsim(
    image_tokens: Tensor,
    image_mask: Tensor,
    text_tokens: Tensor,
    text_mask: Tensor,
    *,
    direction: Direction = "text",
    reduction: Reduction = "mean",
    tile: int = _TILE,
) -> Tensor:
    """Scores of images with texts by the best match of each token: v_i are an image's tokens, w_j a text's.

    ``text``: ``S = mean_j max_i cos(w_j, v_i)``, each word's best token of the image. With ``sum`` in place of the mean this
    is ColBERT's equation 3 with the text as the query (Khattab and Zaharia, SIGIR 2020). ``image``:
    ``S = mean_i max_j cos(v_i, w_j)``, FILIP's image-to-text similarity, whose text-to-image similarity is ``text`` (Yao et
    al., ICLR 2022, section 3.1). ``both``: the mean of the two.

    Sums and means are over valid tokens. A token without a valid token on the other side, and a zero vector, has the cosine 0;
    the score of a side without valid tokens is 0. Computed in float32 or float64, also under autocast; differentiable.

    Args:
        image_tokens: float [..., n, L, D], of any length: the function normalises them.
        image_mask: bool [..., n, L].
        text_tokens: float [..., m, T, D], with the same leading dimensions.
        text_mask: bool [..., m, T].
        direction: ``text``, ``image`` or ``both``.
        reduction: ``mean`` or ``sum``. The sum grows with the number of tokens, so it ranks images for a text as the mean does,
            but not texts for an image.
        tile: similarities of tokens that are computed at once, over n and m; at least those of one image with one text. Without
            a gradient the working memory does not grow with n and m.

    Returns:
        [..., n, m]; with ``mean`` in [-1, 1].

    Raises:
        ValueError: shapes that do not fit, masks that are not bool, an unknown direction or reduction, a tile below 1.

    Example:
        >>> patches, mask = torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool)
        >>> words = torch.tensor([[[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [1.0, 0.0]]])
        >>> maxsim(patches, mask, words, mask.expand(2, -1))
        tensor([[0.9000, 1.0000]])
        >>> maxsim(patches, mask, words, mask.expand(2, -1), direction="both")
        tensor([[0.9000, 0.7500]])
    """
    _check(image_tokens, image_mask, text_tokens, text_mask)
    check_options(direction, reduction)
    if tile < 1:
        raise ValueError(f"tile must be 1 or more, got {tile}")
    with torch.autocast(image_tokens.device.type, enabled=False):
        images, texts = unit_tokens(image_tokens, image_mask), unit_tokens(text_tokens, text_mask)
        pairs = tile // max(1, math.prod(images.shape[:-3]) * images.shape[-2] * texts.shape[-2])
        rows = min(images.shape[-3], math.isqrt(pairs)) or 1
        columns = pairs // rows or 1
        scores = [
            torch.cat(
                [
                    unit_maxsim(*some, *others, direction=direction, reduction=reduction)
                    for others in zip(texts.split(columns, -3), text_mask.split(columns, -2), strict=True)
                ],
                -1,
            )
            for some in zip(images.split(rows, -3), image_mask.split(rows, -2), strict=True)
        ]
    return torch.cat(scores, -2)


def check_options(direction: str, reduction: str) -> None:
    """:class:`ValueError` unless both are known."""
    for name, value, known in (("direction", direction, Direction), ("reduction", reduction, Reduction)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")


def unit_maxsim(
    images: Tensor, image_mask: Tensor, texts: Tensor, text_mask: Tensor, *, direction: Direction, reduction: Reduction
) -> Tensor:
    """:func:`maxsim` of tokens [..., n, L, D] and [..., m, T, D] that have unit length, in one tile: [..., n, m]."""
    products = images.flatten(-3, -2) @ texts.flatten(-3, -2).mT
    products = products.unflatten(-1, texts.shape[-3:-1]).unflatten(-3, images.shape[-3:-1])  # [..., n, L, m, T]
    images_valid, texts_valid = image_mask[..., None, :], text_mask[..., None, :, :]  # [..., n, 1, L], [..., 1, m, T]
    scores = []
    if direction != "image":
        best = products.masked_fill(~image_mask[..., None, None], -torch.inf).amax(-3)  # [..., n, m, T]
        scores.append(_reduce(best, texts_valid, images_valid, reduction))
    if direction != "text":
        best = products.masked_fill(~text_mask[..., None, None, :, :], -torch.inf).amax(-1).mT  # [..., n, m, L]
        scores.append(_reduce(best, images_valid, texts_valid, reduction))
    return torch.stack(scores).mean(0)


def _reduce(best: Tensor, valid: Tensor, candidates: Tensor, reduction: Reduction) -> Tensor:
    """Best matches [..., n, m, S] of the ``valid`` positions of one side among ``candidates``, the other's -> [..., n, m]."""
    total = torch.where(valid & candidates.any(-1, keepdim=True), best, 0).sum(-1)
    return total if reduction == "sum" else total / valid.sum(-1).clamp(min=1)


def _check(images: Tensor, image_mask: Tensor, texts: Tensor, text_mask: Tensor) -> None:
    """:class:`ValueError` unless tokens and masks are [..., n, L, D], [..., n, L], [..., m, T, D] and [..., m, T]."""
    for name, tokens, mask in (("image", images, image_mask), ("text", texts, text_mask)):
        if tokens.ndim < 3 or mask.dtype != torch.bool or mask.shape != tokens.shape[:-1] or not mask.shape[-1]:
            raise ValueError(
                f"{name}_tokens must be [..., rows, 1 or more, D] and {name}_mask bool of its shape without D, got "
                f"{tuple(tokens.shape)} and {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
            )
    if images.shape[-1] != texts.shape[-1] or images.shape[:-3] != texts.shape[:-3]:
        raise ValueError(
            f"images and texts must have the same channels and leading dimensions, got {tuple(images.shape)} and "
            f"{tuple(texts.shape)}"
        )
