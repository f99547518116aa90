"""Somebody else's package: a loss with negatives out of a memory bank, and the head that keeps the bank.

    pip install ./third_party
    coder-plugin train --loss "theirs(temperature=0.05) + 0.5*dcl" --set their_bank.size=4096

Nothing in coder_plugin names it; the entry points in its pyproject.toml do. N batch of all ranks, Q bank, D dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.distributed import gather
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.losses.base import Term


class Bank(KeepsState):
    """The last ``size`` texts that were trained on, first in, first out."""

    requires = ("text_features",)
    provides = ("coder_their_texts",)

    def __init__(self, backbone: BackboneInfo, *, size: int = 1024) -> None:
        super().__init__()
        self.register_buffer("texts", torch.zeros(size, backbone.embed_dim))
        self.register_buffer("pointer", torch.tensor(0))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, text_features: Tensor) -> dict[str, Tensor]:
        return {"coder_their_texts": text_features.detach()}

    def write(self, texts: Tensor) -> None:
        """After the optimizer's step: what the loss stashed."""
        size = len(self.texts)
        texts = texts[-size:].to(self.texts)
        rows = (self.pointer + torch.arange(len(texts), device=texts.device)) % size
        self.texts[rows] = texts
        self.pointer.copy_((self.pointer + len(texts)) % size)
        self.count.copy_((self.count + len(texts)).clamp(max=size))


class Theirs(Term):
    """InfoNCE from images to texts, with the texts of the bank as further negatives."""

    requires = ("image_features", "text_features", "coder_their_texts")

    def __init__(self, *, temperature: float = 0.07) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        self.temperature = temperature

    def forward(self, image_features: Tensor, text_features: Tensor, coder_their_texts: Tensor) -> Tensor:
        images, texts = gather(image_features), gather(text_features)  # [N, D]
        bank = self.provider("coder_their_texts")
        bank.stash(texts=gather(coder_their_texts))
        unfilled = torch.arange(len(bank.texts), device=images.device) >= bank.count
        memory = (images @ bank.texts.to(images).T).masked_fill(unfilled, -torch.inf)  # [N, Q]
        logits = torch.cat([images @ texts.T, memory], dim=1) / self.temperature
        return F.cross_entropy(logits, torch.arange(len(images), device=images.device))
