"""AsCL eq. 1-4 of one image and one text as they are printed, with loops over heads, regions and words; differentiable."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def cosine(x: Tensor, y: Tensor) -> Tensor:
    norms = x.norm() * y.norm()
    return x @ y / norms if norms > 1e-12 else norms * 0


def multi_head(queries: Tensor, others: Tensor, weights: Mapping[str, Tensor], heads: int) -> Tensor:
    """Eq. 1: queries [M, D], others [N, D] -> what each query attends to [M, D]."""
    d = queries.shape[1] // heads
    found = []
    for h in range(heads):
        columns = slice(h * d, (h + 1) * d)
        query, key = queries @ weights["query"][:, columns], others @ weights["key"][:, columns]
        found.append(torch.stack([(key @ x / d**0.5).softmax(0) @ key for x in query]))
    return torch.cat(found, 1) @ weights["output"]


def score(
    regions: Tensor,
    words: Tensor,
    image_to_text: Mapping[str, Tensor],
    text_to_image: Mapping[str, Tensor],
    *,
    heads: int,
    local_weight: float,
    whole: Tensor | None = None,
) -> Tensor:
    """Eq. 2-4: S of regions [L, D] and words [T, D], the valid ones alone; ``common`` is X_w or X_v, ``whole`` V_g2 [D]."""
    of_words = multi_head(regions, words, image_to_text, heads)
    of_regions = multi_head(words, regions, text_to_image, heads)
    local = sum(cosine(v, w) for v, w in zip(regions, of_words, strict=True)) / (2 * len(regions))
    local = local + sum(cosine(w, v) for w, v in zip(words, of_regions, strict=True)) / (2 * len(words))
    text = image_to_text["common"].T @ of_words.mean(0)
    image = text_to_image["common"].T @ of_regions.mean(0)
    if whole is not None:
        image = image + whole
    return local_weight * local + (1 - local_weight) * cosine(image, text)
