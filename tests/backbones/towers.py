"""Tiny models with one of open_clip's towers each, made from configurations written here: nothing is downloaded.

Shapes: B images or texts, T text positions, D joint dimension.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin import create_model
from tests.backbones import tiny_bert

B, T, D, EOT = 3, 12, 32, 59
IMAGE, TEXT = ("image_locals", "image_contexts"), ("text_locals", "text_contexts")
EVERY = frozenset({*IMAGE, *TEXT, "image_tokens", "text_tokens", "image_mask", "text_mask"})

VIT = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 3}
PLAIN = {"context_length": T, "vocab_size": 60, "width": 16, "heads": 2, "layers": 3}
COCA = {"context_length": T, "width": 32, "heads": 2, "layers": 1, "attn_pooler_heads": 2}


def timm_(name: str, pool: str, proj: str | None, size: int) -> dict[str, Any]:
    return {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": size}


def hf(name: str, proj: str, pooler: str) -> dict[str, Any]:
    return {"text_cfg": {"hf_model_name": name, "hf_proj_type": proj, "hf_pooler_type": pooler}}


#: Image towers, each beside a plain text tower.
IMAGES: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "vit-dropout": {**VIT, "patch_dropout": 0.5},
    "vit-average": {**VIT, "pool_type": "avg"},
    "vit-average-late-norm": {**VIT, "pool_type": "avg", "final_ln_after_pool": True},
    "vit-custom-blocks": {**VIT, "qk_norm": True},
    "coca": {**VIT, "attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 5},
    "resnet": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "head_width": 64},
    "timm-token": timm_("test_vit", "token", "linear", 160),
    "timm-average": timm_("test_vit", "avg", "linear", 160),
    "timm-mlp": timm_("test_vit", "token", "mlp", 160),
    "timm-dropout": {**timm_("test_vit", "token", "linear", 160), "patch_dropout": 0.5},
    "timm-map": timm_("test_vit3", "map", None, 160),  # as SigLIP's
    "timm-eva": timm_("eva02_tiny_patch14_224", "token", None, 224),
    "timm-resnet": timm_("test_resnet", "avg", "linear", 64),
    "timm-convnext": timm_("test_convnext", "avg", "mlp", 64),
    "timm-efficientnet": timm_("test_efficientnet", "avg", "linear", 64),
    "timm-channels-last": timm_("test_mambaout", "avg", None, 64),
    "timm-rotary-pool": timm_("test_byobnet", "rot_attn", "", 64),
    "timm-absolute-pool": timm_("test_byobnet", "abs_attn", "", 160),
    "timm-batch-norm-head": timm_("mobilenetv4_conv_small", "avg", None, 64),
    "timm-xcit": timm_("xcit_nano_12_p16_224", "", "linear", 224),
}
#: Text towers, each beside a ViT.
TEXTS: dict[str, dict[str, Any]] = {
    "clip": {"text_cfg": PLAIN},
    "clip-no-projection": {"text_cfg": {**PLAIN, "width": D, "proj_type": "none"}},
    "custom": {"text_cfg": {**PLAIN, "proj_bias": True}, "custom_text": True},
    "siglip": {"text_cfg": {**PLAIN, "pool_type": "last", "no_causal_mask": True, "proj_bias": True}, "custom_text": True},
    "coca": {
        "text_cfg": {**PLAIN, "width": 32, "embed_cls": True, "output_tokens": True},
        "vision_cfg": {**IMAGES["coca"], "output_tokens": True},
        "custom_text": True,
        "multimodal_cfg": COCA,
    },
    "bert-mean": hf("bert", "linear", "mean_pooler"),
    "bert-mlp": hf("bert", "mlp", "cls_last_hidden_state_pooler"),
    "bert-dense": hf("bert", "linear", "cls_pooler"),
    "t5": hf("t5", "linear", "mean_pooler"),
}
def maker(folder: Path) -> Callable[..., Any]:
    """``make("vit")``, ``make(text="clip")``: that tower's model with every key caught, in eval mode, its weights perturbed
    so that no norm or bias is the identity."""
    from transformers import MT5Config, MT5Model

    texts = {"bert": tiny_bert.make(folder / "bert", layers=3), "t5": str(folder / "t5")}
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    MT5Model(MT5Config(num_layers=3, num_decoder_layers=1, dropout_rate=0.0, **sizes)).save_pretrained(texts["t5"])

    def build(image: str = "vit", text: str = "clip", loss: str = "clip", **options: Any) -> Any:
        config = copy.deepcopy({"embed_dim": D, "vision_cfg": IMAGES[image], **TEXTS[text]})
        name = config["text_cfg"].get("hf_model_name")
        if name is not None:
            config["text_cfg"].update(hf_model_name=texts[name], hf_tokenizer_name=texts["bert"], context_length=T)
        path = folder / f"joint-{image}-{text}.json"
        path.write_text(json.dumps(config))
        torch.manual_seed(0)
        model = create_model(str(path), loss=loss, **{"return_intermediates": EVERY, **options}).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if not key.startswith(("logit", "coder.")):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        return model

    return build


def images(model: Any) -> Tensor:
    size = model.visual.image_size
    height, width = size if isinstance(size, tuple) else (size, size)
    return torch.randn(B, 3, height, width, generator=torch.Generator().manual_seed(2))


def texts() -> Tensor:
    """[B, T], of different lengths; one fills its row. The start is no padding, whatever the tokenizer."""
    text = torch.randint(5, 50, (B, T), generator=torch.Generator().manual_seed(3))
    for row, end in enumerate((4, 7, T - 1)):
        text[row, end], text[row, end + 1 :] = EOT, 0
    return text


def hf_texts() -> Tensor:
    return texts().clamp(max=tiny_bert.PIECES.index("old"))


def texts_of(name: str) -> Tensor:
    return hf_texts() if "hf_model_name" in TEXTS[name]["text_cfg"] else texts()
