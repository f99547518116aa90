"""SelfAlign's local concept alignment: words and regions that share prototypes (eq. 1-4).

Shapes: b pairs, t words, l regions, d dimensions, k prototypes. Masks are bool, True where valid. Padding never
counts, and an index at a padded position means nothing. Equations and choices: docs/equations.md#selfalign.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.functional.host import at_hand
from coder_plugin.functional.masked_sets import check_mask, unit_tokens
from coder_plugin.functional.similarity import Gather, check_range, check_temperature, raise_precision, unit

Assignment = Literal["sinkhorn", "softmax"]

#: Below it the exponentials of Sinkhorn's scaling leave float32's range.
_LEAST_EPSILON = 0.03


def lca(
    words: Tensor,
    word_mask: Tensor,
    regions: Tensor,
    region_mask: Tensor,
    prototypes: Tensor,
    *,
    temperature: float = 0.1,
    assignment: Assignment = "sinkhorn",
    epsilon: float = 0.05,
    iterations: int = 2,
) -> Tensor:
    """Local concept alignment (SelfAlign eq. 1-4): a word predicts the prototypes of its most similar region.

    ``-sum_k p_k log q_k`` with the word's ``q = softmax(cos(word, prototype) / temperature)`` and the region's
    assignment p, which gets no gradient; mean over the words of a pair, then over pairs. With words and regions
    exchanged it is the object-to-word direction of the paper's ablation.

    Args:
        words: [b, t, d], of any length, not normalised.
        word_mask: bool [b, t]. regions: [b, l, d]. region_mask: bool [b, l]. A pair without words or without regions counts as
            zero.
        prototypes: [k, d].
        temperature: tau_1, > 0.
        assignment: ``"sinkhorn"``: prototypes are used equally often over the regions of the batch; ``"softmax"``: as
            eq. 2 prints.
        epsilon: sharpness of Sinkhorn, >= 0.03. iterations: of Sinkhorn, >= 1.

    Returns:
        Scalar >= 0, float32 or float64.

    Raises:
        ValueError: shapes that do not fit, masks that are not bool, options out of range.

    Example:
        >>> axes, mask = torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool)
        >>> lca(axes, mask, axes, mask, torch.eye(2), temperature=0.5)
        tensor(0.1269)
    """
    check_range(words=words, regions=regions, prototypes=prototypes)
    matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
    return lca_from_scores(
        prototype_scores(words, prototypes, word_mask),
        word_mask,
        prototype_scores(regions.detach(), prototypes, region_mask),
        region_mask,
        matched,
        temperature=temperature,
        assignment=assignment,
        epsilon=epsilon,
        iterations=iterations,
    )[0]


def lca_from_scores(
    scores: Tensor,
    mask: Tensor,
    target_scores: Tensor,
    target_mask: Tensor,
    matched: Tensor,
    *,
    temperature: float,
    assignment: str,
    epsilon: float,
    iterations: int,
    total: Gather | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`lca` from the cosines with the prototypes, for a model that computes them in its forward, and the entropy of its
    targets.

    The entropy, ``-sum_k p_k log p_k`` in nats with the same means, is what the loss cannot go below: their difference is the
    divergence KL(p || q), which falls to zero where words predict the assignments of their regions.

    Args:
        scores: of words [b, t, k]. mask: bool [b, t].
        target_scores: of regions [b, l, k]. target_mask: bool [b, l].
        matched: the region of each word, int [b, t].
        total: adds up a tensor [k] over all processes, so that Sinkhorn balances the regions of all of them.

    Returns:
        The loss, a scalar >= 0, and the entropy, a scalar in [0, log k] without a gradient.
    """
    check_lca_options(temperature=temperature, assignment=assignment, epsilon=epsilon, iterations=iterations)
    bias = None
    if assignment == "sinkhorn":
        bias = sinkhorn_bias(target_scores, target_mask, epsilon=epsilon, iterations=iterations, total=total)
    mask = mask & target_mask.any(1, keepdim=True)  # a pair without regions has no targets
    # of valid words only where that needs no wait for a device: most positions of a text are padding
    if at_hand(mask):
        row, column = mask.nonzero(as_tuple=True)
    else:
        position = torch.arange(mask.numel(), device=mask.device)
        row, column = position // mask.shape[1], position % mask.shape[1]
    valid = mask[row, column]
    logits = raise_precision(scores[row, column]) / temperature
    with torch.no_grad():
        targets = raise_precision(target_scores[row, matched[row, column]])
        assigned = (targets / temperature if bias is None else targets / epsilon + bias).softmax(-1)
        entropy = torch.special.entr(assigned).sum(-1)
    losses = logits.logsumexp(-1) - (assigned * logits).sum(-1)
    share = valid / mask.sum(1).clamp(min=1).to(losses.dtype)[row]
    return (losses * share).sum() / len(mask), (entropy * share).sum() / len(mask)


def correspondence(words: Tensor, word_mask: Tensor, regions: Tensor, region_mask: Tensor) -> Tensor:
    """Cosines of the words and regions of each pair (eq. 1).

    Args:
        words: [b, t, d]. word_mask: bool [b, t]. regions: [b, l, d]. region_mask: bool [b, l].

    Returns:
        [b, t, l] in float32 or float64, -inf where either is padding.

    Raises:
        ValueError: shapes that do not fit, masks that are not bool.
    """
    if words.ndim != 3 or regions.ndim != 3 or words.shape[::2] != regions.shape[::2] or not len(words):
        raise ValueError(
            "words and regions must be [b, t, d] and [b, l, d] of b >= 1 pairs, got "
            f"{tuple(words.shape)} and {tuple(regions.shape)}"
        )
    for name, mask, tokens in (("word_mask", word_mask, words), ("region_mask", region_mask, regions)):
        check_mask(name, mask, tokens)
    with torch.autocast(words.device.type, enabled=False):
        cosines = unit_tokens(words, word_mask) @ unit_tokens(regions, region_mask).transpose(1, 2)
    return cosines.masked_fill(~(word_mask[:, :, None] & region_mask[:, None]), -torch.inf)


def prototype_scores(features: Tensor, prototypes: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cosines of features with prototypes.

    Args:
        features: [..., d]. prototypes: [k, d]. mask: bool [...], True where valid.

    Returns:
        [..., k] in float32 or float64, zero at padding.

    Raises:
        ValueError: dimensions that differ.
    """
    if features.shape[-1] != prototypes.shape[-1] or prototypes.ndim != 2:
        raise ValueError(
            f"prototypes must be [k, {features.shape[-1]}], as the features' last dimension, got {tuple(prototypes.shape)}"
        )
    with torch.autocast(features.device.type, enabled=False):
        units = unit(features) if mask is None else unit_tokens(features, mask)
        return units @ unit(prototypes).T


@torch.no_grad()
def sinkhorn_bias(
    scores: Tensor, mask: Tensor, *, epsilon: float = 0.05, iterations: int = 2, total: Gather | None = None
) -> Tensor:
    """What Sinkhorn's iterations add to the scores of each prototype, so that all are used equally often.

    After these iterations the assignment of a region is ``softmax(scores / epsilon + bias)``. Each iteration gives every
    prototype the same sum over all regions, then every region a sum of one.

    Args:
        scores: cosines [..., k]. mask: bool [...].
        total: adds up a tensor [k] over all processes, so that the regions of all are balanced.

    Returns:
        [k] in float32 or float64, without a gradient.
    """
    kernel = raise_precision(scores).sub(1).div_(epsilon).exp_()  # cosines are at most 1: nothing overflows
    kernel = kernel.mul_(mask[..., None]).flatten(0, -2)
    region_scale = kernel.new_ones(len(kernel))
    with torch.autocast(scores.device.type, enabled=False):
        for step in range(iterations):
            sums = region_scale @ kernel
            sums = sums if total is None else total(sums)
            # dividing by the mean keeps the values in range; the softmax ignores a constant factor
            prototype_scale = sums.mean() / sums
            if step + 1 < iterations:  # the last one is the softmax
                mass = kernel @ prototype_scale
                region_scale = torch.where(mass > 0, 1 / mass, 0)  # padding has no mass
    return prototype_scale.log()


def check_lca_options(*, temperature: float, assignment: str, epsilon: float, iterations: int, **_: Any) -> None:
    """:class:`ValueError` for options of :func:`lca` that are out of range."""
    check_temperature(temperature)
    if assignment not in ("sinkhorn", "softmax"):
        raise ValueError(f"assignment must be 'sinkhorn' or 'softmax', got {assignment!r}")
    if not epsilon >= _LEAST_EPSILON:
        raise ValueError(f"epsilon must be >= {_LEAST_EPSILON}, got {epsilon}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
