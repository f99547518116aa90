"""InfoNCE, as open_clip's own loss computes it: the baseline (docs/equations.md#tiles).

Shapes: n pairs, a anchors (n, or the share of one process), m hard negatives, d dimensions, N pairs of all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import softplus

from coder_plugin import distributed
from coder_plugin.contrast import Dense, Negatives, Pairs
from coder_plugin.losses.base import HARD_NEGATIVES, Term


def infonce(negatives: Negatives, scale: Tensor, further: Negatives | None = None) -> Tensor:
    """``-log(e^(s S+) / (e^(s S+) + sum_neg e^(s S)))`` of each anchor [2, a], >= 0.

    Args:
        scale: s = 1 / temperature, > 0, 0-d.
        further: negatives of the images alone, of which those above the image's positive do not count (AsCL's noised texts).
    """
    sums = negatives.logsumexp(scale)
    positive = (negatives.positive * scale).expand_as(sums)
    # log(1 + e^x), which has all derivatives where a sum is empty, that is -inf
    losses = softplus(sums - positive, threshold=40)
    if further is not None:
        noised = further.logsumexp(scale, ceiling=negatives.positive.expand_as(sums)[:1].detach())
        images = losses[:1] + softplus(noised - positive[:1] - losses[:1], threshold=40)
        losses = torch.cat([images, losses[1:]])
    return losses


def clip_of_pairs(pairs: Pairs, logit_scale: Tensor) -> Tensor:
    """``open_clip.ClipLoss`` of the pairs of a step: the mean of both directions' cross-entropies, a scalar."""
    if pairs.hard is None and pairs.form(pairs.directions(pairs.anchors), small=False) is Dense:
        # the order of upstream's products, on which the last bits depend, and its precision under autocast
        rows, texts = (pairs.rows(side, pairs.anchors) for side in (pairs.images, pairs.texts))
        of_images = logit_scale * rows @ pairs.texts.T
        if pairs.anchors is None and distributed.world_size() > 1:
            of_texts = of_images.T
        else:
            of_texts = logit_scale * texts @ pairs.images.T
        labels = pairs.rows(pairs.ids, pairs.anchors)
        return (F.cross_entropy(of_images, labels) + F.cross_entropy(of_texts, labels)) / 2
    scale = logit_scale.to(torch.promote_types(pairs.images.dtype, torch.float32)).reshape(())
    return infonce(pairs.negatives(pairs.anchors, small=False), scale).mean()


class Clip(Term):
    """``open_clip.ClipLoss`` (Radford et al., 2021), gathered with gradient. Every other pair of the global batch is a
    negative, other captions of the same image included.

    Up to 2,048 x 2,048 similarities it is computed as open_clip computes it: under autocast the products are in bfloat16 or
    float16, unlike those of all other losses of pairs here. Above that it is computed by tiles, in float32.

    Args:
        hard_negatives: the hard negatives of all ranks' images are further negatives of every image that they are not captions
            of.

    Example:
        >>> Clip()(torch.eye(2), torch.eye(2), torch.tensor(2.0))  # log(1 + exp(-2))
        tensor(0.1269)
    """

    requires: tuple[str, ...] = ("image_features", "text_features", "logit_scale")
    optional: tuple[str, ...] = ("logit_bias",)
    gathers: tuple[str, ...] = ("image_features", "text_features")
    supports = frozenset({"hard_negatives", "ring"})

    def __init__(self, *, hard_negatives: bool = False) -> None:
        super().__init__()
        if hard_negatives:
            self.requires += HARD_NEGATIVES
            self.optional += ("coder_ids",)
            self.gathers += (*HARD_NEGATIVES, "coder_ids")

    def compute(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        coder_ids: Tensor | None = None,
        coder_negative_features: Tensor | None = None,
        coder_negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Features [N, d], L2-normalised, the model's scale and bias, image ids [N] and hard negatives [N, m, d] with their
        images' ids [N, m] -> scalar."""
        hard = coder_negative_features, coder_negative_ids
        pairs = self.pairs(image_features, text_features, hard=hard, hard_ids=coder_ids)
        loss = clip_of_pairs(pairs, logit_scale)
        # a bias that all logits share changes nothing; its gradient is zero
        return loss if logit_bias is None else loss + 0 * logit_bias.sum()
