"""Projection of single tokens into the joint space of an open_clip tower: its last norm, pooling and projection.

Shapes: B batch, L tokens, C channels, N = B * L, D joint dimension.

Each token is pooled and projected as if it were the only one: attention over one token is that token's value, as in MaskCLIP
(Zhou et al., ECCV 2022); position embeddings of the pooling are left out. Words and patches of a pretrained model are then
comparable before the first step. The parameters are the tower's: nothing is copied, and gradients reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Tokens [B, L, C] -> [B, L, D]. A partial or an instance, unlike a closure, is copied with the model.
TokenProjection = Callable[[Tensor], Tensor]


def image_projection(visual: Any) -> TokenProjection | None:
    """For an image tower: from its last block's tokens, or the grid cells that it pools, into the joint space.

    None for trunks whose head is unknown or contains a BatchNorm.
    """
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    if isinstance(visual, VisionTransformer) and getattr(visual, "attn_pool_contrastive", None) is None:
        return partial(_vit, visual)
    if isinstance(visual, ModifiedResNet):
        return partial(_resnet, visual)
    if isinstance(visual, TimmModel):
        return partial(_timm_tokens, visual) if pools_tokens(visual.trunk) else GridCells.probe(visual)
    return None


def text_projection(model: Any) -> TokenProjection | None:
    """For an open_clip model's text tower: from its last block's tokens into the joint space; None if it is unknown."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.transformer import TextTransformer

    text = getattr(model, "text", model)
    if isinstance(text, HFTextEncoder):
        return partial(_hf, text)
    return partial(_text, text) if text is model or isinstance(text, TextTransformer) else None


def pools_tokens(trunk: Any) -> bool:
    """Whether a timm trunk has blocks of one resolution, a norm and a head over tokens, as ViT, EVA and BEiT do."""
    from timm.layers import AttentionPoolLatent

    parts = ("blocks", "norm", "fc_norm", "head_drop", "head", "num_prefix_tokens")
    pool = getattr(trunk, "attn_pool", None)
    single = pool is None or isinstance(pool, AttentionPoolLatent)
    return single and all(hasattr(trunk, part) for part in parts) and not hasattr(trunk, "head_dist")


def last_norm(transformer: Any) -> nn.Module | None:
    """The norm after the last layer of a pre-norm encoder of transformers (T5, M2M100), or None."""
    norms = [getattr(transformer, name, None) for name in ("final_layer_norm", "layer_norm")]
    return next((norm for norm in norms if norm is not None), None)


class GridCells:
    """Projection of the cells of a grid that a convolutional or hierarchical timm trunk pools, each cell pooled alone.

    Args:
        visual: open_clip's timm tower. channels_last: whether the trunk's grids are [B, H, W, C]; else [B, C, H, W].
    """

    def __init__(self, visual: Any, *, channels_last: bool) -> None:
        self.visual, self.channels_last = visual, channels_last

    @classmethod
    @torch.no_grad()
    def probe(cls, visual: Any) -> GridCells | None:
        """For a tower whose head accepts a grid of one cell, which is tried with a blank image; else None.

        None also if the head has a BatchNorm, which would learn the statistics of cells instead of images.
        """
        trunk, training = visual.trunk, visual.training
        stem = next(parameter for parameter in trunk.parameters() if parameter.ndim == 4)
        blank = torch.zeros(1, 3, *visual.image_size, dtype=stem.dtype, device=stem.device)
        norms: list[nn.Module] = []
        visual.eval()
        hooks: list[Any] = []
        try:
            grid = trunk.forward_features(blank)
            if not isinstance(grid, Tensor) or grid.ndim != 4:
                return None
            # num_features is the number of channels that the trunk pools
            if trunk.num_features not in (grid.shape[1], grid.shape[3]):
                return None
            cells = cls(visual, channels_last=grid.shape[1] != trunk.num_features)
            for module in visual.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    hooks.append(module.register_forward_hook(lambda norm, *_: norms.append(norm)))
            cells(cells.rows(grid)[:, :1])
            return None if norms else cells
        finally:
            for hook in hooks:
                hook.remove()
            visual.train(training)

    def rows(self, grid: Tensor) -> Tensor:
        """A grid [B, H, W, C] or [B, C, H, W] -> its cells [B, L, C]."""
        return grid.flatten(1, 2) if self.channels_last else grid.flatten(2).transpose(1, 2)

    def __call__(self, tokens: Tensor) -> Tensor:
        cells = tokens.flatten(0, 1)
        out = self.visual.trunk.forward_head(cells[:, None, None] if self.channels_last else cells[:, :, None, None])
        for name, layer in self.visual.head.named_children():
            out = _grid_pool(layer, out.flatten(1)) if name == "pool" else layer(out)
        return out.unflatten(0, tokens.shape[:2])


def _vit(visual: Any, tokens: Tensor) -> Tensor:
    if visual.attn_pool is not None:
        tokens = attention_values(visual.attn_pool.attn, visual.attn_pool.ln_k(tokens))
    tokens = visual.ln_post(tokens)
    return tokens if visual.proj is None else tokens @ visual.proj


def attention_values(attention: nn.MultiheadAttention, tokens: Tensor) -> Tensor:
    """Attention over each token alone: its value, projected."""
    packed = attention.in_proj_weight
    weight = attention.v_proj_weight if packed is None else packed.chunk(3)[2]
    bias = None if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)[2]
    return attention.out_proj(F.linear(tokens, weight, bias))


def _resnet(visual: Any, tokens: Tensor) -> Tensor:
    return visual.attnpool.c_proj(visual.attnpool.v_proj(tokens))


def _timm_tokens(visual: Any, tokens: Tensor) -> Tensor:
    trunk = visual.trunk
    tokens = trunk.norm(tokens)
    if (pool := getattr(trunk, "attn_pool", None)) is not None:  # every latent query returns the same value for one token
        tokens = pool.proj_drop(pool.proj(pool.kv(tokens).chunk(2, -1)[1]))
        tokens = tokens if pool.mlp is None else tokens + pool.mlp(pool.norm(tokens))
    return visual.head(trunk.head(trunk.head_drop(trunk.fc_norm(tokens))))


def _grid_pool(pool: Any, cells: Tensor) -> Tensor:
    """timm's attention pooling of grids, for cells [N, C] that are grids of one cell."""
    value = pool.v(cells) if pool.qkv is None else pool.qkv(cells).chunk(3, -1)[2]
    return pool.proj(pool.drop(value))


def _text(text: Any, tokens: Tensor) -> Tensor:
    tokens, projection = text.ln_final(tokens), text.text_projection
    if isinstance(projection, nn.Module):
        return projection(tokens)
    return tokens if projection is None else tokens @ projection


def _hf(text: Any, tokens: Tensor) -> Tensor:
    from open_clip.hf_model import ClsPooler

    if (norm := last_norm(text.transformer)) is not None:
        tokens = norm(tokens)
    dense = getattr(text.transformer, "pooler", None)  # BERT's pooler, meant for the first position
    if dense is not None and isinstance(text.pooler, ClsPooler) and text.pooler.use_pooler_output:
        tokens = dense(tokens.flatten(0, 1)[:, None]).unflatten(0, tokens.shape[:2])
    return text.proj(tokens)
