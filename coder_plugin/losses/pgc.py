"""Prototype-guided classification of the concept embeddings (CODER eq. 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional.pgc_loss import pgc_from_logits
from coder_plugin.losses.base import Term


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

    def forward(
        self, image_features: Tensor, text_features: Tensor, coder_image_logits: Tensor, coder_text_logits: Tensor
    ) -> Tensor:
        """This rank's instance features [B, D] and the classifier's logits [B, K] -> scalar, the mean over this rank."""
        head = self.provider("coder_image_logits", "assign", "centres")
        with torch.no_grad():
            samples = F.normalize(image_features.float() + text_features.float(), dim=-1)
            labels = head.assign(samples)
            head.stash(samples=distributed.gather(samples), labels=distributed.gather(labels))
        return pgc_from_logits(coder_image_logits, coder_text_logits, labels) * head.centres.ready
