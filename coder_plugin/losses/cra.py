"""SelfAlign's context relation alignment: global features against local features of the other modality (eq. 6-12).

Shapes: b pairs (of this rank), n pairs of all ranks, l local features of a pair, m of all pairs, d dimensions. Masks are bool,
True where valid; padding never counts. Equations and choices: docs/equations.md#selfalign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.contrast import Dense
from coder_plugin.contrast.autograd import dense_gradients, wants_graph
from coder_plugin.errors import CoderError
from coder_plugin.losses.base import Term, rows_of_rank
from coder_plugin.losses.triplet import Reduction, check_triplet_options, hinge_loss, sum_over_ranks
from coder_plugin.masked import check_mask, unit_tokens
from coder_plugin.tensors import Gather, check_range, check_temperature, unit

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head

#: The cosine of a candidate that is not a negative: far below any cosine, and finite, so that a row without negatives has a
#: zero gradient.
_EXCLUDED = -1e4
#: How many similarities are computed at once, and at least for how many contexts.
_TILE_SIZE, _MIN_ROWS = 1 << 24, 64


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

    Use it beside a base loss on towers whose context stage trains: each word learns what the rest of its picture shows.

    Args:
        global_context: [b, d], of any length, not normalised.
        local_context: [b, l, d]. local_mask: bool [b, l]; a pair without locals counts as zero.
        temperature: tau_2, > 0.
        hard_negatives: N, >= 1; all negatives, if there are fewer.
        image_ids: integers [b]; locals of the same image are not negatives. Default: all distinct. With ``gather`` they
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
        cosines, _ = _TopProducts.apply(
            context, candidates, context_ids, candidate_ids, local_mask.flatten(), min(count, len(candidates))
        )
    return cosines / temperature


class _TopProducts(torch.autograd.Function):
    """The greatest inner products of [n, d] and [m, d] -> [n, k] and their indices; the gradient by sparse products."""

    @staticmethod
    def forward(
        context: Tensor, candidates: Tensor, ids: Tensor, candidate_ids: Tensor, valid: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        rows = max(_MIN_ROWS, _TILE_SIZE // len(candidates))
        values, indices = [], []
        for tile, tile_ids in zip(context.split(rows), ids.split(rows), strict=True):
            products = tile @ candidates.T
            products.masked_fill_((tile_ids[:, None] == candidate_ids) | ~valid, _EXCLUDED)
            best = products.topk(count, dim=1, sorted=False)
            values.append(best.values)
            indices.append(best.indices)
        return torch.cat(values), torch.cat(indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:2], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        context, candidates, indices = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if wants_graph():

            def statistic(context: Tensor, candidates: Tensor) -> Tensor:
                return (context @ candidates.T).gather(1, indices)

            return *dense_gradients(statistic, [context, candidates], needed, gradient), None, None, None, None
        if torch.compiler.is_compiling():  # which does not take sparse tensors
            dense = gradient.new_zeros(len(context), len(candidates)).scatter_(1, indices, gradient)
            return dense @ candidates, dense.T @ context, None, None, None, None
        row = torch.arange(len(context), device=context.device).repeat_interleave(indices.shape[1])
        positions, shape = torch.stack([row, indices.flatten()]), (len(context), len(candidates))
        selected = torch.sparse_coo_tensor(positions, gradient.flatten(), shape, check_invariants=False)
        context_gradient = torch.sparse.mm(selected, candidates) if needed[0] else None
        candidate_gradient = torch.sparse.mm(selected.t(), context) if needed[1] else None
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


class CRA(Term):
    """``L_CRA = L_cs + L_ca``: shared context enhancement and shared context alignment, as ``contrast_loss`` and
    ``triplet_loss``.

    L_cs is half of :func:`coder_plugin.functional.cra` of each branch that the head ``contexts`` has; without branches
    there is none. The hardest local features are those of all ranks, but each rank searches its own first: no rank
    holds the local features of another, nor the similarities of all pairs.

    L_ca is :func:`coder_plugin.functional.triplet` of the context-level score S_c.

    The options are those of both functions.

    Args:
        ca_on: ``context``: S_c as printed; ``combined``: one hinge on S_b + S_c, as in the authors' code, where it is the
            base's loss as well (S_b is the backbone's own score, without a concept level); ``none``: no L_ca.
        mask_same_image: pairs and locals of one image are not each other's negatives.

    Example:
        >>> CRA(margin=1.5)(torch.eye(2), torch.eye(2))  # context vectors alone: no branch, so no L_cs
        {'triplet_loss': tensor(1.)}
    """

    supports = frozenset({"same_image", "views"})

    def __init__(
        self,
        *,
        temperature: float = 0.7,
        hard_negatives: int = 512,
        margin: float = 0.2,
        hardest: bool = True,
        reduction: Reduction = "mean",
        ca_on: Literal["context", "combined", "none"] = "context",
        mask_same_image: bool = True,
    ) -> None:
        super().__init__()
        self.contrast_options: dict[str, Any] = {"temperature": temperature, "hard_negatives": hard_negatives}
        self.triplet_options: dict[str, Any] = {"margin": margin, "hardest": hardest, "reduction": reduction}
        check_cra_options(**self.contrast_options)
        check_triplet_options(**self.triplet_options)
        if ca_on not in ("context", "combined", "none"):
            raise ValueError(f"ca_on must be 'context', 'combined' or 'none', got {ca_on!r}")
        self.ca_on, self.mask_same_image = ca_on, mask_same_image
        #: Weight of S_c in the score that retrieval uses.
        self.score_weight = 1.0
        self.requires = ("coder_image_contexts", "coder_text_contexts")
        if ca_on == "combined":
            self.requires += ("image_features", "text_features")
        ids = ("coder_ids",) if mask_same_image else ()
        self.gathers = (*(self.requires if ca_on != "none" else ()), *ids)
        self.optional = (
            *ids,
            "coder_text_guide",
            "coder_image_locals",
            "coder_image_locals_mask",
            "coder_image_guide",
            "coder_text_locals",
            "coder_text_locals_mask",
        )

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        head = super().bind(heads, local_loss=local_loss).provider("coder_image_contexts")
        self.score_weight = head.score_weights()[1] if hasattr(head, "score_weights") else 0.0
        return self

    def compute(
        self,
        coder_image_contexts: Tensor,
        coder_text_contexts: Tensor,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        coder_ids: Tensor | None = None,
        coder_text_guide: Tensor | None = None,
        coder_image_locals: Tensor | None = None,
        coder_image_locals_mask: Tensor | None = None,
        coder_image_guide: Tensor | None = None,
        coder_text_locals: Tensor | None = None,
        coder_text_locals_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Context vectors [N, ·], features [N, D] and ids [N] of all ranks, this rank's guides [B, D] and locals [B, L or T, D]
        with masks -> scalars by name."""
        ids = coder_ids if self.mask_same_image else None
        losses = {}
        branches = (
            (coder_text_guide, coder_image_locals, coder_image_locals_mask),
            (coder_image_guide, coder_text_locals, coder_text_locals_mask),
        )
        contrasts = [
            self._contrast(guide, local, mask, ids)
            for guide, local, mask in branches
            if guide is not None and local is not None and mask is not None
        ]
        if contrasts:
            losses["contrast_loss"] = sum(contrasts[1:], contrasts[0]) / 2  # eq. 8; a single branch is halved too
        if self.ca_on != "none":
            pairs = self.pairs(coder_image_contexts, coder_text_contexts, ids)
            negatives = Dense(pairs.directions(pairs.anchors))
            if image_features is not None and text_features is not None:
                base = Dense(self.pairs(image_features, text_features, ids).directions(pairs.anchors))
                both = zip(base.similarity, negatives.similarity, strict=True)
                scores = [own + self.score_weight * context for own, context in both]
                negatives = Dense.of_scores(scores, base.masks, pairs.first(pairs.anchors))
            loss = hinge_loss(negatives, **self.triplet_options)
            losses["triplet_loss"] = sum_over_ranks(loss, pairs.anchors, self.triplet_options)
        if not losses:
            raise CoderError("cra(ca_on=none) with contexts.branches=none leaves nothing to learn: remove cra")
        return losses

    def _contrast(self, guide: Tensor, local: Tensor, mask: Tensor, ids: Tensor | None) -> Tensor:
        """One branch, for the pairs of this rank."""
        count = len(guide) * distributed.world_size()
        ids = (torch.arange(count, device=guide.device) if ids is None else ids)[rows_of_rank(count)]
        if distributed.world_size() == 1:
            return cra(guide, local, mask, image_ids=ids, **self.contrast_options)
        return cra(
            guide,
            local,
            mask,
            image_ids=ids,
            gather=distributed.gather,
            exchange=distributed.exchange,
            **self.contrast_options,
        )
