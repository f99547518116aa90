"""AsCL's ratios, hinges and InfoNCE by tiles: equal to the reference in value and gradient, on one process and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.loss import ClipLoss
from torch import Tensor

from coder_plugin.functional import tiled
from coder_plugin.functional.ascl_loss import ascl_of_features
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.functional.triplet_loss import triplet_of_features
from coder_plugin.losses.base import Term
from tests import gloo
from tests.peak_memory import peak
from tests.tiles import FEW, compare, rows, small_tiles, value_and_gradient

__all__ = ["small_tiles"]

shapes = st.tuples(st.integers(1, 40), st.sampled_from([3, 17]), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2**31))
images = st.sampled_from(["distinct", "some", "one"])
shares = st.sampled_from([None, (0.0, 0.5), (0.3, 1.0), (0.9, 1.0)])


def draw(shape: tuple[int, int, float, int], images: str, share: tuple[float, float] | None) -> tuple[Any, ...]:
    """A generator, image and text features, image ids and the rows that are anchors."""
    n, d, spread, seed = shape
    generator = torch.Generator().manual_seed(seed)
    features = rows(generator, n, d, spread), rows(generator, n, d, spread)
    ids = {"distinct": None, "some": torch.randint(max(1, n // 2), (n,), generator=generator), "one": torch.zeros(n)}[images]
    anchors = None if share is None else slice(int(share[0] * (n - 1)), max(int(share[1] * n), int(share[0] * (n - 1)) + 1))
    return generator, *features, ids, anchors


@settings(max_examples=100, deadline=None)
@given(shapes, images, shares, st.sampled_from([0, 1, 30]), st.booleans(), st.sampled_from([0.01, 0.05, 1.0]), st.booleans())
def test_ascl_equals_its_reference(shape, of, share, m, partly, temperature, learned) -> None:
    """The gradients of images, texts, noised texts and the scale, 1 over the temperature."""
    generator, v, w, ids, anchors = draw(shape, of, share)
    noised = [rows(generator, m, v.shape[1], shape[2])] if m else []
    valid = torch.rand(m, generator=generator) < 0.5 if m and partly else None

    def loss(v: Tensor, w: Tensor, *noised: Tensor, temperature: float | Tensor = temperature, **rest: Any) -> Tensor:
        passed = {"temperature": temperature, "image_ids": ids, "noise_valid": valid, "anchors": anchors}
        return ascl_of_features(v, w, *noised, **passed, **rest)

    if not learned:
        compare(loss, v, w, *noised)
        return
    scale = torch.tensor(1 / temperature, dtype=torch.float64)
    compare(lambda scale, *features, **rest: loss(*features, temperature=1 / scale, **rest), scale, v, w, *noised)


@settings(max_examples=100, deadline=None)
@given(shapes, images, shares, st.sampled_from([0.0, 0.2, 3.0]), st.booleans(), st.sampled_from(["mean", "sum"]))
def test_triplet_equals_its_reference(shape, of, share, margin, hardest, reduction) -> None:
    _, v, w, ids, anchors = draw(shape, of, share)
    passed = {"image_ids": ids, "anchors": anchors, "margin": margin, "hardest": hardest, "reduction": reduction}
    compare(triplet_of_features, v, w, **passed)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([1.0, 14.3, 100.0]))
def test_clip_equals_open_clips(shape, scale) -> None:
    _, v, w, *_ = draw(shape, "distinct", None)
    scale = torch.tensor(scale, dtype=torch.float64)
    results = [value_and_gradient(function, v, w, scale) for function in (ClipLoss(), tiled_clip)]
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-10 * want.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("hardest", [True, False])
def test_of_equal_negatives_the_hinge_is_the_same(hardest) -> None:
    """Two captions of one image are two equal candidates of every text; the copies share the gradient somehow."""
    generator = torch.Generator().manual_seed(1)
    v, w = rows(generator, 6, 5, 1.0).repeat_interleave(2, 0), rows(generator, 12, 5, 1.0)
    ids, results = torch.arange(12) // 2, []
    for form in ("reference", "tiled"):
        loss = lambda *x, form=form: triplet_of_features(*x, image_ids=ids, hardest=hardest, implementation=form)  # noqa: E731
        value, of_images, of_texts = value_and_gradient(loss, v, w)
        results.append((value, of_images.unflatten(0, (6, 2)).sum(1), of_texts))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_small_batches_take_the_reference(monkeypatch) -> None:
    """For these losses tiles save memory only."""
    monkeypatch.undo()
    chosen = []
    features = [torch.empty(0, 4).expand(0, 4)] * 2
    for pairs in (tiled.SMALL_MATRIX, tiled.SMALL_MATRIX + 1):
        chosen.append(tiled.use_tiles("auto", features, pairs=pairs, small=False))
    assert chosen == [False, True]


def test_the_term_of_clip_by_tiles(monkeypatch) -> None:
    """With a bias, which all logits share, and the scale's gradient."""
    from coder_plugin.losses.clip import Clip

    generator = torch.Generator().manual_seed(2)
    features = rows(generator, 20, 5, 1.0), rows(generator, 20, 5, 1.0)
    rest = torch.tensor(10.0, dtype=torch.float64), torch.tensor(-3.0, dtype=torch.float64)
    results = []
    for form in ("reference", "tiled", "auto"):
        term = Clip()
        term.implementation = form
        for name in ("ONE_TILE", "SMALL_MATRIX"):
            monkeypatch.setattr(tiled, name, 20 if form == "auto" else 1 << 22)
        results.append(value_and_gradient(term, *features, *rest))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-14)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_at_32768_pairs(monkeypatch) -> None:
    """Gradients included, where one matrix of similarities alone has 4.3 GB."""
    monkeypatch.undo()
    features = [torch.empty(32_768, 1024, device="meta", requires_grad=True) for _ in range(3)]
    ids = torch.empty(32_768, dtype=torch.int64, device="meta")
    changed = torch.empty(32_768, dtype=torch.bool, device="meta")
    scale = torch.empty((), device="meta", requires_grad=True)
    losses = {
        "ascl": (features, 1.5e9, lambda *x: ascl_of_features(*x, temperature=0.05, image_ids=ids, noise_valid=changed)),
        "hardest": (features[:2], 0.8e9, lambda *x: triplet_of_features(*x, image_ids=ids)),
        "all": (features[:2], 0.8e9, lambda *x: triplet_of_features(*x, image_ids=ids, hardest=False)),
        "clip": ([*features[:2], scale], 0.8e9, tiled_clip),
    }
    for name, (leaves, bound, loss) in losses.items():
        used = peak(lambda loss=loss, leaves=leaves: torch.autograd.grad(loss(*leaves), leaves))
        assert 0.27e9 <= used <= bound, f"{name}: {used / 1e9:.2f} GB"


# -- two processes ---------------------------------------------------------------------------------------------------


def on_a_rank() -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Losses and gradients of this rank's share of a batch, by the reference and by tiles, of each term."""
    from coder_plugin import distributed
    from coder_plugin.losses.ascl import AsCL
    from coder_plugin.losses.clip import Clip
    from coder_plugin.losses.dcl import DCL
    from coder_plugin.losses.triplet import Triplet

    tiled.TILE_ON_CPU = FEW
    generator = torch.Generator().manual_seed(5)
    v, w, noised = (rows(generator, 12, 5, 1.0) for _ in range(3))
    part = slice(distributed.rank() * 6, distributed.rank() * 6 + 6)
    ids, scale = (torch.arange(12) // 2 * 2)[part], torch.tensor(10.0, dtype=torch.float64)
    changed = (torch.arange(12) % 3 > 0)[part, None]
    pair = {"image_features": v[part], "text_features": w[part]}
    terms: dict[str, tuple[Term, dict[str, Tensor], dict[str, Tensor]]] = {
        "dcl": (DCL(), pair, {"coder_ids": ids}),
        "ascl": (AsCL(), pair | {"coder_noised_features": noised[part]}, {"coder_ids": ids, "coder_noise_changed": changed}),
        "hardest": (Triplet(reduction="sum"), pair, {"coder_ids": ids}),
        "all negatives": (Triplet(hardest=False), pair, {"coder_ids": ids}),
        "clip": (Clip(), pair | {"logit_scale": scale}, {}),
    }
    results = []
    for name, (term, leaves, rest) in terms.items():
        for local_loss in (False, True):
            term.bind({}, local_loss=local_loss)
            both = []
            for form in ("reference", "tiled"):
                term.implementation = form
                loss = lambda *x, t=term, k=leaves, r=rest: t(**dict(zip(k, x, strict=True)), **r)  # noqa: E731
                both.append(value_and_gradient(loss, *leaves.values()))
            results.append((f"{name}, local_loss={local_loss}", *both))
    return results


def test_two_processes() -> None:
    for results in gloo.run(on_a_rank):
        assert len(results) == 10
        for name, reference, got in results:
            torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
