"""A CLIPModel and a SiglipModel of some thousand parameters with tokenizers, saved by transformers: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Those of the built-in scenes' captions, and some more.
WORDS = (
    "a an the of and no one two three four in on to at with left right above below over under top bottom middle corner is are "
    "there small little tiny large big solid plain striped stripy dotted spotted hollow empty red orange yellow green blue "
    "purple violet pink brown white gray grey black beige circle disc square box triangle star cross heart background backdrop "
    "shape thing things object picture photo cat dog , . 0 1 2 3 4 5 6 7 8 9"
).split()
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE_SIZE = 32


def clip(folder: Path, **config: Any) -> str:
    """A CLIPModel with CLIP's tokenizer and image processor; returns the folder."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    tokenizer = clip_tokenizer()
    text = {
        **TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 24, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **config.pop("text_config", {}),
    }  # fmt: skip
    vision = {**TOWER, "image_size": IMAGE_SIZE, "patch_size": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24, **config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=square).save_pretrained(folder)
    return str(folder)


def siglip(folder: Path) -> str:
    """A SiglipModel, bilinear resizing, and a tokenizer that pads with its end token as SigLIP's; returns the folder."""
    import torch
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    tokenizer = word_tokenizer()
    text = {**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
    vision = {**TOWER, "image_size": IMAGE_SIZE, "patch_size": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
        torch.nn.init.constant_(model.logit_scale, 2.3)
        torch.nn.init.constant_(model.logit_bias, -3.0)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    SiglipImageProcessor(size=square, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    return str(folder)


def clip_tokenizer() -> Any:
    """transformers' CLIPTokenizer whose merges make whole words; other words are letters."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    pieces, merges = [*letters, *(f"{letter}</w>" for letter in letters)], []
    for word in WORDS:
        joined, *rest = *word[:-1], f"{word[-1]}</w>"
        for part in rest:
            if (joined, part) not in merges:
                merges.append((joined, part))
            joined += part
            pieces.append(joined)
    special = ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *special]))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=24)


def word_tokenizer(*, pad: str = "</s>") -> Any:
    """Lower-case words; a text ends with ``</s>``."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *WORDS]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"eos_token": "</s>", "pad_token": pad, "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **names, model_max_length=16, padding_side="right", model_input_names=["input_ids"]
    )
