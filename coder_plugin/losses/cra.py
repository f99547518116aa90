"""Context relation alignment over the global batch (SelfAlign eq. 6-12).

Shapes: B pairs of this rank, N of all ranks, L local features, D joint dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional.cra_loss import check_cra_options, cra
from coder_plugin.functional.triplet_loss import check_triplet_options, triplet
from coder_plugin.heads.capabilities import Scores
from coder_plugin.losses.base import Term, options_of
from coder_plugin.losses.gathered import global_batch, rows_of_rank
from coder_plugin.losses.triplet import global_triplet

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


class CRA(Term):
    """``L_CRA = L_cs + L_ca``: shared context enhancement and shared context alignment, as ``contrast_loss`` and
    ``triplet_loss``.

    L_cs is half of :func:`coder_plugin.functional.cra` of each branch that the head ``contexts`` has; without branches
    there is none. The hardest local features are those of all ranks, but each rank searches its own first: no rank
    holds the local features of another, nor the similarities of all pairs.

    L_ca is :func:`coder_plugin.functional.triplet` of the context-level score S_c.

    It takes the options of both functions.

    Args:
        ca_on: ``context``: S_c as printed; ``combined``: one hinge on S_b + S_c, as in the authors' code, where it is the
            base's loss as well (S_b is the backbone's own score, without a concept level); ``none``: no L_ca.
        mask_same_image: pairs and locals of one image are not each other's negatives.

    Example:
        >>> import torch
        >>> CRA(margin=1.5)(torch.eye(2), torch.eye(2))  # context vectors alone: no branch, so no L_cs
        {'triplet_loss': tensor(1.)}
    """

    takes_views = True

    @options_of(cra, triplet)
    def __init__(
        self,
        *,
        ca_on: Literal["context", "combined", "none"] = "context",
        mask_same_image: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_cra_options(**options)
        check_triplet_options(**options)
        if ca_on not in ("context", "combined", "none"):
            raise ValueError(f"ca_on must be 'context', 'combined' or 'none', got {ca_on!r}")
        self.contrast_options = {name: options.pop(name) for name in ("temperature", "hard_negatives")}
        self.triplet_options = options
        self.ca_on, self.mask_same_image = ca_on, mask_same_image
        #: Weight of S_c in the score that retrieval uses.
        self.score_weight = 1.0
        self.requires = ("coder_image_contexts", "coder_text_contexts")
        if ca_on == "combined":
            self.requires += ("image_features", "text_features")
        self.gathers = (*(self.requires if ca_on != "none" else ()), "coder_ids")
        self.uses = (
            "coder_ids",
            "coder_text_guide",
            "coder_image_locals",
            "coder_image_locals_mask",
            "coder_image_guide",
            "coder_text_locals",
            "coder_text_locals_mask",
        )

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        head = super().bind(heads, local_loss=local_loss).provider("coder_image_contexts")
        self.score_weight = head.score_weights()[1] if isinstance(head, Scores) else 0.0
        return self

    def compute(
        self,
        coder_image_contexts: Tensor,
        coder_text_contexts: Tensor,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        coder_ids: Tensor | None = None,
        coder_text_guide: Tensor | None = None,
        coder_image_locals: Tensor | None = None,
        coder_image_locals_mask: Tensor | None = None,
        coder_image_guide: Tensor | None = None,
        coder_text_locals: Tensor | None = None,
        coder_text_locals_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Context vectors [N, ·], features [N, D] and ids [N] of all ranks, this rank's guides [B, D] and locals [B, L or T, D]
        with masks -> scalars by name."""
        ids = coder_ids if self.mask_same_image else None
        losses = {}
        branches = (
            (coder_text_guide, coder_image_locals, coder_image_locals_mask),
            (coder_image_guide, coder_text_locals, coder_text_locals_mask),
        )
        contrasts = [
            self._contrast(guide, local, mask, ids)
            for guide, local, mask in branches
            if guide is not None and local is not None and mask is not None
        ]
        if contrasts:
            losses["contrast_loss"] = sum(contrasts[1:], contrasts[0]) / 2  # eq. 8; a single branch is halved too
        if self.ca_on != "none":
            scores = global_batch(
                coder_image_contexts, coder_text_contexts, ids, local_loss=self.local_loss
            ).scores()
            if image_features is not None and text_features is not None:
                base = global_batch(image_features, text_features, ids, local_loss=self.local_loss).scores()
                scores = base.plus(scores, self.score_weight)
            losses["triplet_loss"] = global_triplet(scores, **self.triplet_options)
        if not losses:
            raise CoderError("cra(ca_on=none) with contexts.branches=none leaves nothing to learn: remove cra")
        return losses

    def _contrast(self, guide: Tensor, local: Tensor, mask: Tensor, ids: Tensor | None) -> Tensor:
        """One branch, for the pairs of this rank."""
        count = len(guide) * distributed.world_size()
        ids = (torch.arange(count, device=guide.device) if ids is None else ids)[rows_of_rank(count)]
        if distributed.world_size() == 1:
            return cra(guide, local, mask, image_ids=ids, **self.contrast_options)
        return cra(
            guide,
            local,
            mask,
            image_ids=ids,
            gather=distributed.gather,
            exchange=distributed.exchange,
            **self.contrast_options,
        )
