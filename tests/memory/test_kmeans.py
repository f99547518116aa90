"""k-means: slow references of both updates, blobs that keep their ids, empty clusters, state, two processes, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin import distributed
from coder_plugin.memory import kmeans
from coder_plugin.memory.kmeans import OnlineKMeans
from coder_plugin.tensors import add_rows
from tests import gloo
from tests.operations import Operations
from tests.references.kmeans import KMeans


def noise(n: int, dim: int, seed: int) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def blobs(n: int, directions: Tensor, *, seed: int, spread: float = 0.05) -> tuple[Tensor, Tensor]:
    """Samples around unit directions [k, D], of any norm, and the blob of each."""
    blob = torch.randint(0, len(directions), (n,), generator=torch.Generator().manual_seed(seed))
    samples = directions[blob] + spread * noise(n, directions.shape[1], seed + 1)
    return samples * (0.5 + torch.rand(n, 1, generator=torch.Generator().manual_seed(seed))), blob


def with_centres(centres: Tensor, counts: list[int] | None = None) -> OnlineKMeans:
    means = OnlineKMeans(*centres.shape)
    means.centres.copy_(normalize(centres, dim=1))
    means.counts.copy_(torch.tensor(counts if counts is not None else [1] * len(centres)))
    means.ready.fill_(True)
    return means


def equal(one: OnlineKMeans, other: OnlineKMeans) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


# Slow references


@given(
    clusters=st.integers(1, 6),
    dim=st.integers(3, 5),
    sizes=st.lists(st.integers(0, 14), min_size=1, max_size=6),
    zeros=st.lists(st.integers(0, 13), max_size=3),
    pass_labels=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_batches_equal_the_slow_reference(clusters, dim, sizes, zeros, pass_labels, seed) -> None:
    centres, counts = noise(clusters, dim, seed), [1 + (seed + k) % 5 for k in range(clusters)]
    means, reference = with_centres(centres, counts), KMeans(centres.tolist(), counts)
    for step, size in enumerate(sizes):
        samples = noise(size, dim, 1000 * seed + step)
        samples[[row for row in zeros if row < size]] = 0
        means.update(samples, means.assign(samples) if pass_labels else None)
        reference.update(samples.tolist())
        assume(reference.margin > 0.02)
        assert means.counts.tolist() == reference.counts
        want = torch.tensor(reference.centres, dtype=torch.float64)
        torch.testing.assert_close(means.centres.double(), want, rtol=0, atol=1e-6)


@given(clusters=st.integers(1, 5), more=st.integers(0, 30), iterations=st.integers(1, 5), seed=st.integers(0, 999))
def test_clustering_equals_lloyds_algorithm(clusters, more, iterations, seed) -> None:
    centres, samples = noise(clusters, 3, seed), noise(clusters + more, 3, seed + 1)
    means, reference = with_centres(centres), KMeans(centres.tolist(), [1] * clusters)
    assume(reference.lloyd(samples.tolist(), iterations) and reference.margin > 0.01)
    new = means.recluster(samples, iterations=iterations)
    assert not new.any() and means.counts.tolist() == reference.counts
    want = torch.tensor(reference.centres, dtype=torch.float64)
    torch.testing.assert_close(means.centres.double(), want, rtol=0, atol=1e-6)


def test_a_batch_moves_centres_by_hand() -> None:
    means = with_centres(torch.eye(2), [1, 3])
    means.update(torch.tensor([[0.6, 0.8], [-8.0, 6.0]]), torch.tensor([0, 1]))
    torch.testing.assert_close(means.centres, normalize(torch.tensor([[1.6, 0.8], [-0.8, 3.6]]), dim=1))
    assert means.counts.tolist() == [2, 4]


def test_before_the_first_clustering_a_batch_changes_nothing() -> None:
    means = OnlineKMeans(6, 4)
    assert means.assign(noise(9, 4, 0)).tolist() == [0] * 9
    means.update(noise(9, 4, 0))
    assert equal(means, OnlineKMeans(6, 4)) and not means.ready


def test_opposite_samples_leave_the_centre_where_it_was() -> None:
    means = with_centres(torch.tensor([[1.0, 0.0]]))
    means.update(torch.tensor([[-1.0, 0.0]]))
    assert means.centres.tolist() == [[1, 0]] and means.counts.tolist() == [2]


# Clusters and ids


def test_blobs_are_found_and_ids_stay_with_them() -> None:
    directions = normalize(noise(8, 16, 3), dim=1)
    means = with_centres(directions + 0.1 * noise(8, 16, 4))  # one in each blob, off its middle
    for step in range(60):
        samples, blob = blobs(32, directions, seed=10 + step)
        labels = means.assign(samples)
        assert torch.equal(labels, blob)
        means.update(samples, labels)
    assert (means.centres * directions).sum(1).min() > 0.995
    assert means.counts.sum() == 8 + 60 * 32


def mean_cosine(means: OnlineKMeans, samples: Tensor) -> float:
    return (normalize(samples, dim=1) * means.centres[means.assign(samples)]).sum(1).mean().item()


def test_the_first_clustering_starts_from_samples_and_all_ids_are_new() -> None:
    samples, _ = blobs(400, torch.eye(8), seed=0)
    means, other = OnlineKMeans(8, 8), OnlineKMeans(8, 8)
    assert means.recluster(samples, seed=1).tolist() == [True] * 8
    assert means.ready and means.counts.sum() == 400 and (means.counts > 0).all()
    other.recluster(samples, seed=1)
    assert equal(means, other)
    third = OnlineKMeans(8, 8)
    third.recluster(samples, seed=2)
    assert not torch.equal(third.centres, means.centres)
    once = OnlineKMeans(8, 8)
    once.recluster(samples, iterations=1, seed=1)
    assert mean_cosine(means, samples) >= mean_cosine(once, samples)


def test_clustering_anew_improves_the_fit_and_keeps_the_ids_of_unchanged_blobs() -> None:
    directions = normalize(noise(40, 16, 3), dim=1)
    samples, blob = blobs(2000, directions, seed=1)
    means = with_centres(directions + 0.08 * noise(40, 16, 6), [100] * 40)
    before = mean_cosine(means, samples)
    new = means.recluster(samples)
    assert not new.any() and mean_cosine(means, samples) > before + 0.02
    assert torch.equal(means.assign(samples), blob)
    assert torch.equal(means.counts, torch.bincount(blob, minlength=40))


def test_an_empty_cluster_starts_anew_at_a_sample_and_its_id_is_named() -> None:
    samples, _ = blobs(300, torch.eye(5)[:2], seed=0)
    means = with_centres(torch.cat([torch.eye(5)[:2], -torch.ones(1, 5)]))  # no sample is nearest to the last one
    assert not (means.assign(samples) == 2).any()
    new = means.recluster(samples, iterations=20)
    assert new.tolist() == [False, False, True]
    assert (means.counts > 0).all() and means.counts.sum() == 300
    assert means.centres[2, :2].max() > 0.9, "it splits one of the blobs"
    assert (means.centres[:2] * torch.eye(5)[:2]).sum(1).min() > 0.99
    assert not means.recluster(samples).any()


def test_ties_go_to_the_lowest_id() -> None:
    means = with_centres(torch.eye(3)[[1, 0, 0, 1]])
    assert means.assign(torch.eye(3)).tolist() == [1, 0, 0]


def test_assignment_in_chunks_equals_all_at_once(monkeypatch) -> None:
    means = with_centres(noise(20_000, 8, 0))
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
    one, other = with_centres(noise(5, 6, 0)), with_centres(noise(5, 6, 0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        labels = one.assign(samples)
        one.update(samples.requires_grad_(), labels)
        one.recluster(samples)
    other.update(samples.detach().float())
    other.recluster(samples.detach().float())
    assert equal(one, other)
    assert not labels.requires_grad and not one.centres.requires_grad


def test_state_is_in_the_state_dict() -> None:
    means, other = with_centres(noise(12, 4, 0)), OnlineKMeans(12, 4)
    means.update(noise(7, 4, 1))
    assert means.state_dict().keys() == {"centres", "counts", "ready"}
    other.load_state_dict(means.state_dict())
    for each in (means, other):
        each.update(noise(7, 4, 2))
        each.recluster(noise(70, 4, 3), seed=5)
    assert equal(means, other)


# Two processes


def updates(corrupt: bool) -> tuple[dict[str, Tensor], Tensor]:
    """State after two clusterings and 40 updates. Not on rank 0, and with ``corrupt``, the clustered samples are wrong."""
    means = OnlineKMeans(11, 5)
    wrong = corrupt and distributed.rank() > 0
    means.recluster(noise(60, 5, 8 if wrong else 7))
    for step in range(40):
        samples = noise(6, 5, step)
        labels = means.assign(samples) if step % 5 else None
        means.update(samples, labels)
    new = means.recluster(noise(12, 5, 10 if wrong else 9))
    return means.state_dict(), new


def on_ranks() -> tuple[tuple[dict[str, Tensor], Tensor], str]:
    return updates(True), fails_on_rank_0()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[tuple[dict[str, Tensor], Tensor], str]]:
    return gloo.run(on_ranks)


def test_two_processes_cluster_as_rank_0(ranks: Any) -> None:
    (first, first_new), (second, second_new) = (each for each, _ in ranks)
    want, want_new = updates(False)
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], want[name]) for name in want)
    assert torch.equal(first_new, second_new) and torch.equal(first_new, want_new) and want_new.any()


def fails_on_rank_0() -> str:
    means = OnlineKMeans(2, 2)
    means._lloyd = lambda *_: 1 / 0  # type: ignore[method-assign]
    try:
        means.recluster(torch.eye(2))
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_a_failure_on_rank_0_ends_the_others_too(ranks: Any) -> None:
    assert [error for _, error in ranks] == ["ZeroDivisionError", "RuntimeError"]


def test_an_update_makes_no_collective(monkeypatch) -> None:
    means = with_centres(noise(500, 8, 0))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)  # a collective would fail: there is no group
    before = means.centres.clone()
    means.update(noise(10, 8, 1))
    assert not torch.equal(means.centres, before)


def test_rows_are_added_with_duplicates() -> None:
    total, index, rows = torch.zeros(3, 4), torch.tensor([2, 0, 2, 2]), noise(4, 4, 3)
    want = torch.stack([rows[1], torch.zeros(4), rows[[0, 2, 3]].sum(0)])
    torch.testing.assert_close(add_rows(total.clone(), index, rows), want)


def test_rows_are_not_added_in_any_order_off_the_cpu() -> None:
    """On a GPU ``index_add_`` has no fixed order, and ``index_put_`` has."""
    total, index = torch.zeros(3, 4, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    with Operations() as operations:
        add_rows(total, index, torch.zeros(4, 4, device="meta"))
    assert [name for name in operations.names if "index" in name] == ["aten::index_put_"]


# Bad input


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
        (torch.ones(2, 2), torch.tensor([0, 4]), r"labels must lie in \[0, 4\), got 0 to 4"),
        (torch.ones(2, 2), torch.tensor([-1, 0]), r"labels must lie in \[0, 4\), got -1 to 0"),
    ],
)
def test_bad_updates_write_nothing(samples: Tensor, labels: Tensor | None, message: str) -> None:
    for means in (with_centres(noise(4, 2, 0)), OnlineKMeans(4, 2)):
        before = OnlineKMeans(4, 2)
        before.load_state_dict(means.state_dict())
        with pytest.raises(ValueError, match=message):
            means.update(samples, labels)
        assert equal(means, before)


def test_bad_arguments() -> None:
    for options in ({"clusters": 0, "dim": 2}, {"clusters": 2, "dim": 0}):
        with pytest.raises(ValueError, match="clusters and dim must be >= 1"):
            OnlineKMeans(**options)
    assert OnlineKMeans(1, 1).centres.shape == (1, 1)
    means = with_centres(noise(4, 2, 0))
    before = {name: value.clone() for name, value in means.state_dict().items()}
    with pytest.raises(ValueError, match=r"\[n, 2\]"):
        means.assign(torch.ones(3, 4))
    with pytest.raises(ValueError, match="3 samples that are not zero cannot make 4 clusters"):
        means.recluster(torch.cat([noise(3, 2, 0), torch.zeros(2, 2)]))
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        means.recluster(noise(9, 2, 0), iterations=0)
    with pytest.raises(ValueError, match="1 of 1 samples are not finite"):
        means.recluster(torch.tensor([[torch.nan, 0.0]]))
    assert all(torch.equal(value, before[name]) for name, value in means.state_dict().items())


def test_empty_and_zero_batches_change_nothing() -> None:
    means, other = with_centres(noise(4, 2, 0)), with_centres(noise(4, 2, 0))
    means.update(torch.zeros(0, 2))
    means.update(torch.zeros(3, 2))
    means.update(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))
    assert equal(means, other)
    assert means.assign(torch.zeros(0, 2)).shape == (0,)
