"""MaxSim of one image and one text in loops (ColBERT eq. 3; FILIP, section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def cosine(x: Tensor, y: Tensor) -> Tensor:
    norms = x.norm() * y.norm()
    return x @ y / norms if norms > 1e-12 else norms * 0


def one_way(queries: Tensor, others: Tensor, *, mean: bool) -> Tensor:
    """The best match of each query [Q, D] among the others [S, D], summed or averaged."""
    if not len(queries) or not len(others):
        return queries.sum() * 0
    best = [torch.stack([cosine(query, other) for other in others]).max() for query in queries]
    return torch.stack(best).mean() if mean else torch.stack(best).sum()


def score(image: Tensor, text: Tensor, *, direction: str, reduction: str) -> Tensor:
    """Of the valid tokens [L, D] and words [T, D]."""
    of_text, of_image = (one_way(*pair, mean=reduction == "mean") for pair in ((text, image), (image, text)))
    return {"text": of_text, "image": of_image, "both": (of_text + of_image) / 2}[direction]
