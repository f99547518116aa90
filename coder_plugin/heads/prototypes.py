"""Prototypes of pairs and their classifier (CODER eq. 7, docs/equations.md#pgc)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.capabilities import KeepsState
from coder_plugin.memory.host_value import HostValue
from coder_plugin.memory.kmeans import OnlineKMeans
from coder_plugin.memory.rows import replace_rows

#: The set that is clustered holds at most this many pairs for each prototype.
_PAIRS_PER_CLUSTER = 30


class Prototypes(KeepsState):
    """One linear classifier P_C without bias over both concept embeddings, and the centres that label the pairs.

    Requires ``coder_image_concepts`` and ``coder_text_concepts`` [B, D], and ``image_features`` and ``text_features``
    [B, D]. Provides ``coder_image_logits`` and ``coder_text_logits`` [B, K], float32, and ``coder_prototype_labels``,
    int64 [B]: the nearest centre of each pair ``normalize(image_features + text_features)``, without gradient, all 0
    before the first clustering.

    The term ``pgc`` stashes the pairs and labels of all ranks, which update the centres after the step. After every
    ``recluster`` pairs, an epoch by default, the last pairs are clustered again; before the first clustering the term
    is zero. Ids keep their clusters, except those that had become empty: their classifier rows are re-initialised, and
    so are the optimizer's moments of these rows.

    Args:
        clusters: K, >= 1. The paper has 10,000 for Flickr30K and 20,000 for COCO, about three images each; for small
            sets about pairs / 15.
        recluster: number of pairs between two clusterings, >= K. At most 30 K of them are kept for it, in float16.
            None: an epoch where a trainer knows its length, else 30 K.
        scale: factor on the logits, > 0; the paper has none, that is 1.

    Raises:
        ValueError: options out of range.

    Example:
        >>> head, features = Prototypes(BackboneInfo(embed_dim=4), clusters=3), torch.randn(4, 2, 4)
        >>> out = head(*features)
        >>> out["coder_image_logits"].shape, out["coder_prototype_labels"]
        (torch.Size([2, 3]), tensor([0, 0]))
    """

    recent: Tensor
    recent_labels: Tensor
    passed: Tensor
    changed: Tensor
    restarted: Tensor

    requires = ("coder_image_concepts", "coder_text_concepts", "image_features", "text_features")
    provides = ("coder_image_logits", "coder_text_logits", "coder_prototype_labels")
    data_options = ("clusters", "recluster")

    def __init__(
        self, backbone: BackboneInfo, *, clusters: int = 10_000, recluster: int | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.recluster = _PAIRS_PER_CLUSTER * clusters if recluster is None else recluster
        if self.recluster < clusters:
            raise ValueError(f"recluster={recluster} pairs cannot make clusters={clusters}")
        if not scale > 0:
            raise ValueError(f"scale must be > 0, got {scale}")
        self.scale = scale
        self.classifier = nn.Linear(backbone.embed_dim, clusters, bias=False)
        self.centres = OnlineKMeans(clusters, backbone.embed_dim)
        kept = min(self.recluster, _PAIRS_PER_CLUSTER * clusters)
        self.register_buffer("recent", torch.zeros(kept, backbone.embed_dim, dtype=torch.float16))
        self.register_buffer("recent_labels", torch.full((kept,), -1))
        self.register_buffer("passed", torch.zeros((), dtype=torch.int64))
        self._passed = HostValue()
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("restarted", torch.zeros((), dtype=torch.int64))

    def forward(
        self, coder_image_concepts: Tensor, coder_text_concepts: Tensor, image_features: Tensor, text_features: Tensor
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            pairs = F.normalize(image_features.float() + text_features.float(), dim=-1)
            labels = self.centres.assign(pairs)
        with torch.autocast(coder_image_concepts.device.type, enabled=False):
            weight = self.classifier.weight
            return {
                "coder_image_logits": self.scale * F.linear(coder_image_concepts.to(weight.dtype), weight).float(),
                "coder_text_logits": self.scale * F.linear(coder_text_concepts.to(weight.dtype), weight).float(),
                "coder_prototype_labels": labels,
            }

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """``clusters``: pairs / 15, at most the paper's 10,000. Where one caption is drawn, an image counts as five
        pairs. ``recluster``: the pairs of an epoch, at most 30 ``clusters`` and at least ``clusters``."""
        values = {}
        clusters = options.get("clusters")
        if clusters is None:
            pairs = facts.samples_per_epoch * (5 if facts.captions == "draw" else 1)
            values["clusters"] = clusters = max(2, min(10_000, pairs // 15))
        if options.get("recluster") is None:
            values["recluster"] = max(clusters, min(facts.samples_per_epoch, _PAIRS_PER_CLUSTER * clusters))
        return values

    def check(self, *, batch: int, samples: int) -> None:
        clusters = self.centres.clusters
        if clusters > samples:
            raise ValueError(
                f"clusters={clusters} is more than the {samples} samples of the whole run, so the term would stay "
                f"zero: lower it (--set prototypes.clusters={max(2, samples // 15)}) or train longer"
            )
        if self.recluster >= samples:
            logging.warning(
                "pgc stays zero in this run: the pairs are clustered after %d, and the run has %d: train longer, or "
                "lower prototypes.recluster",
                self.recluster, samples,
            )  # fmt: skip

    def health(self) -> dict[str, float]:
        """Figures of the centres; none before the first clustering.

        ``used``: perplexity of the cluster sizes, divided by K: 1 if all clusters have the same size. ``changed``:
        share of the clustered pairs that got another label by the last clustering than they had in their step.
        ``restarted``: number of clusters that had become empty and were re-initialised so far, divided by K.
        """
        centres = self.centres
        if not bool(centres.ready):
            return {}
        share = centres.counts.double() / centres.counts.sum().clamp(min=1)
        return {
            "used": float(torch.special.entr(share).sum().exp()) / centres.clusters,
            "changed": float(self.changed),
            "restarted": int(self.restarted) / centres.clusters,
        }

    @torch.no_grad()
    def write(self, samples: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        self.centres.update(samples, labels, check=False)
        finite = samples.isfinite().all(1)  # others are left out, as zero rows are
        samples, labels = torch.where(finite[:, None], samples, 0), torch.where(finite, labels, -1)
        before, kept = self._passed.read(self.passed), len(self.recent)
        after = before + len(samples)
        rows = torch.arange(max(before, after - kept), after, device=samples.device) % kept
        self.recent[rows] = samples[-kept:].to(self.recent.dtype)
        self.recent_labels[rows] = torch.where(self.centres.ready, labels[-kept:], -1)
        self._passed.write(self.passed, after)
        if after // self.recluster == before // self.recluster:
            return
        ready = bool(self.centres.ready)
        new = self.centres.recluster(self.recent.float(), seed=before)
        labelled = self.recent_labels >= 0
        if ready:
            other = self.centres.assign(self.recent) != self.recent_labels
            self.changed.copy_((other & labelled).sum() / labelled.sum().clamp(min=1))
            self.restarted += new.sum()
        # the distribution of nn.Linear's initial weights; equal on all ranks
        weight, bound = self.classifier.weight, self.classifier.in_features**-0.5
        initial = torch.rand(weight.shape, generator=torch.Generator().manual_seed(before)) * 2 * bound - bound
        replace_rows(weight, new, initial.to(new.device))
        self.replaced_rows = [(weight, new)]
