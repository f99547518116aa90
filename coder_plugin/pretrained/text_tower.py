"""The text tower of an export alone: a query by text needs neither open_clip nor the torchvision and timm that it imports.

Importing these takes longer than everything else that a search does.

Shape letters: B batch, T text positions, D joint dimension.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.backbones.base import BackboneInfo
from coder_plugin.backbones.clip import extend
from coder_plugin.backbones.plugin_backbones import read_weights
from coder_plugin.backbones.untrusted import check_config
from coder_plugin.coder import Coder
from coder_plugin.files import read_json
from coder_plugin.objective import Objective
from coder_plugin.resolver import Resolution

#: What the configuration of a model with OpenAI's text tower and its tokenizer holds; open_clip opens all others.
_MODEL = frozenset("embed_dim vision_cfg text_cfg quick_gelu custom_text init_logit_scale init_logit_bias".split())
_TEXT = frozenset("context_length vocab_size width heads layers".split())
#: Parts of a layer, and their names in torch.
_PARTS = {"ln_1": "norm1", "attn": "self_attn", "ln_2": "norm2", "mlp.c_fc": "linear1", "mlp.c_proj": "linear2"}


class TextTower(nn.Module):
    """A trained text transformer of OpenAI's shape, for inference.

    Args:
        config: open_clip's configuration of the whole model, with the keys of ``_MODEL`` and ``_TEXT``.
        preprocessing: of pictures; the model's fingerprint includes it.
        tensors: the whole model's state dict.

    Raises:
        RuntimeError: tensors of other shapes or names.
    """

    def __init__(self, config: Mapping[str, Any], preprocessing: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.coder_config, self.tensors, self.visual = config, tensors, SimpleNamespace(preprocess_cfg=preprocessing)
        text = {"context_length": 77, "width": 512, "heads": 8, "layers": 12, **config["text_cfg"]}
        width, self.context_length = text["width"], text["context_length"]
        activation = (lambda x: x * torch.sigmoid(1.702 * x)) if config.get("quick_gelu") else F.gelu
        state = {name.removeprefix("text."): value for name, value in tensors.items() if not name.startswith("visual.")}
        for name in list(state):
            _, found, rest = name.partition("transformer.resblocks.")
            if found:
                number, _, part = rest.partition(".")
                new = next((f"{new}{part[len(old):]}" for old, new in _PARTS.items() if part.startswith(f"{old}.")), part)
                state[f"layers.{number}.{new}"] = state.pop(name)
        self.token_embedding = nn.Embedding.from_pretrained(state["token_embedding.weight"])
        with torch.device("meta"):  # the weights are the export's
            self.positional_embedding = nn.Parameter(torch.empty(self.context_length, width))
            options: dict[str, Any] = {"activation": activation, "batch_first": True, "norm_first": True}
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, text["heads"], 4 * width, **options) for _ in range(text["layers"])
            )
            self.ln_final = nn.LayerNorm(width)
            self.text_projection = nn.Parameter(torch.empty(width, config["embed_dim"]))
        self.load_state_dict({name: value for name, value in state.items() if not name.startswith("logit_")}, assign=True)

    def encode_text(self, text: Tensor) -> Tensor:
        """Ids [B, T] -> features [B, D]."""
        x = self.token_embedding(text) + self.positional_embedding
        mask = nn.Transformer.generate_square_subsequent_mask(self.context_length, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.ln_final(x)[torch.arange(len(x)), text.argmax(-1)] @ self.text_projection

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """The whole model's."""
        return self.tensors


def open_text_tower(weights: str | None) -> Any:
    """The text tower of an export of open_clip's, extended as the whole model would be: it has ``describe_text`` and ``coder``.

    Args:
        weights: the export's; it has no scoring heads.

    Returns:
        The tower; None for an export of another kind, or whose weights do not fit: open it with open_clip, which says what is
        wrong.

    Raises:
        CoderError: a file that cannot be read, or a configuration that holds what it may not.
    """
    path = Path(weights or "").with_name("open_clip_config.json")
    if not path.is_file() or Path(weights or "").suffix != ".safetensors":
        return None
    stored = read_json(path)
    config = stored.get("model_cfg") if isinstance(stored, dict) else None
    text = config.get("text_cfg") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(text, dict) or not ({*config} <= _MODEL and {*text} <= _TEXT):
        return None
    check_config({**config, "vision_cfg": {}}, path)  # the image tower is not built
    tensors = {name: each.float() if each.is_floating_point() else each for name, each in read_weights(weights or "").items()}
    try:
        tower = TextTower(config, stored["preprocess_cfg"], tensors)
        if tower.token_embedding.num_embeddings != text.get("vocab_size", 49408):
            return None
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    coder = Coder(Objective.parse("clip"), Resolution((), (), frozenset(), {}), BackboneInfo(embed_dim=config["embed_dim"]))
    return extend(tower, coder, None)


def simple_tokenizer(context_length: int) -> Callable[[list[str]], Tensor]:
    """open_clip's own tokenizer, from its file: n texts -> int64 [n, context_length]."""
    package = importlib.util.find_spec("open_clip")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", Path(package.origin).with_name("tokenizer.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer: Any = partial(module.tokenize, context_length=context_length)
    tokenizer.context_length = context_length
    return tokenizer
