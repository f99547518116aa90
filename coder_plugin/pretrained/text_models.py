"""Text models that turn texts into one vector each: runs of ours, open_clip models, transformers encoders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coder_plugin.errors import CoderError
from coder_plugin.masked import mean
from coder_plugin.pretrained.device import default_device
from coder_plugin.pretrained.export import export_files
from coder_plugin.pretrained.hub_cache import is_on_hub
from coder_plugin.pretrained.open import open_pretrained

TextEncoder = Callable[[list[str]], Tensor]

#: Modules of a sentence-transformers folder that :func:`open_text_model` accepts. Normalize is left out: it changes no cosine.
_MODULES = ("Transformer", "Pooling", "Normalize")


def open_text_model(spec: str, *, device: torch.device | str | None = None) -> TextEncoder:
    """A function from n texts to their vectors [n, D], float32, on the CPU.

    An export, a run, an open_clip model, and the folder of a CLIPModel or SiglipModel give their retrieval vectors; a
    transformers encoder gives its pooled tokens, and another transformers model of two towers its text features, neither of
    unit length.

    Args:
        spec: an export's folder, a run's, or ``hf-hub:OWNER/NAME``; an open_clip model with its weights,
            ``NAME:TAG_OR_FILE`` (NAME may be a configuration file); or the folder or hub name of a transformers encoder. The
            tokens of an encoder are averaged, padding excluded, unless its folder has a sentence-transformers
            configuration that takes the first token.
        device: None: this process's GPU, or the CPU.

    Raises:
        CoderError: none of these, a model that cannot be loaded, or an open_clip model without weights.
    """
    device = default_device() if device is None else torch.device(device)
    if is_on_hub(spec) or _is_ours(Path(spec)):
        return open_pretrained(spec, device=device).encode_texts
    name, colon, weights = spec.partition(":")
    if _is_open_clip(name):
        if not colon or not weights:
            raise CoderError(f"{spec} is an open_clip model without weights: write {spec.rstrip(':')}:TAG or :FILE, such as "
                             "ViT-B-32:openai")  # fmt: skip
        return open_pretrained(None, {"model": name, "pretrained": weights}, device=device).encode_texts
    return _transformer(spec, device)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is an export, or a run with one."""
    return any(export_files(place)[0] is not None for place in (folder, folder / "export/best", folder / "export/last"))


def _is_open_clip(name: str) -> bool:
    import open_clip

    return name in open_clip.list_models() or (name.endswith(".json") and Path(name).is_file())


def _transformer(spec: str, device: torch.device) -> TextEncoder:
    from coder_plugin.backbones.text_encoder import load_transformer

    model, tokenizer = load_transformer(spec)
    first_token = _pools_first_token(spec)
    is_dual = hasattr(model, "get_text_features")  # such as transformers' CLIP
    if model.config.is_encoder_decoder and not is_dual:
        model = model.get_encoder()
    model = model.eval().to(device)

    @torch.no_grad()
    def encode(texts: list[str]) -> Tensor:
        vectors = []
        for start in range(0, len(texts), 64):
            batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt").to(device)
            if is_dual:
                pooled: Any = model.get_text_features(**batch)
                pooled = getattr(pooled, "pooler_output", pooled)
            else:
                tokens = model(**batch).last_hidden_state
                pooled = tokens[:, 0] if first_token else mean(tokens, batch["attention_mask"].bool())
            vectors.append(pooled.float().cpu())
        return torch.cat(vectors)

    return encode


def _pools_first_token(spec: str) -> bool:
    """Whether a sentence-transformers configuration takes the first token; False where there is none.

    Raises:
        CoderError: modules or a pooling that are not reproduced here.
    """
    modules = [module["type"].rpartition(".")[2] for module in _read(spec, "modules.json") or ()]
    pooling = _read(spec, "1_Pooling/config.json") or {}
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    modes = [name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in flags]
    if "pooling_mode" in pooling:  # newer versions name the one mode
        modes = [pooling["pooling_mode"]]
    wrong = [name for name in modules if name not in _MODULES]
    if wrong or len(modes) > 1 or not set(modes) <= {"mean", "cls"}:
        raise CoderError(
            f"text model {spec}: its sentence-transformers modules ({', '.join([*modules, *modes])}) are more than a mean or "
            "first token: use ModelVectors(SentenceTransformer(NAME).encode, name=NAME) in Python"
        )
    return "cls" in modes


def _read(spec: str, file: str) -> Any:
    from transformers.utils import cached_file

    path = cached_file(
        spec,
        file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
