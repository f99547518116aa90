"""Hinge losses over similarities (VSE++, VSE-infinity), the papers' baseline (docs/equations.md#score, #selfalign).

Shapes: n pairs, a anchors (n, or the share of one process), m hard negatives, d dimensions, N pairs of all ranks.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast import Dense, Negatives, Pairs
from coder_plugin.contrast.pairs import check_hard_ids, scored_pairs
from coder_plugin.losses.ascl import fusion_scores
from coder_plugin.losses.base import HARD_NEGATIVES, Term
from coder_plugin.tensors import check_range, upcast

Reduction = Literal["mean", "sum"]


def hinge_loss(negatives: Negatives, *, margin: float, hardest: bool, reduction: str) -> Tensor:
    """``[margin + S_negative - S_positive]_+`` of both directions, added: a scalar. See :func:`triplet`."""
    if hardest:
        hinges = (margin + negatives.hardest() - negatives.positive).clamp(min=0)
    else:
        hinges = negatives.hinge(margin)
        if reduction == "mean":
            hinges = hinges / negatives.count().clamp(min=1)
    return hinges.mean(1).sum() if reduction == "mean" else hinges.sum()


def triplet(
    similarity: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    image_ids: Tensor | None = None,
    reduction: Reduction = "mean",
    text_to_image: Tensor | None = None,
    anchors: slice | None = None,
    negative_similarity: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
) -> Tensor:
    """Hinge loss of a batch's similarities, both directions (VSE++): ``[margin + S_negative - S_positive]_+``.

    The baseline of the papers, for scores of any range. Above a few hundred pairs a contrastive loss learns faster.

    Args:
        similarity: any score of images x texts [n, n], matching pairs on the diagonal. With ``anchors`` the rows of
            these images alone, [a, n].
        margin: by how much the positive must exceed a negative, finite.
        hardest: only the hardest negative of each anchor counts; else all of them.
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        reduction: ``"mean"`` or ``"sum"`` over the anchors of a direction. Without ``hardest`` each anchor counts with
            the mean, or the sum, over its negatives. The two directions are added.
        text_to_image: with ``anchors``, the scores of these texts x images [a, n].
        anchors: the rows of the batch that are anchors; None: all rows.
        negative_similarity: scores of the images x hard negatives, texts that are further negatives of them: [n, m] or [a, m].
        negative_ids, negative_valid: [m], as in :func:`dcl`.

    Returns:
        Scalar >= 0, float32 or float64. An anchor without negatives counts as zero.

    Raises:
        ValueError: shapes that do not fit, an empty batch, options out of range.

    Example:
        >>> triplet(torch.tensor([[0.9, 0.8], [0.3, 0.5]]))
        tensor(0.3000)
    """
    check_triplet_options(margin=margin, reduction=reduction)
    check_range(negative_similarity=negative_similarity)
    negatives = scored_pairs(similarity, text_to_image, image_ids, anchors)
    if negative_similarity is not None:
        a, m = len(similarity), negative_similarity.shape[-1]
        if negative_similarity.ndim != 2 or len(negative_similarity) != a:
            raise ValueError(f"negative_similarity must be [{a}, m], got {tuple(negative_similarity.shape)}")
        check_hard_ids(negative_ids, negative_valid, m)
        mask = torch.ones_like(negative_similarity, dtype=torch.bool)
        if image_ids is not None and negative_ids is not None:
            mask = (image_ids if anchors is None else image_ids[anchors])[:, None] != negative_ids
        mask = mask if negative_valid is None else mask & negative_valid
        (images, texts), (of_images, of_texts) = negatives.similarity, negatives.masks
        scores = [torch.cat([images, upcast(negative_similarity)], 1), texts]
        negatives = Dense.of_scores(scores, [torch.cat([of_images, mask], 1), of_texts], anchors.start if anchors else 0)
    elif negative_ids is not None or negative_valid is not None:
        raise ValueError("negative_ids and negative_valid need negative_similarity")
    return hinge_loss(negatives, margin=margin, hardest=hardest, reduction=reduction)


def triplet_of_pairs(pairs: Pairs, *, margin: float, hardest: bool, reduction: str) -> Tensor:
    """:func:`triplet` of the cosines of the pairs of a step."""
    negatives = pairs.negatives(pairs.anchors, small=hardest)
    return hinge_loss(negatives, margin=margin, hardest=hardest, reduction=reduction)


def check_triplet_options(*, margin: float, reduction: str, **_: Any) -> None:
    """:class:`ValueError` for an unknown reduction and a margin that is not finite."""
    if not math.isfinite(margin):
        raise ValueError(f"margin must be finite, got {margin}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


class Triplet(Term):
    """:func:`coder_plugin.functional.triplet` with the pairs of all ranks as candidates, and its options.

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
        >>> Triplet(margin=1.5)(torch.eye(2), torch.eye(2))
        tensor(1.)
    """

    supports = frozenset({"same_image", "views", "hard_negatives", "ring"})

    def __init__(
        self,
        *,
        margin: float = 0.2,
        hardest: bool = True,
        reduction: Reduction = "mean",
        mean_epochs: int = 0,
        similarity: Literal["cosine", "fusion"] = "cosine",
        mask_same_image: bool = True,
        hard_negatives: bool = False,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"margin": margin, "hardest": hardest, "reduction": reduction}
        check_triplet_options(**self.options)
        if mean_epochs < 0:
            raise ValueError(f"mean_epochs must be >= 0, got {mean_epochs}")
        if mean_epochs and not hardest:
            raise ValueError("hardest=false takes all negatives in every epoch: leave out mean_epochs")
        if similarity not in ("cosine", "fusion"):
            raise ValueError(f"similarity must be 'cosine' or 'fusion', got {similarity!r}")
        self.mean_epochs, self.mask_same_image = mean_epochs, mask_same_image
        self.optional = ("coder_ids",) if mask_same_image else ()
        if similarity == "fusion":
            if hard_negatives:
                raise ValueError("hard_negatives needs similarity=cosine: the fusion scores the pairs of a batch alone")
            self.requires = ("coder_fusion",)
            self.supports -= {"ring"}
        if hard_negatives:
            self.requires = (*self.requires, *HARD_NEGATIVES)
        self.gathers = (*self.requires, *self.optional)
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
        """Features [N, d], L2-normalised, or scores [N, N], image ids [N], epochs done [B], hard negatives [N, m, d] with their
        images' ids [N, m] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        hard = coder_negative_features, coder_negative_ids

        def loss(**options: Any) -> Tensor:
            if coder_fusion is not None:
                similarity, further = fusion_scores(coder_fusion, local_loss=self.local_loss)
                return sum_over_ranks(triplet(similarity, image_ids=ids, **further, **options), further["anchors"], options)
            assert image_features is not None and text_features is not None
            pairs = self.pairs(image_features, text_features, ids, hard=hard)
            return sum_over_ranks(triplet_of_pairs(pairs, **options), pairs.anchors or pairs.ring, options)

        value = loss(**self.options)
        if coder_epoch is None:
            return value
        # both are computed: a branch would synchronise
        return torch.where(coder_epoch[0] < self.mean_epochs, loss(**self.options | {"hardest": False}), value)


def sum_over_ranks(loss: Tensor, shared: Any, options: dict[str, Any]) -> Tensor:
    """The loss whose mean over ranks is that of the joint batch: with ``reduction="sum"`` each rank sums over its own anchors
    (``shared``), and losses and gradients are averaged over ranks."""
    return loss * distributed.world_size() if options["reduction"] == "sum" and shared else loss
