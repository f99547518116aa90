"""A map of both modalities: retrieval vectors of images and of one caption each, in two dimensions.

Shapes: N images, P pairs, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coder_plugin.pretrained.encode import Encoded
from coder_plugin.report.state import first_captions, similarity


@dataclass(frozen=True, eq=False)
class VectorsMap:
    """Places [P, 2] of images and of their captions, numbers [P] of both in the data, and by what method."""

    images: np.ndarray
    texts: np.ndarray
    image_index: list[int]
    text_index: list[int]
    method: str


def place_vectors(encoded: Encoded, *, pairs: int = 250, seed: int = 0) -> VectorsMap:
    """Images spread evenly over the data, each with its first caption: by scikit-learn's t-SNE, or, where that is not
    installed or they are fewer than ten, on the first two principal components."""
    own = first_captions(encoded.image_of_text, len(encoded.images))
    own = own[torch.linspace(0, len(own) - 1, min(pairs, len(own))).round().long()]
    images, texts = encoded.images[own[:, 0]].float(), encoded.texts[own[:, 1]].float()
    if images.ndim == 3:  # of several features the one that finds the caption
        best = torch.stack([similarity(view[:, None], text[None]).argmax() for view, text in zip(images, texts, strict=True)])
        images = images[torch.arange(len(images)), best]
    both = torch.cat([images, texts])
    places, method = _places(both, seed)
    return VectorsMap(places[: len(own)], places[len(own) :], own[:, 0].tolist(), own[:, 1].tolist(), method)


def _places(vectors: Tensor, seed: int) -> tuple[np.ndarray, str]:
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return _principal(vectors), 'principal components (t-SNE needs scikit-learn: pip install "coder-plugin[report]")'
    if len(vectors) < 20:
        return _principal(vectors), "principal components (too few points for t-SNE)"
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    places = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(vectors.numpy())
    return places, f"t-SNE of perplexity {perplexity:.0f}"


def _principal(vectors: Tensor) -> np.ndarray:
    """[P, D] -> [P, 2]; of one dimension the second place is 0. Signs as the largest coordinate is positive."""
    centred = vectors - vectors.mean(0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    places = torch.zeros(len(vectors), 2)
    found = (left * values)[:, :2]
    places[:, : found.shape[1]] = found * torch.where(found[found.abs().argmax(0), range(found.shape[1])] < 0, -1.0, 1.0)
    return places.numpy()
