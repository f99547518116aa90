"""How near losses come to float64 with the roundings of a GPU's products, which are imitated on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coder_plugin.contrast import products, sums, tiles, variance
from coder_plugin.data.scenes import open_scenes
from coder_plugin.functional import dcl, m_dcl
from coder_plugin.training import loop
from coder_plugin.training.accelerator import tf32_products
from tests.losses.checks import ascl_of_features, clip_of_features, triplet_of_features
from tests.losses.drawn import drawing, rows, tile_shape, value_and_gradient

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
    generator, ids = drawing(1), torch.arange(N) // 2
    draw = lambda n=N: rows(generator, n, D, 2.0).to(dtype)  # noqa: E731
    pair, rest, noised, hard = [draw(), draw()], [draw(), draw(), draw(200), draw(200)], draw(), draw(30)
    like = lambda x, v: x.to(torch.promote_types(v.dtype, dtype))  # noqa: E731
    scale = torch.tensor(14.3, dtype=torch.float64)
    yield "dcl", lambda v, w, **form: dcl(v, w, image_ids=ids, **form), pair
    yield "dcl of anchors", lambda v, w, **form: dcl(v, w, image_ids=ids, anchors=slice(9, 40), **form), pair
    yield "dcl, hard", lambda v, w, **form: dcl(v, w, negatives=like(hard, v), image_ids=ids, **form), pair
    yield "m_dcl", lambda v, w, **form: m_dcl(v, w, *(like(x, v) for x in rest), image_ids=ids, **form), pair
    yield "ascl", lambda *x, **form: ascl_of_features(*x, temperature=0.05, image_ids=ids, **form), [*pair, noised]
    yield "hardest", lambda v, w, **form: triplet_of_features(v, w, image_ids=ids, **form), pair
    every = {"image_ids": ids, "hardest": False, "margin": 0.5}
    yield "all", lambda v, w, **form: triplet_of_features(v, w, **every, **form), pair
    yield "all, hard", lambda v, w, x, **form: triplet_of_features(v, w, negatives=x, **every, **form), [*pair, hard]
    yield "clip", lambda v, w, scale, **form: clip_of_features(v, w, scale, **form), [*pair, scale]


def check(name: str, loss: Callable[..., Tensor], features: list[Tensor], got: list[Tensor], bound: float) -> None:
    """Value and gradients are those of float64 within ``bound``, relative to the largest."""
    wide = [x.double() for x in features]
    truth = value_and_gradient(lambda *x: loss(*x, implementation="reference"), *wide)
    for k, (one, other) in enumerate(zip(got, truth, strict=True)):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error <= bound, f"{name}, result {k}: {float(error):.1e}"


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Half types are multiplied as they are, as on a GPU; the list receives the type of each product."""
    multiplied: list[torch.dtype] = []
    original = products.matmul

    def matmul(one: Tensor, other: Tensor) -> Tensor:
        multiplied.append(other.dtype)
        return original(one, other)

    monkeypatch.setattr(products, "multiplies_halves", lambda device: True)
    for module in (products, sums, tiles, variance):
        monkeypatch.setattr(module, "matmul", matmul)
    return multiplied


@pytest.mark.parametrize(
    ("dtype", "bound", "one_tile"),
    [
        (torch.bfloat16, 2**-7, True),
        (torch.float16, 2**-10, False),
        pytest.param(torch.bfloat16, 2**-7, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, 2**-10, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_half_types_are_multiplied_as_they_are(dtype, bound, one_tile, halves) -> None:
    """Sums in float32: value and gradients against float64 of the same features."""
    for name, loss, features in losses(dtype):
        halves.clear()
        with tile_shape(700, anchors=20, one_tile=N * N if one_tile else 0):
            got = value_and_gradient(lambda *x, f=loss: f(*x, implementation="tiled"), *features)
        assert got[1].dtype == dtype and got[0].dtype.itemsize >= 4
        check(name, loss, features, got, bound)
        assert dtype in halves, name


@pytest.mark.parametrize("form", ["reference", "tiled"])
def test_tf32(form: str) -> None:
    for name, loss, features in losses(torch.float32):
        with TF32() as mode, tile_shape(1500, anchors=20):
            got = value_and_gradient(lambda *x, f=loss: f(*x, implementation=form), *features)
        assert mode.products, name
        check(name, loss, features, got, 2**-9)


@pytest.mark.parametrize("one_tile", [pytest.param(True, marks=pytest.mark.slow), False])
def test_float16_keeps_small_slopes(one_tile: bool, halves: list[torch.dtype]) -> None:
    """2^-12 of a loss: single slopes are below float16's range, while gradients, their sums, are not."""
    for name, loss, features in losses(torch.float16):
        # no product in its backward pass; several features' types; a gradient that is below the range itself
        if name in ("hardest", "clip", "all, hard"):
            continue
        with tile_shape(700, anchors=20, one_tile=N * N if one_tile else 0):
            value, *gradients = value_and_gradient(
                lambda *x, f=loss: 2**-12 * f(*x, implementation="tiled"), *features
            )
        check(name, loss, features, [each.double() * 2**12 for each in (value, *gradients)], 2**-5)


@pytest.mark.parametrize("wanted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tf32_is_set_in_training_steps_alone(wanted, tmp_path, tiny_model, monkeypatch) -> None:
    seen = {"step": set(), "evaluation": set()}
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    class Watched(loop.Trainer):
        def training_step(self, batches):
            seen["step"].add((matmul.allow_tf32, cudnn.allow_tf32))
            return super().training_step(batches)

    evaluate = loop.evaluate
    monkeypatch.setattr(
        loop, "evaluate", lambda *a, **k: seen["evaluation"].add(matmul.allow_tf32) or evaluate(*a, **k)
    )
    monkeypatch.setattr(cudnn, "allow_tf32", wanted)  # the user's own
    before = matmul.allow_tf32
    options = {
        "epochs": 1, "batch_size": 4, "train_num_samples": 8, "workers": 0, "logs": str(tmp_path), "tf32": wanted,
    }  # fmt: skip
    try:
        matmul.allow_tf32 = not wanted
        val = open_scenes("val", count=8)
        Watched(model=tiny_model, loss="dcl", train="scenes", val=val, config=options).run()
        assert matmul.allow_tf32 is not wanted
    finally:
        matmul.allow_tf32 = before
    assert seen == {"step": {(wanted, wanted)}, "evaluation": {not wanted}}


@pytest.mark.parametrize("name", ["tf32", "ieee", "none"])
@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_that_is_set_by_its_new_name_is_put_back(name, wanted) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = name
        with tf32_products(wanted), contextlib.suppress(KeyError):
            assert (matmul.fp32_precision == "tf32") is wanted
            raise KeyError
        assert matmul.fp32_precision == name
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


@pytest.mark.parametrize(("cuda", "multiplied"), [("12.8", True), (None, False)])  # None: ROCm
def test_halves_are_raised_where_torch_cannot_add_their_products_in_float32(cuda, multiplied, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert products.multiplies_halves(torch.device("cuda")) is multiplied
    assert not products.multiplies_halves(torch.device("cpu"))
