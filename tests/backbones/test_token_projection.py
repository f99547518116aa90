"""Locals and contexts of open_clip's towers, in the joint space: against what upstream's own parts give, step by step.

Shapes: B images or texts, L image positions, P prefix tokens, N = B * L, T text positions, C channels, D joint dimension.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backbones.towers import IMAGE, TEXT, TEXTS, B, D, T, images, texts_of
from tests.few import few

pytestmark = pytest.mark.usefixtures("quiet")

OURS = ["vit", "vit-average", "vit-average-late-norm", "vit-custom-blocks", "coca"]
BLOCKS = [*OURS, "timm-token", "timm-average", "timm-mlp", "timm-map", "timm-eva"]
GRIDS = ["resnet", "timm-resnet", "timm-convnext", "timm-efficientnet", "timm-channels-last", "timm-rotary-pool"]
GRIDS += ["timm-absolute-pool"]


def raw_image(visual: Any, image: Tensor) -> list[Tensor]:
    """What each block gives, prefix and all [B, P + L, C], the embedding first: upstream's own parts, one by one."""
    if hasattr(visual, "trunk"):
        trunk = visual.trunk
        x = trunk.patch_embed(image)
        if type(trunk).__name__ == "Eva":
            x, rope = trunk._pos_embed(x)
            rest: dict[str, Any] = {"rope": rope}
        else:
            x, rest = trunk.patch_drop(trunk._pos_embed(x)), {}
        stages = [trunk.norm_pre(x)]
        for block in trunk.blocks:
            stages.append(block(stages[-1], **rest))
        return stages
    stages = [visual._embeds(image)]
    for block in visual.transformer.resblocks:
        stages.append(block(stages[-1]))
    return stages


def pooled_alone(visual: Any, tokens: Tensor) -> Tensor:
    """Each token [N, C] as a set of its own through upstream's pooling and projection -> [N, D]."""
    if hasattr(visual, "trunk"):
        trunk, sets = visual.trunk, tokens[:, None]
        if trunk.attn_pool is None:  # averages leave a class token out
            sets = sets.expand(-1, 1 + trunk.num_prefix_tokens, -1)
        return visual.head(trunk.forward_head(trunk.norm(sets)))
    sets = tokens[:, None].expand(-1, 2 if visual.pool_type == "avg" else 1, -1)
    return visual._pool(sets)[0] @ visual.proj


def prefix(visual: Any) -> int:
    return visual.trunk.num_prefix_tokens if hasattr(visual, "trunk") else 1


# Images: blocks of one resolution


@pytest.mark.parametrize("blocks", few([2, 1]))
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_image_locals_and_contexts_are_before_and_after_the_last_blocks(make, name: str, blocks: int) -> None:
    model = make(name, context_blocks=blocks)
    found = model.describe_image(images(model))
    stages = [stage[:, prefix(model.visual) :] for stage in raw_image(model.visual, images(model))]
    length = stages[0].shape[1]
    for key, stage in ((IMAGE[0], stages[-1 - blocks]), (IMAGE[1], stages[-1])):
        expected = pooled_alone(model.visual, stage.flatten(0, 1)).unflatten(0, (B, length))
        assert found[key].shape == (B, length, D), key
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=1e-5, msg=key)
    assert torch.equal(found["image_mask"], torch.ones(B, length, dtype=torch.bool))
    assert found["image_tokens"].shape == (B, length, stages[0].shape[2])
    assert not torch.allclose(found[IMAGE[0]], found[IMAGE[1]], atol=1e-2)


@pytest.mark.parametrize("name", ["vit-dropout", "timm-dropout"])
def test_dropped_patches_are_gone_everywhere(make, name: str) -> None:
    """In training: locals, contexts and tokens are of the same patches, and the towers' features are what they were."""
    model = make(name).train()
    model.describe_image(images(model))  # whatever is made lazily
    torch.manual_seed(5)
    found = model.describe_image(images(model))
    torch.manual_seed(5)
    visual = model.visual
    stages = [stage[:, 1:] for stage in raw_image(visual, images(model))]
    length = 8 if name == "vit-dropout" else 50
    assert found["image_tokens"].shape[1] == stages[0].shape[1] == length and found["image_mask"].shape == (B, length)
    for key, stage in zip(IMAGE, (stages[-2], stages[-1]), strict=True):
        torch.testing.assert_close(
            found[key], pooled_alone(visual, stage.flatten(0, 1)).unflatten(0, (B, length)), rtol=1e-4, atol=1e-5
        )


# Images: grids


def grid_of(visual: Any, image: Tensor) -> Tensor:
    """What the tower pools [B, C, H, W]."""
    if not hasattr(visual, "trunk"):
        return visual.layer4(visual.layer3(visual.layer2(visual.layer1(visual.stem(image)))))
    grid = visual.trunk.forward_features(image)
    return grid.permute(0, 3, 1, 2) if getattr(visual.trunk, "output_fmt", "") == "NHWC" else grid


def cell_alone(visual: Any, cell: Tensor) -> Tensor:
    """A grid of one cell [N, C, 1, 1] through upstream's pooling and projection, positions taken away."""
    if not hasattr(visual, "trunk"):
        pool = copy.deepcopy(visual.attnpool)
        pool.positional_embedding.data = torch.zeros(2, cell.shape[1])
        return pool(cell)
    visual = copy.deepcopy(visual)
    for module in visual.head.modules():
        if isinstance(getattr(module, "pos_embed", None), nn.Parameter):
            module.pos_embed.data.zero_()
    last = getattr(visual.trunk, "output_fmt", "") == "NHWC"
    return visual.head(visual.trunk.forward_head(cell.permute(0, 2, 3, 1) if last else cell))


@pytest.mark.parametrize("name", GRIDS)
@torch.no_grad()
def test_the_cells_of_a_grid_are_locals_and_contexts(make, name: str) -> None:
    model = make(name, context_blocks=7, return_intermediates=[*IMAGE, "image_mask"])  # seven means nothing here
    found = model.describe_image(images(model))
    assert torch.equal(found[IMAGE[0]], found[IMAGE[1]])
    grid = grid_of(model.visual, images(model))
    cells = [(y, x) for y in range(grid.shape[2]) for x in range(grid.shape[3])]
    assert found[IMAGE[0]].shape == (B, len(cells), D) and found["image_mask"].shape == (B, len(cells))
    for place in range(0, len(cells), 3):
        y, x = cells[place]
        expected = cell_alone(model.visual, grid[:, :, y : y + 1, x : x + 1])
        torch.testing.assert_close(found[IMAGE[0]][:, place], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_towers_without_a_way_give_raw_tokens(make) -> None:
    """A BatchNorm after pooling knows images, not cells; what xcit's class blocks do to a patch nobody knows."""
    model = make("timm-batch-norm-head")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = model.train().describe_image(images(model))
    assert torch.equal(found[IMAGE[0]], found["image_tokens"]) and torch.equal(found[IMAGE[1]], found["image_tokens"])
    model.load_state_dict(state)

    model = make("timm-xcit", context_blocks=2)
    found = model.describe_image(images(model))
    maps = model.visual.trunk.forward_intermediates(images(model), indices=3, norm=True, output_fmt="NLC")[1]
    torch.testing.assert_close(found[IMAGE[0]], maps[0])
    torch.testing.assert_close(found[IMAGE[1]], maps[2])


# Texts


def raw_text(model: Any, text: Tensor) -> list[Tensor]:
    """What each block gives [B, T, C], the embedding first."""
    tower = getattr(model, "text", model)
    if hasattr(tower, "config"):
        kept: list[Tensor] = []
        layers = tower.transformer.block if hasattr(tower.transformer, "block") else tower.transformer.encoder.layer
        hooks = [layers[0].register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))]
        first = lambda module, inputs, output: kept.append(output if isinstance(output, Tensor) else output[0])  # noqa: E731
        hooks += [layer.register_forward_hook(first) for layer in layers]
        tower.transformer(input_ids=text, attention_mask=(text != 0).long())
        for hook in hooks:
            hook.remove()
        return kept
    if hasattr(tower, "_embeds"):
        x, mask = tower._embeds(text)
    else:
        x, mask = model.token_embedding(text) + model.positional_embedding, model.attn_mask
    stages = [x]
    for block in tower.transformer.resblocks:
        stages.append(block(stages[-1], attn_mask=mask))
    return [stage[:, :T] for stage in stages]


def text_projected(model: Any, tokens: Tensor) -> Tensor:
    tower = getattr(model, "text", model)
    if hasattr(tower, "config"):
        if hasattr(tower.transformer, "final_layer_norm"):
            tokens = tower.transformer.final_layer_norm(tokens)
        if getattr(tower.transformer, "pooler", None) is not None:
            tokens = torch.tanh(tower.transformer.pooler.dense(tokens))
        return tower.proj(tokens)
    tokens = tower.ln_final(tokens)
    projection = tower.text_projection
    if projection is None:
        return tokens
    return F.linear(tokens, projection.weight, projection.bias) if isinstance(projection, nn.Linear) else tokens @ projection


@pytest.mark.parametrize("blocks", few([2, 1, 3]))
@pytest.mark.parametrize("name", TEXTS)
@torch.no_grad()
def test_text_locals_and_contexts_are_before_and_after_the_last_blocks(make, name: str, blocks: int) -> None:
    """Of all three blocks, the locals are what they begin with."""
    model, text = make(text=name, context_blocks=blocks), texts_of(name)
    found, stages = model.describe_text(text), raw_text(model, text)
    for key, stage in ((TEXT[0], stages[-1 - blocks]), (TEXT[1], stages[-1])):
        assert found[key].shape == (B, T, D)
        torch.testing.assert_close(found[key], text_projected(model, stage), rtol=1e-4, atol=1e-5, msg=key)
    first_padding = name == "siglip"  # its end token is its padding
    assert found["text_mask"].sum(1).tolist() == [5 + first_padding, 8 + first_padding, T]
    assert found["text_tokens"].shape[:2] == (B, T)
