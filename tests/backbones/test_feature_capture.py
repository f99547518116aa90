"""Catching locals and contexts: under checkpointing and precisions, for whom, with what refusals, and through exports.

Every model is one of tests/backbones/towers.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coder_plugin.backbones import token_projection
from coder_plugin.backbones.clip import _check_context
from coder_plugin.backbones.feature_capture import AGGREGATOR_KEYS, FeatureCapture
from coder_plugin.errors import CoderError
from coder_plugin.pretrained.export import HEADS, export_model, read_heads
from coder_plugin.pretrained.open import load_model
from tests.backbones.towers import EVERY, IMAGE, TEXT, images, texts, texts_of
from tests.few import few

pytestmark = pytest.mark.usefixtures("quiet")


@torch.no_grad()
def test_blocks_that_run_sequence_first(make) -> None:
    expected = make()
    model = make()
    if not hasattr(model.transformer, "batch_first"):
        pytest.skip("open_clip 4 has no such blocks")
    for transformer in (model.visual.transformer, model.transformer):
        transformer.batch_first = False
        for block in transformer.resblocks:
            block.attn.batch_first = False
    plain = copy.copy(model)
    plain._coder_capture = FeatureCapture(model, EVERY, context_blocks=2)
    expected._coder_capture = FeatureCapture(expected, EVERY, context_blocks=2)
    wanted = {**expected.describe_image(images(model)), **expected.describe_text(texts())}
    found = {**plain.describe_image(images(model)), **plain.describe_text(texts())}
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


def weighed(known: dict[str, Tensor], keys: tuple[str, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return sum((known[key] * torch.randn(known[key].shape, generator=generator)).mean() for key in keys)


@pytest.mark.parametrize(
    ("image", "text"),
    [
        ("vit", "clip"),
        ("timm-token", "bert-mean"),
        pytest.param("timm-map", "siglip", marks=pytest.mark.slow),
        pytest.param("timm-resnet", "custom", marks=pytest.mark.slow),
        ("timm-convnext", "t5"),
        pytest.param("coca", "bert-dense", marks=pytest.mark.slow),
    ],
)
def test_checkpointing_changes_no_gradient(make, image: str, text: str) -> None:
    """And every parameter of the path to the locals gets one; recomputation catches nothing."""
    gradients = []
    for enable in (False, True):
        model = make(image, text).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if enable:
            model.set_grad_checkpointing()
        known = {**model.describe_image(images(model)), **model.describe_text(texts_of(text))}
        weighed(known, (*IMAGE, *TEXT, "image_tokens", "text_tokens")).backward()
        assert model._coder_capture._captured is None
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for key, value in plain.items():
        torch.testing.assert_close(checkpointed[key], value, rtol=1e-3, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["vit", "coca", "resnet", "timm-map", "timm-resnet"])
def test_gradients_reach_the_towers_own_parameters(make, name: str) -> None:
    """Locals alone train all that comes before the last block, and the projection, but not that block."""
    model = make(name).train()
    weighed({**model.describe_image(images(model)), **model.describe_text(texts())}, (IMAGE[0], TEXT[0])).backward()
    reached = {key for key, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {"text_projection", "ln_final.weight", "token_embedding.weight", "transformer.resblocks.1.ln_2.weight"} <= reached
    assert not any(key.startswith("transformer.resblocks.2") for key in reached)
    wanted = {
        "vit": {"visual.proj", "visual.ln_post.weight", "visual.conv1.weight"},
        "coca": {"visual.proj", "visual.attn_pool.attn.out_proj.weight", "visual.attn_pool.ln_k.weight", "visual.conv1.weight"},
        "resnet": {"visual.attnpool.c_proj.weight", "visual.attnpool.v_proj.bias", "visual.conv1.weight"},
        "timm-map": {"visual.trunk.attn_pool.kv.weight", "visual.trunk.norm.weight", "visual.trunk.patch_embed.proj.weight"},
        "timm-resnet": {"visual.head.proj.weight", "visual.trunk.conv1.0.weight"},
    }[name]
    assert wanted <= reached, wanted - reached
    last = ("visual.transformer.resblocks.2.", "visual.trunk.blocks.8.")
    assert not any(key.startswith(last) for key in reached)


@pytest.mark.parametrize(
    ("image", "text"), few([("vit", "clip"), ("coca", "bert-dense"), ("timm-map", "t5"), ("timm-convnext", "custom")])
)
def test_mixed_and_half_precision(make, image: str, text: str) -> None:
    exact = make(image, text)
    inputs = images(exact), texts_of(text)
    with torch.no_grad():
        wanted = {**exact.describe_image(inputs[0]), **exact.describe_text(inputs[1])}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = {**exact.describe_image(inputs[0]), **exact.describe_text(inputs[1])}
        half = copy.deepcopy(exact).bfloat16()
        halved = half.describe_image(inputs[0].bfloat16())
    for key in (*IMAGE, *TEXT):
        assert F.cosine_similarity(mixed[key].float().flatten(1), wanted[key].flatten(1)).min() > 0.95, key
    for key in IMAGE:
        assert halved[key].dtype == torch.bfloat16 and torch.isfinite(halved[key]).all()
        assert F.cosine_similarity(halved[key].float().flatten(1), wanted[key].flatten(1)).min() > 0.95, key


# What is caught, and for whom


@pytest.mark.parametrize("image", few(["vit", "resnet", "timm-token", "timm-convnext"]))
def test_only_what_is_asked_for_is_caught(make, image: str) -> None:
    model = make(image, return_intermediates=["text_locals"])
    assert model.describe_image(images(model)).keys() == {"image_features"}
    assert model.describe_text(texts()).keys() == {"text_features", "text_locals", "text_mask", "text_context_mask"}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.visual.modules())
    model = make(image, return_intermediates=["image_contexts"])
    masks = {"image_mask", "image_context_mask"}
    assert model.describe_image(images(model)).keys() == {"image_features", "image_contexts", *masks}
    assert model.describe_text(texts()).keys() == {"text_features"}
    model = make(image, return_intermediates=["image_mask"])
    assert model.describe_image(images(model)).keys() == {"image_features", "image_tokens", "image_mask"}
    model = make(image, return_intermediates=["image_context_mask"])
    assert model.describe_image(images(model)).keys() == {"image_features", "image_contexts", *masks}
    assert make(image, return_intermediates=())._coder_capture is None
    model = make(image, return_intermediates=(), aggregator="gpo")
    assert model._coder_capture.keys == AGGREGATOR_KEYS and not model._coder_capture._projections


# Refusals


@pytest.mark.parametrize(
    ("image", "text", "blocks", "message"),
    [
        ("vit", "clip", 4, "context_blocks 4: the image tower has 3 blocks"),
        ("timm-token", "clip", 7, "context_blocks 7: the image tower has 6 blocks"),
        ("resnet", "clip", 4, "context_blocks 4: the text tower has 3 blocks"),
        ("resnet", "bert-mean", 4, "context_blocks 4: the text tower has 3 blocks"),
        ("timm-xcit", "clip", 12, "of the image tower's 12 blocks at most 11 can be"),
    ],
)
def test_blocks_that_a_tower_has_not(make, image: str, text: str, blocks: int, message: str) -> None:
    with pytest.raises(CoderError, match=message):
        make(image, text, context_blocks=blocks)


def test_towers_that_nobody_knows(make) -> None:
    assert token_projection.image_projection(nn.Linear(1, 1)) is None
    assert token_projection.text_projection(SimpleNamespace(text=nn.Linear(1, 1))) is None
    model = make()
    model.visual = nn.Linear(1, 1)
    with pytest.raises(CoderError, match="no token features from an image tower of type Linear"):
        FeatureCapture(model, {"image_locals"})


# Exports


def test_an_export_keeps_its_context_blocks(make, tmp_path: Path) -> None:
    objective = "dcl + concept_dcl"
    model = make(loss=objective, context_blocks=2)
    weights = export_model(model, tmp_path / "export" / "best")
    assert read_heads(weights.with_name(HEADS)).context_blocks == 2
    assert load_model(tmp_path).coder.context_blocks == 2
    assert make(return_intermediates=()).coder.context_blocks == 1


def test_a_context_longer_than_the_towers_positions_is_refused() -> None:
    tower = nn.Module()
    tower.position_embeddings = nn.Embedding(512, 4)
    model = SimpleNamespace(text=SimpleNamespace(transformer=tower), context_length=4096)
    with pytest.raises(CoderError, match="may have 4096 tokens and its text tower has .* set --open-clip force_context_length"):
        _check_context("tiny", model)
    _check_context("tiny", SimpleNamespace(text=model.text, context_length=512))
