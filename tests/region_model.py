"""A model for the made-up regions of tests/training/region_data.py."""

from __future__ import annotations

from typing import Any

import torch

import coder_plugin
from coder_plugin.backbones.tokenizers import build_vocabulary
from tests.training import region_data


def make(loss: Any = "dcl", *, seed: int = 0, **options: Any) -> Any:
    """A ``region-bigru`` of random weights that knows the words of the split ``dev``."""
    torch.manual_seed(seed)
    words = build_vocabulary(caption for record in region_data.records("dev") for caption in record.captions)
    sizes = {"region_dim": region_data.CHANNELS, "embed_dim": 16, "word_dim": 8, "vocabulary": words, "context_length": 16}
    return coder_plugin.create_model("region-bigru", loss=loss, **{**sizes, **options})
