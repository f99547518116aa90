"""Last-layer tokens of open_clip's towers, caught while upstream's own forward runs.

Shapes: B batch, L image positions (patches or grid cells, prefix tokens left out), T text positions, C channels.

Hooks at known places leave upstream's computation as it is. timm's trunks have no such place in common, so there the
tower calls its own ``forward_intermediates``. Installed only when a head asks for tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coder_plugin.errors import CoderError


class TokenTaps:
    """Where one model's tokens are caught; :meth:`take` hands them over and forgets them."""

    def __init__(self, model: nn.Module) -> None:
        self._caught: dict[str, Tensor] = {}
        self._tap_image(model.visual)
        self._tap_text(model)

    def take(self, text: Tensor | None) -> dict[str, Tensor]:
        """``image_tokens`` [B, L, C], ``text_tokens`` [B, T, C] and their masks, of the forward that just ran."""
        caught, self._caught = self._caught, {}
        out = {}
        if "image" in caught:
            tokens = _rows(caught["image"])
            out["image_tokens"] = tokens
            out["image_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if "text" in caught and text is not None:
            tokens = caught["text"]
            out["text_tokens"] = tokens
            out["text_mask"] = self._text_mask(text)[:, : tokens.shape[1]]
        return out

    def _catch(self, module: nn.Module, key: str, pick: Any = lambda output: output) -> None:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._caught[key] = pick(output)

        module.register_forward_hook(hook)

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
            caught = self._caught_setter("image")

            def forward(self: TimmModel, x: Tensor) -> Tensor:
                output = self.forward_intermediates(x, indices=1, normalize_intermediates=True)
                caught(output["image_intermediates"][-1])
                return output["image_features"]

            cls = type(visual)
            visual.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
        else:
            raise CoderError(f"no token features from an image tower of type {type(visual).__name__}")

    def _caught_setter(self, key: str) -> Any:
        return lambda value: self._caught.__setitem__(key, value)

    def _tap_text(self, model: nn.Module) -> None:
        from open_clip.hf_model import HFTextEncoder
        from open_clip.transformer import TextTransformer

        text = getattr(model, "text", None)
        if text is None:  # open_clip's CLIP holds the parts of its text tower itself
            self._catch(model.ln_final, "text")
            self._text_mask = _mask_by_pool(model.text_pool_type, getattr(model, "text_eos_id", None), pad=0)
        elif isinstance(text, TextTransformer):
            if text.cls_emb is None:
                self._catch(text.ln_final, "text")
            else:
                self._catch(text.transformer, "text", lambda tokens: tokens[:, :-1])
            self._text_mask = _mask_by_pool(text.pool_type, getattr(text, "eos_id", None), pad=text.pad_id)
        elif isinstance(text, HFTextEncoder):
            self._catch(text.transformer, "text", lambda output: output.last_hidden_state)
            self._text_mask = _mask_by_padding(text.config.pad_token_id)
        else:
            raise CoderError(f"no token features from a text tower of type {type(text).__name__}")


def _rows(tokens: Tensor) -> Tensor:
    """[B, L, C] as it is, a grid [B, C, H, W] as [B, H * W, C]; anything else is an error, never a broadcast."""
    if tokens.ndim == 4:
        return tokens.flatten(2).transpose(1, 2)
    if tokens.ndim == 3:
        return tokens
    raise CoderError(f"image tokens must have 3 or 4 dimensions, this tower gives {tuple(tokens.shape)}")


def _mask_by_padding(pad: int) -> Any:
    return lambda text: text != pad


def _mask_by_pool(pool_type: str, eos_id: int | None, *, pad: int) -> Any:
    """Valid positions of open_clip's tokenizers: up to the end-of-text token where there is one, else what is not padding.

    CLIP's padding, 0, is also the token of "!", so for it the end of the text decides.
    """

    def up_to_end(text: Tensor) -> Tensor:
        end = text.argmax(1) if pool_type == "argmax" else (text == eos_id).int().argmax(1)
        return torch.arange(text.shape[1], device=text.device) <= end[:, None]

    return up_to_end if pool_type == "argmax" or (pool_type == "eos" and eos_id is not None) else _mask_by_padding(pad)
