"""Context stages over a set of regions or words: CAMERA's gated self-attention, VSRN's region graph.

Shapes: B batch, L positions, D dimensions, V views. Masks are bool [B, L], True where valid. Padding is never attended
to and counts in no statistic; the outputs at padding are undefined.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.tensors import upcast


class GatedSelfAttention(nn.Module):
    """Adaptive gating self-attention (CAMERA, Qu et al., ACM MM 2020), one layer with a residual.

    Per head, ``G = W_q q * W_k k`` gates query and key by two sigmoids of G before the scaled dot product; the result goes
    through BatchNorm and is added to the input. With boxes, queries, keys and values are computed from the input times
    ``sigmoid(W position)``.

    Args:
        dim: D.
        heads: number of attention heads, a divisor of D.
        positions: whether the input comes with boxes.
    """

    def __init__(self, dim: int, *, heads: int = 64, positions: bool = False) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide the dimension {dim}, got {heads}")
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        inner = dim // heads
        self.gate_query, self.gate_key = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.gate = nn.Linear(inner, 2 * inner)
        self.norm = MaskedBatchNorm(dim)
        self.position = nn.Linear(6, dim) if positions else None

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [B, L, D] with positions [B, L, 6] of :func:`box_positions` -> tokens [B, L, D]."""
        inputs = tokens
        if self.position is not None:
            if positions is None:
                raise ValueError("this context stage needs the regions' boxes, which the data lack")
            inputs = tokens * self.position(positions.to(tokens.dtype)).sigmoid()
        query, key, value = (self._split(linear(inputs)) for linear in (self.query, self.key, self.value))
        gates = self.gate(self.gate_query(query) * self.gate_key(key)).sigmoid()
        query_gate, key_gate = gates.chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(query * query_gate, key * key_gate, value, attn_mask=mask[:, None, None])
        return tokens + self.norm(mixed.transpose(1, 2).flatten(2), mask)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def box_positions(boxes: Tensor, aspect: Tensor | None = None) -> Tensor:
    """Boxes [B, L, 4] (left, top, right, bottom as fractions) -> [B, L, 6]: left, top, width, height, width / height in
    pixels, area. ``aspect`` [B] is the image's width / height (default: 1)."""
    left, top, right, bottom = boxes.unbind(-1)
    width, height = right - left, bottom - top
    shape = width / height.clamp(min=1e-4)  # boxes of height zero would give infinity
    if aspect is not None:
        shape = shape * aspect[:, None]
    return torch.stack((left, top, width, height, shape, width * height), -1)


class Views(nn.Module):
    """CAMERA's multi-view summarisation: V weighted sums of the regions, by dilated convolutions over their order.

    Seven convolutions, kernels 1, 3, 3, 3, 5, 5, 5 and dilations 1, 1, 2, 3, 1, 2, 3, of 256 and six times 128 channels,
    with ReLU, are concatenated. A linear layer maps them to a score of each region for each view; their softmax over the
    regions gives the weights.
    """

    def __init__(self, dim: int, *, views: int = 12) -> None:
        super().__init__()
        if views < 1:
            raise ValueError(f"views must be >= 1, got {views}")
        shapes = [(256, 1, 1), (128, 3, 1), (128, 3, 2), (128, 3, 3), (128, 5, 1), (128, 5, 2), (128, 5, 3)]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(dim, channels, kernel, dilation=dilation, padding=dilation * (kernel // 2))
            for channels, kernel, dilation in shapes
        )
        self.score = nn.Linear(1024, views)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, D] -> views [B, V, D] and the regions' scores for them [B, L, V], zero at padding."""
        rows = torch.where(mask[..., None], tokens, 0)
        x = rows.transpose(1, 2)
        features = torch.cat([convolution(x).relu() for convolution in self.convolutions], 1).transpose(1, 2)
        scores = self.score(features)
        with torch.autocast(tokens.device.type, enabled=False):
            weights = upcast(scores).masked_fill(~mask[..., None], -torch.inf).softmax(1)
            return weights.transpose(1, 2) @ upcast(rows), torch.where(mask[..., None], scores, 0)


class RegionGraph(nn.Module):
    """One layer of VSRN's region relationship reasoning (Li et al., ICCV 2019), with its residual.

    ``V* = BN(W (theta(V) phi(V)^T / n) g(V)) + V`` over the n valid regions; BN's weight starts at zero, so the layer
    starts as the identity.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm = MaskedBatchNorm(dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, L, D] -> tokens [B, L, D]."""
        relation = self.theta(tokens) @ self.phi(tokens).transpose(1, 2) / mask.sum(1)[:, None, None]
        message = relation @ torch.where(mask[..., None], self.g(tokens), 0)
        return self.norm(self.out(message), mask) + tokens
