"""Pooling of tokens into the joint space, used instead of a tower's pooling (CODER eq. 9-11, docs/equations.md#gpo)."""

from __future__ import annotations

from torch import Tensor, nn

from coder_plugin.backbones.gpo import GPO, Decoder


class Aggregator(nn.Module):
    """Linear projection, then GPO.

    Args:
        channels: C. embed_dim: D.
        decoder: GPO's: ``linear``, as released, or ``mlp``, as CODER prints.

    Example:
        >>> import torch
        >>> Aggregator(4, 6)(torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)).shape
        torch.Size([2, 6])
    """

    def __init__(self, channels: int, embed_dim: int, *, decoder: Decoder = "linear") -> None:
        super().__init__()
        self.project = nn.Linear(channels, embed_dim)
        self.pool = GPO(decoder=decoder)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, L, C] and bool mask [B, L], True where valid -> pooled features [B, D], not normalised."""
        return self.pool(self.project(tokens.to(self.project.weight.dtype)), mask)
