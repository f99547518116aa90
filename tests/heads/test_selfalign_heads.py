"""SelfAlign's heads ``alignment`` and ``contexts``: by hand on plain tensors, then through region models and a CLIP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.heads.alignment import Alignment
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.contexts import Contexts
from tests.references import selfalign as reference

B, L, T, CUT, D = 4, 5, 9, 6, 8  # a tower has cut the padding of texts of T places down to CUT
REGIONS, WORDS = [5, 2, 1, 4], [3, 6, 1, 2]
WIDTHS = BackboneInfo(embed_dim=D, image_locals=D, text_locals=D, image_contexts=D, text_contexts=D)
BRANCHES = ("both", "text_global", "image_global", "none")


def padded(lengths: list[int], width: int, seed: int, fill: float) -> tuple[Tensor, Tensor]:
    features = torch.full((len(lengths), width, D), fill, dtype=torch.float64)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * seed + row)
        features[row, :length] = torch.randn(length, D, generator=generator, dtype=torch.float64)
    return features, torch.arange(width) < torch.tensor(lengths)[:, None]


def given(kind: str, *, fill: float = 0.0, cut: int = CUT) -> dict[str, Tensor]:
    """What a model's towers hand to the heads; ``kind``: locals or contexts."""
    image, image_mask = padded(REGIONS, L, 1, fill)
    text, text_mask = padded(WORDS, cut, 2, fill)
    masks = {"image_context_mask": image_mask, "text_context_mask": text_mask}
    return {f"image_{kind}": image, f"text_{kind}": text, **masks, "text": torch.ones(B, T, dtype=torch.int64)}


def alignment(**options: Any) -> Alignment:
    torch.manual_seed(0)
    return Alignment(WIDTHS, **{"prototypes": 3, **options}).double()


def contexts(**options: Any) -> Contexts:
    """With norms that are no longer the identity."""
    torch.manual_seed(0)
    head = Contexts(WIDTHS, **options).double()
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, MaskedBatchNorm):
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return head


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# alignment


def test_alignment_by_hand():
    head, towers = alignment(), given("locals", fill=float("nan"))
    out = head(**towers)
    assert set(out) == set(head.provides)
    assert {key: tuple(value.shape) for key, value in out.items()} == {
        "coder_word_scores": (B, T, 3),
        "coder_word_mask": (B, T),
        "coder_word_regions": (B, T),
        "coder_region_scores": (B, L, 3),
        "coder_region_mask": (B, L),
        "coder_region_words": (B, L),
    }
    assert out["coder_word_regions"].dtype == out["coder_region_words"].dtype == torch.int64
    assert all(torch.isfinite(out[key]).all() for key in ("coder_word_scores", "coder_region_scores"))
    assert out["coder_word_mask"].sum(1).tolist() == WORDS and out["coder_region_mask"].sum(1).tolist() == REGIONS
    for row in range(B):
        words = towers["text_locals"][row, : WORDS[row]].tolist()
        regions = towers["image_locals"][row, : REGIONS[row]].tolist()
        alike = torch.tensor([[reference.cosine(word, region) for region in regions] for word in words])
        assert out["coder_word_regions"][row, : WORDS[row]].tolist() == alike.argmax(1).tolist()
        assert out["coder_region_words"][row, : REGIONS[row]].tolist() == alike.argmax(0).tolist()
        for key, tokens in (("coder_word_scores", words), ("coder_region_scores", regions)):
            wanted = [[reference.cosine(token, c) for c in head.prototypes.tolist()] for token in tokens]
            close(out[key][row, : len(tokens)], torch.tensor(wanted, dtype=torch.float64))


def test_prototypes_start_at_unit_length_and_are_all_that_learns():
    head = alignment()
    torch.testing.assert_close(head.prototypes.norm(dim=1), torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)
    assert [name for name, _ in head.named_parameters()] == ["prototypes"]
    assert head.state_names() == ["steps", "loss", "entropy"]


def test_regions_get_a_gradient_only_where_they_predict():
    head, towers = alignment(), given("locals")
    assert head(**towers)["coder_region_scores"].requires_grad
    head.requested_keys = frozenset(head.provides) - {"coder_region_words"}
    assert not head(**towers)["coder_region_scores"].requires_grad
    assert head(**towers)["coder_word_scores"].requires_grad
    with torch.no_grad():
        head.requested_keys = frozenset(head.provides)
        assert not head(**towers)["coder_region_scores"].requires_grad


@pytest.mark.parametrize(("words", "codes"), [("noun", {1}), ("noun+adj+verb", {1, 2, 3}), ("all", {0, 1, 2, 3, 4})])
def test_word_classes(words, codes):
    head, towers = alignment(words=words), given("locals")
    assert bool(head.tag_classes()) == (words != "all")
    tags = torch.randint(0, 5, (B, T), generator=torch.Generator().manual_seed(3))
    tags[3] = 4  # a text without a word that counts
    out = head(**towers, text_tags=tags)
    for row in range(B):
        counts = [place < WORDS[row] and int(tags[row, place]) in codes for place in range(T)]
        assert out["coder_word_mask"][row].tolist() == counts
        # only words that count are a region's words
        regions = towers["image_locals"][row, : REGIONS[row]].tolist()
        text = towers["text_locals"][row].tolist()
        for number, region in enumerate(regions if any(counts) else []):
            alike = {place: reference.cosine(text[place], region) for place in range(T) if counts[place]}
            assert out["coder_region_words"][row, number] == max(alike, key=alike.__getitem__)
    if words != "all":
        with pytest.raises(ValueError, match=f"alignment.words={words.replace('+', '.')} needs text_tags"):
            head(**towers)


def test_frozen_prototypes_do_not_move_and_then_do():
    head, towers = alignment(freeze_steps=2), given("locals")
    free = alignment()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for step in range(4):
        before = head.prototypes.detach().clone()
        out = head(**towers)
        close(out["coder_word_scores"], alignment_scores(head, towers))
        out["coder_word_scores"].square().sum().backward()
        frozen = step < 2
        assert head.prototypes.grad is not None and (head.prototypes.grad == 0).all() == frozen
        if step == 2:  # then the gradient is the plain one
            free.load_state_dict(head.state_dict())
            free(**towers)["coder_word_scores"].square().sum().backward()
            close(head.prototypes.grad, free.prototypes.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(head.prototypes, before) == frozen
        if step == 0:  # forward alone is no step
            head(**towers)
        head.post_step()
        assert head.steps == step + 1


def alignment_scores(head: Alignment, towers: dict[str, Tensor]) -> Tensor:
    words = towers["text_locals"][:, :, None].expand(-1, -1, 3, -1)
    scores = cosine_similarity(words, head.prototypes[None, None], dim=-1)
    scores = scores.masked_fill(~towers["text_context_mask"][..., None], 0)
    return torch.cat([scores, scores.new_zeros(B, T - CUT, 3)], 1)


@pytest.mark.parametrize(
    ("options", "widths", "message"),
    [
        ({"prototypes": 1}, {}, "prototypes must be >= 2, got 1"),
        ({"freeze_steps": -1}, {}, "freeze_steps must be >= 0"),
        ({"init": "kmeans"}, {}, "init must be one of random, regions, got 'kmeans'"),
        ({"freeze_steps": "epoch"}, {}, "freeze_steps=epoch is for a trainer"),
        ({}, {"text_locals": D + 1}, r"words \(9 channels .* regions \(8\) must share a space.*word_projection=true"),
        ({}, {"text_locals": 0, "image_locals": 0}, "must share a space"),
    ],
)
def test_alignment_names_mistakes(options, widths, message):
    with pytest.raises(ValueError, match=message):
        Alignment(BackboneInfo(embed_dim=D, **{"image_locals": D, "text_locals": D, **widths}), **options)


def test_regions_replace_random_prototypes():
    """Up to K regions of a step, drawn at random, of unit length; a batch with too few leaves the rest to the next steps."""
    head, towers = alignment(init="regions", prototypes=9), given("locals", fill=7.0)
    regions = torch.cat([row[mask] for row, mask in zip(towers["image_locals"], towers["image_context_mask"], strict=True)])
    units = torch.nn.functional.normalize(regions, dim=1)
    start = head.prototypes.detach().clone()
    assert head.health() == {"placed": 0.0}
    head.eval()(**towers)
    with torch.no_grad():
        head.train()(**towers)
    head.post_step()  # evaluation is no step of training
    assert torch.equal(head.prototypes, start) and head.placed == 0
    head(**towers)
    assert torch.equal(head.prototypes, start)  # until the step was performed
    head.post_step()
    matches = (head.prototypes @ units.T > 1 - 1e-12).nonzero()
    assert matches[:, 0].tolist() == list(range(9)) and len(set(matches[:, 1].tolist())) == 9  # 9 of the 12, each once
    ((parameter, rows),) = head.take_replaced_rows()  # whose moments in the optimizer are reset
    assert parameter is head.prototypes and rows.all()
    assert matches[:, 1].tolist() != list(range(9)) and head.health() == {"placed": 1.0}
    placed = head.prototypes.detach().clone()
    head(**towers)
    head.post_step()
    assert torch.equal(head.prototypes, placed)
    few = alignment(init="regions", prototypes=20)
    before = few.prototypes.detach().clone()
    few(**towers)
    few.post_step()
    assert few.placed == 12 and torch.equal(few.prototypes[12:], before[12:])
    assert not torch.isclose(few.prototypes[:12], before[:12]).all(1).any()
    assert few.take_replaced_rows()[0][1].tolist() == 12 * [True] + 8 * [False]
    first = few.prototypes[:12].detach().clone()
    copy = alignment(init="regions", prototypes=20)
    copy.load_state_dict(few.state_dict())
    copy(**towers)
    copy.post_step()
    assert copy.placed == 20 and torch.equal(copy.prototypes[:12], first) and not torch.equal(copy.prototypes[12:], before[12:])
    assert (copy.prototypes @ units.T).amax(1).min() > 1 - 1e-12


def test_once_all_are_placed_no_step_waits_for_the_device():
    full, part, towers = alignment(init="regions", prototypes=9), alignment(init="regions", prototypes=20), given("locals")
    for head in (full, part):
        head(**towers)
        head.post_step()
    state = {"prototypes": torch.zeros(9, D), "placed": torch.tensor(3)}
    loaded = alignment(init="regions", prototypes=9)
    loaded.load_state_dict(full.state_dict())
    for head in (full, loaded):
        start, placed = head.prototypes.detach().clone(), head.placed
        head.placed = placed.to("meta")  # whose value cannot be read
        head(**towers)
        head.post_step()
        assert torch.equal(head.prototypes, start)
        head.placed = placed
        head.load_state_dict(head.state_dict() | state)  # back to an earlier step
        head(**towers)
        head.post_step()
        assert head.placed == 9 and not head.prototypes[:3].any() and head.prototypes[3:].any(1).all()
    part(**towers)
    part.post_step()
    assert part.placed == 20


def test_a_step_that_is_skipped_places_nothing():
    head = alignment(init="regions", prototypes=9)
    start = head.prototypes.detach().clone()
    head(**given("locals"))
    head.discard()
    head.post_step()
    assert torch.equal(head.prototypes, start) and head.placed == 0


# contexts


def sets(towers: dict[str, Tensor], side: str) -> list[Tensor]:
    pairs = zip(towers[f"{side}_contexts"], towers[f"{side}_context_mask"], strict=True)
    return [features[mask] for features, mask in pairs]


@pytest.mark.parametrize(("training", "fill"), [(True, float("nan")), (False, 0.0)])
@pytest.mark.parametrize("form", ["cosine_of_mean", "mean_of_cosines"])
@pytest.mark.parametrize("branches", BRANCHES)
def test_contexts_are_equations_5_9_and_10(branches, form, training, fill):
    head, towers = contexts(branches=branches, score=form).train(training), given("contexts", fill=fill)
    state = {key: value.clone() for key, value in head.state_dict().items()}
    score, found = reference.context_score(
        sets(towers, "image"), sets(towers, "text"), state, training=training, branches=branches, score=form
    )
    out = head(**towers)
    image, text = out["coder_image_contexts"], out["coder_text_contexts"]
    assert image.shape == text.shape == (B, 2 * D if branches == "both" else D)
    close(image @ text.T, score)
    for block in (image, text) if form == "cosine_of_mean" else ():
        length = 0.5**0.5 if branches.endswith("_global") else 1.0
        close(block.norm(dim=1), torch.full((B,), length, dtype=torch.float64))
    if branches != "none":  # the two forms are two scores
        torch.manual_seed(0)
        other = "cosine_of_mean" if form == "mean_of_cosines" else "mean_of_cosines"
        out = contexts(branches=branches, score=other).train(training)(**towers)
        assert (out["coder_image_contexts"] @ out["coder_text_contexts"].T - score).abs().max() > 0.01
    guides = {"text_global": ("text",), "image_global": ("image",), "none": ()}.get(branches, ("text", "image"))
    locals_ = {"text": "image", "image": "text"}
    made = {f"coder_{side}_guide" for side in guides} | {f"coder_{locals_[side]}_locals" for side in guides}
    masks = {f"coder_{locals_[side]}_locals_mask" for side in guides}
    assert set(out) == {"coder_image_contexts", "coder_text_contexts"} | made | masks and set(out) <= set(head.provides)
    for key in made:
        wanted = found[key.removeprefix("coder_")]
        if key.endswith("guide"):
            close(out[key], torch.cat(wanted))
            continue
        length = L if "image" in key else T
        assert out[key].shape == (B, length, D) and out[f"{key}_mask"].shape == (B, length)
        for row, each in enumerate(wanted):
            close(out[key][row, : len(each)], each)
            assert out[f"{key}_mask"][row].sum() == len(each)


def test_running_statistics_are_of_what_is_valid():
    head, towers = contexts(), given("contexts", fill=7.0)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    head(**towers)
    after = head.state_dict()
    rows = torch.cat(sets(towers, "image"))
    for name, wanted in (("mean", rows.mean(0)), ("var", rows.var(0, unbiased=True))):
        key = f"norms.image.running_{name}"
        close(after[key], 0.9 * before[key] + 0.1 * wanted)
    assert after["norms.image.num_batches_tracked"] == 1 and after["guides.text.norm.num_batches_tracked"] == 1
    with torch.no_grad():
        head.eval()(**towers)
    assert all(torch.equal(value, head.state_dict()[key]) for key, value in after.items())
    assert head.state_names() == []  # BatchNorm's statistics are averaged with the weights


@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_gates(gate):
    """A value for each dimension, or one for all; between them lie the fusions."""
    head = contexts(gate=gate, branches="text_global").eval()
    module = head.guides["text"]
    context = torch.randn(B, D, dtype=torch.float64)
    guide, fused = module(context)
    both = torch.cat([guide, context], 1)
    if gate == "mlp":
        value = (module.gate[2](module.gate[0](both).clamp(min=0))).sigmoid()
        assert value.shape == (B, 1)
    else:
        value = module.gate(both).sigmoid()
        assert value.shape == (B, D)
    close(fused, value * guide + (1 - value) * context)


def test_the_papers_number_of_parameters():
    """Table IV: 183.5 million with both sub-modules, 156.2 without."""
    widths = BackboneInfo(embed_dim=2048, image_locals=2048, text_locals=2048, image_contexts=2048, text_contexts=2048)
    with torch.device("meta"):
        for gate in ("linear", "mlp"):
            heads = nn.ModuleList([Alignment(widths), Contexts(widths, gate=gate)])  # type: ignore[arg-type]
            assert sum(p.numel() for p in heads.parameters()) / 1e6 == pytest.approx(183.5 - 156.2, abs=0.05)
        assert sum(p.numel() for p in Contexts(widths, branches="none").parameters()) == 0


def test_maps_are_cosines_with_the_other_sides_guide():
    head, towers = contexts().eval(), given("contexts", fill=float("nan"))
    out, maps = head(**towers), head.maps(towers)
    assert maps["image"].shape == (B, L) and maps["text"].shape == (B, CUT)
    for side, other, lengths in (("image", "text", REGIONS), ("text", "image", WORDS)):
        for row, length in enumerate(lengths):
            local, guide = out[f"coder_{side}_locals"][row, :length], out[f"coder_{other}_guide"][row]
            close(maps[side][row, :length], cosine_similarity(local, guide[None], dim=1))
            assert (maps[side][row, length:] == -torch.inf).all()
    assert set(contexts(branches="text_global").eval().maps(towers)) == {"image"}
    assert set(contexts(branches="image_global").eval().maps(towers)) == {"text"}
    assert contexts(branches="none").eval().maps(towers) == {}


def test_gradients_reach_contexts_and_never_padding():
    head, towers = contexts(), given("contexts")
    leaves = [towers[key].requires_grad_() for key in ("image_contexts", "text_contexts")]
    out = head(**towers)
    mask = {key: out[f"{key}_mask"] for key in ("coder_image_locals", "coder_text_locals")}
    total = (out["coder_image_contexts"] @ out["coder_text_contexts"].T).square().sum()
    total = total + sum((out[key] * mask[key][..., None]).cos().sum() for key in mask)
    total.backward()
    for leaf, side in zip(leaves, ("image", "text"), strict=True):
        assert (leaf.grad[~towers[f"{side}_context_mask"]] == 0).all()
        assert (leaf.grad[towers[f"{side}_context_mask"]].norm(dim=-1) > 0).all()
    silent = {name for name, p in head.named_parameters() if p.grad is None or p.grad.norm() < 1e-12}
    assert silent == {f"guides.{side}.project.bias" for side in ("image", "text")}  # BatchNorm takes it away


@pytest.mark.parametrize(
    ("options", "widths", "message"),
    [
        ({"weight": -0.1}, {}, "weight must be >= 0, got -0.1"),
        ({"score": "mean"}, {}, "score must be one of cosine_of_mean, mean_of_cosines, got 'mean'"),
        ({}, {"text_contexts": D + 1}, r"contexts of images \(8 channels\) and texts \(9\) must share a space"),
        ({}, {"text_contexts": 0, "image_contexts": 0}, "must share a space"),
    ],
)
def test_contexts_names_mistakes(options, widths, message):
    with pytest.raises(ValueError, match=message):
        Contexts(BackboneInfo(embed_dim=D, **{"image_contexts": D, "text_contexts": D, **widths}), **options)


# the BatchNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_batch_norm_is_batch_norm_of_the_valid_rows(dtype):
    features, mask = padded(REGIONS, L, 5, 3.0)
    features = features.to(dtype)
    for training in (True, False):
        plain, ours = nn.BatchNorm1d(D).to(dtype), MaskedBatchNorm(D, across_ranks=True).to(dtype)
        for norm in (plain, ours):
            norm.train(training)
        one, other = features[mask].requires_grad_(), features.clone().requires_grad_()
        wanted, got = plain(one), ours(other, mask)
        torch.testing.assert_close(got[mask], wanted)
        weights = torch.linspace(-1, 2, wanted.numel(), dtype=dtype).view_as(wanted)
        (weights * wanted.square()).sum().backward()
        (weights * got[mask].square()).sum().backward()
        torch.testing.assert_close(other.grad[mask], one.grad, rtol=1e-4, atol=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value)
        rows = features[:, 0]  # without a mask all count
        torch.testing.assert_close(ours(rows), plain(rows))


def test_masked_batch_norm_under_autocast():
    """Statistics of many half-precision values are made in float32."""
    features = (torch.randn(64, 50, D, generator=torch.Generator().manual_seed(0)) + 30).bfloat16()
    mask = torch.rand(64, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    norm = MaskedBatchNorm(D, across_ranks=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = norm(features, mask)
    assert got.dtype == torch.bfloat16 and norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, 0.1 * features[mask].double().mean(0).float(), rtol=1e-5, atol=0)
    assert got[mask].float().mean(0).abs().max() < 0.02
