"""SelfAlign's local concept alignment: words with regions, by shared prototypes (eq. 1-4; METHODS 9).

Shapes: b pairs, t words, l regions, d dimensions, k prototypes. Masks are bool, True where valid; padding counts nowhere,
and an index at padding means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from coder_plugin.functional.asymmetry import check_temperature
from coder_plugin.functional.sets import check_mask, unit_tokens
from coder_plugin.functional.similarity import raise_precision, unit

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

    ``-sum_k p_k log q_k`` from the word's ``q = softmax(cos(t, c) / temperature)`` to the assignment p of the region, which
    gets no gradient; mean over a pair's words, then over pairs. With the arguments of words and regions exchanged it is
    the ablation's object-to-word direction.

    Args:
        words: [b, t, d], any length. word_mask: [b, t]; a pair without words counts as zero.
        regions: [b, l, d]. region_mask: [b, l], a region at least in each row.
        prototypes: [k, d].
        temperature: tau_1.
        assignment: ``"sinkhorn"``, balanced over the regions of the batch, or ``"softmax"`` as eq. 2 prints.
        epsilon: Sinkhorn's sharpness, 0.03 or more. iterations: of Sinkhorn.

    Returns:
        Scalar, >= 0, in float32 or better.
    """
    check_lca_options(temperature=temperature, assignment=assignment, epsilon=epsilon, iterations=iterations)
    matched = correspondence(words, word_mask, regions, region_mask).argmax(2)
    region_scores = prototype_scores(regions.detach(), prototypes, region_mask)
    bias = None
    if assignment == "sinkhorn":
        bias = sinkhorn_bias(region_scores, region_mask, epsilon=epsilon, iterations=iterations)
    return directed_lca(
        prototype_scores(words, prototypes, word_mask),
        word_mask,
        region_scores,
        matched,
        bias,
        temperature=temperature,
        epsilon=epsilon,
    )


def check_lca_options(*, temperature: float, assignment: str, epsilon: float, iterations: int) -> None:
    check_temperature(temperature)
    if assignment not in ("sinkhorn", "softmax"):
        raise ValueError(f"assignment must be 'sinkhorn' or 'softmax', got {assignment!r}")
    if not epsilon >= _LEAST_EPSILON:
        raise ValueError(f"epsilon must be >= {_LEAST_EPSILON}, got {epsilon}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")


def correspondence(words: Tensor, word_mask: Tensor, regions: Tensor, region_mask: Tensor) -> Tensor:
    """Cosines of the words and regions of each pair (eq. 1) [b, t, l], -inf at padding of either."""
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
    """Cosines with the prototypes: [..., d] and [k, d] -> [..., k], in float32 or better; zero at padding of ``mask`` [...]."""
    if features.shape[-1] != prototypes.shape[-1] or prototypes.ndim != 2:
        raise ValueError(
            f"prototypes must be [k, {features.shape[-1]}], as the features' last dimension, got {tuple(prototypes.shape)}"
        )
    with torch.autocast(features.device.type, enabled=False):
        units = unit(features) if mask is None else unit_tokens(features, mask)
        return units @ unit(prototypes).T


@torch.no_grad()
def sinkhorn_bias(
    scores: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.05,
    iterations: int = 2,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """What Sinkhorn adds to the scores of each prototype, so that all are used alike: [..., k] and mask [...] -> [k].

    The assignment of a region after these iterations is ``softmax(scores / epsilon + bias)``: each iteration gives every
    prototype the same sum over all regions, then every region a sum of one.

    Args:
        scores: cosines. total: adds up a [k] of all ranks, so that the regions of all are balanced.
    """
    kernel = raise_precision(scores).sub(1).div_(epsilon).exp_()  # cosines end at 1: nothing overflows
    kernel = kernel.mul_(mask[..., None]).flatten(0, -2)
    of_region = kernel.new_ones(len(kernel))
    with torch.autocast(scores.device.type, enabled=False):
        for step in range(iterations):
            sums = of_region @ kernel
            sums = sums if total is None else total(sums)
            of_prototype = sums.mean() / sums  # the mean keeps it in range; to the softmax a constant is nothing
            if step + 1 < iterations:  # the last one is the softmax
                mass = kernel @ of_prototype
                of_region = torch.where(mass > 0, 1 / mass, 0)  # padding has none
    return of_prototype.log()


def directed_lca(
    scores: Tensor,
    mask: Tensor,
    target_scores: Tensor,
    matched: Tensor,
    bias: Tensor | None,
    *,
    temperature: float,
    epsilon: float = 0.05,
) -> Tensor:
    """:func:`lca` of cosines with prototypes: of words [b, t, k] and regions [b, l, k], with each word's region [b, t].

    ``bias``: [k] of :func:`sinkhorn_bias`; None: softmax of the regions' scores at the same temperature.
    """
    row, column = mask.nonzero(as_tuple=True)
    logits = raise_precision(scores[row, column]) / temperature
    with torch.no_grad():
        targets = raise_precision(target_scores[row, matched[row, column]])
        assigned = (targets / temperature if bias is None else targets / epsilon + bias).softmax(-1)
    losses = logits.logsumexp(-1) - (assigned * logits).sum(-1)
    return (losses / mask.sum(1)[row]).sum() / len(mask)
