"""Diversity-sensitive contrastive loss against coupled momentum banks (CODER eq. 6; docs/equations.md#m-dcl).

Shapes: n pairs, a anchors (n, or the share of one process), q bank entries, m hard negatives, d dimensions, N pairs of all
ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin.contrast import Block, Direction, Implementation, Negatives, Pairs
from coder_plugin.contrast.pairs import hard_negatives as hard_negatives_of
from coder_plugin.losses.banks import Banks, Memory
from coder_plugin.losses.base import hard_block
from coder_plugin.losses.dcl import DCLOptions, DCLTerm, anchor_losses
from coder_plugin.losses.diversity import diversity_weights, needs_dense, raw_diversity
from coder_plugin.tensors import Gather, check_range

Reverse = Literal["paired", "all", "none"]
DiversityOver = Literal["batch", "bank", "batch+bank"]


@dataclass(kw_only=True, eq=False, repr=False)
class MDCLOptions(DCLOptions):
    """The options of :func:`m_dcl`; :class:`ValueError` where one is out of range."""

    reverse: Reverse = "paired"
    diversity_over: DiversityOver = "batch+bank"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reverse not in ("paired", "all", "none"):
            raise ValueError(f"reverse must be 'paired', 'all' or 'none', got {self.reverse!r}")
        if self.diversity_over not in ("batch", "bank", "batch+bank"):
            raise ValueError(f"diversity_over must be 'batch', 'bank' or 'batch+bank', got {self.diversity_over!r}")


def _show_options(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a function the options of :func:`dcl` in its signature, in place of ``**options``."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    shared = inspect.signature(DCLOptions).parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return function


@_show_options
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
    reverse: Reverse = "paired",
    diversity_over: DiversityOver = "batch+bank",
    bank_diversity: tuple[Tensor, Tensor] | None = None,
    anchors: slice | None = None,
    gather: Gather | None = None,
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
    implementation: Implementation = "auto",
    **options: Any,
) -> Tensor:
    """DCL against coupled momentum banks: ``L_DCL(V, B_w) + L_DCL(W, B_v)`` (CODER eq. 6).

    The candidates of an anchor are the current keys of the batch followed by the valid bank entries. Its positive is
    the key of its own pair; keys and entries of its own image are never its negatives. The gradient flows to the live
    features only. By tiles, banks are read in their own dtype, one tile at a time.

    Use it beside :func:`dcl` where the batch is small: the banks hold thousands of negatives at the cost of one more
    forward pass, by the momentum towers.

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
        negatives: momentum features of hard negatives [m, d], texts that are further candidates of the live images; the
            diversity over the bank is over them too, if it is computed here. Other anchors do not see them.
        negative_ids, negative_valid: [m], as in :func:`dcl`.
        anchors, gather, implementation: as in :func:`dcl`.
        options: of :func:`dcl`, with its defaults: ``mu``, ``gamma``, ``epsilon``, ``diversity``, ``positive_weight``,
            ``diversity_gradient``, ``effective_negatives``.

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
    every = MDCLOptions(reverse=reverse, diversity_over=diversity_over, **options)
    banks = image_keys, text_keys, image_bank, text_bank
    _check_shapes(image_features, text_features, *banks, image_ids, bank_ids, bank_valid)
    check_range(image_keys=image_keys, text_keys=text_keys, image_bank=image_bank, text_bank=text_bank)
    hard = hard_negatives_of(negatives, negative_ids, negative_valid, image_ids, dim=image_features.shape[1])
    if hard is not None:
        hard = hard._replace(rows=hard.rows.detach())
    passed: dict[str, Any] = {"anchors": anchors, "gather": gather, "implementation": implementation}
    pairs = Pairs(image_features, text_features, image_ids, **passed)
    memory = Memory(
        (image_keys.detach(), text_keys.detach()),
        (image_bank.detach(), text_bank.detach()),
        pairs.ids,
        None if image_ids is None else bank_ids,
        bank_valid,
    )
    return m_dcl_of_pairs(pairs, memory, every, hard=hard, bank_diversity=bank_diversity)


def m_dcl_of_pairs(
    pairs: Pairs,
    memory: Memory,
    options: MDCLOptions,
    *,
    hard: Block | None = None,
    bank_diversity: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """:func:`m_dcl` of the pairs of a step."""
    diversity, gradient, diversity_over = options.diversity, options.diversity_gradient, options.diversity_over
    form: dict[str, Any] = {"dense": needs_dense(diversity, gradient)}
    number = torch.promote_types(pairs.images.dtype, torch.float32)

    def over_batch(anchors: slice | None) -> Negatives:
        return pairs.negatives(anchors, **form)

    def over_bank(anchors: slice | None) -> Negatives:
        images, texts = memory.directions(pairs, anchors)
        if hard is not None:
            images = images._replace(blocks=(*images.blocks, pairs.hard_block(hard, anchors)))
        return pairs.choose([images, texts], **form)

    def of_keys(anchors: slice | None) -> Negatives:
        """The keys of these pairs as anchors, against the live batch."""
        start, number = pairs.first(anchors), len(pairs.rows(pairs.ids, anchors))
        directions = [
            Direction(
                memory.keys[1 - side][start : start + number],
                (pairs.block(live, anchors),),
                0 if pairs.ring else start,
            )
            for side, live in enumerate((pairs.images, pairs.texts))
        ]
        return pairs.choose(directions, **form)

    comparisons = {"batch": over_batch} if "batch" in diversity_over else {}
    if "bank" in diversity_over and bank_diversity is None:
        comparisons["bank"] = over_bank
    if options.reverse == "paired":
        comparisons["keys"] = of_keys
    weights = dict.fromkeys(comparisons, pairs.images.new_ones(2, len(pairs.rows(pairs.ids, pairs.anchors)), dtype=number))
    if diversity != "none" and comparisons:
        stacked = diversity_weights(
            pairs,
            lambda anchors: [compare(anchors) for compare in comparisons.values()],
            kind=diversity,
            epsilon=options.epsilon,
            gradient=gradient,
        )
        weights = dict(zip(comparisons, stacked, strict=True))
    if bank_diversity is not None and "bank" in diversity_over:
        weights["bank"] = torch.stack(bank_diversity)
    over = torch.stack([weights[part] for part in ("batch", "bank") if part in weights]).mean(0)
    losses = anchor_losses(over_bank(pairs.anchors), over, options)
    loss = losses.sum() / losses.shape[1]
    if options.reverse == "paired":
        losses = anchor_losses(of_keys(pairs.anchors), weights["keys"], options)
        loss = loss + losses.sum() / losses.shape[1]
    elif options.reverse == "all":
        loss = loss + _all_bank_anchors(pairs, memory, form, options)
    return loss


def _all_bank_anchors(pairs: Pairs, memory: Memory, form: dict[str, Any], options: MDCLOptions) -> Tensor:
    """Keys and entries as anchors against the live batch, of both banks: the mean over the filled ones."""
    valid, live = memory.bank_valid, (pairs.images, pairs.texts)
    parts = []
    for rows, ids in ((memory.keys, memory.key_ids), (memory.banks, memory.bank_ids)):
        directions = [Direction(rows[1 - side], (Block(others, pairs.ids, ids),)) for side, others in enumerate(live)]
        if len(rows[0]):
            parts.append(pairs.choose(directions, **form))
    with torch.set_grad_enabled(options.diversity_gradient and torch.is_grad_enabled()):
        if options.diversity == "none":
            number = torch.promote_types(live[0].dtype, torch.float32)
            raw = [live[0].new_ones(2, len(each.directions[0].anchors), dtype=number) for each in parts]
        else:
            raw = [raw_diversity(each, kind=options.diversity, epsilon=options.epsilon) for each in parts]
        if valid is not None and len(raw) > 1:  # what is not filled must not have the greatest diversity
            raw[1] = torch.where(valid, raw[1], 1)
        largest = torch.cat(raw, 1).amax(1, keepdim=True)
        weights = [each / largest for each in raw]
    total = anchor_losses(parts[0], weights[0], options).sum()
    filled = len(memory.banks[0]) if valid is None else valid.sum()
    if len(parts) > 1:
        losses = anchor_losses(parts[1], weights[1], options, has_positive=False)
        total = total + (losses if valid is None else torch.where(valid, losses, 0)).sum()
    return total / (len(memory.key_ids) + filled)


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


@dataclass(kw_only=True, eq=False, repr=False)
class MDCL(MDCLOptions, DCLTerm):
    """:func:`coder_plugin.functional.m_dcl` with the keys of all ranks and the banks as candidates, and its options.

    Args:
        mask_same_image: keys and entries of an anchor's own image are not its negatives.
        hard_negatives: the momentum keys of the hard negatives of all ranks' images are further candidates of every live image.
            They are not written to the bank.
        warmup: the loss is zero until the bank holds this many entries, or is full.

    Example:
        >>> from types import SimpleNamespace
        >>> from coder_plugin.memory.bank import CoupledBank
        >>> head = SimpleNamespace(
        ...     provides=("coder_image_keys",), bank=CoupledBank(4, 2), stash=lambda **keys: print(*keys)
        ... )
        >>> term, eye = MDCL().bind({"momentum": head}, local_loss=False), torch.eye(2)
        >>> term(eye, eye, torch.arange(2), eye, eye)  # an empty bank: twice dcl
        image_keys text_keys ids
        tensor(-2.7532)
    """

    requires = ("image_features", "text_features", *Banks.requires)
    supports = frozenset({"same_image", "hard_negatives", "ring"})

    hard_negatives: bool = False
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup < 0:
            raise ValueError(f"warmup must be >= 0, got {self.warmup}")
        if self.hard_negatives:
            self.requires += ("coder_negative_keys", "coder_negative_ids")
        if self.reverse == "all":
            self.supports -= {"ring"}
        self.gathers = self.requires

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_ids: Tensor,
        coder_image_keys: Tensor,
        coder_text_keys: Tensor,
        coder_negative_keys: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Live features [N, d], L2-normalised, image ids [N], momentum keys [N, d] and those of hard negatives [N, m, d] with
        their images' ids [N, m] -> scalar."""
        pairs = self.pairs(image_features, text_features, coder_ids if self.mask_same_image else None)
        banks = Banks(self, pairs, coder_image_keys, coder_text_keys, coder_ids, mask_same_image=self.mask_same_image)
        banks.stash()
        hard = hard_block(coder_negative_keys, coder_negative_ids, pairs.ids if pairs.has_ids else None)
        bank_diversity = None
        if self.diversity == "std" and not self.diversity_gradient and hard is None and "bank" in self.diversity_over:
            # from the bank's running moments; the function would compute it from the similarities
            bank_diversity = banks.diversity(kind="std", epsilon=self.epsilon, gradient=False)
        loss = m_dcl_of_pairs(pairs, banks.memory, self, hard=hard, bank_diversity=bank_diversity)
        bank = banks.bank
        return loss * (bank.count >= min(self.warmup, bank.size)) if self.warmup else loss
