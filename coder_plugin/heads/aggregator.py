"""Pooling of tokens into the joint space: an instance branch of our own in place of a tower's (METHODS 7)."""

from __future__ import annotations

from torch import Tensor, nn

from coder_plugin.backbones.gpo import GPO


class Aggregator(nn.Module):
    """Tokens [B, L, C] and mask [B, L] -> pooled features [B, D], not normalised: projection, then GPO."""

    def __init__(self, channels: int, embed_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, embed_dim)
        self.pool = GPO()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.pool(self.project(tokens.to(self.project.weight.dtype)), mask)
