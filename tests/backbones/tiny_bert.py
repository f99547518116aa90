"""A BERT of a few thousand parameters with a WordPiece vocabulary, made where a test wants it: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

PIECES = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] a the of and two in on with man dog cat ball tree house red green blue big small old "
    "run ##ing ##s ##er walk jump play ##oon picture thing ##n ##t 0 1 2 3 4 5 6 7 8 9 , . '"
).split()


def make(folder: Path, *, dropout: float = 0.0, layers: int = 2) -> str:
    """Configuration, weights and tokenizer in ``folder``, as transformers writes them; returns its path."""
    import torch
    from transformers import BertConfig, BertModel
    from transformers.models.bert import BertTokenizerFast  # type: ignore[attr-defined]

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    BertTokenizerFast.from_pretrained(str(folder)).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(PIECES),
            hidden_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        BertModel(config).save_pretrained(folder)
    return str(folder)


def make_clip(folder: Path) -> tuple[Path, str]:
    """The configuration of an open_clip model of timm's smallest network and this BERT, and the BERT's folder."""
    text = make(folder / "bert")
    tower = {"hf_model_name": text, "hf_tokenizer_name": text, "hf_proj_type": "linear", "hf_pooler_type": "mean_pooler"}
    image = {"timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": "linear", "image_size": 64}
    model = folder / "tiny.json"
    model.write_text(json.dumps({"embed_dim": 16, "vision_cfg": image, "text_cfg": {**tower, "context_length": 6}}))
    return model, text
