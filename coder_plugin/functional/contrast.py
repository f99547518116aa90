"""Diversity-sensitive contrast within a batch and with coupled memory banks (CODER eq. 3-6; METHODS 1-3)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.functional.similarity import check_rows, cosine, different_images, raise_precision
from coder_plugin.functional.weights import Diversity, spread

Reverse = Literal["paired", "all", "none"]
DiversityOver = Literal["batch", "bank", "batch+bank"]


def directed_dcl(
    similarity: Tensor,
    positive: Tensor,
    negatives: Tensor,
    weights: Tensor,
    *,
    mu: float = 0.1,
    gamma: float = 0.3,
    positive_weight: float | Literal["mu"] = 1.0,
    effective_negatives: int | None = None,
) -> Tensor:
    """One direction of the diversity-sensitive contrastive loss, per anchor (CODER eq. 4, 5; METHODS 2).

    ``mu * log(1 + sum_neg exp((S - gamma) / (mu * div))) - w * log(1 + S_pos)``.

    Args:
        similarity: cosines of anchors and candidates [n, q].
        positive: cosine of each anchor and its positive [n].
        negatives: bool [n, q].
        weights: normalised diversity of each anchor [n], in (0.5, 1].
        mu: temperature, > 0. gamma: margin subtracted from the negatives.
        positive_weight: w; ``"mu"`` is the formula as printed.
        effective_negatives: weigh the sum as if it had so many terms, so that the loss keeps its scale at any batch or
            bank size (ours, METHODS names no such thing); None: the paper's plain sum.

    Returns:
        [n]; an anchor without negatives keeps its positive's term alone.
    """
    check_dcl_options(mu=mu, positive_weight=positive_weight, effective_negatives=effective_negatives)
    check_rows(similarity, negatives)
    if positive.shape != similarity.shape[:1] or weights.shape != similarity.shape[:1]:
        raise ValueError(
            f"positive and weights must have shape ({len(similarity)},), got {tuple(positive.shape)} "
            f"and {tuple(weights.shape)}"
        )
    similarity, positive = raise_precision(similarity), raise_precision(positive)
    logits = (similarity - gamma) / (mu * weights[:, None])
    negative_sum = logits.masked_fill(~negatives, -torch.inf).logsumexp(1)
    if effective_negatives is not None:
        negative_sum = negative_sum + (effective_negatives / negatives.sum(1).clamp(min=1).to(logits.dtype)).log()
    repulsion = mu * torch.logaddexp(negative_sum, negative_sum.new_zeros(()))
    attraction = (1 + positive).clamp(min=1e-6).log()
    return repulsion - (mu if positive_weight == "mu" else positive_weight) * attraction


def dcl(
    image_features: Tensor,
    text_features: Tensor,
    *,
    image_ids: Tensor | None = None,
    mu: float = 0.1,
    gamma: float = 0.3,
    epsilon: float = 0.1,
    diversity: Diversity = "std",
    positive_weight: float | Literal["mu"] = 1.0,
    bank_diversity: tuple[Tensor, Tensor] | None = None,
    diversity_gradient: bool = False,
    effective_negatives: int | None = None,
) -> Tensor:
    """Diversity-sensitive contrastive loss of a batch of pairs, both directions (CODER eq. 4, 5; METHODS 2).

    Args:
        image_features: [n, d], L2-normalised; row i belongs to row i of ``text_features`` [n, d].
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        mu: temperature, > 0. gamma: margin. epsilon: of the diversity, > 0.
        diversity: ``"std"``, ``"entropy"`` or ``"none"`` (see :func:`diversity`).
        positive_weight: weight of the positive's term; ``"mu"`` is the formula as printed.
        bank_diversity: normalised bank-level diversity of image and text anchors, ([n], [n]); averaged with the
            batch's (CODER, below eq. 6).
        diversity_gradient: let the gradient through the diversity weights (default: stopped).
        effective_negatives: see :func:`directed_dcl`.

    Returns:
        Scalar: the mean over image anchors plus the mean over text anchors.

    Raises:
        ValueError: shapes that differ, an empty batch, options out of range.
    """
    similarity, negatives = _pairs(image_features, text_features, image_ids)
    if bank_diversity is not None and any(bank.shape != similarity.shape[:1] for bank in bank_diversity):
        raise ValueError(
            f"bank_diversity must have shape ({len(similarity)},) for images and for texts, got "
            + " and ".join(str(tuple(bank.shape)) for bank in bank_diversity)
        )
    positive = similarity.diagonal()
    loss = similarity.new_zeros(())
    for direction, rows in enumerate((similarity, similarity.T)):
        with torch.set_grad_enabled(diversity_gradient and torch.is_grad_enabled()):
            weights = spread(rows, negatives, kind=diversity, epsilon=epsilon)
            weights = weights / weights.amax()
            if bank_diversity is not None:
                weights = (weights + bank_diversity[direction]) / 2
        loss = loss + directed_dcl(
            rows,
            positive,
            negatives,
            weights,
            mu=mu,
            gamma=gamma,
            positive_weight=positive_weight,
            effective_negatives=effective_negatives,
        ).mean()
    return loss


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
) -> Tensor:
    """DCL against coupled momentum banks, ``L_DCL(V, B_w) + L_DCL(W, B_v)`` (CODER eq. 6; METHODS 3).

    An anchor's candidates are the current keys of the batch followed by the valid bank entries; its positive is its own
    pair's key, and what shares its image id is never its negative. The gradient flows to the live features only.

    Args:
        image_features: live, [n, d], L2-normalised, like all others; row i belongs to row i of ``text_features``.
        image_keys: of the momentum towers, for the same pairs [n, d]. text_keys: [n, d].
        image_bank: entries of earlier steps [q, d]; row i belongs to row i of ``text_bank`` [q, d].
        image_ids: integers [n]; default: all distinct, and distinct from the bank's.
        bank_ids: integers [q] of the bank's rows; without them no entry counts as the same image.
        bank_valid: bool [q], True where the bank is filled. Default: everywhere.
        mu: temperature, > 0. gamma: margin. epsilon: of the diversity, > 0.
        diversity: ``"std"``, ``"entropy"`` or ``"none"``.
        positive_weight: weight of the positive's term; ``"mu"`` is the formula as printed.
        reverse: which bank anchors meet the live batch: ``"paired"`` the current keys, weighted by their diversity over
            that batch; ``"all"`` the valid entries too, which have no positive and keep the first term alone;
            ``"none"`` drops this direction.
        diversity_over: whose spread weights the live anchors: ``"batch"``, ``"bank"`` (keys and entries), or the mean of
            both normalised values.
        diversity_gradient: let the gradient through the diversity weights (default: stopped).
        effective_negatives: see :func:`directed_dcl`.

    Returns:
        Scalar: per bank the mean over the live anchors plus the mean over the reverse ones, both banks added.

    Raises:
        ValueError: shapes that differ, an empty batch, options out of range.
    """
    check_m_dcl_options(reverse=reverse, diversity_over=diversity_over)
    banks = image_keys, text_keys, image_bank, text_bank
    _check_banks(image_features, text_features, *banks, image_ids, bank_ids, bank_valid)
    n, q = len(image_features), len(image_bank)
    device = image_features.device
    ids = torch.arange(n, device=device) if image_ids is None else image_ids
    same = torch.zeros(n, q, dtype=torch.bool, device=device)
    if image_ids is not None and bank_ids is not None:
        same = image_ids[:, None] == bank_ids[None, :]
    valid = torch.ones(q, dtype=torch.bool, device=device) if bank_valid is None else bank_valid
    in_batch = ids[:, None] != ids[None, :]
    negatives = torch.cat([in_batch, ~same & valid], 1)
    options: Any = {
        "mu": mu,
        "gamma": gamma,
        "positive_weight": positive_weight,
        "effective_negatives": effective_negatives,
    }

    def weigh(*rows: tuple[Tensor, Tensor]) -> Tensor:
        """Mean of the normalised spreads over each set of candidates."""
        with torch.set_grad_enabled(diversity_gradient and torch.is_grad_enabled()):
            spreads = [spread(similarity, allowed, kind=diversity, epsilon=epsilon) for similarity, allowed in rows]
            return torch.stack([each / each.amax() for each in spreads]).mean(0)

    loss = image_features.new_zeros(())
    for live, others, keys, bank in (
        (image_features, text_features, text_keys, text_bank),
        (text_features, image_features, image_keys, image_bank),
    ):
        keys, bank = keys.detach(), bank.detach()
        batch = (cosine(live, others), in_batch)
        similarity = torch.cat([cosine(live, keys), cosine(live, bank)], 1)
        rows = {"batch": [batch], "bank": [(similarity, negatives)], "batch+bank": [batch, (similarity, negatives)]}
        weights = weigh(*rows[diversity_over])
        loss = loss + directed_dcl(similarity, similarity.diagonal(), negatives, weights, **options).mean()
        if reverse == "none":
            continue
        back, allowed = cosine(keys, live), in_batch.T
        if reverse == "paired":
            weights = weigh((back, allowed))
            loss = loss + directed_dcl(back, back.diagonal(), allowed, weights, **options).mean()
        else:
            anchors = torch.cat([back, cosine(bank, live)])
            allowed = torch.cat([allowed, (~same & valid).T])
            weights = weigh((anchors, allowed))
            # log(1 + S) of a similarity of zero: an anchor without a positive adds nothing to the second term
            positive = torch.cat([back.diagonal(), back.new_zeros(q)])
            per_anchor = directed_dcl(anchors, positive, allowed, weights, **options)
            counted = torch.cat([valid.new_ones(n), valid])
            loss = loss + torch.where(counted, per_anchor, 0).sum() / counted.sum()
    return loss


def _check_banks(
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


def check_m_dcl_options(*, reverse: str, diversity_over: str) -> None:
    """:class:`ValueError` for unknown words."""
    if reverse not in ("paired", "all", "none"):
        raise ValueError(f"reverse must be 'paired', 'all' or 'none', got {reverse!r}")
    if diversity_over not in ("batch", "bank", "batch+bank"):
        raise ValueError(f"diversity_over must be 'batch', 'bank' or 'batch+bank', got {diversity_over!r}")


def _pairs(image_features: Tensor, text_features: Tensor, image_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Checked similarity [n, n] and negatives [n, n] of a batch of pairs."""
    if image_features.ndim != 2 or image_features.shape != text_features.shape:
        raise ValueError(
            "image_features and text_features must have one shape [n, d], got "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if not len(image_features):
        raise ValueError("image_features and text_features hold no pair")
    negatives = different_images(image_ids, len(image_features), image_features.device)
    return cosine(image_features, text_features), negatives


def check_dcl_options(
    *,
    mu: float,
    epsilon: float = 0.1,
    positive_weight: float | Literal["mu"],
    effective_negatives: int | None = None,
) -> None:
    """:class:`ValueError` for options of DCL that are out of range: terms call it before the first batch."""
    for name, value in (("mu", mu), ("epsilon", epsilon)):
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
    if positive_weight != "mu" and (isinstance(positive_weight, str) or not positive_weight >= 0):
        raise ValueError(f"positive_weight must be a number >= 0 or 'mu', got {positive_weight!r}")
    if effective_negatives is not None and not effective_negatives >= 1:
        raise ValueError(f"effective_negatives must be >= 1 or none, got {effective_negatives}")
