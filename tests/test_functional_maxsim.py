"""MaxSim against loops in float64: values, gradients, masks, lengths, tiles, precision, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from coder_plugin.heads.maxsim import maxsim
from tests.few import few
from tests.references import maxsim as reference

DIRECTIONS, REDUCTIONS = ("text", "image", "both"), ("mean", "sum")


def case(images: int, texts: int, tokens: int, words: int, dim: int, seed: int, *, valid: float = 0.7) -> tuple[Tensor, ...]:
    """Tokens in float64 and masks with valid positions anywhere, or nowhere; NaN at padding."""
    generator = torch.Generator().manual_seed(seed)

    def side(rows: int, positions: int) -> tuple[Tensor, Tensor]:
        mask = torch.rand(rows, positions, generator=generator) < valid
        values = torch.randn(rows, positions, dim, generator=generator, dtype=torch.float64)
        return values.masked_fill(~mask[..., None], torch.nan), mask

    return *side(images, tokens), *side(texts, words)


def expected(image_tokens: Tensor, image_mask: Tensor, text_tokens: Tensor, text_mask: Tensor, **options: str) -> Tensor:
    rows = [
        torch.stack([reference.score(image[valid], text[words], **options)
                     for text, words in zip(text_tokens, text_mask, strict=True)])
        for image, valid in zip(image_tokens, image_mask, strict=True)
    ]  # fmt: skip
    return torch.stack(rows)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", few([60, 1, 1 << 20]))
def test_is_the_equation_forward_and_backward(direction: Any, reduction: Any, tile: int) -> None:
    sides = case(5, 4, 6, 3, 8, seed=1)
    tokens = [sides[0].requires_grad_(), sides[2].requires_grad_()]
    got = maxsim(*sides, direction=direction, reduction=reduction, tile=tile)
    want = expected(*sides, direction=direction, reduction=reduction)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(got, tokens, upstream), torch.autograd.grad(want, tokens, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_values_by_hand() -> None:
    """Lengths do not count, a word without a match on a side of padding has 0, and the two directions differ."""
    patches, mask = 7 * torch.eye(3)[None], torch.tensor([[True, True, False]])
    words = torch.tensor([[[0.0, 2.0, 0.0], [0.0, 0.0, 5.0], [0.6, 0.8, 0.0]]])
    every = torch.ones(1, 3, dtype=torch.bool)
    assert maxsim(patches, mask, words, every).item() == pytest.approx((1 + 0 + 0.8) / 3)
    assert maxsim(patches, mask, words, every, reduction="sum").item() == pytest.approx(1.8)
    assert maxsim(patches, mask, words, every, direction="image").item() == pytest.approx((0.6 + 1) / 2)
    assert maxsim(patches, mask, words, every, direction="both").item() == pytest.approx((0.6 + 0.8) / 2)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    for direction in DIRECTIONS:
        for masks in ((nothing, every), (every, nothing), (nothing, nothing)):
            assert maxsim(patches, masks[0], words, masks[1], direction=direction).item() == 0
    opposite = torch.tensor([[[-1.0, 0.0, 0.0]]])  # a best match may be negative: padding is no match of 0
    assert maxsim(patches[:, :1], mask[:, :1], opposite, every[:, :1]).item() == -1
    assert maxsim(patches[:, [0, 0, 1]], mask, opposite, every[:, :1]).item() == -1


def test_a_tile_bounds_what_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["coder_plugin.heads.maxsim"]
    compute, sizes_of_tiles = module.unit_maxsim, []

    def counted(images: Tensor, image_mask: Tensor, texts: Tensor, text_mask: Tensor, **options: Any) -> Tensor:
        sizes_of_tiles.append(image_mask.numel() * text_mask.numel())
        return compute(images, image_mask, texts, text_mask, **options)

    monkeypatch.setattr(module, "unit_maxsim", counted)
    maxsim(*case(23, 31, 4, 5, 2, seed=0), tile=500)
    assert max(sizes_of_tiles) <= 500 and sum(sizes_of_tiles) == 23 * 31 * 20
    sizes_of_tiles.clear()
    maxsim(*case(3, 2, 4, 5, 2, seed=0), tile=1)  # one pair at least
    assert sizes_of_tiles == [20] * 6
    assert maxsim(*case(0, 2, 4, 5, 2, seed=0)).shape == (0, 2) and maxsim(*case(2, 0, 4, 5, 2, seed=0)).shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_raised_first(dtype: torch.dtype) -> None:
    sides = case(4, 4, 5, 5, 16, seed=3)
    rounded = [each.to(dtype) if each.is_floating_point() else each for each in sides]
    with torch.autocast("cpu", torch.bfloat16):
        got = maxsim(*rounded)
    assert got.dtype == torch.float32
    exact = maxsim(*(each.double() if each.is_floating_point() else each for each in rounded))
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_module_of_it_compiles() -> None:
    sides = [each.float() if each.is_floating_point() else each for each in case(3, 2, 4, 5, 6, seed=4)]
    compiled = torch.compile(lambda *tensors: maxsim(*tensors, direction="both"), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*sides), maxsim(*sides, direction="both"))


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"image_tokens": torch.ones(3, 4)}, r"image_tokens must be .* got \(3, 4\) and bool \(2, 3\)"),
        ({"image_mask": torch.ones(2, 4, dtype=torch.bool)}, "image_mask bool of its shape without D"),
        ({"text_mask": torch.ones(2, 3)}, r"text_tokens must be .* float32 \(2, 3\)"),
        ({"text_tokens": torch.ones(2, 0, 4), "text_mask": torch.ones(2, 0, dtype=torch.bool)}, "1 or more"),
        ({"text_tokens": torch.ones(2, 3, 5)}, "the same channels and leading dimensions"),
        ({"direction": "images"}, "direction must be one of text, image, both, got 'images'"),
        ({"reduction": "max"}, "reduction must be one of mean, sum, got 'max'"),
        ({"tile": 0}, "tile must be 1 or more, got 0"),
    ],
)
def test_bad_input(changed: dict[str, Any], text: str) -> None:
    tokens, mask = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    given = {"image_tokens": tokens, "image_mask": mask, "text_tokens": tokens, "text_mask": mask}
    with pytest.raises(ValueError, match=text):
        maxsim(**{**given, **changed})
