"""The fusion head: keys, tiles, projections, what is saved for the backward pass, precision, and the scorer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.fusion import Fusion
from coder_plugin.heads.fusion_scores import Attention
from tests.references import fusion as reference

PLAIN = BackboneInfo(embed_dim=8, image_contexts=8, text_contexts=8)
OTHER = BackboneInfo(embed_dim=8, image_contexts=10, text_contexts=6, image_global=5)


def made(widths: BackboneInfo = PLAIN, *, seed: int = 0, **options: Any) -> Fusion:
    torch.manual_seed(seed)
    return Fusion(widths, **{"heads": 2, "init": "xavier"} | options).double()


def batch(
    widths: BackboneInfo = PLAIN,
    n: int = 5,
    regions: int = 4,
    words: int = 6,
    *,
    texts: tuple[str, ...] = ("text",),
    seed: int = 1,
) -> dict[str, Tensor]:
    """Tokens [n, S, C] in float64 that ask for a gradient, and masks with a valid position at least."""
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, Tensor] = {}
    for name, positions, channels in (
        ("image", regions, widths.image_contexts),
        *((name, words, widths.text_contexts) for name in texts),
    ):
        tokens = torch.randn(n, positions, channels, generator=generator, dtype=torch.float64)
        given[f"{name}_contexts"] = tokens.requires_grad_()
        given[f"{name}_context_mask"] = torch.rand(n, positions, generator=generator) < 0.7
        given[f"{name}_context_mask"][:, 0] = True
    if widths.image_global:
        given["image_global"] = torch.randn(n, widths.image_global, generator=generator, dtype=torch.float64)
    return given


def items(head: Fusion, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.no_grad():
        return head.image_item(given), head.text_item(given)


def matrices(head: Fusion) -> list[dict[str, Tensor]]:
    return [
        {name: getattr(direction, name) for name in Attention._fields}
        for direction in (head.image_to_text, head.text_to_image)
    ]


def test_is_the_papers_score_of_projected_tokens():
    head, given = made(OTHER, local_weight=0.3), batch(OTHER)
    regions, words = given["image_contexts"] @ head.project_image.weight.T, given["text_contexts"] @ head.project_text.weight.T
    whole = given["image_global"] @ head.project_whole.weight.T
    got = head(**given)["coder_fusion"]
    for i in range(5):
        for j in range(5):
            want = reference.score(
                regions[i][given["image_context_mask"][i]],
                words[j][given["text_context_mask"][j]],
                *matrices(head),
                heads=2,
                local_weight=0.3,
                whole=whole[i],
            )
            torch.testing.assert_close(got[i, j], want, rtol=1e-12, atol=1e-12)


def test_every_set_of_texts_that_is_there_has_its_scores():
    head = made()
    names = ("text", "positive", "noised", "noised_positive")
    given = batch(texts=names)
    got = head(**given)
    assert tuple(got) == head.provides
    for key, name in zip(head.provides, names, strict=True):
        alone = {key: value for key, value in given.items() if key.startswith("image")}
        alone |= {"text_contexts": given[f"{name}_contexts"], "text_context_mask": given[f"{name}_context_mask"]}
        torch.testing.assert_close(got[key], head(**alone)["coder_fusion"])
    assert set(head(**batch())) == {"coder_fusion"}
    assert {f"{name}_{what}" for name in names[1:] for what in ("contexts", "context_mask")} < set(head.optional)


@pytest.mark.parametrize("heads", [1, 2])
def test_an_identity_start_compares_tokens_as_they_are(heads):
    head, given = made(PLAIN, init="identity", heads=heads, local_weight=0.3), batch()
    got = head(**given)["coder_fusion"]
    for i in range(5):
        for j in range(5):
            v, w = (given[f"{side}_contexts"][n][given[f"{side}_context_mask"][n]] for side, n in (("image", i), ("text", j)))
            # each head is a block of channels, and what a query attends to is a mean of tokens of the other side
            words, regions = attended(v, w, heads), attended(w, v, heads)
            local = cosine(v, words).mean() / 2 + cosine(w, regions).mean() / 2
            want = 0.3 * local + 0.7 * cosine(regions.mean(0), words.mean(0))
            torch.testing.assert_close(got[i, j], want, rtol=1e-12, atol=1e-12)


def test_a_whole_image_feature_starts_without_effect_and_is_learnt():
    head, given = made(OTHER, init="identity"), batch(OTHER)
    scores = head(**given)["coder_fusion"]
    torch.testing.assert_close(head(**{**given, "image_global": 9 * given["image_global"]})["coder_fusion"], scores)
    scores.diagonal().sum().backward()
    with torch.no_grad():
        head.project_whole.weight += 0.1 * head.project_whole.weight.grad
    after = head(**given)["coder_fusion"]
    assert after.diagonal().sum() > scores.diagonal().sum()


def test_without_recomputing_values_and_gradients_are_the_same_and_more_is_saved():
    found = []
    for recompute in (True, False):
        head, given = made(OTHER, recompute=recompute), batch(OTHER, n=7)
        scores = head(**given)["coder_fusion"]
        weighed = scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)
        leaves = [*head.parameters(), given["image_contexts"], given["text_contexts"]]
        found.append([scores, *torch.autograd.grad(weighed.sum(), leaves)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    assert saved_bytes(32, tile=64, recompute=False) > 2 * saved_bytes(32, tile=64)


def attended(queries: Tensor, others: Tensor, heads: int) -> Tensor:
    blocks = zip(queries.split(8 // heads, 1), others.split(8 // heads, 1), strict=True)
    return torch.cat([(x @ y.T / (8 / heads) ** 0.5).softmax(1) @ y for x, y in blocks], 1)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(x, y, dim=-1)


@pytest.mark.parametrize("pairs_per_tile", [3, None])
def test_tiles_do_not_matter_forward_or_backward(pairs_per_tile):
    found = []
    for tile in (10_000, pairs_per_tile):
        head, given = made(OTHER, pairs_per_tile=tile), batch(OTHER, n=7)
        scores = head(**given)["coder_fusion"]
        weighed = scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)
        leaves = [*head.parameters(), given["image_contexts"], given["text_contexts"]]
        found.append([scores, *torch.autograd.grad(weighed.sum(), leaves)])
        with torch.no_grad():
            torch.testing.assert_close(head(**given)["coder_fusion"], scores)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("widths", [PLAIN, OTHER])
def test_all_parameters_are_used_and_none_is_there_for_what_is_absent(widths):
    head = made(widths)
    head(**batch(widths))["coder_fusion"].square().sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    extra = {name.split(".")[0] for name, _ in head.named_parameters()} - {"image_to_text", "text_to_image"}
    assert extra == ({"project_image", "project_text", "project_whole"} if widths is OTHER else set())
    assert not head.state_names()


def saved_bytes(n: int, *, tile: int, **options: Any) -> int:
    """Of what forward keeps for the backward pass, beside parameters and inputs."""
    head, given = made(pairs_per_tile=tile, **options).float(), batch(n=n, regions=9, words=8)
    given = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
    known = {each.untyped_storage().data_ptr() for each in (*head.parameters(), *given.values())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(**given)
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in known)


def test_what_is_saved_grows_with_the_tokens_and_not_with_the_pairs():
    few, many = saved_bytes(16, tile=64), saved_bytes(64, tile=64)
    attention = 4 * 64**2 * 2 * 9 * 8  # bytes of one direction's, of all pairs
    assert many < 4.5 * few
    assert many < attention / 3


def test_float32_under_autocast_and_finite_gradients():
    head, given = made(OTHER).float(), batch(OTHER)
    given = {key: value.detach().float() if value.is_floating_point() else value for key, value in given.items()}
    given["image_contexts"].requires_grad_()
    want = head(**given)["coder_fusion"]
    with torch.autocast("cpu", torch.bfloat16):
        got = head(**given)["coder_fusion"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=0.02)  # the projections alone are in bfloat16
    got.sum().backward()
    assert given["image_contexts"].grad.isfinite().all()


@pytest.mark.parametrize(
    ("widths", "options", "message"),
    [
        (PLAIN, {"heads": 3}, "heads must divide the joint dimension 8, got 3"),
        (PLAIN, {"heads": 0}, "got 0"),
        (PLAIN, {"local_weight": 1.1}, r"local_weight must be in \[0, 1\], got 1.1"),
        (PLAIN, {"pairs_per_tile": 0}, "pairs_per_tile must be >= 1, got 0"),
        (PLAIN, {"init": "orthogonal"}, "init must be one of identity, xavier, got 'orthogonal'"),
        (BackboneInfo(embed_dim=8, image_contexts=8), {}, "the tokens of both towers"),
    ],
)
def test_mistakes_are_named(widths, options, message):
    with pytest.raises(ValueError, match=message):
        Fusion(widths, **options)


# The scorer


@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([1, 4, 7, 1000]),
    st.sampled_from([0, 2500, 1 << 30]),
    st.integers(0, 99),
)
def test_the_scorer_gives_what_forward_gives(images, texts, pairs_per_tile, memory, seed):
    head = made(OTHER, pairs_per_tile=pairs_per_tile)
    image_item, _ = items(head, batch(OTHER, n=images, seed=seed))
    _, text_item = items(head, batch(OTHER, n=texts, words=9, seed=seed + 1))
    text_item["mask"] &= torch.arange(9) < torch.randint(1, 10, (texts, 1), generator=torch.Generator().manual_seed(seed))
    scorer = head.scorer(image_item, text_item, memory=memory)
    want = plain(head, image_item, text_item)
    torch.testing.assert_close(scorer.all_pairs(), want, rtol=1e-9, atol=1e-9)
    generator = torch.Generator().manual_seed(seed)
    for a, b in ((1, 3), (4, 1), (2, 2)):
        i, j = (torch.randint(n, (5, k), generator=generator) for n, k in ((images, a), (texts, b)))
        got = scorer(i, j)
        assert got.shape == (5, a, b)
        torch.testing.assert_close(got, want[i[:, :, None], j[:, None]], rtol=1e-9, atol=1e-9)


def plain(head: Fusion, images: dict[str, Tensor], texts: dict[str, Tensor]) -> Tensor:
    """[N, M] of the reference."""
    rows = [
        reference.score(
            images["tokens"][i][images["mask"][i]],
            texts["tokens"][j][texts["mask"][j]],
            *matrices(head),
            heads=head.heads,
            local_weight=head.local_weight,
            whole=images["whole"][i],
        )
        for i in range(len(images["mask"]))
        for j in range(len(texts["mask"]))
    ]
    return torch.stack(rows).view(len(images["mask"]), -1).detach()
