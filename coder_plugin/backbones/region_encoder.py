"""The image tower over region features: projection, context stage, pooling (VSE-infinity, CAMERA, VSRN).

Shapes: B batch, L regions, R their channels, D joint dimension, V views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coder_plugin.backbones.context import GatedSelfAttention, RegionGraph, Views, box_positions
from coder_plugin.backbones.gpo import GPO
from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.backbones.recurrent import GRU
from coder_plugin.backbones.region_options import Options
from coder_plugin.masked import greatest, last_state, mean, unit_channels, valid_first


class Encoded(NamedTuple):
    """Features of one tower: tokens before the context stage, as it returns them, and as the tower pools them, their mask, and
    the pooled feature."""

    locals: Tensor  # [B, L, ·]
    contexts: Tensor  # [B, L, ·]
    tokens: Tensor  # [B, L, ·]
    mask: Tensor  # bool [B, L]
    pooled: Tensor  # [B, D], or [B, V, D], not normalised
    scores: Tensor | None = None  # [B, L, V], for CAMERA's pooling


class RegionEncoder(nn.Module):
    """Region features -> tokens and a pooled feature.

    Projection: ``FC(x)``, with ``mlp`` plus ``Linear(ReLU(BN(Linear(x))))`` (VSE-infinity). Context: ``none``; ``camera``,
    gated self-attention with the boxes' positions; ``vsrn``, four graph layers. Before and after a context stage each channel
    is divided by its norm over the image's regions, as in the released code of CAMERA and VSRN; the encoder's ``contexts``
    are the stage's own output, before that second division. Pooling: ``gpo``, ``mean``, ``max``; ``views`` (CAMERA); ``gru``
    (VSRN), the last state of a GRU over the regions in their order.

    Args:
        options: the model's; those of its text tower are not read.

    Raises:
        ValueError: ``heads`` that do not divide D, or no views.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        region_dim, embed_dim = options.region_dim, options.embed_dim
        self.context, self.pooling, self.normalise_locals = options.context, options.image_pooling, options.normalise_locals
        self.fc = nn.Linear(region_dim, embed_dim)
        bound = math.sqrt(6 / (region_dim + embed_dim))
        nn.init.uniform_(self.fc.weight, -bound, bound)
        nn.init.zeros_(self.fc.bias)
        self.mlp = _MLP(region_dim, embed_dim // 2, embed_dim) if options.mlp else None
        self.attention = self.graph = None
        if self.context == "camera":
            self.attention = GatedSelfAttention(embed_dim, heads=options.heads, positions=options.boxes)
        elif self.context == "vsrn":
            self.graph = nn.ModuleList(RegionGraph(embed_dim) for _ in range(4))
        self.pool: GPO | Views | None = None
        if self.pooling == "gpo":
            self.pool = GPO(decoder=options.gpo_decoder)
        elif self.pooling == "views":
            self.pool = Views(embed_dim, views=options.views)
        self.rnn = GRU(embed_dim, embed_dim, batch_first=True) if self.pooling == "gru" else None
        self.norm = nn.BatchNorm1d(embed_dim) if options.batch_norm else None

    def forward(self, image: Mapping[str, Tensor]) -> Encoded:
        """Encode a dict of ``features`` [B, L, R], bool ``mask`` [B, L] with at least one region in each row and, optionally,
        ``boxes`` [B, L, 4] (fractions) and ``aspect`` [B]."""
        mask = image["mask"]
        # the largest tensor of the model: under autocast it is rounded once, here, and not by every layer that reads it
        features = image["features"].to(_compute_dtype(self.fc.weight))
        features = torch.where(mask[..., None], features, 0)
        projected = self.fc(features)
        if self.mlp is not None:
            projected = projected + self.mlp(features, mask)
        entering = contexts = tokens = projected
        if self.context != "none":
            if self.norm is None:
                entering = unit_channels(projected, mask)
            contexts = entering
            if self.attention is not None:
                boxes = torch.where(mask[..., None], image["boxes"], 0) if "boxes" in image else None
                positions = None if boxes is None else box_positions(boxes, image.get("aspect"))
                contexts = self.attention(contexts, mask, positions)
            for layer in self.graph or ():
                contexts = layer(contexts, mask)
            tokens = unit_channels(contexts, mask)
        pooled, scores = self._pooled(tokens, mask)
        return Encoded(entering if self.normalise_locals else projected, contexts, tokens, mask, pooled, scores)

    def _pooled(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.pool, Views):
            return self.pool(tokens, mask)
        if self.rnn is not None:
            rows, valid = valid_first(tokens, mask)
            pooled = last_state(self.rnn(rows)[0], valid)
        else:
            pooled = pool(self.pooling, self.pool, tokens, mask)
        return pooled if self.norm is None else self.norm(pooled), None


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Of the inputs of a linear layer."""
    kind = weight.device.type
    autocast = torch.is_autocast_enabled(kind) and weight.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if autocast else weight.dtype


class _MLP(nn.Module):
    """``Linear(ReLU(BN(Linear(x))))`` over the valid positions."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(inputs, hidden), MaskedBatchNorm(hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.norm(self.hidden(x), mask).relu())


def pool(kind: str, gpo: nn.Module | None, tokens: Tensor, mask: Tensor) -> Tensor:
    """Tokens [B, L, D] -> [B, D] over the valid positions, by ``gpo``, their ``mean`` or their ``max``."""
    if gpo is not None:
        return gpo(tokens, mask)
    return mean(tokens, mask) if kind == "mean" else greatest(tokens, mask)
