"""Prototype-guided classification of the concept embeddings (CODER eq. 7; docs/equations.md#pgc).

Shapes: n pairs, f concept dimensions, k prototypes, B pairs of this rank, N pairs of all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.losses.base import Term, rows_of_rank
from coder_plugin.tensors import check_range, upcast


def pgc(image_concepts: Tensor, text_concepts: Tensor, classifier: Tensor, labels: Tensor) -> Tensor:
    """Prototype-guided classification (CODER eq. 7): the cross-entropies of both modalities with one classifier.

    Use it beside the concept level's loss: pairs of a cluster share a class, so it draws near what pairs alone do not.

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
        weight = upcast(classifier).T
        return pgc_from_logits(upcast(image_concepts) @ weight, upcast(text_concepts) @ weight, labels)


def pgc_from_logits(image_logits: Tensor, text_logits: Tensor, labels: Tensor) -> Tensor:
    """:func:`pgc` from the outputs of the classifier [n, k], for a model that computes them in its forward."""
    if labels.shape != image_logits.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be integers of shape ({len(image_logits)},), got {labels.dtype} {tuple(labels.shape)}")
    if not len(labels):
        raise ValueError("labels and logits hold no pair")
    logits = upcast(image_logits), upcast(text_logits)
    return F.cross_entropy(logits[0], labels) + F.cross_entropy(logits[1], labels)


class PGC(Term):
    """:func:`coder_plugin.functional.pgc` with the prototypes to which the online clustering assigns the pairs.

    A pair is ``image_features + text_features``, detached and normalised. Labels come from the centres before this
    step's update, and each rank labels its own pairs. Until the first clustering the loss is zero.

    Example:
        >>> from types import SimpleNamespace
        >>> head = SimpleNamespace(
        ...     provides=("coder_image_logits",), centres=SimpleNamespace(ready=True), stash=lambda **values: None
        ... )
        >>> term, eye = PGC().bind({"prototypes": head}, local_loss=False), torch.eye(2)
        >>> term(eye, eye, eye, eye, torch.tensor([0, 1]))
        tensor(0.6265)
    """

    requires = (
        "image_features", "text_features", "coder_image_logits", "coder_text_logits", "coder_prototype_labels",
    )  # fmt: skip
    gathers = ("image_features", "text_features", "coder_prototype_labels")

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_image_logits: Tensor,
        coder_text_logits: Tensor,
        coder_prototype_labels: Tensor,
    ) -> Tensor:
        """Instance features [N, d] and labels [N] of all ranks, this rank's logits [B, k] -> the mean over this rank."""
        head = self.provider("coder_image_logits", "centres")
        with torch.no_grad():
            samples = F.normalize(image_features.float() + text_features.float(), dim=-1)
        head.stash(samples=samples, labels=coder_prototype_labels)
        own = coder_prototype_labels[rows_of_rank(len(coder_prototype_labels))]
        return pgc_from_logits(coder_image_logits, coder_text_logits, own) * head.centres.ready
