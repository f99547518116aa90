"""From open_clip to transformers: a CLIP of OpenAI's shape as a folder that ``CLIPModel.from_pretrained`` opens.

OpenAI's shape is open_clip's own ViT and text transformer, as in ViT-B-32 to ViT-bigG-14. Towers of timm or Hugging Face,
attention pooling and layer scale have no place in a CLIPModel and are refused.

Shapes: B batch, T text positions, D joint dimension.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.files import atomic_folder
from coder_plugin.pretrained.export import plain_state

#: Beginnings of names, open_clip's and transformers'; the first that fits counts.
_NAMES = {
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
#: Parts of a block's names.
_PARTS = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
#: Activations, by class and approximation, and transformers' names of them.
_ACTIVATIONS = {
    ("QuickGELU", "none"): "quick_gelu",
    ("GELU", "none"): "gelu",
    ("GELU", "tanh"): "gelu_pytorch_tanh",
}
#: open_clip's names of special tokens, and CLIP's in transformers.
_SPECIAL = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
_TEXT = "a photo of two small dogs, isn't it? 12 red balls"


def save_as_transformers(model: Any, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write an open_clip model's towers as a folder for ``CLIPModel.from_pretrained`` and ``AutoProcessor.from_pretrained``.

    The written model is opened, and its features are compared with the model's. Scoring heads are left out.

    Args:
        model: of OpenAI's shape: plain, or made by :func:`coder_plugin.create_model` or :func:`coder_plugin.load_model`.
        folder: a new one.
        tokenizer: of the model, by ``open_clip.get_tokenizer``; None: CLIP's own.

    Returns:
        The folder.

    Raises:
        CoderError: a folder that is not empty, or a model of another shape.

    Example:
        >>> import json, open_clip, tempfile, transformers
        >>> place = Path(tempfile.mkdtemp())
        >>> tower = {"layers": 1, "width": 32, "heads": 2}
        >>> image = {"image_size": 32, "patch_size": 16, "layers": 1, "width": 32, "head_width": 16}
        >>> _ = (place / "tiny-vit.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": image, "text_cfg": tower}))
        >>> open_clip.add_model_config(place)
        >>> written = save_as_transformers(open_clip.create_model("tiny-vit"), place / "clip")
        >>> transformers.CLIPModel.from_pretrained(written).projection_dim
        16
    """
    import transformers

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CoderError(f"{folder} is not empty: give a new folder")
    state = convert_state(plain_state(model) if hasattr(model, "coder") else model.state_dict())
    try:
        clip = transformers.CLIPModel(_config(model, state))
        clip.load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        raise _other_shape(f"its tensors do not fit: {' '.join(str(error).split())[:200]}") from error
    _check_features(model, clip)
    with atomic_folder(folder) as temporary:
        clip.save_pretrained(temporary)
        _image_processor(model.visual).save_pretrained(temporary)
        _write_tokenizer(model, tokenizer, temporary)
    return folder


def convert_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of an open_clip model of OpenAI's shape with the names of a CLIPModel, float32 on the CPU.

    Raises:
        CoderError: a tensor that a CLIPModel has no place for; names it.
    """
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        value, plain = value.detach().float().cpu(), name.removeprefix("text.")
        found = next((prefix for prefix in _NAMES if plain.startswith(prefix)), None)
        if found is None:
            raise _other_shape(f"a CLIPModel has no place for {name}")
        new = f"{_NAMES[found]}{'' if plain in _NAMES or found == 'text_projection' else plain[len(found):]}"
        for part, theirs in _PARTS.items():
            new = new.replace(part, theirs)
        if plain in ("visual.proj", "text_projection"):  # matrices that open_clip multiplies from the right
            value = value.T
        if packed := re.fullmatch(r"(.*\.)in_proj_(weight|bias)", new):
            out |= {f"{packed[1]}{each}_proj.{packed[2]}": part for each, part in zip("qkv", value.chunk(3), strict=True)}
        else:
            out[new] = value.reshape(()) if new == "logit_scale" else value
    return {name: value.contiguous().clone() for name, value in out.items()}


def _config(model: Any, state: Mapping[str, Tensor]) -> Any:
    """A CLIPConfig of the tensors' sizes."""
    import transformers

    text = getattr(model, "text", model)
    sides = {}
    for side, tower in (("vision", model.visual), ("text", text)):
        blocks = getattr(getattr(tower, "transformer", None), "resblocks", None)
        if not blocks or not hasattr(getattr(blocks[0], "attn", None), "num_heads"):
            raise _other_shape(f"its {side} tower is a {type(tower).__name__}, not open_clip's own transformer")
        width, hidden = state[f"{side}_model.encoder.layers.0.mlp.fc2.weight"].shape
        activation = blocks[0].mlp.gelu
        kind = type(activation).__name__, getattr(activation, "approximate", "none")
        if kind not in _ACTIVATIONS:
            raise _other_shape(f"its {side} tower's activation is {activation}")
        sides[side] = {
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_hidden_layers": len(blocks),
            "num_attention_heads": blocks[0].attn.num_heads,
            "hidden_act": _ACTIVATIONS[kind],
            "layer_norm_eps": blocks[0].ln_1.eps,
            "projection_dim": len(state[f"{'visual' if side == 'vision' else 'text'}_projection.weight"]),
        }
    height, width = model.visual.image_size if isinstance(model.visual.image_size, tuple) else (model.visual.image_size,) * 2
    if height != width:
        raise _other_shape(f"its pictures are {height} x {width} pixels, not square")
    words, _ = state["text_model.embeddings.token_embedding.weight"].shape
    sides["vision"] |= {"image_size": height, "patch_size": state["vision_model.embeddings.patch_embedding.weight"].shape[-1]}
    sides["text"] |= {
        "vocab_size": words,
        "max_position_embeddings": len(state["text_model.embeddings.position_embedding.weight"]),
        "bos_token_id": words - 2,
        "eos_token_id": words - 1,  # the largest, which open_clip looks for
        "pad_token_id": words - 1,
    }
    dim = sides["text"]["projection_dim"]
    return transformers.CLIPConfig(text_config=sides["text"], vision_config=sides["vision"], projection_dim=dim)


@torch.no_grad()
def _check_features(model: Any, clip: Any) -> None:
    """Refuse a model whose features of noise are not the CLIPModel's: settings that no tensor shows."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    text = clip.config.text_config
    images = torch.randn(2, 3, *(clip.config.vision_config.image_size,) * 2, generator=generator)
    ids = torch.randint(1, text.bos_token_id, (2, text.max_position_embeddings), generator=generator)
    ids[:, 0], ids[0, -1], ids[1, 5], ids[1, 6:] = text.bos_token_id, text.eos_token_id, text.eos_token_id, 0
    training = model.training
    model.eval()
    try:
        ours = [model.encode_image(images.to(device)), model.encode_text(ids.to(device))]
    finally:
        model.train(training)
    own = clip.eval()(pixel_values=images, input_ids=ids)
    for side, feature, expected in zip(("image", "text"), ours, (own.image_embeds, own.text_embeds), strict=True):
        difference = float((F.normalize(feature.float().cpu(), dim=-1) - expected).abs().max())
        if not difference < 1e-4:
            raise _other_shape(f"as a CLIPModel its {side} features would differ by {difference:.2g}")


def _image_processor(visual: Any) -> Any:
    import transformers

    config, size = visual.preprocess_cfg, visual.image_size
    size = size[0] if isinstance(size, tuple) else size
    square = {"height": size, "width": size}
    if config["resize_mode"] not in ("shortest", "squash") or config["interpolation"] not in ("bicubic", "bilinear"):
        raise CoderError(
            f"a CLIPImageProcessor does not resize as this model does ({config['resize_mode']}, {config['interpolation']})"
        )
    crops = config["resize_mode"] == "shortest"
    return transformers.CLIPImageProcessor(
        size={"shortest_edge": size} if crops else square,
        crop_size=square,
        do_center_crop=crops,
        resample=3 if config["interpolation"] == "bicubic" else 2,
        image_mean=list(config["mean"]),
        image_std=list(config["std"]),
    )


def _write_tokenizer(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face tokenizer, or CLIP's vocabulary from open_clip's own tokenizer, checked on a text."""
    import open_clip
    from transformers import AutoTokenizer, CLIPTokenizer

    tokenizer = open_clip.SimpleTokenizer() if tokenizer is None else tokenizer
    if hasattr(getattr(tokenizer, "tokenizer", None), "save_pretrained"):
        tokenizer.tokenizer.save_pretrained(folder)
        return
    size = len(getattr(model, "text", model).token_embedding.weight)
    if size != tokenizer.vocab_size:
        raise CoderError(f"this model knows {size} tokens, and CLIP's tokenizer has {tokenizer.vocab_size}: pass tokenizer=")
    words = {_SPECIAL.get(word, word): number for word, number in tokenizer.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(words), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in tokenizer.bpe_ranks)]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    length = model.context_length
    CLIPTokenizer.from_pretrained(folder, model_max_length=length).save_pretrained(folder)
    own = AutoTokenizer.from_pretrained(folder)(_TEXT, truncation=True)["input_ids"]
    if own != tokenizer([_TEXT], context_length=length)[0, : len(own)].tolist():
        raise CoderError("transformers' CLIPTokenizer reads this vocabulary in another way: please report this as a bug")


def _other_shape(why: str) -> CoderError:
    return CoderError(f"this model is not of OpenAI's shape, which CLIPModel has: {why}")
