"""Online k-means: a slow reference, blobs that keep their ids, reseeding, state, two processes, reclustering."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.memory import kmeans
from coder_plugin.memory.kmeans import OnlineKMeans
from tests import gloo
from tests.references.kmeans import KMeans


def noise(n: int, dim: int, seed: int) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def blobs(n: int, directions: Tensor, *, seed: int, spread: float = 0.05) -> tuple[Tensor, Tensor]:
    """Samples around unit directions [k, D], of any norm, and which blob each is of."""
    blob = torch.randint(0, len(directions), (n,), generator=torch.Generator().manual_seed(seed))
    samples = directions[blob] + spread * noise(n, directions.shape[1], seed + 1)
    return samples * (0.5 + torch.rand(n, 1, generator=torch.Generator().manual_seed(seed))), blob


def filled(clusters: int, dim: int, *, seed: int = 0, **options: Any) -> OnlineKMeans:
    means = OnlineKMeans(clusters, dim, **options)
    means.update(noise(clusters, dim, seed))
    return means


def equal(one: OnlineKMeans, other: OnlineKMeans) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


def check_invariants(means: OnlineKMeans) -> None:
    full = int(means.filled)
    torch.testing.assert_close(means.centres[:full].norm(dim=1), torch.ones(full))
    assert not means.centres[full:].any() and not means.counts[full:].any()
    assert means.centres.dtype == torch.float32
    assert all(buffer.dtype == torch.int64 for name, buffer in means.named_buffers() if name != "centres")


# A slow reference over any sequence of batches


@settings(max_examples=150, deadline=None)
@given(
    clusters=st.integers(1, 6),
    dim=st.integers(3, 5),
    patience=st.floats(1, 3),
    sizes=st.lists(st.integers(0, 14), min_size=1, max_size=8),
    zeros=st.lists(st.integers(0, 13), max_size=3),
    give=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_batches_equal_the_slow_reference(clusters, dim, patience, sizes, zeros, give, seed) -> None:
    means, reference = OnlineKMeans(clusters, dim, patience=patience), KMeans(clusters, patience)
    for step, size in enumerate(sizes):
        samples = noise(size, dim, 1000 * seed + step)
        samples[[row for row in zeros if row < size]] = 0
        means.update(samples, means.assign(samples) if give else None)
        reference.update(samples.tolist())
        assume(reference.margin > 0.02)
        assert means.seen == reference.seen and means.reseeded == reference.reseeded
        full = len(reference.centres)
        assert means.filled == full and bool(means.ready) == (full == clusters)
        assert means.counts[:full].tolist() == reference.counts
        assert means.last_seen[:full].tolist() == reference.last_seen
        want = torch.tensor(reference.centres, dtype=torch.float64).reshape(full, dim)
        torch.testing.assert_close(means.centres[:full].double(), want, rtol=0, atol=1e-6)
        check_invariants(means)


def test_a_batch_moves_centres_by_hand() -> None:
    means = OnlineKMeans(2, 2)
    means.update(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    assert means.centres.tolist() == [[1, 0], [0, 1]] and means.counts.tolist() == [1, 1]
    means.update(torch.tensor([[0.6, 0.8], [-0.8, 0.6]]), torch.tensor([0, 1]))
    expected = normalize(torch.tensor([[1.6, 0.8], [-0.8, 1.6]]), dim=1)
    torch.testing.assert_close(means.centres, expected)
    assert means.counts.tolist() == [2, 2] and means.seen == 4


def test_filling_takes_the_first_samples_and_later_labels_come_from_all_centres() -> None:
    samples = noise(9, 4, 0)
    means = OnlineKMeans(6, 4)
    assert means.assign(samples).tolist() == [0] * 9
    means.update(samples[:2])
    assert not means.ready and means.filled == 2
    assert set(means.assign(samples).tolist()) <= {0, 1}
    torch.testing.assert_close(means.centres[:2], normalize(samples[:2], dim=1))
    # samples 2-5 fill; 6-8 equal samples 4 and 5, whom the labels given do not know
    last = samples[[2, 3, 4, 5, 4, 5, 4]]
    means.update(last, means.assign(last))
    assert means.ready and means.counts.tolist() == [1, 1, 1, 1, 3, 2]
    torch.testing.assert_close(means.centres, normalize(samples[:6], dim=1))


def test_opposite_samples_leave_the_centre_where_it_was() -> None:
    means = OnlineKMeans(1, 2)
    means.update(torch.tensor([[1.0, 0.0]]))
    means.update(torch.tensor([[-1.0, 0.0]]))
    assert means.centres.tolist() == [[1, 0]] and means.counts.tolist() == [2]


# Clusters and ids


def test_blobs_are_found_and_ids_stay_with_them() -> None:
    directions = normalize(noise(8, 16, 3), dim=1)
    means = OnlineKMeans(8, 16)
    means.update(directions + 0.1 * noise(8, 16, 4))  # one in each blob, off its middle
    for step in range(60):
        samples, blob = blobs(32, directions, seed=10 + step)
        labels = means.assign(samples)
        assert torch.equal(labels, blob)
        means.update(samples, labels)
    assert (means.centres * directions).sum(1).min() > 0.995
    assert means.counts.sum() == 8 + 60 * 32 == means.seen
    assert means.reseeded == 0


def test_an_unused_centre_is_reseeded_with_the_worst_sample_and_starts_anew() -> None:
    directions = torch.eye(4)
    means = OnlineKMeans(3, 4, patience=5)
    means.update(directions[:3])
    used, _ = blobs(4, directions[:2], seed=0, spread=0.01)
    used[2] += 0.3 * directions[3]
    steps = 0
    while not means.reseeded:
        before = means.centres.clone()
        means.update(used)
        steps += 1
    assert 4 * steps >= 15 > 4 * (steps - 1)  # patience * K samples without it
    assert means.reseeded == 1 and means.counts[2] == 1 and means.last_seen[2] == means.seen
    torch.testing.assert_close(means.centres[2], normalize(used[2], dim=0))
    assert (means.centres[:2] * before[:2]).sum(1).min() > 0.99


def test_more_idle_centres_than_samples_are_reseeded_longest_unused_first() -> None:
    means = OnlineKMeans(5, 5, patience=1)
    means.update(torch.eye(5)[:3])
    means.update(torch.eye(5)[3:])
    means.update(torch.eye(5)[[4, 4]])
    assert means.reseeded == 0 and means.last_seen.tolist() == [3, 3, 3, 5, 7]
    means.update(torch.eye(5)[[4]])  # five samples after the third: 0, 1 and 2 are due, for one sample
    assert means.reseeded == 1 and means.last_seen.tolist() == [8, 3, 3, 5, 8]
    assert torch.equal(means.centres[0], torch.eye(5)[4])


def test_ties_go_to_the_lowest_id() -> None:
    means = OnlineKMeans(4, 3)
    means.update(torch.eye(3)[[1, 0, 0, 1]])
    assert means.assign(torch.eye(3)).tolist() == [1, 0, 0]


def test_assignment_in_chunks_equals_all_at_once(monkeypatch) -> None:
    means = filled(20_000, 8)
    samples = noise(301, 8, 5)
    want = means.assign(samples)
    monkeypatch.setattr(kmeans, "_SIMILARITIES", 20_000 * 7)
    assert torch.equal(means.assign(samples), want)
    monkeypatch.setattr(kmeans, "_SIMILARITIES", 1)
    assert torch.equal(means.assign(samples[:5]), want[:5])
    exact = normalize(samples.double(), dim=1) @ means.centres.double().T
    assert (exact.amax(1) - exact.gather(1, want[:, None])[:, 0]).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_autocast_are_computed_in_float32(dtype: torch.dtype) -> None:
    samples = noise(40, 6, 1).to(dtype)
    one, other = filled(5, 6), filled(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        labels = one.assign(samples)
        one.update(samples.requires_grad_(), labels)
    other.update(samples.detach().float())
    assert equal(one, other)
    assert not labels.requires_grad and not one.centres.requires_grad


# State


def test_state_is_in_the_state_dict_and_goes_on_bit_for_bit() -> None:
    for stop in (1, 4, 9):  # while filling, after it, after reseeding
        means = OnlineKMeans(12, 4, patience=1)
        for step in range(stop):
            means.update(noise(7, 4, step))
        state = {name: value.clone() for name, value in means.state_dict().items()}
        assert state.keys() == {"centres", "counts", "last_seen", "seen", "filled", "reseeded"}
        other = OnlineKMeans(12, 4, patience=1)
        other.update(noise(30, 4, 99))
        other.load_state_dict(state)
        for step in range(stop, stop + 9):
            samples = noise(7, 4, step)
            assert torch.equal(means.assign(samples), other.assign(samples))
            means.update(samples)
            other.update(samples)
        assert equal(means, other) and means.ready and other.ready
        assert means.reseeded > 0


# Two processes


def updates(corrupt: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State after 50 updates and after reclustering; not on rank 0, and with ``corrupt``, labels are wrong."""
    means = OnlineKMeans(11, 5, patience=2)
    for step in range(50):
        samples = noise(6, 5, step)
        labels: Tensor | None = means.assign(samples) if step % 5 else None
        if labels is not None and corrupt and distributed.rank():
            labels = torch.full_like(labels, 10**6 if step % 2 else -1)
        means.update(samples, labels)
    state = {name: value.clone() for name, value in means.state_dict().items()}
    means.recluster(noise(60, 5, 7) if distributed.rank() == 0 else noise(60, 5, 8))
    return state, means.state_dict()


def test_two_processes_follow_rank_0() -> None:
    (first, first_again), (second, second_again) = gloo.run(updates, True)
    want, want_again = updates(False)
    for name in want:
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], want[name])
        assert torch.equal(first_again[name], second_again[name])
        assert torch.equal(first_again[name], want_again[name])
    assert want["reseeded"] > 0


def test_what_is_broadcast_does_not_grow_with_the_clusters(monkeypatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "broadcast", lambda tensor: sent.append(tensor.numel()))
    means = OnlineKMeans(500, 8, patience=1)
    for step in range(60):
        samples = noise(10, 8, step)
        sent.clear()
        means.update(samples, means.assign(samples))
        assert sum(sent) <= 2 * 10 * 8 + 2 * 10


# Reclustering


def objective(means: OnlineKMeans, samples: Tensor) -> float:
    return (normalize(samples, dim=1) * means.centres[means.assign(samples)]).sum(1).mean().item()


def test_reclustering_improves_the_objective_and_keeps_the_ids_of_unchanged_blobs() -> None:
    directions = normalize(noise(40, 16, 3), dim=1)
    samples, blob = blobs(2000, directions, seed=1)
    means = OnlineKMeans(40, 16)
    means.update(directions + 0.08 * noise(40, 16, 6))
    before, seen = objective(means, samples), means.seen.clone()
    other = OnlineKMeans(40, 16)
    other.load_state_dict(means.state_dict())
    means.recluster(samples, seed=4)
    assert objective(means, samples) > before + 0.02
    assert torch.equal(means.assign(samples), blob)
    assert torch.equal(means.counts, torch.bincount(means.assign(samples), minlength=40))
    assert means.seen == seen and means.ready and (means.last_seen == seen).all()
    check_invariants(means)
    other.recluster(samples, seed=4)
    assert equal(means, other)


@pytest.mark.parametrize("already", [0, 3, 8])
def test_reclustering_fills(already: int) -> None:
    directions = torch.eye(8)
    samples, blob = blobs(200, directions, seed=0)
    means = OnlineKMeans(8, 8)
    means.update(directions[:already])
    means.recluster(samples, iterations=20)
    assert means.ready and means.counts.sum() == 200
    similarity = (means.centres[:already] * directions[:already]).sum(1)
    assert similarity.numel() == already and (similarity > 0.99).all()
    check_invariants(means)
    means.update(samples)
    check_invariants(means)


@settings(max_examples=40, deadline=None)
@given(new=st.integers(1, 40), missing=st.integers(0, 40), neighbours=st.integers(1, 5), seed=st.integers(0, 99))
def test_matching_is_one_to_one_and_finds_what_only_moved(new, missing, neighbours, seed) -> None:
    old = normalize(noise(max(0, new - missing), 6, seed), dim=1)
    rows = normalize(torch.cat([old + 0.001 * noise(len(old), 6, seed + 1), noise(new - len(old), 6, seed + 2)]), dim=1)
    order = torch.randperm(new, generator=torch.Generator().manual_seed(seed))
    ids = torch.from_numpy(kmeans._match(old.numpy(), rows[order].numpy(), neighbours=neighbours))
    assert sorted(ids.tolist()) == list(range(new))
    assert torch.equal(ids[order < len(old)], order[order < len(old)])
    everywhere = normalize(torch.ones(new, 6), dim=1).numpy()  # all alike: nobody gets a first choice
    assert sorted(kmeans._match(everywhere[: len(old)], everywhere, neighbours=neighbours)) == list(range(new))


# Bad input


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("samples", "labels", "message"),
    [
        (torch.tensor([[1.0, torch.nan], [1.0, 0.0]]), None, "1 of 2 samples are not finite"),
        (torch.tensor([[torch.inf, 1.0], [-torch.inf, 0.0]]), None, "2 of 2 samples are not finite"),
        (torch.ones(2, 3), None, r"samples must be floating point \[n, 2\]"),
        (torch.ones(2), None, r"samples must be floating point \[n, 2\]"),
        (torch.ones(2, 2, dtype=torch.long), None, "floating point"),
        (torch.ones(2, 2), torch.zeros(3, dtype=torch.long), r"labels must be integers \(2,\)"),
        (torch.ones(2, 2), torch.zeros(2), r"labels must be integers \(2,\)"),
        (torch.ones(2, 2), torch.tensor([0, 4]), r"labels must lie in \[0, .*got 0 to 4"),
        (torch.ones(2, 2), torch.tensor([-1, 0]), r"labels must lie in \[0, .*got -1 to 0"),
    ],
)
def test_bad_updates_write_nothing(samples: Tensor, labels: Tensor | None, message: str, full: bool) -> None:
    means = filled(4, 2) if full else OnlineKMeans(4, 2)
    before = OnlineKMeans(4, 2)
    before.load_state_dict(means.state_dict())
    with pytest.raises(ValueError, match=message):
        means.update(samples, labels)
    assert equal(means, before)


def test_bad_arguments() -> None:
    for options in ({"clusters": 0, "dim": 2}, {"clusters": 2, "dim": 0}):
        with pytest.raises(ValueError, match="clusters and dim must be >= 1"):
            OnlineKMeans(**options)
    for patience in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="patience must be >= 1"):
            OnlineKMeans(2, 2, patience=patience)
    means = filled(4, 2)
    with pytest.raises(ValueError, match=r"\[n, 2\]"):
        means.assign(torch.ones(3, 4))
    with pytest.raises(ValueError, match="3 samples that are not zero cannot make 4 clusters"):
        means.recluster(torch.cat([noise(3, 2, 0), torch.zeros(2, 2)]))
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        means.recluster(noise(9, 2, 0), iterations=0)
    with pytest.raises(ValueError, match="1 of 1 samples are not finite"):
        means.recluster(torch.tensor([[torch.nan, 0.0]]))


def test_empty_and_zero_batches_change_nothing() -> None:
    means, other = filled(4, 2), filled(4, 2)
    means.update(torch.zeros(0, 2))
    means.update(torch.zeros(3, 2))
    means.update(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))
    assert equal(means, other)
    assert means.assign(torch.zeros(0, 2)).shape == (0,)
