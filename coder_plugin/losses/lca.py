"""Local concept alignment over the global batch (SelfAlign eq. 1-4; METHODS 9)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from coder_plugin import distributed
from coder_plugin.functional import Assignment, check_lca_options, directed_lca, sinkhorn_bias
from coder_plugin.losses.base import Term

Direction = Literal["word_to_region", "region_to_word", "dual"]


class LCA(Term):
    """:func:`coder_plugin.functional.lca`: each word predicts the prototypes of its most similar region of the pair's image.

    Which words count and how many prototypes there are is said to the head: ``alignment.words``, ``alignment.prototypes``.

    Args:
        temperature: tau_1, of the predictions.
        assignment: ``sinkhorn``, balanced over the regions (or words) of all ranks, or ``softmax``, as eq. 2 prints.
        epsilon: Sinkhorn's sharpness. iterations: of Sinkhorn.
        direction: ``word_to_region``, the paper's; ``region_to_word``, where each region predicts the prototypes of its most
            similar word; ``dual``, the mean of both.
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
        check_lca_options(temperature=temperature, assignment=assignment, epsilon=epsilon, iterations=iterations)
        self.temperature, self.assignment = temperature, assignment
        self.epsilon, self.iterations = epsilon, iterations
        matched = {
            "word_to_region": ("coder_word_regions",),
            "region_to_word": ("coder_region_words",),
            "dual": ("coder_word_regions", "coder_region_words"),
        }
        if direction not in matched:
            raise ValueError(f"direction must be one of {', '.join(matched)}, got {direction!r}")
        scores = ("coder_word_scores", "coder_word_mask", "coder_region_scores", "coder_region_mask")
        self.requires = (*scores, *matched[direction])

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
        losses = []
        if coder_word_regions is not None:
            losses.append(self._directed(*words, *regions, coder_word_regions))
        if coder_region_words is not None:
            # a region has no word to predict where no word of its text counts
            read = coder_region_mask & coder_word_mask.any(1, keepdim=True)
            losses.append(self._directed(coder_region_scores, read, *words, coder_region_words))
        return sum(losses[1:], losses[0]) / len(losses)

    def _directed(self, scores: Tensor, mask: Tensor, targets: Tensor, target_mask: Tensor, matched: Tensor) -> Tensor:
        bias = None
        if self.assignment == "sinkhorn":
            bias = sinkhorn_bias(
                targets, target_mask, epsilon=self.epsilon, iterations=self.iterations, total=distributed.all_sum
            )
        return directed_lca(
            scores, mask, targets, matched, bias, temperature=self.temperature, epsilon=self.epsilon
        )
