"""GRUs under autocast on a CPU: in float32, with the gradients; and every GRU of the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import coder_plugin
from coder_plugin.backbones.base import BackboneInfo
from coder_plugin.backbones.gpo import GPO
from coder_plugin.backbones.recurrent import GRU, GRUCell
from coder_plugin.backbones.tokenizers import build_vocabulary
from coder_plugin.heads.captioner import Captioner


def pair(kind: type[nn.Module], plain: type[nn.Module], *sizes: int, **options: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    ours, theirs = kind(*sizes, **options), plain(*sizes, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_gru_is_that_of_float32(packed: bool, dtype: torch.dtype) -> None:
    ours, theirs = pair(GRU, nn.GRU, 4, 3, batch_first=True, bidirectional=True)
    rows = torch.randn(3, 5, 4).to(dtype)
    given = pack_padded_sequence(rows, torch.tensor([5, 2, 4]), batch_first=True, enforce_sorted=False) if packed else rows
    alike = given.to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        states, last = ours(given)
    want, want_last = theirs(alike)
    if packed:
        states, want = (pad_packed_sequence(each, batch_first=True)[0] for each in (states, want))
    assert states.dtype == last.dtype == torch.float32
    torch.testing.assert_close(states, want, rtol=0, atol=0)
    torch.testing.assert_close(last, want_last, rtol=0, atol=0)
    for got, expected in zip(
        torch.autograd.grad(states.square().sum(), list(ours.parameters())),
        torch.autograd.grad(want.square().sum(), list(theirs.parameters())),
        strict=True,
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_cell_and_float16_too() -> None:
    cell, plain = pair(GRUCell, nn.GRUCell, 4, 3)
    rows, start = torch.randn(5, 4), torch.zeros(5, 3)
    with torch.autocast("cpu", torch.float16):
        got = cell(rows, start)
    torch.testing.assert_close(got, plain(rows, start), rtol=0, atol=0)


def test_without_autocast_it_is_torchs_in_every_precision() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for ours, theirs in (pair(GRU, nn.GRU, 4, 3), pair(GRUCell, nn.GRUCell, 4, 3)):
            rows = torch.randn(5, 4, dtype=dtype)
            got, want = ours.to(dtype)(rows), theirs.to(dtype)(rows)
            got, want = (each[0] if isinstance(each, tuple) else each for each in (got, want))
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_every_gru_of_the_package() -> None:
    words = build_vocabulary(["a cat", "a dog"] * 4)
    sizes = {"region_dim": 4, "embed_dim": 8, "word_dim": 4, "vocabulary": words}
    models = [coder_plugin.create_model(name, loss="dcl", **sizes) for name in ("region-bigru", "region-bigru-vsrn")]
    models.append(Captioner(BackboneInfo(embed_dim=4, image_tokens=4, vocabulary=9), hidden=5, word_dim=3))
    found = 0
    for model in models:
        aggregators = {id(module.gru) for module in model.modules() if isinstance(module, GPO)}  # GPO turns autocast off itself
        for module in model.modules():
            if isinstance(module, (nn.GRU, nn.GRUCell)) and id(module) not in aggregators:
                assert isinstance(module, (GRU, GRUCell))
                found += 1
    assert found == 5
