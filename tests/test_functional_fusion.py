"""The fusion kernel: eq. 1-4 in loops, forward and backward, both ways to a norm, padding, nothing, precision, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.heads.fusion_scores import Attention, Side, make_side, pair_scores
from tests.references import fusion as reference


class Case:
    """Images, texts and matrices as leaves, in float64; masks with valid positions anywhere, one at least."""

    def __init__(
        self, *, images: int = 3, texts: int = 2, regions: int = 4, words: int = 3, dim: int = 6, heads: int = 2, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

        def mask(rows: int, positions: int) -> Tensor:
            valid = torch.rand(rows, positions, generator=generator) < 0.6
            valid[torch.arange(rows), torch.randint(positions, (rows,), generator=generator)] = True
            return valid

        self.heads = heads
        self.regions, self.words, self.whole = leaf(images, regions, dim), leaf(texts, words, dim), leaf(images, dim)
        self.region_mask, self.word_mask = mask(images, regions), mask(texts, words)
        self.directions = [{name: leaf(dim, dim) for name in Attention._fields} for _ in range(2)]

    @property
    def leaves(self) -> list[Tensor]:
        matrices = [matrix for direction in self.directions for matrix in direction.values()]
        return [self.regions, self.words, self.whole, *matrices]

    def weights(self) -> list[Attention]:
        return [Attention(w["query"], w["key"], w["output"], w["output"] @ w["common"]) for w in self.directions]

    def sides(self) -> tuple[Side, Side]:
        """[n, ...] each."""
        to_text, to_image = self.weights()
        images = make_side(
            self.regions, self.region_mask, as_query=to_text, as_key=to_image, heads=self.heads, global_feature=self.whole
        )
        return images, make_side(self.words, self.word_mask, as_query=to_image, as_key=to_text, heads=self.heads)

    def score(self, images: Side, texts: Side, **options: Any) -> Tensor:
        to_text, to_image = self.weights()
        options = {"heads": self.heads, "local_weight": 0.6} | options
        return pair_scores(images, texts, image_to_text=to_text, text_to_image=to_image, **options)

    def all_pairs(self, **options: Any) -> Tensor:
        images, texts = self.sides()
        return self.score(grouped(images, 1), grouped(texts, 1), **options)[0]

    def expected(self, local_weight: float = 0.6) -> Tensor:
        rows = [
            reference.score(
                self.regions[i][self.region_mask[i]],
                self.words[j][self.word_mask[j]],
                *self.directions,
                heads=self.heads,
                local_weight=local_weight,
                whole=self.whole[i],
            )
            for i in range(len(self.regions))
            for j in range(len(self.words))
        ]
        return torch.stack(rows).view(len(self.regions), -1)


def grouped(sides: Side, groups: int) -> Side:
    return sides.map(lambda field: field.unflatten(0, (groups, -1)))


@pytest.mark.parametrize(
    ("positions", "local_weight"), [((3, 2), 0.0), ((3, 9), 0.6), ((9, 3), 0.6), ((10, 9), 1.0)]
)
def test_is_the_papers_equations_forward_and_backward(positions, local_weight):
    case = Case(regions=positions[0], words=positions[1])
    images, texts = case.sides()
    assert [images.gram is not None, texts.gram is not None] == [each < 4 for each in positions]  # both ways are taken
    got, want = case.all_pairs(local_weight=local_weight), case.expected(local_weight)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad(got, case.leaves, upstream, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(want, case.leaves, upstream, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


sizes = st.integers(1, 4)


@given(sizes, sizes, st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_sizes_and_masks(images, texts, regions, words, heads, channels, seed):
    case = Case(images=images, texts=texts, regions=regions, words=words, dim=heads * channels, heads=heads, seed=seed)
    torch.testing.assert_close(case.all_pairs(), case.expected())


def test_both_ways_to_a_norm_are_equal_forward_and_backward():
    case = Case(regions=5, words=5, dim=12, heads=2)
    images, texts = (grouped(each, 1) for each in case.sides())
    assert images.gram is not None and texts.gram is not None
    upstream = torch.randn(1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = []
    for one, two in ((images, texts), (images._replace(gram=None), texts), (images, texts._replace(gram=None))):
        score = case.score(one, two)
        results.append([score, *torch.autograd.grad(score, case.leaves, upstream, retain_graph=True)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two)


def test_what_padding_holds_is_of_no_account_and_gets_no_gradient():
    case = Case(regions=6, words=7)
    want = case.all_pairs()
    with torch.no_grad():
        case.regions[~case.region_mask] = torch.nan
        case.words[~case.word_mask] = 1e30
    got = case.all_pairs()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    regions, words = torch.autograd.grad(got.sum(), [case.regions, case.words])
    assert not regions[~case.region_mask].any() and not words[~case.word_mask].any()
    assert regions[case.region_mask].all() and words[case.word_mask].all()


def test_nothing_has_the_score_zero_and_finite_gradients():
    case = Case(images=3, texts=3)
    with torch.no_grad():
        case.regions[0] = 0  # an image of nothing
        case.words[1, case.word_mask[1].nonzero()[0, 0]] = 0  # a word of nothing
        case.whole[0] = 0
    case.word_mask[2] = False  # a text without words
    got = case.all_pairs()
    assert not got[0].any() and not got[:, 2].any()
    assert got.isfinite().all()
    gradients = torch.autograd.grad(got.sum(), case.leaves)
    assert all(each.isfinite().all() and each.abs().max() < 1e3 for each in gradients)


def test_saturated_attention_has_finite_gradients():
    case = Case()
    with torch.no_grad():
        case.regions *= 1e4
        case.words *= 1e4
    got = case.all_pairs()
    torch.testing.assert_close(got, case.expected())
    assert all(each.isfinite().all() for each in torch.autograd.grad(got.sum(), case.leaves))


def in_autocast(case: Case, number: torch.dtype, autocast: torch.dtype | None) -> Tensor:
    """The scores of the case's tensors in another dtype, made under autocast or without."""
    common = [(w["output"] @ w["common"]).float() for w in case.directions]  # which callers make beforehand
    for leaf in case.leaves:
        leaf.data = leaf.data.to(number)
    to_text, to_image = (
        Attention(w["query"], w["key"], w["output"], each) for w, each in zip(case.directions, common, strict=True)
    )
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        images = make_side(
            case.regions, case.region_mask, as_query=to_text, as_key=to_image, heads=2, global_feature=case.whole
        )
        texts = make_side(case.words, case.word_mask, as_query=to_image, as_key=to_text, heads=2)
        score = pair_scores(
            grouped(images, 1), grouped(texts, 1), image_to_text=to_text, text_to_image=to_image, heads=2, local_weight=0.6
        )
    assert score.dtype == torch.float32
    return score[0].double()


def rounded(number: torch.dtype, positions: int) -> Case:
    case = Case(regions=positions, words=positions, dim=8)
    with torch.no_grad():
        for leaf in case.leaves:
            leaf.copy_(leaf.to(number))
    return case


@pytest.mark.parametrize(("number", "positions"), [(torch.float32, 3), (torch.bfloat16, 9), (torch.float16, 3)])
def test_half_precision_is_raised(number, positions):
    case = rounded(number, positions)
    want = case.all_pairs()
    torch.testing.assert_close(in_autocast(case, number, None), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [3, 9])
def test_autocast_rounds_products_alone(positions):
    case = rounded(torch.float32, positions)
    want = case.all_pairs()
    got = in_autocast(case, torch.float32, torch.bfloat16)
    assert 1e-5 < (got - want).abs().max() < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, r"got \(3, 4, 6\) and \(3, 5\)"),
        ({"mask": torch.ones(3, 4)}, "must be bool, got torch.float32"),
        ({"tokens": torch.randn(3, 4, 9)}, r"tokens have 9 channels, and the matrices are \(6, 6\)"),
        ({"heads": 4}, "heads must divide the dimension 6, got 4"),
    ],
)
def test_mistakes_are_named(change, message):
    matrices = Attention(*torch.randn(4, 6, 6))
    given_ = {"tokens": torch.randn(3, 4, 6), "mask": torch.ones(3, 4, dtype=torch.bool), "heads": 2} | change
    with pytest.raises(ValueError, match=message):
        make_side(given_.pop("tokens"), given_.pop("mask"), as_query=matrices, as_key=matrices, **given_)
