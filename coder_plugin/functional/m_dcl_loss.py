"""Diversity-sensitive contrastive loss against coupled momentum banks (CODER eq. 6).

Shapes: n pairs, a anchors (n, or the rows of one process), q bank entries, d dimensions.
Equations and choices: docs/equations.md#m-dcl.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.functional.dcl_loss import anchor_losses, check_dcl_options, directed_dcl, sum_of_losses
from coder_plugin.functional.diversity_weights import (
    Diversity,
    normalize_diversity,
    raw_diversity,
    raw_diversity_from_variance,
    weighs_all_anchors,
)
from coder_plugin.functional.similarity import (
    Gather,
    anchor_rows,
    candidate_negatives,
    check_hard_negatives,
    check_range,
    cosine,
    cosine_of_rows,
    different_images,
    pair_similarity,
    raise_precision,
)
from coder_plugin.functional.tiled import Candidates, Implementation, hard_candidates, use_tiles
from coder_plugin.functional.tiled_candidates import candidate_variance, negative_sums
from coder_plugin.functional.tiled_pairs import pair_counts, pair_variances

Reverse = Literal["paired", "all", "none"]
DiversityOver = Literal["batch", "bank", "batch+bank"]


def m_dcl(
    image_features: Tensor,
    text_features: Tensor,
    image_keys: Tensor,
    text_keys: Tensor,
    image_bank: Tensor,
    text_bank: Tensor,
    *,
    image_ids: Tensor | None = None,
    bank_ids: Tensor | None = None,
    bank_valid: Tensor | None = None,
    mu: float = 0.1,
    gamma: float = 0.3,
    epsilon: float = 0.1,
    diversity: Diversity = "std",
    positive_weight: float | Literal["mu"] = 1.0,
    reverse: Reverse = "paired",
    diversity_over: DiversityOver = "batch+bank",
    diversity_gradient: bool = False,
    effective_negatives: int | None = None,
    bank_diversity: tuple[Tensor, Tensor] | None = None,
    anchors: slice | None = None,
    gather: Gather | None = None,
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """DCL against coupled momentum banks: ``L_DCL(V, B_w) + L_DCL(W, B_v)`` (CODER eq. 6).

    The candidates of an anchor are the current keys of the batch followed by the valid bank entries. Its positive is
    the key of its own pair; keys and entries of its own image are never its negatives. The gradient flows to the live
    features only. The options ``mu``, ``gamma``, ``epsilon``, ``diversity``, ``positive_weight``,
    ``diversity_gradient``, ``effective_negatives`` and ``implementation`` are those of :func:`dcl`. By tiles, banks are read
    in their own dtype, one tile at a time.

    Args:
        image_features: live features [n, d], L2-normalised like all others; row i belongs to row i of
            ``text_features`` [n, d].
        image_keys: momentum features of the same images [n, d]. text_keys: of the same texts [n, d].
        image_bank: keys of earlier steps [q, d]; row i belongs to row i of ``text_bank`` [q, d].
        image_ids: integers [n]; default: all distinct, and distinct from the bank's.
        bank_ids: integers [q]; without them no entry counts as the same image.
        bank_valid: bool [q], True where the bank is filled. Default: everywhere.
        reverse: which bank anchors are compared with the live batch: ``"paired"``: the current keys; ``"all"``: the
            valid entries too, which have no positive and keep the term of the negatives only; ``"none"``: no anchors.
            These anchors are weighted by their diversity over the batch.
        diversity_over: what the diversity of the live anchors is measured over: ``"batch"``, ``"bank"`` (keys and
            entries), or ``"batch+bank"``, the mean of both normalised values.
        bank_diversity: the normalised diversity of image and text anchors over keys and entries, ([a], [a]), if it is
            known; else it is computed.
        anchors: the rows of the batch that are anchors; None: all rows. With ``reverse="all"`` the bank anchors stay
            all of them.
        gather: collects the diversity weights of all processes' anchors, if ``anchors`` are one process's share.
        negatives: momentum features of hard negatives [m, d], texts that are further candidates of the live images, beside keys
            and entries; the diversity over the bank is over them too, if it is computed here. Other anchors do not see them.
        negative_ids, negative_valid: [m], as of :func:`dcl`.

    Returns:
        Scalar, float32 or float64: for each bank the mean over the live anchors plus the mean over the reverse ones,
        both banks added.

    Raises:
        ValueError: shapes that differ, an empty batch, options out of range.

    Example:
        >>> eye, empty = torch.eye(2, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64)
        >>> m_dcl(eye, eye, eye, eye, empty, empty)  # keys that equal the features, an empty bank: twice dcl
        tensor(-2.7532, dtype=torch.float64)
    """
    check_m_dcl_options(
        mu=mu,
        epsilon=epsilon,
        diversity=diversity,
        positive_weight=positive_weight,
        effective_negatives=effective_negatives,
        reverse=reverse,
        diversity_over=diversity_over,
    )
    banks = image_keys, text_keys, image_bank, text_bank
    _check_shapes(image_features, text_features, *banks, image_ids, bank_ids, bank_valid)
    check_range(image_features=image_features, text_features=text_features, image_keys=image_keys, text_keys=text_keys)
    check_hard_negatives(negatives, negative_ids, negative_valid, dim=image_features.shape[1])
    check_range(image_bank=image_bank, text_bank=text_bank, negatives=negatives)
    size = len(anchor_rows(image_features, anchors)) * (len(image_features) + len(image_bank))
    hard = []
    if negatives is not None:
        hard = [hard_candidates(negatives.detach(), negative_ids, negative_valid, image_ids)]
        size += len(anchor_rows(image_features, anchors)) * len(negatives)
    if use_tiles(
        implementation, (image_features,), pairs=size, diversity=diversity, diversity_gradient=diversity_gradient
    ):
        return _tiled_m_dcl(
            (image_features, text_features),
            (image_keys.detach(), text_keys.detach()),
            (image_bank.detach(), text_bank.detach()),
            hard,
            image_ids,
            bank_ids,
            bank_valid,
            mu=mu,
            gamma=gamma,
            epsilon=None if diversity == "none" else epsilon,
            reverse=reverse,
            diversity_over=diversity_over,
            bank_diversity=bank_diversity,
            anchors=anchors,
            gather=gather,
            positive_weight=positive_weight,
            effective_negatives=effective_negatives,
        )
    image_bank, text_bank = image_bank.to(image_features.dtype), text_bank.to(text_features.dtype)
    batch_negatives = different_images(image_ids, len(image_features), image_features.device)
    entry_negatives = candidate_negatives(image_ids, bank_ids, bank_valid, len(image_features), image_bank)
    options: dict[str, Any] = {
        "mu": mu,
        "gamma": gamma,
        "positive_weight": positive_weight,
        "effective_negatives": effective_negatives,
    }

    def weigh(similarity: Tensor, negatives: Tensor) -> Tensor:
        return raw_diversity(similarity, negatives, kind=diversity, epsilon=epsilon)

    directions = (
        (image_features, text_features, text_keys.detach(), text_bank.detach()),
        (text_features, image_features, image_keys.detach(), image_bank.detach()),
    )
    row_negatives, row_entry_negatives = anchor_rows(batch_negatives, anchors), anchor_rows(entry_negatives, anchors)
    compared, backward = [], []
    raw: list[Tensor] = []
    for direction, (live, others, keys, bank) in enumerate(directions):
        rows = anchor_rows(live, anchors)
        compared.append(compare_with_bank(rows, keys, bank, row_negatives, row_entry_negatives))
        for each in hard if direction == 0 else ():
            added = candidate_negatives(image_ids, each.ids, each.valid, len(live), each.rows)
            similarity, mask = compared[-1]
            further = cosine(rows, each.rows.to(rows.dtype))
            compared[-1] = torch.cat([similarity, further], 1), torch.cat([mask, anchor_rows(added, anchors)], 1)
        if reverse == "paired":
            backward.append(cosine(anchor_rows(keys, anchors), live))
        with torch.set_grad_enabled(diversity_gradient and torch.is_grad_enabled()):
            if "batch" in diversity_over:
                raw.append(weigh(cosine(rows, others), row_negatives))
            if "bank" in diversity_over and bank_diversity is None:
                raw.append(weigh(*compared[-1]))
            if reverse == "paired":
                raw.append(weigh(backward[-1], row_negatives))
    weights = iter(normalize_diversity(torch.stack(raw), gather).unbind() if raw else ())  # in the order above
    loss = image_features.new_zeros((), dtype=torch.promote_types(image_features.dtype, torch.float32))
    for direction, (live, _, keys, bank) in enumerate(directions):
        similarity, negatives = compared[direction]
        mean_weights = _mean_weights(weights, diversity_over, bank_diversity, direction)
        positive = pair_similarity(similarity, anchors)
        loss = loss + directed_dcl(similarity, positive, negatives, mean_weights, **options).mean()
        if reverse == "none":
            continue
        if reverse == "paired":
            similarity, negatives = backward[direction], row_negatives
            positive, counted, weights_back = pair_similarity(similarity, anchors), None, next(weights)
        else:
            similarity = torch.cat([cosine(keys, live), cosine(bank, live)])
            negatives = torch.cat([batch_negatives, entry_negatives.T])
            # log(1 + S) of a similarity of zero is zero: an entry has no positive and adds nothing to that term
            positive = torch.cat([similarity[: len(keys)].diagonal(), similarity.new_zeros(len(bank))])
            filled = negatives.new_ones(len(bank)) if bank_valid is None else bank_valid
            counted = torch.cat([negatives.new_ones(len(keys)), filled])
            with torch.set_grad_enabled(diversity_gradient and torch.is_grad_enabled()):
                weights_back = normalize_diversity(weigh(similarity, negatives))
        per_anchor = directed_dcl(similarity, positive, negatives, weights_back, **options)
        if counted is None:
            loss = loss + per_anchor.mean()
        else:
            loss = loss + torch.where(counted, per_anchor, 0).sum() / counted.sum()
    return loss


def _tiled_m_dcl(
    features: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    banks: tuple[Tensor, Tensor],
    hard: list[Candidates],
    image_ids: Tensor | None,
    bank_ids: Tensor | None,
    bank_valid: Tensor | None,
    *,
    mu: float,
    gamma: float,
    epsilon: float | None,
    reverse: Reverse,
    diversity_over: DiversityOver,
    bank_diversity: tuple[Tensor, Tensor] | None,
    anchors: slice | None,
    gather: Gather | None,
    **options: Any,
) -> Tensor:
    """:func:`m_dcl` by tiles; of features, keys and banks the images come first. ``hard``: hard negatives of the images.
    ``epsilon`` None: no diversity weights."""
    n, device = len(features[0]), features[0].device
    number = torch.promote_types(features[0].dtype, torch.float32)
    ids = torch.arange(n, device=device) if image_ids is None else image_ids
    entry_ids = None if image_ids is None else bank_ids  # without ids, no entry shows an anchor's image
    row_ids = anchor_rows(ids, anchors)
    # the candidates of the live images and of the live texts
    beside = [[Candidates(keys[k], ids), Candidates(banks[k], entry_ids, bank_valid)] for k in (1, 0)]
    beside[0] += hard

    every = anchors is None or (gather is not None and weighs_all_anchors(n))

    weighed = None if every else anchors  # the pairs whose diversity this process computes

    def weigh(pairs: Tensor, candidates: list[Candidates], variance: Tensor | None = None) -> Tensor:
        """The diversity of ``weighed`` among ``pairs`` [n, d], not normalised."""
        if epsilon is None:
            return pairs.new_ones(len(anchor_rows(ids, weighed)), dtype=number)
        if variance is None:
            variance = candidate_variance(anchor_rows(pairs, weighed), anchor_rows(ids, weighed), candidates)
        return raw_diversity_from_variance(variance, epsilon=epsilon)

    both = None  # the variances over the batch of both directions, from one product
    if "batch" in diversity_over and every and epsilon is not None:
        both = pair_variances(*features, image_ids, pair_counts(image_ids, n))
    raw: list[Tensor] = []
    with torch.no_grad():
        for direction, live in enumerate(features):
            other, batch = 1 - direction, [Candidates(live, ids)]
            if "batch" in diversity_over:
                raw.append(weigh(live, [Candidates(features[other], ids)], None if both is None else both[direction]))
            if "bank" in diversity_over and bank_diversity is None:
                raw.append(weigh(live, beside[direction]))
            if reverse == "paired":
                raw.append(weigh(keys[other], batch))
        if raw:
            raw = list(normalize_diversity(torch.stack(raw), None if every or epsilon is None else gather).unbind())
        weights = iter([anchor_rows(each, anchors if every else None) for each in raw])  # in the order above
    loss = features[0].new_zeros((), dtype=number)
    for direction, live in enumerate(features):
        other = 1 - direction
        rows, row_keys = anchor_rows(live, anchors), anchor_rows(keys[other], anchors)
        positive = cosine_of_rows(rows, row_keys)
        candidates = beside[direction]
        mean_weights = _mean_weights(weights, diversity_over, bank_diversity, direction)
        sums, counts = negative_sums(rows, row_ids, candidates, 1 / (mu * mean_weights), gamma)
        loss = loss + sum_of_losses(sums, positive, counts, mu=mu, **options) / len(rows)
        if reverse == "none":
            continue
        batch = [Candidates(live, ids)]
        if reverse == "paired":
            sums, counts = negative_sums(row_keys, row_ids, batch, 1 / (mu * next(weights)), gamma)
            positive = cosine_of_rows(row_keys, rows)
            loss = loss + sum_of_losses(sums, positive, counts, mu=mu, **options) / len(rows)
            continue
        positive = cosine_of_rows(keys[other], live)
        back = [(keys[other], ids, positive), (banks[other], entry_ids, positive.new_zeros(len(banks[other])))]
        with torch.no_grad():
            weights_back = [torch.ones_like(positive) for _, _, positive in back]
            if epsilon is not None:
                variances = [candidate_variance(rows, of, batch) for rows, of, _ in back]
                if bank_valid is not None:  # what is not filled must not have the greatest diversity
                    variances[1] = torch.where(bank_valid, variances[1], 0)
                back_weights = raw_diversity_from_variance(torch.cat(variances), epsilon=epsilon)
                weights_back = list(normalize_diversity(back_weights).split([len(each) for each in variances]))
        total = loss.new_zeros(())
        filled = len(banks[other]) if bank_valid is None else bank_valid.sum()
        for (rows, of, positive), part in zip(back, weights_back, strict=True):
            sums, counts = negative_sums(rows, of, batch, 1 / (mu * part), gamma)
            per_anchor = anchor_losses(sums, positive, counts, mu=mu, **options)
            if rows is banks[other] and bank_valid is not None:
                per_anchor = torch.where(bank_valid, per_anchor, 0)
            total = total + per_anchor.sum()
        loss = loss + total / (n + filled)
    return loss


def _mean_weights(
    weights: Iterator[Tensor],
    diversity_over: DiversityOver,
    bank_diversity: tuple[Tensor, Tensor] | None,
    direction: int,
) -> Tensor:
    """The mean of the next of the ``weights`` that ``diversity_over`` names. Those over the bank may be given."""
    means = [next(weights)] if "batch" in diversity_over else []
    if "bank" in diversity_over:
        means.append(next(weights) if bank_diversity is None else bank_diversity[direction])
    return torch.stack(means).mean(0)


def compare_with_bank(
    anchors: Tensor, keys: Tensor, bank: Tensor, batch_negatives: Tensor, entry_negatives: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines of anchors [a, d] with keys [n, d] and bank entries [q, d] of the other modality, and which are negatives.

    Args:
        batch_negatives: bool [a, n]. entry_negatives: bool [a, q].

    Returns:
        Similarity and bool negatives, both [a, n + q].
    """
    similarity = cosine(anchors, torch.cat([raise_precision(keys), raise_precision(bank)]))
    return similarity, torch.cat([batch_negatives, entry_negatives], 1)


def check_m_dcl_options(*, reverse: str, diversity_over: str, **options: Any) -> None:
    """:class:`ValueError` for options of :func:`m_dcl` that are out of range."""
    check_dcl_options(**options)
    if reverse not in ("paired", "all", "none"):
        raise ValueError(f"reverse must be 'paired', 'all' or 'none', got {reverse!r}")
    if diversity_over not in ("batch", "bank", "batch+bank"):
        raise ValueError(f"diversity_over must be 'batch', 'bank' or 'batch+bank', got {diversity_over!r}")


def _check_shapes(
    image_features: Tensor,
    text_features: Tensor,
    image_keys: Tensor,
    text_keys: Tensor,
    image_bank: Tensor,
    text_bank: Tensor,
    image_ids: Tensor | None,
    bank_ids: Tensor | None,
    bank_valid: Tensor | None,
) -> None:
    if image_features.ndim != 2 or not len(image_features):
        raise ValueError(f"image_features must be [n, d] with n > 0, got {tuple(image_features.shape)}")
    for name, keys in (("text_features", text_features), ("image_keys", image_keys), ("text_keys", text_keys)):
        if keys.shape != image_features.shape:
            raise ValueError(f"{name} must have image_features' shape {tuple(image_features.shape)}, got {tuple(keys.shape)}")
    if image_bank.ndim != 2 or image_bank.shape != text_bank.shape or image_bank.shape[1] != image_features.shape[1]:
        raise ValueError(
            f"image_bank and text_bank must have one shape [q, {image_features.shape[1]}], got "
            f"{tuple(image_bank.shape)} and {tuple(text_bank.shape)}"
        )
    for name, value, rows in (
        ("image_ids", image_ids, len(image_features)),
        ("bank_ids", bank_ids, len(image_bank)),
        ("bank_valid", bank_valid, len(image_bank)),
    ):
        if value is not None and value.shape != (rows,):
            raise ValueError(f"{name} must have shape ({rows},), got {tuple(value.shape)}")
    if bank_valid is not None and bank_valid.dtype != torch.bool:
        raise ValueError(f"bank_valid must be bool, got {bank_valid.dtype}")
