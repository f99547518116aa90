"""SelfAlign's shared context enhancement: global features against local features of the other modality (eq. 6-8).

Shapes: b pairs, n pairs of all processes, l local features of a pair, m of all pairs, d dimensions. Masks are bool,
True where valid; padding never counts. Equations and choices: docs/equations.md#selfalign.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coder_plugin.functional.masked_sets import check_mask, unit_tokens
from coder_plugin.functional.similarity import Gather, check_range, check_temperature, unit

#: The cosine of what is no negative: far below any cosine, and finite, so that a row without negatives has a zero gradient.
_EXCLUDED = -1e4
#: How many similarities are computed at once, and at least for how many contexts.
_TILE_SIZE, _LEAST_ROWS = 1 << 24, 64


def cra(
    global_context: Tensor,
    local_context: Tensor,
    local_mask: Tensor,
    *,
    temperature: float = 0.7,
    hard_negatives: int = 512,
    image_ids: Tensor | None = None,
    gather: Gather | None = None,
    exchange: Gather | None = None,
) -> Tensor:
    """One direction of shared context enhancement (SelfAlign eq. 6 or 7).

    InfoNCE of each local feature with the global feature of the other modality, against the hardest local features of
    other pairs: ``-log exp(s_i) / (exp(s_i) + sum_j exp(s_j))`` with ``s = cos / temperature``; mean over the locals of
    a pair, then over pairs. The similarities of all pairs are computed in tiles.

    Args:
        global_context: [b, d], of any length, not normalised.
        local_context: [b, l, d]. local_mask: bool [b, l]; a pair without locals counts as zero.
        temperature: tau_2, > 0.
        hard_negatives: N, >= 1; all negatives, if there are fewer.
        image_ids: integers [b]; locals of the same image are no negatives. Default: all distinct. With ``gather`` they
            are required.
        gather: collects the rows of all processes: the negatives are then the hardest of all of them.
        exchange: with ``gather``: sends rows [n, k], for every process's pairs, to these processes, and returns the
            rows [n, k] that they sent for the pairs of this one, both in rank order.

    Returns:
        Scalar >= 0, float32 or float64; zero if there is no negative.

    Raises:
        ValueError: shapes that do not fit, a mask that is not bool, options out of range.

    Example:
        >>> axes, mask = torch.eye(2), torch.ones(2, 1, dtype=torch.bool)
        >>> cra(axes, axes[:, None], mask, temperature=0.5)  # log(1 + exp(-1 / 0.5))
        tensor(0.1269)
    """
    check_cra_options(temperature=temperature, hard_negatives=hard_negatives)
    check_mask("local_mask", local_mask, local_context)
    if global_context.shape != local_context.shape[::2] or not len(local_context):
        raise ValueError(
            "global_context and local_context must be [b, d] and [b, l, d] of b >= 1 pairs, got "
            f"{tuple(global_context.shape)} and {tuple(local_context.shape)}"
        )
    check_range(global_context=global_context, local_context=local_context)
    if image_ids is None:
        image_ids = torch.arange(len(global_context), device=global_context.device)
    elif image_ids.shape != global_context.shape[:1]:
        raise ValueError(f"image_ids must have shape ({len(global_context)},), got {tuple(image_ids.shape)}")
    context, local = unit(global_context), unit_tokens(local_context, local_mask)
    contexts, context_ids = (context, image_ids) if gather is None else (gather(context), gather(image_ids))
    negatives = hardest_locals(
        contexts, context_ids, local, local_mask, image_ids, temperature=temperature, count=hard_negatives
    )
    if exchange is not None:
        parts = exchange(negatives).unflatten(0, (-1, len(context)))  # this process's contexts, every process's locals
        candidates = parts.transpose(0, 1).flatten(1)
        negatives = candidates.topk(min(hard_negatives, candidates.shape[1]), dim=1, sorted=False).values
    return directed_cra(context, local, local_mask, negatives.logsumexp(1), temperature=temperature)


def hardest_locals(
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

    ``context_ids`` [n] and ``local_ids`` [b] name the images; features have unit length. Rows with fewer negatives are
    filled up with logits of no weight. Only these few of the n x m similarities are saved for the backward pass.
    """
    candidates = local.flatten(0, 1)
    candidate_ids = local_ids.repeat_interleave(local.shape[1])
    with torch.autocast(context.device.type, enabled=False):
        cosines = _TopProducts.apply(
            context, candidates, context_ids, candidate_ids, local_mask.flatten(), min(count, len(candidates))
        )
    return cosines / temperature


class _TopProducts(torch.autograd.Function):
    """The greatest inner products of [n, d] and [m, d] -> [n, k]; the gradient by sparse products."""

    @staticmethod
    def forward(
        ctx: Any, context: Tensor, candidates: Tensor, ids: Tensor, candidate_ids: Tensor, valid: Tensor, count: int
    ) -> Tensor:
        rows = max(_LEAST_ROWS, _TILE_SIZE // len(candidates))
        values, indices = [], []
        for tile, tile_ids in zip(context.split(rows), ids.split(rows), strict=True):
            products = tile @ candidates.T
            products.masked_fill_((tile_ids[:, None] == candidate_ids) | ~valid, _EXCLUDED)
            best = products.topk(count, dim=1, sorted=False)
            values.append(best.values)
            indices.append(best.indices)
        ctx.save_for_backward(context, candidates, torch.cat(indices))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        context, candidates, indices = ctx.saved_tensors
        if torch.compiler.is_compiling():  # which does not take sparse tensors
            dense = gradient.new_zeros(len(context), len(candidates)).scatter_(1, indices, gradient)
            return dense @ candidates, dense.T @ context, None, None, None, None
        row = torch.arange(len(context), device=context.device).repeat_interleave(indices.shape[1])
        positions, shape = torch.stack([row, indices.flatten()]), (len(context), len(candidates))
        selected = torch.sparse_coo_tensor(positions, gradient.flatten(), shape, check_invariants=False)
        context_gradient = torch.sparse.mm(selected, candidates) if ctx.needs_input_grad[0] else None
        candidate_gradient = torch.sparse.mm(selected.t(), context) if ctx.needs_input_grad[1] else None
        return context_gradient, candidate_gradient, None, None, None, None


def directed_cra(
    context: Tensor, local: Tensor, local_mask: Tensor, negatives: Tensor, *, temperature: float
) -> Tensor:
    """The InfoNCE of :func:`cra` from each pair's context [b, d] and locals [b, l, d], both of unit length, and the
    log-sum-exp of its negatives' logits [b]."""
    with torch.autocast(context.device.type, enabled=False):
        positive = (local @ context[..., None]).squeeze(-1) / temperature
        losses = torch.logaddexp(negatives[:, None], positive) - positive
    return (torch.where(local_mask, losses, 0).sum(1) / local_mask.sum(1).clamp(min=1)).mean()


def check_cra_options(*, temperature: float, hard_negatives: int, **_: Any) -> None:
    """:class:`ValueError` for options of :func:`cra` that are out of range."""
    check_temperature(temperature)
    if hard_negatives < 1:
        raise ValueError(f"hard_negatives must be >= 1, got {hard_negatives}")
