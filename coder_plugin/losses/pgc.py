"""Prototype-guided classification of the concept embeddings (CODER eq. 7)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.functional.pgc_loss import pgc_from_logits
from coder_plugin.losses.base import Term
from coder_plugin.losses.gathered import rows_of_rank


class PGC(Term):
    """:func:`coder_plugin.functional.pgc` with the prototypes to which the online clustering assigns the pairs.

    A pair is ``image_features + text_features``, detached and normalised. Labels come from the centres before this
    step's update. Until the first clustering the loss is zero.

    Example:
        >>> from types import SimpleNamespace
        >>> head = SimpleNamespace(
        ...     provides=("coder_image_logits",),
        ...     assign=lambda samples: samples.argmax(1),
        ...     centres=SimpleNamespace(ready=True),
        ...     stash=lambda **values: None,
        ... )
        >>> term, eye = PGC().bind({"prototypes": head}, local_loss=False), torch.eye(2)
        >>> term(eye, eye, eye, eye)
        tensor(0.6265)
    """

    requires = ("image_features", "text_features", "coder_image_logits", "coder_text_logits")
    gathers = ("image_features", "text_features", "labels")

    def prepare(  # type: ignore[override]
        self, image_features: Tensor, text_features: Tensor, **outputs: Any
    ) -> dict[str, Any]:
        """Label this rank's pairs: the labels travel, so that all ranks have the same."""
        labels = self.provider("coder_image_logits", "assign").assign(_pairs(image_features, text_features))
        return {"image_features": image_features, "text_features": text_features, "labels": labels, **outputs}

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_image_logits: Tensor,
        coder_text_logits: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Instance features [N, D] and labels [N] of all ranks, this rank's logits [B, K] -> the mean over this rank."""
        head = self.provider("coder_image_logits", "centres")
        head.stash(samples=_pairs(image_features, text_features), labels=labels)
        own = labels[rows_of_rank(len(labels))]
        return pgc_from_logits(coder_image_logits, coder_text_logits, own) * head.centres.ready


@torch.no_grad()
def _pairs(image_features: Tensor, text_features: Tensor) -> Tensor:
    """What is clustered, float32 [n, D]."""
    return F.normalize(image_features.float() + text_features.float(), dim=-1)
