"""SelfAlign's local concept alignment: words and regions that share prototypes (eq. 1-4; docs/equations.md#selfalign).

Shapes: b pairs, t words, l regions, d dimensions, k prototypes. Masks are bool, True where valid. Padding never
counts, and an index at a padded position means nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coder_plugin import distributed
from coder_plugin.losses.base import Term
from coder_plugin.masked import check_mask, unit_tokens
from coder_plugin.tensors import Gather, check_range, check_temperature, is_on_cpu, unit, upcast

Assignment = Literal["sinkhorn", "softmax"]
Direction = Literal["word_to_region", "region_to_word", "dual"]

#: Below it the exponentials of Sinkhorn's scaling leave float32's range.
_MIN_EPSILON = 0.03


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

    Use it where both towers give tokens and their last stage trains: it aligns words with regions without any box labels.

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
    # of valid words only where reading the mask does not synchronise: most positions of a text are padding
    if is_on_cpu(mask):
        row, column = mask.nonzero(as_tuple=True)
    else:
        position = torch.arange(mask.numel(), device=mask.device)
        row, column = position // mask.shape[1], position % mask.shape[1]
    valid = mask[row, column]
    logits = upcast(scores[row, column]) / temperature
    with torch.no_grad():
        targets = upcast(target_scores[row, matched[row, column]])
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
    kernel = upcast(scores).sub(1).div_(epsilon).exp_()  # cosines are at most 1: nothing overflows
    kernel = kernel.mul_(mask[..., None]).flatten(0, -2)
    region_scale = kernel.new_ones(len(kernel))
    with torch.autocast(scores.device.type, enabled=False):
        for step in range(iterations):
            sums = region_scale @ kernel
            sums = (sums if total is None else total(sums)).clamp(min=torch.finfo(sums.dtype).tiny)  # 0 without any region
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
    if not _MIN_EPSILON <= epsilon < torch.inf:
        raise ValueError(f"epsilon must be >= {_MIN_EPSILON} and finite, got {epsilon}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")


class LCA(Term):
    """:func:`coder_plugin.functional.lca`: each word predicts the prototypes of its most similar region of the pair's
    image. The options are that function's; Sinkhorn balances the prototypes over all ranks.

    Which words count and how many prototypes there are is set on the head: ``alignment.words``, ``alignment.prototypes``.
    The head logs the loss's two parts, its targets' entropy and the divergence from them, as ``coder/alignment/entropy`` and
    ``coder/alignment/divergence``.

    Args:
        direction: ``word_to_region``, as in the paper; ``region_to_word``: each region predicts the prototypes of its most
            similar word; ``dual``: the mean of both.

    Example:
        >>> cosines = torch.eye(2)[None]  # of two words, or two regions, with two prototypes
        >>> mask, matched = torch.ones(1, 2, dtype=torch.bool), torch.arange(2)[None]
        >>> LCA(temperature=0.5, assignment="softmax")(cosines, mask, cosines, mask, matched)
        tensor(0.3653)
    """

    def __init__(
        self,
        *,
        temperature: float = 0.1,
        assignment: Assignment = "sinkhorn",
        epsilon: float = 0.05,
        iterations: int = 2,
        direction: Direction = "word_to_region",
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "temperature": temperature, "assignment": assignment, "epsilon": epsilon, "iterations": iterations,
        }  # fmt: skip
        check_lca_options(**self.options)
        matches = {
            "word_to_region": ("coder_word_regions",),
            "region_to_word": ("coder_region_words",),
            "dual": ("coder_word_regions", "coder_region_words"),
        }
        if direction not in matches:
            raise ValueError(f"direction must be one of {', '.join(matches)}, got {direction!r}")
        scores = ("coder_word_scores", "coder_word_mask", "coder_region_scores", "coder_region_mask")
        self.requires = (*scores, *matches[direction])

    def forward(
        self,
        coder_word_scores: Tensor,
        coder_word_mask: Tensor,
        coder_region_scores: Tensor,
        coder_region_mask: Tensor,
        coder_word_regions: Tensor | None = None,
        coder_region_words: Tensor | None = None,
    ) -> Tensor:
        """This rank's cosines with the prototypes [B, T, K] and [B, L, K], masks and matches [B, T] and [B, L] -> scalar."""
        words, regions = (coder_word_scores, coder_word_mask), (coder_region_scores, coder_region_mask)
        parts = []
        if coder_word_regions is not None:
            parts.append(lca_from_scores(*words, *regions, coder_word_regions, total=distributed.all_sum, **self.options))
        if coder_region_words is not None:
            # a region has no word to match if no word of its text counts
            predicting = coder_region_mask & coder_word_mask.any(1, keepdim=True)
            sides = (coder_region_scores, predicting, *words, coder_region_words)
            parts.append(lca_from_scores(*sides, total=distributed.all_sum, **self.options))
        losses, entropies = zip(*parts, strict=True)
        loss, entropy = (sum(values[1:], values[0]) / len(values) for values in (losses, entropies))
        head = self.provider("coder_word_scores") if self.heads else None
        if head is not None and hasattr(head, "stash"):  # which logs both
            head.stash(loss=loss.detach(), entropy=entropy)
        return loss
