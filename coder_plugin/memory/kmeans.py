"""Online spherical k-means with stable ids: the prototypes of image-text pairs (CODER eq. 7, docs/equations.md#pgc).

Shapes: n samples of the global batch, m samples of a whole set, K clusters, D dimensions.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from coder_plugin import distributed

#: Number of pairs of an old and a new centre that :meth:`OnlineKMeans.recluster` holds at once while it matches them.
_PAIRS = 2**22
#: Number of similarities that :meth:`OnlineKMeans.assign` holds at once: 256 MiB in float32.
_SIMILARITIES = 2**26


class OnlineKMeans(nn.Module):
    """K unit centres that are updated batch by batch.

    The first K samples become the centres, in order. After that a batch moves each centre with samples to
    ``normalise(count * centre + sum of its samples)`` and adds their number to its count. A centre that none of the last
    ``patience * K`` samples chose is reseeded from the current batch; **its id then names a new cluster**, which whatever was
    learnt for the id, such as a classifier's row, has to relearn. Otherwise ids do not change.

    All state is persistent buffers: ``centres`` float32 [K, D], zero where not yet filled; ``counts`` [K]; ``last_seen`` [K],
    the value of ``seen`` after the batch that last chose the centre; 0-d ``seen``, ``filled`` and ``reseeded``, numbers of
    samples, filled centres and reseeded centres. All but the centres are int64.

    Args:
        clusters: K, >= 1.
        dim: D, >= 1.
        patience: lifetime of an unused centre, in samples per cluster, >= 1.

    Raises:
        ValueError: arguments out of range.

    Example:
        >>> kmeans = OnlineKMeans(2, 2)
        >>> kmeans.update(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]))
        >>> kmeans.assign(torch.tensor([[0.8, 0.1], [0.0, 2.0]])).tolist(), kmeans.counts.tolist()
        ([0, 1], [2, 1])
    """

    centres: Tensor
    counts: Tensor
    last_seen: Tensor
    seen: Tensor
    filled: Tensor
    reseeded: Tensor

    def __init__(self, clusters: int, dim: int, *, patience: float = 30.0) -> None:
        super().__init__()
        if clusters < 1 or dim < 1:
            raise ValueError(f"clusters and dim must be >= 1, got {clusters} and {dim}")
        if not 1 <= patience < math.inf:
            raise ValueError(f"patience must be >= 1 and finite, got {patience}")
        self.clusters, self.dim, self.patience = clusters, dim, patience
        self.register_buffer("centres", torch.zeros(clusters, dim))
        for name in ("counts", "last_seen"):
            self.register_buffer(name, torch.zeros(clusters, dtype=torch.int64))
        for name in ("seen", "filled", "reseeded"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    @property
    def ready(self) -> Tensor:
        """Bool, 0-d: whether all centres are filled. Does not synchronise with the device."""
        return self.filled == self.clusters

    @torch.no_grad()
    def assign(self, samples: Tensor) -> Tensor:
        """The filled centre with the highest cosine to each sample: [n, D] -> int64 [n]; ties go to the lowest id.

        Computed in float32, also under autocast, with at most 256 MiB of similarities at a time. 0 while no centre is filled.
        Non-finite samples are not detected here but in :meth:`update`.

        Raises:
            ValueError: a shape other than [n, D].
        """
        samples, _ = self._unit(samples)
        unfilled = torch.arange(self.clusters, device=self.filled.device) >= self.filled
        offset = torch.zeros_like(self.centres[:, 0]).masked_fill(unfilled, -torch.inf)
        with torch.autocast(samples.device.type, enabled=False):
            labels = [
                torch.addmm(offset, rows, self.centres.T).argmax(1)
                for rows in samples.split(max(1, _SIMILARITIES // self.clusters))
            ]
        return torch.cat(labels)

    @torch.no_grad()
    def update(self, samples: Tensor, labels: Tensor | None = None) -> None:
        """Fill, move and reseed centres with one batch. Rows that are all zero are left out and not counted.

        Call it on every rank with the same rows in the same order. Rank 0's labels, and the centres it computes, at most two
        per sample, then replace those of the other ranks, because sums and argmax may differ in the last bit between
        devices. The integer state follows from the labels.

        The batch that fills the last centre assigns the rest of its samples anew, because its labels could only name the
        centres that were filled before. Centres are reseeded longest unused first, each with one of the samples that had the
        lowest cosines to their centres before the update.

        Args:
            samples: [n, D], any floating point type and norm.
            labels: integers [n], the result of :meth:`assign` for the samples; None: computed here.

        Raises:
            ValueError: non-finite samples, wrong shapes, labels that name no filled centre. Nothing is written then.
        """
        has_labels = labels is not None
        samples, norms = self._unit(samples)
        if labels is None:
            labels = torch.zeros(len(samples), dtype=torch.int64, device=samples.device)
        if labels.shape != norms.shape or labels.is_floating_point():
            raise ValueError(f"labels must be integers ({len(norms)},), got {labels.dtype} {tuple(labels.shape)}")
        if not len(samples):
            return
        labels = labels.to(torch.int64, copy=True).contiguous()
        if has_labels:
            distributed.broadcast(labels)
        # one transfer, and on one process the only synchronisation
        invalid = ~norms.isfinite()
        checks = torch.stack((self.filled, invalid.sum(), (norms == 0).sum(), labels.amin(), labels.amax()))
        filled, non_finite, zeros, lowest, highest = checks.tolist()
        if non_finite:
            raise ValueError(f"{non_finite} of {len(samples)} samples are not finite; no centre was changed")
        if lowest < 0 or highest >= max(1, filled):
            raise ValueError(f"labels must lie in [0, {filled}), the filled centres, got {lowest} to {highest}")
        if zeros:
            samples, labels = samples[norms > 0], labels[norms > 0]

        new = min(self.clusters - filled, len(samples))
        self.seen += len(samples)
        touched = [torch.arange(filled, filled + new, device=labels.device)]
        self.centres[filled : filled + new] = samples[:new]
        self.counts[filled : filled + new] = 1
        self.last_seen[filled : filled + new] = self.seen
        self.filled += new
        samples, labels = samples[new:], labels[new:]
        if len(samples):
            if new or not has_labels:
                labels = self.assign(samples)
                distributed.broadcast(labels)
            touched += [labels, self._move_and_reseed(samples, labels)]
        if distributed.world_size() > 1:
            ids = torch.cat(touched)
            rows = self.centres[ids]
            distributed.broadcast(rows)
            self.centres[ids] = rows  # duplicate ids have equal rows

    def _move_and_reseed(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Unit samples [n, D] move the centres that they chose. Returns the ids that may have been reseeded, [n] at most.

        All shapes are fixed, so nothing synchronises with the device, and no K x D tensor is formed.
        """
        n = len(samples)
        old = self.centres[labels]
        fit = (samples * old).sum(1)
        number = torch.arange(n, device=labels.device)
        first = torch.full_like(self.counts, n).scatter_reduce_(0, labels, number, "amin")[labels]
        sums = torch.zeros_like(samples).index_add_(0, first, samples)[first]
        moved = self.counts[labels, None] * old + sums
        norms = moved.norm(dim=1, keepdim=True)
        self.centres[labels] = torch.where(norms > 0, moved / norms, old)
        self.counts.index_add_(0, labels, torch.ones_like(labels))
        self.last_seen[labels] = self.seen

        idle = self.last_seen.argsort(stable=True)[:n]
        stale = self.seen - self.last_seen[idle] >= math.ceil(self.patience * self.clusters)
        worst = samples[fit.argsort(stable=True)[: len(idle)]]
        self.centres[idle] = torch.where(stale[:, None], worst, self.centres[idle])
        self.counts[idle] = torch.where(stale, 1, self.counts[idle])
        self.last_seen[idle] = torch.where(stale, self.seen, self.last_seen[idle])
        self.reseeded += stale.sum()
        return idle

    @torch.no_grad()
    def recluster(self, samples: Tensor, *, iterations: int = 10, seed: int = 0) -> None:
        """Cluster a whole set anew (FAISS, on rank 0's CPU), starting from the filled centres and keeping their ids.

        Old and new centres are matched one to one, most similar pairs first; ids without an old centre get the remaining new
        ones. Counts are those of the final assignment, and every centre counts as just used. Zero rows are left out. Call it
        on all ranks with the same samples; they all get rank 0's result.

        Args:
            samples: [m, D], m >= K. iterations: of k-means, >= 1. seed: of faiss's random choices.

        Raises:
            ValueError: fewer samples than clusters, non-finite samples, a shape that does not fit. Nothing is written.
        """
        if iterations < 1:
            raise ValueError(f"iterations must be >= 1, got {iterations}")
        samples, norms = self._unit(samples)
        broken = int((~norms.isfinite()).sum())
        if broken:
            raise ValueError(f"{broken} of {len(samples)} samples are not finite; no centre was changed")
        samples = samples[norms > 0]
        if len(samples) < self.clusters:
            raise ValueError(f"{len(samples)} samples that are not zero cannot make {self.clusters} clusters")
        failure = None
        if distributed.rank() == 0:
            try:
                self._recluster(samples, iterations, seed)
            except Exception as error:  # the other ranks wait and must fail too
                failure = error
        if distributed.any_rank(failure is not None, samples.device):
            raise failure or RuntimeError("re-clustering failed on rank 0; its own error says why")
        for buffer in (self.centres, self.counts):
            distributed.broadcast(buffer)
        self.filled.fill_(self.clusters)
        self.last_seen.copy_(self.seen.expand_as(self.last_seen))

    def _recluster(self, samples: Tensor, iterations: int, seed: int) -> None:
        import faiss

        old = self.centres[: int(self.filled)].cpu().numpy()
        kmeans = faiss.Kmeans(
            self.dim,
            self.clusters,
            niter=iterations,
            spherical=True,
            seed=seed,
            min_points_per_centroid=1,  # no warning about few samples
            max_points_per_centroid=len(samples),  # no subsampling
        )
        kmeans.train(samples.cpu().numpy(), init_centroids=old if len(old) else None)
        centroids = kmeans.centroids
        assert centroids is not None
        ids = torch.from_numpy(_match(old, centroids)).to(self.centres.device)
        self.centres[ids] = normalize(torch.from_numpy(centroids), dim=1).to(self.centres)
        self.filled.fill_(self.clusters)
        self.counts.copy_(torch.bincount(self.assign(samples), minlength=self.clusters))

    def _unit(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Checked samples in float32, divided by their norms, and the norms [n]."""
        if samples.ndim != 2 or samples.shape[1] != self.dim or not samples.is_floating_point():
            raise ValueError(
                f"samples must be floating point [n, {self.dim}], got {samples.dtype} {tuple(samples.shape)}"
            )
        samples = samples.detach().float()
        norms = samples.norm(dim=1)
        return samples / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None], norms


def _match(old: np.ndarray, new: np.ndarray, *, neighbours: int = 32) -> np.ndarray:
    """The id of every row of ``new`` [K, D]: its match in ``old`` [F, D], F <= K; the others get F .. K-1 in order.

    Greedy, most similar pairs first, among each old row's nearest new rows. Old rows that lose all of these search again
    among the remaining ones, so no K x K matrix is needed.
    """
    import faiss

    ids = np.full(len(new), -1, dtype=np.int64)
    waiting = np.arange(len(old))
    while len(waiting):
        free = np.flatnonzero(ids < 0)
        index = faiss.IndexFlatIP(new.shape[1])
        index.add(new[free])
        similarity, nearest = index.search(old[waiting], min(neighbours, len(free)))
        neighbours = max(neighbours, min(2 * neighbours, _PAIRS // len(waiting)))
        lost = np.ones(len(waiting), dtype=bool)
        for pair in np.argsort(-similarity, axis=None, kind="stable").tolist():
            row, column = divmod(pair, similarity.shape[1])
            centre = free[nearest[row, column]]
            if lost[row] and ids[centre] < 0:
                ids[centre], lost[row] = waiting[row], False
        waiting = waiting[lost]
    ids[ids < 0] = np.arange(len(old), len(new))
    return ids
