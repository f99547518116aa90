"""Local concept alignment over the global batch (SelfAlign eq. 1-4)."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional.lca_loss import check_lca_options, lca, lca_from_scores
from coder_plugin.heads.alignment import Alignment
from coder_plugin.losses.base import Term, options_of

Direction = Literal["word_to_region", "region_to_word", "dual"]


class LCA(Term):
    """:func:`coder_plugin.functional.lca`: each word predicts the prototypes of its most similar region of the pair's
    image. It takes that function's options; Sinkhorn balances the prototypes over all ranks.

    Which words count and how many prototypes there are is set on the head: ``alignment.words``, ``alignment.prototypes``.
    The head logs the loss's two parts, its targets' entropy and the divergence from them, as ``coder/alignment/entropy`` and
    ``coder/alignment/divergence``.

    Args:
        direction: ``word_to_region``, as in the paper; ``region_to_word``: each region predicts the prototypes of its most
            similar word; ``dual``: the mean of both.

    Example:
        >>> import torch
        >>> cosines = torch.eye(2)[None]  # of two words, or two regions, with two prototypes
        >>> mask, matched = torch.ones(1, 2, dtype=torch.bool), torch.arange(2)[None]
        >>> LCA(temperature=0.5, assignment="softmax")(cosines, mask, cosines, mask, matched)
        tensor(0.3653)
    """

    @options_of(lca)
    def __init__(self, *, direction: Direction = "word_to_region", **options: Any) -> None:
        super().__init__()
        check_lca_options(**options)
        self.options = options
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
        if isinstance(head, Alignment):
            head.stash(loss=loss.detach(), entropy=entropy)
        return loss
