"""Online spherical k-means whose ids last: the prototypes of image-text pairs (CODER eq. 7; METHODS 5).

Shapes: n samples of the global batch, m samples of a whole set, K clusters, D dimensions.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from coder_plugin import distributed

#: Pairs of an old and a new centre that :meth:`OnlineKMeans.recluster` holds at once while it matches them.
_PAIRS = 2**22
#: Similarities that :meth:`OnlineKMeans.assign` holds at once: 256 MiB in float32.
_SIMILARITIES = 2**26


class OnlineKMeans(nn.Module):
    """K unit centres that follow the samples they are shown, mini-batch by mini-batch.

    The first K samples become the centres, in order. From then on a batch moves each centre that it chose to
    ``normalise(count * centre + sum of its samples)`` and adds their number to its count. A centre that none of the
    last ``patience * K`` samples chose is reseeded from the batch at hand; **its id then names a new cluster**, and
    whatever was learnt for the id, such as a classifier's row, has to follow. Ids do not change otherwise.

    Everything is a persistent buffer: ``centres`` float32 [K, D], zero where not yet filled; ``counts`` [K]; and
    ``last_seen`` [K], the value of ``seen`` after the batch that last chose the centre; 0-d: ``seen`` samples, ``filled``
    centres, ``reseeded`` so far. All but the centres are int64.

    Args:
        clusters: K, >= 1. dim: D, >= 1.
        patience: >= 1; how long an unused centre lives, in samples per cluster.

    Raises:
        ValueError: arguments out of range.
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
        """Bool, 0-d: all centres are filled. Asking does not wait for the device."""
        return self.filled == self.clusters

    def is_ready(self) -> bool:
        return bool(self.ready)

    @torch.no_grad()
    def assign(self, samples: Tensor) -> Tensor:
        """The filled centre of the highest cosine to each of ``samples`` [n, D] -> int64 [n]; ties to the lowest id.

        In float32, also under autocast, with at most 256 MiB of similarities at a time. Where no centre is filled yet the
        answer is 0. Samples are not searched for non-finite values, :meth:`update` does that.

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
        """Fill, move and reseed centres with one batch; rows that are all zero are left out and not counted.

        Call it on every rank with the same rows in the same order. Rank 0's labels and the rows it arrives at, at most
        two a sample, then replace the others': sums and argmax need not agree to the last bit between devices. Integers
        follow from the labels and need no exchange.

        A batch that completes the filling assigns the rest of its samples itself, because labels from before it know
        only some of the centres. Centres to reseed are taken longest unused first, and get the samples of the lowest
        cosine to the centres that they chose, as these were before the update, one each.

        Args:
            samples: [n, D], any floating point type and norm.
            labels: integers [n], what :meth:`assign` said of the samples; None asks it now.

        Raises:
            ValueError: non-finite samples, shapes that do not fit, labels that name no filled centre. Nothing is written.
        """
        given = labels is not None
        samples, norms = self._unit(samples)
        if labels is None:
            labels = torch.zeros(len(samples), dtype=torch.int64, device=samples.device)
        if labels.shape != norms.shape or labels.is_floating_point():
            raise ValueError(f"labels must be integers ({len(norms)},), got {labels.dtype} {tuple(labels.shape)}")
        if not len(samples):
            return
        labels = labels.to(torch.int64, copy=True).contiguous()
        if given:
            distributed.broadcast(labels)
        # one transfer, and on one process the only synchronisation
        bad = ~norms.isfinite()
        facts = torch.stack((self.filled, bad.sum(), (norms == 0).sum(), labels.amin(), labels.amax()))
        filled, broken, zeros, lowest, highest = facts.tolist()
        if broken:
            raise ValueError(f"{broken} of {len(samples)} samples are not finite; no centre was changed")
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
            if new or not given:
                labels = self.assign(samples)
                distributed.broadcast(labels)
            touched += [labels, self._move_and_reseed(samples, labels)]
        if distributed.world_size() > 1:
            ids = torch.cat(touched)
            rows = self.centres[ids]
            distributed.broadcast(rows)
            self.centres[ids] = rows  # an id that occurs twice has equal rows

    def _move_and_reseed(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Unit samples [n, D] move the centres that they chose -> ids of those that may have been reseeded [<= n].

        Of fixed shapes, so that nothing waits for the device, and no K x D tensor is formed.
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
        """Cluster a whole set anew (faiss, on rank 0's CPU), from the filled centres on and keeping their ids.

        Old and new centres are matched one to one, the most similar pairs first; ids without an old centre go to the
        new ones that are left. Counts are those of the final assignment, and every centre's patience starts again. Zero
        rows are left out. Other ranks get the result: call it on all of them, with the same samples.

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
            except Exception as error:  # the others wait: they must learn of it
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
    """The id of every row of ``new`` [K, D]: that of its row of ``old`` [F, D], F <= K; leftovers get F .. K-1 in order.

    Greedy over the most similar pairs first, among each old row's nearest new ones; old rows that lose all of theirs
    search again among those left. So no K x K matrix is held.
    """
    import faiss

    ids = np.full(len(new), -1, dtype=np.int64)
    waiting = np.arange(len(old))
    while len(waiting):
        free = np.flatnonzero(ids < 0)
        index = faiss.IndexFlatIP(new.shape[1])
        index.add(new[free])
        similarity, nearest = index.search(old[waiting], min(neighbours, len(free)))
        neighbours = max(neighbours, min(2 * neighbours, _PAIRS // len(waiting)))  # few rounds where many want the same
        lost = np.ones(len(waiting), dtype=bool)
        for pair in np.argsort(-similarity, axis=None, kind="stable").tolist():
            row, column = divmod(pair, similarity.shape[1])
            centre = free[nearest[row, column]]
            if lost[row] and ids[centre] < 0:
                ids[centre], lost[row] = waiting[row], False
        waiting = waiting[lost]
    ids[ids < 0] = np.arange(len(old), len(new))
    return ids
