"""Prototype-guided classification of the concept embeddings (CODER eq. 7).

Shapes: n pairs, f concept dimensions, k prototypes. Equations and choices: docs/equations.md#pgc.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.functional.similarity import check_range, raise_precision


def pgc(image_concepts: Tensor, text_concepts: Tensor, classifier: Tensor, labels: Tensor) -> Tensor:
    """Prototype-guided classification (CODER eq. 7): the cross-entropies of both modalities with one classifier.

    Args:
        image_concepts: concept embeddings [n, f]. text_concepts: [n, f].
        classifier: P_C [k, f], without a bias.
        labels: the prototype to which each pair is assigned [n], integers in [0, k).

    Returns:
        Scalar >= 0, float32 or float64: the mean cross-entropy of the images plus that of the texts.

    Raises:
        ValueError: shapes that do not fit, labels that are not integers, an empty batch, values that are too large.

    Example:
        >>> pgc(torch.eye(2), torch.eye(2), torch.eye(2), torch.tensor([0, 1]))  # 2 * log(1 + exp(-1))
        tensor(0.6265)
    """
    if image_concepts.ndim != 2 or image_concepts.shape != text_concepts.shape:
        raise ValueError(
            "image_concepts and text_concepts must have one shape [n, f], got "
            f"{tuple(image_concepts.shape)} and {tuple(text_concepts.shape)}"
        )
    if classifier.ndim != 2 or classifier.shape[1] != image_concepts.shape[1]:
        raise ValueError(f"classifier must be [k, {image_concepts.shape[1]}], got {tuple(classifier.shape)}")
    check_range(image_concepts=image_concepts, text_concepts=text_concepts, classifier=classifier)
    with torch.autocast(image_concepts.device.type, enabled=False):
        weight = raise_precision(classifier).T
        return pgc_from_logits(raise_precision(image_concepts) @ weight, raise_precision(text_concepts) @ weight, labels)


def pgc_from_logits(image_logits: Tensor, text_logits: Tensor, labels: Tensor) -> Tensor:
    """:func:`pgc` from the outputs of the classifier [n, k], for a model that computes them in its forward."""
    if labels.shape != image_logits.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be integers of shape ({len(image_logits)},), got {labels.dtype} {tuple(labels.shape)}")
    if not len(labels):
        raise ValueError("labels and logits hold no pair")
    logits = raise_precision(image_logits), raise_precision(text_logits)
    return F.cross_entropy(logits[0], labels) + F.cross_entropy(logits[1], labels)
