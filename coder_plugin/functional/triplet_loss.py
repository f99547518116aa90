"""Hinge losses over similarities (VSE++, VSE-infinity): the papers' baseline.

Shapes: n pairs, a anchors (n, or the rows of one process), q candidates.
Equations and choices: docs/equations.md#score and docs/equations.md#selfalign.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.functional.similarity import (
    anchor_rows,
    batch_cosines,
    batch_similarity,
    candidate_negatives,
    check_candidates,
    check_hard_negatives,
    check_ids,
    check_pairs,
    check_range,
    check_rows,
    cosine,
    cosine_of_rows,
    raise_precision,
)
from coder_plugin.functional.tiled import Implementation, candidate_counts, group_sizes, hard_candidates, use_tiles
from coder_plugin.functional.tiled_hinges import hardest_negatives, hinge_sums


def triplet(
    similarity: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    image_ids: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    text_to_image: Tensor | None = None,
    anchors: slice | None = None,
    negative_similarity: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
) -> Tensor:
    """Hinge loss of a batch's similarities, both directions (VSE++): ``[margin + S_negative - S_positive]_+``.

    Args:
        similarity: any score of images x texts [n, n], matching pairs on the diagonal. With ``anchors`` the rows of
            these images alone, [a, n].
        margin: by how much the positive must exceed a negative.
        hardest: only the hardest negative of each anchor counts; else all of them.
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        reduction: ``"mean"`` or ``"sum"`` over the anchors of a direction. Without ``hardest`` each anchor counts with
            the mean, or the sum, over its negatives. The two directions are added.
        text_to_image: with ``anchors``, the scores of these texts x images [a, n].
        anchors: the rows of the batch that are anchors; None: all rows.
        negative_similarity: scores of the images x hard negatives, texts that are further negatives of them: [n, m] or [a, m].
        negative_ids, negative_valid: [m], as of :func:`dcl`.

    Returns:
        Scalar >= 0, float32 or float64. An anchor without negatives counts as zero.

    Raises:
        ValueError: shapes that do not fit, an empty batch, an unknown reduction.

    Example:
        >>> triplet(torch.tensor([[0.9, 0.8], [0.3, 0.5]]))
        tensor(0.3000)
    """
    check_triplet_options(reduction=reduction)
    check_range(similarity=similarity, text_to_image=text_to_image, negative_similarity=negative_similarity)
    rows, columns, positive, negatives = batch_similarity(similarity, text_to_image, image_ids, anchors)
    of_images = negatives
    if negative_similarity is not None:
        n = similarity.shape[1]
        if negative_similarity.ndim != 2 or len(negative_similarity) != len(rows):
            raise ValueError(f"negative_similarity must be [{len(rows)}, m], got {tuple(negative_similarity.shape)}")
        check_candidates(negative_similarity.shape[1], negative_ids, negative_valid)
        added = candidate_negatives(image_ids, negative_ids, negative_valid, n, negative_similarity.T)
        rows = torch.cat([raise_precision(rows), raise_precision(negative_similarity)], 1)
        of_images = torch.cat([negatives, anchor_rows(added, anchors)], 1)
    elif negative_ids is not None or negative_valid is not None:
        raise ValueError("negative_ids and negative_valid need negative_similarity")
    images = directed_triplet(rows, positive, of_images, margin=margin, hardest=hardest, reduction=reduction)
    texts = directed_triplet(columns, positive, negatives, margin=margin, hardest=hardest, reduction=reduction)
    return images + texts


def triplet_of_features(
    image_features: Tensor,
    text_features: Tensor,
    *,
    margin: float = 0.2,
    hardest: bool = True,
    image_ids: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    anchors: slice | None = None,
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """:func:`triplet` of the cosines of a batch of pairs; by tiles the matrix of similarities is never stored.

    Args:
        image_features: L2-normalised [n, d], or [n, v, d] if an image has several features; row i belongs to row i of
            ``text_features`` [n, d].
        margin, hardest, image_ids, reduction, anchors: as of :func:`triplet`.
        negatives, negative_ids, negative_valid: hard negatives of the images [m, d], as of :func:`dcl`.
        implementation: ``"reference"``: all similarities at once; ``"tiled"``: equal up to rounding, in memory that grows with
            n alone; ``"auto"``: tiles for the hardest negative, or above 4 million similarities (docs/equations.md#tiles).

    Returns:
        Scalar >= 0, float32 or float64.

    Raises:
        ValueError: shapes that differ, an empty batch, an unknown option.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
        >>> triplet_of_features(features, features)  # both directions: 0.2 + 0.8 - 1 for each anchor
        tensor(0.)
    """
    check_triplet_options(reduction=reduction)
    check_pairs(image_features, text_features)
    check_hard_negatives(negatives, negative_ids, negative_valid, dim=text_features.shape[-1])
    check_range(image_features=image_features, text_features=text_features, negatives=negatives)
    n = len(image_features)
    check_ids(image_ids, n)
    rows, row_texts = anchor_rows(image_features, anchors), anchor_rows(text_features, anchors)
    pairs = len(rows) * (n if negatives is None else n + len(negatives))
    if not use_tiles(implementation, (image_features, text_features), pairs=pairs, small=hardest):
        similarity, transposed = batch_cosines(image_features, text_features, anchors)
        return triplet(
            similarity,
            margin=margin,
            hardest=hardest,
            image_ids=image_ids,
            reduction=reduction,
            text_to_image=transposed,
            anchors=anchors,
            negative_similarity=None if negatives is None else cosine(rows, negatives),
            negative_ids=negative_ids,
            negative_valid=negative_valid,
        )
    hard = None if negatives is None else hard_candidates(negatives, negative_ids, negative_valid, image_ids)
    ids = torch.arange(n, device=rows.device) if image_ids is None else image_ids
    row_ids, positive = anchor_rows(ids, anchors), cosine_of_rows(rows, row_texts)
    directions = [(rows, text_features)] if anchors is None else [(rows, text_features), (row_texts, image_features)]
    loss = positive.new_zeros(())
    for direction, (live, others) in enumerate(directions):  # with all rows as anchors, one product serves both
        both = anchors is None
        if hardest:
            values = [each for each in hardest_negatives(live, others, row_ids, ids, both=both) if each is not None]
            if hard is not None and direction == 0:
                further, _ = hardest_negatives(live, hard.rows, row_ids, hard.ids, both=False, valid=hard.valid)
                values[0] = torch.maximum(values[0], further)
            hinges = [(margin + each - positive).clamp(min=0) for each in values]
        else:
            sums = hinge_sums(live, others, row_ids, ids, positive, positive if both else None, margin=margin)
            hinges = [each for each in sums if each is not None]
            counts = [n - group_sizes(ids)[anchors or slice(None)]] * len(hinges)
            if hard is not None and direction == 0:
                further, _ = hinge_sums(live, hard.rows, row_ids, hard.ids, positive, None, margin=margin, valid=hard.valid)
                hinges[0] = hinges[0] + further
                counts[0] = counts[0] + candidate_counts(row_ids, hard)
            if reduction == "mean":
                hinges = [each / count.clamp(min=1) for each, count in zip(hinges, counts, strict=True)]
        for each in hinges:
            loss = loss + (each.mean() if reduction == "mean" else each.sum())
    return loss


def directed_triplet(
    similarity: Tensor, positive: Tensor, negatives: Tensor, *, margin: float, hardest: bool, reduction: str
) -> Tensor:
    """One direction of :func:`triplet`: anchors x candidates [a, q], positives [a], negatives bool [a, q] -> scalar."""
    check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1]:
        raise ValueError(f"positive must have shape ({len(similarity)},), got {tuple(positive.shape)}")
    hinge = (margin + raise_precision(similarity) - raise_precision(positive)[:, None]).clamp(min=0)
    hinge = torch.where(negatives, hinge, 0)
    if hardest:
        per_anchor = hinge.amax(1)
    elif reduction == "mean":
        per_anchor = hinge.sum(1) / negatives.sum(1).clamp(min=1)
    else:
        per_anchor = hinge.sum(1)
    return per_anchor.mean() if reduction == "mean" else per_anchor.sum()


def check_triplet_options(*, reduction: str, **_: Any) -> None:
    """:class:`ValueError` for an unknown reduction."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
