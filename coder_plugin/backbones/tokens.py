"""Last-layer tokens and pooled features of open_clip's towers, caught while upstream's own forward runs.

Shapes: B batch, L image positions (patches or grid cells, prefix tokens left out), T text positions, C channels.

Hooks at known places leave upstream's computation as it is. timm's trunks have no such place in common, so there the
tower calls its own ``forward_intermediates``. Each is installed only when something reads what it catches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.errors import CoderError


class TokenTaps:
    """Where one model's tokens are caught, between :meth:`listen` and :meth:`take`; a copied model has its own.

    Args:
        model: an open_clip model. reads: the keys that are wanted: ``image_tokens``, ``text_tokens``, ``image_pooled``.
    """

    def __init__(self, model: Any, reads: Collection[str]) -> None:
        self._caught: dict[str, Tensor] | None = None  # None: not listening
        if "image_tokens" in reads:
            self._tap_image(model.visual)
        if "image_pooled" in reads:
            self._catch(model.visual, "pooled", lambda output: output[0] if isinstance(output, tuple) else output)
        if "text_tokens" in reads:
            self._tap_text(model)

    def listen(self) -> None:
        """Catch the next forward's tokens: not those of ``encode_image`` or of evaluation, kept for nobody."""
        self._caught = {}

    def take(self, text: Tensor | None) -> dict[str, Tensor]:
        """What the forward that just ran has left: ``image_tokens`` [B, L, C], ``text_tokens`` [B, T, C] with their
        masks, and ``image_pooled`` [B, D], the image's feature before normalisation."""
        caught, self._caught = self._caught or {}, None
        out = {}
        if "pooled" in caught:
            out["image_pooled"] = caught["pooled"]
        if "image" in caught:
            tokens = _rows(caught["image"])
            out["image_tokens"] = tokens
            out["image_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if "text" in caught and text is not None:
            tokens = caught["text"]
            out["text_tokens"] = tokens
            out["text_mask"] = self._text_mask(text)[:, : tokens.shape[1]]
        return out

    def _catch(self, module: nn.Module, key: str, pick: Callable[[Any], Tensor] = lambda output: output) -> None:
        # A partial of a bound method, unlike a closure, is copied with the model.
        module.register_forward_hook(functools.partial(self._hook, key, pick))

    def _hook(self, key: str, pick: Callable[[Any], Tensor], _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._caught is not None:
            self._caught[key] = pick(output)

    def _tap_image(self, visual: nn.Module) -> None:
        from open_clip.modified_resnet import ModifiedResNet
        from open_clip.timm_model import TimmModel
        from open_clip.transformer import VisionTransformer

        if isinstance(visual, VisionTransformer):
            normed = visual.attn_pool is None and not visual.final_ln_after_pool
            self._catch(visual.ln_post if normed else visual.transformer, "image", lambda tokens: tokens[:, 1:])
        elif isinstance(visual, ModifiedResNet):
            self._catch(visual.layer4, "image")
        elif isinstance(visual, TimmModel):
            if not hasattr(visual.trunk, "forward_intermediates"):
                raise CoderError(f"no token features from timm's {type(visual.trunk).__name__}")
            cls = type(visual)
            visual.__class__ = type(cls.__name__, (_TimmTap, cls), {"__module__": cls.__module__})
            visual._coder_taps = self
        else:
            raise CoderError(f"no token features from an image tower of type {type(visual).__name__}")

    def _tap_text(self, model: Any) -> None:
        from open_clip.hf_model import HFTextEncoder
        from open_clip.transformer import TextTransformer

        self._text_mask = text_mask_of(model)
        text = getattr(model, "text", None)
        if text is None:  # open_clip's CLIP holds the parts of its text tower itself
            self._catch(model.ln_final, "text")
        elif isinstance(text, TextTransformer) and text.cls_emb is None:
            self._catch(text.ln_final, "text")
        elif isinstance(text, TextTransformer):
            self._catch(text.transformer, "text", lambda tokens: tokens[:, :-1])
        elif isinstance(text, HFTextEncoder):
            self._catch(text.transformer, "text", lambda output: output.last_hidden_state)


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

    def forward(self, x: Tensor) -> Tensor:
        caught = self._coder_taps._caught
        if caught is None:
            return super().forward(x)  # type: ignore[misc]
        dropout = getattr(self.trunk, "patch_drop", None)  # type: ignore[attr-defined]
        output = self.forward_intermediates(  # type: ignore[attr-defined]
            x,
            indices=1,
            normalize_intermediates=True,
            # the patches that patch dropout leaves fill no grid
            output_fmt="NCHW" if dropout is None or isinstance(dropout, nn.Identity) else "NLC",
        )
        caught["image"] = output["image_intermediates"][-1]
        return output["image_features"]


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
