"""Noise in word embeddings: each generator changes what it says and nothing else.

n texts, T positions, E channels; ``words`` bool [n, T].
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.noise import generators
from coder_plugin.noise.base import Noise
from coder_plugin.noise.generators import Dropout, FeatureCutoff, Gaussian, Mixture, Shuffle, TokenCutoff

ALL = {
    "gaussian": Gaussian,
    "shuffle": Shuffle,
    "token_cutoff": TokenCutoff,
    "feature_cutoff": FeatureCutoff,
    "dropout": Dropout,
    "mixture": Mixture,
}
CUTS = {name: ALL[name] for name in ("token_cutoff", "feature_cutoff", "dropout")}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
every = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
every_cut = pytest.mark.parametrize("make", CUTS.values(), ids=CUTS)


def texts(n: int, t: int, e: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings [n, T, E], none of them zero."""
    values = torch.randn(n, t, e, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values + values.sign() * 0.1).to(dtype)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Embeddings, some of whose words are the same, words and a seed; padding holds what may not be computed with."""
    t, e = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    row = st.lists(st.booleans(), min_size=t, max_size=t)
    one = st.integers(0, t - 1).map(lambda place: [each == place for each in range(t)])
    words = torch.tensor(draw(st.lists(row | one | st.just([True] * t) | st.just([False] * t), min_size=1, max_size=4)))
    vocabulary = texts(
        1, draw(st.integers(1, 9)), e, seed=draw(st.integers(0, 99)), dtype=draw(st.sampled_from(DTYPES))
    )[0]
    ids = torch.randint(len(vocabulary), words.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    other = draw(st.sampled_from([0.5, 0.0, -0.0, math.inf, math.nan]))
    return vocabulary[ids].masked_fill(~words[..., None], other), words, draw(st.integers(0, 999))


def noised(noise: Noise, embeddings: Tensor, words: Tensor, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return noise(embeddings, words)


def bits(x: Tensor) -> Tensor:
    """What -0.0 and nan cannot hide from."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


# What holds for all


@every
@given(batch=batches())
def test_only_words_change_and_nothing_else_has_an_influence(
    make: Callable[..., Noise], batch: tuple[Tensor, Tensor, int]
) -> None:
    embeddings, words, seed = batch
    before = embeddings.clone()
    after = noised(make(), embeddings, words, seed)
    assert same(embeddings, before)
    assert after.shape == before.shape and after.dtype == before.dtype
    assert same(after[~words], before[~words])
    assert after[words].isfinite().all()
    other = embeddings.masked_fill(~words[..., None], 7)
    assert same(after[words], noised(make(), other, words, seed)[words])


@every
@given(batch=batches())
def test_the_state_of_torch_decides(make: Callable[..., Noise], batch: tuple[Tensor, Tensor, int]) -> None:
    """Forward is run twice under gradient accumulation; what is drawn later may not depend on the batch's values."""
    embeddings, words, seed = batch
    noise = make()
    first, state = noised(noise, embeddings, words, seed), torch.get_rng_state()
    for each in (noise, copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        assert same(noised(each, embeddings, words, seed), first)
    noised(noise, torch.ones_like(embeddings), ~words, seed)
    assert torch.equal(torch.get_rng_state(), state)


@every
@given(batch=batches())
def test_gradients(make: Callable[..., Noise], batch: tuple[Tensor, Tensor, int]) -> None:
    """What was cut has none; each other element's arrives where that element came from."""
    embeddings, words, seed = batch
    weight = texts(*embeddings.shape, seed=seed, dtype=embeddings.dtype)
    leaf = embeddings.clone().requires_grad_()
    after = noised(make(), leaf, words, seed)
    (got,) = torch.autograd.grad(after, leaf, weight)
    assert same(got[~words], weight[~words])
    noise = make()
    if isinstance(noise, Gaussian):
        assert same(got, weight)
    elif isinstance(noise, Shuffle):
        assert all(_multiset(got[i], words[i]) == _multiset(weight[i], words[i]) for i in range(len(words)))
        kept = leaf.detach().nan_to_num(0).double(), after.detach().nan_to_num(0).double()
        finite = embeddings.isfinite()
        torch.testing.assert_close(
            (kept[0] * got.double())[finite].sum(), (kept[1] * weight.double())[finite].sum()
        )  # <x, P'w> = <Px, w>
    elif not isinstance(noise, Mixture):
        assert same(got, weight.masked_fill((after == 0) & words[..., None], 0))


@every
def test_nothing_asks_the_device(make: Callable[..., Noise]) -> None:
    """A meta tensor has no values, so whatever waits for one fails."""
    embeddings = torch.empty(3, 5, 4, dtype=torch.float16, device="meta")
    after = make()(embeddings, torch.empty(3, 5, dtype=torch.bool, device="meta"))
    assert after.device.type == "meta" and after.dtype == torch.float16


@pytest.mark.gpu
@every
def test_on_a_gpu(make: Callable[..., Noise]) -> None:
    embeddings, words = texts(3, 9, 8, dtype=torch.float16).cuda(), torch.rand(3, 9).cuda() < 0.7
    noised(make(), embeddings, words)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pair = [noised(make(), embeddings, words) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(*(each.cpu() for each in pair))
    assert same(pair[0][~words].cpu(), embeddings[~words].cpu())
    assert not torch.equal(*(pair[0], embeddings))


@every
def test_nothing_to_noise(make: Callable[..., Noise]) -> None:
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        assert make()(torch.zeros(shape), torch.ones(shape[:2], dtype=torch.bool)).shape == shape


@pytest.mark.parametrize(
    ("embeddings", "words", "says"),
    [
        (
            torch.zeros(2, 3),
            torch.ones(2, 3, dtype=torch.bool),
            r"embeddings must be .* \[n, T, E\], got float32 \[2, 3\]",
        ),
        (torch.zeros(2, 3, 4, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), "got int64"),
        (torch.zeros(2, 3, 4), torch.ones(2, 4, dtype=torch.bool), r"words must be bool \[2, 3\], got bool \[2, 4\]"),
        (torch.zeros(2, 3, 4), torch.ones(2, 3), "got float32"),
    ],
)
def test_bad_input(embeddings: Tensor, words: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Gaussian()(embeddings, words)


@every_cut
def test_bad_rates(make: Callable[..., Noise]) -> None:
    for value in (1.1, math.nan):
        with pytest.raises(ValueError, match=r"rate must be in \[0, 1\]"):
            make(rate=value)


# Gaussian


def test_gaussian_statistics() -> None:
    """Texts of other scales and lengths; the noise has each one's own, a mean of 0, and no memory of the text."""
    scales = torch.tensor([0.01, 1, 30, 1], dtype=torch.float64)
    embeddings = texts(4, 60, 400) * scales[:, None, None] + 0.5 * scales[:, None, None]  # RMS is not the deviation
    words = torch.ones(4, 60, dtype=torch.bool)
    words[3, 10:] = False
    embeddings[3, 10:] = 1000
    difference = noised(Gaussian(std=0.2), embeddings, words) - embeddings
    for text, noise, own in zip(embeddings, difference, words, strict=True):
        z = noise[own] / (0.2 * text[own].square().mean().sqrt())
        n = z.numel()
        assert z.mean().abs() < 4 / n**0.5
        assert (z.var() - 1).abs() < 4 * (2 / n) ** 0.5
        assert (z.pow(4).mean() - 3).abs() < 4 * (96 / n) ** 0.5
        assert torch.corrcoef(torch.stack([z.flatten(), text[own].flatten()]))[0, 1].abs() < 4 / n**0.5


@given(batch=batches(), factor=st.sampled_from([0.25, 8.0]))
def test_gaussian_scales_with_the_text(batch: tuple[Tensor, Tensor, int], factor: float) -> None:
    embeddings, words, seed = batch
    want = noised(Gaussian(), embeddings, words, seed) * factor
    assert torch.equal(noised(Gaussian(), embeddings * factor, words, seed)[words], want[words])


def test_gaussian_precision() -> None:
    """Squares of float16 overflow from 256 on; float64 and autocast lose nothing."""
    words = torch.ones(1, 4, dtype=torch.bool)
    large = torch.full((1, 4, 8), 1000, dtype=torch.float16)
    after = noised(Gaussian(), large, words)
    assert after.isfinite().all() and not torch.equal(after, large)
    embeddings = texts(1, 4, 8)
    z = (noised(Gaussian(std=0.5), embeddings, words) - embeddings) / (
        noised(Gaussian(), embeddings, words) - embeddings
    )
    torch.testing.assert_close(z, torch.full_like(z, 5), rtol=1e-12, atol=0)
    for precise in (embeddings, embeddings.float()):
        plain = noised(Gaussian(), precise, words)
        with torch.autocast("cpu", torch.bfloat16):
            assert same(noised(Gaussian(), precise, words), plain)


# Shuffle


def _multiset(embeddings: Tensor, words: Tensor) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row.tolist()) for row in bits(embeddings)[words])


@given(batch=batches(), draws=st.integers(1, 4))
def test_shuffle_is_another_order_of_the_same_words(batch: tuple[Tensor, Tensor, int], draws: int) -> None:
    embeddings, words, seed = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "_SHUFFLES", draws)  # with few draws the last resort has work
        after = noised(Shuffle(), embeddings, words, seed)
    for before, shuffled, own in zip(embeddings, after, words, strict=True):
        assert _multiset(shuffled, own) == _multiset(before, own)
        assert same(shuffled[own], before[own]) == (len(_multiset(before, own)) < 2)


def test_shuffle_moves_on_where_no_draw_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.zeros(*shape, **options))  # no draw moves a word
    embeddings = torch.arange(5.0).reshape(1, 5, 1)
    after = Shuffle()(embeddings, torch.tensor([[False, True, True, False, True]]))
    assert after.flatten().tolist() == [0, 2, 4, 3, 1]


@pytest.mark.parametrize("ids", [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 1)])
def test_shuffle_draws_every_other_order_evenly(ids: tuple[int, ...]) -> None:
    """Orders that read otherwise; padding that is not even equal to itself plays no part."""
    n = 5_000
    text = torch.tensor([math.nan, *ids, math.nan])
    after = noised(Shuffle(), text[None, :, None].expand(n, -1, 1), text.isfinite().expand(n, -1))
    orders = Counter(map(tuple, after.squeeze(2)[:, 1:-1].long().tolist()))
    others = set(itertools.permutations(ids)) - {ids}
    assert orders.keys() == others
    expected = n / len(others)
    assert all(abs(times - expected) < 4 * expected**0.5 for times in orders.values())


# Token cutoff, feature cutoff, dropout


def units(make: Callable[..., Noise], gone: Tensor) -> Tensor:
    """Of a text's words' elements that were cut [m, E]: the units that are cut together, each of which is so as a whole."""
    if make is Dropout:
        return gone.flatten()
    dim = 1 if make is TokenCutoff else 0
    assert torch.equal(gone.any(dim), gone.all(dim))
    return gone.all(dim)


@every_cut
@given(batch=batches(), rate=st.sampled_from([0, 0.15, 0.6, 1]))
def test_cuts(make: Callable[..., Noise], batch: tuple[Tensor, Tensor, int], rate: float) -> None:
    """Zeros by whole units, the rest bit for bit; one unit is cut at least, and one of several is kept."""
    embeddings, words, seed = batch
    after = noised(make(rate=rate), embeddings, words, seed)
    for before, cut, own in zip(embeddings, after, words, strict=True):
        gone = cut[own] == 0
        assert same(cut[own], before[own].masked_fill(gone, 0))
        if not own.any():
            continue
        each = units(make, gone)
        assert 1 <= each.sum() <= max(1, len(each) - 1)
        if rate in (0, 1):
            assert each.sum() == (1 if rate == 0 else max(1, len(each) - 1))


@every_cut
def test_the_rate_is_the_rate(make: Callable[..., Noise]) -> None:
    """Of 40 units or more, so that the one that is always cut or kept hardly counts; independent of one another."""
    rate, words = 0.15, torch.ones(1000, 42, dtype=torch.bool)
    words[:, [0, 41]] = False
    cut = noised(make(rate=rate), torch.ones(1000, 42, 40), words)[:, 1:41] == 0
    each = torch.stack([units(make, gone) for gone in cut]).double()  # [n, units]
    size = rate * (1 - rate)
    assert abs(each.mean() - rate) < 4 * (size / each.numel()) ** 0.5 + (1 - rate) ** 40
    assert (each.mean(0) - rate).abs().max() < 5 * (size / len(each)) ** 0.5
    assert abs(each.mean(1).var() * each.shape[1] / size - 1) < 4 * (2 / len(each)) ** 0.5


@every_cut
def test_the_one_that_is_always_cut_is_any(make: Callable[..., Noise]) -> None:
    n = 2000
    words = torch.tensor([True, False, True, True]).expand(n, -1)
    cut = noised(make(rate=0), torch.ones(n, 4, 3), words)[words].view(n, 3, 3) == 0
    counts = torch.stack([units(make, gone) for gone in cut]).sum(0).double()
    assert counts.sum() == n
    assert (counts - n / len(counts)).abs().max() < 4 * (n / len(counts)) ** 0.5
