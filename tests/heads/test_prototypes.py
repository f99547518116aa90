"""Prototypes: when the pairs are clustered, what becomes of the classifier and the optimizer, what the log says."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.coder import Coder
from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.prototypes import Prototypes
from coder_plugin.memory.rows import replace_rows, reset_moments
from coder_plugin.memory.state_watch import StateWatch
from tests import gloo

SIZES = BackboneInfo(embed_dim=6)


def pairs(n: int, blobs: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    blob = torch.randint(0, len(blobs), (n,), generator=generator)
    return normalize(blobs[blob] + 0.05 * torch.randn(n, blobs.shape[1], generator=generator), dim=1)


def test_the_pairs_are_clustered_after_every_so_many_and_the_state_goes_on_bit_for_bit():
    blobs = normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    head, other = (Prototypes(SIZES, clusters=4, recluster=40) for _ in range(2))
    clustered = []
    for step in range(8):
        samples = pairs(15, blobs, step)
        ready = bool(head.centres.ready)
        head.write(samples, head.centres.assign(samples))
        if bool(head.centres.ready) != ready or head.replaced_rows:
            clustered.append(int(head.passed))
        for parameter, rows in head.take_replaced_rows():
            assert parameter is head.classifier.weight and rows.dtype == torch.bool
        if step == 3:
            other.load_state_dict(head.state_dict())
        elif step > 3:
            other.write(samples, other.centres.assign(samples))
    assert clustered == [45, 90, 120], "the first step at or after 40, 80 and 120 pairs"
    assert (head.recent.float() @ head.centres.centres.T).amax(1).mean() > 0.95
    assert head.centres.counts.sum() == 40, "the last 40 pairs, not all 120"
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in head.state_dict().items())


def test_a_batch_larger_than_what_is_kept_keeps_its_last_pairs():
    head = Prototypes(SIZES, clusters=2, recluster=4)
    samples = normalize(torch.randn(7, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    head.write(samples, head.centres.assign(samples))
    kept = head.recent.float()
    torch.testing.assert_close(kept[[3, 0, 1, 2]], samples[3:], rtol=1e-3, atol=1e-3)


def test_pairs_that_are_not_finite_are_left_out_of_what_is_kept_and_clustered():
    """open_clip's trainer and other loops write what no one has checked."""
    head = Prototypes(BackboneInfo(embed_dim=3), clusters=2, recluster=6)
    samples = normalize(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    samples[2, 1], samples[4, 0] = torch.nan, torch.inf
    head.write(samples, torch.zeros(6, dtype=torch.int64))
    assert bool(head.centres.ready) and int(head.centres.counts.sum()) == 4
    assert all(bool(value.isfinite().all()) for value in head.state_dict().values())


def test_the_first_clustering_reinitialises_all_rows_and_a_later_one_those_of_new_clusters():
    blobs = torch.eye(6)[:3]
    head = Prototypes(SIZES, clusters=3, recluster=30)
    first = head.classifier.weight.detach().clone()
    samples = pairs(30, blobs, 0)
    head.write(samples, head.centres.assign(samples))
    second = head.classifier.weight.detach().clone()
    assert not (first == second).any(1).any() and second.abs().max() <= 6**-0.5
    [(_, rows)] = head.take_replaced_rows()
    assert rows.all() and head.take_replaced_rows() == []
    # the next 30 pairs lie elsewhere but for one blob: its id and row stay
    labels = head.centres.assign(blobs)
    head.centres.centres[labels[1]] = -torch.ones(6) / 6**0.5  # no pair is near
    samples = pairs(30, blobs, 1)
    head.write(samples, head.centres.assign(samples))
    [(_, rows)] = head.take_replaced_rows()
    assert rows.tolist() == [k == int(labels[1]) for k in range(3)]
    changed = (head.classifier.weight != second).any(1)
    assert torch.equal(changed, rows)
    assert int(head.restarted) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_are_the_nearest_centres_of_the_pairs(dtype):
    torch.manual_seed(0)
    head = Prototypes(SIZES, clusters=3, recluster=30)
    images, texts, *concepts = torch.randn(4, 9, 6).to(dtype)
    images.requires_grad_()
    assert head(*concepts, images, texts)["coder_prototype_labels"].tolist() == [0] * 9
    samples = pairs(30, torch.eye(6)[:3], 0)
    head.write(samples, head.centres.assign(samples))
    with torch.autocast("cpu", torch.bfloat16):
        labels = head(*concepts, images, texts)["coder_prototype_labels"]
    sums, centres = images.detach().double() + texts.double(), head.centres.centres.double()
    want = [max(range(3), key=lambda k: float(each @ centres[k])) for each in sums]  # noqa: B023
    assert labels.tolist() == want and labels.dtype == torch.int64 and len(set(want)) > 1


def test_the_scale_multiplies_the_logits():
    one, other = Prototypes(SIZES, clusters=3), Prototypes(SIZES, clusters=3, scale=10.0)
    other.load_state_dict(one.state_dict())
    images, texts, *features = torch.randn(4, 2, 6)
    got, want = other(images, texts, *features), one(images, texts, *features)
    for key in ("coder_image_logits", "coder_text_logits"):
        torch.testing.assert_close(got[key], 10 * want[key])
    torch.testing.assert_close(want["coder_text_logits"], texts @ one.classifier.weight.T)
    with pytest.raises(ValueError, match="scale must be > 0"):
        Prototypes(SIZES, clusters=3, scale=0.0)


@pytest.mark.parametrize(
    ("samples", "captions", "step", "epoch", "want"),
    [
        (30_000, "all", 128, 30_000, {"clusters": 2_000, "recluster": 30_000}),
        (6_000, "draw", 128, 6_000, {"clusters": 2_000, "recluster": 6_000}),
        (10_000_000, "all", 1024, 10_000_000, {"clusters": 10_000, "recluster": 300_000}),
        (20, "all", 64, 20, {"clusters": 2, "recluster": 20}),
        (30_000, "all", None, 30_000, {"clusters": 2_000, "recluster": 30_000}),
    ],
)
def test_options_from_the_data(samples, captions, step, epoch, want):
    facts = TrainingFacts(loss="coder", samples_per_epoch=samples, captions=captions, pairs_per_step=step)
    assert Prototypes.options_from_data({}, facts) == want
    assert Prototypes.options_from_data({"clusters": 5, "recluster": 7}, facts) == {}
    assert Prototypes.options_from_data({"clusters": 5}, facts) == {"recluster": min(150, epoch)}


def test_a_run_that_ends_before_the_first_clustering_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        Prototypes(SIZES, clusters=3, recluster=50).check(batch=5, samples=51)
        assert not caplog.records
        Prototypes(SIZES, clusters=3, recluster=50).check(batch=5, samples=50)
    assert "pgc stays zero in this run" in caplog.text and "prototypes.recluster" in caplog.text


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_the_optimizer_forgets_the_named_rows_alone(name):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
    reset_moments(optimizer, weight, torch.tensor([True, False, False, False]))  # no state yet
    weight.grad = torch.randn(4, 3)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[weight].items() if torch.is_tensor(value)}
    rows = torch.tensor([False, True, False, True])
    reset_moments(optimizer, weight, rows)
    changed = 0
    for key, value in before.items():
        now = optimizer.state[weight][key]
        if value.shape == weight.shape:
            want = value[~rows].mean(0) if key in ("exp_avg_sq", "square_avg") else torch.zeros(3)
            torch.testing.assert_close(now[rows], want.expand(2, 3))
            assert torch.equal(now[~rows], value[~rows])
            changed += 1
        else:
            assert torch.equal(now, value), "the number of steps stays"
    assert changed == {"AdamW": 2, "SGD": 1, "RMSprop": 1}[name]
    reset_moments(optimizer, weight, torch.tensor([False] * 4))
    assert weight in optimizer.state
    reset_moments(optimizer, weight, torch.tensor([True] * 4))
    assert weight not in optimizer.state, "all rows are new: the state begins anew"


@pytest.mark.parametrize("rows", [[True, False], [True, True]])
def test_the_steps_after_a_reset_are_no_longer_than_the_learning_rate(rows):
    """Adam, after many steps: with zero averages of squares the first steps would be 2.6, 3.5 … times as long."""
    head = Prototypes(SIZES, clusters=2, recluster=2)
    weight, rows = head.classifier.weight, torch.tensor(rows)
    coder = Coder.__new__(Coder)
    torch.nn.Module.__init__(coder)
    coder.heads, coder._watch = torch.nn.ModuleDict({"prototypes": head}), StateWatch()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)

    def step() -> Tensor:
        before = weight.detach().clone()
        weight.grad = torch.ones(2, 6)
        optimizer.step()
        return (weight.detach() - before).abs()

    for _ in range(1000):
        step()
    head.replaced_rows = [(weight, rows)]
    coder.post_step()
    assert optimizer.state[weight]["exp_avg"].all(), "no optimizer was passed"
    head.replaced_rows = [(weight, rows)]
    coder.post_step(optimizer)
    assert head.replaced_rows == []
    lengths = torch.stack([step() for _ in range(20)])
    assert lengths.max() < 0.1001
    assert lengths[-1][rows].min() > 0.05


def sharded() -> tuple[bool, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    full, fresh = torch.arange(15.0).view(5, 3), -torch.ones(5, 3)
    rows = torch.tensor([True, False, False, True, True])
    right = []
    for dim in (0, 1):
        weight = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(dim)]))
        replace_rows(weight, rows, fresh)
        assert isinstance(weight.data, DTensor)
        moments, squares = (distribute_tensor(full + 1, mesh, [Shard(dim)]) for _ in range(2))

        class Optimizer:
            state = {weight: {"exp_avg": moments, "exp_avg_sq": squares, "step": torch.tensor(1.0)}}

        reset_moments(Optimizer, weight, rows)
        right.append(torch.equal(weight.data.full_tensor(), torch.where(rows[:, None], fresh, full)))
        right.append(torch.equal(moments.full_tensor(), torch.where(rows[:, None], 0, full + 1)))
        mean = (full + 1)[~rows].mean(0)
        right.append(torch.equal(squares.full_tensor(), torch.where(rows[:, None], mean, full + 1)))
    return tuple(right)


def test_rows_of_sharded_parameters():
    assert gloo.run(sharded) == [(True,) * 6] * 2
