"""What tests of losses by tiles share: small tiles, drawn features, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coder_plugin.functional import tiled

FEW = 150  # elements of a tile in these tests: ragged tiles of a few rows


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_ON_CPU", FEW)
    monkeypatch.setattr(tiled, "ONE_TILE", 20)  # 4 pairs and fewer are one tile


def value_and_gradient(function: Callable[..., Tensor], *features: Tensor) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in features]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def compare(function: Callable[..., Tensor], *features: Tensor, bound: float = 1e-10, **options: Any) -> None:
    """The reference and the tiles, of whole rows as on a CPU and squares as on a GPU.

    Value and gradients of the features differ by at most ``bound``, relative to the largest."""

    def results(form: str) -> list[Tensor]:
        return value_and_gradient(lambda *leaves: function(*leaves, implementation=form, **options), *features)

    reference = results("reference")
    for whole_rows in (("cpu",), ()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiled, "WHOLE_ROWS", whole_rows)
            for want, got in zip(reference, results("tiled"), strict=True):
                assert got.dtype == want.dtype
                assert (got - want).abs().max() <= bound * want.abs().max().clamp(min=1e-3)


def rows(generator: torch.Generator, n: int, d: int, spread: float) -> Tensor:
    """Unit vectors; with a small spread all are nearly equal."""
    common = torch.ones(d, dtype=torch.float64)
    return normalize(common / spread + torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)
