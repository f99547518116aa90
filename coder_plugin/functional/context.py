"""SelfAlign's shared context enhancement: contexts with the local features of the other modality (eq. 6-8; METHODS 9).

Shapes: b pairs, l local features of each, m of all, n contexts, d dimensions. Masks are bool, True where valid; padding
counts nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coder_plugin.functional.asymmetry import check_temperature
from coder_plugin.functional.sets import check_mask, unit_tokens
from coder_plugin.functional.similarity import unit

#: Stands for minus infinity among cosines: far below any, and with a gradient of zero, not NaN, where nothing is left.
_NEVER = -1e4
#: Similarities that are formed at once: so many, or of so many contexts.
_TILE, _ROWS = 1 << 24, 64


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
    negatives = hardest_locals(
        context, image_ids, local, local_mask, image_ids, temperature=temperature, count=hard_negatives
    )
    return directed_cra(context, local, local_mask, negatives.logsumexp(1), temperature=temperature)


def check_cra_options(*, temperature: float, hard_negatives: int) -> None:
    check_temperature(temperature)
    if hard_negatives < 1:
        raise ValueError(f"hard_negatives must be >= 1, got {hard_negatives}")


def unit_context(global_context: Tensor, local_context: Tensor, local_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Global [b, d] and local features [b, l, d] of length one, in float32 or better; zero at padding, which may hold
    anything."""
    check_mask("local_mask", local_mask, local_context)
    if global_context.shape != local_context.shape[::2] or not len(local_context):
        raise ValueError(
            "global_context and local_context must be [b, d] and [b, l, d] of b >= 1 pairs, got "
            f"{tuple(global_context.shape)} and {tuple(local_context.shape)}"
        )
    return unit(global_context), unit_tokens(local_context, local_mask)


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

    ``context_ids`` [n] and ``local_ids`` [b] name the images; features are of length one. Rows with fewer negatives are
    filled up with logits that weigh nothing. Only these few of the n x m similarities are kept for the backward pass.
    """
    candidates = local.flatten(0, 1)
    owners = local_ids.repeat_interleave(local.shape[1])
    with torch.autocast(context.device.type, enabled=False):
        found = _Hardest.apply(context, candidates, context_ids, owners, local_mask.flatten(), min(count, len(candidates)))
    return found / temperature


class _Hardest(torch.autograd.Function):
    """The greatest products of [n, d] and [m, d] -> [n, k], its gradient by sparse products."""

    @staticmethod
    def forward(
        ctx: Any, context: Tensor, candidates: Tensor, ids: Tensor, owners: Tensor, valid: Tensor, count: int
    ) -> Tensor:
        rows = max(_ROWS, _TILE // len(candidates))
        values, places = [], []
        for some, own in zip(context.split(rows), ids.split(rows), strict=True):
            products = some @ candidates.T
            products.masked_fill_((own[:, None] == owners) | ~valid, _NEVER)
            best = products.topk(count, dim=1, sorted=False)
            values.append(best.values)
            places.append(best.indices)
        ctx.save_for_backward(context, candidates, torch.cat(places))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        context, candidates, places = ctx.saved_tensors
        row = torch.arange(len(context), device=context.device).repeat_interleave(places.shape[1])
        at, shape = torch.stack([row, places.flatten()]), (len(context), len(candidates))
        picked = torch.sparse_coo_tensor(at, gradient.flatten(), shape, check_invariants=False)
        of_context = torch.sparse.mm(picked, candidates) if ctx.needs_input_grad[0] else None
        of_candidates = torch.sparse.mm(picked.t(), context) if ctx.needs_input_grad[1] else None
        return of_context, of_candidates, None, None, None, None


def directed_cra(
    context: Tensor, local: Tensor, local_mask: Tensor, negatives: Tensor, *, temperature: float
) -> Tensor:
    """:func:`cra` of each pair's context [b, d] and locals [b, l, d], of length one, given the log-sum-exp of its negatives'
    logits [b]."""
    with torch.autocast(context.device.type, enabled=False):
        positive = (local @ context[..., None]).squeeze(-1) / temperature
        losses = torch.logaddexp(negatives[:, None], positive) - positive
    return (torch.where(local_mask, losses, 0).sum(1) / local_mask.sum(1)).mean()
