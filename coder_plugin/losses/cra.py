"""Context relation alignment over the global batch (SelfAlign eq. 6-12; METHODS 9).

Shapes: B pairs of this rank, N of all ranks, L local features, D joint dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.functional import check_cra_options, directed_cra, hardest_locals, unit_context
from coder_plugin.heads.capabilities import Scores
from coder_plugin.losses.base import Term
from coder_plugin.losses.pairs import all_ids, compare, global_batch, own_rows
from coder_plugin.losses.triplet import hinge

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


class CRA(Term):
    """``L_CRA = L_cs + L_ca``: shared context enhancement and shared context alignment, as ``contrast_loss`` and
    ``triplet_loss``.

    L_cs is half of :func:`coder_plugin.functional.cra` of each branch that the head ``contexts`` has; without branches there
    is none. The N hardest local features are those of all ranks, found by each rank among its own first: no rank holds the
    locals of another, nor the similarities of all pairs.

    L_ca is the hinge loss of the context-level score S_c with the hardest negatives.

    Args:
        temperature: tau_2. hard_negatives: N.
        margin, hardest, reduction: of the hinge, as in ``triplet``.
        ca_on: ``context``, S_c as printed; ``combined``, one hinge on the score S_b + S_c, as in the authors' code, where it is
            the base's loss as well (S_b is the backbone's own: a concept level is left out); ``none``: no L_ca.
        mask_same_image: pairs and locals of one image are not each other's negatives.
    """

    takes_views = True

    def __init__(
        self,
        *,
        temperature: float = 0.7,
        hard_negatives: int = 512,
        margin: float = 0.2,
        hardest: bool = True,
        reduction: Literal["mean", "sum"] = "mean",
        ca_on: Literal["context", "combined", "none"] = "context",
        mask_same_image: bool = True,
    ) -> None:
        super().__init__()
        check_cra_options(temperature=temperature, hard_negatives=hard_negatives)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        if ca_on not in ("context", "combined", "none"):
            raise ValueError(f"ca_on must be 'context', 'combined' or 'none', got {ca_on!r}")
        self.temperature, self.hard_negatives = temperature, hard_negatives
        self.margin, self.hardest, self.reduction = margin, hardest, reduction
        self.ca_on, self.mask_same_image = ca_on, mask_same_image
        #: Of S_c in the score that retrieval uses.
        self.score_weight = 1.0
        self.requires = ("coder_image_contexts", "coder_text_contexts")
        if ca_on == "combined":
            self.requires += ("image_features", "text_features")
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

    def forward(
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
        """This rank's context vectors [B, ·], guides [B, D], locals [B, L or T, D] with masks, ids [B] -> scalars by name."""
        ids = coder_ids if self.mask_same_image else None
        losses = {}
        branches = (
            (coder_text_guide, coder_image_locals, coder_image_locals_mask),
            (coder_image_guide, coder_text_locals, coder_text_locals_mask),
        )
        contrasts = [
            self._contrast(guide, locals_, mask, ids)
            for guide, locals_, mask in branches
            if guide is not None and locals_ is not None and mask is not None
        ]
        if contrasts:
            losses["contrast_loss"] = sum(contrasts[1:], contrasts[0]) / 2  # eq. 8, of one branch too
        if self.ca_on != "none":
            losses["triplet_loss"] = self._triplet(
                coder_image_contexts, coder_text_contexts, ids, image_features, text_features
            )
        if not losses:
            raise CoderError("cra(ca_on=none) with contexts.branches=none leaves nothing to learn: leave cra out")
        return losses

    def _contrast(self, guide: Tensor, locals_: Tensor, mask: Tensor, ids: Tensor | None) -> Tensor:
        """One branch, of this rank's pairs."""
        guide, locals_ = unit_context(guide, locals_, mask)
        guides, world = distributed.gather(guide), distributed.world_size()
        ids = all_ids(ids, guides)
        found = hardest_locals(
            guides,
            ids,
            locals_,
            mask,
            ids[own_rows(len(guide), local_loss=True)],
            temperature=self.temperature,
            count=self.hard_negatives,
        )  # [N, k], every rank's guides with this rank's locals
        if world > 1:
            of_all = distributed.exchange(found).unflatten(0, (world, -1))  # this rank's guides with every rank's locals
            found = of_all.transpose(0, 1).flatten(1)
            found = found.topk(min(self.hard_negatives, found.shape[1]), dim=1, sorted=False).values
        return directed_cra(guide, locals_, mask, found.logsumexp(1), temperature=self.temperature)

    def _triplet(
        self,
        image_contexts: Tensor,
        text_contexts: Tensor,
        ids: Tensor | None,
        image_features: Tensor | None,
        text_features: Tensor | None,
    ) -> Tensor:
        batch = global_batch(image_contexts, text_contexts, ids, local_loss=self.local_loss)
        pairs = compare(batch)
        if image_features is not None and text_features is not None:
            base = compare(global_batch(image_features, text_features, ids, local_loss=self.local_loss))
            pairs = base.plus(pairs, self.score_weight)
        return hinge(
            pairs, margin=self.margin, hardest=self.hardest, reduction=self.reduction, local_loss=self.local_loss
        )
