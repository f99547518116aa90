"""Tokens and pooled features of open_clip's towers, caught while upstream's own forward runs.

Shapes: B batch, L image positions (patches or grid cells, prefix tokens left out), T text positions, C channels, D joint
dimension.

Hooks at known places leave upstream's computation as it is. timm's trunks have no such place in common, so there the
tower calls its own ``forward_intermediates``. Each is installed only when something reads what it catches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.backbones.joint import Cells, Joint, last_norm, pools_tokens, to_joint_image, to_joint_text
from coder_plugin.errors import CoderError
from coder_plugin.functional.masked_sets import without_start

Pick = Callable[[Any], Tensor]
#: What aggregators read of a model.
AGGREGATED = frozenset({"image_tokens", "image_mask", "text_tokens", "text_mask"})


def _whole(found: Any) -> Any:
    return found


class TokenTaps:
    """Where one model's tokens are caught, between :meth:`listen` and :meth:`take`; a copied model has its own.

    Args:
        model: an open_clip model.
        reads: the keys that are wanted: ``image_tokens``, ``text_tokens``, ``image_pooled``, ``image_locals``,
            ``text_locals``, ``image_contexts``, ``text_contexts``. A mask alone brings its tokens.
        context_blocks: so many of a tower's last blocks stand between locals and contexts. Convolutional and hierarchical
            image towers, whose blocks share no resolution, have none: both are their last grid.

    Raises:
        CoderError: a tower that gives no tokens, or is read for locals and has not so many blocks.
    """

    def __init__(self, model: Any, reads: Collection[str], *, context_blocks: int = 1) -> None:
        assert context_blocks >= 1
        self.context_blocks = context_blocks
        self.reads = set(reads)
        for side in ("image", "text"):
            if f"{side}_mask" in reads and not self.reads & _tokens(side):
                self.reads.add(f"{side}_tokens")
            if f"{side}_context_mask" in reads and not self.reads & _in_context(side):
                self.reads.add(f"{side}_contexts")
        # What was caught, and what is to be taken of it: inside a reentrant checkpoint it could not be with its graph.
        self._caught: dict[str, tuple[Any, Pick]] | None = None  # None: not listening
        self._joint: dict[str, Joint | None] = {}
        self._depth = 1  # of timm's last feature maps
        if self.reads & _tokens("image"):
            self._tap_image(model.visual)
        if "image_pooled" in reads:
            self._catch(model.visual, "image_pooled", lambda output: output[0] if isinstance(output, tuple) else output)
        if self.reads & _tokens("text"):
            self._tap_text(model)

    def narrow(self, *, aggregated: bool) -> None:
        """Catch from now on what an aggregator reads, or nothing: what heads read would be made for nobody in a copy without
        them."""
        self.reads &= AGGREGATED if aggregated else frozenset()

    def listen(self) -> None:
        """Catch the next forward's tokens: not those of ``encode_image`` or of evaluation, kept for nobody."""
        self._caught = {}

    def take(self, text: Tensor | None) -> dict[str, Tensor]:
        """What the forward that just ran has left of the keys that are read.

        ``image_tokens`` [B, L, C] and ``text_tokens`` [B, T, C], of the last layer; ``image_locals`` and ``text_locals``
        before the context blocks, ``image_contexts`` and ``text_contexts`` after them, both [B, L or T, D] in the joint space,
        as the tower would project a feature pooled from that token alone (backbones/joint.py), or [B, L or T, C] of a tower
        without such a way; ``image_mask`` and ``text_mask``, bool, True where valid, and ``*_context_mask`` of locals and
        contexts, which leaves out the start of a text that is read forward: it is the same in every text; ``image_pooled``
        [B, D], the image's feature. None of them is normalised to unit length.
        """
        caught, self._caught = self._caught or {}, None
        if text is None:
            caught = {key: found for key, found in caught.items() if not key.startswith("text_")}
        out = {key: pick(found) for key, (found, pick) in caught.items()}
        out = {key: value if key == "image_pooled" else _rows(value) for key, value in out.items()}
        for side, to_joint in self._joint.items():
            before, after = f"{side}_locals", f"{side}_contexts"
            if to_joint is None:
                continue
            if after in out:
                out[after] = to_joint(out[after])
            if before in out:
                grid = after in out and caught[before][0] is caught[after][0]  # it is both
                out[before] = out[after] if grid else to_joint(out[before])
        for side in ("image", "text"):
            found = [out[key] for key in sorted(_tokens(side)) if key in out]
            if found:
                out[f"{side}_mask"] = self._mask(side, found, text)
            if out.keys() & _in_context(side):
                forward = side == "text" and self._reads_forward
                out[f"{side}_context_mask"] = without_start(out[f"{side}_mask"]) if forward else out[f"{side}_mask"]
        return out

    def _mask(self, side: str, found: list[Tensor], text: Tensor | None) -> Tensor:
        rows, length = found[0].shape[:2]
        if any(tokens.shape[:2] != (rows, length) for tokens in found):
            shapes = ", ".join(str(tuple(tokens.shape)) for tokens in found)
            raise CoderError(f"this {side} tower gives tokens of different numbers before and after its blocks: {shapes}")
        if side == "image":
            return torch.ones(rows, length, dtype=torch.bool, device=found[0].device)
        assert text is not None
        return self._text_mask(text)[:, :length]

    def _catch(self, module: nn.Module, key: str, pick: Pick = _whole) -> None:
        """Catch what a module gives, if its key is read."""
        if key in self.reads:
            # A partial of a bound method, unlike a closure, is copied with the model.
            module.register_forward_hook(functools.partial(self._hook, key, pick))

    def _catch_input(self, module: nn.Module, key: str, pick: Pick = _whole) -> None:
        """Catch what a module is given, if its key is read: what a checkpointed block makes has a graph outside it alone."""
        if key in self.reads:
            module.register_forward_pre_hook(functools.partial(self._pre_hook, key, pick), with_kwargs=True)

    def _hook(self, key: str, pick: Pick, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._caught is not None and key in self.reads:
            self._caught[key] = output, pick

    def _pre_hook(self, key: str, pick: Pick, _module: nn.Module, inputs: Any, keywords: Any) -> None:
        if self._caught is not None and key in self.reads:  # recomputation, in the backward pass, finds nobody listening
            self._caught[key] = (inputs[0] if inputs else keywords["hidden_states"]), pick

    def _block(self, blocks: Any, tower: str) -> nn.Module:
        """The first of a tower's context blocks."""
        if self.context_blocks > len(blocks):
            raise CoderError(f"context_blocks {self.context_blocks}: the {tower} tower has {len(blocks)} blocks")
        return blocks[-self.context_blocks]

    def _tap_image(self, visual: Any) -> None:
        from open_clip.modified_resnet import ModifiedResNet
        from open_clip.timm_model import TimmModel
        from open_clip.transformer import VisionTransformer

        in_context = bool(self.reads & _in_context("image"))
        if isinstance(visual, VisionTransformer):
            normed = visual.attn_pool is None and not visual.final_ln_after_pool
            self._catch(visual.ln_post if normed else visual.transformer, "image_tokens", lambda tokens: tokens[:, 1:])
            self._catch(visual.transformer, "image_contexts", lambda tokens: tokens[:, 1:])
            if in_context:
                self._tap_block(visual.transformer, "image", slice(1, None))
        elif isinstance(visual, ModifiedResNet):
            for key in ("image_tokens", "image_locals", "image_contexts"):
                self._catch(visual.layer4, key)
        elif isinstance(visual, TimmModel):
            self._tap_timm(visual, in_context)
        else:
            raise CoderError(f"no token features from an image tower of type {type(visual).__name__}")
        if in_context:
            self._joint["image"] = to_joint_image(visual)

    def _tap_block(self, transformer: Any, side: str, words: slice) -> None:
        """open_clip's own blocks run over [B, L, C], or over [L, B, C]."""
        batch_first = getattr(transformer, "batch_first", True)  # open_clip 4 always runs over [B, L, C]
        first = self._block(transformer.resblocks, side)
        self._catch_input(first, f"{side}_locals", lambda x: (x if batch_first else x.transpose(0, 1))[:, words])

    def _tap_timm(self, visual: Any, in_context: bool) -> None:
        trunk = visual.trunk
        keys = {"image_tokens"}
        if in_context and pools_tokens(trunk):
            prefix = trunk.num_prefix_tokens
            self._catch_input(self._block(trunk.blocks, "image"), "image_locals", lambda tokens: tokens[:, prefix:])
            self._catch_input(trunk.norm, "image_contexts", lambda tokens: tokens[:, prefix:])
        elif in_context:
            keys |= _in_context("image")
            self._depth = 1 + self._blocks_alike(trunk)
        if not self.reads & keys:
            return
        if not hasattr(trunk, "forward_intermediates"):
            raise CoderError(f"no token features from timm's {type(trunk).__name__}")
        cls = type(visual)
        visual.__class__ = type(cls.__name__, (_TimmTap, cls), {"__module__": cls.__module__})
        visual._coder_taps = self

    def _blocks_alike(self, trunk: Any) -> int:
        """How many of a trunk's last feature maps of one shape are context blocks: as asked for, or none."""
        info = trunk.feature_info
        maps = [(each["num_chs"], each["reduction"]) for each in getattr(info, "info", info)]
        if len(maps) > 1 and len(set(maps)) == 1 and self.context_blocks >= len(maps):
            raise CoderError(
                f"context_blocks {self.context_blocks}: of the image tower's {len(maps)} blocks at most {len(maps) - 1} can be"
            )
        last = maps[-1 - self.context_blocks :]
        return self.context_blocks if len(last) > self.context_blocks and len(set(last)) == 1 else 0

    def _tap_text(self, model: Any) -> None:
        from open_clip.hf_model import HFTextEncoder

        self._text_mask = text_mask_of(model)
        self._reads_forward = getattr(getattr(model, "text", model), "attn_mask", None) is not None
        in_context = bool(self.reads & _in_context("text"))
        text = getattr(model, "text", model)  # open_clip's CLIP holds the parts of its text tower itself
        if isinstance(text, HFTextEncoder):
            self._catch(text.transformer, "text_tokens", lambda output: output.last_hidden_state)
            if (norm := last_norm(text.transformer)) is not None:
                self._catch_input(norm, "text_contexts")
            else:
                self._catch(text.transformer, "text_contexts", lambda output: output.last_hidden_state)
            if in_context:
                layers = next(module for module in text.transformer.modules() if isinstance(module, nn.ModuleList))
                self._catch_input(self._block(layers, "text"), "text_locals")
        else:
            suffixed = getattr(text, "cls_emb", None) is not None
            words = slice(-1) if suffixed else slice(None)
            self._catch(text.transformer if suffixed else text.ln_final, "text_tokens", lambda tokens: tokens[:, words])
            self._catch(text.transformer, "text_contexts", lambda tokens: tokens[:, words])
            if in_context:
                self._tap_block(text.transformer, "text", words)
        if in_context:
            self._joint["text"] = to_joint_text(model)


def _tokens(side: str) -> set[str]:
    return {f"{side}_tokens"} | _in_context(side)


def _in_context(side: str) -> set[str]:
    return {f"{side}_locals", f"{side}_contexts"}


def text_mask_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Which positions of an open_clip model's text input [B, T] count: bool [B, T], True up to the text's end."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.transformer import TextTransformer

    text = getattr(model, "text", None)
    if text is None:
        return _mask_by_pool(model.text_pool_type, getattr(model, "text_eos_id", None), pad=0)
    if isinstance(text, TextTransformer):
        return _mask_by_pool(text.pool_type, getattr(text, "eos_id", None), pad=text.pad_id)
    if isinstance(text, HFTextEncoder):
        return _mask_by_padding(text.config.pad_token_id)
    raise CoderError(f"no token features from a text tower of type {type(text).__name__}, and no telling which are its words")


def word_embedding_of(model: Any) -> nn.Module:
    """The layer in which an open_clip model's text tower looks its words up."""
    text = getattr(model, "text", model)
    return text.token_embedding if hasattr(text, "token_embedding") else text.transformer.get_input_embeddings()


class _TimmTap:
    """What is mixed into open_clip's timm tower."""

    _coder_taps: TokenTaps

    trunk: Any
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        taps = self._coder_taps
        caught = taps._caught
        if caught is None or not taps.reads & _tokens("image"):
            return super().forward(x)  # type: ignore[misc]
        dropout = getattr(self.trunk, "patch_drop", None)
        final, maps = self.trunk.forward_intermediates(
            x,
            indices=taps._depth,
            norm=True,
            # the patches that patch dropout leaves fill no grid
            output_fmt="NCHW" if dropout is None or isinstance(dropout, nn.Identity) else "NLC",
        )
        cells = taps._joint.get("image")
        if isinstance(cells, Cells):
            before = after = cells.rows(final)
        else:
            before, after = maps[0], maps[-1]
        found = {"image_tokens": maps[-1], "image_locals": before, "image_contexts": after}
        # of blocks of one resolution, hooks have caught locals and contexts
        caught.update({key: (value, _whole) for key, value in found.items() if key in taps.reads and key not in caught})
        return self.head(self.trunk.forward_head(final))


def _rows(tokens: Tensor) -> Tensor:
    """[B, L, C] as it is, a grid [B, C, H, W] as [B, H * W, C]; anything else is an error, never a broadcast."""
    if tokens.ndim == 4:
        return tokens.flatten(2).transpose(1, 2)
    if tokens.ndim == 3:
        return tokens
    raise CoderError(f"image tokens must have 3 or 4 dimensions, this tower gives {tuple(tokens.shape)}")


def _mask_by_padding(pad: int) -> Any:
    def not_padding(text: Tensor) -> Tensor:
        return (text != pad) | (torch.arange(text.shape[1], device=text.device) == 0)  # an empty text has its start

    return not_padding


def _mask_by_pool(pool_type: str, eos_id: int | None, *, pad: int) -> Any:
    """Valid positions of open_clip's tokenizers: up to the end-of-text token where there is one, else all but padding.

    CLIP's padding, 0, is also the token of "!", so for it the end of the text decides. SigLIP's tokenizer pads with its end
    token, and open_clip's configurations leave pad_id at 0: where a tower pools the last position and names no padding, the
    last token, repeated, is taken for it, and its first place counts.
    """

    def up_to_end(text: Tensor) -> Tensor:
        end = text.argmax(1) if pool_type == "argmax" else text.eq(eos_id).int().argmax(1)  # type: ignore[arg-type]
        return torch.arange(text.shape[1], device=text.device) <= end[:, None]

    def up_to_padding(text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        last = ((text != text[:, -1:]) * (places + 1)).amax(1)  # 1 + the last place before the run at the end
        return places <= last[:, None]

    if pool_type == "last" and not pad:
        return up_to_padding
    return up_to_end if pool_type == "argmax" or (pool_type == "eos" and eos_id is not None) else _mask_by_padding(pad)
