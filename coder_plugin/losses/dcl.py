"""Diversity-sensitive contrastive loss of a batch of pairs (CODER eq. 3-5; docs/equations.md#dcl).

Shapes: n pairs, a anchors (n, or the share of one process), m hard negatives, d dimensions, N pairs of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from coder_plugin.contrast import Implementation, Negatives, Pairs
from coder_plugin.contrast.pairs import hard_negatives as hard_negatives_of
from coder_plugin.losses.banks import Banks
from coder_plugin.losses.base import HARD_NEGATIVES, Term
from coder_plugin.losses.diversity import Diversity, check_diversity_options, diversity_weights, needs_dense
from coder_plugin.tensors import Gather

#: The least 1 + S of a positive: the logarithm of an opposite positive stays finite.
_MIN_POSITIVE = 1e-6


@dataclass(kw_only=True, eq=False, repr=False)
class DCLOptions:
    """The options of :func:`dcl`, which ``m_dcl`` and ``concept_dcl`` share; :class:`ValueError` where one is out of range."""

    mu: float = 0.1
    gamma: float = 0.3
    epsilon: float = 0.1
    diversity: Diversity = "std"
    positive_weight: float | Literal["mu"] = 1.0
    diversity_gradient: bool = False
    effective_negatives: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.mu < math.inf:
            raise ValueError(f"mu must be > 0 and finite, got {self.mu}")
        if not math.isfinite(self.gamma):
            raise ValueError(f"gamma must be finite, got {self.gamma}")
        check_diversity_options(self.diversity, self.epsilon)
        weight, count = self.positive_weight, self.effective_negatives
        if weight != "mu" and (isinstance(weight, str) or not 0 <= weight < math.inf):
            raise ValueError(f"positive_weight must be a finite number >= 0 or 'mu', got {weight!r}")
        if count is not None and not 1 <= count < math.inf:
            raise ValueError(f"effective_negatives must be >= 1 or none, got {count}")


def anchor_losses(
    negatives: Negatives, weights: Tensor, options: DCLOptions, *, has_positive: bool = True
) -> Tensor:
    """The loss of each anchor (CODER eq. 5; eq. 4 where ``weights`` are 1), the core of ``dcl``, ``m_dcl`` and ``concept_dcl``.

    ``mu * log(1 + sum_neg exp((S - gamma) / (mu * div))) - positive_weight * log(1 + S_positive)``

    Args:
        weights: normalised diversity ``div`` of each anchor [k, a], in (0.5, 1].
        has_positive: False for anchors without a positive, such as bank entries, which keep the first term alone.

    Returns:
        [k, a]; an anchor without negatives keeps the term of its positive.
    """
    mu, positive_weight = options.mu, options.positive_weight
    sums = negatives.logsumexp((mu * weights).reciprocal(), options.gamma)
    if options.effective_negatives is not None:
        sums = sums + (options.effective_negatives / negatives.count().clamp(min=1).to(sums.dtype)).log()
    repulsion = mu * softplus(sums, threshold=40)  # above 40 it is the sum itself in float64 too
    if not has_positive:
        return repulsion
    attraction = negatives.positive.clamp(min=_MIN_POSITIVE - 1).log1p()
    weight = mu if positive_weight == "mu" else positive_weight
    return repulsion - (attraction if weight == 1 else weight * attraction)


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
    anchors: slice | None = None,
    gather: Gather | None = None,
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_valid: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Diversity-sensitive contrastive loss of a batch of pairs, both directions (CODER eq. 4, 5).

    For an anchor n with its positive p and its diversity div (see :func:`diversity`):
    ``mu * log(1 + sum_neg exp((S - gamma) / (mu * div))) - positive_weight * log(1 + S_np)``. It can be negative: with
    ``mu = 0.1`` and one negative per anchor its minimum is about -1.39.

    Use it in place of InfoNCE on L2-normalised features. It needs no learned temperature; ``mu`` and ``gamma`` are worth
    calibrating (0.05 and 0.5 on Flickr8k).

    Args:
        image_features: L2-normalised [n, d], or [n, v, d] if an image has several features; row i belongs to row i of
            ``text_features`` [n, d].
        image_ids: integers [n]; pairs of one image are not each other's negatives. Default: all distinct.
        mu: temperature, > 0.
        gamma: margin that is subtracted from the negatives' similarities.
        epsilon: of the diversity, > 0.
        diversity: ``"std"``, ``"entropy"`` or ``"none"``.
        positive_weight: weight of the positive's term, >= 0; ``"mu"`` is the formula as printed.
        bank_diversity: normalised diversity of image and text anchors over a memory bank, ([a], [a]); averaged with
            that over the batch (CODER, below eq. 6).
        diversity_gradient: let the gradient flow through the diversity weights.
        effective_negatives: >= 1: scale the sum over the negatives as if it had this many terms, so that the loss
            keeps its size at any batch size. None: the paper's plain sum.
        anchors: the rows of the batch that are anchors; the candidates stay all n. None: all rows.
        gather: collects the largest diversity of all processes, if ``anchors`` are one process's share.
        negatives: hard negatives: texts that are further negatives of the images [m, d], L2-normalised. Those of the texts
            stay the same.
        negative_ids: the ids of the images that ``negatives`` are captions of, integers [m]: of these images they are not
            negatives. An id that no image has stands for an unknown image. None: all are negatives.
        negative_valid: bool [m], False where there is no text. None: there is one everywhere.
        implementation: ``"reference"``: all similarities at once; ``"tiled"``: equal up to rounding, in memory that grows
            with n alone; ``"auto"``: tiles if they support the options (docs/equations.md#tiles).

    Returns:
        Scalar, float32 or float64: the mean over image anchors plus the mean over text anchors.

    Raises:
        ValueError: shapes that differ, an empty batch, options out of range.

    Example:
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> dcl(eye, eye)  # 2 * (0.1 * log(1 + exp(-3)) - log(2))
        tensor(-1.3766, dtype=torch.float64)
    """
    options = DCLOptions(
        mu=mu, gamma=gamma, epsilon=epsilon, diversity=diversity, positive_weight=positive_weight,
        diversity_gradient=diversity_gradient, effective_negatives=effective_negatives,
    )  # fmt: skip
    hard = hard_negatives_of(negatives, negative_ids, negative_valid, image_ids, dim=text_features.shape[-1])
    passed: dict[str, Any] = {"hard": hard, "anchors": anchors, "gather": gather, "implementation": implementation}
    pairs = Pairs(image_features, text_features, image_ids, **passed)
    return dcl_of_pairs(pairs, options, bank_diversity=bank_diversity)


def dcl_of_pairs(
    pairs: Pairs, options: DCLOptions, *, bank_diversity: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """:func:`dcl` of the pairs of a step."""
    diversity, gradient = options.diversity, options.diversity_gradient
    # with hard negatives each direction has products of its own, and a small matrix takes half the time
    form: dict[str, Any] = {"dense": needs_dense(diversity, gradient), "small": pairs.hard is None}
    negatives = pairs.negatives(pairs.anchors, **form)
    if diversity == "none":
        number = torch.promote_types(pairs.images.dtype, torch.float32)
        weights = pairs.images.new_ones(2, len(pairs.rows(pairs.ids, pairs.anchors)), dtype=number)
    else:
        passed: dict[str, Any] = {"kind": diversity, "epsilon": options.epsilon, "gradient": gradient}

        def compare(anchors: slice | None) -> list[Negatives]:
            return [negatives if anchors == pairs.anchors else pairs.negatives(anchors, **form)]

        (weights,) = diversity_weights(pairs, compare, **passed)
    if bank_diversity is not None:
        if any(each.shape != weights[0].shape for each in bank_diversity):
            raise ValueError(
                f"bank_diversity must have shape {tuple(weights[0].shape)} for images and for texts, got "
                + " and ".join(str(tuple(each.shape)) for each in bank_diversity)
            )
        weights = (weights + torch.stack(bank_diversity)) / 2
    losses = anchor_losses(negatives, weights, options)
    return losses.sum() / losses.shape[1]


@dataclass(kw_only=True, eq=False, repr=False)
class DCLTerm(DCLOptions, Term):
    """Base of the terms that share these options."""

    mask_same_image: bool = True

    def __post_init__(self) -> None:
        Term.__init__(self)
        super().__post_init__()
        if needs_dense(self.diversity, self.diversity_gradient):
            self.supports -= {"ring"}


@dataclass(kw_only=True, eq=False, repr=False)
class DCL(DCLTerm):
    """:func:`coder_plugin.functional.dcl` with the pairs of all ranks as candidates, and its options.

    Args:
        diversity_over: ``batch``, or ``batch+bank``: the mean of the diversity over the batch and that over the keys and
            entries of the momentum banks, which then exist with or without ``m_dcl``.
        mask_same_image: pairs of one image are not each other's negatives, nor are its captions that are hard negatives of
            others.
        hard_negatives: the hard negatives of all ranks' images are further negatives of every image.

    Example:
        >>> DCL(mu=0.1, diversity="none")(torch.eye(2), torch.eye(2))
        tensor(-1.3766)
    """

    supports = frozenset({"same_image", "views", "hard_negatives", "ring"})

    diversity_over: Literal["batch", "batch+bank"] = "batch"
    hard_negatives: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diversity_over not in ("batch", "batch+bank"):
            raise ValueError(f"diversity_over must be 'batch' or 'batch+bank', got {self.diversity_over!r}")
        if self.diversity_over == "batch+bank":
            self.requires += Banks.requires
        elif self.mask_same_image:
            self.optional = ("coder_ids",)
        if self.hard_negatives:
            self.requires += HARD_NEGATIVES
        self.gathers = (*self.requires, *self.optional)

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        coder_ids: Tensor | None = None,
        coder_image_keys: Tensor | None = None,
        coder_text_keys: Tensor | None = None,
        coder_negative_features: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Features [N, d], L2-normalised, image ids [N], momentum keys [N, d] and hard negatives [N, m, d] with their images'
        ids [N, m] -> scalar."""
        ids = coder_ids if self.mask_same_image else None
        pairs = self.pairs(image_features, text_features, ids, hard=(coder_negative_features, coder_negative_ids))
        bank_diversity = None
        if coder_image_keys is not None and coder_text_keys is not None and coder_ids is not None:
            banks = Banks(self, pairs, coder_image_keys, coder_text_keys, coder_ids, mask_same_image=self.mask_same_image)
            banks.stash()
            bank_diversity = banks.diversity(kind=self.diversity, epsilon=self.epsilon, gradient=self.diversity_gradient)
        return dcl_of_pairs(pairs, self, bank_diversity=bank_diversity)
