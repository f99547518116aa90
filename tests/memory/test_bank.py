"""The coupled banks: a ring that equals a list, state that survives saving, and a spread known without similarities."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from coder_plugin import CoderError, memory
from coder_plugin.contrast import products
from coder_plugin.functional import m_dcl
from coder_plugin.memory.bank import CoupledBank
from coder_plugin.memory.moments import Moments
from tests.host_reads import as_on_a_device, host_reads
from tests.peak_memory import PeakMemory
from tests.references.bank import Bank


def keys(n: int, dim: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = (normalize(torch.randn(n, dim, generator=generator), dim=1) for _ in range(2))
    return image, text, torch.randint(0, 6, (n,), generator=generator) + 2**62


def contents(bank: CoupledBank) -> list[tuple[list[float], list[float], int]]:
    """The filled entries, oldest first."""
    count, pointer = int(bank.count), int(bank.pointer)
    order = [(pointer - count + i) % bank.size for i in range(count)]
    return [(bank.image[i].tolist(), bank.text[i].tolist(), int(bank.ids[i])) for i in order]


@given(size=st.integers(1, 9), batches=st.lists(st.integers(0, 21), max_size=8))
def test_the_ring_equals_a_list_for_any_batches(size, batches):
    bank, reference = CoupledBank(size, 3), Bank(size)
    for seed, n in enumerate(batches):
        image, text, ids = keys(n, seed=seed)
        bank.enqueue(image, text, ids)
        reference.enqueue(list(zip(image.tolist(), text.tolist(), ids.tolist(), strict=True)))
        assert contents(bank) == reference.entries
        assert bank.valid.sum() == min(size, sum(batches[: seed + 1]))
        for rows, moments in ((bank.image, bank.image_moments), (bank.text, bank.text_moments)):
            fresh = Moments(3)
            fresh.pivot.copy_(moments.pivot)
            fresh.add(rows[bank.valid])
            torch.testing.assert_close(moments.first, fresh.first, rtol=0, atol=1e-12)
            torch.testing.assert_close(moments.second, fresh.second, rtol=0, atol=1e-12)


def test_state_is_in_the_state_dict_and_goes_on_bit_for_bit():
    bank = CoupledBank(10, 3)
    for seed in range(3):
        bank.enqueue(*keys(4, seed=seed))
    assert {"image", "text", "ids", "pointer", "count", "image_moments.second"} <= bank.state_dict().keys()
    assert bank.pointer.ndim == bank.count.ndim == 0
    other = CoupledBank(10, 3)
    other.load_state_dict(bank.state_dict())
    for seed in range(3, 9):
        bank.enqueue(*keys(7, seed=seed))
        other.enqueue(*keys(7, seed=seed))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in bank.state_dict().items())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_storage_rounds_the_keys_and_keeps_its_moments_exact(dtype):
    bank = CoupledBank(8, 3, dtype=dtype)
    for seed in range(5):
        bank.enqueue(*keys(5, seed=seed))
    assert bank.image.dtype == getattr(torch, dtype)
    direct = bank.image.double() - bank.image_moments.pivot
    torch.testing.assert_close(bank.image_moments.second, direct.T @ direct, rtol=0, atol=1e-12)


def test_moments_stay_float64_where_a_model_becomes_half():
    bank = CoupledBank(8, 3).to(torch.bfloat16)
    assert bank.image.dtype == torch.bfloat16 and bank.ids.dtype == torch.int64
    assert bank.image_moments.second.dtype == torch.float64


def direct_variance(bank, anchors, current, negatives, ids):
    candidates = torch.cat([current, bank.text.to(current.dtype)]).double()
    allowed = bank.valid.expand(len(anchors), -1)
    if ids is not None:
        allowed = allowed & (ids[:, None] != bank.ids)
    similarity, allowed = anchors.double() @ candidates.T, torch.cat([negatives, allowed], 1)
    rows = [row[ok] for row, ok in zip(similarity, allowed, strict=True)]
    return torch.stack([row.var(unbiased=False) if len(row) else row.sum() for row in rows])


@pytest.mark.parametrize(("scale", "masked"), [(1e-3, True), (1e-3, False), (0.1, True), (3.0, False)])
def test_the_spread_without_similarities_is_exact(scale, masked):
    """SD from 1e-3 to 0.3 while the features drift: relative 1e-5 in float32."""
    torch.manual_seed(0)
    dim, size, n = 48, 300, 32
    bank = CoupledBank(size, dim)
    centre, drift = normalize(torch.randn(2, dim), dim=1)
    seen = []
    for step in range(25):
        image, text, anchors = (
            normalize(centre + step / 20 * scale * drift + scale * torch.randn(n, dim) / dim**0.5, dim=1) for _ in range(3)
        )
        anchors = normalize(anchors + 0.3 * torch.randn(n, dim) / dim**0.5, dim=1)
        ids = torch.randint(0, 200, (n,))
        of_pairs = ids if masked else torch.arange(n)
        negatives = of_pairs[:, None] != of_pairs
        if step in (1, 5, 9, 10, 24):
            got = bank.variance("text", anchors, text, of_pairs, of_pairs, mask_entries=masked).sqrt()
            want = direct_variance(bank, anchors, text, negatives, ids if masked else None).sqrt()
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
            seen.append(want.mean().item())
        bank.enqueue(image, text, ids)
    assert min(seen) < 5 * scale


def test_a_bank_without_negatives_has_no_spread():
    bank = CoupledBank(4, 3)
    image, text, ids = keys(2)
    ids[:] = 7
    bank.enqueue(image, text, ids)
    assert bank.variance("image", text, image, ids, ids, mask_entries=True).tolist() == [0, 0]
    empty = CoupledBank(4, 3)
    assert empty.variance("image", text, image, ids, ids, mask_entries=True).tolist() == [0, 0]


@pytest.mark.parametrize("masked", [True, False])
def test_the_spread_by_ragged_chunks(masked, monkeypatch):
    """More anchors, keys and entries of the anchors' images than are raised to float64 at once."""
    monkeypatch.setattr(memory.bank, "CHUNK", 7)
    monkeypatch.setattr(memory.moments, "CHUNK", 5)
    bank = CoupledBank(50, 3)
    for seed in range(4):
        bank.enqueue(*keys(16, seed=seed))
    bank.enqueue(*keys(11, seed=4))  # evicts earlier keys
    anchors, text, _ = keys(23, seed=9)
    anchors, ids = anchors[2:19], torch.randint(0, 30, (23,)) + 2**62
    got = bank.variance("text", anchors, text, ids[2:19], ids, mask_entries=masked)
    want = direct_variance(bank, anchors, text, ids[2:19, None] != ids, ids[2:19] if masked else None)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    for rows, moments in ((bank.image, bank.image_moments), (bank.text, bank.text_moments)):
        variance = rows.double().var(0, unbiased=False).sum()
        torch.testing.assert_close(moments.spread(bank.count), variance, rtol=1e-9, atol=0)


@given(
    size=st.integers(1, 9),
    batches=st.lists(st.integers(0, 12), max_size=6),
    given_repeats=st.booleans(),
    loaded=st.booleans(),
)
def test_on_a_device_shapes_are_fixed_and_nothing_is_read(size, batches, given_repeats, loaded):
    """The same ring and the same variance as on a CPU, without a read where the repeats of an image are handed over."""
    plain, bank = CoupledBank(size, 3), CoupledBank(size, 3)
    with as_on_a_device():
        bank.enqueue(*keys(1))
    plain.enqueue(*keys(1))
    for seed, n in enumerate(batches):
        image, text, ids = keys(n, seed=seed)
        plain.enqueue(image, text, ids)
        with host_reads() as reads:
            repeats = bank.repeats_after(ids) if n and given_repeats else None
        if repeats is not None:
            held = torch.cat([bank.ids.roll(-int(bank.pointer))[size - int(bank.count) :], ids])[-size:]
            assert repeats == held.unique(return_counts=True)[1].max() and not reads
            repeats = int(repeats)
        with host_reads() as reads:
            bank.enqueue(image, text, ids, repeats=repeats)
        assert len(reads) == (1 if n and not given_repeats else 0)
        if loaded:  # another state in the same buffers, whose repeats are not known
            bank.load_state_dict(plain.state_dict())
            with host_reads() as reads:
                bank._next_positions(1), bank._count.read(bank.count)
            assert len(reads) == 2
        with as_on_a_device():
            assert contents(bank) == contents(plain)
        anchors, other, of = keys(5, seed=seed + 50)
        with host_reads() as reads:
            got = bank.variance("text", anchors, other, of, of, mask_entries=True)
        assert not reads
        want = plain.variance("text", anchors, other, of, of, mask_entries=True)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_huge_keys_are_refused_when_they_are_written():
    """So that the loss need not look through the whole bank."""
    bank = CoupledBank(4, 3)
    image, text, ids = keys(2)
    with pytest.raises(CoderError, match=r"text_keys holds values of 1.0e\+12"):
        bank.enqueue(image, text * 1e12 / text.abs().max(), ids)
    assert bank.count == 0
    bank.enqueue(image, text, ids)
    live, looked = keys(2, seed=3), []
    aminmax = torch.Tensor.aminmax
    with mock.patch.object(torch.Tensor, "aminmax", lambda x, **more: looked.append(len(x)) or aminmax(x, **more)):
        for _ in range(3):
            m_dcl(*live[:2], image, text, bank.image, bank.text, bank_valid=bank.valid)
            bank.enqueue(image, text, ids)
    assert looked.count(4) == 2  # both banks once
    bank.text[3] = 1e12
    with pytest.raises(CoderError, match=r"text_bank holds values of 1.0e\+12"):
        m_dcl(*live[:2], image, text, bank.image, bank.text, bank_valid=bank.valid)


def test_a_large_bank_is_written_and_read_by_chunks(monkeypatch):
    """Beyond the banks a step needs memory for a chunk, and for each entry a few numbers that do not grow with D.

    Written until it wraps around, read by the diversity with most entries of the anchors' images, by the loss and for the log.
    At 1,048,576 entries of 1,024 dimensions in float16 this is below 1 GB, where one copy of a bank has 2.1 GB.
    """
    monkeypatch.setattr(memory.bank, "CHUNK", 64)
    monkeypatch.setattr(memory.moments, "CHUNK", 64)
    monkeypatch.setattr(products, "TILE_ON_CPU", 1 << 14)
    dim, n, peaks = 64, 32, {}
    for size in (1024, 4096):
        bank = CoupledBank(size, dim, dtype="float16")
        bank.enqueue(*keys(size - n // 2, dim))
        image, text, ids = keys(n, dim, seed=1)
        live = [each.requires_grad_() for each in keys(n, dim, seed=2)[:2]]

        def step(bank=bank, image=image, text=text, ids=ids, live=live) -> None:
            weights = tuple(
                bank.variance(modality, anchors.detach(), rows, ids, ids, mask_entries=True).sqrt().float()
                for modality, anchors, rows in (("text", live[0], text), ("image", live[1], image))
            )
            assert len(bank._entries_with(ids)[0]) > 0.9 * bank.size
            passed = {"bank_ids": bank.ids, "bank_valid": bank.valid, "bank_diversity": weights}
            torch.autograd.grad(m_dcl(*live, image, text, bank.image, bank.text, image_ids=ids, **passed), live)
            bank.enqueue(image, text, ids)
            assert bank.pointer == n // 2 and bank.image_moments.spread(bank.count) > 0

        with PeakMemory() as memory_of_step:
            step()
        peaks[size] = memory_of_step.peak
    assert (peaks[4096] - peaks[1024]) / (4096 - 1024) <= 64  # bytes an entry; one row in float16 has 128
    chunk, of_dim = 64 * dim * 8, dim**2 * 8
    assert peaks[1024] <= 64 * 1024 + 12 * chunk + 4 * of_dim


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: CoupledBank(0, 3), "at least 1 entry"),
        (lambda: CoupledBank(4, 3, dtype="int8"), "float32, float16, bfloat16"),
        (lambda: CoupledBank(4, 3).enqueue(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2)), r"\(2, 3\)"),
        (lambda: CoupledBank(4, 3).enqueue(torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(2)), r"\(1, 3\)"),
    ],
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
