"""Spherical k-means with stable ids: the prototypes of image-text pairs (CODER eq. 7, docs/equations.md#pgc).

Shapes: n samples of the global batch, m samples of a whole set, K clusters, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.tensors import add_rows

#: Number of similarities that :meth:`OnlineKMeans.assign` holds at once: 256 MiB in float32.
_SIMILARITIES = 2**26


class OnlineKMeans(nn.Module):
    """K unit centres: clustered from a whole set by :meth:`recluster`, moved by each batch in between.

    There are no centres before the first :meth:`recluster`. After it a batch moves each centre that it chose to
    ``normalise(count * centre + sum of its samples)`` and adds their number to its count; the next :meth:`recluster`
    starts from the centres and resets the counts, so that the weight of old samples decays. An id keeps its cluster,
    except where :meth:`recluster` finds the cluster empty and re-initialises it under its id.

    All state is persistent buffers: ``centres`` float32 [K, D], zero before the first clustering; int64 ``counts`` [K];
    0-d bool ``ready``.

    Args:
        clusters: K, >= 1. dim: D, >= 1.

    Raises:
        ValueError: arguments out of range.

    Example:
        >>> kmeans = OnlineKMeans(2, 2)
        >>> kmeans.recluster(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]])).tolist()  # which ids are new
        [True, True]
        >>> kmeans.update(torch.tensor([[0.8, 0.2]]))
        >>> sorted(kmeans.counts.tolist())
        [1, 3]
    """

    centres: Tensor
    counts: Tensor
    ready: Tensor

    def __init__(self, clusters: int, dim: int) -> None:
        super().__init__()
        if clusters < 1 or dim < 1:
            raise ValueError(f"clusters and dim must be >= 1, got {clusters} and {dim}")
        self.clusters, self.dim = clusters, dim
        self.register_buffer("centres", torch.zeros(clusters, dim))
        self.register_buffer("counts", torch.zeros(clusters, dtype=torch.int64))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnlineKMeans:
        """Converting a model to half precision leaves the centres in float32: it would round away their small moves."""
        before = self.centres
        super()._apply(fn, recurse)
        if torch.promote_types(before.dtype, self.centres.dtype) != self.centres.dtype:
            self.centres = before.to(self.centres.device)
        return self

    @torch.no_grad()
    def assign(self, samples: Tensor) -> Tensor:
        """The centre with the highest cosine to each sample: [n, D] -> int64 [n]; ties go to the lowest id.

        Computed in float32, also under autocast, with at most 256 MiB of similarities at a time. All 0 before the first
        clustering. Non-finite samples are not detected here but in :meth:`update`.

        Raises:
            ValueError: a shape other than [n, D].
        """
        samples, _ = self._unit(samples)
        return self._nearest(samples, self.centres)

    @torch.no_grad()
    def update(self, samples: Tensor, labels: Tensor | None = None, *, check: bool = True) -> None:
        """Move the centres that a batch chose. Rows that are all zero are left out and not counted.

        Call it on every rank with the same rows and labels in the same order: sums are made in the same order on every
        rank, so that all get the same bits without a collective. Before the first clustering nothing is written.

        Args:
            samples: [n, D], any floating point type and norm.
            labels: integers [n], the result of :meth:`assign` for the samples; None: computed here, on one process.
            check: refuse non-finite samples and labels out of range, which synchronises with the device once. False:
                non-finite samples are left out, and the labels must be right.

        Raises:
            ValueError: non-finite samples, wrong shapes, labels out of range. Nothing is written then.
        """
        samples, norms = self._unit(samples)
        if labels is None:
            labels = self._nearest(samples, self.centres)
        if labels.shape != norms.shape or labels.is_floating_point():
            raise ValueError(f"labels must be integers ({len(norms)},), got {labels.dtype} {tuple(labels.shape)}")
        if not len(samples):
            return
        labels = labels.to(torch.int64)
        if check:
            non_finite = (~norms.isfinite()).sum()
            non_finite, lowest, highest = torch.stack((non_finite, labels.amin(), labels.amax())).tolist()
            if non_finite:
                raise ValueError(f"{non_finite} of {len(samples)} samples are not finite; no centre was changed")
            if lowest < 0 or highest >= self.clusters:
                raise ValueError(f"labels must lie in [0, {self.clusters}), got {lowest} to {highest}")
        # fixed shapes and no K x D tensor: the first sample of each cluster stands for all of them
        counted = (norms > 0) & norms.isfinite() & self.ready
        samples = torch.where(counted[:, None], samples, 0)
        number = torch.arange(len(labels), device=labels.device)
        first = torch.full_like(self.counts, len(labels)).scatter_reduce_(0, labels, number, "amin")[labels]
        old = self.centres[labels]
        moved = self.counts[labels, None] * old + add_rows(torch.zeros_like(samples), first, samples)[first]
        length = moved.norm(dim=1, keepdim=True)
        # duplicate labels have equal rows
        self.centres[labels] = torch.where((length > 0) & self.ready, moved / length, old)
        self.counts.index_add_(0, labels, counted.long())

    @torch.no_grad()
    def recluster(self, samples: Tensor, *, iterations: int = 10, seed: int = 0) -> Tensor:
        """Cluster a whole set (Lloyd's algorithm) from the centres, or at first from K samples drawn at random.

        A cluster that becomes empty is re-initialised at a sample drawn at random, which tends to split large clusters.
        Counts are the cluster sizes of the result. Zero rows are left out. Call it on all ranks with the same samples;
        they all get rank 0's result.

        Args:
            samples: [m, D], any floating point type and norm, m >= K of them not zero.
            iterations: >= 1. seed: of the random draws.

        Returns:
            bool [K]: ids whose cluster is new, so that what was learnt for the id is invalid.

        Raises:
            ValueError: fewer samples than clusters, non-finite samples, a shape that does not fit. Nothing is written.
        """
        if iterations < 1:
            raise ValueError(f"iterations must be >= 1, got {iterations}")
        samples, norms = self._unit(samples)
        if non_finite := int((~norms.isfinite()).sum()):
            raise ValueError(f"{non_finite} of {len(samples)} samples are not finite; no centre was changed")
        samples = samples[norms > 0]
        if len(samples) < self.clusters:
            raise ValueError(f"{len(samples)} samples that are not zero cannot make {self.clusters} clusters")
        new = torch.zeros_like(self.counts, dtype=torch.bool)
        failure = None
        if distributed.rank() == 0:
            try:
                self._lloyd(samples, new, iterations, torch.Generator().manual_seed(seed))
            except Exception as error:  # the other ranks wait and must fail too
                failure = error
        if distributed.any_rank(failure is not None, samples.device):
            raise failure or RuntimeError("the clustering failed on rank 0: see the error of rank 0")
        for buffer in (self.centres, self.counts, new):
            distributed.broadcast(buffer)
        self.ready.fill_(True)
        return new

    def _lloyd(self, samples: Tensor, new: Tensor, iterations: int, generator: torch.Generator) -> None:
        """Cluster unit samples [m, D]; mark in ``new``, bool [K], the ids whose cluster is new."""
        if bool(self.ready):
            centres = self.centres.clone()
        else:
            centres = samples[torch.randperm(len(samples), generator=generator)[: self.clusters].to(samples.device)]
            new.fill_(True)
        for _ in range(iterations):
            labels = self._nearest(samples, centres)
            sums = add_rows(torch.zeros_like(centres), labels, samples)
            centres = torch.where(sums.norm(dim=1, keepdim=True) > 0, normalize(sums, dim=1), centres)
            empty = (torch.bincount(labels, minlength=self.clusters) == 0).nonzero().flatten()
            drawn = torch.randperm(len(samples), generator=generator)[: len(empty)]
            centres[empty] = samples[drawn.to(samples.device)]
            new[empty] = True
        self.centres.copy_(centres)
        self.counts.copy_(torch.bincount(self._nearest(samples, centres), minlength=self.clusters))

    def _nearest(self, samples: Tensor, centres: Tensor) -> Tensor:
        """The centre with the highest cosine to each unit sample, int64 [n]."""
        with torch.autocast(samples.device.type, enabled=False):
            rows = samples.split(max(1, _SIMILARITIES // self.clusters))
            return torch.cat([(part @ centres.T).argmax(1) for part in rows])

    def _unit(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Checked samples in the type of the centres, divided by their norms, and the norms [n]."""
        if samples.ndim != 2 or samples.shape[1] != self.dim or not samples.is_floating_point():
            shape = f"{samples.dtype} {tuple(samples.shape)}"
            raise ValueError(f"samples must be floating point [n, {self.dim}], got {shape}")
        samples = samples.detach().to(self.centres.dtype)
        norms = samples.norm(dim=1)
        return samples / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None], norms
