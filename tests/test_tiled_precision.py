"""How near losses come to float64 with the roundings of a GPU's products, which are imitated on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coder_plugin.config import OptimConfig, TrainConfig
from coder_plugin.functional import dcl, m_dcl, tiled
from coder_plugin.functional.ascl_loss import ascl_of_features
from coder_plugin.functional.clip_loss import tiled_clip
from coder_plugin.functional.triplet_loss import triplet_of_features
from coder_plugin.training.accelerator import make_accelerator
from tests.tiles import rows, small_tiles, value_and_gradient

__all__ = ["small_tiles"]
N, D = 60, 32


class TF32(TorchDispatchMode):
    """Rounds the factors of float32 products to 11 significant bits."""

    products = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name in ("mm", "addmm", "addmm_"):
            *first, one, other = args
            if one.dtype == torch.float32:
                self.products += 1
                args = (*first, rounded(one), rounded(other))
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent).to(x.dtype)


def losses(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Tensor], list[Tensor]]]:
    """Name, function of features and ``implementation``, and features of each loss."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n=N: rows(generator, n, D, 2.0).to(dtype)  # noqa: E731
    pair, rest, ids = [draw(), draw()], [draw(), draw(), draw(200), draw(200)], torch.arange(N) // 2
    like = lambda x, v: x.to(torch.promote_types(v.dtype, dtype))  # noqa: E731
    yield "dcl", lambda v, w, **form: dcl(v, w, image_ids=ids, **form), pair
    yield "dcl of anchors", lambda v, w, **form: dcl(v, w, image_ids=ids, anchors=slice(9, 40), **form), pair
    yield "m_dcl", lambda v, w, **form: m_dcl(v, w, *(like(x, v) for x in rest), image_ids=ids, **form), pair
    yield "ascl", lambda *x, **form: ascl_of_features(*x, temperature=0.05, image_ids=ids, **form), [*pair, draw()]
    yield "hardest", lambda v, w, **form: triplet_of_features(v, w, image_ids=ids, **form), pair
    yield "all", lambda v, w, **form: triplet_of_features(v, w, image_ids=ids, hardest=False, margin=0.5, **form), pair
    yield "clip", lambda v, w, scale, **_: tiled_clip(v, w, scale), [*pair, torch.tensor(14.3, dtype=torch.float64)]


def check(name: str, loss: Callable[..., Tensor], features: list[Tensor], got: list[Tensor], bound: float) -> None:
    truth = value_and_gradient(lambda *x: loss(*x, implementation="reference"), *(x.double() for x in features))
    for k, (one, other) in enumerate(zip(got, truth, strict=True)):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error <= bound, f"{name}, result {k}: {float(error):.1e}"


@pytest.mark.parametrize("one_tile", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_types_are_multiplied_as_they_are(dtype, bound, one_tile, monkeypatch) -> None:
    """Sums in float32: value and gradients, relative to the largest, against float64 of the same features."""
    monkeypatch.setattr(tiled, "multiplies_halves", lambda device: True)
    monkeypatch.setattr(tiled, "ONE_TILE", N * N if one_tile else 0)
    multiplied = []
    original = tiled.matmul
    monkeypatch.setattr(tiled, "matmul", lambda one, other: multiplied.append(other.dtype) or original(one, other))
    for name, loss, features in losses(dtype):
        got = value_and_gradient(lambda *x, f=loss: f(*x, implementation="tiled"), *features)
        assert got[1].dtype == dtype and got[0].dtype.itemsize >= 4
        check(name, loss, features, got, bound)
    assert one_tile or dtype in multiplied


@pytest.mark.parametrize("form", ["reference", "tiled"])
def test_tf32(form) -> None:
    for name, loss, features in losses(torch.float32):
        with TF32() as mode:
            got = value_and_gradient(lambda *x, f=loss: f(*x, implementation=form), *features)
        assert mode.products
        check(name, loss, features, got, 2**-9)


def test_float16_keeps_small_slopes(monkeypatch) -> None:
    """2^-12 of a loss: single slopes are below float16's range, while gradients, their sums, are not."""
    monkeypatch.setattr(tiled, "multiplies_halves", lambda device: True)
    for name, loss, features in losses(torch.float16):
        if name in ("hardest", "clip"):  # no product in its backward pass; several features' types
            continue
        value, *gradients = value_and_gradient(lambda *x, f=loss: 2**-12 * f(*x, implementation="tiled"), *features)
        check(name, loss, features, [each.double() * 2**12 for each in (value, *gradients)], 2**-5)


def test_the_switch_of_tf32() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for wanted in (True, False):
            matmul.allow_tf32 = not wanted
            make_accelerator(TrainConfig(optim=OptimConfig(tf32=wanted)))
            assert matmul.allow_tf32 is wanted
    finally:
        matmul.allow_tf32 = before
