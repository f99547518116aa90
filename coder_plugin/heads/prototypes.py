"""Prototypes of pairs and their classifier (CODER eq. 7, docs/equations.md#pgc)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.memory.kmeans import OnlineKMeans


class Prototypes(KeepsState):
    """One linear classifier P_C without bias over both concept embeddings, and the centres that label the pairs.

    Requires ``coder_image_concepts`` and ``coder_text_concepts`` [B, D]. Provides ``coder_image_logits`` and
    ``coder_text_logits`` [B, K].

    The term ``pgc`` takes its labels from :meth:`assign` and stashes the pairs that update the centres after the step.

    Args:
        clusters: K. The paper has 10,000 for Flickr30K and 20,000 for COCO; for small sets about pairs / 15.
        patience: a centre that none of the last ``patience * clusters`` pairs chose is reseeded; >= 1.
        recluster: number of pairs after which the last so many pairs are clustered anew with FAISS; the new centres are
            matched to the old ids. The samples of an epoch: once per epoch. The pairs are kept in float16, ``recluster * D *
            2`` bytes of state. 0: online updates only.

    Raises:
        ValueError: options out of range.

    Example:
        >>> head = Prototypes(BackboneInfo(embed_dim=4), clusters=3)
        >>> head(torch.randn(2, 4), torch.randn(2, 4))["coder_image_logits"].shape
        torch.Size([2, 3])
    """

    recent: Tensor
    passed: Tensor

    requires = ("coder_image_concepts", "coder_text_concepts")
    provides = ("coder_image_logits", "coder_text_logits")
    data_options = ("clusters",)

    def __init__(self, backbone: BackboneInfo, *, clusters: int = 10_000, patience: float = 30.0, recluster: int = 0) -> None:
        super().__init__()
        if recluster and recluster < clusters:
            raise ValueError(f"recluster={recluster} pairs cannot make clusters={clusters}")
        self.recluster = recluster
        self.classifier = nn.Linear(backbone.embed_dim, clusters, bias=False)
        self.centres = OnlineKMeans(clusters, backbone.embed_dim, patience=patience)
        if recluster:
            self.register_buffer("recent", torch.zeros(recluster, backbone.embed_dim, dtype=torch.float16))
            self.register_buffer("passed", torch.zeros((), dtype=torch.int64))

    def forward(self, coder_image_concepts: Tensor, coder_text_concepts: Tensor) -> dict[str, Tensor]:
        with torch.autocast(coder_image_concepts.device.type, enabled=False):
            weight = self.classifier.weight
            return {
                "coder_image_logits": F.linear(coder_image_concepts.to(weight.dtype), weight).float(),
                "coder_text_logits": F.linear(coder_text_concepts.to(weight.dtype), weight).float(),
            }

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """``clusters``: pairs / 15, at most the paper's 10,000. Where one caption is drawn, an image counts as five pairs."""
        if "clusters" in options:
            return {}
        pairs = facts.samples_per_epoch * (5 if facts.captions == "draw" else 1)
        return {"clusters": max(2, min(10_000, pairs // 15))}

    def check(self, *, batch: int, samples: int) -> None:
        if self.classifier.out_features > samples:
            raise ValueError(
                f"clusters={self.classifier.out_features} is more than the {samples} samples of the whole run, so the "
                f"term would stay silent: lower it (--set prototypes.clusters={max(2, samples // 15)}) or train longer"
            )

    @torch.no_grad()
    def assign(self, samples: Tensor) -> Tensor:
        """The nearest centre of each pair [n, D] -> int64 [n]."""
        return self.centres.assign(samples)

    def health(self) -> dict[str, float]:
        """Figures of the centres.

        ``filled``: share of filled centres. ``idle``: share of the filled ones that none of the last ``patience * K / 2`` pairs
        chose. ``reseeded``: number reseeded so far, divided by K. ``used``: perplexity of the centres' counts, divided by K: 1
        if all clusters have the same size.
        """
        centres = self.centres
        total, filled = centres.clusters, int(centres.filled)
        figures = {"filled": filled / total, "reseeded": int(centres.reseeded) / total}
        if filled:
            unseen = centres.seen - centres.last_seen[:filled]
            figures["idle"] = float((unseen > centres.patience * total / 2).float().mean())
            share = centres.counts[:filled].double() / centres.counts[:filled].sum().clamp(min=1)
            figures["used"] = float(torch.special.entr(share).sum().exp()) / total
        return figures

    def write(self, samples: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        self.centres.update(samples, labels)
        if self.recluster:
            self._remember(samples[-self.recluster :])

    def _remember(self, samples: Tensor) -> None:
        before = int(self.passed)
        positions = (before + torch.arange(len(samples), device=samples.device)) % self.recluster
        self.recent[positions] = samples.to(self.recent.dtype)
        self.passed += len(samples)
        if (before + len(samples)) // self.recluster > before // self.recluster:
            self.centres.recluster(self.recent)
