"""Tokens and pooled features of open_clip's towers, captured while open_clip's own forward runs.

Shapes: B batch, L image positions (patches or grid cells, without prefix tokens), T text positions, C channels, D joint
dimension.

Hooks on open_clip's modules do not change its computation. timm's trunks have no such place in common; there the tower
calls its own ``forward_intermediates``. Hooks are installed only for the keys that something reads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.backbones.extended_class import Extended, extended_class
from coder_plugin.backbones.token_projection import (
    GridCells,
    TokenProjection,
    image_projection,
    last_norm,
    pools_tokens,
    text_projection,
)
from coder_plugin.errors import CoderError
from coder_plugin.masked import without_start

#: Takes the tokens out of a module's output.
Select = Callable[[Any], Tensor]
#: The keys that an aggregator reads.
AGGREGATOR_KEYS = frozenset({"image_tokens", "image_mask", "text_tokens", "text_mask"})


def _all(output: Any) -> Any:
    return output


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def part_of(positions: slice, batch_first: bool = True) -> Select:
    """Takes some positions, as [B, L, C]. These functions, unlike closures, can be pickled with the model."""
    return functools.partial(_positions, positions, batch_first)


def _positions(positions: slice, batch_first: bool, tokens: Tensor) -> Tensor:
    return (tokens if batch_first else tokens.transpose(0, 1))[:, positions]


class FeatureCapture:
    """Captures features of one model between :meth:`start` and :meth:`collect`. A copied model has its own.

    Args:
        model: an open_clip model.
        keys: of ``image_tokens``, ``text_tokens``, ``image_pooled``, ``image_locals``, ``text_locals``, ``image_contexts``,
            ``text_contexts`` and their masks; a mask alone brings its tokens.
        context_blocks: number of last blocks of a tower between locals and contexts, >= 1. Convolutional and hierarchical
            image towers, whose blocks differ in resolution, have none: there both are the last grid.

    Raises:
        CoderError: a tower that gives no tokens, or has fewer blocks than ``context_blocks``.
    """

    def __init__(self, model: Any, keys: Collection[str], *, context_blocks: int = 1) -> None:
        assert context_blocks >= 1
        self.context_blocks = context_blocks
        self.keys = set(keys)
        for side in ("image", "text"):
            if f"{side}_mask" in keys and not self.keys & _token_keys(side):
                self.keys.add(f"{side}_tokens")
            if f"{side}_context_mask" in keys and not self.keys & context_keys(side):
                self.keys.add(f"{side}_contexts")
        # Module outputs, and how to take the tokens out of them. Selecting inside a reentrant checkpoint would lose the graph.
        self._captured: dict[str, tuple[Any, Select]] | None = None  # None: not started
        self._projections: dict[str, TokenProjection | None] = {}
        self._depth = 1  # number of timm's last feature maps
        if self.keys & _token_keys("image"):
            self._hook_image(model.visual)
        self._hook_pooled(model)
        if self.keys & _token_keys("text"):
            self._hook_text(model)

    def restrict(self, *, aggregated: bool) -> None:
        """From now on capture only what an aggregator reads, or nothing: for a copy of the model without heads."""
        self.keys &= AGGREGATOR_KEYS if aggregated else frozenset()

    def start(self) -> None:
        """Capture the features of the next forward. Without this call nothing is captured."""
        self._captured = {}

    def collect(self, text: Tensor | None) -> dict[str, Tensor]:
        """The features of the forward that just ran, for the requested keys. None is normalised to unit length.

        ``image_tokens`` [B, L, C] and ``text_tokens`` [B, T, C] are those of the last layer. ``*_locals`` are the tokens before
        the context blocks and ``*_contexts`` those after, [B, L or T, D], projected into the joint space one by one
        (:mod:`~coder_plugin.backbones.token_projection`), or [B, L or T, C] of a tower without a known projection.
        ``image_mask`` and ``text_mask`` are bool, True where valid; ``*_context_mask``, for locals and contexts, leaves out the
        start of a text under causal attention, which is the same in every text. ``image_pooled`` is the image feature [B, D].

        Args:
            text: the ids [B, T] that were encoded; None: only the image's keys.

        Raises:
            CoderError: tokens of another layout than [B, L, C] or [B, C, H, W], or of different numbers on one side.
        """
        captured, self._captured = self._captured or {}, None
        if text is None:
            captured = {key: value for key, value in captured.items() if not key.startswith("text_")}
        out = {key: select(output) for key, (output, select) in captured.items()}
        out = {key: value if key == "image_pooled" else _as_rows(value) for key, value in out.items()}
        for side, projection in self._projections.items():
            before, after = f"{side}_locals", f"{side}_contexts"
            if projection is None:
                continue
            if after in out:
                out[after] = projection(out[after])
            if before in out:
                same = after in out and captured[before][0] is captured[after][0]  # one grid is both
                out[before] = out[after] if same else projection(out[before])
        for side in ("image", "text"):
            tokens = [out[key] for key in sorted(_token_keys(side)) if key in out]
            if tokens:
                out[f"{side}_mask"] = self._mask(side, tokens, text)
            if out.keys() & context_keys(side):
                causal = side == "text" and self._causal
                out[f"{side}_context_mask"] = without_start(out[f"{side}_mask"]) if causal else out[f"{side}_mask"]
        return out

    def _mask(self, side: str, tokens: list[Tensor], text: Tensor | None) -> Tensor:
        rows, length = tokens[0].shape[:2]
        if any(each.shape[:2] != (rows, length) for each in tokens):
            shapes = ", ".join(str(tuple(each.shape)) for each in tokens)
            raise CoderError(f"this {side} tower gives tokens of different numbers before and after its blocks: {shapes}")
        if side == "image":
            return torch.ones(rows, length, dtype=torch.bool, device=tokens[0].device)
        assert text is not None
        return self._text_mask(text)[:, :length]

    def _on_output(self, module: nn.Module, key: str, select: Select = _all) -> None:
        """Capture a module's output, if its key is requested."""
        if key in self.keys:
            # A partial of a bound method, unlike a closure, is copied with the model.
            module.register_forward_hook(functools.partial(self._output_hook, key, select))

    def _on_input(self, module: nn.Module, key: str, select: Select = _all) -> None:
        """Capture a module's input, if its key is requested: only outside a checkpointed block do its tensors have a graph."""
        if key in self.keys:
            module.register_forward_pre_hook(functools.partial(self._input_hook, key, select), with_kwargs=True)

    def _output_hook(self, key: str, select: Select, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._captured is not None and key in self.keys:
            self._captured[key] = output, select

    def _input_hook(self, key: str, select: Select, _module: nn.Module, inputs: Any, keywords: Any) -> None:
        if self._captured is not None and key in self.keys:  # not in the backward pass, where blocks are recomputed
            self._captured[key] = (inputs[0] if inputs else keywords["hidden_states"]), select

    def _block(self, blocks: Any, tower: str) -> nn.Module:
        """The first of a tower's context blocks, the ``context_blocks`` last ones."""
        if self.context_blocks > len(blocks):
            raise CoderError(f"context_blocks {self.context_blocks}: the {tower} tower has {len(blocks)} blocks")
        return blocks[-self.context_blocks]

    def _hook_pooled(self, model: Any) -> None:
        self._on_output(model.visual, "image_pooled", _first)

    def _hook_image(self, visual: Any) -> None:
        from open_clip.modified_resnet import ModifiedResNet
        from open_clip.timm_model import TimmModel
        from open_clip.transformer import VisionTransformer

        in_context = bool(self.keys & context_keys("image"))
        if isinstance(visual, VisionTransformer):
            normed = visual.attn_pool is None and not visual.final_ln_after_pool
            self._on_output(visual.ln_post if normed else visual.transformer, "image_tokens", part_of(slice(1, None)))
            self._on_output(visual.transformer, "image_contexts", part_of(slice(1, None)))
            if in_context:
                self._hook_block(visual.transformer, "image", slice(1, None))
        elif isinstance(visual, ModifiedResNet):
            for key in ("image_tokens", "image_locals", "image_contexts"):
                self._on_output(visual.layer4, key)
        elif isinstance(visual, TimmModel):
            self._hook_timm(visual, in_context)
        else:
            raise CoderError(f"no token features from an image tower of type {type(visual).__name__}")
        if in_context:
            self._projections["image"] = image_projection(visual)

    def _hook_block(self, transformer: Any, side: str, words: slice) -> None:
        # open_clip's own blocks run over [B, L, C], or over [L, B, C]
        batch_first = getattr(transformer, "batch_first", True)  # open_clip 4 always runs over [B, L, C]
        first = self._block(transformer.resblocks, side)
        self._on_input(first, f"{side}_locals", part_of(words, batch_first))

    def _hook_timm(self, visual: Any, in_context: bool) -> None:
        trunk = visual.trunk
        keys = {"image_tokens"}
        if in_context and pools_tokens(trunk):
            prefix = trunk.num_prefix_tokens
            self._on_input(self._block(trunk.blocks, "image"), "image_locals", part_of(slice(prefix, None)))
            self._on_input(trunk.norm, "image_contexts", part_of(slice(prefix, None)))
        elif in_context:
            keys |= context_keys("image")
            self._depth = 1 + self._num_context_maps(trunk)
        if not self.keys & keys:
            return
        if not hasattr(trunk, "forward_intermediates"):
            raise CoderError(f"no token features from timm's {type(trunk).__name__}")
        cls = type(visual)
        if not isinstance(visual, _TimmCapture):  # of an earlier capture
            visual.__class__ = extended_class((_TimmCapture, cls), cls.__name__)
        visual._coder_capture = self

    def _num_context_maps(self, trunk: Any) -> int:
        """``context_blocks`` if so many last feature maps of a trunk and the one before have one shape, else 0."""
        info = trunk.feature_info
        maps = [(each["num_chs"], each["reduction"]) for each in getattr(info, "info", info)]
        if len(maps) > 1 and len(set(maps)) == 1 and self.context_blocks >= len(maps):
            raise CoderError(
                f"context_blocks {self.context_blocks}: of the image tower's {len(maps)} blocks at most {len(maps) - 1} can be"
            )
        last = maps[-1 - self.context_blocks :]
        return self.context_blocks if len(last) > self.context_blocks and len(set(last)) == 1 else 0

    def _hook_text(self, model: Any) -> None:
        from open_clip.hf_model import HFTextEncoder

        self._text_mask = text_mask_of(model)
        self._causal = getattr(getattr(model, "text", model), "attn_mask", None) is not None
        in_context = bool(self.keys & context_keys("text"))
        text = getattr(model, "text", model)  # open_clip's CLIP holds the parts of its text tower itself
        if isinstance(text, HFTextEncoder):
            self._on_output(text.transformer, "text_tokens", operator.attrgetter("last_hidden_state"))
            if (norm := last_norm(text.transformer)) is not None:
                self._on_input(norm, "text_contexts")
            else:
                self._on_output(text.transformer, "text_contexts", operator.attrgetter("last_hidden_state"))
            if in_context:
                layers = next(module for module in text.transformer.modules() if isinstance(module, nn.ModuleList))
                self._on_input(self._block(layers, "text"), "text_locals")
        else:
            suffixed = getattr(text, "cls_emb", None) is not None
            words = slice(-1) if suffixed else slice(None)
            self._on_output(text.transformer if suffixed else text.ln_final, "text_tokens", part_of(words))
            self._on_output(text.transformer, "text_contexts", part_of(words))
            if in_context:
                self._hook_block(text.transformer, "text", words)
        if in_context:
            self._projections["text"] = text_projection(model)


def _token_keys(side: str) -> set[str]:
    return {f"{side}_tokens"} | context_keys(side)


def context_keys(side: str) -> set[str]:
    return {f"{side}_locals", f"{side}_contexts"}


def text_mask_of(model: Any) -> Callable[[Tensor], Tensor]:
    """A function of an open_clip model's text input: ids [B, T] -> bool [B, T], True up to the text's end.

    Raises:
        CoderError: an unknown text tower.
    """
    from open_clip.hf_model import HFTextEncoder
    from open_clip.transformer import TextTransformer

    text = getattr(model, "text", None)
    if text is None:
        return mask_by_pool(model.text_pool_type, getattr(model, "text_eos_id", None), pad=0)
    if isinstance(text, TextTransformer):
        return mask_by_pool(text.pool_type, getattr(text, "eos_id", None), pad=text.pad_id)
    if isinstance(text, HFTextEncoder):
        return functools.partial(_not_padding, text.config.pad_token_id)
    raise CoderError(f"no token features from a text tower of type {type(text).__name__}, and no telling which are its words")


def word_embedding_of(model: Any) -> nn.Module:
    """The layer of an open_clip model's text tower that looks up word embeddings."""
    text = getattr(model, "text", model)
    return text.token_embedding if hasattr(text, "token_embedding") else text.transformer.get_input_embeddings()


class _TimmCapture(Extended):
    """Mixin of open_clip's timm tower."""

    _coder_capture: FeatureCapture

    trunk: Any
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        capture = self._coder_capture
        captured = capture._captured
        if captured is None or not capture.keys & _token_keys("image"):
            return super().forward(x)  # type: ignore[misc]
        dropout = getattr(self.trunk, "patch_drop", None)
        final, maps = self.trunk.forward_intermediates(
            x,
            indices=capture._depth,
            norm=True,
            # the patches that patch dropout leaves fill no grid
            output_fmt="NCHW" if dropout is None or isinstance(dropout, nn.Identity) else "NLC",
        )
        projection = capture._projections.get("image")
        if isinstance(projection, GridCells):
            before = after = projection.rows(final)
        else:
            before, after = maps[0], maps[-1]
        features = {"image_tokens": maps[-1], "image_locals": before, "image_contexts": after}
        # for blocks of one resolution, hooks have captured locals and contexts
        captured.update(
            {key: (value, _all) for key, value in features.items() if key in capture.keys and key not in captured}
        )
        return self.head(self.trunk.forward_head(final))


def _as_rows(tokens: Tensor) -> Tensor:
    """[B, L, C] as it is, a grid [B, C, H, W] as [B, H * W, C]; anything else is an error."""
    if tokens.ndim == 4:
        return tokens.flatten(2).transpose(1, 2)
    if tokens.ndim == 3:
        return tokens
    raise CoderError(f"image tokens must have 3 or 4 dimensions, this tower gives {tuple(tokens.shape)}")


def _not_padding(pad: int, text: Tensor) -> Tensor:
    return (text != pad) | (torch.arange(text.shape[1], device=text.device) == 0)  # an empty text keeps its start


def _up_to_end(eos_id: int | None, text: Tensor) -> Tensor:
    end = text.argmax(1) if eos_id is None else text.eq(eos_id).int().argmax(1)
    return torch.arange(text.shape[1], device=text.device) <= end[:, None]


def _up_to_padding(text: Tensor) -> Tensor:
    positions = torch.arange(text.shape[1], device=text.device)
    last = ((text != text[:, -1:]) * (positions + 1)).amax(1)  # 1 + the last position before the run at the end
    return positions <= last[:, None]


def mask_by_pool(pool_type: str, eos_id: int | None, *, pad: int) -> Any:
    """Valid positions of open_clip's tokenizers: up to the end-of-text token where there is one, else all but padding.

    CLIP's padding, 0, is also the token of "!", so for CLIP the end of the text decides. SigLIP's tokenizer pads with its end
    token, and open_clip's configurations leave pad_id at 0: where a tower pools the last position and names no padding, the
    repeated last token is the padding, and its first occurrence is valid.
    """
    if pool_type == "last" and not pad:
        return _up_to_padding
    if pool_type == "argmax" or (pool_type == "eos" and eos_id is not None):
        return functools.partial(_up_to_end, None if pool_type == "argmax" else eos_id)
    return functools.partial(_not_padding, pad)
