"""SelfAlign's two alignments: words with regions, and contexts with locals (eq. 1-8; METHODS 9).

Shapes: b pairs, t words, l regions, d dimensions, k prototypes, m regions of a whole batch, c local features of one.
Masks are bool, True where valid; padding counts nowhere, and an index at padding means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.functional.asymmetry import check_temperature
from coder_plugin.functional.similarity import raise_precision

Assignment = Literal["sinkhorn", "softmax"]

#: Stands for minus infinity among cosines: far below any, and with a gradient of zero, not NaN, where nothing is left.
_NEVER = -1e4
#: Below it the exponentials of Sinkhorn's scaling leave float32's range.
_LEAST_EPSILON = 0.03
#: Similarities that :func:`hardest` holds at once.
_TILE = 1 << 22


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
        bias = balance(region_scores, region_mask, epsilon=epsilon, iterations=iterations)
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
        _check_mask(name, mask, tokens)
    with torch.autocast(words.device.type, enabled=False):
        cosines = _unit(words, word_mask) @ _unit(regions, region_mask).transpose(1, 2)
    return cosines.masked_fill(~(word_mask[:, :, None] & region_mask[:, None]), -torch.inf)


def prototype_scores(features: Tensor, prototypes: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cosines with the prototypes: [..., d] and [k, d] -> [..., k], in float32 or better; zero at padding of ``mask`` [...]."""
    if features.shape[-1] != prototypes.shape[-1] or prototypes.ndim != 2:
        raise ValueError(
            f"prototypes must be [k, {features.shape[-1]}], as the features' last dimension, got {tuple(prototypes.shape)}"
        )
    with torch.autocast(features.device.type, enabled=False):
        units = F.normalize(raise_precision(features), dim=-1) if mask is None else _unit(features, mask)
        return units @ F.normalize(raise_precision(prototypes), dim=-1).T


@torch.no_grad()
def balance(
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

    ``bias``: [k] of :func:`balance`; None: softmax of the regions' scores at the same temperature.
    """
    row, column = mask.nonzero(as_tuple=True)
    logits = raise_precision(scores[row, column]) / temperature
    with torch.no_grad():
        targets = raise_precision(target_scores[row, matched[row, column]])
        assigned = (targets / temperature if bias is None else targets / epsilon + bias).softmax(-1)
    losses = logits.logsumexp(-1) - (assigned * logits).sum(-1)
    return (losses / mask.sum(1)[row]).sum() / len(mask)


def cra(
    global_context: Tensor,
    local_context: Tensor,
    local_mask: Tensor,
    *,
    temperature: float = 0.7,
    hard_negatives: int = 512,
    image_ids: Tensor | None = None,
) -> Tensor:
    """One direction of shared context enhancement (SelfAlign eq. 6 or 7): InfoNCE of each local feature with the global
    feature of the other modality, against the hardest local features of other pairs.

    ``-log exp(s_i) / (exp(s_i) + sum_j exp(s_j))`` with s = cos / temperature; mean over a pair's locals, then over pairs.
    Similarities of all pairs are formed in tiles.

    Args:
        global_context: [b, d], any length. local_context: [b, l, d]. local_mask: [b, l], a local at least in each row.
        temperature: tau_2. hard_negatives: N; all where there are fewer.
        image_ids: integers [b]; locals of the same image are no negatives. Default: all distinct.

    Returns:
        Scalar, >= 0, in float32 or better; zero where there is no negative.
    """
    check_cra_options(temperature=temperature, hard_negatives=hard_negatives)
    if image_ids is None:
        image_ids = torch.arange(len(global_context), device=global_context.device)
    elif image_ids.shape != global_context.shape[:1]:
        raise ValueError(f"image_ids must have shape ({len(global_context)},), got {tuple(image_ids.shape)}")
    context, local = unit_context(global_context, local_context, local_mask)
    negatives = hardest(context, image_ids, local, local_mask, image_ids, temperature=temperature, count=hard_negatives)
    return directed_cra(context, local, local_mask, negatives.logsumexp(1), temperature=temperature)


def check_cra_options(*, temperature: float, hard_negatives: int) -> None:
    check_temperature(temperature)
    if hard_negatives < 1:
        raise ValueError(f"hard_negatives must be >= 1, got {hard_negatives}")


def unit_context(global_context: Tensor, local_context: Tensor, local_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Global [b, d] and local features [b, l, d] of length one, in float32 or better; zero at padding, which may hold
    anything."""
    _check_mask("local_mask", local_mask, local_context)
    if global_context.shape != local_context.shape[::2] or not len(local_context):
        raise ValueError(
            "global_context and local_context must be [b, d] and [b, l, d] of b >= 1 pairs, got "
            f"{tuple(global_context.shape)} and {tuple(local_context.shape)}"
        )
    return F.normalize(raise_precision(global_context), dim=-1), _unit(local_context, local_mask)


def hardest(
    context: Tensor,
    context_ids: Tensor,
    local: Tensor,
    local_mask: Tensor,
    local_ids: Tensor,
    *,
    temperature: float,
    count: int,
) -> Tensor:
    """The greatest logits of contexts [n, d] with local features [b, l, d] of other images -> [n, at most count].

    ``context_ids`` [n] and ``local_ids`` [b] name the images; features are of length one. Rows with fewer negatives are
    filled up with logits that weigh nothing.
    """
    candidates = local.flatten(0, 1)
    owners = local_ids.repeat_interleave(local.shape[1])
    padding = ~local_mask.flatten()
    count, rows = min(count, len(candidates)), max(1, _TILE // len(candidates))
    found = []
    with torch.autocast(context.device.type, enabled=False):
        for some, ids in zip(context.split(rows), context_ids.split(rows), strict=True):
            # added and not filled in, so that the backward pass keeps no mask of all pairs
            barred = _NEVER * ((ids[:, None] == owners) | padding).to(some.dtype)
            found.append((some @ candidates.T + barred).topk(count, dim=1, sorted=False).values)
    return torch.cat(found) / temperature


def directed_cra(
    context: Tensor, local: Tensor, local_mask: Tensor, negatives: Tensor, *, temperature: float
) -> Tensor:
    """:func:`cra` of each pair's context [b, d] and locals [b, l, d], of length one, given the log-sum-exp of its negatives'
    logits [b]."""
    with torch.autocast(context.device.type, enabled=False):
        positive = (local @ context[..., None]).squeeze(-1) / temperature
        losses = torch.logaddexp(negatives[:, None], positive) - positive
    return (torch.where(local_mask, losses, 0).sum(1) / local_mask.sum(1)).mean()


def _unit(tokens: Tensor, mask: Tensor) -> Tensor:
    """Of length one, and zero at padding, which may hold anything."""
    return F.normalize(torch.where(mask[..., None], raise_precision(tokens), 0), dim=-1)


def _check_mask(name: str, mask: Tensor, tokens: Tensor) -> None:
    if mask.dtype != torch.bool or tokens.ndim != 3 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name} must be a bool tensor with the first two dimensions of its features {tuple(tokens.shape)}, got "
            f"{mask.dtype} {tuple(mask.shape)}"
        )
