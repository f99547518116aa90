"""Hinge loss over the global batch: the objective of VSE++ and VSE-infinity, the papers' baseline."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional.tiled import Implementation
from coder_plugin.functional.triplet_loss import check_triplet_options, triplet, triplet_of_features
from coder_plugin.losses.base import Term, options_of
from coder_plugin.losses.gathered import NEGATIVES, Batch, BatchScores, global_batch, global_scores, hard_negatives


class Triplet(Term):
    """:func:`coder_plugin.functional.triplet` with the pairs of all ranks as candidates. It takes that function's
    options.

    VSE-infinity's loss is ``triplet(reduction=sum, mean_epochs=1)``: in its first epoch each anchor counts with the sum of the
    hinges of all its negatives, which its authors' code calls the mean hinge, and then with its hardest negative alone
    (docs/equations.md#score).

    Args:
        mean_epochs: number of first epochs, >= 0, in which all negatives of an anchor count, as without ``hardest``. The head
            ``progress`` counts the epochs.
        similarity: ``cosine`` of the features of both towers, or ``fusion``, the score of the head of that name.
        mask_same_image: pairs of one image are not each other's negatives, nor are its captions that are hard negatives of
            others.
        hard_negatives: the hard negatives of all ranks' images are further negatives of every image.

    Raises:
        ValueError: options out of range, ``mean_epochs`` without ``hardest``, or ``hard_negatives`` with the fusion's score.

    Example:
        >>> import torch
        >>> Triplet(margin=1.5)(torch.eye(2), torch.eye(2))
        tensor(1.)
    """

    uses = ("coder_ids",)
    gathers = ("image_features", "text_features", "coder_fusion", "coder_ids", *NEGATIVES)
    takes_views = True
    takes_negatives = True

    @options_of(triplet)
    def __init__(
        self,
        *,
        mean_epochs: int = 0,
        similarity: Literal["cosine", "fusion"] = "cosine",
        mask_same_image: bool = True,
        hard_negatives: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_triplet_options(**options)
        if mean_epochs < 0:
            raise ValueError(f"mean_epochs must be >= 0, got {mean_epochs}")
        if mean_epochs and not options["hardest"]:
            raise ValueError("hardest=false takes all negatives in every epoch: leave out mean_epochs")
        self.options, self.mean_epochs, self.mask_same_image = options, mean_epochs, mask_same_image
        if similarity not in ("cosine", "fusion"):
            raise ValueError(f"similarity must be 'cosine' or 'fusion', got {similarity!r}")
        if similarity == "fusion":
            if hard_negatives:
                raise ValueError("hard_negatives needs similarity=cosine: the fusion scores the pairs of a batch alone")
            self.requires = ("coder_fusion",)
        if hard_negatives:
            self.requires = (*self.requires, *NEGATIVES)
        if mean_epochs:
            self.requires = (*self.requires, "coder_epoch")

    def compute(
        self,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        coder_fusion: Tensor | None = None,
        coder_ids: Tensor | None = None,
        coder_epoch: Tensor | None = None,
        coder_negative_features: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """The features [N, D] of all ranks, L2-normalised, or scores [N, N], image ids [N], epochs done [B], hard negatives
        [N, n, D] with their images' ids [N, n] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        compared: Batch | BatchScores
        if coder_fusion is not None:
            compared = global_scores(coder_fusion, ids, local_loss=self.local_loss)
        else:
            assert image_features is not None and text_features is not None
            compared = global_batch(image_features, text_features, ids, local_loss=self.local_loss)
        further = hard_negatives(coder_negative_features, coder_negative_ids)
        passed: dict[str, Any] = {**self.options, **further, "implementation": self.implementation}
        loss = global_triplet(compared, **passed)
        if coder_epoch is None:
            return loss
        # both are computed: a branch would wait for the device
        of_all = global_triplet(compared, **passed | {"hardest": False})
        return torch.where(coder_epoch[0] < self.mean_epochs, of_all, loss)


def global_triplet(compared: Batch | BatchScores, *, implementation: Implementation = "auto", **options: Any) -> Tensor:
    """``triplet`` of a global batch, whose mean over ranks is the loss of the joint batch.

    Args:
        compared: features, or scores that are computed already.
        implementation: of features, as of :func:`coder_plugin.functional.triplet_loss.triplet_of_features`.
    """
    passed = {"image_ids": compared.ids, "anchors": compared.anchors, **options}
    if isinstance(compared, BatchScores):
        loss = triplet(compared.similarity, text_to_image=compared.text_to_image, **passed)
    else:
        loss = triplet_of_features(compared.images, compared.texts, implementation=implementation, **passed)
    if options["reduction"] == "sum" and compared.anchors is not None:
        # each rank sums over its own anchors, and losses and gradients are averaged over ranks
        loss = loss * distributed.world_size()
    return loss
