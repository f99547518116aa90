"""Context relation alignment: one modality's context guides the other's locals (SelfAlign eq. 5-10).

Equations and choices: docs/equations.md#selfalign. Shapes: B batch, L regions, T words, D joint dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import Scores
from coder_plugin.masked import mean, unit_tokens
from coder_plugin.tensors import unit

Branches = Literal["both", "text_global", "image_global", "none"]
Gate = Literal["linear", "mlp"]
Score = Literal["cosine_of_mean", "mean_of_cosines"]
_SIDES = ("image", "text")


class Guide(nn.Module):
    """The guide ``s = ReLU(BN(W g + b))`` (eq. 5) of a mean context g, and ``f = gate * s + (1 - gate) * g`` (eq. 9).

    Args:
        dim: D.
        gate: ``linear``: ``sigmoid(W_g [s, g] + b_g)``, one value per dimension. ``mlp``: two layers and one value, as
            in the authors' code. With either, CRA and LCA together have the 27.3 M parameters at D 2,048 that table IV gives
            for CRA.
    """

    def __init__(self, dim: int, gate: Gate) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(dim, dim), MaskedBatchNorm(dim, across_ranks=True)
        linear = nn.Linear(2 * dim, dim)
        self.gate = linear if gate == "linear" else nn.Sequential(linear, nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Mean contexts [B, D] -> guides [B, D] and fusions [B, D]."""
        context = context.to(self.project.weight.dtype)
        guide = self.norm(self.project(context)).relu()
        gate = self.gate(torch.cat([guide, context], -1)).sigmoid()
        return guide, gate * guide + (1 - gate) * context


class Contexts(Scores):
    """The context score S_c, and the features that context relation alignment contrasts.

    With the means v_g and t_g of the context features v_i and t_i, the guides v_s, t_s and fusions v_f, t_f of
    :class:`Guide`, and the locals ``v*_i = ReLU(BN(v_i))``, ``t*_i`` with means v*_g, t*_g:
    ``S_c = (cos(t_f, v*_g) + cos(v_f, t*_g)) / 2`` (eq. 10). It is the inner product of two vectors per item and adds
    to the score as ``S_b + weight * S_c`` (eq. 14).

    Requires ``image_contexts`` [B, L, D] and ``text_contexts`` [B, T, D], the context stage's outputs, with their bool
    masks ``image_context_mask`` [B, L] and ``text_context_mask`` [B, T], and ``text`` [B, T].

    Provides ``coder_image_contexts`` and ``coder_text_contexts``, those vectors, [B, 2 D], or [B, D] with one branch or
    none. For the term ``cra``: ``coder_text_guide`` [B, D], ``coder_image_locals`` [B, L, D] and
    ``coder_image_locals_mask`` [B, L] of the branch T-global/V-local; ``coder_image_guide``, ``coder_text_locals`` and
    ``coder_text_locals_mask`` of V-global/T-local.

    The BatchNorms use the statistics of all ranks, without padding.

    Args:
        branches: ``both``; ``text_global`` or ``image_global`` alone, with its projection, fusion and half of eq. 10;
            ``none``: ``S_c = cos(v_g, t_g)`` without parameters.
        gate: of the fusion, see :class:`Guide`.
        score: ``cosine_of_mean``: v*_g and t*_g are the means of the locals, as eq. 10 prints. ``mean_of_cosines``:
            each local feature is normalised first, so that a term of S_c is the mean of the locals' cosines, as in the
            authors' code; the vectors are then shorter. Without branches it changes nothing.
        weight: of S_c in the score, >= 0; 0 leaves the context block out.

    Raises:
        ValueError: a negative weight, or contexts of different numbers of channels.

    Example:
        >>> head = Contexts(BackboneInfo(embed_dim=4, image_contexts=4, text_contexts=4))
        >>> contexts, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
        >>> out = head(contexts, mask, contexts, mask, torch.zeros(2, 3, dtype=torch.int64))
        >>> out["coder_image_contexts"].shape, out["coder_text_guide"].shape
        (torch.Size([2, 8]), torch.Size([2, 4]))
    """

    requires = ("image_contexts", "image_context_mask", "text_contexts", "text_context_mask", "text")
    provides = (
        "coder_image_contexts",
        "coder_text_contexts",
        "coder_text_guide",
        "coder_image_locals",
        "coder_image_locals_mask",
        "coder_image_guide",
        "coder_text_locals",
        "coder_text_locals_mask",
    )
    feature_keys = ("coder_image_contexts", "coder_text_contexts")
    adds_score = True

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        branches: Branches = "both",
        gate: Gate = "linear",
        score: Score = "cosine_of_mean",
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        if score not in get_args(Score):
            raise ValueError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}")
        if weight < 0:
            raise ValueError(f"weight must be >= 0, got {weight}")
        if not backbone.image_contexts or backbone.image_contexts != backbone.text_contexts:
            raise ValueError(
                f"the contexts of images ({backbone.image_contexts} channels) and texts ({backbone.text_contexts}) "
                "must share a space, and this model's do not"
            )
        dim, self.score, self.weight = backbone.image_contexts, score, weight
        guided = {"both": _SIDES, "text_global": ("text",), "image_global": ("image",), "none": ()}[branches]
        self.guides = nn.ModuleDict({side: Guide(dim, gate) for side in guided})
        self.block_dim = dim * max(1, len(guided))
        # keyed by the side of the locals, which the other side guides
        self.norms = nn.ModuleDict({_other(side): MaskedBatchNorm(dim, across_ranks=True) for side in guided})

    def forward(
        self,
        image_contexts: Tensor,
        image_context_mask: Tensor,
        text_contexts: Tensor,
        text_context_mask: Tensor,
        text: Tensor,
    ) -> dict[str, Tensor]:
        out = {}
        sides = {"image": (image_contexts, image_context_mask), "text": (text_contexts, text_context_mask)}
        for side, (contexts, mask) in sides.items():
            guide, locals_, block = self._side(side, contexts, mask)
            out[f"coder_{side}_contexts"] = block
            if guide is not None:
                out[f"coder_{side}_guide"] = guide
            if locals_ is not None:
                # towers cut padding, to another length in each batch
                length = (text if side == "text" else image_context_mask).shape[1]
                out[f"coder_{side}_locals"] = F.pad(locals_, (0, 0, 0, length - locals_.shape[1]))
                out[f"coder_{side}_locals_mask"] = F.pad(mask, (0, length - mask.shape[1]))
        return out

    def score_weights(self) -> tuple[float, float]:
        return 1.0, self.weight

    @contextlib.contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """Inside the context the score uses this weight."""
        saved, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = saved

    def image_block(self, features: Mapping[str, Tensor]) -> Tensor:
        return self._side("image", features["image_contexts"], features["image_context_mask"])[2]

    def text_block(self, features: Mapping[str, Tensor]) -> Tensor:
        return self._side("text", features["text_contexts"], features["text_context_mask"])[2]

    @torch.no_grad()
    def maps(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Relevance of each local feature to the other side's context (the paper's figure 4e).

        ``image`` [B, L]: cosines of a pair's text guide and its regions. ``text`` [B, T]: cosines of its image guide
        and its words. -inf at padding. Only the branches that the head has.
        """
        masks = {side: features[f"{side}_context_mask"] for side in _SIDES}
        sides = {side: self._side(side, features[f"{side}_contexts"], mask) for side, mask in masks.items()}
        out = {}
        for side, (_, locals_, _) in sides.items():
            guide = sides[_other(side)][0]
            if guide is not None and locals_ is not None:
                cosines = (unit(locals_) * unit(guide)[:, None]).sum(-1)
                out[side] = cosines.masked_fill(~masks[side], -torch.inf)
        return out

    def _side(self, side: str, contexts: Tensor, mask: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """A side's guide [B, D] and locals [B, L or T, D], or None without the branch, and its block of the score."""
        context = mean(contexts, mask)
        guide = locals_ = None
        blocks = []
        if side in self.guides:
            guide, fused = self.guides[side](context)
            blocks.append(unit(fused))
        if side in self.norms:
            locals_ = self.norms[side](contexts, mask).relu()
            of_mean = self.score == "cosine_of_mean"
            blocks.append(unit(mean(locals_, mask)) if of_mean else mean(unit_tokens(locals_, mask), mask))
        # [v*_g ; v_f] and [t_f ; t*_g]: a branch has the same position on both sides
        blocks = blocks[::-1] if side == "image" else blocks
        if not blocks:
            return None, None, unit(context)
        return guide, locals_, torch.cat(blocks, -1) / 2**0.5  # eq. 10, also with one branch


def _other(side: str) -> str:
    return "text" if side == "image" else "image"
